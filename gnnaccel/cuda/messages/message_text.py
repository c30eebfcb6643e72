"""The text of the kernels for a message that is an `Expression`.

``forward`` goes over the edges by destination, ``gradients`` once by destination and once by
source, each with the functions of ``src/generated.cuh``. Backward computes the expression again and
goes through it in reverse. Beside each there is ``merge``, which adds up the chunks of split rows.
``at_edges`` writes each edge's value instead of reducing it.

Sums over channels within an expression are computed one after the other, each with all that it
needs of the expression, by all lanes of an edge together; backward adds up their gradients in the
opposite order.

Backward of an extremum looks which messages are equal to it, so both must compute the same bits:
such kernels are to be compiled without fused multiply-adds (`EXACT`), which a compiler puts where
it finds them.
"""
from __future__ import annotations

import functools

from gnnaccel.cuda.messages.expression import OPERATIONS, Expression
from gnnaccel.cuda.messages.message_writer import CLEAR, KERNEL, MERGE, PLACES, START, TYPES, Writer

_MODES = {"rows": "row", "heads": "head"}
#: forms of values that are written for each edge and not reduced: rows, or their sums by head
WRITTEN = tuple(_MODES)
#: mode and index of the gradients of these forms; gradients of others are rows of the destination
_AT = {of: (mode, "at_edge") for of, mode in _MODES.items()}
_SHARE = (("float share;", "e.share = on ? share_of(offsets, from) : 0.f;"),)
#: definitions of kernels that compute a message's bits again
EXACT = (("FMAD", "0"),)


@functools.lru_cache(maxsize=512)
def forward(expression: Expression) -> str:
    """The kernels ``forward`` and ``merge``: sums or means of messages, of which each has a result
    and parts."""
    w, count = Writer(expression, "ip"), range(len(expression.outs))
    body = [*w.begin("je"), "EACH_CHANNEL {", *w.values("je"),
            *(f"    {w.where_on}sum{n}[k][c] += {w.names[out]};"
              for n, out in enumerate(expression.outs)), "}"]
    results = "".join(f",\n        float* __restrict__ out{n}, float* __restrict__ part{n}"
                      for n in count)
    sums = "".join(f"    Row sum{n};\n    clear_row(sum{n});\n" for n in count)
    joined = "".join(f"    sum_slots(sum{n});\n" for n in count)
    stored = "".join(f"""\
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, mean, sum{n}, out{n});
    else store_row(at, part{n}, it.chunk, sum{n});
""" for n in count)
    merged = "".join(f"""\
    Row sum{n};
    add_chunks(at, row.y, row.z, part{n}, sum{n});
    if (at.slot == 0)
        finish(at, row.x, indptr[row.x + 1] - indptr[row.x], mean, sum{n}, out{n});
""" for n in count)
    return w.head() + f"""\
{KERNEL}forward(GRAPH,
        {w.parameters()}int mean{results}) {{
{START}{w.own()}{sums}{w.walk(w.way, "je", body)}{joined}    if (at.slot != 0) return;
{stored}}}

{KERNEL}merge(MERGE, const OFF_T* __restrict__ indptr, int mean{results}) {{
{MERGE}{merged}}}
"""


@functools.lru_cache(maxsize=512)
def extremum(expression: Expression, largest: bool) -> str:
    """The kernels ``forward`` and ``merge``: the largest messages, or the smallest, and among how
    many the gradient of each is shared."""
    w, side = Writer(expression, "ip"), "<true>" if largest else "<false>"
    body = [*w.begin("je"), "EACH_CHANNEL {", *w.values("je"),
            f"    {w.where_on}keep{side}({w.names[expression.out]}, 1.f, found.best[k][c], "
            "found.times[k][c]);", "}"]
    return w.head() + f"""\
{KERNEL}forward(GRAPH,
        {w.parameters()}float* __restrict__ out, float* __restrict__ counts,
        float* __restrict__ part) {{
{START}{w.own()}    Extremum found;
    clear_extremum{side}(found);
{w.walk(w.way, "je", body)}    join_slots{side}(found);
    store_total(at, it, found, out, counts, part);
}}

{KERNEL}merge(MERGE, const float* __restrict__ part, float* __restrict__ out,
      float* __restrict__ counts) {{
{MERGE}    Extremum found;
    join_chunks{side}(at, row, part, found);
    if (at.slot == 0) finish(at, row.x, found, out, counts);
}}
"""


@functools.lru_cache(maxsize=512)
def at_edges(expression: Expression, summed: bool) -> str:
    """The kernel ``at_edges``: the value of each edge, a row of channels, or their sums for each
    head if they are ``summed``."""
    w, value = Writer(expression, "ip"), f"{expression.names[expression.out]}"
    if summed:
        body = [*w.totals("je"), "Heads found; clear_heads(found);", "EACH_CHANNEL {",
                *w.values("je"),
                f"    found[k / KV] += at.owns(k / KV, k % KV) ? {value} : 0.f;", "}",
                "sum_channels(found);", "if (on) store(at, out, (u64)place[position], found);"]
    else:
        body = [*w.begin("je"), "Row found; clear_row(found);", "EACH_CHANNEL {",
                *w.values("je"), f"    found[k][c] = {value};", "}",
                w.where_on + "store(at, out, (u64)place[position], found);"]
    return w.head() + f"""\
{KERNEL}at_edges(GRAPH,
        {w.parameters()}float* __restrict__ out) {{
{START}{w.own()}{w.walk("walk_together" if summed else w.way, "je", body)}}}
"""


def wanted(expression: Expression, needs: tuple[bool, ...], by_row: bool) -> list[int]:
    """The inputs whose gradients one pass computes, of those that ``needs`` names."""
    return [k for k, source in enumerate(expression.inputs)
            if needs[k] and source.end in ("iep" if by_row else "j")]


@functools.lru_cache(maxsize=512)
def reach(expression: Expression, inputs: tuple[int, ...]) -> tuple[bool, ...]:
    """Which of the messages gradients of these inputs come from."""
    active = Writer(expression, "").active(list(inputs))
    return tuple([out in active for out in expression.outs])


def read_by_gradients(expression: Expression, k: int) -> set[int]:
    """The values that are computed again for the gradient of input ``k``."""
    active, read = Writer(expression, "").active([k]), set[int]()
    for at, (op, args) in enumerate(expression.steps, expression.first):
        if at not in active or op not in OPERATIONS:
            continue
        for a, slope in zip(args, OPERATIONS[op].slopes):
            if a in active and slope:
                named = [b for place, b in enumerate(args) if f"{{{place}}}" in slope]
                for value in [*named, *[at] * ("{y}" in slope)]:
                    read |= expression.made_of(value)
    return read


@functools.lru_cache(maxsize=512)
def backward(expression: Expression, needs: tuple[bool, ...], by_row: bool,
             of: str = "sum") -> str:
    """The kernels ``gradients`` and ``merge``, by destination or by source. By destination they
    are those of inputs at the destination, at the edges, and of parameters, of which each
    destination has a part. ``needs``: which inputs want one; ``grad``: the gradient ``of`` sums, or
    of the "rows" or sums by "heads" that `at_edges` writes. Of "max" and "min", ``grad`` is each
    message's share where it is equal to ``best``. Of a "mean" each message has a share of the
    gradient; by source, ``offsets`` of the rows by destination tell how many share one. Of several
    messages each has a ``grad``."""
    edge, own = ("je", "ip") if by_row else ("ie", "jp")
    w, inputs = Writer(expression, own), wanted(expression, needs, by_row)
    stored = [k for k in inputs if expression.inputs[k].end == "e"]
    summed = [k for k in inputs if k not in stored]
    # the gradient of a number for all channels is a sum over lanes
    joint = bool(w.sums) or any(w.modes[k] != "row" for k in stored)
    results = ("grad", "best") if of in ("max", "min") else tuple(
        [f"grad{n}" for n in range(len(expression.outs))])
    per_row = by_row and of not in WRITTEN
    incoming = _reaching(w, of, results, per_row)
    body = ([] if joint else ["if (!on) return;"]) + w.totals(edge)
    body += w.adjoint_totals(inputs, incoming, edge) + [
        f"{TYPES[w.modes[k]]} to_{w.names[k]}; {CLEAR[w.modes[k]].format('to_' + w.names[k])}"
        for k in stored]
    body += ["EACH_CHANNEL {", *w.values(edge),
             *w.adjoints(inputs, incoming),
             *(w.added(k, k in stored, joint) for k in inputs), "}"]
    for k in stored:
        body += [f"sum_channels(to_{w.names[k]});"] * joint
        body += [("if (on) " if joint else "") + w.store(k, "(u64)place[position]")]
    averaged = of == "mean" and not per_row
    arguments = ["const OFF_T* __restrict__ offsets"] if averaged else []
    arguments += [f"const float* __restrict__ {name}" for name in results]
    arguments += w.gradient_arguments(inputs, summed)
    joined = ",\n        ".join(arguments)
    rows = w.own([(name, "row") for name in results] if per_row else []) + (
        "    const float share = share_of(indptr, it.row);\n" if of == "mean" and per_row else "")
    data = [] if per_row else [(name, *_AT.get(of, ("row", "from"))) for name in results]
    return w.head() + f"""\
{KERNEL}gradients(GRAPH,
        {w.parameters()}{joined}) {{
{START}{rows}{w.cleared(summed)}\
{w.walk("walk_together" if joint else "walk", edge, body, data, _SHARE if averaged else ())}\
{w.stored(summed)}}}
{w.merge(summed)}"""


def _reaching(w: Writer, of: str, results: tuple[str, ...], mine: bool) -> list[str]:
    """Gradient of each message; ``mine``: it belongs to the row, not to each edge."""
    terms = [f"{name}_own[k][c]" if mine else f"e.{name}{PLACES[_MODES.get(of, 'row')]}"
             for name in results]
    if of == "mean":
        return [f"{'' if mine else 'e.'}share * {term}" for term in terms]
    if of in ("max", "min"):
        return [f"of_extremum({w.names[w.of.out]}, {terms[1]}, {terms[0]})"]
    return terms
