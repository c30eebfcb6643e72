"""Checkpoints whose backward runs under another configuration than their forward."""
from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F

LAYERS = {"GAT": lambda: GATConv(F, 4, heads=2, dropout=0.5), "GCN": lambda: GCNConv(F, 4),
          "SAGE": lambda: SAGEConv(F, 4)}
WAYS = pytest.mark.parametrize("reentrant", [False, True])


def grads(layer, x, edges, reentrant: bool, forward, backward) -> list[torch.Tensor]:
    """Of a checkpointed call, whose passes run in these blocks."""
    torch.manual_seed(3)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with forward:
        out = checkpoint(layer, x, edges, use_reentrant=reentrant)
    with backward:
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_after_the_block(kernels, name, reentrant):
    """It is that of a backward in the block, of the same dropout."""
    layer = LAYERS[name]().to(kernels.device)
    args = [graphs.features().to(kernels.device), graphs.square().to(kernels.device)]
    with kernels.on():
        expected = grads(layer, *args, reentrant, contextlib.nullcontext(),
                         contextlib.nullcontext())
        gnnaccel.reset_stats()
    found = grads(layer, *args, reentrant, kernels.on(), contextlib.nullcontext())
    for ours, one in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, one)
    routes = gnnaccel.stats()[type(layer).__name__]["routes"]
    assert set(routes) == {"cuda"} and routes["cuda"] >= 2
    assert not gnnaccel.status()["enabled"] and not gnnaccel.adapters.state()["pyg"]["patched"]


@WAYS
@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_in_a_block_of_a_native_forward(kernels, name, reentrant):
    layer = LAYERS[name]().to(kernels.device)
    args = [graphs.features().to(kernels.device), graphs.square().to(kernels.device)]
    expected = grads(layer, *args, reentrant, contextlib.nullcontext(), contextlib.nullcontext())
    with kernels.on():
        found = grads(layer, *args, reentrant, gnnaccel.disabled(), contextlib.nullcontext())
    for ours, one in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, one)


def test_another_configuration(kernels):
    """A forward by kernels stays one where the process has been told otherwise since."""
    layer = LAYERS["SAGE"]().to(kernels.device)
    args = [graphs.features().to(kernels.device), graphs.square().to(kernels.device)]
    gnnaccel.reset_stats()
    grads(layer, *args, False, kernels.on(), gnnaccel.enabled(exclude=["SAGEConv"]))
    assert set(gnnaccel.stats()["SAGEConv"]["routes"]) == {"cuda"}


@pytest.mark.long
def test_a_backward_that_fails_leaves_no_block_open(kernels):
    class Failing(SAGEConv):
        fails = False

        def forward(self, *args):
            if self.fails:
                raise ZeroDivisionError
            return super().forward(*args)

    layer = Failing(F, 4).to(kernels.device)
    x = graphs.features().to(kernels.device).requires_grad_()
    with kernels.on():
        out = checkpoint(layer, x, graphs.square().to(kernels.device), use_reentrant=False)
    layer.fails = True
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert not gnnaccel.status()["enabled"]
    assert not hasattr(checkpoints._checkpoint_without_reentrant_generator, "__wrapped__")
