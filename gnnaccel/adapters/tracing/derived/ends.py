"""Which list of edges a traced ``forward`` gathers and sums by: rows or columns of one tensor, or
two tensors that it has made apart."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Ends:
    """The ends of the edges, by their keys (`values.EdgeValue`), in the order of the list. An end
    that nothing was gathered by yet may turn out to be another."""

    def __init__(self) -> None:
        self.keys: list[tuple | None] = [None, None]
        self._used = [False, False]

    def place(self, key: tuple, values: list[Any]) -> int | None:
        """The place of an end in the list; None where it is of another list. ``values``: results
        in the call that is traced, by which ends of several lengths are told."""
        if key in self.keys:
            at = self.keys.index(key)
        else:
            of_list = key[0] != "one"
            at = key[2] if of_list else int(self._used[0])
            first = self.keys[1 - at] if self._used[1 - at] else None
            if self._used[at] or first is not None and (
                len(_end(values, first)) != len(_end(values, key))):
                return None
            self.keys[at] = key
            if of_list and not self._used[1 - at]:
                self.keys[1 - at] = (*key[:2], 1 - key[2])
        self._used[at] = True
        return at

    def listed(self, results: list[Any], stacked: Any, turned: Any) -> Tensor | None:
        """The list [2, E] of a call; None where its ends are no such. ``stacked(first, second)``
        and ``turned(edges)`` give it of two tensors, and of one with a row for each edge."""
        first, second = self.keys
        first = first or second
        second = second or first
        if first is None or second is None:
            return None
        if first[:2] == second[:2] and first != second:
            edges = results[first[1]]
            if edges.dim() != 2 or edges.shape[first[0] == "columns"] != 2:
                return None
            return edges if first[0] == "rows" else turned(edges)
        ends = [_end(results, key) for key in (first, second)]
        if any(one.dim() != 1 or one.shape != ends[0].shape or one.dtype is not torch.int64
               for one in ends):
            return None
        return stacked(*ends)


def _end(results: list[Any], key: tuple) -> Tensor:
    if key[0] == "one":
        return results[key[1]]
    edges = results[key[1]]
    return edges[key[2]] if key[0] == "rows" else edges[:, key[2]]
