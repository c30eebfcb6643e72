"""NNConv without the matrices of its edges: sums and means as `edge_networks` says."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import edge_networks
from gnnaccel.adapters import guards as shared
from gnnaccel.adapters.dgl.layers import plain
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import turned

ARGUMENTS = ("graph", "feat", "efeat"), ()
FIELDS = ("reducer", "_in_src_feats", "_out_feats")


def state(layer: Any, graph: Any, feat: Any,
          efeat: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    from dgl import function

    mean = layer.reducer is function.mean
    if not (mean or layer.reducer is function.sum):
        return reason("GA208", "aggregator_type is neither 'sum' nor 'mean'",
                      "single operations are taken over instead")
    first = feat[0] if isinstance(feat, tuple) and feat else feat
    why = (shared.features_reason(first, "feat")
           or edge_networks.unfit("edge_func", layer.edge_func, first, layer._in_src_feats,
                                  layer._out_feats))
    if why is not None:
        return why
    reduce = edge_networks.operation(layer.edge_func, mean, layer._out_feats)
    prepared = plain.state("NNConv", reduce, graph, feat, None, lambda channels: channels, (),
                           (efeat,))
    if type(prepared) is Reason:
        return prepared
    why = shared.edge_reason(efeat, prepared[0].num_edges, first)
    if why is None and efeat.dim() != 2:
        why = reason("GA206", f"efeat is {list(efeat.shape)}")
    return why or prepared


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    nodes, _, (efeat,) = inputs.operands
    *before, last = edge_networks.modules(layer.edge_func)
    for module in before:
        efeat = module(efeat)
    sums = attend({"x": nodes.x_src, "edge": efeat})  # [num_dst, terms, channels]
    maps = turned(last.weight)  # [K, channels * results]
    if last.bias is not None:
        maps = torch.cat([maps, last.bias.unsqueeze(0)])
    out = sums.flatten(1) @ maps.reshape(-1, layer._out_feats)
    if layer.res_fc is not None:
        out = out + layer.res_fc(plain.destinations(nodes, nodes.x_src, nodes.x_dst))
    return out if layer.bias is None else out + layer.bias
