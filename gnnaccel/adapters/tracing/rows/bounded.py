"""Rows whose numbers are held, in each call, to be far from infinite, so that what is done to them
leaves no trace where it is multiplied by 0."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Make
from gnnaccel.adapters.tracing.expressed import KIND, AtEdges
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer import conditions
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows.pointwise import TRUTH, WHOLE, Rows
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.tree import Call, Leaf, Tree, leaves

#: operations that give finite numbers of finite ones
TAME = frozenset(("add", "sub", "rsub", "mul", "neg", "relu", "leaky_relu", "sigmoid", "tanh",
                  "silu", "gelu", "elu", "selu", "celu", "softplus", "sin", "cos", "abs", "square",
                  "clamp", "maximum", "minimum", "prelu"))
#: likewise, of trees
_FINITE = frozenset((*TAME - {"rsub", "clamp"}, "clamp_min", "clamp_max", "float", "where", "ne",
                     "eq", "gt", "lt", "ge", "le", "and", "or", "not"))
#: numbers are smaller than this: products of three are finite
_MOST = 1e12


class _Bounded:
    """Whether no number that one of ``makes`` gives is infinite, none, or so large that a product
    with a few others would be."""

    def __init__(self) -> None:
        self.makes: list[Make] = []

    def __call__(self, given: Any) -> Tensor:
        tensors = [make(given) for make in self.makes]
        found = {id(one): one for one in tensors if one.numel() and one.is_floating_point()}
        norms = [torch.linalg.vector_norm(one, math.inf) for one in found.values()]
        return (torch.stack(norms or [tensors[0].new_zeros(())]) < _MOST).all()


def hold(*makes: Make) -> None:
    """Note that the numbers of these have to be bounded."""
    for one in notes().conditions or ():
        if type(one.make) is _Bounded:
            break
    else:
        if not makes:
            return
        conditions.noted(_Bounded(), True)
        one = notes().conditions[-1]  # type: ignore[index]  # there is one now
    one.make.makes += makes


def hold_rows(rows: Rows) -> None:
    """Note that the rows have to be bounded; Unseen where they may be infinite all the same."""
    if isinstance(rows, other("rows.beside").Beside):
        for part in rows.parts:
            hold_rows(part)
    else:
        _hold_tree(rows.alone().tree)


def _hold_tree(tree: Tree) -> None:
    if not _is_finite(tree):
        raise Unseen
    for leaf in leaves(tree):
        if "bounded" in leaf.pieces or WHOLE in leaf.names:
            continue
        leaf.pieces["bounded"] = True  # once for all pieces of them
        if type(leaf.base.make) is AtEdges:
            _hold_tree(leaf.base.make.tree)  # no kernel has written them yet
        else:
            hold(leaf.base.make)


def _is_finite(tree: Tree) -> bool:
    """Whether finite rows make finite numbers; of those that are written for each edge before
    `_hold_tree` looks at what they are made of."""
    if isinstance(tree, Leaf):
        return type(tree.base.make) is AtEdges or all(
            type(one) is str or one is WHOLE or one is TRUTH or one is KIND for one in tree.names)
    return not isinstance(tree, Call) or tree.op in _FINITE and all(map(_is_finite, tree.args))
