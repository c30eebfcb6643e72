"""Terms that a layer adds to its Program's result: a root term by the matrix of the destination's
type, and a bias."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.relational import torch_maps
from gnnaccel.dispatch.relational.view import RelationView

ADDED = "+"  #: key of an `Added` among a Program's operands; no input has such a name


class Added(NamedTuple):
    """Terms: ``rows`` [num_dst, K] times the matrix of each row's type, plus the type's bias; all
    in the dtype of the result. A bias alone may be added to rows of any shape with its number of
    elements.

    ``sizes``: destinations of each type, type after type; ``matrix`` [types, K, N], or [types, N,
    K] when ``transposed``; ``bias`` [types, N]; both without the first dimension where there is one
    type. ``matrix`` None (and ``rows``): only the bias.
    """

    sizes: tuple[int, ...]
    rows: Tensor | None
    matrix: Tensor | None
    bias: Tensor | None
    transposed: bool = False


def fits(dtype: torch.dtype, width: int, rows: Tensor | None, matrix: Tensor | None,
         bias: Tensor | None) -> bool:
    """Whether a matrix for ``rows`` and a bias can be `Added` to a result of ``width`` channels:
    all are of its dtype, so that adding them to it rounds as the host does, or less, and none is
    broadcast."""
    if matrix is not None:
        assert rows is not None
        if (matrix.dtype is not dtype or rows.dtype is not dtype or rows.dim() != 2
            or matrix.shape != (rows.shape[1], width)):
            return False
    return bias is None or (bias.dtype is dtype and bias.shape == (width,))


def of_one_type(rows: Tensor | None, matrix: Tensor | None, bias: Tensor | None,
                num_dst: int) -> dict[str, Any]:
    """The operand for nodes of one type, to go with others; none where there is nothing to add."""
    if matrix is None and bias is None:
        return {}
    return {ADDED: Added((num_dst,), None if matrix is None else rows, matrix, bias)}


def add(out: Tensor, added: Added, view: RelationView, take: Callable = torch_maps.take) -> Tensor:
    """``out`` plus the terms of ``added``, on torch operations.

    ``take`` reads the biases; its gradient adds up the rows of each type.
    """
    sizes, rows, matrix, bias, transposed = added
    if len(sizes) == 1:
        if matrix is None:
            return out + bias.view(out.shape[1:])  # type: ignore[union-attr]
        matrix = matrix.t() if transposed else matrix
        return (rows @ matrix if bias is None else  # type: ignore[operator]
                torch.addmm(bias, rows, matrix)).add_(out)  # type: ignore[arg-type]
    if matrix is None:
        return out + take(bias, view.types_of_blocks(sizes))
    return out + torch_maps.multiply(view.blocks(sizes),
                                     rows.unsqueeze(1),  # type: ignore[union-attr]
                                     matrix.unsqueeze(1), transposed, bias=bias).squeeze(1)
