"""HeteroGraphConv of alike layers, one for each relation, run as one relational layer.

Other calls stay native, and their layers are then routed one by one.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike, guards
from gnnaccel.adapters.alike import Parameters
from gnnaccel.adapters.calls import bind
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.guards import any_global_hook, has_hooks, plain
from gnnaccel.adapters.layout import EdgeType, Layout, Part, viewer
from gnnaccel.adapters.own import path_of
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec


class _Call(NamedTuple):
    """Features by node type at either end; ``names``: the relations that take part; ``sources``,
    ``targets``: where the nodes of each type begin among all at that end."""

    x_src: dict[str, Tensor]
    x_dst: dict[str, Tensor]
    names: tuple[EdgeType, ...]
    sources: dict[str, int]
    targets: dict[str, int]


class _Operands(NamedTuple):
    call: _Call
    inner: Inner
    mean: bool


def state(layer: Any, args: tuple,
          kwargs: dict) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    prepared = _state(layer, args, kwargs)
    if type(prepared) is Reason and any(_routed(type(conv))  # type: ignore[arg-type]
                                        for conv in layer.mods.values()):
        return reason("GA210", f"{prepared.code} {prepared.text}")
    return prepared


def _state(layer: Any, args: tuple,
           kwargs: dict) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    bound = bind(args, kwargs, ("g", "inputs"), ("mod_args", "mod_kwargs"))
    if bound is None or bound[2] or bound[3]:
        return reason("GA208", "the call is more than a graph and features")
    mean = _aggregation(layer.agg_fn)
    if type(mean) is Reason:
        return mean
    call = _read(bound[0], bound[1])
    if type(call) is Reason:
        return call
    convs = [layer.mod_dict.get(name, layer.mod_dict.get(name[1])) for name in call.names]
    if any(conv is None for conv in convs):
        return reason("GA206", "the layer has no module for one of the relations")
    together: Any = look_through(convs)
    why = together if type(together) is Reason else _features_reason(call, together)
    return why or _stated(bound[0], call, together, mean)


def _stated(g: Any, call: _Call, together: Inner,
            mean: bool) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    structure: tuple
    weight, parts, indices = together.parameters.weights[0], [], []
    for number, name in enumerate(call.names):
        # `_read` has seen the graph's form
        edges: graphs.Edges = graphs.relation(g, name)  # type: ignore[assignment]
        if (edges.num_src, edges.num_dst) != (call.x_src[name[0]].shape[0],
                                              call.x_dst[name[2]].shape[0]):
            return reason("GA206",
                          f"{name!r} joins {edges.num_src} and {edges.num_dst} nodes, "
                          "the features are those of others")
        why = graphs.place_reason(edges, weight.device)
        if why is not None and why.code != "GA303":  # other relations may have edges
            return why
        if why is None:
            parts.append(Part(name, number, call.sources[name[0]], edges.num_src,
                              call.targets[name[2]], edges.num_dst))
            indices.append(edges.edge_index)
    if not parts:
        return reason("GA303")
    layout, structure = Layout(tuple(parts)), tuple(indices)
    num_src, num_dst = (sum(x[name].shape[0] for name in types)
                        for x, types in ((call.x_src, call.sources),
                                                                                (call.x_dst,
                                                                                 call.targets)))
    program, relations = statements.rgcn(together.mean, False, together.transposed), len(call.names)
    shapes = (("x", (weight.shape[together.transposed],)), ("weight", tuple(weight.shape)))
    view = viewer(structure, num_src, num_dst, relations, layout)
    spec = RelationalSpec(program, "dgl.HeteroGraphConv", shapes, weight.dtype, weight.dtype,
                          num_src, num_dst, sum(t.shape[1] for t in structure), relations, view,
                          layout=layout,
                          rows_grad=any(call.x_src[name].requires_grad for name in call.sources),
                          beside=alike.root_term(together.parameters, len(call.targets)))
    return spec, RelationalInputs(structure, weight.device, _Operands(call, together, mean))


def _aggregation(function: Any) -> bool | Reason:
    """Whether the relations' results are averaged, rather than added."""
    from dgl.nn.pytorch import hetero

    if (type(function) is functools.partial and function.func is hetero._agg_func
        and not function.args):
        for reducer, mean in ((hetero._sum_reduce_func, False), (hetero._mean_reduce_func, True)):
            if function.keywords == {"fn": reducer}:
                return mean
    return reason("GA208", "the aggregation over relations is neither a sum nor a mean",
                  "use aggregate='sum' or 'mean'")


def _read(g: Any, inputs: Any) -> _Call | Reason:
    """Features and relations as DGL reads them."""
    why = graphs.form_reason(g)
    if why is not None:
        return why
    pair = isinstance(inputs, tuple)
    x_src, x_dst = inputs if pair and len(inputs) == 2 else (inputs, inputs)
    if not isinstance(x_src, Mapping) or not isinstance(x_dst, Mapping):
        return reason("GA206", "the features are no dictionaries by node type")
    names = tuple(name for name in g.canonical_etypes
                  if name[0] in x_src and (name[2] in x_dst or not (pair or g.is_block)))
    if not names:
        return reason("GA303", "no relation has features")
    if any(name[2] not in x_dst for name in names):
        return reason("GA206", "there are edges, but no features for one of their ends")
    x_src = {name[0]: x_src[name[0]] for name in names}
    # in DGL's order
    x_dst = {target: x_dst[target] for target in g.dsttypes
             if any(name[2] == target for name in names)}
    # in one order, so that features of both ends are the same rows
    if x_src.keys() == x_dst.keys():
        x_src = {name: x_src[name] for name in x_dst}
    for name, x in (*x_src.items(), *x_dst.items()):
        why = guards.features_reason(x, f"inputs[{name!r}]")
        if why is not None:
            return why
    if g.is_block and not pair:
        x_dst = {name: x[:g.num_dst_nodes(name)] for name, x in x_dst.items()}
    return _Call(x_src, x_dst, names, _starts(x_src), _starts(x_dst))


def _starts(features: dict[str, Tensor]) -> dict[str, int]:
    starts, total = {}, 0
    for name, x in features.items():
        starts[name], total = total, total + x.shape[0]
    return starts


def _features_reason(call: _Call, together: Inner) -> Reason | None:
    weight = together.parameters.weights[0]
    if torch.is_autocast_enabled(weight.device.type):
        return reason("GA203",
                      "autocast is on, under which the layers' results are of several dtypes")
    for x in (*call.x_src.values(), *call.x_dst.values()):
        if x.dtype != weight.dtype or x.device != weight.device:
            return reason("GA203",
                          f"features are {x.dtype} on {x.device}, weights {weight.dtype} "
                          f"on {weight.device}")
    width = weight.shape[together.transposed]
    if any(x.shape[1] != width for x in call.x_src.values()):
        return reason("GA206", f"the weights are for {width} features")
    for name, root in zip(call.names, together.parameters.roots or ()):
        if root.shape[1] != call.x_dst[name[2]].shape[1]:
            return reason("GA206",
                          f"the layer of {name!r} takes destinations of {root.shape[1]} features")
    return None


@functools.cache
def _routed(cls: type) -> bool:
    """Whether gnnaccel takes over layers of this class by themselves."""
    from gnnaccel.adapters.dgl import LAYERS

    return any(base.__name__ in LAYERS and base.__module__.startswith("dgl.")
               for base in cls.__mro__)


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
        attend: Any) -> dict[str, Tensor]:
    call, together, mean = inputs.operands
    x_src, x_dst = list(call.x_src.values()), list(call.x_dst.values())
    of_source, of_target = (tuple(tuple(at for at, name in enumerate(call.names)
                                        if name[end] == node) for node in types)
                            for types, end in ((call.x_src, 0), (call.targets, 2)))
    return dict(zip(call.targets,
                    alike.run(attend, together.parameters, x_src, x_dst, of_source, of_target, mean,
                              spec.row)))


# --- the layers inside, seen as one relational layer ----------------------------------------------

_NORMS = {"right": True, "none": False}  # of GraphConv: whether its sums are means


class Inner(NamedTuple):
    """Alike layers, one for each relation: the mean (or sum) of neighbours' rows times the weights,
    plus bias and root term.

    Weights are [in, out], or [out, in] where ``transposed``.
    """

    parameters: Parameters
    transposed: bool
    mean: bool


def look_through(convs: Sequence[Any]) -> Inner | Reason:
    """The layers of the relations of a call, or why they cannot run as one."""
    cls = type(convs[0])
    if cls not in _classes():
        return reason("GA208", f"one of the layers is a {cls.__name__}",
                      "layers that run together: GraphConv, SAGEConv")
    why = path_of(cls, ("forward",)).why
    if why is not None:
        return why
    for conv in convs:
        if type(conv) is not cls:
            return reason("GA208", f"the layers are of {cls.__name__} and {type(conv).__name__}")
        why = _module_reason(conv) or _classes()[cls][0](conv)
        if why is not None:
            return why
    return _classes()[cls][1](convs)


def _module_reason(conv: Any) -> Reason | None:
    why = alike.excluded(conv)
    if why is not None:
        return why
    if has_hooks(conv) or any_global_hook():
        return reason("GA501", "one of the layers has hooks")
    if "forward" in conv.__dict__:
        return reason("GA205", "forward is replaced on one of the layers")
    return None


# --- classes of layers ----------------------------------------------------------------------------

def _graph_conv_reason(conv: Any) -> Reason | None:
    if conv._norm not in _NORMS:
        return reason("GA208", f"norm={conv._norm!r}", "use norm='right' or norm='none'")
    if conv._activation is not None:
        return reason("GA208", "the layers have activations", "apply one to the result")
    if conv.weight is None:
        return reason("GA208", "the layers have no weights")
    if not conv._allow_zero_in_degree:
        return reason("GA208", "allow_zero_in_degree is off for one of the layers")
    return None


def _of_graph_convs(convs: Sequence[Any]) -> Inner | Reason:
    if len({conv._norm for conv in convs}) > 1 or len({conv.bias is None for conv in convs}) > 1:
        return reason("GA208", "the layers' options differ")
    biases = None if convs[0].bias is None else [conv.bias for conv in convs]
    return _checked(Inner(Parameters([conv.weight for conv in convs], biases, None), False,
                          _NORMS[convs[0]._norm]))


def _sage_conv_reason(conv: Any) -> Reason | None:
    if conv._aggre_type != "mean":
        return reason("GA208", f"aggregator_type={conv._aggre_type!r}",
                      "use aggregator_type='mean'")
    if conv.activation is not None or conv.norm is not None:
        return reason("GA208", "the layers have activations or norms", "apply them to the result")
    drop = conv.feat_drop
    if not plain(drop, torch.nn.Dropout) or (drop.p > 0 and drop.training):
        return reason("GA208", "the layers drop features", "drop them before the call")
    for name in ("fc_neigh", "fc_self"):
        if not plain(conv._modules[name], torch.nn.Linear):
            return reason("GA208",
                          f"{name} is no plain Linear: a "
                          f"{type(conv._modules[name]).__name__}, perhaps with hooks or a "
                          "weight of another type")
    return None


def _of_sage_convs(convs: Sequence[Any]) -> Inner | Reason:
    if (len({conv.fc_self.bias is None for conv in convs}) > 1
        or any(conv.fc_neigh.bias is not None for conv in convs)):
        return reason("GA208", "the layers' options differ")
    biases = None if convs[0].fc_self.bias is None else [conv.fc_self.bias for conv in convs]
    weights, roots = [conv.fc_neigh.weight
                      for conv in convs], [conv.fc_self.weight for conv in convs]
    return _checked(Inner(Parameters(weights, biases, roots), True, True))


def _checked(found: Inner) -> Inner | Reason:
    """These parameters, or why they cannot run together: not plain tensors of one dtype on one
    device, nor of shapes that fit together."""
    tensors = list(chain(*filter(None, found.parameters)))
    if not {type(t) for t in tensors} <= {Tensor, torch.nn.Parameter}:
        return reason("GA208", "some weights are no plain tensors")
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        return reason("GA203", "the weights differ in dtype or device")
    return alike.shapes_reason(found.parameters, found.transposed) or found


@functools.cache
def _classes() -> dict[type, tuple]:
    from dgl.nn.pytorch import GraphConv, SAGEConv

    return {GraphConv: (_graph_conv_reason, _of_graph_convs),
            SAGEConv: (_sage_conv_reason, _of_sage_convs)}
