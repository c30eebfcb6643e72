"""HeteroDictLinear with many types of few rows each: its linear maps as one product by segment,
where launches make up its cost.

As a Program it is HeteroLinear's: row i is the only edge of node i, and the key that it came under
its relation.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import dict_maps, statements
from gnnaccel.dispatch.relational.edges import Ends
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec
from gnnaccel.dispatch.uncompiled import uncompiled

ARGUMENTS = ("x_dict",), ()
# types below which PyG, too, calls one map after the other: laying rows side by side costs as much
FEWEST = 10


class _Part(threading.local):
    """How many layers of this thread are calling their own maps."""

    depth = 0


_part = _Part()


class _Operands(NamedTuple):
    """Tensors by type, in the order of the layer's maps; ``biases``: none of them or all."""

    types: list[str]
    x: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]


def around(forward: Callable, native: Callable) -> Callable:
    """``forward``, the routed one, behind a quick look: most calls have few types, and such calls
    may be short."""
    from torch.compiler import is_compiling

    from gnnaccel.dispatch.observe import counters, records
    from gnnaccel.dispatch.policy.config import current

    uncompiled(counters.again)

    @functools.wraps(native)
    def layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = None if is_compiling() else current()  # compiled regions trace the host's own code
        if config is None or _part.depth:
            return native(self, *args, **kwargs)
        if len(args) == 1 and not kwargs and type(args[0]) is dict:
            code = _at_a_glance(args[0])
            if (code is not None and config.when == "profitable" and config.on_fallback == "native"
                and not records.listening()):
                counters.again(type(self).__name__, code)
                return native(self, args[0])
        return forward(self, *args, **kwargs)

    return layer


def called_as_part(module: Any, x_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``module(x_dict)`` inside another layer, whose decision includes that this runs as the host
    has it."""
    _part.depth += 1
    try:
        return module(x_dict)
    finally:
        _part.depth -= 1


@uncompiled
def _at_a_glance(x_dict: dict) -> str | None:
    """The code of the reason why one product would not pay for these rows, where that is plain."""
    if len(x_dict) < FEWEST:
        return "GA301"
    first = next(iter(x_dict.values()))
    return "GA401" if isinstance(first, Tensor) and first.is_cpu and not driver.placed() else None


def state(layer: Any, x_dict: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    if not isinstance(x_dict, Mapping):
        return reason("GA206", f"x_dict is a {type(x_dict).__name__}", "pass a dictionary by type")
    if _fused_by_host(len(x_dict)):
        return reason("GA301", "pyg-lib makes one product of them")
    operands = _operands(layer, x_dict)
    if type(operands) is Reason:
        return operands
    first, (columns, inner) = operands.x[0], operands.weights[0].shape
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return reason("GA301",
                      "a CUDA graph is being captured: in it launches cost next to nothing")
    sizes, (row, _) = tuple([x.shape[0] for x in operands.x]), calls.dtypes(first)
    rows, count, structure = sum(sizes), len(sizes), _named(sizes, first.device)
    if not rows:
        return reason("GA303", "there are no rows")
    view = relations.viewer(structure, rows, rows, count, _Rows(sizes))
    # the estimate takes their exact number
    shapes = ("x", (inner,)), ("weight", (columns, inner)), ("types", (count,))
    program = statements.typed_linear(transposed=True)
    spec = RelationalSpec(program, "HeteroDictLinear", shapes, row, row, rows, rows, rows,
                          count, view, layout=sizes)
    return spec, RelationalInputs(structure, first.device, operands)


def _fused_by_host(types: int) -> bool:
    import torch_geometric

    setting = torch_geometric.backend.use_segment_matmul
    return torch_geometric.typing.WITH_GMM and (types >= FEWEST if setting is None else setting)


def _operands(layer: Any, x_dict: Mapping[str, Any]) -> _Operands | Reason:
    """The tensors of the types that are there, or why they cannot go through one product. Each is
    looked at once: there are many."""
    operands, dtypes, devices, shapes = _Operands([], [], [], []), set(), set(), set()
    for name, module in layer._modules["lins"]._modules.items():
        if name not in x_dict:
            continue
        x = x_dict[name]
        why = guards.features_reason(x)
        if why is not None:
            return why
        if not guards.plain_linear(module):
            return reason("GA208", f"the map of {name!r} is no plain Linear, or has hooks or "
                          "a weight of another type")
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        if type(weight) is UninitializedParameter or weight.is_inference():
            why = guards.lazy_reason(module)
            if why is not None:
                return why
        for t in (x, weight) if bias is None else (x, weight, bias):
            dtypes.add(t.dtype)
            devices.add(t.device)
        shapes.add((x.shape[1], weight.shape, None if bias is None else bias.shape))
        operands.types.append(name)
        operands.x.append(x)
        operands.weights.append(weight)
        if bias is not None:
            operands.biases.append(bias)
    if not shapes:
        return reason("GA303", "the input has none of the layer's types")
    return _unlike_reason(dtypes, devices, shapes) or operands


def _unlike_reason(dtypes: set, devices: set, shapes: set) -> Reason | None:
    if len(devices) > 1:
        return reason("GA206", f"rows and weights are on {', '.join(sorted(map(str, devices)))}")
    autocast = torch.is_autocast_enabled(next(iter(devices)).type)
    if len(dtypes) > 1 and (not autocast or torch.float64 in dtypes):
        return reason("GA203", f"rows and weights are {', '.join(sorted(map(str, dtypes)))}",
                      "convert them to one dtype")
    if len(shapes) > 1:
        return reason("GA208", "the types differ in their channels, or in their biases",
                      "one product takes rows of one width")
    (channels, (columns, inner), biases), = shapes
    if channels != inner:
        return reason("GA206", f"rows of {channels} channels, the maps take {inner}")
    return (None if biases is None or biases == (columns,) else
            reason("GA206", f"biases are {list(biases)}, for {columns} channels"))


@functools.lru_cache(maxsize=256)
def _named(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor]:
    """A tensor that stands for rows of these ``sizes``: their key in the structure cache."""
    with torch.inference_mode(False):
        return (torch.empty(1, dtype=torch.int8, device=device),)


class _Rows:
    """The edges of `RelationView`, which follow from ``sizes``."""

    def __init__(self, sizes: tuple[int, ...]):
        self._sizes = sizes

    def __call__(self, name: Tensor) -> Ends:
        row = torch.arange(sum(self._sizes), device=name.device)
        sizes = torch.tensor(self._sizes, device=name.device)
        kinds = torch.arange(len(self._sizes), device=name.device)
        return row, row, kinds.repeat_interleave(sizes, output_size=row.shape[0])


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
        attend: Any) -> dict[str, Tensor]:
    types, *operands = inputs.operands
    # autocast, which cannot put tensors of the other half type together
    with calls.without_autocast(inputs.device.type):
        if attend.kernels:
            results = dict_maps.maps(attend.graph.blocks(spec.layout),
                                     spec.layout,  # type: ignore[arg-type]  # `state`'s sizes
                                     spec.row, *operands)
        else:
            results = dict_maps.maps_by_torch(spec.row, *operands)
    return dict(zip(types, results))
