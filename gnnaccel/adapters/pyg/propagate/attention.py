"""Attention that users write: a ``message`` with a softmax over each node's edges, run by the
kernels of the published attention layers.

The message is traced once on stand-ins (`traced`). What it reads of the layer is noted and looked
at again in each call (`tracing`). Three forms are known: additive scores (GAT), a leaky ReLU of
both ends' sum (GATv2), and inner products (Transformer).
"""
from __future__ import annotations

import types
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import (attention_repeated, node_counts, reading, reductions,
                                             repeated_calls)
from gnnaccel.adapters.pyg.propagate.attention_repeated import BoundMessage
from gnnaccel.adapters.tracing import tracing
from gnnaccel.adapters.tracing.attention.traced import Node
from gnnaccel.adapters.tracing.attention.traced_scores import Alpha, Weighted, score_of
from gnnaccel.adapters.tracing.attention.traced_views import argument_rows
from gnnaccel.adapters.tracing.code import naming
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.adapters.tracing.graph_functions import Package
from gnnaccel.adapters.tracing.layer.traced_layer import Layer, by_name
from gnnaccel.adapters.tracing.nodes.nodes_read import argument, of_read
from gnnaccel.adapters.tracing.rows import channels, rearranged
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.adapters.tracing.rows.standins import Unseen, rows
from gnnaccel.adapters.tracing.tracing import Trace
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.attention import Call, run_cuda

_NAMES = frozenset((
    "cat", "concat", "sum", "mean", "mul", "add", "sub", "div", "multiply", "neg", "matmul", "relu",
    "leaky_relu", "sigmoid", "tanh", "exp", "elu", "abs", "view", "reshape", "unsqueeze", "squeeze",
    "contiguous", "size", "dim", "dropout", "linear", "sqrt", "nn", "functional", "to", "float",
    "softmax", "einsum"))


def _softmax_in_place(function: types.FunctionType, layer: Layer) -> types.FunctionType | None:
    """``function`` with a softmax that makes an `Alpha`; None where it may do more than compute, or
    has none."""
    if function.__code__.co_freevars:
        return None
    functions = _Functions(layer)
    replacements = naming.globals_in_place(function, _NAMES,
                                           lambda name, value: functions.instead(value))
    return None if not replacements else naming.with_globals(function, replacements)


class _Functions:
    """Stand-ins for functions of PyG and einops, and for `getattr`."""

    def __init__(self, layer: Layer):
        self.names, self.watched = _NAMES, layer._traced_watched
        self.counts = layer._traced_counts

    def instead(self, value: Any) -> Any:
        from torch_geometric import utils

        if value is utils:
            return Package(value, self)
        if own.is_function(value, "torch_geometric", "softmax"):
            return self._softmax
        if value is getattr:
            return by_name
        return rearranged.instead(value)

    def _softmax(self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
                 dim: int = 0) -> Alpha:
        """PyG's ``softmax``."""
        score, num_nodes = score_of(src), channels.noted(num_nodes, self.counts)
        if not (type(index) is Special and index.end == "i" and dim == 0):
            raise Unseen
        if not channels.is_ptr(ptr) or not channels.counts_nodes(num_nodes):
            raise Unseen
        return Alpha(score, score.meta)


def _weighted(out: Any, layer: Any) -> Weighted | None:
    return out if type(out) is Weighted else None


_MANNER = tracing.Manner(_NAMES, _softmax_in_place,
                         argument_rows, _weighted)

#: the host's own classes, of which none has such a message
of_the_host: set[type] = set()


def read(layer: Any, kwargs: dict, edge_index: Any) -> OwnAttention | None:
    """The call, if the layer's message is such attention."""
    known = reading.known_class(type(layer))
    if known.own:
        of_the_host.add(type(layer))
    if (known.own or known.why is not None
        or type(known.form(kwargs, known.stamp(layer))) is not Reason):
        return None
    trace = tracing.trace(layer, known, kwargs, _MANNER, edge_index)
    return None if trace.message is None else OwnAttention(trace, known)


# --- the call -------------------------------------------------------------------------------------

class OwnAttention:
    """One call with such a message, as an adapter of the router. ``args``: the ``edge_index``;
    ``kwargs``: everything else that ``propagate`` is given. ``names``: of the features among these;
    ``viewed``: all rows of nodes are views of them."""

    host, bind, resized = "pyg", None, None

    def __init__(self, found: Trace, known: reading.Known):
        self.found, self.known = found, known
        self.names = tuple(dict.fromkeys([*[name for name, _ in found.ends], *found.edges]))
        self.roots = (*(argument(*one) for one in found.ends), *map(itemgetter, found.edges))
        self.keeps = False
        message: Any = found.message  # not None
        self.viewed = all([one.views is not None or one.end == "e"
                           for one in (message.values, *message.alpha.score.nodes())])

    def key(self, layer: Any, args: tuple, kwargs: dict) -> None:
        """None: a call that is to be kept is kept by `repeated_calls`, as all of ``propagate``
        are."""
        self.keeps = True

    def state(self, layer: Any, args: tuple, kwargs: dict) -> tuple[CallSpec, CallInputs] | Reason:
        trace, known = self.found, self.known
        reduces = reductions.of(layer, known)
        why = (guards.context_reason() or reading.layer_reason(layer, known, reduces)
               or reading._update_reason(layer, known, args[0], kwargs))
        if why is not None:
            return why
        if reduces != ("sum",) or known.aggregate is not None:
            return reason("GA201", "attention is added up")
        return _stated(layer, args[0], kwargs, trace, known)

    def run(self, layer: Any, spec: CallSpec, inputs: CallInputs, attend: Call) -> Any:
        kwargs, edge_index = inputs.extra
        out = self.attended(layer, spec, inputs.edge_index, kwargs, attend, edge_index)
        # not one that is recorded, or of quantized rows; nor over edges made of the caller's
        if self.keeps and attend.run is run_cuda and inputs.edge_index is edge_index:
            repeated_calls.remember_attention(layer, edge_index, kwargs, self, spec, attend)
        return out

    def still(self, layer: Any, kwargs: dict, spec: CallSpec) -> bool:
        """Whether ``spec`` describes this call, too, which looks like the earlier one; the layer
        is unchanged."""
        found: Any = None
        for name in self.names:
            value = kwargs[name]
            for t in (value,) if type(value) in reading.TENSORS else value:
                if t is not None:
                    found = t
                    if t.is_neg():
                        return False
        if torch.is_autocast_enabled(found.device.type):
            return False
        return self.found.guards.hold(layer, spec.num_edges)

    def bound(self, kwargs: dict, call: Call) -> BoundMessage | None:
        """A repeated call, bound to its kernels, if it can be."""
        return attention_repeated.bind(self.found.message, kwargs, call)

    def attended(self, layer: Any, spec: CallSpec, edge_index: Tensor, kwargs: dict,
                 attend: Call, of_caller: Tensor) -> Any:
        """The result of a call; ``attend(tensors)`` runs the Program. ``of_caller``: the list of
        edges that the caller gave, of which ``edge_index`` may have been made."""
        message: Any = self.found.message  # not None
        arguments = CallArguments(kwargs, OpGraph(edge_index, spec.num_src, spec.num_dst,
                                                  spec.flipped, attend.graph))
        # parameters get gradients of sums over nodes; what the message read of the layer are its
        # parameters, and most need no look at these
        roots: Any = chain(self.roots, (partial(_itself, p) for p in layer.parameters()))
        if spec.program.name == "gat":
            if arguments.grad and any(root(arguments).requires_grad for root in roots):
                attend.unread = _unread(message, arguments.graph)
        elif not self.viewed:
            arguments = of_read(arguments, roots)
        tensors: Any = _tensors(message, spec, arguments)
        # contiguous, as the host's is: a layer's own code may take views of it
        out = _shaped(attend(tensors).contiguous(), (spec.num_dst, *message.meta.shape[1:]))
        return reading.finished(layer, self.known, False, out, kwargs, of_caller)


def _stated(layer: Any, edge_index: Any, kwargs: dict, found: Trace,
            known: reading.Known) -> tuple[CallSpec, CallInputs] | Reason:
    message: Any = found.message  # not None
    sizes = node_counts.sizes(layer, edge_index, kwargs, found.ends)
    if type(sizes) is Reason:
        return sizes
    if sizes[1] > found.most:
        return reason("GA206", f"a softmax over {found.most} nodes where {sizes[1]} receive")
    first = next(rows(kwargs, name, end) for name, end in found.ends if end == "j")
    if reading.stacked(layer, first) or first.is_meta or (
        torch.is_autocast_enabled(first.device.type)):
        return reason("GA206", "attention over stacked features, without data, or under autocast")
    plain = reading._edges(layer, known, edge_index, *sizes, first.device)
    if type(plain) is Reason:
        return plain
    tensors = [rows(kwargs, *one) for one in found.ends] + [kwargs[name] for name in found.edges]
    for value in tensors:
        if value.is_neg() or value.device != first.device or value.dtype != first.dtype:
            return reason("GA206",
                          "features are yet to be negated, or of several devices or dtypes")
    for name in found.edges:
        if kwargs[name].shape[0] != plain.shape[1]:
            return reason("GA206", f"{name} has {kwargs[name].shape[0]} rows for "
                          f"{plain.shape[1]} edges")
    if not message.values.meta.numel():
        return reason("GA206", f"messages of shape {list(message.meta.shape[1:])}")
    heads = message.alpha.meta.numel() // ROWS
    width = message.values.meta.numel() // ROWS // heads
    row = message.values.meta.dtype
    if row != first.dtype or message.meta.dtype != row:  # of weights in another dtype, too
        return reason("GA203", f"messages of {message.meta.dtype} from features of {first.dtype}")
    program, native = _program(message, kwargs)
    spec = CallSpec(program, native, heads, width, row, row, *sizes, plain.shape[1], 0,
                    True,  # exposed: what the layer goes on with may change it in place
                    flipped=layer.flow != "source_to_target")
    x = rows(kwargs, found.ends[0][0], found.ends[0][1])
    return spec, CallInputs(x, x, plain, None, (kwargs, edge_index))


def _dots(message: Weighted, kwargs: dict) -> bool:
    """Whether scores are dots of the values' rows with parameters, at both ends of an edge the same
    rows: those of GAT, which its kernels compute."""
    values, parts = message.values, message.alpha.score.of["ends"].parts
    dots = [parts[end].dot for end in ("j", "i") if end in parts]
    if values.views is None or None in dots or dots[0][0] is not values:
        return False
    if any([weight.meta.dtype != values.meta.dtype for _, weight in dots]):
        return False
    name = values.views[0]
    return len(dots) == 1 or (dots[1][0].views == values.views
                              and rows(kwargs, name, "i") is rows(kwargs, name, "j"))


def _program(message: Weighted, kwargs: dict) -> tuple[Program, str]:
    """The Program, and the host's layer that costs as much."""
    score, dropout = message.alpha.score, message.alpha.dropout
    if score.kind == "terms":
        parts = score.of["ends"].parts
        if _dots(message, kwargs):
            return (programs.gat(score.of["slope"], dropout, True, "i" in parts, "e" in parts),
                    "GATConv")
        return (programs.additive_terms(score.of["slope"], dropout, "i" in parts, "e" in parts),
                "GATConv")
    if score.kind == "gatv2":
        return programs.gatv2(score.of["slope"], dropout, False), "GATv2Conv"
    return (programs.dot_product(score.scale, dropout, score.of["edges"] is not None),
            "TransformerConv")


def _itself(parameter: Tensor, given: Any) -> Tensor:
    return parameter


def _unread(message: Weighted, graph: OpGraph) -> Tensor | None:
    """[num_src]: whether no edge reads the rows of a node; None where all are read."""
    both = "i" in message.alpha.score.of["ends"].parts  # the same rows
    found = graph.isolated() if both else graph.unread("u")
    return None if found is None else found[0]


def _shaped(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``t`` in this shape, without a node of autograd if it has it."""
    return t if t.shape == shape else t.view(shape)


#: operands of the Program `gat`
_ATTENTION = {"j": "att_src", "i": "att_dst", "e": "a_edge"}


def _vector(part: Node, kwargs: dict, heads: int, width: int) -> Tensor:
    """The parameter [1, heads, width] that rows are multiplied with."""
    vector = part.dot[1].make(kwargs)  # type: ignore[index]  # it is a dot
    if vector.numel() != heads * width:
        vector = vector.expand(1, *part.dot[0].meta.shape[1:])  # type: ignore[index]
    shape = 1, heads, width
    return (vector if vector.shape == shape else vector.reshape(shape)).contiguous()


def _tensors(message: Weighted, spec: CallSpec, kwargs: dict) -> dict[str, Tensor]:
    score, h, c = message.alpha.score, spec.heads, spec.width

    def of(node: Node, *shape: int) -> Tensor:
        rows = node.make(kwargs)
        return (rows if rows.shape[1:] == shape else rows.reshape(-1, *shape)).contiguous()

    if score.kind == "terms":
        names = {"j": "a_src", "i": "a_dst", "e": "a_edge"}
        parts = score.of["ends"].parts
        if spec.program.name == "gat":
            return {"x": of(message.values, h, c),
                    **{_ATTENTION[end]: of(part, h) if end == "e" else _vector(part, kwargs, h, c)
                       for end, part in parts.items()}}
        return {"x": of(message.values, h, c),
                **{names[end]: of(part, h) for end, part in parts.items()}}
    if score.kind == "gatv2":
        parts = score.of["ends"].parts
        att = score.of["att"].make(kwargs).expand(1, *parts["j"].meta.shape[1:]).reshape(h, c)
        return {"keys": of(parts["j"], h, c), "queries": of(parts["i"], h, c), "att": att}
    edges = score.of["edges"]
    return {"keys": of(score.of["keys"], h, c), "queries": of(score.of["queries"], h, c),
            "values": of(message.values, h, c),
            **({} if edges is None else {"edges": of(edges, h, c)})}
