"""What a call of a user's net gives: results, kept rows, gradients, and torch's generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .judge import Results
from .programs_calls import World


def _late(w: World, x: Tensor, given: dict) -> None:
    layer = w.net.conv
    ways: dict[str, Callable[[], Any]] = {
        "eps": lambda: setattr(layer, "eps", 0.9),
        "slope": lambda: layer.opts.__setitem__("slope", 0.9),
        "rates": lambda: layer.rates.__setitem__(0, 0.1),
        "scale": lambda: setattr(layer, "scale", layer.scale * 3),
        "eval": lambda: w.net.train(not w.net.training),
        "again": lambda: w.net(x, w.edge_index, **given),
        "frozen": lambda: layer.shared.weight.requires_grad_(False),
        "act": lambda: setattr(layer.act, "negative_slope", 0.7),
        "edges": lambda: setattr(w, "edge_index", w.edge_index.flip(1)),
    }
    for name in ("edge_attr", "edge_weight", "pos"):
        ways[name] = lambda name=name: given[name].mul_(2)
    with torch.no_grad():
        if w.late in ways and (w.late not in ("edge_attr", "edge_weight") or w.late in given):
            ways[w.late]()


def call(w: World) -> Results:
    """Results, what was kept, gradients, and torch's generator."""
    w.net.zero_grad()
    x, given, asked = w.inputs()
    cast = (
        torch.autocast(w.device.type, dtype=torch.bfloat16)
        if w.cast and not w.exact
        else contextlib.nullcontext()
    )
    block = {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    found: Results = {}
    with block[w.grad](), cast:
        if w.loss == "checkpoint":
            out = checkpoint(w.net, x, w.edge_index, use_reentrant=False, **given)
        else:
            out = w.net(x, w.edge_index, **given)
    kept = _kept(w.net)
    for name, value in {"": out, **kept}.items():
        found[f"out {name}"] = value.detach().clone().requires_grad_(value.requires_grad)
    found["out generator"] = torch.get_rng_state()
    if w.loss != "checkpoint":
        _late(w, x, given)
    w.late = ""
    if w.grad == "grad" and out.requires_grad:
        asked = {**asked, **{k: p for k, p in w.net.named_parameters() if p.requires_grad}}
        asked = {k: t for k, t in asked.items() if t.requires_grad}
        found |= _gradients(w, x, out, kept, asked)
    if w.touched:
        for value in kept.values():
            if 0 not in value.stride():
                value.detach().add_(1)
    found |= {f"out argument {k}": v.detach().clone() for k, v in {"x": x, **given}.items()}
    return found


def _kept(net: nn.Module) -> dict[str, Tensor]:
    found = {}
    for path, module in net.named_modules():
        for name in ("kept", "kept_too"):
            value = module.__dict__.get(name)
            parts = value if isinstance(value, tuple) else (value,)
            found |= {f"{path}.{name}{k}": t for k, t in enumerate(parts) if isinstance(t, Tensor)}
    return found


def _gradients(w: World, x: Tensor, out: Tensor, kept: dict[str, Tensor], asked: dict) -> Results:
    seen: Results = {}
    rows = {k: t for k, t in kept.items() if t.requires_grad}
    if w.loss == "hooks":
        for p in w.net.parameters():
            if p.requires_grad and p.dim() == 2:
                p.register_hook(lambda g: g * 0.5)
        for name, t in rows.items():
            if not t._is_view():  # torch itself dies at hooks of views that were written to
                t.register_hook(lambda g, name=name: seen.__setitem__(f"hook {name}", g.clone()))
        out = out * 1.0
        out.register_hook(lambda g: g * 2)
    loss = (
        out.double().square().sum()
        if w.loss != "cos"
        else (
            out
            * torch.linspace(-1, 2, out.numel(), device=out.device).to(out).cos().view(out.shape)
        ).sum()
    )
    if w.loss == "asked":
        found = torch.autograd.grad(
            loss, [*rows.values(), out], allow_unused=True, retain_graph=True
        )
        seen |= dict(zip([f"asked {k}" for k in [*rows, "out"]], found))
    if w.loss == "second":
        first = torch.autograd.grad(
            out.double().sin().sum(), list(asked.values()), create_graph=True, allow_unused=True
        )
        seen |= {f"first {k}": g if g is None else g.detach().clone() for k, g in zip(asked, first)}
        more = [g.double().square().sum() for g in first if g is not None and g.requires_grad]
        loss = loss + sum(more)
    if w.written:
        with torch.no_grad():
            x.mul_(0.5)
    if w.loss == "twice":
        out.double().sin().sum().backward(retain_graph=True)
    loss.backward()
    return {
        **seen,
        **{
            f"gradient of {k}": t.grad if t.grad is None else t.grad.clone()
            for k, t in asked.items()
        },
    }
