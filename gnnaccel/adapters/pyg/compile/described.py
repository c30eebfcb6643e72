"""Descriptions of layers' calls, as text and tensors: the parts of layers and calls of each class
(`kinds`), read here by functions that Dynamo traces.

Dynamo guards on every attribute that is read here, so a layer whose options change is compiled
anew, and layers of equal options share what was compiled.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import TENSORS
from gnnaccel.adapters.pyg.compile.kinds import Kind, of_map

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INDICES = (torch.int64, torch.int32)
_INDEX_DIMS = {"edge_index": 2, "edge_index_dict": 2, "edge_type": 1}
_X = ("x", "x0", "x1", "x_dict")
_SIMPLE = ("add", "sum", "mean", "max", "min")


class Described(NamedTuple):
    """The description of a call. ``options``: (name, value) of the arguments that make a layer like
    this one; ``inputs``: (name, tensor) of the call's arguments, a pair as x0 and x1, an entry of a
    dictionary by the names of both; ``parameters``: (name, tensor) by qualified name; ``rows``,
    ``width``: of the result; ``random``: two such calls differ; ``types``: where the result is a
    dictionary, its keys, each with its number of rows; ``unused``: names, those of inputs without a
    gradient among them."""

    options: tuple
    inputs: list
    parameters: list
    rows: Any
    width: Any
    random: bool = False
    types: list = []
    unused: tuple = ()


def describe(kind: Kind, layer: Any, args: tuple, kwargs: dict) -> Described | str:
    """The description of ``layer(*args, **kwargs)``, or why the call is not carried."""
    arguments = _bound((*kind.inputs, *kind.tensors, *kind.others), args, kwargs)
    if arguments is None:
        return "the arguments do not fit"
    for name in kind.others:
        if arguments.get(name) is not None:
            return name + " is given"
    call = _by_type(layer, arguments) if kind.by_type else _over_nodes(kind, layer, arguments)
    if isinstance(call, str):
        return call
    options, unused = call.options, () if kind.unused is None else kind.unused(layer, arguments)
    for name in kind.options:
        options = (*options, (name, getattr(layer, name)))
    for name, path in kind.flags:
        present = name not in unused and _at(layer, path) is not None
        options = (*options, (name, 1 if present else None))
    for name, own in kind.learned:
        options = (*options, (name, own in layer._parameters))
    parameters = list(call.parameters)
    for name in kind.own:
        tensor = getattr(layer, name, None)
        if tensor is not None and name not in unused:
            parameters.append((name, tensor))
    for name in kind.maps:
        if getattr(layer, name, None) is not None and name not in unused:
            parameters += of_map(layer, name)
    if kind.more is not None:
        extra = kind.more(layer, arguments)
        if isinstance(extra, str):
            return extra
        options, parameters = (*options, *extra[0]), [*parameters, *extra[1]]
    return call._replace(options=options, parameters=parameters, unused=unused)


def _bound(names: tuple, args: tuple, kwargs: dict) -> dict | None:
    """The arguments by name; None where they are not these, or one of the first two is missing."""
    arguments = dict(zip(names, args))
    for name in kwargs:
        if name in arguments or name not in names:
            return None
        arguments[name] = kwargs[name]
    fit = len(args) <= len(names) and names[0] in arguments and names[1] in arguments
    return arguments if fit else None


def _at(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


# --- calls over nodes of one kind, or of two ------------------------------------------------------

def _over_nodes(kind: Kind, layer: Any, given: dict) -> Described | str:
    """The inputs and the shape of the result."""
    inputs = features(given["x"])
    if type(inputs) is str:
        return inputs
    if len(inputs) == 2 and not kind.pairs:
        return "x is no tensor"
    last = inputs[-1][1]
    inputs = [*inputs, ("edge_index", given["edge_index"])]
    for at, name in enumerate(kind.tensors):
        if given.get(name) is not None:
            if len(inputs) < at + (3 if inputs[0][0] == "x0" else 2):
                return name + " is given without what stands before it"
            inputs.append((name, given[name]))
        elif name in kind.needed:
            return name + " is no tensor"
    if kind.width == "x" and inputs[0][1].shape[1] != last.shape[1]:
        return "features of a pair are of different widths"
    width = last.shape[1] if kind.width == "x" else layer.out_channels
    if kind.width == "heads" and layer.concat:
        width = layer.heads * width
    if kind.width == "heads" and hasattr(layer, "dim"):
        width = layer.dim * width
    return Described((), inputs, [], last.shape[0], width,
                     bool(layer.training and getattr(layer, "dropout", 0.0) > 0))


def features(x: Any) -> Any:
    """The inputs that ``x`` gives, or why it cannot be taken."""
    if type(x) in TENSORS:
        return [("x", x)]
    if type(x) is not tuple or len(x) != 2:
        return "x is neither a tensor nor a pair of tensors"
    if type(x[0]) not in TENSORS or type(x[1]) not in TENSORS:
        return "x lacks the destinations' features"
    return [("x0", x[0]), ("x1", x[1])]


# --- calls over dictionaries ----------------------------------------------------------------------

def _by_type(layer: Any, given: dict) -> Described | str:
    """The inputs and the results of HGTConv, with the parameters that these come from."""
    x, edges = given["x_dict"], given["edge_index_dict"]
    if type(x) is not dict or type(edges) is not dict or not edges:
        return "the arguments are no dictionaries, or there are no edges"
    types = [name for name in layer.in_channels if name in x]
    inputs, parameters, results = [], [], []
    for name in types:
        inputs.append((("x_dict", name), x[name]))
        parameters += _entry(layer, "kqv_lin", name)
    for triple in edges:
        if triple not in layer.edge_types_map or triple[0] not in types or triple[2] not in types:
            return "an edge type is not among the layer's, or its nodes are missing"
        inputs.append((("edge_index_dict", triple), edges[triple]))
        prior = "__".join(triple)
        parameters.append(("p_rel." + _kept_as(layer.p_rel, prior), layer.p_rel[prior]))
    rows = 0
    for name in types:
        if type(x[name]) not in TENSORS or x[name].dim() != 2:
            return "features are no tensors of shape [N, F]"
        if name in layer.dst_node_types:
            rows = rows + x[name].shape[0]
            results.append((name, x[name].shape[0]))
            parameters += _entry(layer, "out_lin", name)
            if x[name].shape[1] == layer.out_channels:
                parameters.append(("skip." + _kept_as(layer.skip, name), layer.skip[name]))
    return Described((), inputs, parameters, rows, layer.out_channels, False, results)


def _entry(layer: Any, name: str, node_type: str) -> list:
    maps = getattr(layer, name).lins
    path, module = f"{name}.lins.{_kept_as(maps, node_type)}", maps[node_type]
    if module.bias is None:
        return [(path + ".weight", module.weight)]
    return [(path + ".weight", module.weight), (path + ".bias", module.bias)]


def _kept_as(entries: Any, name: str) -> str:
    """The name by which one of PyG's dictionaries, or torch's, keeps an entry."""
    cls: Any = type(entries)
    return cls.to_internal_key(name) if hasattr(cls, "to_internal_key") else name


# --- whether a call is carried --------------------------------------------------------------------

def reason_of(found: Described) -> str:
    """Why the call cannot be an operator; "" where it can. Traced, too."""
    for name, value in found.options:
        if name == "aggr" and value not in _SIMPLE:
            return "the aggregation is not one of " + ", ".join(_SIMPLE)
        if not _plain(value):
            return name + " is no plain value"
    first = found.inputs[0][1]
    if type(first) not in TENSORS:
        return "features are no tensors"
    if torch.is_autocast_enabled(first.device.type):
        return "autocast is on"
    for name, tensor in (*found.inputs, *found.parameters):
        why = _tensor_reason(name if isinstance(name, str) else name[0], tensor, first)
        if why != "":
            return why
    return ""


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        for one in value:
            if not _plain(one):
                return False
        return True
    return value is None or isinstance(value, (int, float, str))


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
    return name + " is not of shape [N, F]" if name in _X and tensor.dim() != 2 else ""
