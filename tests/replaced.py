"""Parameters and sizes of a layer that somebody replaces, before its first call or after some: what
gnnaccel gives then is what the host gives, or it raises as the host does."""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tests.emulation.guards import guarded
from tests.judge import Results, place, run

REMEMBERED = 2  # calls after which the next is a repeated one
_TOLERANCE = 1e-4


def parameters(layer: Module, path: str = "") -> list[str]:
    """Names of the layer's parameters and of its buffers of numbers; of modules and of parameters in
    a list or dictionary, which are alike, only the first's."""
    alike = isinstance(layer, (torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.ParameterDict,
                               torch.nn.ParameterList))
    own = [path + name for name, t in (*layer._parameters.items(), *layer._buffers.items())
           if t is not None and t.is_floating_point()]
    inside = [name for key, module in layer.named_children()
              for name in parameters(module, f"{path}{key}.")]
    kept = own if not alike else own[:1]
    if alike and inside:
        first = inside[0].removeprefix(path).partition(".")[0]
        inside = [name for name in inside if name.startswith(f"{path}{first}.")]
    return kept + inside


def few_quick(cases: list) -> list:
    """The cases, of which `make test` runs one in 24."""
    return [case if at % 24 == 0 else pytest.param(*case, marks=pytest.mark.long)
            for at, case in enumerate(cases)]


def sizes(layer: Module) -> list[str]:
    """Names of the whole numbers that the layer itself keeps."""
    return [name for name, value in vars(layer).items()
            if type(value) is int and name not in ("node_dim",)]


def tensors(t: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What somebody may put in the place of ``t``."""
    shapes = [[], [1], [1] * t.dim(), [1, *t.shape]]
    for dim, size in enumerate(t.shape):
        shapes += [[*t.shape[:dim], other, *t.shape[dim + 1:]] for other in (size - 1, size + 1, 1)]
    for at, shape in enumerate(shapes):
        if 0 not in shape and shape != list(t.shape) and shape not in shapes[:at]:
            yield f"{shape}", torch.rand(shape) + 0.5
    if t.dim() > 1:
        yield "turned", t.detach().mT.clone()
    yield "float64", t.detach().double()
    yield "None", None


def unlike(route: Any, layer: Module, args: tuple, changes: Iterator) -> list[str]:
    """Which ``changes`` (label, change(layer, in_place)) make calls unlike the host's: of a layer
    that was never called, and of one whose calls are remembered."""
    found = []
    for label, change in changes:
        for called in (0, REMEMBERED):
            torch.manual_seed(0)
            own = copy.deepcopy(layer).to(route.device)
            inputs = [place(a, route.device) for a in args]
            with route.on(on_fallback="native"):
                for _ in range(called):
                    own(*inputs)
            change(own, called > 0)
            if not called:
                expected = _attempt(own, inputs)
            with route.on(on_fallback="native"):
                got = _attempt(own, inputs)
            wrong = _difference(got, expected)
            if wrong:
                found.append(f"{label}, after {called} calls: {wrong}")
    return found


def check(route: Any, layer: Module, args: tuple, changes: Iterator) -> None:
    """Whatever is changed, calls give what the host's give."""
    wrong = unlike(route, layer, args, changes)
    assert not wrong, "\n".join(wrong)


def check_sizes(route: Any, made: Callable, name: str, size: str) -> None:
    """As `check`, of a whole number of the layer ``made(name)``."""
    layer, args = made(name)
    check(route, layer, args, of_size(layer, size))


def of_parameter(layer: Module, name: str) -> Iterator[tuple[str, Callable]]:
    """(label, change) of all that may be put in the place of a parameter."""
    old = dict([*layer.named_parameters(), *layer.named_buffers()])[name]
    for label, value in tensors(old):
        yield f"{name} {label}", functools.partial(replace, name, value)


def of_size(layer: Module, name: str) -> Iterator[tuple[str, Callable]]:
    """As `of_parameter`, of a whole number."""
    value = getattr(layer, name)
    for other in (value - 1, value + 1, 2 * value, 1):
        if other > 0 and other != value:
            yield f"{name} = {other}", (lambda own, in_place, other=other:
                                        setattr(own, name, other))


def replace(name: str, value: Tensor | None, layer: Module, in_place: bool) -> None:
    """Puts ``value`` in the place of a parameter; ``in_place``: by ``.data``. What lies beside it in
    memory are no numbers."""
    path, _, own = name.rpartition(".")
    module = layer.get_submodule(path)
    if value is None:
        setattr(module, own, None)
        return
    old = getattr(module, own)
    new = guarded(value).tensor if old.device.type == "cpu" else value.to(old.device)
    if in_place or type(old) is not Parameter:
        old.data = new
    else:
        setattr(module, own, Parameter(new))


def _attempt(layer: Module, inputs: list) -> Results | str:
    try:
        return run(layer, inputs, {})
    except Exception as error:  # whatever the host raises
        return f"raises {type(error).__name__}: {str(error)[:80]}"


def _difference(got: Results | str, expected: Results | str) -> str | None:
    if isinstance(got, str) or isinstance(expected, str):
        same = isinstance(got, str) and isinstance(expected, str)
        return None if same else f"{_said(got)}, the host {_said(expected)}"
    if got.keys() != expected.keys():
        return f"{sorted(got)}, the host {sorted(expected)}"
    largest = max((t.norm().item() for k, t in expected.items()
                   if t is not None and not k.startswith("out")), default=0.0)
    for name, theirs in expected.items():
        ours = got[name]
        if (ours is None) is not (theirs is None):
            return f"{name}: {'no ' if ours is None else 'a '}gradient"
        if theirs is None:
            continue
        if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            return (f"{name}: {list(ours.shape)} {ours.dtype}, the host {list(theirs.shape)} "
                    f"{theirs.dtype}")
        error = (ours.double() - theirs.double()).norm().item()
        if not error <= _TOLERANCE * (theirs.norm().item() + 1e-3 * largest) + 1e-6:
            return f"{name}: error {error:.1e} of {theirs.norm().item():.1e}"
    return None


def _said(found: Results | str) -> str:
    return found if isinstance(found, str) else "computes"
