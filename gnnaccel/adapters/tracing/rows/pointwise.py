"""Stand-ins for tensors while a ``message`` of pointwise operations is traced.

A stand-in (`Rows`) has a tree of operations whose leaves are rows at the ends of the edge, at the
edge, and parameters. Pointwise operations make larger trees. What mixes channels is done before the
kernels: linear maps of a sum are moved to each of its parts, so that the map of a node's row runs
once for the node. Other operations on channels (`channels`) are done where all leaves are at one
end, or else of what kernels write for each edge.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnnaccel.adapters.tracing.attention.traced import (VIEWS, Make, Param, Value, _call, applied,
                                                        shaped)
from gnnaccel.adapters.tracing.code import function_names
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer.devices import MOVES, still
from gnnaccel.adapters.tracing.noted import born
from gnnaccel.adapters.tracing.rows import operators
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS, TRUE
from gnnaccel.adapters.tracing.rows.row_count import RowCount, counted
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence
from gnnaccel.dispatch.generated.tree import (Leaf, Number, Tree, another, computed,
                                                leaves)

_SAME = frozenset(("contiguous", "detach", "float", "to", "type_as", "long", "int", "bool"))
#: operations that mix the channels of a row
_OF_ROWS = frozenset(("sum", "mean", "norm", "normalize", "layer_norm", "softmax", "embedding",
                      "std", "var", "amax", "amin", "logsumexp", "log_softmax", "softmin",
                      "cumsum"))
#: which may also be taken over all edges
_OF_ALL = frozenset(("sum", "mean", "norm", "std", "var", "amax", "amin", "max", "min",
                     "logsumexp"))
FEW = 4  # channels that may be summed where both ends meet, in the kernels
WHOLE = object()  #: among the ``names`` of a `Leaf`: its rows are whole numbers, not floats
NODES_TOO = object()  #: likewise: they may have a row for each node in place of each edge
TRUTH = object()  #: likewise: they are 1 where something is true, made of whole numbers
#: methods that write the result of an operation over its first argument, of the same dtype
IN_PLACE = {f"{name}_": name for name in OPERATIONS.keys() - TRUE | {"masked_fill"}}
#: operations on whole numbers alone: with a remainder, others would jump
_OF_WHOLE = ("mod", "remainder", "floordiv", "floor_divide")
MAPS = frozenset(("linear", "matmul", "mm", "bmm"))
_PIECES = ("chunk", "split", "tensor_split", "unbind")
_REPEATED, _TURNED = ("expand", "expand_as", "repeat"), ("transpose", "swapaxes", "permute", "t")
#: others tell the form of the result
_OF_MASKS = ("any", "all", "sum", "nonzero", "where")
_OF_FIRST = frozenset((*VIEWS, *_SAME, *_PIECES, *_REPEATED, *_TURNED, "clone"))
#: other operations that stand-ins have
NAMES = _OF_FIRST | _OF_ROWS | MAPS | {"mT", *MOVES, *_OF_MASKS}


class _Born(type):
    """Numbers rows as they are made."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        rows = super().__call__(*args, **kwargs)
        rows.number, own = born()
        if own:
            other("kept_values").make_own(rows)
        return rows


class Rows(Value, metaclass=_Born):
    """Stand-in for rows. ``tree``: how a number of a row is computed; ``meta``: how it looks;
    ``memory``: all rows that lie in the same memory, None for these alone; ``of_caller``: that is
    an argument of the call; ``copied``: they lie in a copy; ``held``: others are made of
    them later, as they are now; ``number``: of all that a message makes; ``own``: the tensor that
    the user gets, of those that are one (`kept_values.Own`)."""

    rank = 1
    memory: list[weakref.ref[Rows]] | None = None
    of_caller = copied = held = written = False
    number = 0
    own: Any = None

    def __init__(self, tree: Tree, meta: Tensor):
        self.tree, self.meta = tree, meta

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return Sequence((RowCount(), *self.meta.shape[1:]))
        if name == "dtype":
            return self.meta.dtype
        if name == "mT":
            return self.transpose(-1, -2)
        if name in IN_PLACE:
            return partial(self.overwritten, IN_PLACE[name], getattr(Tensor, name), self)
        if not (name in OPERATIONS or name in NAMES or name in function_names.NAMES):
            raise Unseen
        function = getattr(Tensor, name)
        return lambda *args, **kwargs: self.operate(
            name, function, (self, *args), function_names.by_torchs_names(function, kwargs))

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, place: Any) -> Any:
        found = other("rows.chosen").picked(self, place)
        return self.operate("getitem", operator.getitem, (self, place), {}) if (
            found is None) else found

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name == "detach":
            return self.sharing(other("rows.pieces").detached(self))
        if name in MOVES:
            name, function, args, kwargs = still(name, args, kwargs)
            if not name:
                return self
        result = self._operated(name, function, args, kwargs)
        if torch.is_grad_enabled() or result is self or not isinstance(result, (Rows, tuple)):
            return result  # torch gives the tensor itself, too
        return other("rows.pieces").detached(result)

    def _operated(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        args = tuple(one.alone() if isinstance(one, Rows) else one for one in args)
        kwargs = {k: one.alone() if isinstance(one, Rows) else one for k, one in kwargs.items()}
        if self.meta.dtype == torch.bool and name in _OF_MASKS:
            found = other("rows.chosen").asked(name, self, args, kwargs)
            if found is not None:
                return found
        if name not in VIEWS and counted((args, *kwargs.values())):
            raise Unseen
        if name in _OF_FIRST and (not args or getattr(args[0], "tree", None) is not self.tree):
            raise Unseen  # it has another's form
        if name in VIEWS and name != "contiguous":
            return other("rows.blocks").view(self, shaped(function, args, kwargs))
        if name == "clone":
            copy = Rows(self.tree, shaped(function, args, kwargs))
            copy.copied = True
            return copy
        if name in _SAME:
            if "copy" in kwargs or any(one is True for one in args):
                raise Unseen
            return self.sharing(self.kept(shaped(function, args, kwargs)))
        if name == "dropout":
            return other("rows.channels").dropout(*args, **kwargs)
        if name in MAPS:
            return _mapped([args[0]], name, function, args[1:], kwargs)
        if name in ("getitem", "index_select") and isinstance(args[0], Param):
            return other("rows.channels").looked_up(function, *args, **kwargs)
        if name in _OF_ALL:
            found = other("rows.totals").of_all(self, function, args, kwargs)
            if found is not None:
                return found
        if name in _PIECES:
            return tuple(map(self.sharing,
                             other("rows.pieces").several(self, function, args, kwargs)))
        if name in _OF_ROWS:
            return other("rows.channels").mixed(self, name, function, args, kwargs)
        if name in function_names.COMPOSED:
            return getattr(other("rows.composed"), name)(*args, **kwargs)
        if name in function_names.BY_TORCH:
            return other("rows.products").by_torch(name, function, args, kwargs)
        if name in ("getitem", *_TURNED, *_REPEATED):
            change = (other("rows.pieces").piece if name == "getitem"
                      else Rows._expanded if name in _REPEATED else other("rows.channels").turned)
            return self.sharing(change(self, function, args, kwargs))
        if name in _OF_WHOLE and not self.meta.is_floating_point():
            return other("rows.whole_numbers").calculated(name, function, args, kwargs)
        if name == "pow" and _is_power(args, kwargs):
            return other("rows.products").product(function, args, kwargs)
        if name not in OPERATIONS:
            raise Unseen
        return other("rows.whole_numbers").calculated(name, function, args, kwargs)

    def _expanded(self, function: Callable, args: tuple, kwargs: dict) -> Rows:
        meta, shape = applied(function, args, kwargs), self.meta.shape
        if meta.dim() != len(shape) or any(new != old != 1 for new, old in zip(meta.shape, shape)):
            return other("rows.products").repeated(function, args, kwargs)  # several side by side
        return Rows(another(self.tree), meta)

    def alone(self) -> Rows:
        """These rows, for themselves."""
        return self

    def sharing(self, found: Rows) -> Rows:
        """``found``, which lies in this one's memory."""
        if found is not self:
            self.memory = self.memory or [weakref.ref(self)]
            self.memory.append(weakref.ref(found))
            found.memory, found.of_caller = self.memory, self.of_caller
            found.copied = self.copied
        return found

    def changed(self) -> None:
        if self.of_caller:
            raise Unseen
        for one in self.memory or [weakref.ref(self)]:
            rows = one()
            if rows is not None:
                rows.__class__ = Changed

    def overwritten(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Rows:
        if name not in IN_PLACE.values():
            raise Unseen
        return self.becomes(_call(name, function, args, kwargs))

    def becomes(self, result: Any) -> Rows:
        # under no_grad, gradients of these rows would flow on; repeated numbers torch refuses
        if (not torch.is_grad_enabled() or not isinstance(result, Rows) or 0 in self.meta.stride()
                or (result.meta.shape, result.meta.dtype) != (self.meta.shape, self.meta.dtype)):
            raise Unseen
        after = object.__new__(type(result))
        after.__dict__ = {**vars(result), "meta": self.meta, "memory": None, "written": True}
        held = self.held
        self.changed()
        if held:  # what is made of these later is made of them as they were: it is refused
            return after
        self.__class__, self.__dict__ = type(after), after.__dict__
        return self

    def through(self, module: nn.Module) -> Rows:
        """A module of torch's that looks at all edges."""
        result = other("rows.channels").through(self, module)
        return result if torch.is_grad_enabled() else other("rows.pieces").detached(result)

    def kept(self, meta: Tensor) -> Rows:
        """These numbers in another dtype: of truth values zeros and ones."""
        if self.meta.dtype != meta.dtype:
            return other("rows.whole_numbers").kept(self, meta)
        return self if self.meta.stride() == meta.stride() else Rows(another(self.tree), meta)

    def beside(self, tensors: Any, dim: int) -> Any:
        return other("rows.beside").together(tensors, dim)

    def __setitem__(self, place: Any, value: Any) -> None:
        other("rows.beside").assign(self, place, value)

    def __invert__(self) -> Any:
        return self.operate("logical_not", torch.logical_not, (self,), {})

    def __abs__(self) -> Any:
        return self.operate("abs", torch.abs, (self,), {})

    __hash__ = None  # type: ignore[assignment]  # as it compares channel by channel


def _is_power(args: tuple, kwargs: dict) -> bool:
    """Whether floats are raised to powers that are no number, or a number is to theirs."""
    return not kwargs and len(args) == 2 and not (
        isinstance(args[0], Rows) and type(args[1]) in NUMBERS) and all(
        [one.meta.is_floating_point() for one in args if isinstance(one, Value)])


class Changed(Rows):
    """Rows that were changed in place, in the hands of whoever had them before."""

    def __getattribute__(self, name: str) -> Any:
        raise Unseen


operators.operate(
    Rows, ("gt", "lt", "ge", "le", "eq", "ne", "pow", "mod", "floordiv", "and_", "or_"))
operators.overwrite(Rows)


class Deferred(Rows):
    """Rows that are made only where an operation asks for them: `joined`, Unseen where that
    cannot be."""

    rank = 3

    def __init__(self, meta: Tensor):
        self.meta = meta
        self._alone: Rows | None = None

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        args = tuple([one.alone() if one is self else one for one in args])
        return self.alone().operate(name, function, args, kwargs)

    def alone(self) -> Rows:
        if self._alone is None:
            with torch.enable_grad():  # others may ask for it, too
                self._alone = self.sharing(self.joined())
        return self._alone

    @property
    def is_made(self) -> bool:
        """Whether an operation has asked for it as rows."""
        return self._alone is not None

    def joined(self) -> Rows:
        """The rows, made now."""
        raise Unseen


def rows(end: str, make: Make, meta: Tensor, name: str) -> Rows:
    """Stand-in for the argument ``name`` of ``propagate``."""
    stand_in = made_rows(end, make, meta, frozenset((name,)), (make,))
    if meta.dtype == torch.bool:
        stand_in = other("rows.whole_numbers").of_caller(stand_in)
    stand_in.of_caller = end == "e"  # rows of nodes are gathered, into memory of their own
    return stand_in


def made_rows(end: str, make: Make, meta: Tensor, names: frozenset[Any],
              roots: tuple[Make, ...]) -> Rows:
    """Rows that ``make`` computes; all else as of `Leaf`."""
    whole_numbers = not meta.is_floating_point() and meta.dtype != torch.bool
    names = names | {WHOLE} if whole_numbers else names - {WHOLE}
    return Rows(Leaf(end, make, tuple(meta.shape[1:]), names, roots), meta)


def _mapped(*args: Any) -> Rows:
    return other("rows.linear_maps").map_of(*args)


def tree_of(value: Any, meta: Tensor) -> Any:
    """A tree of an argument of an operation whose result looks like ``meta``."""
    if isinstance(value, Rows):
        if any(leaf.blocks for leaf in leaves(value.tree)):
            if value.meta.shape != meta.shape:
                raise Unseen
        return value.tree
    if isinstance(value, Param):
        shape = (1,) * (meta.dim() - value.meta.dim()) + tuple(value.meta.shape)
        if shape[0] != 1 or not value.meta.is_floating_point():
            raise Unseen
        return Leaf("p", value.make, shape[1:], value.names, value.roots, value)
    if type(value) in NUMBERS:
        return Number(float(value))
    if type(value) in (str, type(None)):
        return value
    raise Unseen


def about(*trees: Tree) -> tuple[str, frozenset[Any], tuple[Make, ...]]:
    """The end that these trees are at, the arguments and tensors of which they are made; Unseen
    where they are at several, or where one has no rows, as numbers have none."""
    ends = {frozenset(leaf.end for leaf in leaves(tree)) - {"p"} for tree in trees}
    found = [leaf for tree in trees for leaf in leaves(tree)]
    if len(ends) != 1 or any(len(end) != 1 for end in ends) or any(leaf.blocks for leaf in found):
        raise Unseen
    return (next(iter(ends.pop())), frozenset().union(*(leaf.names for leaf in found)),
            tuple(dict.fromkeys(root for leaf in found for root in leaf.roots)))


def whole(tree: Tree, tail: Any, given: Any) -> Tensor:
    """[rows, *tail]: a tree at one end, computed."""
    if type(tree) is Leaf and tree.end != "p":  # most are: `computed`, without its calls
        t = tree.make(given)
        t = t if t.shape[1:] == tree.tail else t.reshape(t.shape[0], *tree.tail)
    else:
        t = computed(tree, given)
    return t if t.shape[1:] == tail else t.expand(-1, *tail)  # `sized`, without its call


def sized(t: Tensor, tail: Any) -> Tensor:
    """What was computed of a tree, as rows of the shape ``tail``."""
    return t if t.shape[1:] == tail else t.expand(-1, *tail)


def hold(parts: Any) -> Any:
    """``parts``, of which something is made later: from now on they may not be filled."""
    for one in parts:
        if isinstance(one, Rows):
            one.held = True
    return parts
