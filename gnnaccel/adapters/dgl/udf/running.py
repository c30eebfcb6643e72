"""Calls with functions of users, as operations of `dispatch.ops`.

Where one of DGL's own operations computes the same, it runs, by kernels of its own; other sums and
means run by kernels that are written for the message. Otherwise messages are made on torch
operations, with linear maps where their rows are, and reduced by DGL's operations.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.graphs import Edges
from gnnaccel.adapters.dgl.udf import counts
from gnnaccel.adapters.dgl.udf.features import DOT, Sent
from gnnaccel.adapters.dgl.udf.mailboxes import KEPT, SOFTMAX
from gnnaccel.adapters.dgl.udf.memory import Found, Reduced
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.generated import messages as generated
from gnnaccel.dispatch.ops import aggregation_cuda, torch_ops
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import Keeping, Operation

_BY_DGL = "DGL's own operations"
_OF_NODES = "j.", "i.", "n."  # how the keys of nodes' features begin
# measured on a CPU; a call takes 0.2 ms longer
_OPERATIONS_OF_ONE, _CALL = 15, 500_000
_OF_MAILBOX = 2  # reductions over all edges, which take as long as a user's function of one degree
_OF_EDGES = 10  # reductions, which take as long as one that goes on at the edges
_OF_EXTREMUM = 3  # likewise, as a maximum with its gradient


def of_edges(g: Any, graph: OpGraph, found: Found, given: dict, forced: bool) -> OpCall | Reason:
    """Messages, as ``apply_edges`` asks for them. ``forced``: they need not gain."""
    given = _with_operations(g, graph, given)
    gains = any(map(partial(_maps_fewer, graph, given), found.sent))
    kernel: Kernel | Reason = reason("GA208", "no kernel writes messages of this form")
    if all(one.by_dgl for one in found.sent):
        kernel = Kernel(_BY_DGL, ("dgl operations",), _nothing, lambda: run())
    elif not gains and not forced:
        return reason("GA301", "messages without linear maps are made as fast by torch")

    def made(given: CallArguments) -> dict[str, Tensor]:
        _begin(g, graph, found, given)
        made: dict[int, Tensor] = {}  # one of two names is one tensor, as with the host
        for one in found.sent:
            if id(one) not in made:
                made[id(one)] = (g._edge_frames[0][one.written] if one.written is not None
                                 else _message(g, graph, one, given))
        return {name: made[id(one)] for name, one in zip(found.fields, found.sent)}

    def run() -> dict[str, Tensor]:
        return _protected(made, found, given)

    return _call(graph, given, run, kernel, gains)


def _protected(run: Callable[[CallArguments], dict[str, Tensor]], found: Found,
               given: CallArguments) -> dict[str, Tensor]:
    """The results of ``run``, of copies of the features of nodes where callers write to these
    before backward (`dispatch.run.written`): the host hands gathered rows to users' functions."""
    keys = [key for key, t in given.items() if key[:2] in _OF_NODES and t.requires_grad]
    if not (keys and given.grad):
        return run(given)
    names: list[str] = []

    def of_features(*tensors: Tensor) -> Any:
        results = run(CallArguments({**given, **dict(zip(keys, tensors))}, given.graph))
        names[:] = results
        return list(results.values())

    keeping: Any = Keeping(of_features)
    keeping.apart = found.apart
    return dict(zip(names, keeping(*[given[key] for key in keys])))


def _maps_fewer(graph: OpGraph, given: dict, sent: Sent) -> bool:
    """Whether linear maps of nodes save more than the call takes longer, which the host does for
    each edge. Counted in numbers read or written; a map makes `_OPERATIONS_OF_ONE` multiplications
    in the time of one."""
    if not sent.from_nodes:
        return False
    read = sum(t[0].numel() for key, t in given.items() if key[:2] in _OF_NODES[:2])
    widths = sent.kept
    map_of_row = read * max(widths) / _OPERATIONS_OF_ONE
    edges, nodes = graph.num_edges, max(graph.num_src, graph.num_dst)
    return edges * (2 * read + map_of_row) > nodes * map_of_row + 2 * edges * sum(widths) + _CALL


def _begin(g: Any, graph: OpGraph, found: Found, arguments: CallArguments) -> None:
    """Run what comes before the messages: all effects, and the features of edges that the message
    function writes."""
    for effect in found.effects:
        effect(arguments)
    frame = g._edge_frames[0]
    for name, sent in found.written:
        frame[name] = (_message(g, graph, sent, arguments) if sent.written in (name, None)
                       else frame[sent.written])
    for name in found.removed:
        del g._edge_frames[0][name]


def _message(g: Any, graph: OpGraph, sent: Sent, arguments: CallArguments) -> Tensor:
    """One message of each edge."""
    made = _made(g, graph, sent, arguments)
    held = [t.untyped_storage().data_ptr() for key, t in arguments.items() if key[:2] == "e."]
    return made.clone() if sent.apart and made.untyped_storage().data_ptr() in held else made


def _made(g: Any, graph: OpGraph, sent: Sent, arguments: CallArguments) -> Tensor:
    from dgl import ops

    if sent.operands is None:
        return sent.made(arguments, graph)
    op, left, right = sent.sides(arguments)
    if op == "copy_rhs":
        return right  # type: ignore[return-value]
    if op == "copy_lhs":
        return ops.copy_u(g, left)
    return ops.gsddmm(g, op, left, right, *sent.targets)


# --- reductions -----------------------------------------------------------------------------------

def of_nodes(g: Any, graph: OpGraph, found: Found, given: dict, edges: Edges) -> OpCall | Reason:
    """Reductions of messages. The host makes mailboxes degree by degree, which is slow anywhere."""
    if found.steps is not None and found.steps.sized:
        given = {**given, counts.KEY: edges.degrees(1, torch.float64)}
    given = _with_operations(g, graph, given)
    gains = (any(_maps_fewer(graph, given, one.sent) for one in found.reductions)
             if found.steps is None else _fewer_than_mailboxes(found, edges, given))
    kernel = _kernel(graph, found, given)
    if type(kernel) is Kernel:
        kernel = kernel._replace(run=lambda: run(True))

    def made(by_kernels: bool, given: CallArguments) -> dict[str, Tensor]:
        _begin(g, graph, found, given)
        reduced = [_reduced(g, graph, one, given, by_kernels, found.steps is not None)
                   for one in found.reductions]
        return _finished(found, reduced, given, edges)

    def run(by_kernels: bool) -> dict[str, Tensor]:
        return _protected(partial(made, by_kernels), found, given)

    return _call(graph, given, lambda: run(False), kernel, gains)


def _fewer_than_mailboxes(found: Found, edges: Edges, given: dict) -> bool:
    """Whether reductions over all edges take less time than the host's mailboxes, one for each
    degree that nodes have: over a regular graph there is one. On a GPU each waits for the device.
    """
    assert found.steps is not None
    extremum = _OF_EXTREMUM if torch.is_grad_enabled() else 1
    count = (sum(extremum if one.how in ("max", "min") else 1 for one in found.reductions)
             + _OF_EDGES * found.steps.kept)
    return (count <= _OF_MAILBOX or driver.placed() or not next(iter(given.values())).is_cpu
            or count <= _OF_MAILBOX * edges.kinds_of_degree())


def _kernel(graph: OpGraph, found: Found, given: dict) -> Kernel | Reason:
    """The way of all reductions by kernels, without its ``run``, or why there is none."""
    parts: list[Kernel] = []
    if not driver.placed() and next(iter(given.values())).is_cpu:
        return reason("GA401", "the tensors are on the CPU, the kernels need a CUDA device")
    for one in found.reductions:
        if _by_operations(one):
            continue
        if one.how not in ("sum", "mean"):
            return reason("GA208", f"{one.how} of messages that no operation of DGL makes")
        aggregation = _aggregation(graph, one, one.sent.message.stand_in(given, graph))
        part = (aggregation if type(aggregation) is Reason
                else aggregation_cuda.kernel(graph, aggregation))
        if type(part) is Reason:
            return part
        parts.append(part)
    if not parts:
        return Kernel(_BY_DGL, ("dgl operations",), _nothing, _nothing)

    def compile_() -> None:
        for part in parts:
            part.compile()

    return Kernel(" + ".join(dict.fromkeys(part.name for part in parts)),
                  tuple(part.key for part in parts), compile_, _nothing)


def _by_operations(one: Reduced) -> bool:
    """Whether one of DGL's operations makes the messages and reduces them."""
    return one.sent.operands is not None and one.sent.targets == ("u", "e")


def _aggregation(graph: OpGraph, one: Reduced,
                 message: generated.Generated) -> Aggregation | Reason:
    x = message.inputs[0]
    return (generated.unfit(graph, x, message)
            or Aggregation(one.how, x, None, message.out, message))


def _reduced(g: Any, graph: OpGraph, one: Reduced, arguments: CallArguments, by_kernels: bool,
             of_torch: bool) -> Tensor:
    """The result of one reduction. ``of_torch``: a NaN is the largest and the smallest, as with
    torch's functions of mailboxes. DGL's reductions pass over it."""
    from dgl import ops

    if by_kernels and not _by_operations(one):
        aggregation: Any = _aggregation(graph, one, one.sent.message.generated(arguments))
        out = aggregation_cuda.run(graph, aggregation)
        return out.squeeze(-1) if one.sent.scalar else out
    of_torch = of_torch and one.how in ("max", "min")
    messages = (one.sent.made(arguments, graph) if of_torch or not _by_operations(one) else None)
    sides = (one.sent.sides(arguments) if _by_operations(one) else ("copy_rhs", None, messages))
    if messages is not None and of_torch:
        return _extremum(g, graph, one.how, messages, sides)
    return ops.gspmm(g, sides[0], one.how, *sides[1:])


def _extremum(g: Any, graph: OpGraph, how: str, messages: Tensor, sides: tuple) -> Tensor:
    """The maximum or minimum as torch's functions of mailboxes give it. Of equal messages the first
    has the gradient; DGL on a CPU gives it to the last. ``sides``: the operation that makes them,
    and its operands."""
    from dgl import ops

    if messages.is_cpu and messages.requires_grad and not driver.placed():
        out = torch_ops.extremum(messages, graph.index("v"), graph.num_dst, how == "max")
    else:
        out = ops.gspmm(g, sides[0], how, *sides[1:])
    numbers = ~messages.isnan()
    if numbers.is_cpu and bool(numbers.all()):
        return out
    none = ops.gspmm(g, "copy_rhs", "sum", None, messages.masked_fill(numbers, 0.0))
    return out.masked_fill(none.isnan(), 0.0) + none


def _finished(found: Found, reduced: list[Tensor], given: dict, edges: Edges) -> dict[str, Tensor]:
    """The results by name. A reduce function of the user's never runs for nodes that no edge
    enters: they get zeros."""
    if found.steps is None:
        return dict(zip(found.fields, reduced))
    sums = all(type(step) is int and found.reductions[step].how in ("sum", "mean")
               for step in found.steps.done)
    entered = None if sums or not edges.has_bare() else edges.entered()
    if entered is not None:
        reduced = [t.index_select(0, entered) for t in reduced]
        given = {key: t.index_select(0, entered) if key.startswith("n.") else t
                 for key, t in given.items()}
    rows = found.combine(reduced, given)  # type: ignore[misc]  # as there are steps
    if entered is not None:
        rows = [t.new_zeros(edges.num_dst, *t.shape[1:]).index_copy(0, entered, t) for t in rows]
    elif not _are_apart(rows, reduced):
        rows = [t.clone() for t in rows]
    return dict(zip(found.fields, rows))


def _are_apart(rows: list[Tensor], reduced: list[Tensor]) -> bool:
    """Whether each result may be changed in place as the host's, which it puts together from
    mailboxes: neither another result nor a backward reads its memory."""
    if len(rows) == 1 and not (rows[0].requires_grad or rows[0]._is_view()):
        return True
    return len({*map(id, rows)}) == len(rows) and {*map(id, rows)} <= {*map(id, reduced)}


# --- both -----------------------------------------------------------------------------------------

def _with_operations(g: Any, graph: OpGraph, given: dict) -> CallArguments:
    """The arguments of a call, with the operations of DGL that functions of users may ask for."""
    from dgl import ops

    def dot(left: Tensor, right: Tensor, *targets: str) -> Tensor:
        return ops.gsddmm(g, "dot", left, right, *targets)

    def kept(messages: Tensor, how: str) -> Tensor:
        copies = "copy_rhs", None, messages
        return ops.copy_v(g, _extremum(g, graph, how, messages, copies) if how in ("max", "min")
                          else ops.gspmm(g, copies[0], how, *copies[1:]))

    return CallArguments({**given, SOFTMAX: partial(_softmax, g, graph), KEPT: kept, DOT: dot},
                         graph)


def _softmax(g: Any, graph: OpGraph, scores: Tensor) -> Tensor:
    """The softmax of scores. DGL's own on a CPU needs the CSC, which a graph may not have."""
    from dgl import ops

    if scores.is_cpu and not _may_have(g, "csc"):
        return torch_ops.edge_softmax(graph, scores)
    if scores.is_cpu and not driver.placed():
        return _Softmax(g._graph).apply(scores)
    return ops.edge_softmax(g, scores)


def _may_have(g: Any, form: str) -> bool:
    """Whether DGL has the edges in this form, or may make it."""
    return any(form in names for names in g._graph.formats().values())


class _Softmax(Operation):
    """DGL's ``edge_softmax`` on a CPU, differentiable any number of times as torch's softmax of a
    mailbox is: the host's own backward is one kernel without a gradient. ``index``: the edges; the
    graph itself would keep its features."""

    __slots__ = ("index",)

    def __init__(self, index: Any):
        self.index = index

    def forward(self, needs, scores):
        from dgl import backend

        out = backend.edge_softmax(self.index, scores)
        return out, (out,)

    def backward(self, needs, saved, grad):
        from dgl._sparse_ops import _edge_softmax_backward

        (out,) = saved
        return (_edge_softmax_backward(self.index, out, out * grad),)

    def recorded(self, needs, saved, grad):
        from dgl import backend

        (out,) = saved
        parts = out * grad
        sums = backend.gspmm(self.index, "copy_rhs", "sum", None, parts)
        return (parts - backend.gsddmm(self.index, "mul", out, sums, "e", "v"),)


def _call(graph: OpGraph, given: dict, plain: Any, kernel: Kernel | Reason, gains: bool) -> OpCall:
    first = next(t for t in given.values() if isinstance(t, Tensor))
    return OpCall(first.device, first.dtype, plain, kernel, graph, gains)


def _nothing() -> None:
    """Compile nothing: these operations have kernels of their own."""
