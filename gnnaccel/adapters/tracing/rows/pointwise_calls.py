"""How torch's pointwise functions are written as operations of `cuda.messages.expression`, with
their arguments as users give them."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import Call, Leaf, Number

_ONE, _ZERO = Number(1.0), Number(0.0)
_SQUARES = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
#: operations that give truth values, and names that others have for truth values
TRUE = frozenset(("gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not",
                  "where", "masked_fill", "isnan", "isinf", "isfinite"))
_OF_TRUTH = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or",
             "minimum": "logical_and"}
Made = Callable[[Any, tuple, dict], Any]  # of the function, its arguments as trees, and those named


def _given(args: tuple, kwargs: dict, *names: str, **defaults: Any) -> list[Any]:
    """The arguments in order. ``names``: the first ones'; ``defaults``: the others, in order."""
    order = (*names, *defaults)
    if len(args) > len(order):
        raise Unseen
    arguments = {**defaults, **dict(zip(order, args))}
    for name, value in kwargs.items():
        if name not in order:
            raise Unseen
        arguments[name] = value
    if any(name not in arguments for name in order):
        raise Unseen
    return [arguments[name] for name in order]


def _unary(op: str) -> Made:
    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        return Call(op, tuple(_given(args, kwargs, "input")))

    return made


def _binary(op: str) -> Made:
    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        return Call(op, tuple(_given(args, kwargs, "input", "other")))

    return made


def _scaled(op: str) -> Made:
    """Sums, of which ``alpha`` may scale the second."""

    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        left, right, alpha = _given(args, kwargs, "input", "other", alpha=_ONE)
        return Call(op, (left, right if alpha == _ONE else Call("mul", (right, alpha))))

    return made


def _reversed_sub(function: Any, args: tuple, kwargs: dict) -> Call:
    left, right = _given(args, kwargs, "input", "other")
    return Call("sub", (right, left))


def _div(function: Any, args: tuple, kwargs: dict) -> Call:
    return Call("div", tuple(_given(args, kwargs, "input", "other")))


def _pow(function: Any, args: tuple, kwargs: dict) -> Any:
    x, power = _given(args, kwargs, "input", "exponent")
    if type(power) is not Number or type(x) is Number:
        raise Unseen
    if power.value == 1.0:
        return Call("mul", (x, _ONE))
    if power.value in _SQUARES:
        return Call(_SQUARES[power.value], (x,))
    if power.value == 3.0:
        return Call("mul", (Call("square", (x,)), x))
    return Call("pow", (x, power))


def _where(function: Any, args: tuple, kwargs: dict) -> Call:
    if function is Tensor.where:
        x, test, other = _given(args, kwargs, "self", "condition", "other")
    else:
        test, x, other = _given(args, kwargs, "condition", "input", "other")
    return Call("where", (test, x, other))


def _masked(function: Any, args: tuple, kwargs: dict) -> Call:
    x, mask, value = _given(args, kwargs, "input", "mask", "value")
    return Call("where", (mask, value, x))


def _clamp(function: Any, args: tuple, kwargs: dict) -> Any:
    x, least, most = _given(args, kwargs, "input", min=None, max=None)
    for op, bound in (("clamp_min", least), ("clamp_max", most)):
        if bound is not None:
            if type(bound) is not Number:
                raise Unseen
            x = Call(op, (x, bound))
    return x


def _with_numbers(op: str, **defaults: float) -> Made:
    """Functions with options that are numbers."""

    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        return Call(op, tuple(_numbered(args, kwargs, **defaults)))

    return made


def _numbered(args: tuple, kwargs: dict, **defaults: float) -> list[Any]:
    """The argument of a function, and its options, which are numbers."""
    *values, inplace = _given(args, kwargs, "input",
                              **{k: Number(v) for k, v in defaults.items()}, inplace=_ZERO)
    if inplace != _ZERO or not all(type(n) is Number for n in values[1:]):
        raise Unseen
    return values


def _clamped(op: str) -> Made:
    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        x, bound = _given(args, kwargs, "input", "min" if op == "clamp_min" else "max")
        if type(bound) is not Number:
            raise Unseen
        return Call(op, (x, bound))

    return made


def _log_sigmoid(function: Any, args: tuple, kwargs: dict) -> Call:
    """-softplus(-x): smooth at 0, and no large number harms it."""
    (x,) = _given(args, kwargs, "input")
    return Call("neg", (Call("softplus", (Call("neg", (x,)), _ONE, Number(20.0))),))


def _gelu(function: Any, args: tuple, kwargs: dict) -> Call:
    x, approximate = _given(args, kwargs, "input", approximate="none")
    if approximate not in ("none", "tanh"):
        raise Unseen
    return Call("gelu" if approximate == "none" else "gelu_tanh", (x,))


def _prelu(function: Any, args: tuple, kwargs: dict) -> Call:
    """`prelu` with a slope for each channel, the first dimension after that of the rows."""
    x, slope = _given(args, kwargs, "input", "weight")
    if type(slope) is not Leaf or slope.end != "p":
        raise Unseen
    if slope.tail:
        slope = slope.viewed(slope.tail[::-1])  # all but the last are 1
    above = Call("gt", (x, _ZERO))
    # the slope's gradient is 0 times 0 where x is infinite, not 0 times x
    below = Call("mul", (slope, Call("where", (above, _ZERO, x))))
    return Call("where", (above, x, below))


def _selu(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _numbered(args, kwargs)
    return Call("mul", (Call("elu", (x, Number(1.6732632423543772))), Number(1.0507009873554805)))


def _celu(function: Any, args: tuple, kwargs: dict) -> Call:
    x, alpha = _numbered(args, kwargs, alpha=1.0)
    if alpha.value <= 0.0:
        raise Unseen
    below = Call("elu", (Call("mul", (x, Number(1.0 / alpha.value))), _ONE))
    return Call("where", (Call("gt", (x, _ZERO)), x, Call("mul", (below, alpha))))


def _hardtanh(function: Any, args: tuple, kwargs: dict) -> Call:
    """`hardtanh`, without gradients at its bounds, where those of `torch.clamp` go on."""
    x, least, most = _numbered(args, kwargs, min_val=-1.0, max_val=1.0)
    inside = Call("where", (Call("ge", (x, most)), most, x))
    return Call("where", (Call("le", (x, least)), least, inside))


def _bounded(x: Any, least: float, most: float) -> Call:
    """``x`` between two numbers, and without a gradient at these."""
    return _hardtanh(None, (x, Number(least), Number(most)), {})


def _relu6(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _numbered(args, kwargs)
    return _bounded(x, 0.0, 6.0)


def _hardsigmoid(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _numbered(args, kwargs)
    return Call("div", (_bounded(Call("add", (x, Number(3.0))), 0.0, 6.0), Number(6.0)))


def _hardswish(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _numbered(args, kwargs)
    inside = _bounded(Call("add", (x, Number(3.0))), 0.0, 6.0)
    return Call("div", (Call("mul", (x, inside)), Number(6.0)))


def _softsign(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _given(args, kwargs, "input")
    return Call("div", (x, Call("add", (Call("abs", (x,)), _ONE))))


def _tanhshrink(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _given(args, kwargs, "input")
    return Call("sub", (x, Call("tanh", (x,))))


def _lerp(function: Any, args: tuple, kwargs: dict) -> Call:
    """`lerp` from the end that is nearer, as torch's."""
    start, end, weight = _given(args, kwargs, "input", "end", "weight")
    way = Call("sub", (end, start))
    near = Call("add", (start, Call("mul", (weight, way))))
    far = Call("sub", (end, Call("mul", (way, Call("sub", (_ONE, weight))))))
    if type(weight) is Number:
        return near if abs(weight.value) < 0.5 else far
    return Call("where", (Call("lt", (Call("abs", (weight,)), Number(0.5))), near, far))


def _with_two(op: str) -> Made:
    """The sum of one argument and ``op`` of two others, scaled by ``value``."""

    def made(function: Any, args: tuple, kwargs: dict) -> Call:
        x, left, right, value = _given(args, kwargs, "input", "tensor1", "tensor2", value=_ONE)
        if type(value) is not Number:
            raise Unseen
        left = left if value == _ONE else Call("mul", (value, left))
        return Call("add", (x, Call(op, (left, right))))

    return made


def _is_nan(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _given(args, kwargs, "input")
    return Call("ne", (x, x))


def _is_infinite(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _given(args, kwargs, "input")
    return Call("eq", (Call("abs", (x,)), Number(math.inf)))


def _is_finite(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _given(args, kwargs, "input")
    return Call("lt", (Call("abs", (x,)), Number(math.inf)))


def _nan_to_num(function: Any, args: tuple, kwargs: dict) -> Call:
    """Numbers in place of what is none or infinite, of fp32; these have no gradient."""
    most = torch.finfo(torch.float32).max
    x, *others = _given(args, kwargs, "input", nan=None, posinf=None, neginf=None)
    nan, above, below = [Number(default) if one is None else one
                         for one, default in zip(others, (0.0, most, -most))]
    if not all(type(one) is Number for one in (nan, above, below)):
        raise Unseen
    x = Call("where", (Call("eq", (x, Number(math.inf))), above, x))
    x = Call("where", (Call("eq", (x, Number(-math.inf))), below, x))
    return Call("where", (Call("ne", (x, x)), nan, x))


def _mish(function: Any, args: tuple, kwargs: dict) -> Call:
    (x,) = _numbered(args, kwargs)
    return Call("mul", (x, Call("tanh", (Call("softplus", (x, _ONE, Number(20.0))),))))


#: operations by the name of the function or method
OPERATIONS: dict[str, Made] = {
    **{name: _unary(name) for name in (
        "neg", "square", "reciprocal", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt",
        "rsqrt", "sin", "cos", "erf", "sigmoid", "tanh")},
    **{name: _binary(name) for name in ("mul", "maximum", "minimum", "gt", "lt", "ge", "le", "eq",
                                        "ne")},
    **{name: _with_numbers(name) for name in ("relu", "silu")},
    "add": _scaled("add"), "sub": _scaled("sub"), "rsub": _reversed_sub, "div": _div, "pow": _pow,
    "logical_and": _binary("and"), "logical_or": _binary("or"), "logical_not": _unary("not"),
    "where": _where, "masked_fill": _masked, "clamp": _clamp, "clip": _clamp,
    "clamp_min": _clamped("clamp_min"), "clamp_max": _clamped("clamp_max"),
    "logsigmoid": _log_sigmoid, "log_sigmoid": _log_sigmoid,
    "leaky_relu": _with_numbers("leaky_relu", negative_slope=0.01),
    "elu": _with_numbers("elu", alpha=1.0),
    "softplus": _with_numbers("softplus", beta=1.0, threshold=20.0), "gelu": _gelu,
    "prelu": _prelu, "selu": _selu, "celu": _celu, "hardtanh": _hardtanh, "mish": _mish,
    "relu6": _relu6, "hardsigmoid": _hardsigmoid, "hardswish": _hardswish, "softsign": _softsign,
    "tanhshrink": _tanhshrink, "lerp": _lerp, "addcmul": _with_two("mul"),
    "addcdiv": _with_two("div"), "isnan": _is_nan, "isinf": _is_infinite, "isfinite": _is_finite,
    "nan_to_num": _nan_to_num,
}


def of_truth(name: str, meta: Tensor, args: tuple) -> str:
    """The operation; for truth values the one that gives truth values as torch's does."""
    if name in ("sub", "rsub", "neg") and any(
        isinstance(a, Value) and a.meta.dtype == torch.bool for a in args):
        raise Unseen  # nor does torch
    if meta.dtype != torch.bool or name in TRUE:
        return name
    if name not in _OF_TRUTH:
        raise Unseen
    return _OF_TRUTH[name]
