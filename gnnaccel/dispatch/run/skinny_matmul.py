"""Products of tall, narrow matrices, such as all nodes' features, with a small one: by our own
kernel where that is faster.

At 170,000 x 64 x 64 in fp32 cuBLAS takes 55 us on an H200, where reading and writing take 21; the
kernel for products by segment, which keeps the small matrix in shared memory, comes nearer to that
(docs/notes/relational.md). The gradients of rows, matrix and bias come from one reading of rows.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.segment import segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.segment.segment_direct import direct_plan
from gnnaccel.cuda.segment.segment_plan import Segments, shared_limit
from gnnaccel.cuda.traverse.activation import Activation
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.run.autograd import Operation, Tensors, gradients, wants_grad

# columns that one product makes, those of which several are faster, and products side by side
_WIDE, _PART, _MOST_PARTS = 128, 64, 4
TALL = 1 << 15  # rows from which the GPU's time counts rather than the launch's


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: x [N, K], weight [C, K], bias [C]. Errors are of the size of
    `torch.nn.functional.linear`'s."""
    segments = None if x.shape[0] < TALL else tall(x, weight, weight.shape[0])
    if segments is None or bias is not None and not bias.is_contiguous():
        return F.linear(x, weight, bias)
    return _product(segments, x, weight, bias, True)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``: x [N, K], weight [K, C]."""
    segments = None if x.shape[0] < TALL else tall(x, weight, weight.shape[1])
    return x @ weight if segments is None else _product(segments, x, weight, None, False)


def _product(segments: Segments, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool,
             of_x: Activation | None = None) -> Tensor:
    """The product by the kernel, as `tall` and `mapped` say that it may be made. What it needs
    beside the addresses is kept with the segments."""
    how = precision()
    key = ("product", weight.shape, weight.device, transposed, how, of_x, x.data_ptr() & 15,
           weight.data_ptr() & 15, None if bias is None else (bias.shape, bias.device))
    call = segments.made.get(key)
    if call is None:
        columns = _columns(weight.shape[0]) if transposed else weight.shape[0]
        matrices = weight.view(1, -1, columns, weight.shape[1])
        call = segments.keep(key, segment_gemm.product(
            segments, x, matrices, bias, transposed=transposed, precision=how,
            blocks=matrices.shape[1], of_x=of_x))
    out = torch.empty(call.shape, dtype=torch.float32, device=x.device)
    call.launch(x, weight, out, bias)
    return out


@functools.lru_cache(maxsize=256)
def _columns(n: int) -> int:
    """Columns of a result with ``n`` that one product makes: all, or a part of many. Products side
    by side read rows again, which costs less than is gained (docs/notes/relational.md)."""
    if n <= _WIDE:
        return n
    for parts in range(2, _MOST_PARTS + 1):
        if n == parts * _PART:
            return _PART
    return next((n // parts for parts in range(2, _MOST_PARTS + 1)
                 if n % (8 * parts) == 0 and n // parts <= _WIDE), n)


class Pointwise(NamedTuple):
    """A function of each number of a tensor: for kernels, and by torch."""

    activation: Activation
    by_torch: Callable[[Tensor], Tensor]


def by_size(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`mapped` of many rows, torch's map of few."""
    return (F.linear if x.shape[0] < TALL else mapped)(x, weight, bias)


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           of_x: Pointwise | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x [N, K], weight [C, K], bias [C], with gradients; by our own
    kernels where they are compiled, those of the gradients as well. of_x: of that function of x,
    which the kernels compute as they read x."""
    operation = None
    if x.shape[0] >= TALL:
        # a part of a weight, or `written`'s copy of it: the way is the same, as in a checkpoint
        weight = weight.contiguous()
        operation = operation_of(x, weight, bias, of_x)
    if operation is None or compiling.problem(operation.key, operation.compile) is not None:
        return F.linear(x if of_x is None else of_x.by_torch(x), weight, bias)
    return operation.mapped(x, weight, bias)


def operation_of(x: Tensor, weight: Tensor, bias: Tensor | None, of_x: Pointwise | None = None,
                 again: bool = False) -> Linear | None:
    """The operation of `mapped` by kernels; None where torch is to make the map, as with
    ``again`` it is until rows come again (`came_before`). Kept for tensors of the same form."""
    if (x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]
        or weight.device != x.device or x.data_ptr() % 16 or weight.data_ptr() % 16
        or bias is not None and (bias.dtype is not x.dtype or bias.shape != weight.shape[:1]
                                 or bias.device != x.device or not bias.is_contiguous())
        or torch.is_autocast_enabled(x.device.type)):
        return None
    segments = tall(x, weight, _columns(weight.shape[0]))
    if segments is None:
        return None
    if again and not came_before(segments, (weight.data_ptr(), of_x)):
        return None
    cls = Linear if of_x is None or not again else OfFunction
    key = cls, weight.shape, bias is None, of_x, precision()
    operation = segments.made.get(key, key)
    if operation is key:
        n, k = weight.shape
        fits = of_x is None or segment_backward.as_one(k, n, x.dtype)
        operation = segments.keep(key, cls(segments, weight, bias, of_x) if fits else None)
    return operation


def came_before(segments: Segments, who: Any) -> bool:
    """Whether as many rows as these came before: somebody, ``who``, asked for the second time.
    Mini-batches have other rows in each step, for which nothing is prepared."""
    key = ("came before",)
    askers = segments.made.get(key) or segments.keep(key, set())
    if askers is True or who in askers:
        segments.made[key] = True
        return True
    askers.add(who)
    return False


class Linear(Operation):
    """`mapped` over ``segments``, all rows as one, for tensors of the same form as these.
    ``key``: decides which kernels those are that `compile` gets."""

    __slots__ = ("columns", "key", "of_x", "segments")

    def __init__(self, segments: Segments, weight: Tensor, bias: Tensor | None,
                 of_x: Pointwise | None):
        self.segments, self.of_x, (n, self.columns) = segments, of_x, weight.shape
        act = None if of_x is None else of_x.activation
        self.key = "mapped", self.columns, n, precision(), bias is None, act, weight.device

    def compile(self) -> None:
        """Compile the kernels of the map and of all gradients. Raises CompileError."""
        _, k, n, how, plain, act, device = self.key
        rows, fp32 = self.segments.rows, torch.float32
        columns = _columns(n)
        segment_gemm.prepare(k, columns, n // columns, fp32, rows, 1, True, how, device, of_x=act,
                             shared_x=columns < n)
        segment_backward.prepare(k, n, 1, fp32, rows, 1, True, how, device, not plain, of_x=act)
        if act is None:
            sides = (n, k) if plain else (k, n)  # as `backward` has them
            segment_gemm_grad.prepare(*sides, 1, fp32, how, device, not plain)

    def mapped(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map, as a node of autograd's where a gradient is wanted."""
        if wants_grad(x, weight, bias):
            return self.apply(x, weight, bias)
        return self.product(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _product(self.segments, x, weight, bias, True,
                        None if self.of_x is None else self.of_x.activation)

    def forward(self, needs, x, weight, bias):
        kept = x if needs[1] or self.of_x is not None else None
        # F.linear keeps a view of the weight, which reads the numbers of forward where
        # ``weight.data`` is set to others before backward
        of_weight = (weight, weight.detach()) if needs[0] else (None, None)
        return self.product(x, weight, bias), (kept, *of_weight)

    def backward(self, needs, saved, grad):
        (x, _, weight), by_bias, grad = saved, needs[2], dense(grad)
        x = None if x is None else dense(x)  # ``x.data`` may be set to other memory
        if needs[0] and needs[1]:
            return self._all(x, weight, grad, by_bias)
        if self.of_x is not None:
            return self._gradients(needs, (x, weight), grad, False)
        d_x = matmul(grad, weight) if needs[0] else None
        if not needs[1]:
            return d_x, None, grad.sum(0) if by_bias else None
        if not by_bias:  # in the order of the weight's columns
            return d_x, segment_gemm_grad.weight_grad(self.segments, grad, x,
                                                      precision=precision())[0, 0], None
        d_weight, d_bias = segment_gemm_grad.weight_grad_and_sums(self.segments, x, grad,
                                                                  precision=precision())
        return d_x, d_weight[0, 0].t().contiguous(), d_bias.view(-1)

    def _all(self, x: Tensor, weight: Tensor, grad: Tensor, by_bias: bool) -> Tensors:
        """The gradients of rows and matrix, and of a bias if asked for. What the kernels need
        beside the addresses is kept with the segments."""
        segments, how, form = self.segments, precision(), weight.unsqueeze(0)
        key = "gradients", weight.shape, by_bias, self.of_x, how
        call = segments.made.get(key, key)
        if call is key:
            call = segments.keep(key, segment_backward.prepared(
                segments, x, grad, form, transposed=True, sums=by_bias, precision=how,
                of_x=None if self.of_x is None else self.of_x.activation))
        if call is None:
            d_x, d_weight, d_bias = segment_backward.gradients(
                segments, x, grad, form, transposed=True, sums=by_bias, precision=how)
            return (d_x, d_weight[0, 0].contiguous(),
                    None if d_bias is None else d_bias.view(-1))
        d_x = torch.empty_like(x)
        found = call.launch(x, grad, weight, d_x)
        # ``data``: each counts its own versions, so that one may be written to while the other is
        # saved for a backward
        d_bias = found.data.as_strided(weight.shape[:1], (1,), weight.numel()) if by_bias else None
        return d_x, found.as_strided(weight.shape, weight.stride()), d_bias

    def recorded(self, needs, saved, grad):
        x, weight, read = saved
        weight = None if weight is None else as_read(weight, read)
        return self._gradients(needs, (x, weight), grad, True)

    def _gradients(self, needs: tuple[bool, ...], saved: Tensors, grad: Tensor,
                   create_graph: bool) -> Tensors:
        """The gradients by torch. None of them depends on what was not saved."""
        x, weight = saved
        channels = grad.shape[1]
        if x is None:
            x = grad.new_zeros(grad.shape[0], self.columns).requires_grad_()
        if weight is None:
            weight = grad.new_zeros(channels, self.columns).requires_grad_()
        bias = grad.new_zeros(channels).requires_grad_() if needs[2] else None
        return gradients(self.reference, (x, weight, bias), needs, (grad,), create_graph)

    def reference(self, x, weight, bias):
        return F.linear(x if self.of_x is None else self.of_x.by_torch(x), weight, bias)


class OfFunction(Linear):
    """`Linear` of a function of rows that a script may write to before backward: torch keeps what
    some functions gave, and of rows without gradients nothing else."""

    __slots__ = ()
    keeps_inputs = True


def as_read(weight: Tensor, read: Tensor) -> Tensor:
    """The weight with the numbers of ``read``, which it had in forward, though its ``data`` may be
    other memory since."""
    if weight.data_ptr() != read.data_ptr():
        weight = weight.view_as(weight)
        weight.data = read
    return weight


#: getter of newer versions of torch, whose older getter raises where
#: ``torch.backends.cuda.matmul.fp32_precision`` was set
_setting = getattr(torch._C, "_get_fp32_precision_getter", None)


def settings() -> tuple:
    """torch's settings of the precision of products, convolutions and recurrent layers in fp32."""
    if _setting is not None:
        return _setting("cuda", "matmul"), _setting("cuda", "conv"), _setting("cuda", "rnn")
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def precision() -> str:
    """Precision of fp32 products, "fp32" or "tf32", by torch's own settings."""
    if _setting is not None:
        return "tf32" if _setting("cuda", "matmul") == "tf32" else "fp32"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def tall(x: Tensor, weight: Tensor, columns: int) -> Segments | None:
    """All rows as one segment, if our kernel is to make this product, else None. Captures use what
    was made before them, and it is kept for their replays."""
    if (x.dtype is not torch.float32 or weight.dtype is not torch.float32
        or not driver.runs_on(x.device)):
        return None
    if (not (x.is_contiguous() and weight.is_contiguous())
        or not _fits(x.shape[1], columns, x.device)):
        return None
    rows, streams = x.shape[0], _whole(x.shape[0], x.device)
    if capture.capturing():  # begins when the device has finished all else
        found = next((one for one in streams.values() if one.has_tiles), None)
        if found is not None:
            _captured.add(found)
        return found
    stream = capture.stream(x.device)
    found = streams.get(stream)
    if found is None:
        with torch.inference_mode(False):
            found = streams.setdefault(stream, Segments(torch.arange(
                0, rows + 1, rows, dtype=torch.int32, device=x.device), rows))
    return found


@functools.lru_cache(maxsize=256)
def _fits(k: int, n: int, device: torch.device) -> bool:
    return direct_plan(k, n, torch.float32, "FP32", False, shared_limit(device)) is not None


#: Segments that captured graphs read
_captured: set[Segments] = set()


@functools.lru_cache(maxsize=64)
def _whole(rows: int, device: torch.device) -> dict[int, Segments]:
    """By stream, on which it is made: one segment of ``rows`` rows."""
    return {}
