"""Reduced precision, where the user asks for it: `quantize`, `dequantize`, `precision`,
`quant_report`.

Nothing here is ever on by ``enable()`` alone. How calls are run stands in
`gnnaccel.dispatch.quantized`.
"""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from gnnaccel import adapters
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import names
from gnnaccel.dispatch.policy.config import PRECISIONS
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import guard as guards
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.quantized.report import QuantReport
from gnnaccel.dispatch.quantized.settings import Setting
from gnnaccel.errors import UnknownLayerError
from gnnaccel.suggest import did_you_mean


def quantize(model: Any, format: str = "int8", filter_fn: Callable[[Any, str], bool] | None = None,
             overrides: dict[str, str] | None = None, backward: str | None = None,
             guard: Any = True) -> QuantReport:
    """Let the aggregation layers of ``model`` gather their rows as int8 with a scale per row, or as
    bf16. In place, reversible.

    PyG's linear maps inside layers in int8 are products of int8 matrices, where those are wide
    enough to be faster. Parameters, weight gradients, optimizer, scores and softmax of attention
    and everything outside the layers stay fp32; nothing is stored on a module. Copies and pickles
    of the model are ordinary models. It takes effect where gnnaccel is enabled. Calls that it would
    not make faster run in fp32, with a reason in `quant_report`; ``enable(when="supported")``
    quantizes them too.

    Args:
        model: a ``torch.nn.Module``; its last aggregation layer, which feeds the softmax, stays
            fp32 unless overridden. A layer given by itself is quantized.
        format: "int8" or "bf16" ("fp32": only what ``overrides`` name).
        filter_fn: ``filter_fn(module, name)`` says of each layer whether it may be quantized.
        overrides: formats by qualified name, such as ``{"convs.2": "int8"}``; a module's name
            covers the layers and linear maps inside it. ``{"convs.0.lin": "fp32"}`` keeps a linear
            map fp32.
        backward: the format of the gradients that backward gathers, "int8", "bf16" or "fp32"; None:
            as forward. Gradients are rounded stochastically, drawing from torch's generator, unless
            deterministic algorithms are demanded.
        guard: True, False, or a dict of options of `gnnaccel.dispatch.quantized.guard.Guard`, such
            as ``{"every": 50}``.

    Returns:
        the report of the model's layers: which have which format, and why.

    Raises:
        ValueError: an unknown format or option, or a format for a layer that cannot have it.
            UnknownLayerError: a name in ``overrides`` that no module has. TypeError: ``model`` is
            no module.
    """
    names.require_model(model)
    _check("format", format, PRECISIONS)
    if backward is not None:
        _check("backward", backward, PRECISIONS)
    found, maps = _settings(model, format, filter_fn, dict(overrides or {}), backward,
                            guards.options(guard))
    for layer in model.modules():
        settings.drop(layer)
    entries = [settings.keep(layer, setting) for layer, setting in found]
    kept = [settings.keep_map(*found) for found in maps]
    adapters.update_on_demand()
    configs.bump()
    _warn_if_idle(model, entries)
    return QuantReport.of(entries, kept)


def _settings(model: Any, format: str, filter_fn: Any, overrides: dict[str, str],
              backward: str | None, guard: Any) -> tuple[list[tuple[Any, Setting]],
                                                         list[tuple[Any, Any, Setting]]]:
    """Of layers, and of the linear maps in int8 inside them: (map, layer, setting)."""
    layers = _layers(model)
    maps = {name: [(f"{name}.{inner}" if name else inner, linear)
                   for inner, linear in adapters.linear_maps(layer)]
            for name, (layer, able) in layers.items() if able is True}
    named, last, found = (_named(model, overrides, layers, maps),
                          before_the_softmax(model, layers), [])
    linears = []
    for name, (layer, able) in layers.items():
        form, why = named.get(name, format), None
        if name in named:
            if form != "fp32" and able is not True:
                raise ValueError(f"overrides: {name!r} is a {type(layer).__name__}, which cannot "
                                 f"have {form} rows: {able.text}")
        elif able is not True:
            why = able
        elif filter_fn is not None and not filter_fn(layer, name):
            why = reason("GA601", "filter_fn left it out")
        elif layer is last:
            why = reason("GA602")
        found.append((layer, Setting(name or type(layer).__name__, form, backward, guard,
                                     name in named, why)))
        for inner, linear in maps.get(name, ()):
            if overrides.get(inner) == "bf16":
                raise ValueError(f"overrides: {inner!r} is a linear map, which can be 'int8' or "
                                 "'fp32', not 'bf16'")
            if named.get(inner, "fp32" if why else form) == "int8":
                inner_name = inner if name else f"{type(layer).__name__}.{inner}"
                linears.append((linear, layer, Setting(inner_name, "int8", backward, guard,
                                                       inner in named)))
    return found, linears


def dequantize(model: Any) -> int:
    """Undo `quantize` for every layer of ``model``. Returns how many had a setting. TypeError when
    ``model`` is no module."""
    count = sum(settings.drop(layer) for layer in names.require_model(model).modules())
    adapters.update_on_demand()
    configs.bump()
    return count


@contextlib.contextmanager
def precision(format: str) -> Iterator[None]:
    """A block in which layers gather their rows in ``format``: "int8", "bf16", or "fp32" for no
    quantization at all.

    Of a model that `quantize` knows, it replaces the format, but not for layers that stay fp32 or
    have a format by name. Layers of other models are quantized too, but for the last of each pass,
    which the first pass finds out. Holds in this thread or task. ValueError for another format.
    """
    _check("format", format, PRECISIONS)
    config = configs.current()
    if config is None:
        warnings.warn(f"gnnaccel: precision({format!r}) has no effect here: gnnaccel is not "
                      "enabled", RuntimeWarning,
                      stacklevel=3)
        yield
        return
    with configs.override(replace(config, block_precision=format)):
        yield


def quant_report(model: Any = None) -> QuantReport:
    """What became of the layers that were asked to quantize, of ``model`` or of all that live; see
    `QuantReport`. Waits for checks of the guard that are under way."""
    if model is None:
        return QuantReport.of(settings.entries(), settings.map_entries())
    modules = list(names.require_model(model).modules())
    return QuantReport.of(*([entry for entry in map(of, modules) if entry is not None]
                            for of in (settings.entry, settings.map_entry)))


def before_the_softmax(model: Any, layers: dict[str, tuple[Any, Any]]) -> Any:
    """The layer that stays fp32 by Tango's rule: the last aggregation layer in the order of
    registration; None of a layer by itself.

    A linear classifier behind it is fp32 anyway, but whether there is one the order of registration
    cannot tell from a skip connection; so the layer stays fp32 then too, and ``overrides`` say
    otherwise.
    """
    found = [layer for layer, _ in layers.values() if layer is not model]
    return found[-1] if found else None


# --- names ----------------------------------------------------------------------------------------

def _layers(model: Any) -> dict[str, tuple[Any, Literal[True] | Reason]]:
    """The layers of graphs inside ``model`` by qualified name, each with whether it can be
    quantized."""
    found: dict[str, tuple[Any, Literal[True] | Reason]] = {}
    around: dict[str, str] = {}  # modules that run the layers inside them as one
    for name, module in model.named_modules():
        able, outer = (adapters.storable(module),
                       next((outer for outer in around if name.startswith(outer)), None))
        if able is not None:
            found[name] = (module, able if outer is None
                           else reason("GA603", f"{around[outer]} runs its layers as one"))
        if adapters.adapter_of(module) is not None and able is not True:
            around[f"{name}." if name else ""] = type(module).__name__
    return found


def _named(model: Any, overrides: dict[str, str], layers: dict,
           maps: dict[str, list]) -> dict[str, str]:
    """The format of each layer and linear map that an override names, or a module around it; the
    longest name wins."""
    modules = dict(model.named_modules())
    known = [*layers, *(name for inner in maps.values() for name, _ in inner)]
    listed = ", ".join(map(repr, layers)) or "none that gnnaccel knows"
    found: dict[str, str] = {}
    for name in sorted(overrides, key=len):
        _check(f"overrides[{name!r}]", overrides[name], PRECISIONS)
        if name not in modules:
            raise UnknownLayerError(
                f"overrides: {type(model).__name__} has no module named "
                f"{name!r}.{did_you_mean(name, modules)} Its layers are {listed}")
        inside = [layer for layer in known if layer == name or layer.startswith(f"{name}.")
                  or not name]
        if not inside:
            raise UnknownLayerError(
                f"overrides: {name!r} is a {type(modules[name]).__name__}, with no aggregation "
                f"layer in it. The model's layers are {listed}")
        found.update(dict.fromkeys(inside, overrides[name]))
    return found


def _check(what: str, seen: Any, allowed: tuple[str, ...]) -> None:
    if seen not in allowed:
        hint = did_you_mean(seen, allowed) if isinstance(seen, str) else ""
        raise ValueError(f"{what}={seen!r} is not known; use one of "
                         f"{', '.join(map(repr, allowed))}.{hint}")


def _warn_if_idle(model: Any, entries: list) -> None:
    """A quantized model that is not is what nobody expects: say so."""
    if not any(e.setting.why is None and e.setting.format != "fp32" for e in entries):
        if any(e.setting.format != "fp32" for e in entries) or not entries:
            reasons = "; ".join(f"{e.name}: {e.setting.why}" for e in entries
                                if e.setting.why is not None)
            warnings.warn(f"gnnaccel: nothing of {type(model).__name__} is quantized: "
                          f"{reasons or 'it has no aggregation layer'}",
                          RuntimeWarning, stacklevel=3)
    elif configs.current() is None:
        warnings.warn("gnnaccel: quantize() takes effect from gnnaccel.enable() on; until then "
                      "layers run in fp32",
                      RuntimeWarning,
                      stacklevel=3)
