"""RGAT as one node of autograd, bias and all, against fp64 on torch operations."""
from __future__ import annotations

import weakref

import pytest
import torch

from gnnaccel.dispatch.relational import cuda_program, cuda_steps, statements, torch_maps
from gnnaccel.dispatch.relational import added as adding
from gnnaccel.dispatch.relational.added import ADDED, Added
from gnnaccel.dispatch.relational.cuda_attention import Attend, Fold
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.run import attention
from tests.dispatch.relational.test_cuda_maps import leaves, on
from tests.dispatch.relational.test_cuda_program import results
from tests.helpers import assert_accurate, relative
from tests.relational_cases import K, typed

OUT = 8
#: heads, blocks, within relations
LAYERS = [(1, 1, False), (2, 1, False), (1, 2, False), (2, 2, True), (1, 1, True)]
each_layer = pytest.mark.parametrize("layer", LAYERS,
                                     ids=["one head", "heads", "blocks", "blocks within", "within"])
KINDS = [dict(), dict(edges=0), dict(num_relations=1), dict(edges=90, num_dst=3),
         dict(num_src=7, pair=True)]


def nodes_of(layer, same: bool = True, dropout: float = 0.0) -> list:
    """The orderings of RGAT that are one node."""
    heads, _, within = layer
    stated = statements.rgat(0.2, dropout, False, False, within, heads, same)
    found = [fuse(compact(program)) for _, program in orderings(stated)]
    found = [program for program in found if (steps := cuda_steps.steps_of(program))
             and steps.attends]
    assert found and all(not cuda_steps.steps_of(program).after for program in found)
    return found


def operands_of(graph, layer, pair: bool = False) -> dict[str, torch.Tensor]:
    heads, blocks, _ = layer

    def rand(*shape: int) -> torch.Tensor:
        return (0.6 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()

    inner = (K, OUT) if blocks == 1 else (blocks, K // blocks, OUT // blocks)
    found = dict(x=rand(graph.num_src, K), weight=rand(graph.num_relations, *inner),
                 q=rand(OUT, heads), k=rand(OUT, heads), bias=rand(OUT))
    return found | ({"x_dst": rand(graph.num_dst, K)} if pair else {})


def computed(program, view, given: dict, kernels: bool) -> torch.Tensor:
    own = {name: t for name, t in given.items() if name != "bias"}
    added = Added((view.num_dst,), None, None, given["bias"])
    if kernels:
        return cuda_program.run(program, view, {**own, ADDED: added})
    return adding.add(run(program, view, own, torch_maps, attention.run_torch), added, view)


@pytest.mark.long
@each_layer
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients(device, layer, kind):
    kind = dict(kind)
    pair = kind.pop("pair", False)
    graph = typed(**{**kind, "num_src": kind.get("num_dst", 12)} if not pair else kind)
    given, program = operands_of(graph, layer, pair), nodes_of(layer, not pair)[0]
    exact = results(computed(program, on(None, graph), given, False), given)
    single = leaves(None, given)
    plain = results(computed(program, on(None, graph), single, False), single)
    placed = leaves(device, given)
    for ordered in nodes_of(layer, not pair):
        got = results(computed(ordered, on(device, graph), placed, True), placed)
        for label, value in got.items():
            assert_accurate(label, value.detach().cpu(), plain[label].detach(),
                            exact[label].detach(), floor=1e-5)
    with torch.no_grad():
        again = computed(ordered, on(device, graph), placed, True)
    assert relative(again, got["out"]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("wanted", ["x", "weight", "q", "k", "bias"])
@each_layer
def test_some_gradients(device, layer, wanted):
    """What is not asked for is not computed, and what is does not depend on it."""
    graph, program = typed(), nodes_of(layer)[0]
    view, given = on(device, graph), leaves(device, operands_of(graph, layer))
    expected = results(computed(program, view, given, True), given)
    alone = {name: t.detach().requires_grad_(name == wanted) for name, t in given.items()}
    got = results(computed(program, view, alone, True), {wanted: alone[wanted]})
    assert relative(got[wanted], expected[wanted]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS[:3], ids=str)
def test_second_derivatives(device, layer):
    graph = typed(edges=30, num_src=8, num_dst=8, num_relations=3)
    given, program = operands_of(graph, layer), nodes_of(layer)[0]

    def second(kernels: bool, given: dict) -> tuple:
        view = on(device if kernels else None, graph)
        first = results(computed(program, view, given, kernels), given, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first.values()),
                                   list(given.values()))

    for a, b in zip(second(True, leaves(device, given)), second(False, given)):
        assert relative(a.cpu().double(), b) < 1e-4


@pytest.mark.parametrize("layer", LAYERS[:3], ids=str)
def test_a_recorded_backward_has_the_dropout_of_its_forward(device, layer):
    graph, program = typed(), nodes_of(layer, dropout=0.4)[0]
    given = leaves(device, operands_of(graph, layer))
    out = computed(program, on(device, graph), given, True)
    plain, recorded = (torch.autograd.grad(out, list(given.values()), torch.ones_like(out),
                                           retain_graph=True, create_graph=how)
                       for how in (False, True))
    without = computed(nodes_of(layer)[0], on(device, graph), given, True)
    assert relative(out, without) > 0.05
    for a, b in zip(recorded, plain):
        assert relative(a, b) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS[:4], ids=str)
def test_half_types(device, dtype, layer):
    graph, program = typed(), nodes_of(layer)[0]
    given = operands_of(graph, layer)
    exact = results(computed(program, on(None, graph), given, False), given)
    placed = leaves(device, given, dtype)
    got = results(computed(program, on(device, graph), placed, True), placed)
    for label, value in got.items():
        assert value.dtype is dtype and relative(value.cpu().double(),
                                                 exact[label]) < (2e-2
                                                                  if dtype is torch.float16
                                                                  else 0.15)


def test_one_head_has_its_terms_made_by_the_attention():
    steps = cuda_steps.steps_of(nodes_of((1, 1, False))[0])
    folds, attends = ([step for step in steps.steps if type(step) is kind]
                      for kind in (Fold, Attend))
    assert len(attends) == 1 and len(folds) == 1 and attends[0].terms[1] is None and attends[
        0].terms[4] == "k"
    assert len([step for step in cuda_steps.steps_of(nodes_of((2, 1, False))[0]).steps
                if type(step) is Fold]) == 2


def test_backward_lets_go_of_what_it_has_done_with(device, monkeypatch):
    """The rows that the attention gathered are gone when the maps' gradients are made, unless the
    graph is kept."""
    graph, program = typed(), nodes_of((1, 1, False))[0]
    made, alive = [], []
    forward, backward = Attend.forward, cuda_steps.Linear.backward

    def attend(self, p, *args):
        made.append(weakref.ref(p.values[self.rows].untyped_storage()))
        return forward(self, p, *args)

    def linear(self, p):
        alive.append(made[0]() is not None)
        backward(self, p)

    monkeypatch.setattr(Attend, "forward", attend)
    monkeypatch.setattr(cuda_steps.Linear, "backward", linear)
    given = leaves(device, operands_of(graph, (1, 1, False)))
    out = computed(program, on(device, graph), given, True).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert alive == [True, True, False, False]
