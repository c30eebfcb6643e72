"""The linear maps of `PNAConv` for all towers at once, each side of its reductions one node of
autograd's graph.

T towers of F channels, R reductions, S scalers; x [N, F]. Each tower has a map of its own, whose
weights and biases are inputs one by one; they are put side by side for one product. Results are
those of torch operations on the joined weights (`ends`, `shifted`, `mapped`), in fewer launches and
nodes than those are recorded in: backward is written by hand, and recorded operations take over
where it is itself differentiated.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.run.autograd import Operation

#: runs of reductions that add the same multiple of the term common to all messages of a node: the
#: `Degrees`' count that is the factor ("one", "all", or "none"), and the length of the run
Runs = list[tuple[str, int]]


class Degrees(NamedTuple):
    """Degrees of each node [N]: ``one`` if it has an edge, else 0; ``all``, its number of edges;
    ``least_one``, at least 1, and ``log`` of one more than that, in a dtype of features."""

    one: Tensor
    all: Tensor
    least_one: Tensor
    log: Tensor


def degrees(count: Tensor, dtype: torch.dtype) -> Degrees:
    """`Degrees` of ``count`` [N]: how many edges enter each node."""
    least_one = count.clamp(min=1).to(dtype)
    return Degrees(count.clamp(max=1), count, least_one, torch.log(least_one + 1))


# --- before the reductions ------------------------------------------------------------------------

def ends(width: int, x: Tensor, edge: Tensor | None, encoder: Tensor | None, shift: Tensor | None,
         weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Terms of a message: of the receiving node and of the sending one, [N, T * F], and of the
    edge, [E, T * F], where ``edge`` [E, D] has features.

    ``encoder`` [F, D] and ``shift`` [F] map those first; ``weight`` [T * F, 2 * F or 3 * F] and
    ``bias`` [T * F]; ``width``: F.
    """
    own, sent, of_edge = _thirds(width, weight)
    bias, *added = of_edges(edge, encoder, shift, of_edge, bias)
    return torch.addmm(bias, x, own.t()), x @ sent.t(), *added


def ends_of_parts(width: int, x: Tensor, edge: Tensor | None, encoder: Tensor | None,
                  shift: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """`ends` of x [N, T * F], of which each tower maps a part of its own."""
    own, sent, of_edge = _thirds(width, weight)
    bias, *added = of_edges(edge, encoder, shift, of_edge, bias)
    parts = x.unflatten(1, (-1, width)).transpose(0, 1)
    products = (torch.baddbmm(bias.view(-1, 1, width), parts, own.unflatten(0, (-1, width)).mT),
                torch.bmm(parts, sent.unflatten(0, (-1, width)).mT))
    return *[t.transpose(0, 1).flatten(1) for t in products], *added


def _thirds(width: int, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of a weight for the receiving end, the sending end, and the edge."""
    return weight[:, :width], weight[:, width:2 * width], weight[:, 2 * width:]


def _at_once(edge: Tensor, encoder: Tensor, weight: Tensor) -> bool:
    """Whether the two maps of edges' features are less work multiplied first."""
    (width, size), rows = encoder.shape, weight.shape[0]
    return (edge.shape[0] * size * rows + rows * width * size
            <= edge.shape[0] * width * (size + rows))


def of_edges(edge: Tensor | None, encoder: Tensor | None, shift: Tensor | None, weight: Tensor,
             bias: Tensor) -> tuple[Tensor, ...]:
    """``bias`` with the term that all messages share of their edges, and, with features of edges,
    [E, T * F]: ``edge`` [E, D] times two maps, ``encoder`` [F, D] and ``weight`` [T * F, F]."""
    if edge is None or encoder is None:
        return (bias,)
    if shift is not None:
        bias = torch.addmv(bias, weight, shift)
    if _at_once(edge, encoder, weight):
        return bias, edge @ (weight @ encoder).t()
    return bias, (edge @ encoder.t()) @ weight.t()


class Ends(Operation):
    """`ends` of x, edge, encoder and shift, then each tower's weight [F, ..] and bias [F]."""

    __slots__ = ("towers", "width")
    keeps_inputs = True

    def __init__(self, towers: int, width: int):
        self.towers, self.width = towers, width

    def reference(self, x, edge, encoder, shift, *maps):
        return ends(self.width, x, edge, encoder, shift, torch.cat(maps[:self.towers]),
                    torch.cat(maps[self.towers:]))

    def forward(self, needs, x, edge, encoder, shift, *maps):
        weight, bias = torch.cat(maps[:self.towers]), torch.cat(maps[self.towers:])
        results = ends(self.width, x, edge, encoder, shift, weight, bias)
        return results, (x, edge, encoder, shift, *maps, weight)

    def backward(self, needs, saved, d_own, d_sent, d_added=None):
        x, edge, encoder, shift, *_, weight = saved
        own, sent, of_edge = _thirds(self.width, weight)
        d_x = d_edge = d_encoder = d_shift = None
        if needs[0]:
            d_x = _sum_of_products((d_own, own), (d_sent, sent))
        maps = needs[4:]
        d_weight = torch.empty_like(weight) if any(maps[:self.towers]) else None
        d_bias = None
        if d_own is not None and (any(maps[self.towers:]) or shift is not None):
            d_bias = d_own.sum(0)
        if d_weight is not None:
            for d_out, into in zip((d_own, d_sent), _thirds(self.width, d_weight)):
                _weight_grad(d_out, x, into)
        if edge is not None:
            into = None if d_weight is None else _thirds(self.width, d_weight)[2]
            d_edge, d_encoder = _of_edges_grads(needs[1:3], d_added, edge, encoder, of_edge, into)
            if shift is not None and d_bias is not None:
                if into is not None:
                    into.addr_(d_bias, shift)
                d_shift = of_edge.t() @ d_bias if needs[3] else None
        return (d_x, d_edge, d_encoder, d_shift,
                *_apart(d_weight, maps[:self.towers]), *_apart(d_bias, maps[self.towers:]))


def _sum_of_products(*pairs: tuple[Tensor | None, Tensor]) -> Tensor | None:
    """The sum of ``grad @ weight`` of the pairs whose gradient is there."""
    total = None
    for grad, weight in pairs:
        if grad is not None:
            total = grad @ weight if total is None else torch.addmm(total, grad, weight)
    return total


def _weight_grad(grad: Tensor | None, x: Tensor, into: Tensor) -> None:
    """Write the gradient of a weight that multiplies ``x``, from the product's ``grad``."""
    if grad is None:
        into.zero_()
    else:
        torch.mm(grad.t(), x, out=into)


def _of_edges_grads(needs: Sequence[bool], grad: Tensor | None, edge: Tensor, encoder: Tensor,
                    weight: Tensor, into: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``edge`` and ``encoder`` in `_of_edges`; that of ``weight`` is written
    ``into``."""
    d_edge = d_encoder = None
    if grad is None:
        if into is not None:
            into.zero_()
    elif _at_once(edge, encoder, weight):
        if into is not None or needs[1]:
            product = grad.t() @ edge  # gradient of the two maps' product
            if into is not None:
                torch.mm(product, encoder.t(), out=into)
            d_encoder = weight.t() @ product if needs[1] else None
        d_edge = grad @ (weight @ encoder) if needs[0] else None
    else:
        if into is not None:
            torch.mm(grad.t(), edge @ encoder.t(), out=into)
        if needs[0] or needs[1]:
            inner = grad @ weight
            d_encoder = inner.t() @ edge if needs[1] else None
            d_edge = inner @ encoder if needs[0] else None
    return d_edge, d_encoder


def _apart(joined: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Parts of a gradient, one for each of the tensors that were concatenated."""
    if joined is None:
        return [None] * len(needs)
    return [part if need else None for part, need in zip(joined.chunk(len(needs)), needs)]


# --- after the reductions -------------------------------------------------------------------------

def shifted(towers: int, found: Tensor, own: Tensor, counts: Degrees, runs: Runs) -> Tensor:
    """[N, T, R, F]: the reductions of whole messages, from those of the varying term, ``found``
    [N, R, T * F], and ``own`` [N, T * F] of `ends`. Nodes without edges keep zeros."""
    nodes, reduces = found.shape[:2]
    width = own.shape[1] // towers
    found = found.view(nodes, reduces, towers, width).transpose(1, 2)
    own = own.view(nodes, towers, 1, width)
    if runs == [("none", reduces)]:  # ``own`` gets a gradient, of zeros, as with the host
        return found + own * counts.all.clamp(max=0).view(-1, 1, 1, 1)
    parts = found.split([count for _, count in runs], 2) if len(runs) > 1 else [found]
    results, by_kind = [], {}
    for (kind, _), part in zip(runs, parts):
        if kind != "none":
            if kind not in by_kind:
                by_kind[kind] = own * getattr(counts, kind).view(-1, 1, 1, 1)
            part = part + by_kind[kind]
        results.append(part)
    return torch.cat(results, 2) if len(results) > 1 else results[0]


def _by_scaler(weight: Tensor, towers: int, width: int, scalers: int) -> Tensor:
    """[T, F_out, S, R * F], a view of the part of a weight [T * F_out, (1 + S * R) * F] that is
    multiplied by messages."""
    return weight[:, width:].unflatten(0, (towers, -1)).unflatten(2, (scalers, -1))


def mapped(messages: Tensor, weight: Tensor, width: int, scales: Tensor | None) -> Tensor:
    """[N, T, F_out]: the ``messages`` [N, T, R, F] by the maps after the reductions, ``weight``
    [T * F_out, (1 + S * R) * F]; scales are applied to the results. ``scales`` [N, S], None for
    ones; ``width``: F."""
    nodes, towers = messages.shape[:2]
    count = 1 if scales is None else scales.shape[1]
    by_tower = _by_scaler(weight, towers, width, count).transpose(1, 2).flatten(1, 2)
    return _scaled(messages.reshape(nodes, towers, -1), by_tower, count, scales)


def _scaled(messages: Tensor, by_tower: Tensor, count: int, scales: Tensor | None) -> Tensor:
    """`mapped` of messages [N, T, R * F] and weights [T, S * F_out, R * F]."""
    nodes, towers = messages.shape[:2]
    products = torch.bmm(messages.transpose(0, 1), by_tower.transpose(1, 2)).transpose(0, 1)
    if scales is None:
        return products
    products = products.unflatten(2, (count, -1)) * scales.view(nodes, 1, -1, 1)
    return products.sum(2) if count > 1 else products.squeeze(2)


class Scaled(Operation):
    """[N, T * F_out] of x, own [N, T * F] and found [N, R, T * F], then each tower's weight
    [F_out, (1 + S * R) * F] and, with ``biased``, its bias [F_out]: the reductions of whole
    messages (`shifted`), beside x, by each tower's map, the messages scaled for each node."""

    __slots__ = ("towers", "counts", "runs", "scales", "biased")
    keeps_inputs = True

    def __init__(self, towers: int, counts: Degrees, runs: Runs, scales: Tensor | None,
                 biased: bool):
        self.towers, self.counts, self.runs = towers, counts, runs
        self.scales, self.biased = scales, biased

    def _joined(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        return (torch.cat(maps[:self.towers]),
                torch.cat(maps[self.towers:]) if self.biased else None)

    def reference(self, x, own, found, *maps):
        weight, bias = self._joined(maps)
        messages = shifted(self.towers, found, own, self.counts, self.runs)
        out = torch.nn.functional.linear(x, weight[:, :x.shape[1]], bias)
        return out + mapped(messages, weight, x.shape[1], self.scales).flatten(1)

    def forward(self, needs, x, own, found, *maps):
        (weight, bias), width = self._joined(maps), x.shape[1]
        messages = self._messages(own, found)
        count = 1 if self.scales is None else self.scales.shape[1]
        by_tower = _by_scaler(weight, self.towers, width, count).transpose(1, 2).flatten(1, 2)
        out = torch.nn.functional.linear(x, weight[:, :width], bias)
        out.unflatten(1, (self.towers, -1)).add_(
            _scaled(messages.flatten(2), by_tower, count, self.scales))
        return out, (x, own, found, *maps, weight, by_tower, messages)

    def _messages(self, own: Tensor, found: Tensor) -> Tensor:
        """`shifted`, in memory of its own."""
        nodes, reduces = found.shape[:2]
        width = own.shape[1] // self.towers
        messages = found.view(nodes, reduces, self.towers, width).transpose(1, 2).clone(
            memory_format=torch.contiguous_format)
        by_kind, start = {}, 0
        for kind, count in self.runs:
            if kind != "none":
                if kind not in by_kind:
                    by_kind[kind] = (own * getattr(self.counts, kind).view(-1, 1)).view(
                        nodes, self.towers, 1, width)
                messages[:, :, start:start + count] += by_kind[kind]
            start += count
        return messages

    def backward(self, needs, saved, grad):
        x, _, _, *_, weight, by_tower, messages = saved
        nodes, width, towers = len(x), x.shape[1], self.towers
        d_weight = torch.empty_like(weight) if any(needs[3:3 + towers]) else None
        scaled = grad.contiguous().view(nodes, towers, 1, grad.shape[1] // towers)
        if self.scales is not None:
            scaled = scaled * self.scales.view(nodes, 1, -1, 1)
        scaled = scaled.flatten(2).transpose(0, 1)  # [T, N, S * F_out]
        if d_weight is not None:
            torch.mm(grad.t(), x, out=d_weight[:, :width])
            into = _by_scaler(d_weight, towers, width, by_tower.shape[1] * towers // len(weight))
            product = torch.bmm(scaled.transpose(1, 2), messages.flatten(2).transpose(0, 1))
            into.copy_(product.unflatten(1, (into.shape[2], -1)).transpose(1, 2))
        d_own = d_found = None
        if needs[1] or needs[2]:
            d_messages = torch.bmm(scaled, by_tower).unflatten(2, (-1, width))  # [T, N, R, F]
            d_found = d_messages.permute(1, 2, 0, 3).flatten(2)
            d_own = self._own_grad(d_found) if needs[1] else None
        d_bias = grad.sum(0) if self.biased and any(needs[3 + towers:]) else None
        d_x = grad @ weight[:, :width] if needs[0] else None
        return (d_x, d_own, d_found if needs[2] else None,
                *_apart(d_weight, needs[3:3 + towers]), *_apart(d_bias, needs[3 + towers:]))

    def _own_grad(self, d_found: Tensor) -> Tensor:
        """[N, T * F]: gradient of ``own``, from the gradient [N, R, T * F] of the messages."""
        total, start = None, 0
        for kind, count in self.runs:
            if kind != "none":
                part = d_found[:, start:start + count]
                part = part.sum(1) if count > 1 else part[:, 0]
                part = part * getattr(self.counts, kind).view(-1, 1)
                total = part if total is None else total + part
            start += count
        return d_found.new_zeros(d_found.shape[0], d_found.shape[2]) if total is None else total
