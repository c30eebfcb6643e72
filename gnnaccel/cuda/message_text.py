"""The text of the kernels for a message that is an `Expression`.

``forward`` goes over the edges by destination, ``gradients`` once by destination and once by
source, each with what ``src/generated.cuh`` has. Backward computes the expression again and goes
through it in reverse. Beside each there is ``merge``, which adds up the chunks of split rows.
``at_edges`` writes what it computes for each edge instead of reducing it.

Sums over channels within an expression are computed one after the other, each with all that it
needs of the expression, by all lanes of an edge together; backward adds up what reaches each of
them in the opposite order.

Backward of an extremum looks which messages are equal to it, so both must compute the same bits:
such kernels are to be compiled without fused multiply-adds (`EXACT`), which a compiler puts where
it finds them.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

from gnnaccel.cuda.expression import OPERATIONS, Expression

KERNEL = 'extern "C" __global__ void __launch_bounds__(32 * WARPS)\n'
TYPES = {"row": "Row", "head": "Heads", "one": "float"}
PLACES = {"row": "[k][c]", "head": "[k / KV]", "one": ""}
CLEAR = {"row": "clear_row({0});", "head": "clear_heads({0});", "one": "{0} = 0.f;"}
_LOAD = {"row": "load_row(at, {0}, {1}, {2}, {3});",
         "head": "load_heads(at, {0}, {1}, {2}, {3});",
         "one": "{3} = load_one({0}, {1}, {2});"}
_WIDTHS = {"head": "H", "one": "(int)gridDim.y"}
START = """    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
"""
MERGE = """    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
"""
_WALK = """    struct Edge {{ {kinds} }};
    const auto load = [&](Edge& e, OFF_T position, bool on) {{
        const u64 from = on ? (u64)other[position] : 0, at_edge = on ? (u64)place[position] : 0;
{loads}
    }};
    {way}<Edge, IN_FLIGHT_OF({rows})>(at, it, load, [&](Edge& e, OFF_T position, bool on) {{
{body}
    }});
"""
_MODES = {"rows": "row", "heads": "head"}
#: what is written for each edge and not reduced: rows, or their sums for each head
WRITTEN = tuple(_MODES)
#: operations of many instructions, or with a division
_COSTLY = frozenset(("reciprocal", "div", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin",
                     "cos", "erf", "sigmoid", "tanh", "elu", "silu", "gelu", "gelu_tanh",
                     "softplus", "pow"))
#: definitions of kernels that compute a message's bits again
EXACT = (("FMAD", "0"),)


@functools.lru_cache(maxsize=512)
def forward(expression: Expression) -> str:
    """The kernels ``forward`` and ``merge``: sums or means of messages."""
    w = Writer(expression, "ip")
    body = [*w.begin("je"), "EACH_CHANNEL {", *w.values("je"),
            f"    {w.where_on}sum[k][c] += {w.names[expression.out]};", "}"]
    return w.head() + f"""\
{KERNEL}forward(GRAPH,
        {w.parameters()}int mean, float* __restrict__ out, float* __restrict__ part) {{
{START}{w.own()}    Row sum;
    clear_row(sum);
{w.walk(w.way, "je", body)}    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, mean, sum, out);
    else store_row(at, part, it.chunk, sum);
}}

{KERNEL}merge(MERGE, const OFF_T* __restrict__ indptr, const float* __restrict__ part, int mean,
      float* __restrict__ out) {{
{MERGE}    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) finish(at, row.x, indptr[row.x + 1] - indptr[row.x], mean, sum, out);
}}
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
    return [k for k, one in enumerate(expression.inputs)
            if needs[k] and one.end in ("iep" if by_row else "j")]


@functools.lru_cache(maxsize=512)
def backward(expression: Expression, needs: tuple[bool, ...], by_row: bool,
             of: str = "sum") -> str:
    """The kernels ``gradients`` and ``merge``, by destination or by source. By destination they
    are those of inputs at the destination, at the edges, and of parameters, of which each
    destination has a part. ``needs``: which inputs want one; ``grad``: the gradient ``of`` sums, or
    of the "rows" or sums by "heads" that `at_edges` writes. Of "max" and "min", ``grad`` is each
    message's share where it is equal to ``best``."""
    edge, own = ("je", "ip") if by_row else ("ie", "jp")
    w, found = Writer(expression, own), wanted(expression, needs, by_row)
    stored = [k for k in found if expression.inputs[k].end == "e"]
    summed = [k for k in found if k not in stored]
    # the gradient of a number for all channels is a sum over lanes
    together = bool(w.sums) or any(w.modes[k] != "row" for k in stored)
    results = ("grad", "best") if of in ("max", "min") else ("grad",)
    edges, mine = of in WRITTEN, by_row and of not in WRITTEN
    reaching = [f"{name}_own[k][c]" if mine else f"e.{name}{PLACES[_MODES.get(of, 'row')]}"
                for name in results]
    if len(results) > 1:
        reaching = [f"of_extremum({w.names[expression.out]}, {reaching[1]}, {reaching[0]})"]
    body = ([] if together else ["if (!on) return;"]) + w.totals(edge)
    body += w.adjoint_totals(found, reaching[0], edge) + [
        f"{TYPES[w.modes[k]]} to_{w.names[k]}; {CLEAR[w.modes[k]].format('to_' + w.names[k])}"
        for k in stored]
    body += ["EACH_CHANNEL {", *w.values(edge),
             *w.adjoints(found, reaching[0]),
             *(w.added(k, k in stored, together) for k in found), "}"]
    for k in stored:
        body += [f"sum_channels(to_{w.names[k]});"] * together
        body += [("if (on) " if together else "")
                 + f"store(at, {w.names[k]}_grad, (u64)place[position], to_{w.names[k]});"]
    arguments = ", ".join(f"const float* __restrict__ {name}" for name in results) + "".join(
        f",\n        float* __restrict__ {w.names[k]}_{kind}"
        for kind, those in (("grad", found), ("part", summed)) for k in those)
    read = [(name, _MODES[of], "at_edge") if edges else (name, "row", "from") for name in results]
    return w.head() + f"""\
{KERNEL}gradients(GRAPH,
        {w.parameters()}{arguments}) {{
{START}{w.own([(name, "row") for name in results] if mine else [])}{w.cleared(summed)}\
{w.walk("walk_together" if together else "walk", edge, body, [] if mine else read)}\
{w.stored(summed)}}}
{w.merge(summed)}"""


class Writer:
    """Parts of kernels for one expression, whose rows share what is at ``ends``. ``sums``: its sums
    over channels, for which all lanes of a warp go ``way`` together, and take no part where an edge
    is not on (``where_on``); ``once``: values that are computed once for a row, not for each edge;
    ``skipped``: values that are not computed, nor loaded; ``score``: values that a score for each
    head is made of, through which nothing goes channel by channel."""

    header = "generated.cuh"

    def __init__(self, expression: Expression, ends: str):
        self.ends = ends
        self.of, self.names, self.sums = expression, expression.names, expression.sums
        self.modes = [one.mode for one in expression.inputs]
        self.first = expression.first
        self.once = self._once()
        self.skipped: set[int] = set()
        self.score: set[int] = set()
        self.way = "walk_together" if self.sums else "walk"
        self.where_on = "if (on) " if self.sums else ""

    def head(self) -> str:
        return (f"// message = {self.of}\n"
                "// j: rows at the source, i: at the destination, e: of the edge, p: parameters; "
                "n: numbers\n"
                f'#include "{self.header}"\n\n')

    def at(self, ends: str) -> list[int]:
        return [k for k, one in enumerate(self.of.inputs)
                if one.end in ends and k not in self.skipped]

    def parameters(self) -> str:
        found = [f"const float* __restrict__ {name}_rows" for name in self.names[:len(self.modes)]]
        found += [f"float {name}" for name in self.names[len(self.modes):self.first]]
        return "".join(f"{one},\n        " for one in found)

    def _once(self) -> list[int]:
        """Values that take many instructions, or a division, of what all edges of a row share."""
        shared = {k for k in range(self.first)
                  if k >= len(self.modes) or self.of.inputs[k].end in self.ends}
        found = []
        for k, (op, args) in enumerate(self.of.steps, self.first):
            if k not in self.sums and shared.issuperset(args):
                shared.add(k)
                if op in _COSTLY:
                    found.append(k)
        return found

    def own(self, results: Sequence[tuple[str, str]] = ()) -> str:
        """Loads what all edges of a row share; ``results``: what belongs to its result as well,
        names with modes."""
        found = []
        for k in self.at(self.ends):
            name = f"{self.names[k]}_own"
            row = (("0", "true") if self.of.inputs[k].end == "p"
                   else ("(u64)it.row", "it.end > it.begin"))
            found += [f"{TYPES[self.modes[k]]} {name};",
                      _LOAD[self.modes[k]].format(f"{self.names[k]}_rows", *row, name)]
        for name, mode in results:
            found += [f"{TYPES[mode]} {name}_own;",
                      _LOAD[mode].format(name, "(u64)it.row", "it.end > it.begin", f"{name}_own")]
        for k in self.once:
            if k not in self.skipped:
                name = self.names[k]
                found += [f"Row {name}_own;", "EACH_CHANNEL {", *self.values("", k),
                          f"    {name}_own[k][c] = {name};", "}"]
        return "".join(f"    {line}\n" for line in found)

    def walk(self, way: str, ends: str, body: list[str],
             results: Sequence[tuple[str, str, str]] = (), numbered: bool = False) -> str:
        """Goes over the edges. ``results``: what is read for each of them besides inputs: names
        with modes, and which row it is, "from" the other end or "at_edge"; ``numbered``: the
        number of the edge is read with them, as ``e.edge``."""
        read = [(self.names[k], f"{self.names[k]}_rows", self.modes[k],
                 "at_edge" if self.of.inputs[k].end == "e" else "from") for k in self.at(ends)]
        read += [(name, name, mode, row) for name, mode, row in results]
        kinds = [f"{TYPES[mode]} {name};" for name, _, mode, _ in read]
        loads = [_LOAD[mode].format(rows, row, "on", f"e.{name}") for name, rows, mode, row in read]
        rows = max(1, sum(kind.startswith("Row") for kind in kinds))
        if numbered:
            kinds, loads = [*kinds, "OFF_T edge;"], [*loads, "e.edge = (OFF_T)at_edge;"]
        return _WALK.format(kinds=" ".join(kinds), way=way, rows=rows,
                            loads="\n".join(f"        {line}" for line in loads),
                            body="\n".join(f"        {line}" for line in body))

    def begin(self, at_edge: str) -> list[str]:
        """What comes before the channels of an edge."""
        return self.totals(at_edge) if self.sums else ["if (!on) return;"]

    def totals(self, at_edge: str) -> list[str]:
        """The sums over channels."""
        found = []
        for s in self.sums:
            if s in self.skipped:
                continue
            (arg,) = self.of.steps[s - self.first].args
            found += self.added_up(self.names[s], [*self.values(at_edge, arg)], self.names[arg])
        return found

    @staticmethod
    def added_up(name: str, lines: list[str], value: str) -> list[str]:
        return [f"Heads {name}_total; clear_heads({name}_total);", "EACH_CHANNEL {", *lines,
                f"    {name}_total[k / KV] += at.owns(k / KV, k % KV) ? {value} : 0.f;", "}",
                f"sum_channels({name}_total);"]

    def values(self, at_edge: str, target: int | None = None) -> list[str]:
        """Computes the expression for one channel, or no more than the value ``target`` of it."""
        found = []
        needed = range(len(self.names)) if target is None else self.of.made_of(target)
        for k, one in enumerate(self.of.inputs):
            if k in self.skipped or k not in needed:
                continue
            place = f"e.{self.names[k]}" if one.end in at_edge else f"{self.names[k]}_own"
            found.append(f"    const float {self.names[k]} = {place}{PLACES[one.mode]};")
        for k, (op, args) in enumerate(self.of.steps, self.first):
            if k not in needed or k in self.skipped:
                continue
            if k in self.sums or (k in self.once and k != target):
                place = "total[k / KV]" if k in self.sums else "own[k][c]"
                found.append(f"    const float {self.names[k]} = {self.names[k]}_{place};")
                continue
            kind, given = OPERATIONS[op], [self.names[a] for a in args]
            found.append(f"    const {kind.type} {self.names[k]} = {kind.value.format(*given)};")
        return found

    def adjoint_totals(self, inputs: list[int], grad: str, at_edge: str) -> list[str]:
        """What reaches the sums over channels, each added up over its channels."""
        active, found = self.active(inputs), []
        for s in reversed(self.sums):
            if s in active and s not in self.score:
                lines = [*self.values(at_edge), *self.adjoints(inputs, grad, s)]
                found += self.added_up(f"of_{self.names[s]}", lines, f"of_{self.names[s]}")
        return found

    def active(self, inputs: list[int]) -> set[int]:
        """The values that gradients of these inputs go through."""
        active = set(inputs)
        for k, (op, args) in enumerate(self.of.steps, self.first):
            slopes = ("",) if k in self.sums else OPERATIONS[op].slopes
            if any(a in active and slope is not None for a, slope in zip(args, slopes)):
                active.add(k)
        return active

    def adjoints(self, inputs: list[int], grad: str, until: int | None = None) -> list[str]:
        """Goes through the expression in reverse: what reaches these inputs of ``grad``, or no
        further than the value ``until``."""
        active = self.active(inputs)
        reached: dict[int, list[str]] = {self.of.out: [grad]}
        found = []
        for k in reversed(range(self.first + len(self.of.steps))):
            if k not in active:
                continue
            name = self.names[k]
            if k in self.sums and k != until:  # added up before, or not asked for yet
                arg = self.of.steps[k - self.first].args[0]
                reached.setdefault(arg, []).append(f"of_{name}_total[k / KV]")
                continue
            terms = reached.get(k, ["0.f"])
            found.append(f"    const float of_{name} = {' + '.join(terms)};")
            if k == until:
                break
            if k < self.first:
                continue
            self.pass_on(k, active, reached)
        return found

    def pass_on(self, k: int, active: set[int], reached: dict[int, list[str]]) -> None:
        """Adds what reaches the arguments of step ``k``, those that are ``active``, through it."""
        op, args = self.of.steps[k - self.first]
        name, given = self.names[k], [self.names[a] for a in args]
        for a, slope in zip(args, OPERATIONS[op].slopes):
            if a in active and slope:
                term = slope.format(*given, g=f"of_{name}", y=name)
                reached.setdefault(a, []).append(f"({term})")

    def added(self, k: int, stored: bool, together: bool) -> str:
        """Adds a channel's part to the gradient of an input."""
        name, mode = self.names[k], self.modes[k]
        value = f"of_{name}"
        if mode != "row":  # lanes beyond the last channel do not count
            value = f"(at.owns(k / KV, k % KV) ? {value} : 0.f)"
        if together and not stored:
            value = f"on ? {value} : 0.f"
        return f"    {'to_' + name if stored else name + '_sum'}{PLACES[mode]} += {value};"

    def cleared(self, summed: list[int]) -> str:
        """The sums of gradients before the first edge."""
        return "".join(f"    {TYPES[self.modes[k]]} {self.names[k]}_sum;\n"
                       f"    {CLEAR[self.modes[k]].format(self.names[k] + '_sum')}\n"
                       for k in summed)

    def stored(self, summed: list[int]) -> str:
        """Stores them."""
        return "".join(f"    store_total(at, it, {name}_sum, {name}_grad, {name}_part);\n"
                       for name in (self.names[k] for k in summed))

    def merge(self, summed: list[int]) -> str:
        if not summed:
            return ""
        arguments, lines = "", ""
        for name, mode in [(self.names[k], self.modes[k]) for k in summed]:
            arguments += (f",\n      const float* __restrict__ {name}_part, "
                          f"float* __restrict__ {name}_grad")
            lines += (f"    merge_rows(at, row, {name}_part, {name}_grad);\n" if mode == "row" else
                      f"    merge_numbers(at, row, {name}_part, {name}_grad, {_WIDTHS[mode]});\n")
        return f"\n{KERNEL}merge(MERGE{arguments}) {{\n{MERGE}{lines}}}\n"
