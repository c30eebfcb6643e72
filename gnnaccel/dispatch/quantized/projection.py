"""Linear maps inside quantized layers as products of int8 matrices: Tango's quantized GEMM, with a
scale per row of each operand.

    forward    y  = x' w'^T + b     x' = read(store(x)), w' = read(store(w)), a scale per row and
    per output channel, to nearest
    backward   dx = g' w"           g' = read(store(g)), stochastically; w": w with a scale per
    input channel
               dw = g^T x, db = sum of g, in fp32

So every gradient is that of the map with x and w passed straight through the rounding, and that of
x is without bias. Sums of products are whole numbers, exact in int32. x is kept in fp32 for dw, as
torch keeps it. Rows that the aggregation before stored are used again (`reuse`), the aggregation
after it gets y as stored rows too, and two maps whose results are added share the gradient's. By
kernels or by torch operations, which compute the same; a backward that is itself recorded is that
of fp32.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.int8 import int8_gemm
from gnnaccel.cuda.int8.quantize import Int8Rows
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ops.call import Kernel, compile_reason
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import cost, measure, reuse, rows, settings
from gnnaccel.dispatch.quantized.rows import Storage
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Guarded, Use
from gnnaccel.dispatch.run.autograd import Operation, checkpointed
from gnnaccel.dispatch.run.skinny_matmul import precision

_LEARNING = 2  # calls of a map after which it is known whether its result is gathered next

Native = Callable[[], Tensor]


def mapped(linear: Any, entry: Entry, config: Config, x: Tensor, native: Native,
           why_native: Reason | None) -> Tensor:
    """The result of a linear map with ``weight`` [N, K] and ``bias`` [N] or None that was asked to
    run in int8.

    ``native()`` is the host's own; ``why_native``: the reason against taking the call over at all.
    """
    weight, bias = linear.weight, linear.bias
    key = _signature(config, x, weight, bias, why_native)
    if (entry.decided is None or entry.decided[0] != key
        or settings.learning(entry.decided[1])):
        use = decide(linear, entry, config, x, weight, bias, why_native)
        entry.decided = key, use if type(use) is Reason else _Run(use)
        if type(use) is Use:
            entry.storage, entry.gain = use.storage, _gain(x, weight) if use.kernels else None
    decision = entry.decided[1]
    if type(decision) is Reason:
        entry.fell_back(decision)
        return native()
    return decision(x, weight, bias, native)


def _signature(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None,
               why_native: Reason | None) -> tuple:
    """Key of a call: all that `decide` looks at."""
    return (config.epoch, config.block_precision, x.shape, x.dtype, x.device, x.layout,
            x.requires_grad, x.is_neg(), type(x), type(weight), weight.dtype, weight.device,
            weight.is_neg(),
            None if bias is None else bias.dtype, torch.is_grad_enabled(),
            torch.is_autocast_enabled(x.device.type), precision(), why_native)


def decide(linear: Any, entry: Entry, config: Config, x: Tensor, weight: Tensor,
           bias: Tensor | None, why_native: Reason | None) -> Use | Reason:
    """The storage of this call, or why it is fp32. Counts nothing."""
    storage = settings.wanted(linear, entry, config, checkpointed())
    if type(storage) is Reason:
        return storage
    if storage.format != "int8":
        return reason("GA603", f"a linear map has no form in {storage.format}")
    if why_native is not None:
        return reason("GA607", str(why_native))
    why = _unfit(x, weight, bias)
    if why is not None:
        return why
    kernels = config.backend != "torch" and driver.runs_on(x.device)
    if config.when == "profitable":
        why = (cost.map_reason_against(*_sizes(x, weight)) if kernels else
               reason("GA604", "torch operations only imitate the format, which is not faster"))
    if why is None and kernels:
        why = compile_reason(_kernel(weight, bool(x.requires_grad and torch.is_grad_enabled())))
    return (Use(Storage("int8", "int8" if storage.backward == "int8" else "fp32"), entry, kernels)
            if why is None else why)


def _unfit(x: Tensor, weight: Tensor, bias: Tensor | None) -> Reason | None:
    """Why a call of this form cannot be quantized."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.layout is not torch.strided
           for t in tensors):
        return reason("GA603",
                      "tensors of a linear map: "
                      f"{', '.join(type(t).__name__ for t in tensors)}; dense ones are needed")
    if (any(t.dtype is not torch.float32 or t.device != x.device for t in tensors)
        or torch.is_autocast_enabled(x.device.type)):
        return reason("GA603",
                      "a linear map in another dtype than fp32, on several devices or "
                      "under autocast")
    if x.is_neg() or weight.is_neg():
        return reason("GA603", "a linear map of views that negate their numbers")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        return reason("GA603",
                      f"a linear map of features {list(x.shape)} with weights {list(weight.shape)}")
    return None if x.numel() and weight.numel() else reason("GA303")


def _sizes(x: Tensor, weight: Tensor) -> tuple:
    """Arguments of `cost.map_gain`."""
    grad = torch.is_grad_enabled()
    return (x.shape[0], x.shape[1], weight.shape[0],
            (grad and x.requires_grad, grad and weight.requires_grad), precision() == "tf32")


def _gain(x: Tensor, weight: Tensor) -> float:
    return cost.map_gain(*_sizes(x, weight))


def _kernel(weight: Tensor, grad: bool) -> Kernel:
    columns, inner = weight.shape

    def compile_() -> None:
        for k, n in ((inner, columns), (columns, inner))[:1 + grad]:
            rows.prepare(Storage("int8", "int8"), k, torch.float32, torch.float32)
            int8_gemm.kernels(k, n, torch.float32)[0]("product")
        if columns <= int8_gemm.MAX_INT8:
            int8_gemm.kernels(inner, columns, torch.int8, True)[0]("product")

    return Kernel("int8_gemm", ("quantized map", inner, columns, grad), compile_, lambda: None)


# --- the run --------------------------------------------------------------------------------------

class _Run(Guarded):
    __slots__ = ()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, native: Native) -> Tensor:
        def run() -> Tensor:
            flags = self.use.entry.watch.flags(x.device)
            return _Linear(self.use, flags).apply(x, weight, bias)

        return self.guarded(x.device, run, native, partial(_sampled, x, weight))


def _sampled(x: Tensor, weight: Tensor, count: int, turn: int) -> Tensor:
    return measure.error_of_map(x.detach(), weight.detach(),
                                lambda of: rows.by_torch(of).dequantize(), count, turn)


def product(use: Use, x: Int8Rows, weight: Int8Rows, bias: Tensor | None = None) -> Tensor:
    """fp32 ``x @ weight.T + bias``."""
    if use.kernels:
        return int8_gemm.product(x, weight, bias)  # type: ignore[return-value]
    # whole numbers, exact in fp64
    exact = x.data[:, :x.width].double() @ weight.data[:, :weight.width].double().t()
    out = exact.float() * (x.scale.unsqueeze(1) * weight.scale)
    return out if bias is None else out + bias


class _Linear(Operation):
    """[rows, N] of x [rows, K], weight [N, K] and bias [N] or None."""

    __slots__ = ("flags", "use")

    def __init__(self, use: Use, flags: Tensor | None):
        self.use, self.flags = use, flags

    def forward(self, needs, x, weight, bias):
        return self._product(x, weight, bias), (x if needs[1] else None, weight)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        use, flag = self.use, None if self.flags is None else self.flags[:1]
        stored = reuse.rows_of(x)
        if stored is None:
            stored = rows.store(x, "int8", False, use.kernels, flag)
        stored_weight = rows.store(weight, "int8", False, use.kernels, flag)
        bias = None if bias is None else bias.contiguous()
        if not use.entry.feeds or not use.kernels or weight.shape[0] > int8_gemm.MAX_INT8:
            out = product(use, stored, stored_weight, bias)
            if not use.entry.feeds and use.entry.quantized <= _LEARNING:
                reuse.offer(out, use.entry)
            return out
        stored_out: Int8Rows
        stored_out, out = int8_gemm.product(  # type: ignore[misc]
            stored, stored_weight, bias, torch.int8, flag, full=True)
        reuse.offer(out, stored_out)
        return out

    def backward(self, needs, saved, grad):
        if not needs[0] or self.use.storage.backward != "int8":
            return self.recorded(needs, saved, grad)
        use, weight = self.use, saved[1]
        stored = reuse.rows_of(grad)
        if stored is None:
            flag = None if self.flags is None else self.flags[1:]
            stored = rows.store(grad, "int8", rows.stochastic(), use.kernels, flag)
            reuse.offer(grad, stored)
        d_x = product(use, stored, rows.store(weight.t(), "int8", False, use.kernels))
        return d_x, *self.recorded((False, *needs[1:]), saved, grad)[1:]

    def recorded(self, needs, saved, grad):
        x, weight = saved
        return (grad @ weight if needs[0] else None, grad.t() @ x if needs[1] else None,
                grad.sum(0) if needs[2] else None)
