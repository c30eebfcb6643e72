"""Kernels that are written for messages compile with NVRTC."""
from __future__ import annotations

import pytest

from gnnaccel.cuda.messages import generated, generated_attention, message_text
from gnnaccel.cuda.messages.expression import CHANNEL_SUM, OPERATIONS, Expression, Input, Step
from gnnaccel.cuda.runtime import nvrtc, sources
from tests.helpers import needs_nvrtc

pytestmark = needs_nvrtc

MODES = Expression(tuple(Input(end, mode) for end in "jiep" for mode in ("row", "head", "one")), 1,
                   tuple(Step("mul" if k % 2 else "add", (k + 1, 13 + k - 1 if k else 0))
                         for k in range(12)), 24)


def everything() -> Expression:
    """All operations, one after the other, each on the results of those before."""
    steps: list[Step] = []
    numbers, kinds = [0, 1, 2], {"float": [0, 1, 2], "bool": []}
    first = len(numbers)
    for name, operation in sorted(OPERATIONS.items(), key=lambda one: one[0] in _ON_TRUTHS):
        pool = kinds["bool" if name in _ON_TRUTHS else "float"]
        args = [pool[-1 - k] for k in range(len(operation.slopes))]
        if name == "where":
            args = [kinds["bool"][-1], *kinds["float"][-2:]]
        steps.append(Step(name, tuple(args)))
        kinds[operation.type].append(first + len(steps) - 1)
    return Expression((Input("j", "row"), Input("i", "row"), Input("e", "row")), 0, tuple(steps),
                      kinds["float"][-1])


#: a norm of the product of both ends by its sums over channels
SUMS = Expression((Input("j", "row"), Input("i", "row"), Input("e", "head")), 1,
                  (Step("mul", (0, 1)), Step(CHANNEL_SUM, (4,)), Step("mul", (5, 3)),
                   Step("sub", (4, 6)), Step("square", (7,)), Step(CHANNEL_SUM, (8,)),
                   Step("rsqrt", (9,)), Step("mul", (7, 10)), Step("mul", (11, 2))), 12)
#: three messages, two of which share a step
SEVERAL = Expression((Input("j", "row"), Input("i", "row"), Input("e", "row"), Input("e", "one")), 0,
                     (Step("mul", (0, 2)), Step("mul", (4, 3)), Step("tanh", (1,))), 4,
                     others=(5, 6))
_ON_TRUTHS = ("and", "or", "not", "float", "where")
CASES = {"modes": (MODES, (4, 8)), "modes, in tiles": (MODES, (40, 33)),
         "sums over channels": (SUMS, (4, 16)),
         "operations": (everything(), (1, 64)), "operations, odd": (everything(), (1, 47))}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("by_row", [None, True, False])
def test_kernels_of_several_messages_compile(by_row, reduce):
    more = () if by_row is None else ((True,) * 4, by_row)
    found = generated.kernels(SEVERAL, 1, 64, by_row is None, *more, of=reduce)
    text = sources.source(found.family)
    assert nvrtc.compile_text(text, found.defines, 90)[:4] == b"\x7fELF"


@pytest.mark.long
@pytest.mark.parametrize("reduce", ["sum", "max", "min", "rows", "heads"])
@pytest.mark.parametrize("case, wide, arch", [
    *zip(CASES, (False, True, False, False, True), (75, 90, 90, 120, 80))])
def test_generated_kernels_compile(case, wide, arch, reduce):
    of, seen = CASES[case]
    needs = (True,) * len(of.inputs)
    passes = ((), (needs, True), (needs, False))
    for more in passes if reduce != "min" else passes[:1]:  # whose backward is that of "max"
        found = generated.kernels(of, *seen, wide, *more, of=reduce)
        text = sources.source(found.family)
        assert nvrtc.compile_text(text, found.defines, arch)[:4] == b"\x7fELF"


#: softmax(leaky_relu(sum of w * tanh(i + j)) / n + e) * (sigmoid(i) * (j * norm + e)), norm by a sum
#: over channels of j; all of it in numbers that heads have, too
ATTENTION = Expression(
    (Input("i", "row"), Input("j", "row"), Input("p", "row"), Input("e", "head"), Input("j", "row"),
     Input("e", "row"), Input("j", "head"), Input("p", "one")), 2,
    (Step("add", (0, 1)), Step("tanh", (10,)), Step("mul", (2, 11)), Step(CHANNEL_SUM, (12,)),
     Step("leaky_relu", (13, 8)), Step("div", (14, 9)), Step("add", (15, 3)), Step("add", (16, 6)),
     Step("mul", (17, 7)), Step("square", (4,)), Step(CHANNEL_SUM, (19,)), Step("rsqrt", (20,)),
     Step("mul", (4, 21)), Step("add", (22, 5)), Step("sigmoid", (0,)), Step("mul", (24, 23))),
    25, 18)


@pytest.mark.long
@pytest.mark.parametrize("seen, wide, arch", [((8, 8), False, 75), ((1, 64), True, 90),
                                              ((40, 33), False, 80), ((1, 512), False, 120)])
def test_attention_compiles(seen, wide, arch):
    assert ATTENTION.scored_by_head
    needs = (True,) * len(ATTENTION.inputs)
    for more in ((), (needs, True), (needs, False), ((False, True, *needs[2:]), False)):
        found = generated_attention.kernels(ATTENTION, *seen, wide, *more)
        text = sources.source(found.family)
        assert nvrtc.compile_text(text, found.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("by_row", [None, True, False])
def test_extrema_are_found_again(by_row):
    """Each product is rounded before it is added, or forward and backward would not compute the
    same bits: a compiler fuses them where it finds them side by side."""
    of = Expression((Input("j", "row"), Input("i", "row"), Input("e", "row")), 0,
                    (Step("mul", (0, 2)), Step("mul", (1, 1)), Step("add", (3, 4))), 5)
    more = () if by_row is None else ((True,) * 3, by_row)
    fused = []
    for reduce in ("sum", "max"):
        found = generated.kernels(of, 1, 64, False, *more, of=reduce)
        ptx = nvrtc.compile_ptx(sources.source(found.family), found.defines, 90)
        fused.append("fma.rn" in ptx)
    assert not fused[1]
    assert fused[0] or by_row is None  # products of messages are rounded in any case


def test_the_text_says_what_it_computes():
    of = Expression((Input("j", "row"), Input("i", "row")), 1,
                    (Step("sub", (0, 1)), Step("tanh", (3,)), Step("mul", (2, 4))), 5)
    for text in (message_text.forward(of), message_text.backward(of, (True, True), True)):
        assert "message = (n0 * tanh((j0 - i0)))" in text
