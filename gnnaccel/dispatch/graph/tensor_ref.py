"""References to tensors that say whether a tensor is still the same.

A tensor is the same as before if it is this very object, or an alias of the same memory, and no
in-place operation wrote to it. torch counts such writes in its version. It counts no writes through
``.data`` or through numpy; nobody can see those. Replacing ``.data`` moves a tensor to other memory
and leaves object and version the same, so where that matters the address is compared as well.

There are four rules, from loose to strict:

* `MemoryRef.unwritten`: any tensor over the same memory. Place, shape and the like, which have to
  be equal too, are in the key under which the reference is kept.
* `Places.kept`: these objects, their numbers where they were, whatever was written to them.
* `TensorMap`: this object.
* `TensorRef.unmoved`: this object, its numbers where they were.

Tensors made in inference mode count no writes. No reference is made of them: ask `unversioned`.
"""
from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from gnnaccel.dispatch.policy.names import IdentityMap

V = TypeVar("V")
_Gone = Callable[[weakref.ref], Any]


class TensorRef(weakref.ref):
    """A weak reference to a tensor as it is now. Called, it gives the tensor, or None."""

    __slots__ = ("version", "pointer")
    version: int
    pointer: int

    if TYPE_CHECKING:
        def __call__(self) -> Any: ...

    def __new__(cls, tensor: Any, gone: _Gone | None = None, pointer: bool = True) -> TensorRef:
        """A reference to ``tensor``. ``gone`` is called when it dies. ``pointer`` False: no look at
        its memory, which stand-ins do not have; `unmoved` is then never asked."""
        self = super().__new__(cls, tensor, gone)
        self.version = tensor._version
        self.pointer = tensor.data_ptr() if pointer else 0
        return self

    def __init__(self, tensor: Any, gone: _Gone | None = None, pointer: bool = True) -> None:
        """Nothing: `__new__` has done all."""

    def unmoved(self, tensor: Any) -> bool:
        """Whether this is the tensor, nothing was written into it, and its numbers lie where they
        lay."""
        return (self() is tensor and self.version == tensor._version
                and self.pointer == tensor.data_ptr())


class Places:
    """Where tensors are, such as those that an optimizer writes in each step."""

    __slots__ = ("_refs", "pointers")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._refs = list(map(weakref.ref, tensors))
        self.pointers = list(map(Tensor.data_ptr, tensors))

    def kept(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, in their order, and their numbers lie where they lay. No
        Python function is called for each."""
        return (len(tensors) == len(self._refs)
                and all(map(operator.is_, tensors, [ref() for ref in self._refs]))
                and list(map(Tensor.data_ptr, tensors)) == self.pointers)


class MemoryRef(weakref.ref):
    """A weak reference to the memory of a tensor, for all that use it."""

    __slots__ = ("version", "tensor")
    version: int
    tensor: bool

    def __new__(cls, tensor: Any, gone: _Gone | None = None) -> MemoryRef:
        """A reference to a tensor's storage; or to the index arrays that a host keeps
        (`EdgeArrays`) themselves, since a view may use their memory in place."""
        is_tensor = isinstance(tensor, Tensor)
        self = super().__new__(cls, tensor.untyped_storage() if is_tensor else tensor, gone)
        self.version, self.tensor = tensor._version, is_tensor
        return self

    __init__ = weakref.ref.__init__  # does nothing, without a call of Python's

    def unwritten(self, tensor: Any) -> bool:
        """Whether ``tensor`` uses this memory, and nothing was written into it."""
        return (self.version == tensor._version
                and self() is (tensor.untyped_storage() if self.tensor else tensor))


class Derived:
    """Base of structures that are built from tensors of their callers', which they do not keep
    alive."""

    # weak references to the tensors of each caller who found this, the newest first: equal in
    # value, and alive for as long as that caller's call, so that another thread's may go first
    _sources: list[tuple[weakref.ref, ...]]
    _MOST = 16  # callers, of those whose tensors are alive
    _binding = threading.RLock()

    def bind(self, *tensors: Any) -> None:
        """Tensors to build from, equal in value to those of the constructor."""
        sources = self._sources
        for ref, t in zip(sources[0], tensors):
            if ref() is not t:
                break
        else:
            return
        with self._binding:
            others = [refs for refs in sources if all([ref() is not None for ref in refs])]
            sources[:] = [tuple(map(weakref.ref, tensors)), *others][:self._MOST]

    def _alive(self) -> list[Any]:
        """Bound tensors that are all alive. RuntimeError where there are none."""
        for refs in (*self._sources,):  # others may be bound meanwhile
            tensors = [ref() for ref in refs]
            for t in tensors:
                if t is None:
                    break
            else:
                return tensors
        raise RuntimeError("the edges that this structure is built from are gone; call bind() with "
                           "live ones first")


def version_of(tensor: Tensor) -> int:
    """The count of writes to a tensor; 0 where they are not counted, in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def unversioned(tensors: Iterable[Any]) -> bool:
    """Whether writes into one of these are not counted."""
    for t in tensors:
        if t.is_inference():
            return True
    return False


class TensorMap(IdentityMap[V]):
    """Values for tensors as they are: gone with the tensor, and once something is written to it."""

    _ref = staticmethod(functools.partial(TensorRef, pointer=False))

    def get(self, tensor: Tensor) -> V | None:
        """The value for this very tensor, unwritten since; or None."""
        entry: Any = self.entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[0].version != tensor._version:
            return None
        return entry[1]
