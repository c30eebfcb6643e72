"""What a message does besides: tensors and others that it keeps on the layer, such as
``self.alpha``, and what it computes once in each call.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnnaccel.adapters.pyg.propagate import channels
from gnnaccel.adapters.pyg.propagate.expressed import Before, Once, notes
from gnnaccel.adapters.pyg.propagate.pointwise import Rows, whole
from gnnaccel.adapters.pyg.propagate.specials import Special
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Value
from gnnaccel.adapters.pyg.propagate.tracing import Trace
from gnnaccel.dispatch.generated.tree import Leaf, leaves, replaced


def kept(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` by their names as `begin` keeps them on the layer; Unseen where it cannot."""
    found: dict[int, tuple[Value, Any]] = {}
    return {name: _kept(value, found) for name, value in values.items()}


def _kept(value: Any, found: dict[int, tuple[Value, Any]]) -> Any:
    """``value`` as it is kept. ``found``: what is kept of stand-ins already, by their ids: what is
    one tensor for the host is one here, which the user may change in place."""
    if isinstance(value, Value):
        if id(value) not in found:
            if _lies_with(value, found):
                raise Unseen
            found[id(value)] = value, _of_rows(value)
        return found[id(value)][1]
    if value is None or type(value) in (int, float, bool, str):
        return value
    if type(value) is tuple and value:
        parts = [_kept(one, found) for one in value]
        return Once(lambda given: tuple([_kept_now(one, given) for one in parts]))
    if type(value) is Special and value.end:
        return Once(functools.partial(_ids, value.end))
    raise Unseen


def _lies_with(value: Value, found: dict[int, tuple[Value, Any]]) -> bool:
    """Whether rows lie in the memory of others that are kept, where ours would not."""
    memory = _memory(value)
    if memory is None:
        return False
    return any([_memory(one) is memory for one, _ in found.values()])


def _memory(value: Value) -> Any:
    """The rows in the memory of ``value``; None for these alone, and where theirs is the
    caller's, as ours is then."""
    rows = value if isinstance(value, Rows) else vars(value).get("rows")
    if not isinstance(rows, Rows) or (
        rows.of_caller and type(rows.tree) is Leaf and rows.tree.end == "e"):
        return None
    return rows.memory


def _of_rows(value: Value) -> Once:
    if not isinstance(value, Rows):
        if not hasattr(value, "rows"):
            raise Unseen
        return value.kept(_of_rows)  # in another dimension than the first
    return _given_back(value, lambda t: t)


def given_back(rows: Rows) -> Once:
    """Computation of rows that the user gets, and may change in place."""
    return _given_back(rows, Tensor.clone)


def _given_back(value: Rows, of_argument: Callable[[Tensor], Tensor]) -> Once:
    """Computation of rows that the user gets; noted, so that what is computed of them is computed
    of these very tensors, as the user's gradients of them show. ``of_argument``: gives the tensor
    that the user gets in place of an argument of the call."""
    noted, alone = notes().given_back, value.alone()
    part = alone.tree = replaced(alone.tree, noted)  # made of others that the user gets
    rows = channels.at_edges(value)
    tree, tail, of = rows.tree, tuple(rows.meta.shape[1:]), leaves(rows.tree)
    copied = value.copied and type(tree) is Leaf
    if not rows.meta.is_floating_point() or value.of_caller and type(tree) is Leaf:
        function = Tensor.clone if copied else of_argument
        return Once(lambda given: function(whole(tree, tail, given)))
    function = Tensor.clone if copied else _no_view
    once = Once(lambda given: function(whole(tree, tail, given)))
    leaf = tree if type(tree) is Leaf and not copied and not isinstance(tree.make, Before) else None
    if leaf is not None and not isinstance(leaf.make, Once):
        leaf.make = Once(leaf.make)  # others have this leaf in theirs
    leaf = leaf or Leaf(
        "e", once, tail, frozenset().union(*[leaf.names for leaf in of]),
        tuple(dict.fromkeys(root for leaf in of for root in leaf.roots)))
    noted[id(value)], noted[id(part)] = (value, leaf), (part, leaf)
    return once


def settle(value: Any) -> None:
    """From now on, what is computed of rows that the message has set on the layer is computed of
    what the user gets."""
    if type(value) is tuple:
        for part in value:
            settle(part)
    if isinstance(value, Rows):
        with contextlib.suppress(Unseen):
            _of_rows(value)
            found = notes().given_back.get(id(value))
            if found is not None:
                value.alone().tree = found[1]


def _no_view(t: Tensor) -> Tensor:
    """``t``, or a copy: torch refuses to change some views."""
    return t.clone() if t._is_view() else t


def made_of(rows: Rows) -> Rows:
    """``rows``, made of those that the user gets where they are these, or made of them."""
    given = notes().given_back
    if id(rows) in given:
        return Rows(given[id(rows)][1], rows.meta)
    if not given or type(rows) is not Rows:
        return rows
    tree = replaced(rows.tree, given)
    return rows if tree is rows.tree else Rows(tree, rows.meta)


def _kept_now(value: Any, given: Any) -> Any:
    return value(given) if type(value) is Once else value


def _ids(end: str, given: Any) -> Any:
    """The caller's ids of the nodes at one end of the edges."""
    graph = given.graph
    return graph.edge_index[int((end == "i") is not graph.flipped)]


def begin(layer: Any, trace: Trace, given: Any) -> None:
    """Do what precedes the messages of a call: compute all effects, and set what the message sets
    on the layer, such as ``self.alpha``."""
    for effect in trace.effects:
        effect(given)
    for name, value in trace.kept.items():
        setattr(layer, name, _kept_now(value, given))
