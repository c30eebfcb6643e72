"""Random metagraphs (node types, relations, and the nodes and edges of each), features, parameters.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

EdgeType = tuple[str, str, str]

_PLAIN = ["a", "b", "c", "user", "item", "paper", "z", "n0", "n1"]
# names that mean something to a torch Module, or are no identifiers
_ODD = ["type", "keys", "a b", "x-y", "u.v", "forward"]
_WIDTHS = [3, 5, 8]
WIDTH = 8


class Metagraph(NamedTuple):
    """``nodes``: how many of each type; ``relations``: in the order of the layer; ``edges``: [2, E]
    of each relation, in an order of its own; ``widths``: of each type's features."""

    nodes: dict[str, int]
    relations: list[EdgeType]
    edges: dict[EdgeType, Tensor]
    widths: dict[str, int]

    def __str__(self) -> str:
        edges = ", ".join(f"{s}-{n}-{d}:{self.edges[s, n, d].shape[1]}"
                          for s, n, d in self.relations)
        return f"{self.nodes} {edges}"


def longest_sum(meta: Metagraph) -> int:
    """The most edges, of all relations, that enter a node or that leave one."""
    counts = [sum(t[end].bincount(minlength=meta.nodes[name]) for relation, t in meta.edges.items()
                  if relation[2 * end] == name)
              for end in (0, 1) for name in meta.nodes]
    return max((int(t.max()) for t in counts if isinstance(t, Tensor) and len(t)), default=0)


class Case(NamedTuple):
    """A layer over a metagraph.

    ``x``: the shape of each input, by name; ``call(module, x)``: the results of the host's layer,
    by name; ``truth(module, x)``: the same results, computed relation by relation; ``longest``: the
    most edges of all relations that meet in a node; ``host``: whether the host's own results are
    right.
    """

    text: str
    module: torch.nn.Module
    x: dict[str, tuple[int, int]]
    call: Callable[[torch.nn.Module, dict[str, Tensor]], dict[Any, Tensor]]
    truth: Callable[[torch.nn.Module, dict[str, Tensor]], dict[Any, Tensor]]
    longest: int = 0
    host: bool = True


def metagraph(r: random.Random, odd: bool = False, own: bool = False, entered: bool = False,
              one_width: bool = False,
              empty: bool = True) -> Metagraph:
    """``odd``: names may be odd; ``own``: every relation joins a type with itself; ``entered``:
    every type is a destination; ``empty``: types may be without nodes and relations without
    edges."""
    pool = _PLAIN + (_ODD if odd and r.random() < 0.3 else [])
    types = r.sample(pool, r.choice([1, 2, 2, 3, 3, 4, 5]))
    relations = _relations(r, types, own, entered)
    used = {end for name in relations for end in (name[0], name[2])}
    types = [t for t in types if t in used or (not entered and r.random() < 0.3)]
    r.shuffle(types)
    sizes = [1, 2, 5, 13, 20] + ([0] if empty and r.random() < 0.15 else [])
    nodes = {t: r.choice(sizes) for t in types}
    names = r.sample(relations, len(relations)) if r.random() < 0.6 else relations
    edges = {name: _edges(r, nodes[name[0]], nodes[name[2]], empty) for name in names}
    same = one_width or r.random() < 0.6
    return Metagraph(nodes, relations, edges,
                     {t: WIDTH if same else r.choice(_WIDTHS) for t in types})


def _relations(r: random.Random, types: list[str], own: bool, entered: bool) -> list[EdgeType]:
    """Distinct relations in random order. Often each type is entered by exactly one of them."""
    form = r.choice(["permuted", "inverse", "any", "any"])
    if own:
        pairs = [(t, t) for t in r.choices(types, k=r.randint(1, 5))]
    elif form == "permuted":
        pairs = list(zip(r.choices(types, k=len(types)), types))
    elif form == "inverse":
        pairs = [pair for _ in range(r.randint(1, 3)) for pair in _inverse(*r.choices(types, k=2))]
    else:
        pairs = [tuple(r.choices(types, k=2)) for _ in range(r.randint(1, 7))]
    if entered:
        pairs += [(r.choice(types), t) for t in types if t not in {dst for _, dst in pairs}]
    labels = r.sample(["of0", "rates", "by", "e0", "e1", "x", "knows", "has", "zz", "at",
                       "in1", "of"], 12)
    found = [(src, labels[at], dst) for at, (src, dst) in enumerate(pairs)]
    if len(pairs) > 1 and len(set(pairs)) == len(pairs) and r.random() < 0.2:
        found = [(src, "to", dst) for src, dst in pairs]  # one name for all
    r.shuffle(found)
    return found


def _inverse(a: str, b: str) -> list[tuple[str, str]]:
    return [(a, b), (b, a)]


def _edges(r: random.Random, num_src: int, num_dst: int, empty: bool) -> Tensor:
    count = r.choice([1, 7, 30, 60] + ([0] if empty else []))
    if not num_src or not num_dst:
        count = 0
    g = generator(r)
    ends = [torch.randint(0, max(1, n), (count,), generator=g) for n in (num_src, num_dst)]
    form = r.choice(["any", "any", "twice", "hub", "few", "sorted"])
    if form == "twice":
        ends = [t[:count // 2 + 1].repeat(2) for t in ends]
    elif form == "hub":
        ends[1][count // 3:] = num_dst - 1
    elif form == "few":
        ends[1] = ends[1] // 3
    elif form == "sorted":
        order = ends[1].argsort(stable=True)
        ends = [t[order] for t in ends]
    found = torch.stack(ends)
    return found.t().contiguous().t() if r.random() < 0.1 else found


def generator(r: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.randrange(1 << 30))


def features(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, Tensor]:
    """Random rows for each input, of several sizes and memory layouts."""
    r = random.Random(f"features-{seed}")
    g = generator(r)
    found = {}
    for name, (rows, width) in shapes.items():
        form = r.choice(["plain"] * 5 + ["slice", "transposed", "alike"])
        if form == "slice":
            x = torch.randn(rows, 2 * width, generator=g)[:, ::2]
        elif form == "transposed":
            x = torch.randn(width, rows, generator=g).t()
        else:
            x = torch.randn(rows, width, generator=g)
        if form == "alike" and rows:
            x = x[:1].repeat(rows, 1)
        found[name] = x * r.choice([1.0, 1.0, 1.0, 0.3, 3.0])
    return found


def spread(module: torch.nn.Module, r: random.Random) -> None:
    """Give random values to parameters that start constant or uninitialized; sometimes freeze some.
    """
    g = generator(r)
    frozen = 0.3 if r.random() < 0.25 else 0.0
    with torch.no_grad():
        for name, p in module.named_parameters():
            if torch.nn.parameter.is_lazy(p):  # of a relation that the call leaves out
                continue
            # the parameter of a single basis, which the host leaves uninitialized
            unset = name.endswith("edge_type_weight")
            if unset or p.numel() and bool((p == p.flatten()[0]).all()):
                p.copy_(torch.randn(p.shape, generator=g).to(p))
            p.requires_grad_(r.random() >= frozen)


def by_target(parts: Iterable[tuple[EdgeType, Tensor]]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, part in parts:
        found.setdefault(name[2], []).append(part)
    return found


def put_together(parts: list[Tensor], how: str | None) -> Tensor:
    """Results of the relations that enter a type."""
    if how is None or how == "stack":
        return torch.stack(parts, 1)
    if how == "cat":
        return torch.cat(parts, -1)
    if how in ("max", "min"):
        return getattr(torch.stack(parts), how)(0).values
    total = sum(parts[1:], start=parts[0])
    return total / len(parts) if how == "mean" else total


def softmax_sum(logits: list[Tensor], values: list[Tensor], dst: list[Tensor],
                nodes: int) -> Tensor:
    """[nodes, heads, D]: values [E, heads, D] of several relations, added up with softmax weights.

    The softmax of the logits [E, heads] is over all edges that enter a node.
    """
    logit, value, at = torch.cat(logits), torch.cat(values), torch.cat(dst)
    rows = at.view(-1, 1).expand_as(logit)
    high = torch.full((nodes, logit.shape[1]), -torch.inf, dtype=logit.dtype, device=logit.device)
    high = high.scatter_reduce(0, rows, logit.detach(), "amax")
    share = (logit - high[at]).exp()
    total = torch.zeros_like(high).index_add(0, at, share)
    share = share / total[at]
    return value.new_zeros(nodes, *value.shape[1:]).index_add(0, at, value * share.unsqueeze(-1))
