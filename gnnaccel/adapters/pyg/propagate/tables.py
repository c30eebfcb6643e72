"""Tables with a row for each node, of which a ``message`` picks rows by the ids of an edge's ends:
these are rows at the ends of the edges."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import pointwise
from gnnaccel.adapters.pyg.propagate.expressed import Once
from gnnaccel.adapters.pyg.propagate.nodes_read import node_rows
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.specials import Special
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Param


def at_end(operation: str, table: Any, *place: Any, **named: Any) -> pointwise.Rows:
    """The rows that an index names, by the ``operation`` "getitem" or "index_select"."""
    *dim, index = *place, *named.values()
    if operation not in ("getitem", "index_select") or not isinstance(table, Param):
        raise Unseen
    if dim not in ([], [0]) or list(named) not in ([], ["index"], ["dim", "index"]):
        raise Unseen
    if type(index) is not Special or not index.end or index.functions is None:
        raise Unseen
    functions, meta = index.functions, table.meta
    if not meta.dim() or meta.dtype == torch.bool:
        raise Unseen
    # calls with more nodes at this end are native, as the host may refuse them
    (functions.counts if index.end == "i" else functions.sending).append(meta.shape[0])
    which = "v" if index.end == "i" else "u"

    def rows(given: Any) -> Tensor:
        values, count = table.make(given), given.graph.rows(which)
        return values if values.shape[0] == count else values[:count]

    result = pointwise.made_rows(index.end, node_rows(Once(rows), index.end),
                                 meta.new_empty(ROWS, *meta.shape[1:]),
                                 frozenset(table.roots), table.roots)
    return result if torch.is_grad_enabled() else pointwise.detached(result)
