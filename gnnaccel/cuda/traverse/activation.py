"""Activations of rows while a product reads them (``src/segment_activation.cuh``)."""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

from gnnaccel.cuda.messages.expression import CHANNEL_SUM, OPERATIONS, Expression
from gnnaccel.cuda.messages.message_writer import Writer
from gnnaccel.cuda.runtime import sources

__all__ = ["Activation", "family"]


class Activation(NamedTuple):
    """A pointwise function of one input. ``expression``: it has that input alone, with a number for
    each channel; ``numbers``: the values of its numbers."""

    expression: Expression
    numbers: tuple[float, ...]

    @property
    def serves(self) -> bool:
        """Whether kernels can have it."""
        of = self.expression
        return (len(of.inputs) == 1 and of.score is None
                and all(step.op != CHANNEL_SUM for step in of.steps)
                and all(map(math.isfinite, self.numbers)))


@functools.lru_cache(maxsize=256)
def family(name: str, of: Activation | None) -> str:
    """The kernels of the family ``name`` for an activation, written for it; without one, that
    family."""
    if of is None:
        return name
    return sources.write("".join(f"#define {key} {body}\n" for key, body in _bodies(of).items())
                         + f'#include "{name}.cu"\n', name)


def _bodies(of: Activation) -> dict[str, str]:
    """The bodies of the functions of ``segment_activation.cuh``."""
    names, first = of.expression.names, of.expression.first
    lines = [f"const float {name} = {float(number)!r}f;"
             for name, number in zip(names[1:first], of.numbers)]
    for name, (op, args) in zip(names[first:], of.expression.steps):
        kind = OPERATIONS[op]
        lines.append(f"const {kind.type} {name} = {kind.value.format(*(names[a] for a in args))};")
    slope = [line.strip() for line in Writer(of.expression, "").adjoints([0], ["g"])]
    value = " ".join(lines)
    return {"ACT_VALUE": f"{value} return {names[of.expression.out]};",
            "ACT_SLOPE": f"{value} {' '.join(slope)} return of_{names[0]};"}
