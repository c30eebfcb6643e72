"""Attention on the CPU without an [E, heads, width] tensor, which the torch backend uses there
where it can.

Fresh memory costs more than arithmetic on a CPU (each page is cleared on first touch), so nothing
larger than one number per edge and head is made. Edges sorted by destination let a weighted sum be
an embedding bag and an inner product per edge a sampled matrix product. Heads go one by one, as
separate graphs would; small graphs fold all heads into one graph of ``heads`` disjoint copies
instead, so that the count of calls does not grow with them.

The operations are closed under differentiation (each backward is made of the others), so any
derivative is right.
"""
from __future__ import annotations

import functools
import warnings
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.cached import cached_property
from gnnaccel.dispatch.ir.attention_programs import Attention
from gnnaccel.dispatch.run.autograd import Closed
from gnnaccel.dispatch.run.torch_pairs import pair_scores

#: edges times heads up to which the heads fold into one graph; measured, see docs/notes/cpu.md
FOLD = 1 << 17
_DTYPES = (torch.float32, torch.float64)
#: edges of a row that are added up one after the other: sums of longer rows are made of such parts
PART = 64


class Segments:
    """A graph by destination: ``ptr`` [num_dst + 1], ``src``, ``dst`` [E], all int64; edge e enters
    ``dst[e]``, ascending.

    ``place`` [E], on a `turned` graph: for each of its edges the place in the graph it was turned
    from.
    """

    def __init__(self, ptr: Tensor, src: Tensor, dst: Tensor, num_src: int, num_dst: int):
        self.ptr, self.src, self.dst, self.num_src, self.num_dst = ptr, src, dst, num_src, num_dst
        self._folds: dict[int, Segments] = {}
        self.place: Tensor | None = None

    @classmethod
    @torch.inference_mode(False)  # a graph first seen in inference mode serves training as well
    def of(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Segments:
        degree = torch.bincount(dst, minlength=num_dst)
        return cls(F.pad(degree.cumsum(0), (1, 0)), src, dst, num_src, num_dst)

    @torch.inference_mode(False)
    def fold(self, heads: int) -> Segments:
        """``heads`` disjoint copies of the graph as one."""
        if heads == 1:
            return self
        if heads not in self._folds:
            copy = torch.arange(heads, device=self.src.device).unsqueeze(1)
            src, dst = ((ids + copy * count).view(-1)
                        for ids, count in ((self.src, self.num_src), (self.dst, self.num_dst)))
            ptr = F.pad((self.ptr[:-1] + copy * self.src.shape[0]).view(-1), (0, 1),
                        value=src.shape[0])
            self._folds[heads] = Segments(ptr, src, dst, heads * self.num_src, heads * self.num_dst)
        return self._folds[heads]

    @cached_property
    @torch.inference_mode(False)
    def turned(self) -> Segments:
        """The graph with every edge reversed."""
        src, place = torch.sort(self.src, stable=True)
        turned = Segments.of(self.dst.index_select(0, place), src, self.num_dst, self.num_src)
        turned.place = place
        return turned

    @cached_property
    @torch.inference_mode(False)
    def parts(self) -> Parts | None:
        """The edges with those of long rows cut into parts; None where all rows are short."""
        degree = self.ptr.diff()
        extra = (degree.clamp(min=1) - 1) // PART  # parts of a row beyond its first
        if not int(extra.sum()):
            return None
        place = torch.arange(self.src.shape[0], device=self.src.device) - self.ptr[self.dst]
        row = torch.arange(extra.shape[0], device=extra.device).repeat_interleave(extra)
        at = torch.arange(row.shape[0], device=row.device) - (extra.cumsum(0) - extra)[row] + 1
        length = (degree[row] - PART * at).clamp(max=PART)
        first, rest = [where.nonzero().view(-1) for where in (place < PART, place >= PART)]
        return Parts(first, self.src[first], F.pad(degree.clamp(max=PART).cumsum(0), (1, 0)),
                     rest, self.src[rest], F.pad(length.cumsum(0), (1, 0)), row)

    def nbytes(self) -> int:
        """Bytes of the arrays held next to ``src`` and ``dst``."""
        total = self.ptr.nbytes + sum(g.nbytes() + g.src.nbytes + g.dst.nbytes
                                      for g in self._folds.values())
        total += sum(t.nbytes for t in self.__dict__.get("parts") or ())
        turned = self.__dict__.get("turned")
        return (total
                if turned is None
                else total + turned.nbytes() + turned.src.nbytes + turned.dst.nbytes
                + turned.place.nbytes)


class Parts(NamedTuple):
    """A graph's edges, those of long rows in parts of `PART`.

    ``places``, ``src``: in the graph, and the sources, of the edges in each row's first part, which
    begins at ``ptr`` [rows + 1]. The others are of the ``rest``, which belongs to the rows ``row``
    [parts].
    """

    places: Tensor
    src: Tensor
    ptr: Tensor
    places_of_rest: Tensor
    src_of_rest: Tensor
    ptr_of_rest: Tensor
    row: Tensor


def weighted_sum(graph: Segments, weight: Tensor | None, rows: Tensor) -> Tensor:
    """[num_dst, width]: the sum over the edges that enter a node of the row of the source, times
    ``weight`` [E] if there is one; rows [num_src, width]."""
    return _WeightedSum(graph).apply(weight, rows)


def edge_dot(graph: Segments, left: Tensor, right: Tensor) -> Tensor:
    """[E]: inner product of the rows at an edge's ends; left [num_dst, width], right [num_src,
    width]."""
    return _EdgeDot(graph).apply(left, right)


def softmax(graph: Segments, scores: Tensor) -> Tensor:
    """[E]: softmax of scores [E] over the edges that enter each node."""
    return _Softmax(graph).apply(scores)


def _weighted_sum_of_turned(graph: Segments, weight: Tensor | None, rows: Tensor) -> Tensor:
    """[num_src, width]: `weighted_sum` against the edges' direction; rows [num_dst, width]."""
    turned = graph.turned
    weight = (None if weight is None
              else weight.index_select(0, turned.place))  # type: ignore[arg-type]
    return weighted_sum(turned, weight, rows)


class _OverSegments(Closed):
    __slots__ = ("graph",)

    def __init__(self, graph: Segments):
        self.graph = graph


class _WeightedSum(_OverSegments):
    __slots__ = ()

    def forward(self, needs, weight, rows):
        graph, saved = self.graph, (weight, rows if needs[0] else None)
        if weight is None and rows.dtype is torch.float64:  # without weights torch is slower there
            weight = rows.new_ones(()).expand(graph.src.shape[0])
        weight = None if weight is None else weight.contiguous()
        rows = rows.contiguous()
        parts = graph.parts if rows.dtype is torch.float32 else None
        if parts is None:
            return _bags(rows, graph.src, graph.ptr, weight), saved
        # one after the other, hundreds of numbers lose more digits than a host's sum of them
        of_first, of_rest = (None, None) if weight is None else [
            weight.index_select(0, places) for places in (parts.places, parts.places_of_rest)]
        out = _bags(rows, parts.src, parts.ptr, of_first)
        rest = _bags(rows, parts.src_of_rest, parts.ptr_of_rest, of_rest)
        return out.index_add_(0, parts.row, rest), saved

    def backward(self, needs, saved, grad):
        weight, rows = saved
        return (edge_dot(self.graph, grad, rows) if needs[0] else None,
                _weighted_sum_of_turned(self.graph, weight, grad) if needs[1] else None)


def _bags(rows: Tensor, src: Tensor, ptr: Tensor, weight: Tensor | None) -> Tensor:
    return torch.embedding_bag(rows, src, ptr, False, 0, False, weight, True)[0]


class _EdgeDot(_OverSegments):
    __slots__ = ()

    def forward(self, needs, left, right):
        return _sampled(self.graph, left, right), (left, right)

    def backward(self, needs, saved, grad):
        x, y = saved
        return (weighted_sum(self.graph, grad, y) if needs[0] else None,
                _weighted_sum_of_turned(self.graph, grad, x) if needs[1] else None)


class _Softmax(_OverSegments):
    __slots__ = ()

    def forward(self, needs, scores):
        graph = self.graph
        top = torch.segment_reduce(scores, "max", offsets=graph.ptr, axis=0, unsafe=True)
        p = top.index_select(0, graph.dst)
        torch.sub(scores, p, out=p).exp_()
        total = torch.segment_reduce(p, "sum", offsets=graph.ptr, axis=0, unsafe=True)
        p.div_(total.index_select(0, graph.dst))
        return p, (p,)

    def backward(self, needs, saved, grad):
        (p,), graph = saved, self.graph
        # Gradients that nearly agree differ from their mean by rounding, and the rounding of the
        # mean weighs as much. So the mean is taken twice: the second time of the differences.
        if torch.is_grad_enabled():
            rest = grad - _mean(graph, grad * p)
            return (rest - _mean(graph, rest * p)) * p,
        weighted = grad * p
        total = weighted.new_zeros(graph.num_dst).index_add_(0, graph.dst, weighted)
        rest = total.index_select(0, graph.dst)
        torch.mul(torch.sub(grad, rest, out=rest), p, out=weighted)
        mean = torch.index_select(total.zero_().index_add_(0, graph.dst, weighted), 0, graph.dst,
                                  out=weighted)
        return rest.sub_(mean).mul_(p),


def _mean(graph: Segments, weighted: Tensor) -> Tensor:
    """[E]: at each edge the sum of ``weighted`` [E] over the edges that enter the same node."""
    return weighted.new_zeros(graph.num_dst).index_add(0, graph.dst,
                                                       weighted).index_select(0, graph.dst)


def _sampled(graph: Segments, left: Tensor, right: Tensor) -> Tensor:
    # CSR refuses more values than there are places
    crowded = graph.src.shape[0] > graph.num_dst * graph.num_src
    if crowded or not torch.backends.mkl.is_available():  # sampled_addmm needs MKL on the CPU
        return (left.index_select(0, graph.dst) * right.index_select(0, graph.src)).sum(-1)
    odd = -left.shape[1] % 8
    if odd:  # whole vectors are several times as fast
        left, right = F.pad(left, (0, odd)), F.pad(right, (0, odd))
    mask = _mask(graph, left.new_zeros(1).expand(graph.src.shape[0]).contiguous())
    return torch.sparse.sampled_addmm(mask, left.contiguous(), right.contiguous().t(),
                                      beta=0.0).values()


def _mask(graph: Segments, values: Tensor) -> Tensor:
    _silence()
    return torch.sparse_csr_tensor(graph.ptr, graph.src, values, (graph.num_dst, graph.num_src),
                                   device=values.device, check_invariants=False)


@functools.lru_cache(maxsize=1)
def _silence() -> None:
    """Use up torch's warning, once per process, that CSR tensors are in beta: it is not the user
    who makes them here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptr, column = (torch.tensor(ids, device="cpu") for ids in ([0, 1], [0]))
        values = torch.ones(1, dtype=torch.float32, device="cpu")
        torch.sparse_csr_tensor(ptr, column, values, (1, 1), device="cpu")


# --- attention ------------------------------------------------------------------------------------

def covers(attention: Attention | None, edges,
           tensors: dict[str, Tensor]) -> TypeGuard[Attention]:
    """Whether `attend` computes this: attention on the CPU, in one dtype that its operations
    have."""
    if attention is None or edges.src.device.type != "cpu" or not edges.src.shape[0]:
        return False
    # rows per edge exist anyway
    if attention.vectors or attention.edge and attention.family == "pairwise":
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    dtype = next(iter(tensors.values())).dtype
    return dtype in _DTYPES and all(t.dtype is dtype for t in tensors.values())


def attend(attention: Attention, edges, tensors: dict[str, Tensor], keep: Tensor | None) -> Tensor:
    """The attention's output [num_dst, heads, width]; arguments as of `torch_backend.run`."""
    rows = tensors[{"additive": "x", "terms": "x", "dot": "values"}.get(attention.score, "keys")]
    heads = rows.shape[1]
    folded = heads if edges.src.shape[0] * heads <= FOLD else 1
    graph = edges.segments(rows.shape[0]).fold(folded)

    def split(t: Tensor | None) -> list:
        """A value [n, heads, ...] as one per graph to run: [heads * n, ...], or heads times [n,
        ...]."""
        if t is None:
            return [None] * (heads // folded)
        t = t.transpose(0, 1)
        return [t.flatten(0, 1)] if folded == heads else list(t.contiguous().unbind(0))

    scores = _scores(attention, edges, graph, tensors, split)
    outs = []
    for score, factors, values in zip(scores, split(None if keep is None else keep.to(rows.dtype)),
                                      split(rows)):
        alpha = softmax(graph, score)
        outs.append(weighted_sum(graph, alpha if factors is None else alpha * factors, values))
    return torch.cat(outs).view(heads, edges.num_dst, -1).transpose(0, 1)


def _scores(attention: Attention, edges, graph: Segments, tensors: dict[str, Tensor], split):
    """Scores [E] for each graph to run, made when asked for."""
    kind, slope = attention.score, attention.slope
    if attention.family == "additive":
        yield from _additive_scores(edges, graph, tensors, split, slope)
    elif kind == "gatv2":
        yield from split(pair_scores(edges, tensors["keys"], tensors["queries"], tensors["att"],
                                     slope))
    else:
        extra = (split(tensors.get("c_src")), split(tensors.get("c_dst")))
        for queries, keys, c_src, c_dst in zip(split(tensors["queries"]), split(tensors["keys"]),
                                               *extra):
            score = edge_dot(graph, queries, keys)
            if kind in ("dot", "sd"):
                score = score * attention.scale
            elif kind == "cosine":
                score = score * c_src.index_select(0, graph.src)
            else:
                ends = c_src.index_select(0, graph.src) + c_dst.index_select(0, graph.dst)
                score = ends * score.sigmoid()
            yield F.leaky_relu(score, slope) if kind in ("mx", "sd") else score


def _additive_scores(edges, graph: Segments, tensors: dict[str, Tensor], split, slope: float):
    x = tensors["x"]
    to_src = split(tensors["a_src"] if "a_src" in tensors else (x * tensors["att_src"]).sum(-1))
    of_dst = tensors.get("x_dst", x)
    if of_dst.shape[0] > edges.num_dst:  # destinations are the first sources
        of_dst = of_dst[:edges.num_dst]
    to_dst = split((of_dst * tensors["att_dst"]).sum(-1)
                   if "att_dst" in tensors else tensors.get("a_dst"))
    edge = tensors.get("a_edge")
    if edge is not None and edges.eid is not None:
        edge = edge.index_select(0, edges.eid)
    for a_src, a_dst, a_edge in zip(to_src, to_dst, split(edge)):
        score = a_src.index_select(0, graph.src)
        if a_dst is not None:
            score = score + a_dst.index_select(0, graph.dst)
        yield F.leaky_relu(score if a_edge is None else score + a_edge, slope)
