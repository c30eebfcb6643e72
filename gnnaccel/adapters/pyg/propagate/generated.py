"""Messages of pointwise operations, which kernels are written for.

`form` traces the ``message`` of a layer on the stand-ins of `pointwise`, and gives what it computes
as any other `Form`. What was read of the layer is looked at again in each call.
"""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import (channels, linear_maps, naming, pointwise, reading,
                                                  tracing)
from gnnaccel.adapters.pyg.propagate.expressed import Message, expressed
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.standins import Form, Unseen
from gnnaccel.adapters.pyg.propagate.weighted import weighted
from gnnaccel.cuda import driver
from gnnaccel.dispatch.generated.messages import EXTREMA, Generated
from gnnaccel.dispatch.ops import aggregation_messages
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

NAMES = frozenset((
    *OPERATIONS, *pointwise.NAMES, "cat", "concat", "linear", "matmul", "mm", "dropout", "dim",
    "shape", "size", "nn", "functional", "special", "multiply", "subtract", "divide", "true_divide",
    "negative", "absolute", "pi", "e", "float32"))


def prepared(function: Any) -> Any:
    """``function`` with a stand-in for PyG's softmax, where it can do nothing but compute."""
    for cell in function.__closure__ or ():
        try:
            if not may_be_read(cell.cell_contents):
                return None
        except ValueError:  # nothing is in it yet
            return None
    found = naming.globals_in_place(function, NAMES, _instead)
    return None if found is None else naming.with_globals(function, found) if found else function


def may_be_read(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _instead(value: Any) -> Any:
    """What stands in place of a global value: of a number itself."""
    if own.is_function(value, "torch_geometric", "softmax"):
        return channels.softmax
    return value if may_be_read(value) else None


def found(out: Any, layer: Any) -> Message | None:
    if not isinstance(out, pointwise.Rows) or not out.meta.is_floating_point():
        return None
    after = out.of_sum() if isinstance(out, linear_maps.Mapped) else None
    if after is not None:
        rows, *maps = after
        before = _of_rows(rows)
        return before and before._replace(after=(*maps, out.roots, out.meta.shape[1]),
                                          mapped=_mapped(out))
    return _of_rows(out.alone())


def _of_rows(rows: pointwise.Rows) -> Message | None:
    shape = tuple(rows.meta.shape[1:])
    message = expressed(rows.tree, shape)
    return message and message._replace(weighted=weighted(rows.tree, shape))


def _mapped(out: pointwise.Rows) -> Message | None:
    """A message that ends in a map, as one of rows that were mapped at their ends."""
    try:
        return _of_rows(out.alone())
    except Unseen:
        return None


_MANNER = tracing.Manner(NAMES, prepared, pointwise.rows, found, True, kept=channels.kept)


def form(layer: Any, known: reading.Known, kwargs: dict, why: Reason) -> Form | Reason:
    """What the layer's message computes, where kernels can be written for it; ``why`` none of the
    others are its form, else."""
    if known.why is not None or not serves(kwargs):
        return why
    if known.aggregate is not None and not known.traced:
        return why
    found = tracing.trace(layer, known, kwargs, _MANNER)
    if found.message is None:
        return why
    source = next((name for name, end in found.ends if end == "j"), None)
    if source is None or not found.message.of_sources:
        return why
    message = found.message.reduced_by(reading.reductions(layer, known), bool(found.kept))
    if layer.node_dim not in (0, -1 - len(message.shape)):
        return reason("GA206", f"messages of {len(message.shape) + 1} dimensions, "
                      f"node_dim={layer.node_dim}")

    def more(given: Any, layer: Any) -> Generated | Reason:
        if not found.holds(layer):
            return why
        channels.begin(layer, found, given)
        return message.generated(given)

    arguments = {*found.edges, *message.edge_arguments}

    def stand_in(given: dict, graph: OpGraph) -> Generated | Reason:
        return unfit_edges(arguments, given, graph) or message.stand_in(given, graph)

    ends = tuple(end for end in found.ends if end != (source, "j"))
    return Form(source, None, None, more, ends, True, None, stand_in)


def unfit_edges(names: set[str], given: dict, graph: OpGraph) -> Reason | None:
    """Why arguments do not belong to the edges: one row may stand for all of them."""
    for name in names:
        rows = given[name].shape[0]
        if rows != graph.num_edges:
            return reason("GA206", f"{name} has {rows} rows for {graph.num_edges} edges")
    return None


def not_summed(found: Form, layer: Any, kwargs: dict, known: reading.Known) -> Form:
    """The form of a call that may ask for more than sums and means, which ``found`` is for."""
    for one in reading.reductions(layer, known):
        if one in EXTREMA:
            why = aggregation_messages.only_summed(one)
            other = form(layer, known, kwargs, why)
            return other if type(other) is Form else found
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
