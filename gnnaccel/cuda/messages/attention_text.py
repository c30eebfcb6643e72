"""The text of the kernels for messages that are weighted by a softmax over neighbours: an
`Expression` with a ``score``.

``forward`` computes scores, softmax and weighted sum in one pass over the edges by destination.
``gradients`` by destination computes them again, with the gradient of each edge's score:

    of_score = weight * sum over the head's channels of grad * (message - out)

where message is the weighted value, and out the result. It writes, for each edge, the gradients of
the values that `handed` names, for ``gradients`` by source, so that no score is computed a third
time.

The difference is taken before the sum. Where a row has one edge that counts, message and out are
the same bits, and of_score is 0.
"""
from __future__ import annotations

import functools
import string

from gnnaccel.cuda.messages.expression import OPERATIONS, Expression
from gnnaccel.cuda.messages.message_text import wanted
from gnnaccel.cuda.messages.message_writer import CLEAR, KERNEL, MERGE, PLACES, START, TYPES, Writer

_RESULTS = ("float* __restrict__ out, float* __restrict__ kept,\n        "
            "float* __restrict__ bases, float* __restrict__ shares")
_PARTS = ("float* __restrict__ part, float* __restrict__ part_tops,\n        "
          "float* __restrict__ part_sums")


@functools.lru_cache(maxsize=512)
def forward(expression: Expression) -> str:
    """The kernels ``forward`` and ``merge``: sums of weighted messages."""
    w = _Writer(expression, "ip")
    body = [*w.totals("je"), *w.scores("je"), "if (on) {", "    Heads before, weight;",
            "    weigh(score, found, before, weight);", "    EACH_CHANNEL {",
            *w.values("je", expression.out),
            f"    found.row[k][c] = fmaf(weight[k / KV], {w.names[expression.out]},",
            "                           found.row[k][c] * before[k / KV]);", "    }", "}"]
    constant = _PARTS.replace("float*", "const float*")
    return w.head() + f"""\
{KERNEL}forward(GRAPH,
        {w.parameters()}{_RESULTS},
        {_PARTS}) {{
{START}{w.own()}    Attended found;
    clear_attended(found);
{w.walk(w.way, "je", body)}    const Results to = {{out, kept, bases, shares}};
    store_total(at, it, found, to, part, part_tops, part_sums);
}}

{KERNEL}merge(MERGE, {constant}, {_RESULTS}) {{
{MERGE}    Attended found;
    join_chunks(at, row, part, part_tops, part_sums, found);
    const Results to = {{out, kept, bases, shares}};
    if (at.slot == 0) finish(at, row.x, true, found, to);
}}
"""


def handed(expression: Expression, needs: tuple[bool, ...]) -> list[int]:
    """Values whose gradient through the score, for each edge and head, the pass by destination
    writes for the pass by source: sums over channels, and inputs there."""
    w, inputs = _Writer(expression, ""), wanted(expression, needs, False)
    active = w.active(inputs)
    return [k for k in sorted(w.score) if k in inputs or (k in w.sums and k in active)]


@functools.lru_cache(maxsize=512)
def backward(expression: Expression, needs: tuple[bool, ...], by_row: bool) -> str:
    """The kernels ``gradients`` and ``merge``, by destination or by source; arguments as of
    `message_text.backward`."""
    return (_by_destination if by_row else _by_source)(expression, needs)


def _by_destination(expression: Expression, needs: tuple[bool, ...]) -> str:
    w, inputs = _Writer(expression, "ip"), wanted(expression, needs, True)
    scored = handed(expression, needs)
    stored, summed = w.apart(inputs)
    for_source = bool(wanted(expression, needs, False))
    body = [*w.totals("je"), *w.scores("je"), *_OF_SCORE_BEGIN, "EACH_CHANNEL {",
            *w.values("je", expression.out),
            "    of_score[k / KV] += at.owns(k / KV, k % KV)",
            f"        ? grad_own[k][c] * ({w.names[expression.out]} - kept_own[k][c]) : 0.f;", "}",
            "sum_channels(of_score);", "EACH_HEAD of_score[k / KV] *= weight[k / KV];"]
    body += [f"{TYPES[w.modes[k]]} to_{w.names[k]}; {CLEAR[w.modes[k]].format('to_' + w.names[k])}"
             for k in stored]
    grad = "grad_own[k][c] * weight[k / KV]"
    body += [*w.through_score("je", inputs, scored, stored),
             *w.adjoint_totals(inputs, [grad], "je"), "EACH_CHANNEL {", *w.values("je"),
             *w.adjoints(inputs, [grad]),
             *(w.added(k, k in stored, True) for k in inputs), "}"]
    body += [f"sum_channels(to_{w.names[k]});" for k in stored]
    handed_on = ([("weights", "weight"), *((f"to_{w.names[k]}_rows", f"of_{w.names[k]}_total")
                                           for k in scored)] if for_source else [])
    writes = [*(w.store(k, "(u64)e.edge") for k in stored),
              *(f"store(at, {name}, (u64)e.edge, {value});" for name, value in handed_on)]
    if writes:
        body += ["if (on) {", *(f"    {line}" for line in writes), "}"]
    results = ("grad", "kept", "bases", "shares")
    arguments = [*(f"const float* __restrict__ {name}" for name in results),
                 *w.gradient_arguments(inputs, summed),
                 *(f"float* __restrict__ {name}" for name, _ in handed_on)]
    own = w.own([(name, "row" if name in ("grad", "kept") else "head") for name in results])
    edge = (("OFF_T edge;", "e.edge = (OFF_T)at_edge;"),)
    walk = w.walk("walk_together", "je", body, (), edge if writes else ())
    return _kernels(w, summed, arguments, own, walk)


_OF_SCORE_BEGIN = ("Heads weight, of_score; clear_heads(of_score);",
                   "EACH_HEAD weight[k / KV] = exp_above(score[k / KV], bases_own[k / KV])",
                   "    * shares_own[k / KV];")


def _by_source(expression: Expression, needs: tuple[bool, ...]) -> str:
    w, inputs = _Writer(expression, "jp"), wanted(expression, needs, False)
    scored = handed(expression, needs)
    w.skip_unread(inputs)
    grad = "e.grad[k][c] * e.weights[k / KV]"
    body = [f"const Heads& of_{w.names[k]}_total = e.to_{w.names[k]}_rows;" for k in scored]
    body += [*w.totals("ie"), *w.adjoint_totals(inputs, [grad], "ie"), "EACH_CHANNEL {",
             *w.values("ie"), *w.adjoints(inputs, [grad]),
             *(w.added(k, False, True) for k in inputs), "}"]
    body += [f"EACH_HEAD {w.led(k, f'{w.names[k]}_sum', f'of_{w.names[k]}_total[k / KV]')}"
             for k in scored if k < w.first]
    at_edges = ["weights", *(f"to_{w.names[k]}_rows" for k in scored)]
    data = [("grad", "row", "from"), *((name, "head", "at_edge") for name in at_edges)]
    arguments = ["const float* __restrict__ grad", *w.gradient_arguments(inputs, inputs),
                 *(f"const float* __restrict__ {name}" for name in at_edges)]
    return _kernels(w, inputs, arguments, w.own(), w.walk("walk_together", "ie", body, data))


def _kernels(w: _Writer, summed: list[int], arguments: list[str], own: str, walk: str) -> str:
    joined = ",\n        ".join(arguments)
    return w.head() + f"""\
{KERNEL}gradients(GRAPH,
        {w.parameters()}{joined}) {{
{START}{own}{w.cleared(summed)}{walk}{w.stored(summed)}}}
{w.merge(summed)}"""


class _Writer(Writer):
    """Writer of these kernels; ``score``: values that the score is made of for each head."""

    header = "generated_attention.cuh"

    def __init__(self, expression: Expression, ends: str):
        super().__init__(expression, ends)
        assert expression.score is not None
        self.score = expression.made_of(expression.score)

    def apart(self, found: list[int]) -> tuple[list[int], list[int]]:
        """Inputs at the edges, and the other inputs."""
        stored = [k for k in found if self.of.inputs[k].end == "e"]
        return stored, [k for k in found if k not in stored]

    def scores(self, at_edge: str) -> list[str]:
        target = self.of.score
        assert target is not None
        return ["Heads score;", "EACH_HEAD {", *self.values(at_edge, target),
                f"    score[k / KV] = {self.names[target]};", "}"]

    def active(self, inputs: list[int]) -> set[int]:
        """Values that gradients go through, but for the score's operations: these are for heads."""
        return {k for k in super().active(inputs)
                if k < self.first or k in self.sums or k not in self.score}

    def through_score(self, at_edge: str, inputs: list[int], given: list[int],
                      stored: list[int]) -> list[str]:
        """Lines for the gradients of sums over channels and inputs through the score: of inputs
        they are added to the gradients along other ways."""
        channels = self.active(inputs)
        targets = {k for k in self.score
                   if k in given or (k in self.sums and k in channels) or k in inputs}
        if not targets:
            return []
        totals = sorted(k for k in targets if k in given or k >= self.first)
        lines = [f"Heads of_{self.names[k]}_total;" for k in totals]
        lines += ["EACH_HEAD {", *self.values(at_edge, self.of.score), *self._for_heads(targets)]
        lines += [f"    of_{self.names[k]}_total[k / KV] = of_{self.names[k]};" for k in totals]
        lines += ["    " + self.led(k, f"to_{self.names[k]}" if k in stored
                                    else f"{self.names[k]}_sum", f"of_{self.names[k]}", True)
                  for k in sorted(targets) if k in inputs]
        return [*lines, "}"]

    def led(self, k: int, to: str, value: str, together: bool = False) -> str:
        """Adds a head's value to the gradient of an input."""
        guard = "on && " if together else ""
        return f"{to}{PLACES[self.modes[k]]} += {guard}leads(at, k / KV) ? {value} : 0.f;"

    def _for_heads(self, targets: set[int]) -> list[str]:
        """Lines that pass ``of_score`` on to these values, for one head."""
        steps = [(k, *self.of.steps[k - self.first]) for k in sorted(self.score)
                 if k >= self.first and k not in self.sums]
        active = set(targets)
        for k, op, args in steps:
            if any(a in active and slope for a, slope in zip(args, OPERATIONS[op].slopes)):
                active.add(k)
        reached: dict[int, list[str]] = {self.of.score: ["of_score[k / KV]"]}  # type: ignore
        lines = []
        for k in sorted(active, reverse=True):
            name = self.names[k]
            lines.append(f"    const float of_{name} = {' + '.join(reached.get(k, ['0.f']))};")
            if k >= self.first and k not in self.sums:
                self.pass_on(k, active, reached)
        return lines

    def skip_unread(self, inputs: list[int]) -> None:
        """Leaves out all values that the gradients of these inputs do not depend on."""
        active, read = self.active(inputs), set[int]()
        for k, (op, args) in enumerate(self.of.steps, self.first):
            if k not in active or k in self.sums:
                continue
            for a, slope in zip(args, OPERATIONS[op].slopes):
                if a in active and slope:
                    names = {name for _, name, _, _ in string.Formatter().parse(slope) if name}
                    read |= {k if name == "y" else args[int(name)] for name in names - {"g"}}
        pending = set(read)
        while pending:
            k = pending.pop()
            args = () if k < self.first else self.of.steps[k - self.first].args
            pending |= set(args) - read
            read |= set(args)
        self.skipped = set(range(self.first + len(self.of.steps))) - read
