"""RGCNConv and FastRGCNConv as Programs: two ways of the host to compute one layer."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike
from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import added, statements
from gnnaccel.dispatch.relational.prepare import RootTerm
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of

ONE_DTYPE = True
FIELDS = ("in_channels_l", "out_channels", "num_relations", "num_bases", "num_blocks", "aggr")
AGGREGATIONS = ("SumAggregation", "MeanAggregation")
ARGUMENTS = ("x", "edge_index"), ("edge_type",)


class _Operands(NamedTuple):
    """Tensors of a call. ``x``: source features, or ids; ``x_dst``: of the destinations, for the
    root term; ``numbered``: both are the nodes' own numbers."""

    x: Tensor
    x_dst: Tensor
    numbered: bool = False


def state(layer: Any, x: Any, edge_index: Any,
          edge_type: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    fast = _is_fast(layer)
    why = _layer_reason(layer, fast)
    if why is not None:
        return why
    if isinstance(x, tuple) and len(x) != 2:
        return reason("GA206", f"x is a tuple of {len(x)}")
    device = layer.weight.device
    x_src, x_dst = _ends(layer, x, device)
    why = _features_reason(layer, x_src, x_dst, device)
    if why is not None:
        return why
    structure = relations.plain(edge_index, edge_type, x_src.shape[0], x_dst.shape[0], device)
    if type(structure) is Reason:
        return structure
    embedded = not x_src.is_floating_point()
    if embedded and fast and x_src.shape[0] > layer.in_channels_l:
        return reason("GA206", f"{x_src.shape[0]} nodes for tables of {layer.in_channels_l} rows")
    _scriptable(layer, fast)
    operands = _operands(x, x_src, x_dst, fast)
    numbered = operands.numbered or (isinstance(x, tuple) and x[0] is None)
    mean, bases = _averages(layer, fast), layer.num_bases is not None
    program = (statements.rgcn_embedding(mean, bases, numbered)
               if embedded else statements.rgcn(mean, bases))
    row, out = _dtypes(layer, x_src, fast)
    ignore = not fast and _ignores(layer)
    view = relations.viewer(structure, x_src.shape[0], x_dst.shape[0], layer.num_relations,
                            ignore=ignore)
    root = RootTerm(x_dst.shape[1] if layer.root is not None and x_dst.dim() == 2 else 0,
                    layer.out_channels, 1, layer.bias is not None, False)
    spec = RelationalSpec(program, "FastRGCNConv" if fast else "RGCNConv",
                          shapes_of(program, _inputs(layer, operands.x)), row, out,
                          x_src.shape[0], x_dst.shape[0], structure[0].shape[1],
                          layer.num_relations, view, ignore,
                          rows_grad=embedded or x_src.requires_grad, beside=root)
    return spec, RelationalInputs(structure, device, operands)


def _scriptable(layer: Any, fast: bool) -> None:
    """Make the attribute of the host's forward without which `torch.jit.script` cannot compile the
    layer. The host writes it in each call before it reads it, so that its value does not matter."""
    name = "_use_segment_matmul_heuristic_output"
    if not fast and name not in layer.__dict__ and not _ignores(layer):
        setattr(layer, name, False)


def _is_fast(layer: Any) -> bool:
    return any(cls.__name__ == "FastRGCNConv" for cls in type(layer).__mro__)


def _ends(layer: Any, x: Any, device: torch.device) -> tuple[Any, Any]:
    """(sources, destinations) as the caller gives them: features, ids, or their numbers for
    None."""
    pair = x if isinstance(x, tuple) else (x, x)
    x_src = torch.arange(layer.in_channels_l, device=device) if pair[0] is None else pair[0]
    return x_src, pair[1] if isinstance(x, tuple) else x_src


def _operands(x: Any, x_src: Tensor, x_dst: Tensor, fast: bool) -> _Operands:
    """The operands, by the ends that `_ends` gives. The host's fast layer takes the row at the
    node's place, whatever its id."""
    if x is None:
        return _Operands(x_src, x_dst, True)
    placed = fast and not x_src.is_floating_point()
    return _Operands(torch.arange(x_src.shape[0], device=x_src.device) if placed else x_src, x_dst)


def reads(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """Values that the route depends on beside the layer's attributes and the arguments."""
    import torch_geometric

    return (torch_geometric.typing.WITH_SEGMM, torch_geometric.backend.use_segment_matmul,
            type(layer.aggr_module))


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x, edge_index, edge_type = (args if len(args) == 3 else calls.bound(args, kwargs, *ARGUMENTS))
    device = edge_index.device
    if isinstance(x, Tensor) and x.is_floating_point():
        operands = _Operands(x, x)
    else:
        operands = _operands(x, *_ends(layer, x, device), _is_fast(layer))
    return RelationalInputs((edge_index, edge_type), device, operands)


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: None) -> tuple[RelationalSpec, RelationalInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    x, x_dst, _ = inputs.operands
    if not x.is_floating_point():  # keys say nothing of ids
        return None
    return relations.resized(spec, inputs, x, x_dst, watched=True)


def _layer_reason(layer: Any, fast: bool) -> Reason | None:
    blocks, maps = layer.num_blocks, (layer.in_channels_l, layer.out_channels)
    if blocks is not None and (not blocks or maps[0] % blocks or maps[1] % blocks):
        return reason("GA206", f"{blocks} blocks for {maps[0]} to {maps[1]} channels")
    if fast:
        return (None
                if layer.aggr in ("add", "sum", "mean")
                else reason("GA201", f"the aggregation is {layer.aggr}"))
    import torch_geometric

    plain = layer.num_bases is None and layer.num_blocks is None
    if (plain and torch_geometric.typing.WITH_SEGMM
        and torch_geometric.backend.use_segment_matmul is not False
            and type(layer.aggr_module).__name__ == "MeanAggregation"):
        return reason("GA208", "PyG with pyg-lib may average over all relations together",
                      "set torch_geometric.backend.use_segment_matmul = False to average "
                      "by relation")
    return None


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    relations, bases, blocks = layer.num_relations, layer.num_bases, layer.num_blocks
    maps = layer.in_channels_l, layer.out_channels
    if blocks is not None:
        return {"weight": (relations, blocks, maps[0] // blocks, maps[1] // blocks)}
    if bases is None:
        return {"weight": (relations, *maps)}
    return {"weight": (bases, *maps), "comp": (relations, bases)}


def _averages(layer: Any, fast: bool) -> bool:
    """Whether the layer averages. The host's fast layer goes by the name in ``aggr``, the other one
    by the module, which may have been replaced since."""
    return layer.aggr == "mean" if fast else type(layer.aggr_module).__name__ == "MeanAggregation"


def _ignores(layer: Any) -> bool:
    """Whether the host passes over edges of unknown type. Its loop over the relations does, but
    where it counts the edges of each relation first, to choose its way, it fails on such edges."""
    import torch_geometric

    return layer.num_blocks is not None or torch_geometric.backend.use_segment_matmul is not None


def _features_reason(layer: Any, x_src: Any, x_dst: Any, device: torch.device) -> Reason | None:
    for x, name in ((x_src, "x"), (x_dst, "x[1]")):
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return reason("GA206", f"{name} is a {type(x).__name__}")
        if x.dtype == torch.int64 and x.dim() == 1:
            if layer.num_blocks is not None:
                return reason("GA206", "block-diagonal weights need features")
        else:
            why = guards.features_reason(x, name)
            if why is not None:
                return why
        if x.device != device:
            return reason("GA206", f"{name} is on {x.device}, the weights on {device}")
    if x_src.is_floating_point() != x_dst.is_floating_point():
        return reason("GA206",
                      f"x is {x_src.dtype} for the sources and {x_dst.dtype} for the destinations")
    if not x_src.is_floating_point():
        return None
    return (None if x_src.shape[1] == layer.in_channels_l else
            reason("GA206",
                   f"x has {x_src.shape[1]} features, the layer takes {layer.in_channels_l}"))


def _dtypes(layer: Any, x: Tensor, fast: bool) -> tuple[torch.dtype, torch.dtype]:
    """(of the rows, of the host's sum over relations). RGCNConv adds into zeros of torch's default
    dtype. Autocast on CUDA makes reciprocals in fp32, among them those by which FastRGCNConv
    averages."""
    device = x.device.type
    row = x.dtype if x.is_floating_point() else layer.weight.dtype
    mapped = x.is_floating_point() or (fast and layer.num_bases is not None)
    autocast = row != torch.float64 and torch.is_autocast_enabled(device)
    if mapped and autocast:
        row = torch.get_autocast_dtype(device)
    if fast:
        return (row,
                torch.promote_types(row, torch.float32) if autocast and device == "cuda"
                and layer.aggr == "mean" else row)
    return row, torch.promote_types(row, torch.get_default_dtype())


def _inputs(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """The Program's operands by name."""
    tensors = {"x" if x.is_floating_point() else "ids": x}
    if layer.num_bases is not None:
        tensors.update(comp=layer.comp, bases=layer.weight)
    else:
        tensors["weight"] = layer.weight
    return tensors


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    _, x_dst, numbered = inputs.operands
    root, bias = layer.root, layer.bias
    whole = spec.row is spec.out and added.fits(spec.out, layer.out_channels, x_dst, root, bias)
    root_and_bias = added.of_one_type(x_dst, root, bias, spec.num_dst) if whole else {}
    with calls.without_autocast(inputs.device.type):
        tensors = {name: t.to(spec.row) if t.is_floating_point() else t
                   for name, t in _inputs(layer, inputs.operands.x).items()}
        out = attend({**tensors, **root_and_bias})
    if whole:
        return out
    if root is not None and numbered and root.shape[0] == out.shape[0]:
        out = alike.total((out, root))  # its rows are the nodes', none of which is read twice
    elif root is not None:
        out = out + (x_dst @ root if x_dst.is_floating_point() else root[x_dst])
    return out if bias is None else out + bias
