"""The classes whose calls can be operators of torch.compile: the parts of their layers, and the
arguments of their ``forward``.

A width that the constructor only needs to make weights is given as 1: the weights are the user's.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Kind(NamedTuple):
    """A class. Of ``forward``, in this order:

    ``inputs``: the features and the edges; ``tensors``: further ones that may be given, of which
    those in ``needed`` must be; ``others``: arguments with which a call is not carried; ``pairs``:
    features may be a pair; ``by_type``: features, edges and result are dictionaries.

    ``width``: of the result: "out_channels", "heads" for those of all heads where they are
    concatenated, or "x" for that of the features.

    Of the constructor: ``options``, which the layer has as attributes of the same names;
    ``flags``, (name, dotted attribute), given where that is not None; ``learned``, (name,
    parameter), whether that is a parameter and no buffer.

    Of the layer's parameters, each where there is one: ``own``, with buffers; ``maps``: of linear
    maps. ``more(layer, arguments)``: further (options, parameters), or why a call is not carried.
    ``unused(layer, arguments)``: names of flags and parameters that take no part in a call, and
    "x1" where the destinations' features only give their number. These have no gradient.
    ``sequences``: it has linear maps in `torch.nn.Sequential`. ``after``: the module that makes the
    layer's result of the operator's, and is left to the compiler.
    """

    tensors: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    learned: tuple[tuple[str, str], ...] = ()
    own: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    width: str = "out_channels"
    pairs: bool = False
    needed: tuple[str, ...] = ()
    more: Callable[[Any, dict], Any] | None = None
    unused: Callable[[Any, dict], tuple[str, ...]] | None = None
    sequences: bool = False
    after: str | None = None
    by_type: bool = False
    inputs: tuple[str, str] = ("x", "edge_index")


def of_map(layer: Any, name: str) -> list:
    """The parameters of the linear map ``name``."""
    module = getattr(layer, name)
    if module.bias is None:
        return [(name + ".weight", module.weight)]
    return [(name + ".weight", module.weight), (name + ".bias", module.bias)]


def _gat(layer: Any, given: dict) -> Any:
    shared = getattr(layer, "lin", None) is not None
    return (("in_channels", 1 if shared else (1, 1)), *_residual(layer)), []


def _gatv2(layer: Any, given: dict) -> Any:
    parameters = [] if layer.share_weights else of_map(layer, "lin_r")
    return ((("in_channels", 1 if isinstance(layer.in_channels, int) else (1, 1)),
             *_residual(layer)), parameters)


def _without_edges(layer: Any, given: dict) -> tuple[str, ...]:
    return ("edge_dim", "att_edge", "lin_edge") if given.get("edge_attr") is None else ()


def _without_root(layer: Any, given: dict) -> tuple[str, ...]:
    return () if layer.root_weight else ("bias", "lin_skip")


def _without_destinations(layer: Any, given: dict) -> tuple[str, ...]:
    root = layer.root_weight if hasattr(layer, "root_weight") else layer.root is not None
    return () if root else ("x1",)


def _residual(layer: Any) -> tuple:
    """The option, which older versions of PyG do not have."""
    return (("residual", True),) if getattr(layer, "res", None) is not None else ()


def _width(layer: Any, given: dict) -> Any:
    return (("in_channels", 1),), []


def _uncached(layer: Any, given: dict) -> Any:
    if layer.cached:
        return "cached=True keeps what was made of the first graph in the layer"
    return (() if type(layer).__name__ == "APPNP" else (("in_channels", 1),)), []


def _sage(layer: Any, given: dict) -> Any:
    parameters = of_map(layer, "lin_r") if layer.root_weight else []
    return (("in_channels", 1),), parameters + (of_map(layer, "lin") if layer.project else [])


def _tag(layer: Any, given: dict) -> Any:
    return (("in_channels", 1),), [(f"lins.{i}.weight", lin.weight)
                                   for i, lin in enumerate(layer.lins)]


def _gine(layer: Any, given: dict) -> Any:
    if layer.lin is not None:
        x = given["x"]
        width = x[0].shape[1] if isinstance(x, tuple) else x.shape[1]
        if layer.lin.weight.shape[0] != width:
            return "features of edges become wider than those of nodes"
    return (), []


def _supergat(layer: Any, given: dict) -> Any:
    if layer.training:
        return "in training the layer keeps what its attention loss is made of"
    return (("in_channels", 1),), []


def _rgat(layer: Any, given: dict) -> Any:
    """Options and parameters of RGATConv. Parameters of other options have no gradient, and are
    left out."""
    edge = given.get("edge_attr") is not None
    if edge and layer.lin_edge is None:
        return "edge_attr is given to a layer without edge_dim"
    own = ("att", "basis") if layer.num_bases is not None else ("weight",)
    own = (*own, *{"additive": ("w",), "scaled": ("l1", "b1", "l2", "b2")}.get(layer.mod, ()))
    parameters = [(name, getattr(layer, name)) for name in own]
    if edge:
        parameters += [("e", layer.e), *of_map(layer, "lin_edge")]
    return (("edge_dim", 1 if edge else None),), parameters


def _pna(layer: Any, given: dict) -> Any:
    scaled = layer.aggr_module
    several = scaled.aggr
    if type(several).__name__ != "MultiAggregation" or several.mode != "cat":
        return "the aggregations are not a list of names"
    names = []
    for one in several.aggrs:
        if type(one).__name__ not in _MOMENTS:
            return "an aggregation is not one of " + ", ".join(_MOMENTS)
        if getattr(getattr(one, "var_aggr", one), "semi_grad", False):
            return "an aggregation has half of its gradient"
        names.append(_MOMENTS[type(one).__name__])
    parameters = []
    for group in ("pre_nns", "post_nns"):
        for i, nn in enumerate(getattr(layer, group)):
            for j, module in enumerate(nn):
                if j % 2:
                    if type(module) is not torch.nn.ReLU:
                        return "the layers of " + group + " have another activation than relu"
                elif not hasattr(module, "weight") or module.bias is None:
                    return "the layers of " + group + " are no maps with a bias"
                else:
                    parameters += [(f"{group}.{i}.{j}.weight", module.weight),
                                   (f"{group}.{i}.{j}.bias", module.bias)]
    for scaler, name in (("amplification", "avg_deg_log"), ("linear", "avg_deg_lin")):
        if scaler in scaled.scaler or _INVERSE[scaler] in scaled.scaler:
            parameters.append(("aggr_module." + name, getattr(scaled, name)))
    return ((("aggregators", tuple(names)), ("scalers", tuple(scaled.scaler)),
             ("pre_layers", (len(layer.pre_nns[0]) + 1) // 2),
             ("post_layers", (len(layer.post_nns[0]) + 1) // 2),
             ("train_norm", "avg_deg_log" in scaled._parameters)), parameters)


_MOMENTS = {f"{name.capitalize()}Aggregation": name
            for name in ("sum", "mean", "max", "min", "var", "std")}
_INVERSE = {"amplification": "attenuation", "linear": "inverse_linear"}


def _hgt(layer: Any, given: dict) -> Any:
    return (("in_channels", tuple(layer.in_channels)),
            ("metadata", (tuple(layer.node_types), tuple(layer.edge_types)))), []


_ATTENTION = ("out_channels", "heads", "concat", "dropout", "aggr")
_LOOPS = ("negative_slope", "add_self_loops")
_BIAS, _EDGES = ("bias", "bias"), ("edge_dim", "lin_edge")
_WEIGHTS = "return_attention_weights"
_RGCN = Kind(("edge_type",), (), ("in_channels", "out_channels", "num_relations", "num_bases",
                                  "num_blocks", "aggr", "is_sorted"),
             (_BIAS, ("root_weight", "root")), own=("weight", "comp", "root", "bias"), pairs=True,
             needed=("edge_type",), unused=_without_destinations)

#: class name -> its `Kind`
KINDS: dict[str, Kind] = {
    "GATConv": Kind(("edge_attr",), ("size", _WEIGHTS), (*_ATTENTION, *_LOOPS, "fill_value"),
                    (_BIAS, _EDGES), own=("att_src", "att_dst", "att_edge", "bias"),
                    maps=("lin", "lin_src", "lin_dst", "lin_edge", "res"), width="heads",
                    pairs=True, more=_gat, unused=_without_edges),
    "GATv2Conv": Kind(("edge_attr",), (_WEIGHTS,),
                      (*_ATTENTION, *_LOOPS, "fill_value", "share_weights"), (_BIAS, _EDGES),
                      own=("att", "bias"), maps=("lin_l", "lin_edge", "res"), width="heads",
                      pairs=True, more=_gatv2, unused=_without_edges),
    "TransformerConv": Kind(("edge_attr",), (_WEIGHTS,), (*_ATTENTION, "beta", "root_weight"),
                            (("bias", "lin_skip.bias"), _EDGES),
                            maps=("lin_key", "lin_query", "lin_value", "lin_skip", "lin_edge",
                                  "lin_beta"), width="heads", pairs=True, more=_width,
                            unused=_without_root),
    "SuperGATConv": Kind((), ("neg_edge_index", "batch"),
                         (*_ATTENTION, *_LOOPS, "attention_type"), (_BIAS,),
                         own=("att_l", "att_r", "bias"), maps=("lin",), width="heads",
                         more=_supergat),
    "AGNNConv": Kind(options=("add_self_loops", "aggr"), learned=(("requires_grad", "beta"),),
                     own=("beta",), width="x"),
    "RGATConv": Kind(("edge_type", "edge_attr"), ("size", _WEIGHTS),
                     (*_ATTENTION, "in_channels", "num_relations", "num_bases", "num_blocks", "mod",
                      "attention_mechanism", "attention_mode", "dim", "negative_slope"), (_BIAS,),
                     own=("q", "k", "bias"), width="heads", pairs=True, needed=("edge_type",),
                     more=_rgat),
    "RGCNConv": _RGCN, "FastRGCNConv": _RGCN,
    "HGTConv": Kind(options=("out_channels", "heads"), maps=("k_rel", "v_rel"), more=_hgt,
                    by_type=True, inputs=("x_dict", "edge_index_dict")),
    "PNAConv": Kind(("edge_attr",), (), ("in_channels", "out_channels", "towers", "divide_input"),
                    (("edge_dim", "edge_encoder"),), maps=("lin", "edge_encoder"), more=_pna,
                    sequences=True),
    "GCNConv": Kind(("edge_weight",), (), ("out_channels", "improved", "add_self_loops",
                                           "normalize", "aggr"), (_BIAS,), own=("bias",),
                    maps=("lin",), more=_uncached),
    "SAGEConv": Kind((), ("size",), ("out_channels", "aggr", "normalize", "root_weight", "project"),
                     (("bias", "lin_l.bias"),), maps=("lin_l",), pairs=True, more=_sage,
                     unused=_without_destinations),
    "GraphConv": Kind(("edge_weight",), ("size",), ("out_channels", "aggr"),
                      (("bias", "lin_rel.bias"),), maps=("lin_rel", "lin_root"), pairs=True,
                      more=_width),
    "GINConv": Kind((), ("size",), ("aggr",), learned=(("train_eps", "eps"),), own=("eps",),
                    width="x", pairs=True, after="nn"),
    "GINEConv": Kind(("edge_attr",), ("size",), ("aggr",), (("edge_dim", "lin"),),
                     (("train_eps", "eps"),), ("eps",), ("lin",), width="x", pairs=True,
                     needed=("edge_attr",), more=_gine, after="nn"),
    "SGConv": Kind(("edge_weight",), (), ("out_channels", "K", "add_self_loops", "aggr"),
                   (("bias", "lin.bias"),), maps=("lin",), more=_uncached),
    "TAGConv": Kind(("edge_weight",), (), ("out_channels", "K", "normalize", "aggr"), (_BIAS,),
                    own=("bias",), more=_tag),
    "APPNP": Kind(("edge_weight",), (), ("K", "alpha", "dropout", "add_self_loops", "normalize",
                                         "aggr"), width="x", more=_uncached),
}
