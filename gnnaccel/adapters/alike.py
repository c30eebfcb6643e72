"""Alike layers, one for each relation, as one layer whose weights are theirs: for adapters of any
host.

The results of the relations that enter a node are added up (or averaged), so their root weights and
biases are added up instead.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters import reachability
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.added import ADDED, Added
from gnnaccel.dispatch.relational.prepare import RootTerm


class Parameters(NamedTuple):
    """Parameters of the relations, in their order, or None where the layers have none: weights;
    biases [out]; root weights [out, in of the destination]."""

    weights: list[Tensor]
    biases: list[Tensor] | None
    roots: list[Tensor] | None


def run(attend: Callable[[dict], Tensor], parameters: Parameters, x_src: Sequence[Tensor],
        x_dst: Sequence[Tensor], of_source: tuple[tuple[int, ...], ...],
        of_target: tuple[tuple[int, ...], ...], mean: bool, row: torch.dtype) -> tuple[Tensor, ...]:
    """The result of each type of destinations, features being those of each type; ``of_source``,
    ``of_target``: the relations that leave and enter each, the results of the latter averaged if
    ``mean``."""
    one = parameters.roots is None or len({root.shape for root in parameters.roots}) == 1
    fused = parameters if one else Parameters(parameters.weights, None, None)
    results = reachability.results(len(x_dst),
                                   _made_of(parameters, x_src, x_dst, of_source, of_target))
    operands = _operands(fused, x_src, x_dst, of_source, of_target, mean, row, results)
    parts = reachability.apart(results, attend(operands), [x.shape[0] for x in x_dst])
    if one:
        return parts
    return tuple(_rooted(*of_type, parameters, mean, row)
                 for of_type in zip(parts, x_dst, of_target))


def excluded(conv: Any) -> Reason | None:
    """Why the rules keep one of the layers native; None where they do not."""
    config = current()  # none where a call is only explained
    verdict = rules.INSIDE if config is None else rules.verdict(conv, config)
    # not listed is not excluded: the layer around it is in
    if verdict.inside or verdict.reason.code == "GA102":  # type: ignore[union-attr]
        return None
    return verdict.reason


def root_term(parameters: Parameters, types: int) -> RootTerm | None:
    """The term that `run` adds to a Program's result, for destinations of so many types; None:
    nothing, or not by the Program's kernels."""
    _, biases, roots = parameters
    if roots is None:
        return None if biases is None else RootTerm(0, biases[0].shape[0], types, True, True)
    if len({t.shape for t in roots}) > 1:
        return None
    return RootTerm(roots[0].shape[1], roots[0].shape[0], types, biases is not None, True)


def shapes_reason(parameters: Parameters, transposed: bool) -> Reason | None:
    """Why the parameters are not weights [in, out] of one shape, [out, in] where ``transposed``,
    with biases [out] and root weights [out, any]: a host broadcasts others, or raises."""
    weights, biases, roots = parameters
    if len({t.shape for t in weights}) > 1 or weights[0].dim() != 2:
        return reason("GA208", "the weights are of several shapes, or no matrices")
    out = weights[0].shape[0 if transposed else 1]
    if biases is not None and {t.shape for t in biases} != {(out,)}:
        return reason("GA206", f"some biases are not of the {out} channels of the weights")
    if roots is not None and {(t.dim(), t.shape[:1]) for t in roots} != {(2, (out,))}:
        return reason("GA206", f"some root weights are not of the {out} channels of the weights")
    return None


def _made_of(parameters: Parameters, x_src: Sequence[Tensor], x_dst: Sequence[Tensor],
             of_source: tuple[tuple[int, ...], ...],
             of_target: tuple[tuple[int, ...], ...]) -> Iterator[Iterable[Tensor]]:
    """The tensors that the result of each type of destinations is made of."""
    kinds = [ts for ts in parameters if ts is not None]
    sources = {at: x for x, members in zip(x_src, of_source) for at in members}
    for x, members in zip(x_dst, of_target):
        own = () if parameters.roots is None else (x,)
        yield chain((ts[at] for ts in kinds for at in members), (sources[at] for at in members),
                    own)


def _operands(parameters: Parameters, x_src: Sequence[Tensor], x_dst: Sequence[Tensor],
              of_source: tuple[tuple[int, ...], ...], of_target: tuple[tuple[int, ...], ...],
              mean: bool, row: torch.dtype, results: reachability.Results | None) -> dict:
    """Operands of the Program, and of the term that is added to its result."""
    weights, biases, roots = parameters
    same = len(x_src) == len(x_dst) and all(a is b for a, b in zip(x_src, x_dst))
    readers = reachability.readers(of_source, of_target, same and roots is not None)
    weight = reachability.watch(results, torch.stack(weights), readers.relations)
    root, bias = [None if ts is None
                  else reachability.watch(results, torch.stack(ts), readers.relations)
                  for ts in (roots, biases)]
    x = reachability.watch(results, _together(x_src, row), readers.sources)
    shares = _shares(of_target, mean, weight.dtype, weight.device)
    # some type is entered by several
    if mean and shares is not None and len(weights) > len(of_target):
        weight = weight * shares.sum(0).view(-1, 1, 1)
    operands: dict[str, Any] = {"x": x, "weight": weight.to(row)}
    if roots is None and biases is None:
        return operands
    rows = (None if roots is None else x
            if same else reachability.watch(results, _together(x_dst, row), readers.targets))
    root, bias = _summed(root, shares, row), _summed(bias, shares, row)
    if len(x_dst) == 1:
        root, bias = [None if t is None else t[0] for t in (root, bias)]
    operands[ADDED] = Added(tuple([t.shape[0] for t in x_dst]), rows, root, bias, True)
    return operands


def _rooted(part: Tensor, x: Tensor, members: tuple[int, ...], parameters: Parameters, mean: bool,
            row: torch.dtype) -> Tensor:
    """The result of one type with the root terms and biases of its relations: where types differ in
    width."""
    _, biases, roots = parameters
    assert roots is not None  # else the results of all types are made at once
    root = total([roots[at] for at in members]).to(row)
    bias = None if biases is None else total([biases[at] for at in members]).to(row)
    term = F.linear(x.to(row), root, bias)
    return part + (term * (1 / len(members)) if mean else term)


def total(parameters: Sequence[Tensor]) -> Tensor:
    """The sum of parameters of one shape, each of which gets a gradient in memory of its own: code
    that scales gradients in place, from ``torch.autograd.grad`` or in hooks, would scale a shared
    one once for each parameter. A sum passes its gradient on as it is, a difference makes a new one
    for the tensor that it subtracts."""
    return functools.reduce(_plus, parameters)


_plus = functools.partial(torch.sub, alpha=-1)


def _together(x: Sequence[Tensor], row: torch.dtype) -> Tensor:
    return torch.cat([t.to(row) for t in x]) if len(x) > 1 else x[0].to(row)


def _summed(every: Tensor | None, shares: Tensor | None, row: torch.dtype) -> Tensor | None:
    """[types, ..]: the sum (or mean) over the relations that enter each type.

    ``shares`` None: each type is entered by one relation, so nothing has to be added up.
    """
    if every is None:
        return None
    if shares is not None:
        every = (shares @ every.flatten(1)).view(-1, *every.shape[1:])
    return every.to(row)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _shares(of_target: tuple[tuple[int, ...], ...], mean: bool, dtype: torch.dtype,
            device: torch.device) -> Tensor | None:
    """[types, relations]: the weight of each relation in the result of each type.

    None where each type is entered only by the relation with its number.
    """
    if of_target == tuple((at,) for at in range(len(of_target))):
        return None
    shares = torch.zeros(len(of_target), 1 + max(max(members) for members in of_target),
                         dtype=dtype, device="cpu")
    for row, members in zip(shares, of_target):
        row[list(members)] = 1 / len(members) if mean else 1.0
    return shares.to(device)
