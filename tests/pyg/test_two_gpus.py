"""Layers on a GPU that is not torch's current one: kernels run where the tensors are."""
from __future__ import annotations

import copy

import pytest
import torch

import gnnaccel
from tests.pyg import graphs
from tests.pyg.every import CALLS, leaves, made, moved
from tests.pyg.judge import close
from tests.pyg.layers import build

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def results(layer, inputs) -> list[torch.Tensor | None]:
    """The results and the gradients of all parameters, on the CPU."""
    out = leaves(layer(*inputs))
    wanted = list(layer.parameters())
    grads = (torch.autograd.grad(sum(t.pow(2).sum() for t in out), wanted, allow_unused=True)
             if wanted else ())
    return [t if t is None else t.detach().cpu() for t in (*out, *grads)]


@pytest.mark.parametrize("name", list(CALLS))
def test_layers_on_the_other_one(gpu, name):
    layer, inputs = made(name)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        there = copy.deepcopy(layer).to(device)
        on_it = tuple(moved(value, device) for value in inputs)
        with gnnaccel.disabled():
            expected = results(there, on_it)
        with gpu.on(on_fallback="native"):
            for _ in range(3):
                for got, want in zip(results(there, on_it), expected):
                    assert (got is None) is (want is None)
                    assert got is None or torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert torch.cuda.current_device() == 0


def test_replicas(gpu):
    """As `torch.nn.DataParallel` makes them."""
    layer, x, ei = build("GATConv"), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gpu.on():
        parallel = torch.nn.DataParallel(layer.to("cuda:0"), [0, 1])
        both = parallel.replicate(layer, [0, 1])
        outs = [replica(x.to(f"cuda:{i}"), ei.to(f"cuda:{i}")) for i, replica in enumerate(both)]
    assert all(close(out.cpu(), expected) for out in outs)
