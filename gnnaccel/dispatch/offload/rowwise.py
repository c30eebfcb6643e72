"""Operations between a model's layers on rows in the host's memory: row by row, so in bands.

Operations over tensors of the host alone run there as ever, unless they are large.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from gnnaccel.dispatch.distributed.draws import Draws
from gnnaccel.dispatch.offload import calls, plan
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.sizes import NEAR
from gnnaccel.errors import OffloadError

#: rows of the host of fewer bytes stay there, where nothing on the device is asked for
_SMALL = 1 << 22
#: bytes of a band, where the device has room: enough to hide the cost of starting it
_BAND = 1 << 27
#: the least number of bands that would fill the room of a call
_AT_ONCE = 8

#: dtypes of conversions, by name
_TYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
          "double": torch.float64}
#: operations whose rows are the first argument; all else is the same for each row
_FIRST = frozenset((
    "linear", "relu", "relu6", "gelu", "elu", "selu", "celu", "leaky_relu", "silu", "mish", "prelu",
    "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "logsigmoid", "tanhshrink",
    "threshold", "tanh", "sigmoid", "exp", "log", "log1p", "sqrt", "rsqrt", "abs", "neg", "square",
    "reciprocal", "sin", "cos", "clamp", "layer_norm", "rms_norm", "batch_norm", "dropout",
    "alpha_dropout", "embedding", "matmul", "mm", "__rsub__", "__rdiv__", *_TYPES))
#: likewise along a dimension other than the first: (place of that argument, its default)
_ALONG = {"softmax": (1, None), "log_softmax": (1, None), "normalize": (2, 1), "glu": (1, -1),
          "sum": (1, None), "mean": (1, None), "amax": (1, None), "amin": (1, None),
          "norm": (2, None)}
#: operations whose rows are all arguments that have as many
_TOGETHER = frozenset(("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum",
                       "lerp", "addcmul", "where"))
#: operations whose rows are all tensors of the list, joined along a dimension other than the first
_JOINED = frozenset(("cat", "concat", "concatenate", "stack"))
_MATRICES = frozenset(("linear", "matmul", "mm", "prelu", "batch_norm"))
_DRAWING = frozenset(("dropout", "alpha_dropout"))
#: functions that neither read a tensor's numbers nor give a way to write them
_ASKING = frozenset((
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu",
        "is_sparse", "is_leaf", "grad_fn", "_version")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride,
    Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_pinned, Tensor.is_inference, Tensor.get_device, torch.is_floating_point,
    torch.is_complex, torch.is_tensor, torch._C._set_grad_enabled))


class RowWise(TorchFunctionMode):
    """A block in which operations over rows of the host run in bands on ``memory.device``. ``room``
    gives the bytes that a call may take there; ``stays``: those that rows may take which stay there
    for the next. ``idle``: whether everything passes through.

    Between two calls in bands the block sees every function of torch. Functions outside of calls,
    other than those of `_ASKING`, may read or write results and use the device's memory, so that
    the last result stays there no longer.
    """

    def __init__(self, memory: Memory, room: Callable[[], int], stays: Callable[[], int]):
        super().__init__()
        self._memory, self._room, self._stays = memory, room, stays
        self._paused = self.idle = False

    def end(self) -> None:
        """Leave the block. Within a mode that was entered later, which has to be left first, or in
        another thread, the mode stays where it is and does nothing."""
        self.idle = True
        if overrides._get_current_function_mode() is self:
            self.__exit__(None, None, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which operations run as they are: it is the work of bands."""
        held, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = held

    def __torch_function__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.idle or func in _ASKING:
            return func(*args, **kwargs)
        if self._paused:
            if func in _OF_ALL:
                _refuse_statistics(func, args, kwargs)
            return func(*args, **kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(t.dim() and t.device.type == "cpu" for t in tensors):
            self._memory.kept.drop()
            return func(*args, **kwargs)
        name, beside = getattr(func, "__name__", ""), any(t.device.type != "cpu" for t in tensors)
        places = _places(name, func, args, kwargs, tensors)
        if places and (beside or _bytes(map(tensors.__getitem__, places)) >= _SMALL):
            # a product of all rows with a matrix as large does not go row by row
            others = (t for at, t in enumerate(tensors)
                      if at not in places and t.device.type == "cpu")
            if _bytes(others) <= self._room() // 8:
                with self.paused():
                    return self._run(name, func, args, kwargs, tensors, places)
        if not (name in _DRAWING and named(func, args, kwargs).get("training") is False):
            self._memory.kept.drop()
        try:
            return func(*args, **kwargs)
        except RuntimeError as problem:
            if not beside:
                raise
            raise OffloadError(
                f"{name} of tensors in the host's memory and on the GPU cannot run in bands: "
                f"{problem}. Move the one to the other before, or see docs/offload.md for what "
                "can") from problem

    def _run(self, name: str, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor],
             places: list[int]) -> Tensor:
        if name == "batch_norm":
            arguments = named(func, args, kwargs)
            if arguments.get("training") or arguments.get("running_mean") is None:
                return self._batch_norm(**arguments)
        others = [at for at in range(len(tensors)) if at not in places]

        def function(session: Any, inputs: list[Tensor], whole: list[Tensor]) -> Tensor:
            by_place = dict(zip(places, inputs)) | dict(zip(others, whole))
            values = iter([by_place[at] for at in range(len(by_place))])
            return func(*_replaced(args, values),
                        **dict(zip(kwargs, _replaced(tuple(kwargs.values()), values))))

        return self._in_bands(name, function, [tensors[at] for at in places],
                              [tensors[at] for at in others])

    def _in_bands(self, name: str, function: calls.Function, inputs: list[Tensor],
                  whole: list[Tensor]) -> Tensor:
        total = len(inputs[0])
        widest = max((max(t.shape, default=1) * t.element_size() for t in whole), default=1)
        row = _bytes(inputs) // max(1, total) + widest
        band = max(1, min(self._room() // (_AT_ONCE * row), _BAND // row))
        call = calls.Call(function, plan.ranges(total, max(1, -(-total // band))),
                          ["rows"] * len(inputs), self._memory, name, self.paused,
                          Draws(self._memory.device) if name in _DRAWING else None,
                          beside=self._stays() - _AT_ONCE * min(band, total) * row,
                          most=int(self._room() * NEAR))
        return call([t.contiguous() for t in inputs], whole)

    def _batch_norm(self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                    weight: Tensor | None = None, bias: Tensor | None = None,
                    training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
        """`torch.nn.functional.batch_norm` by the statistics of all rows, which the host takes."""
        over = [dim for dim in range(input.dim()) if dim != 1]
        mean, var = input.mean(over), input.var(over, unbiased=False)
        if running_mean is not None and running_var is not None:
            count = input.numel() // input.shape[1]
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean), momentum)
                running_var.lerp_((var * (count / max(1, count - 1))).to(running_var), momentum)
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]

        def function(session: Any, inputs: list[Tensor], whole: list[Tensor]) -> Tensor:
            mean, var, *rest = whole
            scale = (var + eps).rsqrt() * (rest.pop(0) if weight is not None else 1)
            out = (inputs[0] - mean.view(shape)) * scale.view(shape)
            return out + rest.pop(0).view(shape) if bias is not None else out

        return self._in_bands("batch_norm", function, [input],
                              [mean, var, *(t for t in (weight, bias) if t is not None)])


_OF_ALL = (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def _refuse_statistics(func: Any, args: tuple, kwargs: dict) -> None:
    """OffloadError where a band would normalise its rows by its own statistics."""
    arguments = named(func, args, kwargs)
    if (arguments.get("training") or arguments.get("use_input_stats", func is _OF_ALL[1])
            or arguments.get("running_mean") is None):
        raise OffloadError(f"{func.__name__} within a layer's messages takes statistics of all "
                           "edges, of which a band has some. Call model.eval(), or use "
                           "torch.nn.LayerNorm")


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _places(name: str, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> list[int]:
    """Places of the rows of a call among its tensors; none where the call is not known to go row by
    row."""
    if kwargs.get("out") is not None:
        return []
    if name in _JOINED:
        rows = _joined(name, args, kwargs)
    elif name in _TOGETHER:
        deepest = max(t.dim() for t in tensors)
        most = max((len(t) for t in tensors if t.dim() == deepest > 0), default=0)
        rows = [t for t in tensors if t.dim() == deepest and len(t) == most]
        if name == "where" and len(args) < 3:
            return []
    elif (args and args[0] is tensors[0] and _row_by_row(name, func, args, kwargs, tensors[0])
          and not any(t.dim() and t.device.type == "cpu" and len(t) == len(tensors[0])
                      for t in tensors[1:])):  # these may be rows, too
        rows = tensors[:1]
    else:
        return []
    if not all(t.dim() and t.device.type == "cpu" and type(t) in _PLAIN
               and t.layout is torch.strided and t.stride(0) == max(t.stride())
               and len(t) == len(rows[0]) for t in rows):
        return []
    return [at for at, t in enumerate(tensors) if any(t is one for one in rows)]


def _joined(name: str, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors of a list that are joined along another dimension than the first."""
    listed = args[0] if args else kwargs.get("tensors")
    dim = _dimension(args, kwargs, 1, 0)
    if (not isinstance(listed, (list, tuple)) or not isinstance(dim, int)
            or not all(isinstance(t, Tensor) and t.dim() for t in listed) or not listed):
        return []
    return list(listed) if dim % (listed[0].dim() + (name == "stack")) else []


_PLAIN = (Tensor, torch.nn.Parameter)


def _row_by_row(name: str, func: Any, args: tuple, kwargs: dict, x: Tensor) -> bool:
    """Whether an operation of `_FIRST` or `_ALONG` keeps rows apart, and makes new ones."""
    if name in _ALONG:
        at, absent = _ALONG[name]
        dims = _dimension(args, kwargs, at, absent)
        every = dims if isinstance(dims, (tuple, list)) else (dims,)
        return bool(x.dim() and every) and all(isinstance(dim, int) and dim % x.dim()
                                               for dim in every)
    if name not in _FIRST:
        return False
    arguments = named(func, args, kwargs)
    if arguments.get("inplace"):
        return False
    if name in _DRAWING:
        return bool(arguments.get("training", True)) and arguments.get("p", 0.5) > 0
    if name == "layer_norm":
        return len(arguments.get("normalized_shape", ())) < x.dim()
    if name in _TYPES:
        return x.dtype != _TYPES[name]
    if name == "embedding":
        return not any(arguments.get(key) for key in ("max_norm", "scale_grad_by_freq", "sparse"))
    if name in ("matmul", "mm") and (len(args) < 2 or args[1].dim() > 2):
        return False
    return x.dim() > 1 or name not in _MATRICES


def _dimension(args: tuple, kwargs: dict, at: int, absent: Any) -> Any:
    return kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else absent


@functools.cache
def _signature(func: Any) -> inspect.Signature | None:
    """The signature of a function that torch writes in Python; None for others."""
    return inspect.signature(func) if inspect.isfunction(func) else None


def named(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A call's arguments by name; for functions not written in Python, the keyword arguments."""
    signature = _signature(func)
    return kwargs if signature is None else signature.bind(*args, **kwargs).arguments


def _tensors(values: tuple) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (one for one in value if isinstance(one, Tensor))


def _replaced(values: tuple, tensors: Iterator[Tensor]) -> list[Any]:
    """``values`` with other tensors, in the order of `_tensors`."""
    replaced: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            replaced.append(next(tensors))
        elif isinstance(value, (tuple, list)) and any(isinstance(one, Tensor) for one in value):
            replaced.append([next(tensors) if isinstance(one, Tensor) else one for one in value])
        else:
            replaced.append(value)
    return replaced
