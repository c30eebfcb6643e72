"""Messages of pointwise operations, which kernels are written for.

`form` traces the ``message`` of a layer on the stand-ins of `pointwise`, and gives what it computes
as any other `Form`. What was read of the layer is looked at again in each call.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import (beside, channels, function_names, kept_values,
                                             linear_maps, naming, pointwise, reading, reductions,
                                             stacks, supers, tracing)
from gnnaccel.adapters.pyg.propagate.expressed import Message, expressed
from gnnaccel.adapters.pyg.propagate.joined import joined
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.specials import Special
from gnnaccel.adapters.pyg.propagate.standins import NUMBERS, Form, Unseen
from gnnaccel.adapters.pyg.propagate.stock import Aggregate
from gnnaccel.adapters.pyg.propagate.traced_layer import Layer
from gnnaccel.adapters.pyg.propagate.weighted import weighted
from gnnaccel.cuda import driver
from gnnaccel.dispatch.generated.messages import EXTREMA, REDUCES, Generated, Part, Several
from gnnaccel.dispatch.generated.tree import leaves
from gnnaccel.dispatch.ops import aggregation_messages
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

_MOST_PARTS = 4  # messages side by side, each of which is a kernel
NAMES = frozenset((
    *OPERATIONS, *pointwise.NAMES, *pointwise.IN_PLACE, *function_names.BESIDE, "linear",
    "matmul", "mm", "dropout", "dim", "ndim", "shape", "size", "nn", "functional", "special",
    "multiply", "subtract", "divide", "true_divide", "negative", "absolute", "pi", "e",
    "float32", "float64", "float16", "bfloat16", "half", "int64"))
#: other names in messages: functions of PyG and others, contents of dictionaries, and what
#: they may have in a branch that is not taken
OF_MESSAGES = NAMES | function_names.NAMES | {
    "indices",  # of what sorts
    "scatter", "scatter_add", "scatter_sum", "scatter_mean", "scatter_max",
    "scatter_min", "scatter_softmax", "utils", "degree",
    "index_select", "rearrange", "no_grad", "enable_grad", "dtype", "device", "items", "keys",
    "values", "get",
    "numel", "bmm", "repeat", "stack", "zeros", "max", "item",
    "arange", "linspace", "logspace", "eye", "full", "tensor", "cpu", "cuda", "numpy", "tolist",
    "ones", "new_ones", "new_zeros", "zeros_like", "ones_like", "einsum", "any", "all", "nonzero",
    "linalg", "vector_norm", "t", "T", "bincount",
    "Tensor", "Module",  # of which something may be one
    "scatter_add_", "index_add", "index_add_",  # into zeros
    "append",  # of lists that the message makes itself, as no others come to it
    "format", "startswith", "endswith", "lower", "upper",  # of texts
    # PyG's BatchNorm, of a single row
    "batch_norm", "running_mean", "running_var", "weight", "bias", "eps"}


def prepared(function: Any, layer: Layer) -> Any:
    """``function`` with stand-ins for what it names, where it can do nothing but compute."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            if variable == supers.CELL:
                if not naming.class_for_super(function.__code__):
                    return None
            elif not may_be_read(cell.cell_contents):
                return None
        except ValueError:  # nothing is in it yet
            return None
    functions = layer._traced_functions

    def instead(name: str, value: Any) -> Any:
        if functions is None:
            return _instead(value)
        if value is super:
            return supers.above(function, layer)
        if isinstance(value, type) and value in type(layer._traced_layer).__mro__:
            return supers.Class(value, layer)
        stands = functions.instead(value)
        if stands is None:
            stands = layer._traced_global(function.__globals__, name, value)
        if stands is None and value is not None and not naming.is_known(
            value, layer._traced_manner.names):
            return Special("")  # a branch that is not taken may name it
        return stands

    replacements = naming.globals_in_place(function, layer._traced_manner.names, instead,
                                           None if functions is None else functions.imported)
    return None if replacements is None else (
        naming.with_globals(function, replacements) if replacements else function)


def may_be_read(value: Any) -> bool:
    return type(value) in NUMBERS


def _instead(value: Any) -> Any:
    """Stand-in for a global value: a number stands for itself."""
    if own.is_function(value, "torch_geometric", "softmax"):
        return channels.softmax
    return value if may_be_read(value) else None


class Parts(NamedTuple):
    """A message that is several side by side, each of which is reduced for itself. ``known``: the
    layer's class, with an aggregate that puts the results side by side; ``whole``: all as one
    message, of rows that are written for each edge before; None where that cannot be."""

    messages: tuple[Message, ...]
    known: reading.Known
    whole: Message | None


def _found(out: Any, layer: Any) -> Message | Parts | None:
    return _parts(out, layer) or found(out, layer)


def found(out: Any, layer: Any) -> Message | None:
    if isinstance(out, stacks.Stacked):
        message = found(stacks.message(out, layer), layer)
        return message and message._replace(turned=True)
    if not isinstance(out, pointwise.Rows) or not out.meta.is_floating_point():
        return None
    summed = out.of_sum() if isinstance(out, linear_maps.Mapped) else None
    if summed is not None:
        rows, *maps = summed
        message = _of_rows(rows)
        return message and message._replace(after=(*maps, out.roots, out.meta.shape[1]),
                                            mapped=_mapped(out))
    return _of_rows(out.alone())


def side_by_side(rows: pointwise.Rows) -> tuple[Message, ...]:
    """The messages of rows that are several side by side; none where all are at one end, so that
    torch puts them together before, where they are no floats, or where kernels cannot be written
    for one."""
    if type(rows) is not beside.Beside or rows.is_made or len(rows.parts) > _MOST_PARTS or (
        not rows.meta.is_floating_point()
        or len(set().union(*map(channels.ends, rows.parts))) < 2):
        return ()
    try:
        messages = [_of_rows(part.alone()) for part in rows.parts]
    except Unseen:
        return ()
    return () if None in messages else tuple(messages)  # type: ignore[arg-type]  # no None


def _parts(out: Any, layer: Any) -> Parts | None:
    """`Parts` of what a message gives, if it is such a one."""
    messages = side_by_side(out) if isinstance(out, pointwise.Rows) else ()
    if not messages:
        return None
    dim = out.along

    def reduces(layer: Any) -> tuple[Reduce, ...]:
        how = reductions.of_module(layer.aggr_module)
        return (tuple([Part(how[0], at) for at in range(len(messages))])
                if len(how) == 1 and type(how[0]) is str and how[0] in REDUCES else ())

    def combine(layer: Any, results: list[Tensor], kwargs: dict) -> Tensor:
        return torch.cat(results, dim)

    known = reading.Known(type(layer), Aggregate(reduces, None, combine))
    return Parts(messages, known, _mapped(out))


def _of_rows(rows: pointwise.Rows) -> Message | None:
    shape = tuple(rows.meta.shape[1:])
    if not leaves(rows.tree):
        return None
    message = expressed(rows.tree, shape)
    return message and message._replace(weighted=weighted(rows.tree, shape))


def _mapped(out: pointwise.Rows) -> Message | None:
    """A message that ends in a map, as one of rows that were mapped at their ends."""
    try:
        return _of_rows(out.alone())
    except Unseen:
        return None


def functions(layer: Layer) -> Any:
    """Stand-ins for functions of PyG and others."""
    from gnnaccel.adapters.pyg.propagate.graph_functions import GraphFunctions  # needs this module

    return GraphFunctions(layer)


_MANNER = tracing.Manner(OF_MESSAGES, prepared, pointwise.rows, _found, True, kept=kept_values.kept,
                         functions=functions, stacked=stacks.stand_in, wholes=True)


def form(layer: Any, known: reading.Known, kwargs: dict, edge_index: Any,
         why: Reason) -> Form | Reason:
    """Form of the layer's message, where kernels can be written for it; else ``why``, the reason
    against the other forms."""
    if known.why is not None or not serves(kwargs):
        return why
    if known.aggregate is not None and not known.traced:
        return why
    trace = tracing.trace(layer, known, kwargs, _MANNER, edge_index)
    if trace.message is None:
        return why
    source = source_of(trace, kwargs)
    if source is None:
        return why
    stacked = tracing.stacked(layer, kwargs)
    messages, known = _messages(trace, layer, known, stacked)
    if not messages:
        return why
    message = messages[0]
    turned = stacked or type(trace.message) is Message and trace.message.turned
    if layer.node_dim not in (0, -1 - len(message.shape)) and not turned:
        return reason("GA206", f"messages of {len(message.shape) + 1} dimensions, "
                      f"node_dim={layer.node_dim}")

    alone = len(messages) == 1

    def more(given: Any, layer: Any) -> Generated | Several | Reason:
        graph = given.graph
        if not trace.guards.hold(layer, graph.num_edges) or trace.most < graph.num_dst or (
            trace.sends < graph.num_src or trace.up_to_edges and (
                graph.num_edges < graph.num_dst)):  # `Trace.counts`, without a call
            return why
        if trace.dtype is not None and torch.get_default_dtype() is not trace.dtype:
            return why
        if trace.listed and not trace.lists(given, graph.edge_index):
            return why
        if (trace.devices or trace.conditions) and not trace.met(given):
            return why
        if trace.effects or trace.kept:
            kept_values.begin(layer, trace, given)
        return message.generated(given) if alone else together(
            [one.generated(given) for one in messages])

    arguments = set() if stacked else {
        *trace.edges, *(name for one in messages for name in one.edge_arguments)}

    def stand_in(given: dict, graph: OpGraph) -> Generated | Several | Reason:
        if not trace.counts(graph):
            return why
        return (unfit_edges(arguments, given, graph)
                or together([one.stand_in(given, graph) for one in messages]))

    return form_of(trace, source, more, stand_in, turned)._replace(
        alike=_alike(trace, layer, kwargs), known=known)


def _alike(trace: tracing.Trace, layer: Any,
           kwargs: dict) -> Callable[[Any, dict, OpGraph, bool | None], bool]:
    """`Form.alike` for calls like this one."""
    square, dtype = tracing.square(layer, kwargs), torch.get_default_dtype()

    def alike(layer: Any, kwargs: dict, graph: OpGraph, whole: bool | None) -> bool:
        return (torch.get_default_dtype() is dtype
                and (whole is None or tracing.square(layer, kwargs) is square
                     and trace.suits(kwargs, graph.num_edges))
                and (not trace.listed or trace.lists(kwargs, graph.edge_index))
                and (not whole or trace.holds(layer, graph.num_edges)))

    return alike


def _messages(trace: tracing.Trace, layer: Any, known: reading.Known,
              stacked: bool) -> tuple[tuple[Message, ...], reading.Known]:
    """The messages to be reduced, none where there are no such; and the class as it reduces
    them."""
    message, reduces, keeps = trace.message, reductions.of(layer, known), bool(trace.kept)
    if type(message) is Parts:
        aggregate: Any = message.known.aggregate  # not None
        if known.aggregate is None and not stacked and aggregate.reduces(layer):
            several = [one.reduced_by(reduces, keeps) for one in message.messages]
            return joined(several, reduces), message.known
        message = message.whole
    return (() if message is None else (message.reduced_by(reduces, keeps),)), known


def together(parts: list[Generated]) -> Generated | Several:
    return parts[0] if len(parts) == 1 else Several(tuple(parts))


def unfit_edges(names: set[str], given: dict, graph: OpGraph) -> Reason | None:
    """Why arguments do not belong to the edges: one row may stand for all of them."""
    for name in names & given.keys():
        rows = given[name].shape[0]
        if rows != graph.num_edges:
            return reason("GA206", f"{name} has {rows} rows for {graph.num_edges} edges")
    return None


def source_of(found: tracing.Trace, kwargs: dict) -> str | None:
    """The argument that decides about dtype and device: features gathered at the source, where
    there are floats of several channels, else such of the edges."""
    for name, end in found.ends:
        if end == "j":
            x = kwargs[name]
            x = x[0] if type(x) in (tuple, list) else x
            if x.ndim > 1 and x.is_floating_point():
                return name
    return next((name for name in found.edges if kwargs[name].is_floating_point()), None)


def form_of(found: tracing.Trace, source: str, more: Any, stand_in: Any,
            stacked: bool = False) -> Form:
    """The form of a call that was traced. ``stacked``: as of `Form`."""
    ends = tuple(end for end in found.ends if end != (source, "j"))
    of_edges = (source, "j") not in found.ends
    return Form(source, None, None, more, ends, True, None, stand_in, of_edges=of_edges,
                stacked=stacked)


def not_summed(found: Form, layer: Any, kwargs: dict, edge_index: Any,
               known: reading.Known) -> Form:
    """The form of a call that may ask for more than sums and means, which ``found`` is for."""
    for one in reductions.of(layer, known):
        if one in EXTREMA:
            why = aggregation_messages.only_summed(one)
            general = form(layer, known, kwargs, edge_index, why)
            return general if type(general) is Form else found
    return found


def serves(kwargs: dict) -> bool:
    """Whether there are kernels where the tensors are: torch operations gain nothing here."""
    if driver.placed():
        return True
    for value in kwargs.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if type(one) in reading.TENSORS:
                return one.is_cuda
    return False
