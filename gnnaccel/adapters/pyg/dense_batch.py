"""PyG's ``to_dense_batch``, which pads the nodes of each graph to the same number: places of the
rows are found once for each ``batch``, for all layers that pad by it.

PyG finds them anew in each call, by some twenty operations and two waits for the device.
`GPSConv` takes the rows out again by a mask, for which torch counts the true elements, waits, and
sorts in its backward; over a known ``batch`` rows are taken by their number. Results and gradients
are the same bits. On a CPU PyG's code runs.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from gnnaccel.adapters import own
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ops import by_index
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.run.autograd import checkpointed

_MODULE = "torch_geometric.utils._to_dense_batch"
_GPS = "torch_geometric.nn.conv.gps_conv"
_PARAMETERS = ("x", "batch", "fill_value", "max_num_nodes", "batch_size")
_unused = [0]  # places kept since some were used again (`kept_results.find`)


def install(patches: PatchSet, modules: list[Any]) -> None:
    """Replace ``to_dense_batch`` wherever one of ``modules`` has it, but where it is defined:
    pickles look for it there."""
    defined = importlib.import_module(_MODULE)
    native = defined.to_dense_batch
    if (not own.is_function(native, "torch_geometric", "to_dense_batch")
        or tuple(inspect.signature(native).parameters) != _PARAMETERS):
        return
    for module in modules:
        if module is not defined and vars(module).get("to_dense_batch") is native:
            patches.set(module, "to_dense_batch", _padding(native, module.__name__ == _GPS),
                        "Finds where the rows of a `batch` go once for all calls, where it is on "
                        "a GPU; on a CPU PyG's code runs.")


def _padding(native: Callable, taken_out: bool) -> Callable:
    """``native`` over a known ``batch``. ``taken_out``: the caller keeps the mask to itself, and
    takes rows out by it, so that it may be a `Mask`."""

    from torch_geometric.experimental import is_experimental_mode_enabled as mode

    @functools.wraps(native)
    def to_dense_batch(x: Tensor, batch: Tensor | None = None, fill_value: float = 0.0,
                       max_num_nodes: int | None = None, batch_size: int | None = None
                       ) -> tuple[Tensor, Tensor]:
        entry = (None if is_compiling() or current() is None
                 or mode("disable_dynamic_shapes")  # which asks for sizes
                 else _known(x, batch, fill_value, max_num_nodes, batch_size))
        if not entry:
            return native(x, batch, fill_value, max_num_nodes, batch_size)
        index, mask, turned = entry
        out = x.new_full((mask.numel() + 1, *x.shape[1:]), float(fill_value))
        out[index] = x
        out = out[:-1].view(*mask.shape, *x.shape[1:])
        # there is room for all; and a call that is repeated saves the same, first or not
        if taken_out and max_num_nodes is None and not checkpointed():
            return out, Mask.of(mask, index, turned)
        return out, mask.clone()

    return to_dense_batch


def _known(x: Any, batch: Any, fill: Any, most: Any, graphs: Any) -> tuple | None:
    """`places` of a batch; None, or nothing, where PyG's own code is to run."""
    if (type(batch) is not Tensor or type(x) not in (Tensor, Parameter) or not x.is_floating_point()
        or not (batch.is_cuda or driver.placed()) or batch.dtype != torch.int64
        or batch.dim() != 1 or x.layout is not torch.strided or x.device != batch.device
        or not x.numel() or len(x) != len(batch)
        or type(most) not in (int, type(None)) or type(graphs) not in (int, type(None))
        or type(fill) not in (float, int)
        or torch.finfo(x.dtype).max < abs(fill) < math.inf):  # PyG's are infinite then
        return None
    return kept_results.find("places", places, (batch, most, graphs), {}, unused=_unused)


def places(batch: Tensor, most: int | None, graphs: int | None) -> tuple:
    """Destinations of the rows of ``batch``, int64 [N]: their places, int64 [N], among ``graphs``
    times ``most`` rows and one more for those that find no room; which of the rows are taken, bool
    [graphs, most]; and the places if ``most`` came before ``graphs``. Nothing where ``batch`` is
    not sorted, or names other graphs. Waits for the device."""
    count = by_index.groups_in(batch) if graphs is None else graphs
    least, largest, falls = torch.stack(
        [*torch.aminmax(batch), (batch[1:] < batch[:-1]).any().long()]).tolist()
    if falls or least < 0 or largest >= count or (most is not None and most < 0):
        return ()
    sizes = batch.new_zeros(count).scatter_add_(0, batch, torch.ones_like(batch))
    most = int(sizes.max()) if most is None else most
    at = torch.arange(len(batch), device=batch.device) - (sizes.cumsum(0) - sizes)[batch]
    index = torch.where(at < most, batch * most + at, count * most)
    occupied = torch.zeros(count * most + 1, dtype=torch.bool, device=batch.device)
    occupied[index] = True
    return index, occupied[:-1].view(count, most), at * count + batch


class Mask(Tensor):
    """A mask [graphs, most] that knows where its true elements are: ``at``, and ``turned`` if its
    axes are exchanged. Rows taken by it, ``h[mask]``, are taken by number. All other operations
    take and give plain tensors."""

    at: Tensor
    turned: Tensor

    @staticmethod
    def of(mask: Tensor, at: Tensor, turned: Tensor) -> Mask:
        result = mask.as_subclass(Mask)
        result.at, result.turned = at, turned
        return result

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.__getitem__ and type(args[1]) is cls:
                rows, mask = args
                if type(rows) is Tensor and rows.shape[:2] == mask.shape:
                    return _taken(rows, mask)
            args = [plain(a) for a in args]
            return function(*args, **{k: plain(a) for k, a in (kwargs or {}).items()})


def _taken(rows: Tensor, mask: Mask) -> Tensor:
    """``rows[mask]``. Results of torch's attention have their first two axes exchanged in
    memory."""
    turned = rows.transpose(0, 1)
    if turned.is_contiguous() and not rows.is_contiguous():
        return turned.flatten(0, 1).index_select(0, mask.turned)
    return rows.flatten(0, 1).index_select(0, mask.at)


def plain(value: Any) -> Any:
    """A `Mask` as a tensor; anything else as it is."""
    return value.as_subclass(Tensor) if type(value) is Mask else value
