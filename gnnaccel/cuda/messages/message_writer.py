"""Parts of the texts of kernels for messages (`message_text`, `attention_text`)."""
from __future__ import annotations

from collections.abc import Sequence

from gnnaccel.cuda.messages.expression import OPERATIONS, Expression, Input

KERNEL = 'extern "C" __global__ void __launch_bounds__(32 * WARPS)\n'
TYPES = {"row": "Row", "head": "Heads", "one": "float"}
PLACES = {"row": "[k][c]", "head": "[k / KV]", "one": ""}
CLEAR = {"row": "clear_row({0});", "head": "clear_heads({0});", "one": "{0} = 0.f;"}
_LOAD = {"row": "load_row(at, {0}, {1}, {2}, {3});",
         # rows with a stride: the distance from one to the next, in numbers
         "strided": "load_row(at, {0} + {1} * (u64){0}_stride, 0, {2}, {3});",
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
#: operations of many instructions, or with a division
_COSTLY = frozenset(("reciprocal", "div", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin",
                     "cos", "erf", "sigmoid", "tanh", "elu", "silu", "gelu", "gelu_tanh",
                     "softplus", "pow"))


def strided(one: Input) -> bool:
    """Whether kernels take the distance between the rows of an input."""
    return one.mode == "row" and one.end != "p"


class Writer:
    """Parts of kernels for one expression, whose rows share inputs at ``ends``. ``sums``: its sums
    over channels, for which all lanes of a warp go ``way`` together, and take no part where an edge
    is not on (``where_on``); ``once``: values that are computed once for a row, not for each edge;
    ``skipped``: values that are not computed, nor loaded; ``score``: values that a score for each
    head is made of, through which nothing goes channel by channel."""

    header = "generated.cuh"

    def __init__(self, expression: Expression, ends: str):
        self.ends = ends
        self.of, self.names, self.sums = expression, expression.names, expression.sums
        self.modes = [source.mode for source in expression.inputs]
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
        return [k for k, source in enumerate(self.of.inputs)
                if source.end in ends and k not in self.skipped]

    def parameters(self) -> str:
        texts = [f"const float* __restrict__ {name}_rows"
                 + (f", int {name}_rows_stride" if strided(source) else "")
                 for name, source in zip(self.names, self.of.inputs)]
        texts += [f"float {name}" for name in self.names[len(self.modes):self.first]]
        return "".join(f"{text},\n        " for text in texts)

    def _once(self) -> list[int]:
        """Values of many instructions, or a division, of inputs that all edges of a row share."""
        shared = {k for k in range(self.first)
                  if k >= len(self.modes) or self.of.inputs[k].end in self.ends}
        costly = []
        for k, (op, args) in enumerate(self.of.steps, self.first):
            if k not in self.sums and shared.issuperset(args):
                shared.add(k)
                if op in _COSTLY:
                    costly.append(k)
        return costly

    def own(self, results: Sequence[tuple[str, str]] = ()) -> str:
        """Loads the inputs that all edges of a row share; ``results``: tensors of its result as
        well, names with modes."""
        lines = []
        for k in self.at(self.ends):
            name = f"{self.names[k]}_own"
            row = (("0", "true") if self.of.inputs[k].end == "p"
                   else ("(u64)it.row", "it.end > it.begin"))
            lines += [f"{TYPES[self.modes[k]]} {name};",
                      _LOAD[self.loaded(k)].format(f"{self.names[k]}_rows", *row, name)]
        for name, mode in results:
            lines += [f"{TYPES[mode]} {name}_own;",
                      _LOAD[mode].format(name, "(u64)it.row", "it.end > it.begin", f"{name}_own")]
        for k in self.once:
            if k not in self.skipped:
                name = self.names[k]
                lines += [f"Row {name}_own;", "EACH_CHANNEL {", *self.values("", k),
                          f"    {name}_own[k][c] = {name};", "}"]
        return "".join(f"    {line}\n" for line in lines)

    def loaded(self, k: int) -> str:
        """Key of `_LOAD` for an input."""
        return "strided" if strided(self.of.inputs[k]) else self.modes[k]

    def walk(self, way: str, ends: str, body: list[str],
             results: Sequence[tuple[str, str, str]] = (),
             more: Sequence[tuple[str, str]] = ()) -> str:
        """Goes over the edges. ``results``: tensors to read for each of them besides inputs: names
        with modes, and the index of the row, "from" the other end or "at_edge"; ``more``: further
        members of an edge, as they are declared, and how they are loaded."""
        data = [(self.names[k], f"{self.names[k]}_rows", self.loaded(k),
                 "at_edge" if self.of.inputs[k].end == "e" else "from") for k in self.at(ends)]
        data += [(name, name, mode, row) for name, mode, row in results]
        kinds = [f"{TYPES.get(kind, 'Row')} {name};" for name, _, kind, _ in data]
        loads = [_LOAD[kind].format(rows, row, "on", f"e.{name}") for name, rows, kind, row in data]
        rows = max(1, sum(kind.startswith("Row") for kind in kinds))
        kinds += [declared for declared, _ in more]
        loads += [load for _, load in more]
        return _WALK.format(kinds=" ".join(kinds), way=way, rows=rows,
                            loads="\n".join(f"        {line}" for line in loads),
                            body="\n".join(f"        {line}" for line in body))

    def begin(self, at_edge: str) -> list[str]:
        """Lines before the channels of an edge."""
        return self.totals(at_edge) if self.sums else ["if (!on) return;"]

    def totals(self, at_edge: str) -> list[str]:
        """Lines of the sums over channels."""
        lines = []
        for s in self.sums:
            if s in self.skipped:
                continue
            (arg,) = self.of.steps[s - self.first].args
            lines += self.added_up(self.names[s], [*self.values(at_edge, arg)], self.names[arg])
        return lines

    @staticmethod
    def added_up(name: str, lines: list[str], value: str) -> list[str]:
        return [f"Heads {name}_total; clear_heads({name}_total);", "EACH_CHANNEL {", *lines,
                f"    {name}_total[k / KV] += at.owns(k / KV, k % KV) ? {value} : 0.f;", "}",
                f"sum_channels({name}_total);"]

    def values(self, at_edge: str, target: int | None = None) -> list[str]:
        """Computes the expression for one channel, or only the value ``target`` of it."""
        lines = []
        needed = range(len(self.names)) if target is None else self.of.made_of(target)
        for k, source in enumerate(self.of.inputs):
            if k in self.skipped or k not in needed:
                continue
            place = f"e.{self.names[k]}" if source.end in at_edge else f"{self.names[k]}_own"
            lines.append(f"    const float {self.names[k]} = {place}{PLACES[source.mode]};")
        for k, (op, args) in enumerate(self.of.steps, self.first):
            if k not in needed or k in self.skipped:
                continue
            if k in self.sums or (k in self.once and k != target):
                place = "total[k / KV]" if k in self.sums else "own[k][c]"
                lines.append(f"    const float {self.names[k]} = {self.names[k]}_{place};")
                continue
            kind, operands = OPERATIONS[op], [self.names[a] for a in args]
            lines.append(f"    const {kind.type} {self.names[k]} = {kind.value.format(*operands)};")
        return lines

    def adjoint_totals(self, inputs: list[int], grads: Sequence[str], at_edge: str) -> list[str]:
        """Gradients of the sums over channels, each added up over its channels."""
        active, totals = self.active(inputs), []
        for s in reversed(self.sums):
            if s in active and s not in self.score:
                name = f"of_{self.names[s]}"
                lines = [*self.values(at_edge), *self.adjoints(inputs, grads, s)]
                totals += self.added_up(name, lines, name)
        return totals

    def active(self, inputs: list[int]) -> set[int]:
        """Values that gradients of these inputs go through, on the way from a message."""
        active, used = set(inputs), self.of.used
        for k, (op, args) in enumerate(self.of.steps, self.first):
            slopes = ("",) if k in self.sums else OPERATIONS[op].slopes
            if k in used and any([a in active and slope is not None
                                  for a, slope in zip(args, slopes)]):
                active.add(k)
        return active

    def adjoints(self, inputs: list[int], grads: Sequence[str],
                 until: int | None = None) -> list[str]:
        """Goes through the expression in reverse: gradients of these inputs for ``grads`` of the
        messages, or no further than the value ``until``."""
        active = self.active(inputs)
        reached: dict[int, list[str]] = {}
        for out, grad in zip(self.of.outs, grads):
            reached.setdefault(out, []).append(grad)
        lines = []
        for k in reversed(range(self.first + len(self.of.steps))):
            if k not in active:
                continue
            name = self.names[k]
            if k in self.sums and k != until:  # added up before, or not asked for yet
                arg = self.of.steps[k - self.first].args[0]
                reached.setdefault(arg, []).append(f"of_{name}_total[k / KV]")
                continue
            terms = reached.get(k, ["0.f"])
            lines.append(f"    const float of_{name} = {' + '.join(terms)};")
            if k == until:
                break
            if k < self.first:
                continue
            self.pass_on(k, active, reached)
        return lines

    def pass_on(self, k: int, active: set[int], reached: dict[int, list[str]]) -> None:
        """Adds the gradients of step ``k``'s arguments, those that are ``active``, through it."""
        op, args = self.of.steps[k - self.first]
        name, operands = self.names[k], [self.names[a] for a in args]
        for a, slope in zip(args, OPERATIONS[op].slopes):
            if a in active and slope:
                term = slope.format(*operands, g=f"of_{name}", y=name)
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

    def gradient_arguments(self, inputs: list[int], summed: list[int]) -> list[str]:
        """Where gradients are written, and the parts of those that are ``summed``. Rows of some may
        lie between those of others: each comes with the distance from one to the next."""
        return [f"float* __restrict__ {self.names[k]}_{kind}" + (
            f", int {self.names[k]}_grad_stride"
            if kind == "grad" and strided(self.of.inputs[k]) else "")
            for kind, group in (("grad", inputs), ("part", summed)) for k in group]

    def store(self, k: int, row: str) -> str:
        """Stores the gradient of a row of the edges."""
        name = self.names[k]
        place = (f"{name}_grad + {name}_grad_stride * {row}, 0" if strided(self.of.inputs[k])
                 else f"{name}_grad, {row}")
        return f"store(at, {place}, to_{name});"

    def stored(self, summed: list[int]) -> str:
        """Stores the sums of gradients."""
        return "".join(f"    store_total(at, it, {name}_sum, {grad}, {name}_part);\n"
                       for name, grad in map(self._summed, summed))

    def _summed(self, k: int) -> tuple[str, str]:
        """The name of an input, and the arguments that say where its gradient goes."""
        name = self.names[k]
        stride = f", {name}_grad_stride" if strided(self.of.inputs[k]) else ""
        return name, f"{name}_grad{stride}"

    def merge(self, summed: list[int]) -> str:
        if not summed:
            return ""
        arguments, lines = "", ""
        for k in summed:
            (name, grad), mode = self._summed(k), self.modes[k]
            stride = f", int {name}_grad_stride" if strided(self.of.inputs[k]) else ""
            arguments += (f",\n      const float* __restrict__ {name}_part, "
                          f"float* __restrict__ {name}_grad{stride}")
            lines += (f"    merge_rows(at, row, {name}_part, {grad});\n" if mode == "row" else
                      f"    merge_numbers(at, row, {name}_part, {grad}, {_WIDTHS[mode]});\n")
        return f"\n{KERNEL}merge(MERGE{arguments}) {{\n{MERGE}{lines}}}\n"
