"""Edits of how a model is called, and other models in its place."""

from __future__ import annotations

import contextlib
import copy
import gc

import gnnaccel
import torch
from torch.utils.checkpoint import checkpoint

from .edits import edit
from .edits_models import hooks_removed
from .table import attempt
from .trees import named, tree_map


def _called(h, **inputs) -> None:
    with h.backend.on(**h.options):
        attempt(lambda: h.call(h.model, **inputs))


@edit(2)
def mode_changed(h) -> str:
    h.model.train(h.choose.random() < 0.5)
    return "train" if h.model.training else "eval"


@edit(2)
def gradients_wanted(h) -> str:
    what = h.choose.choice(("parameters", "x", "at all"))
    if what == "parameters":
        for p in h.model.parameters():
            p.requires_grad_(h.choose.random() < 0.6)
    elif what == "x":
        h.grad_x, h.x = not h.grad_x, tree_map(lambda t: t.detach(), h.x)
    else:
        h.grad = h.choose.random() < 0.6
    return what


@edit(1)
def autocast_changed(h) -> str:
    h.autocast = not h.autocast
    return str(h.autocast)


@edit(1)
def determinism_changed(h) -> str:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(),
                                       warn_only=True)
    return str(torch.are_deterministic_algorithms_enabled())


@edit(2)
def called_otherwise(h) -> str:
    way = h.choose.choice(("inference", "other edges", "checkpoint", "functional", "raising hook",
                           "other thread of options"))
    if way == "inference":
        with torch.inference_mode():
            _called(h)
    elif way == "other edges":
        _called(h, edge_index=tree_map(lambda t: t.flip(1).contiguous(), h.edge_index))
    elif way == "checkpoint" and h.grad and not h.autocast:
        with h.backend.on(**h.options):
            x = tree_map(lambda t: t.detach().requires_grad_(), h.x)
            outs = named(checkpoint(lambda: h.call(h.model, x), use_reentrant=False))
            sum(t.sum() for t in outs.values()).backward()
        h.model.zero_grad()
    elif way == "functional":
        weights = {k: v.detach() * 2 for k, v in h.model.named_parameters()}
        with h.backend.on(**h.options):
            torch.func.functional_call(h.model, weights, (h.x, h.edge_index)
                                       + (() if h.values is None else (h.values,)))
    elif way == "raising hook":
        hook = h.model.register_forward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            _called(h)
        hook.remove()
    else:
        with h.backend.on(when="profitable"):
            attempt(lambda: h.call(h.model))
    return way


@edit(2)
def options_changed(h) -> str:
    h.options = h.choose.choice(({}, {"passes": ()}, {"records": 5}, {"when": "profitable"},
                                 {"passes": ("compaction",)}, {"backward": "workers"}))
    return str(h.options)


@edit(2)
def another_model(h) -> str:
    way = h.choose.choice(("copy", "new", "other"))
    if way == "copy":
        hooks_removed(h)
        for module in h.model.modules():
            for name in ("message", "aggregate", "update", "forward", "propagate"):
                module.__dict__.pop(name, None)
        h.model = copy.deepcopy(h.model)
    elif way == "new":
        h.model = h.new_model()
    else:
        h.spare, h.model = h.model, h.spare
    return way


@edit(1)
def rules_changed(h) -> str:
    way = h.choose.choice(("exclude", "include", "reset", "clear"))
    if way == "reset":
        gnnaccel.reset_rules()
    elif way == "clear":
        gnnaccel.cache.clear()
        gc.collect()
    else:
        getattr(gnnaccel, way)(h.choose.choice(list(h.model.modules())))
    return way
