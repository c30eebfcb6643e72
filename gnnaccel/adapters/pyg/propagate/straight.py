"""Results per node of a traced function, by Python code that is written once: a line for each of
its steps, in place of a look at each argument of each step in every call."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gnnaccel.adapters.pyg.propagate.expressed import Once
from gnnaccel.adapters.pyg.propagate.node_values import (Given, NodeCount, NodeValue, Steps,
                                                         reduction)
from gnnaccel.adapters.pyg.propagate.specials import Special
from gnnaccel.adapters.pyg.propagate.traced import Param
from gnnaccel.adapters.pyg.propagate.traced_modules import Held
from gnnaccel.adapters.pyg.propagate.untold import Sequence as Shape

_LITERAL = (int, bool, str, type(None))


def combined(steps: Steps, out: Any, places: Sequence[int]) -> Callable[[list, Any], Any]:
    """``run(results, kwargs)``: ``out`` with tensors in place of its stand-ins. ``results``: of the
    reductions at ``places``, in that order; ``kwargs``: the arguments of the call."""
    if steps.goes_on:  # steps that were done for the edges are not done again
        return lambda results, kwargs: steps.results(out, dict(zip(places, results)), kwargs)
    writer = _Writer(steps, places)
    result = writer.text(out)
    text = "\n    ".join(["def run(results, kwargs):", *writer.lines, f"return {result}"])
    # our own text alone: all that is the user's stands in it by a name
    exec(compile(text, __file__, "exec"), writer.names)
    return writer.names["run"]


class _Writer:
    """Text of the steps. ``lines``: those written so far; ``names``: of the values in them."""

    def __init__(self, steps: Steps, places: Sequence[int]):
        self.steps, self.places = steps, {place: at for at, place in enumerate(places)}
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"__name__": __name__, "reduction": reduction}
        self._written: set[int] = set()

    def text(self, value: Any) -> str:
        """An expression for ``value``."""
        kind = type(value)
        if kind is NodeValue:
            return self._step(value.at)
        if kind in (tuple, list, Shape):
            inner = "".join([f"{self.text(one)}, " for one in value])
            return f"[{inner}]" if kind is list else f"({inner})"
        if kind is dict:
            return "{" + "".join([f"{self._name(k)}: {self.text(v)}, "
                                  for k, v in value.items()]) + "}"
        if kind is NodeCount:
            of = f"kwargs[{value.of!r}]" if type(value.of) is str else self.text(value.of)
            return f"{of}.shape[0]"
        if kind is Special:
            if value.counts:
                return "kwargs.graph.num_dst" if value.counts == "i" else "kwargs.graph.num_src"
            return f"kwargs.graph.index({'v' if value.end == 'i' else 'u'!r})"
        if isinstance(value, Once):
            return f"{self._name(value)}(kwargs)"
        if isinstance(value, (Given, Param)):
            make = value.make
            return (self._name(make.value) if type(make) is Held
                    else f"{self._name(make)}(kwargs)")
        return repr(value) if kind in _LITERAL else self._name(value)

    def _name(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _step(self, at: int) -> str:
        """The name of a step's result, with the line that makes it before."""
        name = f"v{at}"
        if at not in self._written:
            self._written.add(at)
            step = self.steps.done[at]
            if type(step) is int:
                made = f"reduction(results[{self.places[step]}])"
            else:
                function, args, kwargs = step
                named = [f"**{{{k!r}: {self.text(v)}}}" for k, v in kwargs.items()]
                made = f"{self._name(function)}({', '.join([*map(self.text, args), *named])})"
            self.lines.append(f"{name} = {made}")
        return name
