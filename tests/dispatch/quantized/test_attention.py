"""Attention over rounded values: each way against the definition in fp64, with every gradient."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.quantized import attention as quantized
from gnnaccel.dispatch.quantized import rows
from gnnaccel.dispatch.quantized.guard import Guard, Watch
from gnnaccel.dispatch.quantized.rows import Storage
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Use
from gnnaccel.dispatch.run import attention
from tests.helpers import relative
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401

N, M, E = 11, 9, 60
STORAGES = [Storage("int8", "int8"), Storage("int8", "fp32"), Storage("bf16", "bf16"),
            Storage("bf16", "int8")]


def edges(src: int = N, dst: int = M) -> torch.Tensor:
    """With a hub, and a node without edges."""
    ei = torch.stack([torch.randint(0, src, (E,)), torch.randint(0, dst - 1, (E,))])
    ei[1, :25] = 2
    return ei


def inputs(heads: int, width: int, form: str) -> dict[str, torch.Tensor]:
    found = {"x": torch.randn(N, heads, width), "att_src": torch.randn(heads, width),
             "att_dst": torch.randn(heads, width)}
    if form == "bipartite":
        found["x_dst"] = torch.randn(M, heads, width)
    if form == "edge":
        found["a_edge"] = torch.randn(E, heads)
    if form == "bias":
        found["bias"] = torch.randn(heads * width)
    return found


def run(route, storage: Storage, ei, tensors: dict, grad, dropout: float = 0.0, guard=True):
    """The result and the gradients by input."""
    heads, width = tensors["x"].shape[1:]
    dst = M if "x_dst" in tensors else N
    program = programs.gat(0.2, dropout, "x_dst" not in tensors, True, "a_edge" in tensors,
                           "bias" in tensors)
    ei = ei.to(route.device)
    call = attention.Call(program, programs.attention(program), GraphView(ei, N, dst, own=True),
                          heads, width, torch.float32)
    use = Use(storage, Entry("gat", "GATConv", None, Watch(Guard() if guard else None, "gat")),
              route.backend == "cuda")
    leaves = {name: t.clone().to(route.device).requires_grad_() for name, t in tensors.items()}
    plain = attention.run_cuda if use.kernels else attention.run_torch
    out = quantized.Run(use, plain)(call, leaves)
    out.backward(grad.to(route.device))
    return {"out": out.detach().cpu(), **{name: t.grad.cpu() for name, t in leaves.items()}}, use


def definition(storage: Storage, ei, tensors: dict, grad) -> dict:
    """In fp64: scores of the features as they are, sums of what the values became, gradients of
    what the gradient became."""
    near = rows.read(rows.store(tensors["x"], storage.format, False, False),
                     tensors["x"].shape).double().requires_grad_()
    given = rows.read(rows.store(grad, storage.backward, False, False), grad.shape).double()
    t = {name: value.double().requires_grad_() for name, value in tensors.items()}
    src, dst = ei
    z = (t["x"] * t["att_src"]).sum(-1)[src] + (t.get("x_dst", t["x"]) * t["att_dst"]).sum(-1)[dst]
    z = torch.nn.functional.leaky_relu(z + t["a_edge"] if "a_edge" in t else z, 0.2)
    p = (z - z.max()).exp()
    count = M if "x_dst" in t else N
    total = torch.zeros(count, z.shape[1], dtype=torch.float64).index_add(0, dst, p)
    message = (p / total[dst]).unsqueeze(-1) * near[src]
    out = torch.zeros(count, *message.shape[1:], dtype=torch.float64).index_add(0, dst, message)
    out.backward(given)
    t["x"].grad += near.grad
    found = {"out": out.detach(), **{name: value.grad for name, value in t.items()}}
    if "bias" in t:
        found["out"], found["bias"] = found["out"] + t["bias"].detach().view(
            out.shape[1:]), grad.double().sum(0).flatten()
    return found


@pytest.mark.parametrize("storage", STORAGES, ids="/".join)
@pytest.mark.parametrize("form", ["plain", "bipartite", "edge", "bias"])
@pytest.mark.parametrize("size", [(1, 16), (3, 5), (8, 8)], ids=str)
def test_definition(route, nearest, size, form, storage):
    tensors = inputs(*size, form)
    ei = edges(N, M if form == "bipartite" else N)
    grad = torch.randn(M if form == "bipartite" else N, *size)
    got, _ = run(route, storage, ei, tensors, grad)
    exact = definition(storage, ei, tensors, grad)
    for name, value in got.items():
        rounded = storage.format == "bf16" and name == "x"  # whose gradient has the values' dtype
        assert relative(value, exact[name]) < (4e-3 if rounded else 2e-4), name


def test_dropout_is_the_same_in_backward(route, nearest):
    """With features of ones and weights that sum to one, each row of the result is the share that
    was kept; so the gradient of the values' sum is what the result says."""
    tensors = inputs(2, 8, "plain")
    tensors["x"] = torch.ones_like(tensors["x"])
    grad = torch.ones(N, 2, 8)
    got, _ = run(route, Storage("int8", "int8"), edges(N, N), tensors, grad, dropout=0.5)
    assert got["out"].std() > 0.05
    assert abs(float(got["x"].sum() - got["out"].sum())) < 1e-2 * float(got["out"].sum())


def test_the_guard_looks_at_attention(route):
    got, use = run(route, Storage("int8", "int8"), edges(N, N), inputs(2, 16, "edge"),
                   torch.randn(N, 2, 16))
    use.entry.watch.settle()
    assert 1e-4 < use.entry.watch.last["error"] < 0.02 and use.entry.watch.state() == "passed"


def test_a_backward_that_is_recorded_is_that_of_fp32(route):
    ei, tensors = edges(N, N), inputs(2, 8, "bias")
    found = []
    for storage in (Storage("int8", "int8"), None):
        program = programs.gat(0.2, 0.0, True, True, False, True)
        call = attention.Call(program, programs.attention(program),
                              GraphView(ei.to(route.device), N, N, own=True), 2, 8, torch.float32)
        plain = attention.run_cuda if route.backend == "cuda" else attention.run_torch
        use = Use(storage, Entry("gat", "GATConv", None, Watch(None, "gat")),
                  route.backend == "cuda")
        leaves = {name: t.clone().to(route.device).requires_grad_() for name, t in tensors.items()}
        out = (plain if storage is None else quantized.Run(use, plain))(call, leaves)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(route.device)
        first = torch.autograd.grad((out * weight).sum(), [leaves["x"], leaves["att_src"]],
                                    create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves["x"])
        found.append([g.detach().cpu() for g in (*first, *second)])
    for got, exact in zip(*found):
        # both are fp32; second derivatives, summed in different orders
        assert relative(got, exact) < 6e-6
