"""Results per node of a traced function, by Python code that is written once: a line for each of
its steps, in place of a look at each argument of each step in every call."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Make, Param
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.layer.traced_modules import Held
from gnnaccel.adapters.tracing.nodes.node_values import Given, NodeCount, NodeValue, Steps
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.adapters.tracing.rows.untold import Sequence

_LITERAL = (int, bool, str, type(None))


def combined(steps: Steps, out: Any, places: Iterable[int],
             late: Iterable[NodeValue] = ()) -> Callable[[list, Any], Any]:
    """``run(results, kwargs)``: ``out`` with tensors in place of its stand-ins. ``results``: of the
    reductions at ``places``, in that order; ``kwargs``: the arguments of the call; ``late``: the
    steps that are done whether or not something is made of them, in this order."""
    writer = _Writer(steps, {place: f"results[{at}]" for at, place in enumerate(places)})
    if steps.goes_on:  # steps that were done for the edges are not done again
        writer.shared = set(range(len(steps.done))) - steps.reduced_into()
    for one in late:
        writer.text(one)
    return writer.function("results, kwargs", writer.text(out))


def at_edges(steps: Steps, value: NodeValue, before: Mapping[int, Once]) -> Make:
    """Gives ``value``, which goes on at the edges, for a call's arguments: each step is done once
    in a call. ``before``: the reductions that it is made of, by their places."""
    writer = _Writer(steps, {})
    writer.reductions = {at: f"{writer.name(one)}(kwargs)" for at, one in before.items()}
    writer.shared = set(range(len(steps.done)))
    return writer.function("kwargs", writer.text(value))


def call(function: Callable, args: tuple, kwargs: dict) -> Make:
    """Gives the result of ``function`` for a call's arguments, of stand-ins for such."""
    writer = _Writer(None, {})
    return writer.function("kwargs", writer.call(function, args, kwargs))


def _reduction(result: Tensor) -> Tensor:
    """The result of a reduction, no view: users may change it in place."""
    return result.clone() if result._is_view() else result


class _Writer:
    """Text of the steps. ``lines``: those written so far; ``names``: of the values in them;
    ``reductions``: texts of their results, by their places; ``shared``: the steps whose results
    are kept in a call, for others that are written apart."""

    def __init__(self, steps: Steps | None, reductions: dict[int, str]):
        self.steps, self.reductions, self.shared = steps, reductions, set[int]()
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"__name__": __name__, "reduction": _reduction}
        self._written: set[int] = set()

    def function(self, arguments: str, result: str) -> Any:
        """The function of these arguments that does all steps, and returns ``result``."""
        lines = [f"def run({arguments}):", *self.lines, f"return {result}"]
        if self.shared:
            self.names["on_edges"] = self.steps.on_edges  # type: ignore[union-attr]  # it is there
            lines.insert(1, "found = on_edges(kwargs)")
        # our own text alone: all that is the user's stands in it by a name
        exec(compile("\n    ".join(lines), __file__, "exec"), self.names)
        return self.names.pop("run")  # which holds them: no circle

    def text(self, value: Any) -> str:
        """An expression for ``value``."""
        kind = type(value)
        if kind is NodeValue:
            return self._step(value.at)
        if kind in (tuple, list, Sequence):
            inner = "".join([f"{self.text(one)}, " for one in value])
            return f"[{inner}]" if kind is list else f"({inner})"
        if kind is dict:
            return "{" + "".join([f"{self.name(k)}: {self.text(v)}, "
                                  for k, v in value.items()]) + "}"
        if kind is NodeCount:
            of = f"kwargs[{value.of!r}]" if type(value.of) is str else self.text(value.of)
            return f"{of}.shape[0]"
        if kind is Special:
            if value.counts:
                return "kwargs.graph.num_dst" if value.counts == "i" else "kwargs.graph.num_src"
            return f"kwargs.graph.index({'v' if value.end == 'i' else 'u'!r})"
        if isinstance(value, Once):
            return f"{self.name(value)}(kwargs)"
        if isinstance(value, (Given, Param)):
            make = value.make
            return self.name(make.value) if type(make) is Held else f"{self.name(make)}(kwargs)"
        return repr(value) if kind in _LITERAL else self.name(value)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> str:
        """An expression for the result of a function."""
        named = [f"**{{{key!r}: {self.text(one)}}}" for key, one in kwargs.items()]
        return f"{self.name(function)}({', '.join([*map(self.text, args), *named])})"

    def name(self, value: Any) -> str:
        """A name that stands for ``value``."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _step(self, at: int) -> str:
        """The name of a step's result, with the lines that make it before."""
        name = f"v{at}"
        if at not in self._written:
            self._written.add(at)
            if at in self.steps.early:  # type: ignore[union-attr]  # whose result is asked for
                self.shared.add(at)  # it is there
                self.lines.append(f"{name} = found[{at}]")
                return name
            step = self.steps.done[at]  # type: ignore[union-attr]
            made = (f"reduction({self.reductions[step]})" if type(step) is int
                    else self.call(*step))
            self.lines += ([f"if {at} in found: {name} = found[{at}]",
                            f"else: {name} = found[{at}] = {made}"] if at in self.shared
                           else [f"{name} = {made}"])
        return name
