"""Repeated calls of any layer in other modes, with other modules and with frozen parameters."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import gnnaccel
from gnnaccel.dispatch.memory.layer_memory import memories
from tests.helpers import relative
from tests.judge import place
from tests.pyg.test_staleness_whole import CASES, each, tensors, warmed


def gradients(layer, args, call=None) -> list[torch.Tensor | None]:
    """The outputs, and the gradients of what asks for one; of nothing else."""
    leaves = [t for t in (*tensors(list(args)), *layer.parameters()) if t.is_floating_point()]
    for t in leaves:
        t.grad = None
    outs = tensors((call or layer)(*args))
    wanted = [t for t in outs if t.requires_grad]
    if wanted:
        sum(t.pow(2).sum() for t in wanted).backward()
    return [*(t.detach().clone() for t in outs),
            *(None if t.grad is None else t.grad.clone() for t in leaves)]


def as_native(layer, args, call=None) -> None:
    """The call, twice, gives what the host gives, and no gradient where it gives none."""
    with gnnaccel.disabled():
        expected = gradients(layer, args, call)
    scale = max(t.abs().max().item() for t in expected if t is not None and t.numel())
    for _ in range(2):
        for a, b in zip(gradients(layer, args, call), expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None and a.numel():
                assert relative(a, b) < 2e-4 or (a - b).abs().max().item() < 1e-5 * scale


@pytest.mark.long
@each
def test_frozen_parameters(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for p in layer.parameters():
            p.requires_grad_(False)
            as_native(layer, args)
        layer.requires_grad_()
        as_native(layer, args)


def without_gradient(t):
    return t.detach()


def trained(t):
    return nn.Parameter(t.detach().clone())


@each
@pytest.mark.parametrize("change", [without_gradient, trained])
def test_features_that_want_other_gradients(route, name, change):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        as_native(layer, changed(args, change))
        as_native(layer, args)


def changed(args, change):
    if isinstance(args, dict):
        return {key: changed(t, change) for key, t in args.items()}
    if isinstance(args, tuple):
        return tuple([changed(t, change) for t in args])
    return change(args) if args.is_floating_point() else args


@each
def test_modules_replaced_by_ones_that_look_the_same(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for parent in list(layer.modules()):
            for key, part in list(parent._modules.items()):
                if part is None or not any(True for _ in part.parameters()):
                    continue
                other = copy.deepcopy(part)
                for p in other.parameters():
                    nn.init.normal_(p)
                parent._modules[key] = other
                as_native(layer, args)


@pytest.mark.long
@each
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(route, name, reentrant):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        if reentrant and isinstance(args[0], (dict, tuple)):
            pytest.skip("a reentrant checkpoint sees no tensors in dictionaries")
        as_native(layer, args, lambda *a: checkpoint(layer, *a, use_reentrant=reentrant))
        as_native(layer, args)


@each
def test_parameters_given_from_outside(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        given = {key: torch.randn_like(p) for key, p in layer.named_parameters()}
        as_native(layer, args, lambda *a: functional_call(layer, given, a))
        as_native(layer, args)


@each
def test_copies(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        twin = copy.deepcopy(layer)
        for p in twin.parameters():
            nn.init.normal_(p)
        as_native(twin, args)
        as_native(layer, args)
        assert memories.get(twin) is not memories.get(layer)


@each
def test_modes_of_torch(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        with torch.inference_mode():
            as_native(layer, place(CASES[name].inputs(), route.device))
        with torch.no_grad():
            as_native(layer, args)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            as_native(layer, args)
        finally:
            torch.use_deterministic_algorithms(False)
        as_native(layer, args)


@pytest.mark.long
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv, TransformerConv])
def test_parameters_replaced_under_learned_features(route, cls):
    """Features that are a Parameter, as embeddings are. A call bound to its weights would keep the
    old ones."""
    with route.on(on_fallback="native"):
        layer = cls(8, 4, 2).to(route.device)
        args = nn.Parameter(torch.randn(14, 8, device=route.device)), torch.randint(
            14, (2, 60), device=route.device)
        for _ in range(3):
            as_native(layer, args)
        for part in layer.modules():
            for key, value in list(part._parameters.items()):
                if value is not None:
                    setattr(part, key, nn.Parameter(torch.randn_like(value)))
                    as_native(layer, args)
        for key, part in list(layer._modules.items()):
            if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
                setattr(layer, key, copy.deepcopy(part))
                nn.init.normal_(getattr(layer, key).weight)
                as_native(layer, args)
