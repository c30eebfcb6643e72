"""Holding an accelerated call against the host's own code, with the host's own code in fp64 as the
truth."""
from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gnnaccel
from tests.helpers import FLOOR, relative

SUMMED = 1e-6  # floor for gradients of biases: sums over all nodes
# of arguments, for the names of their gradients
POSITIONS = ("x", "edge_index", "edge_attr", "size", "weights")
# draws of the inputs' order over which errors are averaged where one draw is beyond its limit
SECOND_LOOK = 12
# a gradient below this share of the largest one is zero but for the rounding of larger terms
NOTHING = 1e-9

Results = dict[str, "Tensor | None"]


def on_routes(names: str, both: list, full: list = ()):
    """`pytest.mark.parametrize` over ``names`` and the route: ``both`` on all routes, ``full`` not
    under emulation."""
    cells = []
    for route, marks in (("torch", ()), ("emulated", ()), ("cuda", (pytest.mark.gpu,))):
        for values in (both if route == "emulated" else [*both, *full]):
            values = values if "," in names else (values,)
            cells.append(pytest.param(route, *values, id="-".join([route, *map(_label, values)]),
                                      marks=marks))
    return pytest.mark.parametrize(["route", *names.split(",")], cells, indirect=["route"])


def _label(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={_label(v)}" for k, v in value.items()) or "default"
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    # of a function: its text holds an address, different in each process
    named = getattr(value, "__name__", None)
    return (named or str(value)).replace(" ", "")


# ---- the comparison ----

def compare(route, layer: torch.nn.Module, *args: Any, train: bool = True, require: bool = True,
            floor: float = FLOOR, nothing: float = NOTHING, loss: Callable | None = None,
            calls: int = 1, positions: tuple[str, ...] = POSITIONS,
            went: Callable[[], bool] | None = None, **kwargs: Any) -> Results:
    """Judge output and all gradients of an accelerated call; gives them back.

    An error is allowed twice the host's own in fp32, plus ``floor``. In small tensors the host's
    error in one draw is luck; so where an error is beyond its limit, both are averaged over more
    draws. ``require``: every floating input gets a gradient; ``loss(layer)`` is added to the loss.
    ``nothing``: gradients below this share of the largest are measured against that. ``calls``: of
    layers that are taken over, the layer's own included; ``positions``: names of the arguments.
    ``went()``: whether an accelerated call went the right way, where not all of it goes one.
    """
    layer = spread(layer).to(route.device).train(train)
    fresh = copy.deepcopy(layer)  # a call may leave tensors on the layer that cannot be copied
    named = {**dict(zip(positions, args)), **kwargs}
    if require:
        for t in _leaves(list(named.values())):
            t.requires_grad_()

    def once(layer: torch.nn.Module, dtype: torch.dtype | None, seed: int) -> Results:
        placed = {k: place(v, route.device, dtype, seed) for k, v in named.items()}
        return run(layer, [placed[k] for k in positions[:len(args)]],
                   {k: placed[k] for k in kwargs}, loss, seed, positions)

    def draw(seed: int) -> tuple[Results, Results, Results]:
        exact, plain = once(copy.deepcopy(fresh).double(), torch.float64,
                            seed), once(layer, None, seed)
        gnnaccel.reset_stats()
        with route.on():
            got = once(layer, None, seed)
        if went is None:
            took(route, calls)
        assert went is None or went(), gnnaccel.stats()
        return got, plain, exact

    first = draw(0)
    if judge([first], floor, nothing):
        wrong = judge([draw(seed) for seed in range(1, SECOND_LOOK + 1)], floor, nothing)
        assert not wrong, wrong
    return first[0]


def native_because(route, code: str | None, call: Callable[[], Any], layer: Any = "GATConv",
                   same: Callable[[Tensor, Tensor], bool] | None = None, **options: Any) -> Any:
    """``call()`` gives what it gives without gnnaccel, or raises the same: ``layer``, or the one of
    this class name, runs natively for this reason (None: not at all). ``same``: `native_again`, or
    `close` where operations inside go our way. Gives what it gave."""
    expected = _outcome(call)
    gnnaccel.reset_stats()
    with route.on(**{"on_fallback": "native", **options}):
        got = _outcome(call)
    entry = gnnaccel.stats().get(layer if isinstance(layer, str) else type(layer).__name__)
    assert code is None or (list(entry["routes"]), list(entry["reasons"])) == (["native"], [code]), entry
    assert _again(got, expected, same or native_again)
    if code is not None:
        with route.on(), pytest.raises(gnnaccel.errors.FallbackError, match=code):
            call()
    return got


def runs_natively(route, code: str, layer: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """`native_because` of ``layer(*args)``."""
    return native_because(route, code, lambda: layer(*args), layer, **options)


def _outcome(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    try:
        return call()
    except Exception as problem:
        return problem


def _again(got: Any, native: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
    if isinstance(native, dict):
        return list(got) == list(native) and all(same(got[key], native[key]) for key in native)
    if isinstance(native, Exception):
        return (type(got), str(got)) == (type(native), str(native))
    return same(got, native)


def native_again(got: Tensor, native: Tensor) -> bool:
    """Whether ``got`` is the host's own result: bit for bit on the CPU; on a GPU, where the host
    adds up with atomics, as near as two of its calls are to each other."""
    if got.dtype is not native.dtype or got.shape != native.shape:
        return False
    return (relative(got, native) <= (1e-2 if got.element_size() == 2 else 1e-5)
            if got.is_cuda else torch.equal(got, native))


def run(layer: torch.nn.Module, args: list, kwargs: dict, loss: Callable | None = None,
        seed: int = 0, positions: tuple[str, ...] = POSITIONS) -> Results:
    """The output ("out", or "out[key]" each) and the gradients of every input and parameter, by
    name."""
    random.seed(seed)
    torch.manual_seed(seed)
    layer.zero_grad(set_to_none=True)
    inputs = {k: t for name, v in [*zip(positions, args), *kwargs.items()]
              for k, t in _graded(v, name).items()}
    for t in inputs.values():
        t.grad = None
    out = layer(*args, **kwargs)
    torch.manual_seed(seed + 1000)
    outs = _outs(out)
    total = sum((t * torch.randn(t.shape).to(t)).sum() for t in outs.values()
                if t is not None) + (loss(layer) if loss else 0.0)
    found: Results = {k: None if t is None else t.detach().clone() for k, t in outs.items()}
    if total.requires_grad:
        total.backward()
    found.update({k: t.grad for k, t in inputs.items()})
    found.update({k: p.grad for k, p in layer.named_parameters()})
    return found


def judge(draws: list[tuple[Results, Results, Results]], floor: float = FLOOR,
          nothing: float = NOTHING) -> list[str]:
    """What is wrong with draws of (got, the host's fp32, the truth): errors, averaged over the
    draws, beyond their limits.

    AssertionError for anything that is no matter of rounding.
    """
    wrong = []
    for name in draws[0][0].keys() | draws[0][2].keys():
        errors = torch.tensor([_errors(name, nothing, *draw) for draw in draws],
                              dtype=torch.float64).pow(2).sum(0).sqrt()
        # of all draws: a result that happens to be small in one must not decide
        scale = errors[2].item() or 1.0
        mine, native = errors[0].item() / scale, errors[1].item() / scale
        allowed = 2 * native + (max(floor, SUMMED) if name.endswith("bias") else floor)
        if not mine <= allowed:  # so that NaN is wrong too
            wrong.append(f"{name}: error {mine:.2e}, allowed {allowed:.2e}")
    return wrong


def _errors(name: str, nothing: float, got: Results, plain: Results,
            exact: Results) -> tuple[float, float, float]:
    """Errors of ``got`` and ``plain`` in the L2 norm, and what they are relative to."""
    assert got.keys() == plain.keys() == exact.keys()
    value, native, truth = got[name], plain[name], exact[name]
    assert (value is None) == (
        native is None), f"{name}: the gradient is {'None' if value is None else 'a tensor'}"
    if native is None:
        return 0.0, 0.0, 0.0
    assert value.dtype == native.dtype and value.shape == native.shape, f"{name}: {value.dtype}, {tuple(value.shape)}"
    largest = max((t.norm().item() for k, t in exact.items() if t is not None
                   and not k.startswith("out")), default=0.0)
    scale = truth.norm().item()
    if not name.startswith("out") and scale <= nothing * largest:
        scale = largest
    return *((t.double() - truth).norm().item() for t in (value, native)), scale


def took(route, calls: int | None = None) -> None:
    """Every call since the last reset ran on ``route``."""
    routes = [(r, n) for entry in gnnaccel.stats().values() for r, n in entry["routes"].items()]
    assert {r for r, _ in routes} == {route.backend} and calls in (None, sum(n for _, n in routes)), gnnaccel.stats()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equality of two results up to fp32 rounding."""
    return a.shape == b.shape and a.dtype == b.dtype and relative(a, b) <= tolerance


# ---- inputs ----

def spread(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with parameters that start as constants (biases, AGNN's beta) made random, so that
    losing one shows."""
    for p in layer.parameters():
        if p.numel() > 1 and bool((p == p.flatten()[0]).all()):
            torch.nn.init.normal_(p)
    return layer


def place(value: Any, device=None, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    """``value`` with its tensors on ``device`` as fresh leaves with the same strides, floating ones
    in ``dtype``.

    A ``seed`` above 0 puts the rows of floating tensors in an order of its own.
    """
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(place(v, device, dtype, seed) for v in value)
    if isinstance(value, dict):
        return {k: place(v, device, dtype, seed) for k, v in value.items()}
    if not isinstance(value, Tensor):
        # DGL's graphs
        return value.to(device) if hasattr(value, "to") and device is not None else value
    if not value.is_floating_point():
        return value.to(device)
    found = value.detach()
    if seed:
        found = found[torch.randperm(found.shape[0], generator=torch.Generator().manual_seed(seed))]
    return found.to(device, dtype).requires_grad_(value.requires_grad)


def _outs(out: Any, path: str = "out") -> Results:
    if isinstance(out, tuple):
        out = dict(enumerate(out))
    if isinstance(out, dict):
        return {k: t for name, part in out.items()
                for k, t in _outs(part, f"{path}[{name}]").items()}
    return {path: out}


def _graded(value: Any, path: str) -> dict[str, Tensor]:
    if isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {k: t for i, v in value.items() for k, t in _graded(v, f"{path}[{i}]").items()}
    return {path: value} if isinstance(value, Tensor) and value.requires_grad else {}


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _leaves(v)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def as_native(call: Callable, tolerance: float = 1e-5) -> None:
    """``call()`` gives what it gives with gnnaccel disabled; with no ``tolerance`` because it ran
    natively."""
    got = call()
    with gnnaccel.disabled():
        expected = call()
    assert close(got, expected, tolerance) if tolerance else native_again(got, expected)
