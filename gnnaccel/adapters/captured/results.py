"""The results of a module's call: how they depend on each other, and comparing a replay's.

Backward through some of the results of a call, as one CUDA graph.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.captured.reads import is_library


class Refused(Exception):
    """The call cannot be captured; the message says why."""


class Tied:
    """The results ``found`` of a call. ``groups``: a number for each of those that want gradients;
    where two are equal, a backward through one result frees memory that the other's needs.
    ``leaves``: tensors that get gradients. ``why``: why copies of the results cannot be handed out,
    or None."""

    def __init__(self, found: list[Tensor], held: list[Tensor]) -> None:
        """``held``: arguments, and tensors of the module."""
        wanted = [out for out in found if out.requires_grad]
        records = [_record(out) for out in wanted]
        self.leaves = [out for out in wanted if out.is_leaf]
        self.leaves += [node.variable for record in records for node in record if _adds_up(node)]
        self.groups = _groups(records)
        places = [out.data_ptr() for out in found if out.numel()]
        memory = {t.untyped_storage().data_ptr() for t in held}
        self.why: str | None = None
        if any(out.untyped_storage().data_ptr() in memory for out in found):
            self.why = "its result uses the memory of an argument, or of the module"
        elif len(set(places)) < len(places) or _overlap(found):
            self.why = "two of its results use the same memory"
        elif len(wanted) > 2 and any(_of_the_user(node) for record in records for node in record):
            # its gradients through two of three are not the sum of those through each
            self.why = "several results that want gradients, by a torch.autograd.Function"
        elif any(out.grad_fn in record and out.grad_fn is not other.grad_fn
                 for out in wanted for other, record in zip(wanted, records)):
            self.why = "one of its results is computed from another one"


def _overlap(found: list[Tensor]) -> bool:
    """Whether a write to one of these is one to another, too."""
    seen: dict[int, Tensor] = {}
    for t in found:
        if not t.numel():
            continue
        memory = t.untyped_storage()
        size = memory.nbytes() // t.element_size()
        marks = seen.get(memory.data_ptr())
        if marks is None:
            marks = torch.zeros(size, dtype=torch.bool, device=t.device)
            seen[memory.data_ptr()] = marks
        elif marks.numel() != size:
            return True  # numbers of other sizes over one memory
        once = [1 if step == 0 else n for n, step in zip(t.shape, t.stride())]  # of expanded ones
        own = marks.as_strided(once, t.stride(), t.storage_offset())
        if bool(own.any()):
            return True
        own.fill_(True)
    return False


def _of_the_user(node: Any) -> bool:
    """Whether ``node`` is of a Function that belongs to no installed package."""
    function = getattr(node, "_forward_cls", None)
    return function is not None and not is_library(function.__module__)


def _adds_up(node: Any) -> bool:
    """Whether ``node`` adds up the gradients of a leaf."""
    return hasattr(node, "variable")


def _record(out: Tensor) -> set:
    """The nodes of autograd behind ``out``."""
    nodes = set() if out.grad_fn is None else {out.grad_fn}
    todo: list[Any] = list(nodes)
    while todo:
        new = {one for one, _ in todo.pop().next_functions if one is not None} - nodes
        nodes |= new
        todo += new
    return nodes


def saved_for(out: Tensor, tensors: list[Tensor]) -> list[int]:
    """The places of those among ``tensors`` that the backward of ``out`` reads."""
    memory = {t.untyped_storage().data_ptr() for node in _record(out) for t in _saved(node)
              if t.layout is torch.strided}
    return [at for at, t in enumerate(tensors) if t.layout is torch.strided
            and not t.is_inference() and t.untyped_storage().data_ptr() in memory]


def _saved(node: Any) -> list[Tensor]:
    """The tensors that a node of autograd keeps for its backward."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        held: list[Any] = [node.saved_tensors]
    else:
        held = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [t for value in held for t in (value if isinstance(value, tuple) else (value,))
            if isinstance(t, Tensor)]


def _groups(records: list[set]) -> list[int]:
    owner: dict[Any, int] = {}
    numbers = list(range(len(records)))
    for k, record in enumerate(records):
        inner = [node for node in record if not _adds_up(node)]
        for joined in {numbers[owner[node]] for node in inner if node in owner}:
            numbers = [numbers[k] if n == joined else n for n in numbers]
        owner.update(dict.fromkeys(inner, k))
    return numbers


def alike(found: list, expected: list, what: str) -> None:
    """Refused unless both are equal but for rounding, relative to the largest number of all."""
    sizes = [float(t.detach().abs()[t.isfinite()].max()) for t in expected
             if t is not None and t.is_floating_point() and bool(t.isfinite().any())]
    for a, b in zip(found, expected):
        if a is None or b is None:
            if a is not b:
                raise Refused(f"{what} of a replay is missing")
        elif not a.is_floating_point():
            if not torch.equal(a, b):
                raise Refused(f"{what} of a replay differs from that of the call")
        else:
            near = 1e-4 if a.dtype in (torch.float32, torch.float64) else 2e-2
            if not torch.allclose(a.detach().double(), b.detach().double(), rtol=near,
                                  atol=near * max(sizes, default=0.0), equal_nan=True):
                raise Refused(f"{what} of a replay differs from that of the call")


# --- backward through some of them ----------------------------------------------------------------

_ALIGN = 16  # numbers from one gradient to the next begin at multiples of these


class Backward:
    """Gradients of ``leaves`` through those of the results that ``numbers`` has. ``replay`` is set
    by whoever captures `run`.

    The gradients of each dtype lie side by side, so that a replay copies them by one operation.
    """

    def __init__(self, numbers: Sequence[int], leaves: list[Tensor]) -> None:
        self._numbers, self._leaves = numbers, leaves
        self._places: list[tuple[int, tuple, tuple, int] | None] = []
        self._flat: list[Tensor] = []
        self.replay: Callable[[], None]

    @staticmethod
    def all_of(results: int, leaves: list[Tensor]) -> list[Backward]:
        """One through all results and, where there are several, one through each. A gradient of
        zeros in the place of a missing one would not do: a derivative may be infinite."""
        each = [[n] for n in range(results)] if results > 1 else []
        return [Backward(numbers, leaves) for numbers in (range(results), *each)]

    def expected(self, outs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        """The gradient of each leaf, None where no result depends on it. The record of autograd is
        kept, for the other ones."""
        return list(torch.autograd.grad(
            [outs[n] for n in self._numbers], self._leaves, [grads[n] for n in self._numbers],
            retain_graph=True, allow_unused=True))

    def run(self, outs: list[Tensor], grads: list[Tensor], device: torch.device) -> None:
        """What is captured. Raises Refused."""
        found = self.expected(outs, grads)
        groups: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for g in found:
            if g is None:
                self._places.append(None)
                continue
            if g.layout is not torch.strided:
                raise Refused("a gradient is sparse")
            offset = sizes.get(g.dtype, 0)
            sizes[g.dtype] = offset + -(-g.numel() // _ALIGN) * _ALIGN
            groups.setdefault(g.dtype, []).append(g)
            stride = torch.empty(g.shape, dtype=g.dtype, device="meta").stride()
            self._places.append((list(groups).index(g.dtype), tuple(g.shape), stride, offset))
        self._flat = [torch.empty(sizes[dtype], dtype=dtype, device=device) for dtype in groups]
        for (dtype, members), one in zip(groups.items(), self._flat):
            at = [p for g, p in zip(found, self._places) if g is not None and g.dtype is dtype]
            torch._foreach_copy_([one.as_strided(*p[1:]) for p in at if p is not None], members)

    def again(self) -> list[Tensor | None]:
        """Copies of the gradients, after a replay. Writes to one of them are none to the others,
        as would be counted of views."""
        self.replay()
        flat = [one.clone() for one in self._flat]
        return [None if at is None else flat[at[0]].as_strided(*at[1:]).data
                for at in self._places]

    def let_go(self, used: list[int]) -> None:
        """Forget the tensors that only a capture needs, and the leaves that are not ``used``."""
        self._leaves, self._places = [], [self._places[at] for at in used]


def used_of(ways: list[Backward]) -> list[int]:
    """The leaves that have a gradient by one of these ways."""
    return [at for at, places in enumerate(zip(*[way._places for way in ways]))
            if any(place is not None for place in places)]


def through(ways: list[Backward], used: list[int], leaves: int) -> list[Tensor | None]:
    """The gradients of so many leaves through the results that are ``used``, of ``ways`` that
    `Backward.all_of` gave."""
    whole, *each = ways
    if not each or len(used) == len(each):
        return whole.again() if used else [None] * leaves
    total: list[Tensor | None] = [None] * leaves
    for n in used:
        total = [b if a is None else a if b is None else a + b
                 for a, b in zip(total, each[n].again())]
    return total
