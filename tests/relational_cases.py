"""Relational problems for the passes' tests: graphs with relations, the statements, and each layer
once more, edge by edge."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.relational import statements, torch_maps
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention

# heads, features of a row, features of the result, rows of a relation's table
HEADS, K, OUT, TABLE = 2, 4, 6, 9
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True, database=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture,
                                           HealthCheck.too_slow])


@dataclass
class Typed:
    """Edges with a relation each."""

    src: Tensor
    dst: Tensor
    relation: Tensor
    num_src: int
    num_dst: int
    num_relations: int

    @property
    def structure(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_structure"):
            self._structure = torch.stack([self.src, self.dst]), self.relation
        return self._structure

    def view(self, **options) -> RelationView:
        """A view, which keeps this graph and so its tensors alive."""
        found = RelationView(self.structure, self.num_src, self.num_dst, self.num_relations,
                             **options)
        found.case = self
        return found


def typed(edges: int = 60, num_src: int = 12, num_dst: int = 12, num_relations: int = 5,
          seed: int = 0) -> Typed:
    """Random edges with duplicates, a relation without edges (if there are several), and a node
    without any."""
    g = torch.Generator().manual_seed(seed)

    def ids(below: int) -> Tensor:
        return torch.randint(0, below, (edges,), generator=g)

    relation = ids(num_relations)
    if num_relations > 1:
        relation[relation == 1] = 0
    return Typed(ids(num_src), ids(num_dst - 1), relation, num_src, num_dst, num_relations)


@st.composite
def graphs(draw, square: bool = False) -> Typed:
    """No edges, any, a hub, a fan, duplicates, self loops; isolated nodes; any number of relations,
    empty ones, in any order."""
    num_src = draw(st.integers(1, 9))
    num_dst = num_src if square else draw(st.integers(1, 9))
    num_relations = draw(st.sampled_from([1, 2, 3, 7]))
    kind = draw(st.sampled_from(["none", "any", "any", "any", "hub", "fan", "same", "loops"]))
    edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1),
                     st.integers(0, num_relations - 1))
    found = draw(st.lists(edge, min_size=1, max_size=40))
    s, d, _ = found[0]
    if kind == "none":
        found = []
    elif kind == "hub":
        found = [(a, d, r) for a, _, r in found]
    elif kind == "fan":
        found = [(s, b, r) for _, b, r in found]
    elif kind == "same":
        found = [found[0]] * len(found)
    elif kind == "loops":
        found = [(min(a, b), min(a, b), r) for a, b, r in found]
    if draw(st.booleans()):  # a relation loses its edges
        found = [e for e in found if e[2] != 0]
    order = draw(st.permutations(range(num_relations)))
    found = [(a, b, order[r]) for a, b, r in found]
    src, dst, relation = torch.tensor(found, dtype=torch.long).view(-1, 3).unbind(1)
    return Typed(src, dst, relation, num_src, num_dst, num_relations)


# ---- statements ----

STATEMENTS = [*(f"rgcn {how}{weights}" for how in ("sum", "mean")
                for weights in ("", " bases", " blocks")),
              "rgcn sum weighted", "rgcn sum blocks weighted", "rgcn mean bases weighted",
              *(f"embedding {how}{weights}" for how in ("sum", "mean")
                for weights in ("", " bases", " bases own")),
              "rgat", "rgat bases edge", "rgat blocks within", "rgat within edge pair",
              "rgat additive", "rgat raised edge", "rgat product pair", "rgat product edge several",
              "hgt", "heat", "edge_gat", "film sum", "film mean bias activated pair"]


def is_square(name: str) -> bool:
    """Whether the statement reads one set of nodes at both ends."""
    return name.startswith(("rgat", "film")) and "pair" not in name


def statement(name: str) -> Program:
    kind, *words = name.split()
    if kind == "hgt":
        return statements.hgt(0.5, HEADS)
    if kind == "rgat":
        mod = "additive" if "additive" in words else "f-additive" if "raised" in words else None
        return statements.rgat(0.2, 0.0, "bases" in words, "edge" in words, "within" in words,
                               HEADS, "pair" not in words, mod, "product" in words,
                               3 if "several" in words else 1)
    if kind == "heat":
        return statements.heat(0.2, 0.0, HEADS)
    if kind == "edge_gat":
        return statements.edge_gat(0.2, 0.0, HEADS)
    if kind == "film":
        return statements.film(OUT, "mean" in words, "bias" in words, "activated" in words,
                               "pair" not in words)
    if kind == "rgcn":
        return statements.rgcn("mean" in words, "bases" in words, weighted="weighted" in words)
    return statements.rgcn_embedding("mean" in words, "bases" in words, "own" in words)


def tensors(name: str, graph: Typed, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Operands by input name; floating ones want gradients."""
    def rand(*shape: int) -> Tensor:
        return (0.6 * torch.randn(*shape, dtype=dtype)).requires_grad_()

    kind, *words = name.split()
    if kind in _OF_KIND:
        return _attention_tensors(kind, graph, rand)
    relations, edges = graph.num_relations, graph.src.shape[0]
    if kind == "film":
        found = dict(x=rand(graph.num_src, K), weight=rand(relations, OUT, K),
                     film=rand(relations, 2 * OUT, K))
        found.update(dict(bias=rand(relations, 2 * OUT)) if "bias" in words else {})
        found.update(dict(x_dst=rand(graph.num_dst, K)) if "pair" in words else {})
        return found
    table = graph.num_src if "own" in words else TABLE
    rows = table if kind == "embedding" else K
    ids = torch.arange(table) if "own" in words else torch.randint(0, table, (graph.num_src,))
    found = dict(ids=ids) if kind == "embedding" else dict(x=rand(graph.num_src, K))
    if "bases" in words:
        found.update(comp=rand(relations, 3), bases=rand(3, rows, OUT))
    else:
        found.update(weight=rand(relations, 2, K // 2, OUT // 2)
                     if "blocks" in words else rand(relations, rows, OUT))
    if "weighted" in words:
        found.update(norm=rand(edges))
    if kind == "rgat":
        logits = HEADS * (3 if "several" in words else 1)
        found.update(q=rand(OUT, logits), k=rand(OUT, logits))
        if "pair" in words:
            found.update(x_dst=rand(graph.num_dst, K))
        if "edge" in words:
            found.update(a_edge=rand(edges, logits))
        if "additive" in words:
            found.update(w=rand(OUT // HEADS))
    return found


def _attention_tensors(kind: str, graph: Typed, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
    relations, edges = graph.num_relations, graph.src.shape[0]
    if kind == "hgt":
        w = K // HEADS
        return dict(keys=rand(graph.num_src, K), values=rand(graph.num_src, K),
                    queries=rand(graph.num_dst, K), w_att=rand(relations, HEADS, w, w),
                    w_msg=rand(relations, HEADS, w, w), p=rand(relations, HEADS))
    if kind == "heat":
        return dict(rows=rand(graph.num_src, OUT), a_src=rand(graph.num_src, HEADS),
                    a_dst=rand(graph.num_dst, HEADS), a_rel=rand(relations, HEADS),
                    a_edge=rand(edges, HEADS), edges=rand(edges, 3), w_edge=rand(3, OUT))
    return dict(rows=rand(graph.num_src, OUT), a_src=rand(graph.num_src, HEADS),
                a_dst=rand(graph.num_dst, HEADS), a_edge=rand(edges, HEADS),
                edges=rand(edges, 3), w_edge=rand(3, OUT))


# ---- the layers once more ----

def by_edges(name: str, graph: Typed, t: dict[str, Tensor]) -> Tensor:
    """[num_dst, ...] what the statement says, with a matrix and a message for each edge."""
    kind, *words = name.split()
    src, dst, relation = graph.src, graph.dst, graph.relation
    group = dst * graph.num_relations + relation
    if kind in _OF_KIND:
        return _added(_OF_KIND[kind](graph, t), dst, graph.num_dst)
    if kind == "film":
        return _reduced(_film(words, graph, t), group, words, dst, graph.num_dst)
    matrix = _matrices(words, relation, t)
    if kind == "embedding":
        row = matrix[torch.arange(len(src)), t["ids"][src]]
    else:
        row = torch.einsum("ek,ekn->en", t["x"][src], matrix)
    if kind != "rgat":
        row = row * t["norm"].unsqueeze(1) if "weighted" in words else row
        return _reduced(row, group, words, dst, graph.num_dst)
    at_dst = torch.einsum("ek,ekn->en", t["x_dst" if "pair" in words else "x"][dst], matrix)
    return _added(_rgat(words, row, at_dst, dst, group, t), dst, graph.num_dst)


def _hgt(graph: Typed, t: dict[str, Tensor]) -> Tensor:
    src, dst, relation = graph.src, graph.dst, graph.relation

    def mapped(rows: Tensor, matrix: Tensor) -> Tensor:
        return torch.einsum("ehk,ehkn->ehn", rows[src].unflatten(1, (HEADS, -1)), matrix[relation])

    score = (t["queries"][dst].unflatten(1, (HEADS, -1))
             * mapped(t["keys"], t["w_att"])).sum(-1) * t["p"][relation] * 0.5
    return _softmax(score, dst).unsqueeze(-1) * mapped(t["values"], t["w_msg"])


def _heat(graph: Typed, t: dict[str, Tensor]) -> Tensor:
    src, dst = graph.src, graph.dst
    score = t["a_src"][src] + t["a_dst"][dst] + t["a_rel"][graph.relation] + t["a_edge"]
    message = t["rows"][src] + t["edges"] @ t["w_edge"]
    return (_softmax(_leaky(score), dst).unsqueeze(-1) * message.unsqueeze(1)).unsqueeze(1)


def _edge_gat(graph: Typed, t: dict[str, Tensor]) -> Tensor:
    src, dst = graph.src, graph.dst
    score = t["a_src"][src] + t["a_dst"][dst] + t["a_edge"]
    message = t["rows"][src].unflatten(1, (HEADS, -1)) + (
        t["edges"] @ t["w_edge"]).unflatten(1, (HEADS, -1))
    return _softmax(_leaky(score), dst).unsqueeze(-1) * message


_OF_KIND = {"hgt": _hgt, "heat": _heat, "edge_gat": _edge_gat}


def _film(words: list[str], graph: Typed, t: dict[str, Tensor]) -> Tensor:
    relation = graph.relation
    h = torch.einsum("ek,enk->en", t["x"][graph.src], t["weight"][relation])
    f = torch.einsum("ek,enk->en", t["x_dst" if "pair" in words else "x"][graph.dst],
                     t["film"][relation])
    beta, gamma = (f + t["bias"][relation] if "bias" in words else f).chunk(2, 1)
    row = gamma * h + beta
    return row.relu() if "activated" in words else row


def _matrices(words: list[str], relation: Tensor, t: dict[str, Tensor]) -> Tensor:
    if "bases" in words:
        return torch.einsum("eb,bkn->ekn", t["comp"][relation], t["bases"])
    if "blocks" in words:
        blocks = [torch.block_diag(*w) for w in t["weight"][relation]]
        return torch.stack(blocks) if blocks else t["weight"].new_zeros(0, K, OUT)
    return t["weight"][relation]


def _rgat(words: list[str], row: Tensor, at_dst: Tensor, dst: Tensor, group: Tensor,
          t: dict[str, Tensor]) -> Tensor:
    if "product" in words:
        score = (at_dst @ t["q"]) * (row @ t["k"]) * (t["a_edge"] if "edge" in words else 1.0)
    else:
        score = _leaky(at_dst @ t["q"] + row @ t["k"] + (t["a_edge"] if "edge" in words else 0.0))
    alpha = _softmax(score, group if "within" in words else dst)
    alpha = alpha + 1 if "raised" in words else alpha
    heads = row.unflatten(1, (HEADS, -1))
    if "several" in words:
        return alpha.unflatten(1, (HEADS, -1)).unsqueeze(-1) * heads.unsqueeze(2)
    return (alpha.unsqueeze(-1) + (t["w"] if "additive" in words else 0.0)) * heads


def _reduced(row: Tensor, group: Tensor, words: list[str], dst: Tensor, rows: int) -> Tensor:
    """The sum over relations of the sum or mean over each one's edges."""
    if "mean" in words:
        row = row / torch.bincount(group)[group].to(row.dtype).unsqueeze(1)
    return _added(row, dst, rows)


def _leaky(score: Tensor) -> Tensor:
    return torch.where(score > 0, score, 0.2 * score)


def _added(message: Tensor, dst: Tensor, rows: int) -> Tensor:
    return message.new_zeros(rows, *message.shape[1:]).index_add(0, dst, message)


def _softmax(score: Tensor, group: Tensor) -> Tensor:
    """Over the edges of a group, from the definition: an edge against all edges."""
    if not len(group):
        return score
    same = group.unsqueeze(0) == group.unsqueeze(1)
    top = torch.stack([score.detach()[mine].amax(0) for mine in same])
    p = (score - top).exp()
    return p / (same.to(score.dtype) @ p)


# ---- running and judging ----

def value(program: Program, view: RelationView, operands: dict[str, Tensor]) -> Tensor:
    """The Program's output by torch operations."""
    return run(program, view, operands, torch_maps, attention.run_torch)


def assert_same(got: Tensor, expected: Tensor, operands: dict[str, Tensor],
                label: object = "") -> None:
    """Equal values and equal gradients of every floating operand, up to fp64 rounding."""
    got = got.reshape(expected.shape)
    cotangent = torch.linspace(-1.0, 1.0, expected.numel(),
                               dtype=expected.dtype).view(expected.shape)
    leaves = {name: t for name, t in operands.items() if t.is_floating_point()}
    both = []
    for out in (got, expected):
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent, retain_graph=True,
                                    allow_unused=True)
        both.append([out,
                     *(torch.zeros_like(t) if g is None else g
                       for g, t in zip(grads, leaves.values()))])
    for name, a, b in zip(["out", *leaves], *both):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11,
                                   msg=lambda text: f"{label}, {name}: {text}")
