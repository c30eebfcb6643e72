"""Products of several rows in a ``message``, such as of a source's row and a matrix for each edge:
torch computes them, at the nodes where all are at one end, else of rows of the edges."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnnaccel.adapters.pyg.propagate import channels
from gnnaccel.adapters.pyg.propagate.expressed import Once
from gnnaccel.adapters.pyg.propagate.nodes_read import of_read
from gnnaccel.adapters.pyg.propagate.pointwise import Rows, about, made_rows, whole
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Param, Value, applied


def product(function: Callable, args: tuple) -> Rows:
    """torch's ``function`` of rows and parameters, one row of each."""
    if any(isinstance(one, Value) and not isinstance(one, (Rows, Param)) for one in args):
        raise Unseen
    meta = applied(function, args, {})
    rows = [one for one in args if isinstance(one, Rows)]
    if len(set().union(*map(channels.ends, rows))) > 1:
        args = tuple([channels.at_edges(one) if isinstance(one, Rows) else one for one in args])
    operands = tuple([(one.alone().tree, one.meta.shape[1:]) if isinstance(one, Rows) else one
                      for one in args])
    trees = [one[0] for one in operands if type(one) is tuple]
    end, names, roots = about(*trees)
    roots = (*roots, *(root for one in args if isinstance(one, Param) for root in one.roots))
    of_nodes = roots if end in "ji" else ()

    def make(given: Any) -> Tensor:
        given = of_read(given, of_nodes)
        return function(*[whole(one[0], one[1], given) if type(one) is tuple
                          else one.make(given) if isinstance(one, Param) else one
                          for one in operands])

    return made_rows(end, Once(make), meta, names, roots)
