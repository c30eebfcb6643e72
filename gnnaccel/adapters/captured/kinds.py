"""Modules and their calls by form: what is known of each, until it is captured and after."""
from __future__ import annotations

import weakref
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnnaccel.adapters.captured import graphs
from gnnaccel.adapters.captured.reads import Reads
from gnnaccel.adapters.captured.restored import equal
from gnnaccel.adapters.captured.state import Snapshot
from gnnaccel.dispatch.graph.tensor_ref import TensorRef, version_of
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.run.skinny_matmul import settings

SMALL = 1 << 16  # numbers in a tensor on the host whose contents are compared
_function_modes = torch._C._len_torch_function_stack
#: what is known of modules, by their ids
entries: dict[int, Module] = {}


class Kind:
    """Calls of one form. ``refs``: of the tensors of the last call; ``copied``: those that differ
    from call to call; ``calls``: how many in a row repeated each other."""

    def __init__(self) -> None:
        self.refs: list[TensorRef] = []
        self.copied: list[bool] = []
        self.calls, self.tries = 0, 0
        self.snapshot: Snapshot | None = None
        self.reads: Reads | None = None
        self.elsewhere = Elsewhere([])
        self.captured: graphs.Captured | None = None
        self.why: str | None = None

    def again(self, tensors: list[Tensor]) -> bool:
        """Whether this call has the graph of the last one. Floating-point tensors other than that
        one's are to be copied from now on."""
        new = [TensorRef(t) for t in tensors]
        before, self.refs = self.refs, new
        if len(before) != len(tensors):
            self.copied = [False] * len(tensors)
            return False
        alike = True
        for i, (ref, t) in enumerate(zip(before, tensors)):
            if self.copied[i] or ref.unmoved(t):
                continue
            if t.is_floating_point() and t.numel():
                self.copied[i] = True
            else:
                alike = False
        return alike

    def repeats(self, tensors: list[Tensor]) -> bool:
        """Whether the tensors are those of the last call, or may be copied into these."""
        return len(self.refs) == len(tensors) and all(
            copied or (ref() is t and ref.version == t._version and ref.pointer == t.data_ptr())
            for ref, t, copied in zip(self.refs, tensors, self.copied))

    def stands(self) -> bool:
        """Whether the module's state is unchanged."""
        return (self.snapshot is not None and self.snapshot.holds() and self.reads is not None
                and self.reads.holds() and self.elsewhere.holds())

    def notes(self, snapshot: Snapshot, reads: Reads, device: torch.device) -> None:
        """Note the state of a module that runs on ``device``."""
        self.snapshot, self.reads = snapshot, reads
        self.elsewhere = Elsewhere([t for t in self._held() if t.device.type != device.type
                                    and t.numel() <= SMALL])

    def copyable(self, tensors: list[Tensor]) -> bool:
        """Whether a replay may run on copies of these tensors: the module compares none by
        identity, or holds none of those that are copied."""
        if self.reads is None or self.snapshot is None or not self.reads.compares:
            return True
        held = {*map(id, self._held())}
        return not any(copied and id(t) in held for t, copied in zip(tensors, self.copied))

    def gradients(self, tensors: list[Tensor]) -> Gradients:
        """Those of these tensors and of the ones that the module holds."""
        return Gradients([t for t in (*tensors, *self._held()) if t.is_leaf])

    def _held(self) -> list[Tensor]:
        assert self.reads is not None and self.snapshot is not None
        return [*self.snapshot.tensors, *self.snapshot.read, *self.reads.read]

    def forget(self) -> None:
        self.calls, self.captured, self.snapshot, self.reads = 0, None, None, None


class Elsewhere:
    """Tensors on the host, of a module that runs on a GPU: a CUDA graph has the numbers that they
    held when it was captured, and not all writes to them are counted."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._were = tensors, [t.detach().clone() for t in tensors]

    def holds(self) -> bool:
        """Whether they hold the numbers that they held."""
        return all(map(equal, self._tensors, self._were))


class Gradients:
    """The gradients of some leaves as they are now."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self._leaves = leaves
        self._grads = [t.grad for t in leaves]
        self._versions = [0 if g is None else version_of(g) for g in self._grads]

    def moved(self) -> bool:
        """Whether a leaf has another one, or one was written."""
        now = Gradients(self._leaves)
        return not all(map(is_, now._grads, self._grads)) or now._versions != self._versions


class Module:
    """A module's calls, by their form. ``open``: it is never captured, but modules in it may be;
    ``closed``: neither is; ``calls``: how many in a row repeated no other one."""

    def __init__(self, module: nn.Module) -> None:
        key = id(module)
        self.ref = weakref.ref(module, lambda _: entries.pop(key, None))
        self.kinds: dict[tuple, Kind] = {}
        self.open = not any(_of_graphs(m) for m in module.modules())
        self.closed = False
        self.calls = 0


def _of_graphs(module: nn.Module) -> bool:
    return any(cls.__name__ in ("MessagePassing", "HeteroConv") for cls in type(module).__mro__)


class Call(NamedTuple):
    form: Any
    tensors: list[Tensor]
    args: tuple
    kwargs: dict
    device: torch.device


def key_of(form: Any, tensors: list[Tensor], module: nn.Module, device: torch.device) -> tuple:
    """Key of calls of one form; the configuration's epoch comes last."""
    config = configs.current()
    same = [*map(id, tensors)]
    given_twice = tuple(map(same.index, same)) if len(set(same)) < len(same) else ()
    return (form, given_twice,
            *[(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors],
            torch.is_grad_enabled(), module.training, torch.is_autocast_enabled(device.type),
            settings(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
            torch.get_default_device() if _function_modes() else None,
            bool(parametrize._cache_enabled),
            config.epoch if config is not None else 0)
