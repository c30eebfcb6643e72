"""FiLMConv as a Program. With one relation it passes messages as any other layer does, and its
``propagate`` is taken over."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of

AGGREGATIONS = ("SumAggregation", "MeanAggregation")
ONE_DTYPE = True
FIELDS = ("out_channels", "num_relations")
ARGUMENTS = ("x", "edge_index"), ("edge_type",)


def propagates(layer: Any) -> bool:
    return layer.num_relations <= 1


def state(layer: Any, x: Any, edge_index: Any,
          edge_type: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
    why = (guards.features_reason(x_src) or guards.features_reason(x_dst, "x[1]")
           or _modules_reason(layer))
    if why is not None:
        return why
    if x_src.dtype != x_dst.dtype or x_src.device != x_dst.device:
        return reason("GA206",
                      f"the sources are {x_src.dtype} on {x_src.device}, the "
                      f"destinations {x_dst.dtype} on "
                               f"{x_dst.device}")
    if torch.is_autocast_enabled(x_src.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    structure = relations.plain(edge_index, edge_type, x_src.shape[0], x_dst.shape[0], x_src.device)
    if type(structure) is Reason:
        return structure
    program = statements.film(layer.out_channels,
                              type(layer.aggr_module).__name__ == "MeanAggregation",
                              layer.films[0].bias is not None, layer.act is not None,
                              x_src is x_dst)
    view = relations.viewer(structure, x_src.shape[0], x_dst.shape[0], layer.num_relations,
                            ignore=True)
    shapes = {"x": x_src[:1], "x_dst": x_dst[:1], "weight": layer.lins[0].weight[None],
              "film": layer.films[0].weight[None],
              "bias": None if layer.films[0].bias is None else layer.films[0].bias[None]}
    spec = RelationalSpec(program, "FiLMConv", shapes_of(program, shapes), x_src.dtype,
                          x_src.dtype, x_src.shape[0], x_dst.shape[0], structure[0].shape[1],
                          layer.num_relations, view, True)
    return spec, RelationalInputs(structure, x_src.device, (x_src, x_dst))


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x, edge_index, edge_type = calls.bound(args, kwargs, *ARGUMENTS)
    return RelationalInputs((edge_index, edge_type), edge_index.device,
                            x if isinstance(x, tuple) else (x, x))


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: None) -> tuple[RelationalSpec, RelationalInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    return relations.resized(spec, inputs, *inputs.operands)


def _modules_reason(layer: Any) -> Reason | None:
    """Why the modules are not plain: maps must be linear maps and nothing else, since their weights
    are used directly; the activation ReLU or none."""
    why = guards.lazy_reason(*layer.lins, *layer.films, layer.lin_skip, layer.film_skip)
    if why is not None:
        return why
    if layer.act is not None and not guards.plain(layer.act, torch.nn.ReLU):
        return reason("GA208", f"the activation is {type(layer.act).__name__}", "use ReLU or None")
    for module in (*layer.lins, *layer.films):
        if not guards.plain_linear(module):
            return reason("GA208", f"a relation's map is a {type(module).__name__}, or has "
                          "hooks or a weight of another type", "use the layer's own maps")
    if {len(layer.lins), len(layer.films)} != {layer.num_relations}:
        return reason("GA206", f"{len(layer.lins)} and {len(layer.films)} maps for "
                      f"{layer.num_relations} relations")
    if (len({film.bias is None for film in layer.films}) > 1
        or any([lin.bias is not None for lin in layer.lins])):
        return reason("GA208", "some of the relations' maps have biases, others none",
                      "use the layer's own maps")
    return None


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    by_name: Shapes = {}
    (x_src, x_dst), out = inputs.operands, layer.out_channels
    for at in range(layer.num_relations):
        by_name[f"lins.{at}.weight"] = out, x_src.shape[1]
        by_name[f"films.{at}.weight"] = 2 * out, x_dst.shape[1]
        if layer.films[0].bias is not None:
            by_name[f"films.{at}.bias"] = 2 * out,
    return by_name


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    x_src, x_dst = inputs.operands
    tensors = {"x": x_src, "weight": torch.stack([lin.weight for lin in layer.lins]),
               "film": torch.stack([film.weight for film in layer.films])}
    if spec.program.has_input("x_dst"):
        tensors["x_dst"] = x_dst
    if spec.program.has_input("bias"):
        tensors["bias"] = torch.stack([film.bias for film in layer.films])
    beta, gamma = layer.film_skip(x_dst).split(layer.out_channels, dim=-1)
    skip = gamma * layer.lin_skip(x_dst) + beta
    return (skip if layer.act is None else layer.act(skip)) + attend(tensors)
