"""Fusion: chains of operations that one traversal of a (virtual) graph computes become one
operation."""
from __future__ import annotations

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import DOMAIN_OF, DST, EDGE, Op, Program, name_of, op


def fuse(program: Program) -> Program:
    """The compacted Program with reductions and attention as single traversals. The value does not
    change."""
    return _fuse_attention(_fuse_reductions(program))


# --- reductions -----------------------------------------------------------------------------------

def _fuse_reductions(program: Program) -> Program:
    """The mean over the edges of each relation and the sum over relations: one weighted sum by
    destination."""
    ops = list(program.ops)
    read = [arg for step in ops for arg in step.args]
    for at, step in enumerate(program.ops):
        inner = next((o for o in program.ops if o.out == step.args[0]), None)
        if (step.kind == "collect" and len(step.args) == 1 and inner is not None
            and inner.kind == "reduce"
                and read.count(inner.out) == 1):
            ops[at] = op("mean_sum", step.out, *inner.args, mean=inner.attr("mean"))
            ops.remove(inner)
            return Program(program.name, program.inputs, tuple(ops), program.output)
    return program


# --- attention ------------------------------------------------------------------------------------

def _fuse_attention(program: Program) -> Program:
    producers = {step.out: step for step in program.ops}
    tail = next((step for step in program.ops if step.kind == "aggregate"), None)
    if tail is None:
        return program
    dropped = producers.get(tail.args[0])
    softmax = (producers.get(dropped.args[0]) if dropped is not None
               and dropped.kind == "dropout" else dropped)
    if softmax is None or softmax.kind != "segment_softmax":
        return program
    assert dropped is not None
    dropout = dropped.attr("p") if dropped.kind == "dropout" else 0.0
    source = tail.args[1].partition("@")[2]
    if source not in ("src", "pair_src"):
        return program
    target = softmax.attr("scope")
    score = producers.get(softmax.args[0])
    find = _additive if score is not None and score.kind == "leaky_relu" else _dot
    match = find(producers, score, tail.args[1], source, target, dropout)
    if match is None:
        return program
    before, names, args, attention, gone = match
    gone |= {softmax.out, tail.out, dropped.out}
    rest = tuple(step for step in program.ops if step.out not in gone)
    if any(name_of(arg) in gone - {tail.out} for step in rest for arg in step.args):
        return program  # something else wants to see the scores or weights
    home = DOMAIN_OF[target]
    out = tail.out if home == DST else f"{tail.out}_pairs"
    fused = Op("attend", out, args,
               (("attention", attention), ("heads", tail.attr("heads")), ("names", names),
                ("source", DOMAIN_OF[source]), ("target", home)), home)
    fused_ops = before + ((fused,) if home == DST else (fused, op("collect", tail.out, out)))
    at = sum(step in rest for step in program.ops[:program.ops.index(tail)])
    return Program(program.name, program.inputs, rest[:at] + fused_ops + rest[at:], program.output)


def _additive(made: dict[str, Op], score: Op | None, row: str, source: str, target: str,
              dropout: float):
    """leaky_relu of a sum of terms: one by source, one by destination, and the others, which vary
    over the edges."""
    assert score is not None
    z = made.get(score.args[0])
    if z is None or z.kind != "add":
        return None
    by_src = [a for a in z.args if a.endswith(f"@{source}")]
    by_dst = [a for a in z.args if a.endswith(f"@{target}")]
    rest = tuple(a for a in z.args if a not in by_src[:1] + by_dst[:1])
    if not by_src:
        return None
    names: tuple[str, ...]
    args: tuple[str, ...]
    before: tuple[Op, ...]
    names, args, before = ("x", "a_src"), (name_of(row), name_of(by_src[0])), ()
    if by_dst:
        names, args = names + ("a_dst",), args + (name_of(by_dst[0]),)
    if rest:
        if len(rest) == 1 and "@" not in rest[0]:
            edge = rest[0]
        else:
            edge, before = f"{z.out}_edge", (Op("add", f"{z.out}_edge", rest, domain=EDGE),)
        names, args = names + ("a_edge",), args + (edge,)
    attention = programs.additive_terms(score.attr("slope"), dropout, bool(by_dst), bool(rest))
    return before, names, args, attention, {z.out, score.out}


def _dot(made: dict[str, Op], score: Op | None, row: str, source: str, target: str, dropout: float):
    """A scaled inner product of a destination's row with the row of a source, both where the
    value's source is."""
    if score is None or score.kind != "scale":
        return None
    dot = made.get(score.args[0])
    if dot is None or dot.kind != "dot":
        return None
    query, key = dot.args
    if not (query.endswith(f"@{target}") and key.endswith(f"@{source}")):
        return None
    names, args = ("keys", "values", "queries"), (name_of(key), name_of(row), name_of(query))
    return (), names, args, programs.dot_product(score.attr("by"), dropout,
                                                 False), {dot.out, score.out}
