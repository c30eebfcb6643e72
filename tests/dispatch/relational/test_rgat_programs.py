"""RGAT's further options as Programs: what they become, and that they compute what the layer says,
edge by edge."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.ir.program import PARAM
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.counting import count
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from tests.relational_cases import HEADS, OUT, assert_same, tensors, typed, value

WIDTH = OUT // HEADS
CASES = [(mod, product, per_head, edge, within) for mod in (None, "additive", "f-additive")
         for product, per_head in
         ((False, 1), (True, 1), (True, 3)) for edge in (False, True) for within in (False, True)
         if mod or product]


def rgat(mod, product, per_head, edge, within):
    return statements.rgat(0.2, 0.0, False, edge, within, HEADS, mod=mod, product=product,
                           per_head=per_head)


def operands(graph, per_head: int) -> dict[str, torch.Tensor]:
    found = tensors("rgat edge", graph)
    rows = HEADS * per_head
    shapes = {"q": (OUT, rows), "k": (OUT, rows), "a_edge": (graph.src.shape[0], rows),
              "w": (WIDTH,)}
    return found | {name: torch.randn(*shape, dtype=torch.float64, requires_grad=True)
                    for name, shape in shapes.items()}


def by_definition(graph, t, mod, product, per_head, edge, within) -> torch.Tensor:
    """[num_dst, heads, per_head, width]: the layer with a message for each edge."""
    src, dst, matrix = graph.src, graph.dst, t["weight"][graph.relation]
    row, at_dst = (torch.einsum("ek,ekn->en", t["x"][end], matrix) for end in (src, dst))
    q, k, feature = at_dst @ t["q"], row @ t["k"], t["a_edge"] if edge else float(product)
    score = q * k * feature if product else torch.nn.functional.leaky_relu(q + k + feature, 0.2)
    group = dst * graph.num_relations + graph.relation if within else dst
    same = (group.unsqueeze(0) == group.unsqueeze(1)).double()
    top = score.detach().max()
    alpha = (score - top).exp() / (same @ (score - top).exp())
    if mod == "f-additive":
        alpha = torch.where(alpha > 0, alpha + 1, alpha)
    row = row.view(-1, HEADS, 1, WIDTH)
    message = alpha.view(-1, HEADS, per_head,
                         1) * row + (t["w"] * row if mod == "additive" else 0.0)
    return message.new_zeros(graph.num_dst, *message.shape[1:]).index_add(0, dst, message)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_ordering_computes_the_layer(case):
    graph, program = typed(), rgat(*case)
    given = {name: t for name, t in operands(graph, case[2]).items() if program.has_input(name)}
    expected = by_definition(graph, operands_of(given, graph, case), *case)
    for how, ordered in orderings(program):
        for made in (ordered, fuse(compact(ordered))):
            assert_same(value(made, graph.view(), given), expected, given, how)


def operands_of(given: dict, graph, case) -> dict[str, torch.Tensor]:
    """``given``, and what the definition asks for whether it is used or not."""
    return operands(graph, case[2]) | given


def test_attention_next_to_a_plain_sum_is_one_traversal_each():
    ops = [str(step) for step in fuse(compact(rgat("additive", False, 1, False, True))).ops]
    assert [line for line in ops if "attend(" in line and line.startswith("sum_pairs = ")]
    assert ops[-3:] == ["sum = collect(sum_pairs)", "messages = mean_sum(h@pair_src, mean=False)",
                        "out = add_product(sum, messages, w)"]


@pytest.mark.parametrize("case, fused", [
    (("f-additive", False, 1, False, False), False), ((None, True, 3, True, True), False),
    (("additive", False, 1, True, False), True),
    (("additive", True, 1, False, True), False)], ids=str)
def test_no_message_per_edge_is_made(case, fused):
    graph, program, kept = typed(200), rgat(*case), []
    given = {name: t for name, t in operands(graph, case[2]).items() if program.has_input(name)}
    made = fuse(compact(program))
    assert fused == ("attend" in {step.kind for step in made.ops})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        value(made, graph.view(), given)
    by_edge = [shape.numel() for shape in kept if shape[:1] == (200,)]
    assert by_edge and max(by_edge) <= 200 * HEADS * case[2]


def test_counts_grow_with_the_weights_per_head():
    statistics = typed().view().statistics()
    moved = []
    for per_head in (1, 2, 4):
        graph, program = typed(), rgat(None, True, per_head, False, False)
        shapes = {name: tuple(t.shape if domain == PARAM else t.shape[1:])
                  for name, domain in program.inputs
                  for t in [operands(graph, per_head)[name]]}
        moved.append(count(fuse(compact(program)), shapes, statistics).moved)
    assert moved[0] < moved[1] < moved[2]


def test_degrees_are_those_of_the_destinations():
    graph = typed()
    degree = graph.view().degree()
    assert degree.tolist() == [int((graph.dst == i).sum())
                               for i in range(graph.num_dst)] and degree.dtype == torch.int64
