"""The kernels under autograd: second derivatives, subsets of inputs, in-place edits, modes without
gradients, checkpoints."""
from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.run import attention
from tests.attention_cases import (Problem, additive, by_kernels, by_torch, graph, mask_of,
                                   pairwise, plain, skewed_edges, terms)
from tests.helpers import assert_accurate, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

KINDS = {
    "gat": lambda view, p: additive(view, 3, 5, "same", edge=True, dropout=p),
    "gat-bipartite": lambda view, p: additive(view, 3, 5, "bipartite", dropout=p),
    "gat-bias": lambda view, p: additive(view, 3, 5, "same", dropout=p, bias=True),
    "terms": lambda view, p: terms(view, 3, 5, edge=True, dropout=p),
    "terms-source": lambda view, p: terms(view, 3, 5, dst=False, dropout=p),
    "gatv2": lambda view, p: pairwise("gatv2", view, 3, 5, edge=True, dropout=p),
    "gatv2-bias": lambda view, p: pairwise("gatv2", view, 3, 5, dropout=p, bias=True),
    "dot": lambda view, p: pairwise("dot", view, 3, 5, edge=True, dropout=p),
    "mx": lambda view, p: pairwise("mx", view, 3, 5, dropout=p),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def small(device) -> GraphView:
    return graph(device, 20, 20, 90)


def second_derivatives(run, values: list, grad) -> list:
    """First derivatives by ``create_graph``, then those of a weighted sum of their squares."""
    out = run(values)
    first = torch.autograd.grad(out, values, grad.to(out.dtype), create_graph=True)
    weighted = sum((i + 1) * (g * g).sum() for i, g in enumerate(first) if g is not None)
    second = torch.autograd.grad(weighted, values, allow_unused=True)
    return [out, *first, *second]


@each_kind
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_second_derivatives(device, kind, dropout):
    problem = KINDS[kind](small(device), dropout)
    call = problem.call()
    names = list(problem.tensors)
    values = [t.clone().requires_grad_() for t in problem.tensors.values()]
    got = second_derivatives(lambda v: attention.run_cuda(call, dict(zip(names, v))), values,
                             problem.grad_out())

    def torchs(dtype):
        mask = mask_of(problem, call, dtype)
        return second_derivatives(lambda v: plain(problem, dict(zip(names, v)), mask),
                                  [t.to(dtype).detach().requires_grad_() for t in values],
                                  problem.grad_out())

    labels = ["out", *(f"d {n}" for n in names), *(f"dd {n}" for n in names)]
    for label, a, b, c in zip(labels, got, torchs(torch.float32), torchs(torch.float64),
                              strict=True):
        if c is None:  # a bias is only added: nothing depends on it twice
            assert label == "dd bias" and (a is None or not a.any())
            continue
        assert_accurate(label, a.detach(), b.detach(), c.detach(), floor=5e-6)


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_tensor_as_two_inputs(device, create_graph):
    """GATv2 with shared weights passes the same rows as keys and queries."""
    view = small(device)
    x, att = torch.randn(20, 3, 5).to(device).requires_grad_(), torch.randn(1, 3, 5).to(device)
    problem = Problem(attention_programs.gatv2(0.2, 0.0, False), view,
                      {"keys": x, "queries": x, "att": att}, 3, 5)
    out = attention.run_cuda(problem.call(), problem.tensors)
    expected = plain(problem, problem.tensors)
    grads = [torch.autograd.grad(o, x, problem.grad_out(), create_graph=create_graph)[0]
             for o in (out, expected)]
    assert relative(grads[0], grads[1]) < 1e-5


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_input_made_from_another(device, create_graph):
    """AGNN's queries and node terms are functions of its keys."""
    view = small(device)
    x = torch.randn(20, 3, 5).to(device).requires_grad_()
    length = x.norm(dim=-1)
    tensors = {"keys": x, "queries": x / length.unsqueeze(-1), "c_src": 1 / length}
    problem = Problem(attention_programs.cosine(), view, tensors, 3, 5)
    out = attention.run_cuda(problem.call(), tensors)
    expected = plain(problem, tensors)
    grads = [torch.autograd.grad(o, x, problem.grad_out(), create_graph=create_graph,
                                 retain_graph=True)[0]
             for o in (out, expected)]
    assert relative(grads[0], grads[1]) < 1e-5


@each_kind
def test_gradients_of_any_subset_of_inputs(device, kind):
    problem = KINDS[kind](small(device), 0.0)
    full = by_kernels(problem)[0]
    names = list(problem.tensors)
    for wanted in itertools.chain.from_iterable(itertools.combinations(names, n)
                                                for n in range(1, len(names) + 1)):
        tensors = {name: t.detach().requires_grad_(name in wanted)
                   for name, t in problem.tensors.items()}
        attention.run_cuda(problem.call(), tensors).backward(problem.grad_out())
        for name, tensor in tensors.items():
            assert (tensor.grad is not None) == (name in wanted), (wanted, name)
            if name in wanted:
                assert relative(tensor.grad, full[name]) < 1e-6, (wanted, name)


@each_kind
def test_shapes_of_parameters_are_kept(device, kind):
    """Hosts keep attention vectors as [1, H, D] or [H, D]; gradients come in the same shape."""
    problem = KINDS[kind](small(device), 0.0)
    full = by_kernels(problem)[0]
    for name in ("att_src", "att_dst", "att"):
        if name in problem.tensors:
            problem.tensors[name] = problem.tensors[name].squeeze(0)
            got = by_kernels(problem)[0]
            assert same_bits(got[name], full[name].squeeze(0))


@each_kind
@pytest.mark.parametrize("create_graph", [False, True])
def test_in_place_edits_of_an_exposed_output(device, kind, create_graph):
    problem = KINDS[kind](small(device), 0.0)
    problem.exposed = True
    plain = by_kernels(problem)[0]
    tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
    out = attention.run_cuda(problem.call(), tensors)
    out.mul_(2.0).add_(1.0)
    grads = torch.autograd.grad(out, list(tensors.values()), problem.grad_out(),
                                create_graph=create_graph)
    for name, grad in zip(tensors, grads):
        assert relative(grad.detach(), 2 * plain[name]) < 1e-5, name


@each_kind
def test_an_input_may_be_edited_before_backward(device, kind):
    problem = KINDS[kind](small(device), 0.0)
    leaf = next(iter(problem.tensors))
    base = problem.tensors[leaf].clone().requires_grad_()

    def gradient(edited):
        tensors = {**problem.tensors, leaf: base * 1.0}
        out = attention.run_cuda(problem.call(), tensors)
        if edited:
            with torch.no_grad():
                tensors[leaf].add_(1.0)
        return torch.autograd.grad(out.square().sum(), base)[0]

    assert relative(gradient(True), gradient(False)) < 1e-6


@each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(device, kind, mode):
    problem = KINDS[kind](small(device), 0.0)
    expected = by_kernels(problem)[0]["out"]
    tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
    with mode():
        out = attention.run_cuda(problem.call(), tensors)
    assert not out.requires_grad and out.grad_fn is None
    assert relative(out, expected) < 1e-6


@each_kind
@pytest.mark.parametrize("run", ["run_cuda", "run_torch"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_training_on_a_graph_first_seen_in_inference_mode(device, kind, run, create_graph):
    problem = KINDS[kind](small(device), 0.0)
    tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
    with torch.inference_mode():
        getattr(attention, run)(problem.call(), tensors)
    out = getattr(attention, run)(problem.call(), tensors)
    torch.autograd.grad(out, list(tensors.values()), problem.grad_out(), create_graph=create_graph)


@each_kind
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_after_the_edge_index_is_gone(device, kind, deterministic, create_graph):
    edge_index = skewed_edges(20, 20, 90, device)
    torch.use_deterministic_algorithms(deterministic)
    try:
        view = GraphView(edge_index, 20, 20)
        problem = KINDS[kind](view, 0.0)
        tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
        out = attention.run_cuda(problem.call(), tensors)
        del edge_index
        gc.collect()
        grads = torch.autograd.grad(out, list(tensors.values()), problem.grad_out(),
                                    create_graph=create_graph)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(g).all() for g in grads)


@each_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(device, kind, reentrant):
    problem = KINDS[kind](small(device), 0.5)
    names = list(problem.tensors)

    def layer(*values):
        return attention.run_cuda(problem.call(), dict(zip(names, values)))

    results = []
    for run in (layer, lambda *v: checkpoint(layer, *v, use_reentrant=reentrant)):
        torch.manual_seed(11)
        values = [t.detach().requires_grad_() for t in problem.tensors.values()]
        out = run(*values)
        torch.rand(3, device=device)  # something else draws between forward and backward
        results.append([out.detach(), *torch.autograd.grad(out.pow(2).sum(), values)]
                       if not reentrant else
                       [out.detach(), *backward_of(out.pow(2).sum(), values)])
    # another mask would be another result altogether
    assert all(relative(a, b) < 1e-5 for a, b in zip(*results))


def backward_of(loss, values):
    loss.backward()
    return [v.grad for v in values]


@pytest.mark.long
@each_kind
def test_dropout_differs_between_calls_and_repeats_with_the_seed(device, kind):
    problem = KINDS[kind](small(device), 0.5)
    torch.manual_seed(5)
    first, second = (by_kernels(problem)[0] for _ in range(2))
    torch.manual_seed(5)
    again = by_kernels(problem)[0]
    assert relative(first["out"], second["out"]) > 0.1
    assert all(relative(first[name], again[name]) < 1e-6 for name in first)


def test_backward_twice(device):
    problem = KINDS["gatv2"](small(device), 0.4)
    tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
    out = attention.run_cuda(problem.call(), tensors)
    values = list(tensors.values())
    first = torch.autograd.grad(out, values, problem.grad_out(), retain_graph=True)
    second = torch.autograd.grad(out, values, problem.grad_out())
    assert all(same_bits(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, values, problem.grad_out())


@each_kind
def test_the_torch_route_agrees(device, kind):
    problem = KINDS[kind](small(device), 0.0)
    out = attention.run_torch(problem.call(), problem.tensors)
    expected = by_torch(problem, problem.call(), torch.float64, train=False)["out"]
    assert out.dtype == problem.out_dtype and relative(out, expected) < 1e-6


def test_the_torch_route_drops_its_share(device):
    problem = pairwise("dot", graph(device, 20, 20, 90), 3, 5, dropout=0.5)
    problem.tensors["values"].fill_(1.0)
    out = torch.stack([attention.run_torch(problem.call(), problem.tensors) for _ in range(200)])
    busy = problem.graph.csc().indptr.diff() > 0
    assert abs(out[:, busy].mean().item() - 1.0) < 0.05 and out[:, busy].std(0).min() > 0.05
    everything = pairwise("dot", problem.graph, 3, 5, dropout=1.0)
    assert (attention.run_torch(everything.call(), everything.tensors) == 0).all()
