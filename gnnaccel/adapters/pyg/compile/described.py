"""What a layer's call computes, as text and tensors: for each class a function that Dynamo traces.

Dynamo guards on every attribute that is read here, so a layer whose options change is compiled
anew, and layers of equal options share what was compiled.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TENSORS = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INDICES = (torch.int64, torch.int32)
_INDEX_DIMS = {"edge_index": 2, "edge_type": 1}
_SIMPLE = ("add", "sum", "mean", "max", "min")


class Described(NamedTuple):
    """``options``: (name, value) of the arguments that make a layer like this one; ``inputs``:
    (name, tensor) of the call's arguments, a pair as x0 and x1; ``parameters``: (name, tensor) by
    qualified name; ``rows``, ``width``: of the result; ``random``: two such calls differ."""

    options: tuple
    inputs: list
    parameters: list
    rows: Any
    width: Any
    random: bool = False


def gat(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None,
        return_attention_weights: Any = None) -> Described | str:
    """GATConv."""
    if size is not None or return_attention_weights is not None:
        return "size or return_attention_weights is given"
    shared = layer.lin is not None
    return _attention(layer, x, edge_index, edge_attr, (
        ("negative_slope", layer.negative_slope), ("add_self_loops", layer.add_self_loops),
        ("fill_value", layer.fill_value), ("bias", layer.bias is not None),
        *_residual(layer)),
        ("lin",) if shared else ("lin_src", "lin_dst"), ("lin_edge", "res"),
        ("att_src", "att_dst", "att_edge", "bias"), shared)


def gatv2(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None,
          return_attention_weights: Any = None) -> Described | str:
    """GATv2Conv."""
    if return_attention_weights is not None:
        return "return_attention_weights is given"
    return _attention(layer, x, edge_index, edge_attr, (
        ("negative_slope", layer.negative_slope), ("add_self_loops", layer.add_self_loops),
        ("fill_value", layer.fill_value), ("bias", layer.bias is not None),
        ("share_weights", layer.share_weights), *_residual(layer)),
        ("lin_l",) if layer.share_weights else ("lin_l", "lin_r"), ("lin_edge", "res"),
        ("att", "bias"), type(layer.in_channels) is int)


def transformer(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None,
                return_attention_weights: Any = None) -> Described | str:
    """TransformerConv."""
    if return_attention_weights is not None:
        return "return_attention_weights is given"
    return _attention(layer, x, edge_index, edge_attr, (
        ("beta", layer.beta), ("root_weight", layer.root_weight),
        ("bias", layer.lin_skip.bias is not None)),
        ("lin_key", "lin_query", "lin_value", "lin_skip"), ("lin_edge", "lin_beta"), (), True)


def _attention(layer: Any, x: Any, edge_index: Any, edge_attr: Any, options: tuple,
               linear: tuple, maybe: tuple, names: tuple, shared: bool) -> Described | str:
    """``linear``, ``maybe``: submodules that are there, and that may be; ``names``: parameters of
    the layer's own; ``shared``: made for one kind of node."""
    inputs = _features(x)
    if type(inputs) is str:
        return inputs
    rows = inputs[-1][1].shape[0]
    inputs = [*inputs, ("edge_index", edge_index)]
    if edge_attr is not None:
        inputs = [*inputs, ("edge_attr", edge_attr)]
    there = linear + tuple(name for name in maybe if getattr(layer, name, None) is not None)
    parameters = _own(layer, names) + _linear(layer, there)
    channels = 1 if shared else (1, 1)
    width = layer.heads * layer.out_channels if layer.concat else layer.out_channels
    # a number that the user set as a tensor, or a tensor to fill with, is none
    options = (("in_channels", channels), ("out_channels", layer.out_channels),
               ("heads", layer.heads), ("concat", layer.concat), ("dropout", layer.dropout),
               ("edge_dim", None if layer.lin_edge is None else 1), *options)
    return Described(options, inputs, parameters, rows, width,
                     bool(layer.training and layer.dropout > 0))


def _residual(layer: Any) -> tuple:
    """The option, which older versions of PyG do not have."""
    return (("residual", True),) if getattr(layer, "res", None) is not None else ()


def gcn(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Described | str:
    """GCNConv."""
    if layer.cached:
        return "cached=True keeps the first graph's weights in the layer"
    if type(x) not in TENSORS:
        return "x is no tensor"
    inputs = [("x", x), ("edge_index", edge_index)]
    if edge_weight is not None:
        inputs = [*inputs, ("edge_weight", edge_weight)]
    options = (("in_channels", 1), ("out_channels", layer.out_channels),
               ("improved", layer.improved), ("add_self_loops", layer.add_self_loops),
               ("normalize", layer.normalize), ("bias", layer.bias is not None),
               ("aggr", layer.aggr))
    return Described(options, inputs, _own(layer, ("bias",)) + _linear(layer, ("lin",)),
                     x.shape[0], layer.out_channels)


def sage(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Described | str:
    """SAGEConv."""
    inputs = _features(x)
    if type(inputs) is str or size is not None:
        return inputs if type(inputs) is str else "size is given"
    options = (("in_channels", 1), ("out_channels", layer.out_channels), ("aggr", layer.aggr),
               ("normalize", layer.normalize), ("root_weight", layer.root_weight),
               ("project", layer.project), ("bias", layer.lin_l.bias is not None))
    linear = ["lin_l"]
    if layer.root_weight:
        linear.append("lin_r")
    if layer.project:
        linear.append("lin")
    return Described(options, [*inputs, ("edge_index", edge_index)],
                     _linear(layer, tuple(linear)), inputs[-1][1].shape[0], layer.out_channels)


def gin(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Described | str:
    """GINConv up to its ``nn``, which the compiler sees."""
    inputs = _features(x)
    if type(inputs) is str or size is not None:
        return inputs if type(inputs) is str else "size is given"
    last = inputs[-1][1]
    return Described((("train_eps", "eps" in layer._parameters), ("aggr", layer.aggr)),
                     [*inputs, ("edge_index", edge_index)], [("eps", layer.eps)],
                     last.shape[0], last.shape[1])


def rgcn(layer: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Described | str:
    """RGCNConv and FastRGCNConv over features."""
    inputs = _features(x)
    if type(inputs) is str:
        return inputs
    if type(edge_type) not in TENSORS:
        return "edge_type is no tensor"
    options = (("in_channels", layer.in_channels), ("out_channels", layer.out_channels),
               ("num_relations", layer.num_relations), ("num_bases", layer.num_bases),
               ("num_blocks", layer.num_blocks), ("aggr", layer.aggr),
               ("root_weight", layer.root is not None), ("is_sorted", layer.is_sorted),
               ("bias", layer.bias is not None))
    return Described(options, [*inputs, ("edge_index", edge_index), ("edge_type", edge_type)],
                     _own(layer, ("weight", "comp", "root", "bias")), inputs[-1][1].shape[0],
                     layer.out_channels)


def _features(x: Any) -> Any:
    """The inputs that x is, or why it cannot be taken."""
    if type(x) in TENSORS:
        return [("x", x)]
    if type(x) is not tuple or len(x) != 2:
        return "x is neither a tensor nor a pair of tensors"
    if type(x[0]) not in TENSORS or type(x[1]) not in TENSORS:
        return "x lacks the destinations' features"
    return [("x0", x[0]), ("x1", x[1])]


def _own(layer: Any, names: tuple) -> list:
    found = []
    for name in names:
        tensor = getattr(layer, name)
        if tensor is not None:
            found.append((name, tensor))
    return found


def _linear(layer: Any, names: tuple) -> list:
    found = []
    for name in names:
        module = getattr(layer, name)
        found.append((name + ".weight", module.weight))
        if module.bias is not None:
            found.append((name + ".bias", module.bias))
    return found


def reason_of(found: Described) -> str:
    """Why the call cannot be an operator; "" where it can. Traced, too."""
    for name, value in found.options:
        if name == "aggr" and value not in _SIMPLE:
            return "the aggregation is not one of " + ", ".join(_SIMPLE)
        if not (value is None or isinstance(value, (int, float, str))
                or (name == "in_channels" and isinstance(value, tuple))):
            return name + " is no plain value"
    first = found.inputs[0][1]
    if torch.is_autocast_enabled(first.device.type):
        return "autocast is on"
    for name, tensor in (*found.inputs, *found.parameters):
        why = _tensor_reason(name, tensor, first)
        if why != "":
            return why
    return ""


def _tensor_reason(name: str, tensor: Any, first: Tensor) -> str:
    if type(tensor) not in TENSORS or tensor.layout is not torch.strided:
        return name + " is no plain tensor"
    if tensor.device != first.device:
        return name + " is on another device than x"
    if name in _INDEX_DIMS:
        return ("" if tensor.dtype in _INDICES and tensor.dim() == _INDEX_DIMS[name]
                else name + " is not of the usual shape in int64 or int32")
    if tensor.dtype is not first.dtype or tensor.dtype not in _FLOATS:
        return name + " is of another dtype than x"
    return name + " is not of shape [N, F]" if name[0] == "x" and tensor.dim() != 2 else ""


#: class name -> what describes its calls
CLASSES: dict[str, Callable[..., Described | str]] = {
    "GATConv": gat, "GATv2Conv": gatv2, "TransformerConv": transformer, "GCNConv": gcn,
    "SAGEConv": sage, "GINConv": gin, "RGCNConv": rgcn, "FastRGCNConv": rgcn,
}
