"""Alike layers, one for each relation, as one layer whose weights are theirs: for adapters of any host.

The results of the relations that enter a node are added up (or averaged), so their root weights and biases are added up instead.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.relational.added import ADDED, Added


class Parameters(NamedTuple):
    """One for each relation, or None where the layers have none: weights; biases [out]; root weights [out, in of the
    destination]."""

    weights: list[Tensor]
    biases: list[Tensor] | None
    roots: list[Tensor] | None


def run(attend: Callable[[dict], Tensor], parameters: Parameters, x_src: Sequence[Tensor], x_dst: Sequence[Tensor],
        of_target: tuple[tuple[int, ...], ...], mean: bool, row: torch.dtype) -> tuple[Tensor, ...]:
    """The result of each type of destinations, features being those of each type; ``of_target``: the relations that enter it,
    whose results are averaged if ``mean``."""
    one = parameters.roots is None or len({root.shape for root in parameters.roots}) == 1
    fused = parameters if one else Parameters(parameters.weights, None, None)
    parts = apart(attend(_operands(fused, x_src, x_dst, of_target, mean, row)), [x.shape[0] for x in x_dst])
    if one:
        return parts
    return tuple(_rooted(*of_type, parameters, mean, row) for of_type in zip(parts, x_dst, of_target))


def _operands(parameters: Parameters, x_src: Sequence[Tensor], x_dst: Sequence[Tensor], of_target: tuple[tuple[int, ...], ...],
              mean: bool, row: torch.dtype) -> dict:
    """For the Program and what is added to it."""
    weights, biases, roots = parameters
    weight, x = torch.stack(weights), _together(x_src, row)
    shares = _matrix(of_target, mean, weight.dtype, weight.device)
    if mean and len(weights) > len(of_target):
        weight = weight * shares.sum(0).view(-1, 1, 1)
    found = {"x": x, "weight": weight.to(row)}
    if roots is None and biases is None:
        return found
    same = len(x_src) == len(x_dst) and all(a is b for a, b in zip(x_src, x_dst))
    rows = None if roots is None else x if same else _together(x_dst, row)
    root, bias = _summed(roots, shares, row), _summed(biases, shares, row)
    if len(x_dst) == 1:
        root, bias = (None if t is None else t[0] for t in (root, bias))
    found[ADDED] = Added(tuple(t.shape[0] for t in x_dst), rows, root, bias, True)
    return found


def _rooted(part: Tensor, x: Tensor, members: tuple[int, ...], parameters: Parameters, mean: bool, row: torch.dtype) -> Tensor:
    """One type's result with the root terms and biases of its relations: where types differ in width."""
    _, biases, roots = parameters
    root, bias = (None if ts is None else torch.stack([ts[at] for at in members]).sum(0).to(row) for ts in (roots, biases))
    term = F.linear(x.to(row), root, bias)
    return part + (term * (1 / len(members)) if mean else term)


def _together(x: Sequence[Tensor], row: torch.dtype) -> Tensor:
    return torch.cat([t.to(row) for t in x]) if len(x) > 1 else x[0].to(row)


def _summed(tensors: list[Tensor] | None, shares: Tensor, row: torch.dtype) -> Tensor | None:
    """[types, ..]: those of the relations that enter each type, added up."""
    if tensors is None:
        return None
    every = torch.stack(tensors)
    if shares.shape[0] < shares.shape[1]:
        every = (shares @ every.flatten(1)).view(-1, *every.shape[1:])
    return every.to(row)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _matrix(of_target: tuple[tuple[int, ...], ...], mean: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[types, relations]: what a relation counts in the result of each type."""
    shares = torch.zeros(len(of_target), 1 + max(max(members) for members in of_target), dtype=dtype)
    for row, members in zip(shares, of_target):
        row[list(members)] = 1 / len(members) if mean else 1.0
    return shares.to(device)


def apart(out: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each type as a tensor of its own: no view, as its neighbour in memory may be changed in place."""
    if len(sizes) == 1:
        return (out,)
    return _Apart.apply(out, sizes) if out.requires_grad else tuple(part.data for part in out.split(sizes))


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, sizes):
        return tuple(part.data for part in out.split(sizes))

    @staticmethod
    def backward(ctx, *grads):
        return torch.cat(grads), None
