"""Stand-ins for functions of PyG and torch_scatter while a ``message`` or an ``aggregate`` is
traced: reductions over the edges that enter a node, degrees, the softmax over neighbours.
"""
from __future__ import annotations

import functools
import math
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.code import kinds, naming
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_layer import by_name, has_name
from gnnaccel.adapters.tracing.nodes import node_wholes
from gnnaccel.adapters.tracing.nodes.node_values import EdgeRows, NodeCount, NodeValue, Steps
from gnnaccel.adapters.tracing.rows import (channels, pieces, pointwise, rearranged, stacks,
                                            zero_rows)
from gnnaccel.adapters.tracing.rows.piles import Pile
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import UP_TO_LAST, Along, Special
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import Number

REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min", "amax": "max",
            "amin": "min"}
#: functions of torch_scatter, with the reduction that is in their names
_OF_TORCH_SCATTER = {"scatter": None, "scatter_add": "sum", "scatter_sum": "sum",
                     "scatter_mean": "mean", "scatter_max": "max", "scatter_min": "min"}


class GraphFunctions(Steps):
    """The `Steps` of one message, with its ``aggregate`` where that is the user's own. ``sizes``:
    the arguments of ``propagate`` that say how many rows results have, and numbers that do;
    ``sized``: whether each reduction is told how many; ``by_rows``: whether one is computed of
    `EdgeRows`; ``sending``: how many nodes may send at most, by tables with a row for each;
    ``up_to_edges``: whether no more may receive than there are edges."""

    by_rows = up_to_edges = False
    counts_results = False  # whether numbers may say how many rows results have

    def __init__(self, layer: Any):
        super().__init__()
        self.names, self.watched = layer._traced_manner.names, layer._traced_watched
        self.counts = layer._traced_counts
        self.sizes: set[str | int] = set()
        self.sending: list[int] = []
        self.sized = True

    # --- what reduces -----------------------------------------------------------------------------

    def scatter(self, src: Any, index: Any, dim: Any = 0, dim_size: Any = None,
                reduce: Any = "sum") -> Any:
        """PyG's ``scatter``."""
        if type(index) is NodeValue:
            return node_wholes.scatter(src, index, dim, dim_size, reduce)
        if isinstance(src, stacks.Stacked):
            return src.reduced(lambda rows: self.scatter(rows, along(index, dim), 0, dim_size,
                                                         reduce), dim)
        if type(src) is Pile:
            return self._piled(lambda rows: self.scatter(rows, index, 0, dim_size, reduce), src,
                               dim)
        index = along(index, dim)
        if type(index) is Special and index.end == "j" and reduce in ("sum", "add"):
            return self.added(dim_size, src, index, dim)
        check_rows(src, index, dim)
        if type(reduce) is not str or reduce not in REDUCES:
            raise Unseen
        # on a GPU torch_scatter gives the gradient of equal numbers to one of them
        if is_torch_scatters() and REDUCES[reduce] in ("max", "min"):
            raise Unseen
        whole = self._check_size(dim_size)
        if type(src) is pointwise.Rows and type(src.tree) is Number:  # ones, to count edges
            if REDUCES[reduce] != "sum":
                raise Unseen
            counted = functools.partial(_sums, src.tree.value, src.meta)
            result = self.made(counted, (index, dim_size), {}, torch.empty_like(src.meta))
        elif src.meta.dim() == 1:  # as one channel
            one: Any = self.reduced(src.unsqueeze(-1), REDUCES[reduce])
            result = one.squeeze(-1).clone()
        else:
            result = self.reduced(src, REDUCES[reduce])
        result.rows, result.alone = ("i", whole), True
        return result

    def _piled(self, reduce: Any, src: Pile, dim: Any) -> NodeValue:
        """Results of ``reduce`` for each of the piled rows, in the same dimension."""
        if not src.at or type(dim) is not int or dim not in (0, -src.meta.dim()):
            raise Unseen
        return self.made(torch.stack, (src.each(reduce), src.at), {}, torch.empty_like(src.meta))

    def _check_size(self, dim_size: Any) -> bool:
        """Whether the reduction is told how many nodes there are."""
        if dim_size is None or type(dim_size) is Special and dim_size.name == UP_TO_LAST + "i":
            self.sized = False
            return False
        if type(dim_size) is NodeCount and type(dim_size.of) is str:
            self.sizes.add(dim_size.of)
        elif type(dim_size) is NodeCount and self._counts(dim_size, "i"):
            pass  # of values that have a row for each
        elif type(dim_size) is int and self.counts_results:
            self.sizes.add(dim_size)
        elif type(dim_size) is int:  # of what goes on at the edges, which read no more rows
            self.counts.append(dim_size)
        elif type(dim_size) is not Special or dim_size.counts != "i":
            raise Unseen
        return True

    def _counts(self, value: Any, end: str) -> bool:
        """Whether ``value`` is the number of nodes at this end of the edges."""
        if type(value) is NodeCount and type(value.of) is NodeValue:
            at, whole = value.of.rows
            return whole and (at == end or self.square)
        return type(value) is Special and bool(value.counts) and (
            value.counts == end or self.square)

    def by_torch_scatter(self, function: Any, named: str | None, src: Any, index: Any,
                         dim: Any = -1, out: Any = None, dim_size: Any = None,
                         reduce: Any = "sum") -> Any:
        """torch_scatter's functions; ``named``: the reduction in the name."""
        if named is not None and reduce != "sum":
            raise Unseen  # they have no such argument
        if out is not None:
            raise Unseen
        if named in ("max", "min"):
            return self._by_itself(lambda *given: function(*given)[0], src, index, dim,
                                   dim_size), Special("")
        if reduce in ("max", "min"):
            return self._by_itself(functools.partial(function, reduce=reduce), src, index, dim,
                                   dim_size)
        reduce = named or reduce
        if reduce not in ("sum", "add", "mean"):
            raise Unseen
        if type(index) is NodeValue:
            return node_wholes.reduced(functools.partial(function, **(
                {} if named else {"reduce": reduce})), src, index, dim, dim_size)
        return self.scatter(src, index, dim, dim_size, reduce)

    def _by_itself(self, function: Any, src: Any, index: Any, dim: Any,
                   dim_size: Any) -> Any:
        """A reduction by ``function`` itself, of rows written for each edge: equal numbers, or NaN,
        come out as that alone does it."""
        if isinstance(src, stacks.Stacked):
            return src.reduced(lambda rows: self._by_itself(function, rows, along(index, dim), 0,
                                                            dim_size), dim)
        if type(src) is Pile:
            return self._piled(lambda rows: self._by_itself(function, rows, index, 0, dim_size),
                               src, dim)
        index = along(index, dim)
        check_rows(src, index, dim)
        if not (dim_size is None or type(dim_size) in (Special, NodeCount)):
            raise Unseen
        self._check_size(dim_size)
        rows = EdgeRows(channels.at_edges(src))
        result = self.made(lambda rows, index, size: function(rows, index, 0, None, size),
                           (rows, index, dim_size), {}, torch.empty_like(src.meta))
        result.rows = "i", dim_size is not None
        self.by_rows = True
        return result

    def into(self, number: float, src: Any, index: Any, dim: Any, count: Any, reduce: str,
             with_number: bool) -> Any:
        """torch's ``scatter_reduce`` into ``count`` rows that are a ``number``."""
        least = -math.inf if reduce == "amax" else math.inf
        if not is_torch_scatters() and (not with_number or number == least):
            found = self.scatter(src, index, dim, count, reduce)
            args = found, along(index, dim), count
            result = self.made(functools.partial(_elsewhere, number), args, {}, found.meta)
            result.rows, result.alone = found.rows, True
            return result

        def function(rows: Tensor, index: Tensor, dim: int, out: Any, size: int) -> Tensor:
            places = index.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
            return rows.new_full((size, *rows.shape[1:]), number).scatter_reduce(
                dim, places, rows, reduce, include_self=with_number)

        return self._by_itself(function, src, index, dim, count)

    def softmax_by_torch_scatter(self, src: Any, index: Any, dim: Any = -1,
                                 dim_size: Any = None) -> Any:
        """torch_scatter's ``scatter_softmax``."""
        return self.softmax(src, index, None, dim_size, dim)

    def softmax(self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
                dim: Any = 0) -> Any:
        """PyG's ``softmax``."""
        if type(index) is NodeValue and ptr is None:
            return node_wholes.softmax(src, index, num_nodes, dim)
        if type(num_nodes) in (int, RowCount) and not self.square and (
            getattr(index, "end", "i") != "i"):
            raise Unseen  # it is held against how many nodes receive
        if type(num_nodes) is RowCount:
            self.up_to_edges, num_nodes = True, None
        num_nodes = channels.noted(num_nodes, self.counts)

        def of(rows: pointwise.Rows, dim: Any = 0) -> pointwise.Rows:
            weights = channels.softmax(rows, index, ptr, num_nodes, dim, self.square)
            return weights if torch.is_grad_enabled() else pieces.detached(weights)

        return src.of_neighbours(of, dim) if isinstance(src, stacks.Stacked) else of(src, dim)

    def degree(self, function: Any, index: Any, num_nodes: Any = None,
               dtype: Any = None) -> NodeValue:
        """PyG's ``degree``, which ``function`` is."""
        if type(index) is NodeValue:
            return node_wholes.counted(function, index, num_nodes, dtype)
        if type(index) is not Special or not index.end or not isinstance(
            dtype, (torch.dtype, type(None))):
            raise Unseen
        return self._at_nodes(function, index, (index, num_nodes, dtype), num_nodes,
                              torch.empty(ROWS, dtype=dtype, device="meta"))

    def _at_nodes(self, function: Any, index: Special, args: tuple, count: Any,
                  meta: Tensor) -> NodeValue:
        """``function(*args)``, a value of each node at the end of the edges that ``index`` is, of
        ``count`` nodes; None: up to the last that has an edge."""
        if not index.end or count is not None and not self._counts(count, index.end):
            raise Unseen
        result = self.made(function, args, {}, meta)
        result.rows, result.alone = (index.end, count is not None), True
        return result

    def added(self, count: Any, src: pointwise.Rows, index: Special, dim: Any) -> NodeValue:
        """Sums of a message's rows for the nodes at one end of the edges, ``count`` of them, or
        None for up to the last that has an edge, which torch adds up."""
        if not isinstance(src, pointwise.Rows) or type(dim) is not int or (
            dim not in (0, -src.meta.dim())):
            raise Unseen
        meta = torch.empty_like(src.meta)
        if type(src.tree) is Number:
            sums = functools.partial(_sums, src.tree.value, src.meta)
            return self._at_nodes(sums, index, (index, count), count, meta)
        rows = EdgeRows(channels.at_edges(src))
        return self._at_nodes(_added, index, (rows, index, count), count, meta)

    def bincount(self, index: Special, minlength: Any) -> NodeValue:
        """`torch.bincount` of the ids at one end of the edges, for all of its nodes."""
        if not self._counts(minlength, index.end):
            raise Unseen
        return self._at_nodes(torch.bincount, index, (index, None, minlength), minlength,
                              torch.empty(ROWS, dtype=torch.int64, device="meta"))

    def one_hot(self, index: Any, num_classes: Any = None, dtype: Any = None) -> Any:
        """PyG's ``one_hot``."""
        if not isinstance(index, Value) or index.dim() != 1 or not isinstance(
            dtype, (torch.dtype, type(None))):
            raise Unseen
        return F.one_hot(index, num_classes).to(dtype or torch.float32)  # type: ignore[arg-type]

    # --- which functions --------------------------------------------------------------------------

    def imported(self, name: str) -> Any:
        """Stand-in for a module that a function imports itself; None of others not there yet."""
        module = sys.modules.get(name)
        self.watched.append((sys.modules, name, module))
        if module is None or module is math:
            return module or (Special("") if name in sys.stdlib_module_names else None)
        if any(module is one for one in naming.MODULES):
            return zero_rows.Torch(module, self.names)
        return self.instead(module) or Special("")  # which refuses to be asked for anything

    def instead(self, value: Any) -> Any:
        """Stand-in for a global value: itself, where it is a number; None for what is not
        known."""
        if type(value) in guarded.PLAIN and value is not None:
            return value
        package, pyg = map(sys.modules.get, ("torch_scatter", "torch_geometric"))
        if isinstance(value, types.ModuleType) and value not in naming.STOOD_FOR:
            return Package(value, self) if value in (
                pyg, *[getattr(pyg, one, None) for one in ("utils", "nn")], package,
                getattr(package, "utils", None), rearranged.package()) else None
        found = (zero_rows.instead(value, self.names, self.watched) or self._of_pyg(value)
                 or self._of_torch_scatter(value, package) or _other(value))
        return found or rearranged.instead(value)

    def _of_pyg(self, value: Any) -> Any:
        utils = sys.modules.get("torch_geometric.utils")
        if utils is None:
            return None
        for name, stands in (("scatter", self.scatter), ("softmax", self.softmax),
                             ("degree", functools.partial(self.degree, value)),
                             ("one_hot", self.one_hot)):
            if own.original(value) is own.original(getattr(utils, name)):
                if own.is_function(value, "torch_geometric", name):
                    return stands
        return node_wholes.pool_of(value)

    def _of_torch_scatter(self, value: Any, package: Any) -> Any:
        name = getattr(value, "__name__", "")
        if package is None or getattr(package, name, None) is not value or (
            own.home(value) not in ("torch_scatter", "gnnaccel")):
            return None
        if name == "scatter_softmax":
            return self.softmax_by_torch_scatter
        if name not in _OF_TORCH_SCATTER:
            return None
        return functools.partial(self.by_torch_scatter, value, _OF_TORCH_SCATTER[name])


def is_torch_scatters() -> bool:
    """Whether PyG's ``scatter`` is that of torch_scatter."""
    return getattr(sys.modules.get("torch_geometric.typing"), "WITH_TORCH_SCATTER", False)


def _sums(value: float, like: Tensor, index: Tensor, count: int | None) -> Tensor:
    """The sums of as many rows of one number as ``index`` has, in the form of ``like``."""
    rows = torch.full((len(index), *like.shape[1:]), value, dtype=like.dtype, device=index.device)
    return _added(rows, index, count)


def _elsewhere(number: float, values: Tensor, index: Tensor, count: int) -> Tensor:
    """Values per node, and a ``number`` for nodes that no edge enters."""
    without = index.new_ones(count, dtype=torch.bool).index_fill(0, index, False)
    return values.masked_fill(without.view(-1, *[1] * (values.dim() - 1)), number)


def _added(rows: Tensor, index: Tensor, count: int | None) -> Tensor:
    if count is None:
        count = int(index.max()) + 1 if len(index) else 0
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, index, rows)


def along(index: Any, dim: Any) -> Any:
    """The index, of one that was laid along this dimension."""
    if type(index) is not Along:
        return index
    if index.dim != dim:
        raise Unseen
    return index.of


def _other(value: Any) -> Any:
    """Stand-in for functions that reduce, or read the layer; None for others."""
    if value is getattr:
        return by_name
    if value is isinstance:
        return kinds.is_one_of
    if value is hasattr:
        return has_name
    if value is len:
        return kinds.length
    if value is type:
        return kinds.type_of
    if value is Tensor or value is int:
        return kinds.INT if value is int else kinds.TENSOR
    if isinstance(value, type) and issubclass(value, nn.Module):
        return kinds.Kind(value)
    name, home = getattr(value, "__name__", ""), own.home(value)
    if name == "broadcast" and home in ("torch_scatter", "gnnaccel"):
        return _broadcast
    return _counted if name == "maybe_num_nodes" and home == "torch_geometric" else None


def _broadcast(src: Any, other: Any, dim: Any) -> Along:
    """torch_scatter's ``broadcast``, of an index."""
    if type(src) is not Special or not src.end or type(dim) is not int:
        raise Unseen
    return Along(src, dim)


def _counted(index: Any, num_nodes: Any = None) -> Any:
    """PyG's ``maybe_num_nodes``, of an index."""
    if type(index) is not Special or not index.end or (
        num_nodes is not None and (type(num_nodes) is not Special
                                   or num_nodes.counts != index.end)):
        raise Unseen
    return num_nodes


def check_rows(src: Any, index: Any, dim: Any) -> None:
    """Unseen for what is no reduction of rows over the edges that enter a node."""
    if not isinstance(src, pointwise.Rows) or type(index) is not Special or index.end != "i":
        raise Unseen
    if type(dim) is not int or dim not in (0, -src.meta.dim()):
        raise Unseen


class Package:
    """Stand-in for a module with such functions. ``functions``: their stand-ins."""

    def __init__(self, module: Any, functions: Any):
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        value = vars(self._module).get(name)
        self._functions.watched.append((vars(self._module), name, value))
        stand_in = self._functions.instead(value)
        if stand_in is None and callable(value) and naming.is_torchs(
            value, self._functions.names):
            stand_in = value
        if stand_in is None:
            raise Unseen
        return stand_in
