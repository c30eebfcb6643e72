"""What the ``forward`` of a plain module does to all nodes once in a call: norms that keep
statistics of them, and random numbers.

Effects are done in the order of the code. Those before the last one that the messages are made of
are done before these, as effects at the edges are; all others after the sums."""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.tracing.expressed import Effect
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue, Steps
from gnnaccel.adapters.tracing.nodes.reduced import before
from gnnaccel.adapters.tracing.rows.standins import Unseen


class NodeEffect(Effect):
    """The step of such an effect, ``value``."""

    def __init__(self, value: NodeValue):
        super().__init__(_unsettled)
        self.value = value.as_now()


def _unsettled(given: Any) -> Any:
    raise Unseen


def settled(steps: Steps, effects: list[Effect], reached: list[NodeValue]) -> list[NodeValue]:
    """The steps that are done after the sums, which leave the list of ``effects``.
    ``reached``: the values of which messages are made."""
    at_edges = steps.places_of(reached)
    first = 1 + max((k for k, one in enumerate(effects)
                     if type(one) is not NodeEffect or one.value.at in at_edges), default=-1)
    early = [one for one in effects[:first] if type(one) is NodeEffect]
    for one in early:
        one.make = before(steps, one.value)
    steps.early = {one.value.at for one in early}
    late = [one.value for one in effects[first:] if type(one) is NodeEffect]
    del effects[first:]
    for one in early:
        del one.value  # it leads to the steps, which lead to themselves
    return late
