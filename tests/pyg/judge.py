"""Holding an accelerated call against the host's own code, with the host's own code in fp64 as the truth."""
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

POSITIONS = ("x", "edge_index", "edge_attr", "size", "weights")  # names that errors are reported under
REORDERED = 3  # runs of the host's own code, each with the edges in another order, whose largest error is the yardstick
#: a gradient whose exact norm is below this share of the largest one is zero but for rounding
NOTHING = 1e-9


def on_routes(names: str, both: list, full: list = ()):
    """`pytest.mark.parametrize` over ``names`` and the route: ``both`` on all routes, ``full`` not under emulation."""
    cells = []
    for route, marks in (("torch", ()), ("emulated", ()), ("cuda", (pytest.mark.gpu,))):
        for values in (both if route == "emulated" else [*both, *full]):
            values = values if "," in names else (values,)
            cells.append(pytest.param(route, *values, id="-".join([route, *map(_label, values)]), marks=marks))
    return pytest.mark.parametrize(["route", *names.split(",")], cells, indirect=["route"])


def _label(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={_label(v)}" for k, v in value.items()) or "default"
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return str(value).replace(" ", "")


def spread(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with parameters that start as constants (biases, AGNN's beta) made random, so that losing one shows."""
    for p in layer.parameters():
        if bool((p == p.flatten()[0]).all()):
            torch.nn.init.normal_(p)
    return layer


def place(value: Any, device=None, dtype=None) -> Any:
    """``value`` with its tensors on ``device`` as fresh leaves, floating ones in ``dtype``."""
    if isinstance(value, (tuple, list)):
        return type(value)(place(v, device, dtype) for v in value)
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.detach().to(device, dtype).requires_grad_(value.requires_grad)


def _floats(value: Any, path: str) -> dict[str, Tensor]:
    if isinstance(value, (tuple, list)):
        return {k: t for i, v in enumerate(value) for k, t in _floats(v, f"{path}[{i}]").items()}
    return {path: value} if isinstance(value, Tensor) and value.requires_grad else {}


def _no_loss(layer: torch.nn.Module) -> Any:
    return 0.0


def run(layer: torch.nn.Module, args: tuple, kwargs: dict, loss: Callable = _no_loss, seed: int = 1) -> dict[str, Tensor | None]:
    """Output ("out") and gradients of every input and parameter, by name."""
    random.seed(seed)
    torch.manual_seed(seed)
    layer.zero_grad(set_to_none=True)
    inputs = {k: t for name, v in [*zip(POSITIONS, args), *kwargs.items()] for k, t in _floats(v, name).items()}
    for t in inputs.values():
        t.grad = None
    out = layer(*args, **kwargs)
    torch.manual_seed(seed + 1)
    weight = torch.randn(out.shape).to(out)
    found: dict[str, Tensor | None] = {"out": out.detach().clone()}
    total = (out * weight).sum() + loss(layer)
    if total.requires_grad:
        total.backward()
    found.update({k: t.grad for k, t in inputs.items()})
    found.update({k: p.grad for k, p in layer.named_parameters()})
    return found


def took(route, calls: int | None = None) -> None:
    """Every call since the last reset ran on ``route``."""
    routes = {r: n for entry in gnnaccel.stats().values() for r, n in entry["routes"].items()}
    assert list(routes) == [route.backend] and (calls is None or sum(routes.values()) == calls), gnnaccel.stats()


def compare(route, layer: torch.nn.Module, *args: Any, train: bool = True, loss: Callable = _no_loss,
            floor: float = FLOOR, require: bool = True, reorder: bool = True, **kwargs: Any) -> dict[str, Tensor | None]:
    """Judge output and all gradients of an accelerated call; every floating input gets a gradient if ``require``."""
    layer = spread(layer).to(route.device).train(train)
    if require:
        for t in _leaves((*args, *kwargs.values())):
            t.requires_grad_()

    def results(layer, dtype) -> dict[str, Tensor | None]:
        named = {k: place(v, route.device, dtype) for k, v in kwargs.items()}
        return run(layer, place(args, route.device, dtype), named, loss)

    exact = results(_double(layer), torch.float64)
    plain = [results(layer, None)]
    gnnaccel.reset_stats()
    with route.on():
        got = results(layer, None)
    took(route, 1)
    args = tuple([*args, kwargs.pop("edge_index"), kwargs.pop("edge_attr", None)][:3]) if "edge_index" in kwargs else args
    judge(got, plain, exact, floor)
    return got


def _double(layer: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(layer).double()
    if isinstance(getattr(twin, "fill_value", None), Tensor):
        twin.fill_value = twin.fill_value.double()
    return twin


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _leaves(v)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def judge(got: dict, plain: dict, exact: dict, floor: float = FLOOR) -> None:
    """AssertionError unless ``got`` is at most twice as far from ``exact`` as ``plain`` is, plus ``floor``."""
    assert got.keys() == plain.keys() == exact.keys()
    largest = max((t.double().norm().item() for k, t in exact.items() if t is not None and k != "out"), default=0.0)
    for name, truth in exact.items():
        value, native = got[name], plain[name]
        assert (value is None) == (native is None), f"{name}: a gradient of {'None' if value is None else 'a tensor'}"
        if native is None:
            continue
        assert value.dtype == native.dtype and value.shape == native.shape, f"{name}: {value.dtype}, {tuple(value.shape)}"
        assert torch.isfinite(value).all() == torch.isfinite(native).all(), f"{name} is not finite"
        scale = truth.norm().item() or 1.0
        if name != "out" and scale <= NOTHING * largest:  # truly zero: what is left is rounding of larger terms
            scale = largest
        error = (value.double() - truth).norm().item() / scale
        allowed = 2 * (native.double() - truth).norm().item() / scale + floor
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equality of two results up to fp32 rounding."""
    return a.shape == b.shape and a.dtype == b.dtype and relative(a, b) <= tolerance
