"""Running a Program over a `RelationView`, one operation at a time.

Any Program runs, as stated or after the passes; the passes change only how much there is to do.
`Maps` are the operations that touch edges or relations: `torch_maps` anywhere, `cuda_maps` on a
GPU.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import (DOMAIN_OF, DST, EDGE, PAIR_DST, PAIR_SRC, RELATION, Op,
                                          Program, name_of)
from gnnaccel.dispatch.relational.gather import Gather
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention

#: pairs times bases up to which a mixture is a graph of its own: its index arrays take some 40
#: bytes each
_MIXED_EDGES = 1 << 26


class Maps(Protocol):
    """The operations that touch edges or relations; see `torch_maps` for their meaning."""

    def multiply(self, pairs: Any, rows: Tensor, weight: Tensor, transposed: bool = False,
                 gather: Gather | None = None) -> Tensor: ...
    def aggregate(self, graph: Any, rows: Tensor, weight: Tensor | None = None) -> Tensor: ...
    def take(self, rows: Tensor, gather: Gather) -> Tensor: ...


@dataclass
class Run:
    """State of one execution: ``values`` by name."""

    program: Program
    view: RelationView
    values: dict[str, Tensor]
    maps: Maps
    attend: Callable  # `attention.run_torch` or `attention.run_cuda`
    out_dtype: torch.dtype | None = None
    _read: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def read(self, arg: str, domain: str) -> Tensor:
        """The value of ``arg`` as an operation in ``domain`` reads it."""
        name, _, end = arg.partition("@")
        if not end:
            return self.values[name]
        key = arg, domain
        if key not in self._read:
            self._read[key] = self.maps.take(self.values[name],
                                             Gather(self.view, DOMAIN_OF[end], domain))
        return self._read[key]


def run(program: Program, view: RelationView, tensors: dict[str, Tensor], maps: Maps,
        attend: Callable, out_dtype: torch.dtype | None = None) -> Tensor:
    """The Program's output [num_dst, ...]. ``tensors``: by input name; EDGE inputs in the caller's
    order of edges."""
    state = Run(program, view, dict(tensors), maps, attend, out_dtype)
    for step, done in zip(program.ops, program.last_reads):
        state.values[step.out] = OPERATIONS[step.kind](state, step, program.domains[step.out])
        for name in done:  # values that are not read again are freed, unless autograd keeps them
            del state.values[name]
            for key in [k for k in state._read if k[0].partition("@")[0] == name]:
                del state._read[key]
    return state.values[program.output]


# --- rows -----------------------------------------------------------------------------------------

def _linear(state: Run, step: Op, domain: str) -> Tensor:
    transposed = bool(step.get("transposed"))
    name, _, end = step.args[1].partition("@")
    matrix = state.values[name]
    if step.get("heads"):  # a row for each head, times the head's own columns
        rows = state.values[step.args[0]].flatten(1, -2)
        return torch.einsum("uhk,khn->uhn", rows, matrix.unflatten(1, (step.attr("heads"), -1)))
    if end != "rel":
        return _dense(state.read(step.args[0], domain),
                      matrix.transpose(-1, -2) if transposed else matrix)
    matrix = _blocked(matrix)
    if domain in (PAIR_SRC, PAIR_DST):
        name, _, end = step.args[0].partition("@")
        # gathered by the map itself
        gather = Gather(state.view, DOMAIN_OF[end], domain) if end else None
        rows = state.values[name]
        matrix = matrix.to(rows.dtype)  # a factor of another dtype may have gone into it
        return state.maps.multiply(state.view.pairs(domain),
                                   rows.unflatten(1, (matrix.shape[1], -1)), matrix, transposed,
                                   gather).flatten(1)
    rows = state.read(step.args[0], domain)
    rows = rows.unflatten(1, (matrix.shape[1], -1))
    # one matrix per edge: only where nothing was compacted
    per_row = state.maps.take(matrix, Gather(state.view, RELATION, domain))
    return torch.einsum("ubk,ubnk->ubn" if transposed else "ubk,ubkn->ubn", rows,
                        per_row).flatten(1)


def _blocked(matrix: Tensor) -> Tensor:
    """[relations, blocks, K, N]; a matrix without blocks is one block."""
    return matrix if matrix.dim() == 4 else matrix.unsqueeze(1)


def _dense(rows: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dim() == 2:
        return rows @ matrix
    return torch.einsum("ubk,bkn->ubn", rows.unflatten(1, (matrix.shape[0], -1)), matrix).flatten(1)


def _lookup(state: Run, step: Op, domain: str) -> Tensor:
    table = state.values[name_of(step.args[0])]
    ids = state.read(step.args[1], domain)
    size = table.shape[1]
    row = state.view.index(RELATION,
                           domain).long() * size + _inside(ids, size, table.shape[0] * size)
    return table.flatten(0, 1).index_select(0, row)


def _mix(state: Run, step: Op, domain: str) -> Tensor:
    coefficients, bases = state.read(step.args[0], domain), state.values[step.args[1]]
    if step.get("own") and domain == PAIR_SRC and coefficients.numel() <= _MIXED_EDGES:
        return state.maps.aggregate(state.view.mixture(bases.shape[0]), bases.flatten(0, 1),
                                    coefficients.flatten())
    ids = state.read(step.args[2], domain)
    return torch.einsum("ub,bun->un", coefficients,
                        bases.index_select(1, _inside(ids, bases.shape[1], bases.shape[1])))


def _inside(ids: Tensor, size: int, beyond: int) -> Tensor:
    """Ids as indexing reads them: negative ones from the end; those outside the table point
    ``beyond``, where reading fails."""
    return ids.remainder(size).masked_fill((ids < -size) | (ids >= size), beyond)


def _fold(state: Run, step: Op, domain: str) -> Tensor:
    weight, matrix = _blocked(state.values[step.args[0]]), state.values[step.args[1]]
    blocks, n = weight.shape[1], weight.shape[3]
    return torch.einsum("rbkn,bnm->rbkm", weight, matrix.view(blocks, n, -1)).flatten(1, 2)


def _combine(state: Run, step: Op, domain: str) -> Tensor:
    coefficients, bases = (state.values[arg] for arg in step.args)
    return (coefficients @ bases.flatten(1)).view(-1, *bases.shape[1:])


def _mul(state: Run, step: Op, domain: str) -> Tensor:
    left, right = [state.read(arg, domain) for arg in step.args]
    return left * right.reshape(*right.shape, *(1,) * (left.dim() - right.dim()))


def _add(state: Run, step: Op, domain: str) -> Tensor:
    total = state.read(step.args[0], domain)
    for arg in step.args[1:]:
        total = total + state.read(arg, domain)
    return total


def _dot(state: Run, step: Op, domain: str) -> Tensor:
    left, right = [state.read(arg, domain) for arg in step.args]
    return (left * right).unflatten(1, (step.attr("heads"), -1)).sum(-1)


# --- edges ----------------------------------------------------------------------------------------

def _source(state: Run, arg: str) -> tuple[str, Tensor]:
    """The domain whose rows a reduction gathers, and the rows."""
    name, _, end = arg.partition("@")
    return (DOMAIN_OF[end] if end else EDGE), state.values[name]


def _sum(state: Run, arg: str, target: str, weight: Tensor | None = None) -> Tensor:
    source, rows = _source(state, arg)
    view = state.view
    graph = view.members(target, EDGE) if source == EDGE else view.graph(source, target)
    return state.maps.aggregate(graph, rows, weight)


def _weight(state: Run, step: Op) -> Tensor | None:
    """Weight of each edge in a reduction: 1 (None) or its share of a mean, times the weight that
    came with the call."""
    weight = state.values[step.args[1]] if len(step.args) > 1 else None
    if not step.attr("mean"):
        return weight
    rows = _source(state, step.args[0])[1]
    share = state.view.share(torch.float64 if rows.dtype is torch.float64 else torch.float32)
    return share if weight is None else share * weight


def _reduce(state: Run, step: Op, domain: str) -> Tensor:
    return _sum(state, step.args[0], PAIR_DST, _weight(state, step))


def _mean_sum(state: Run, step: Op, domain: str) -> Tensor:
    return _sum(state, step.args[0], DST, _weight(state, step))


def _collect(state: Run, step: Op, domain: str) -> Tensor:
    return state.maps.aggregate(state.view.members(DST, PAIR_DST), state.values[step.args[0]])


def _per_basis(state: Run, step: Op, domain: str) -> Tensor:
    rows, coefficients, bases = (state.values[arg] for arg in step.args)
    graph = state.view.members(DST, PAIR_DST)
    weights = state.maps.take(coefficients, Gather(state.view, RELATION, PAIR_DST))
    sums = [state.maps.aggregate(graph, rows, w) for w in weights.unbind(1)]
    return torch.cat(sums, 1) @ bases.flatten(0, 1)


def _softmax(state: Run, step: Op, domain: str) -> Tensor:
    target = DST if step.attr("scope") == "dst" else PAIR_DST
    scores, index = state.values[step.args[0]], state.view.index(target, EDGE).long()
    if state.out_dtype is not None:  # as autocast's exp: weights of 16 bits would lose what 1 adds
        scores = scores.to(torch.promote_types(scores.dtype, state.out_dtype))
    wide = index.unsqueeze(-1).expand_as(scores)
    rows = state.view.statistics().rows(target)
    top = scores.new_full((rows, scores.shape[1]),
                          -torch.inf).scatter_reduce(0, wide, scores.detach(), "amax")
    p = (scores - top.index_select(0, index)).exp()
    gather = Gather(state.view, target, EDGE)  # sums in a fixed order, unlike index_add on a GPU
    return p / state.maps.take(state.maps.aggregate(gather.members, p), gather)


def _raise_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x)


def _aggregate(state: Run, step: Op, domain: str) -> Tensor:
    weight, heads, per_head = state.values[step.args[0]], step.attr("heads"), step.get("per_head",
                                                                                       1)
    if per_head == 1:
        return _weighted(state, step, weight)
    # one by one: rows need not be repeated
    weights = weight.view(-1, heads, per_head).permute(2, 0, 1).contiguous()
    return torch.stack([_weighted(state, step, w) for w in weights.unbind(0)], 2)


def _weighted(state: Run, step: Op, weight: Tensor) -> Tensor:
    source, rows = _source(state, step.args[1])
    view = state.view
    graph = view.members(DST, EDGE) if source == EDGE else view.graph(source, DST)
    return state.maps.aggregate(graph, rows.unflatten(1, (step.attr("heads"), -1)), weight)


def _add_product(state: Run, step: Op, domain: str) -> Tensor:
    total, rows, factor = (state.read(arg, domain) for arg in step.args)
    rows = rows.view(*total.shape[:2], *(1,) * (total.dim() - 3), -1)
    return total + factor * rows


def _attend(state: Run, step: Op, domain: str) -> Tensor:
    attrs = dict(step.attrs)
    program, heads, names = attrs["attention"], attrs["heads"], attrs["names"]
    tensors = {name: state.values[arg] for name, arg in zip(names, step.args)}
    for name, t in tensors.items():
        if name in ("x", "keys", "values", "queries"):
            tensors[name] = t.flatten(1).unflatten(1, (heads, -1))
    rows = tensors[names[0]]
    graph = state.view.graph(attrs["source"], attrs["target"])
    call = attention.Call(program, programs.attention(program),  # type: ignore[arg-type]
                          graph, heads, rows.shape[-1], state.out_dtype or rows.dtype)
    return state.attend(call, tensors)


OPERATIONS: dict[str, Callable[[Run, Op, str], Tensor]] = {
    "linear": _linear, "lookup": _lookup, "mix": _mix, "fold": _fold, "combine": _combine,
    "mul": _mul, "add": _add, "dot": _dot,
    "scale": lambda state, step, domain: state.read(step.args[0], domain) * step.attr("by"),
    "leaky_relu": lambda state, step,
    domain: F.leaky_relu(state.read(step.args[0], domain), step.attr("slope")),
    "relu": lambda state, step, domain: state.read(step.args[0], domain).relu(),
    "dropout": lambda state, step, domain: F.dropout(state.values[step.args[0]], step.attr("p")),
    "part": lambda state, step,
    domain: state.read(step.args[0], domain)[:, step.attr("start"):step.attr("stop")],
    "reduce": _reduce, "mean_sum": _mean_sum, "collect": _collect, "per_basis": _per_basis,
    "segment_softmax": _softmax,
    "aggregate": _aggregate, "attend": _attend, "add_product": _add_product,
    "single": lambda state, step, domain: state.read(step.args[0], EDGE),
    "raise_positive": lambda state, step, domain: _raise_positive(state.values[step.args[0]]),
}
