"""Attention by kernels that are written for it, against torch's operations in fp64."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.messages.expression import Expression, Input, Step
from gnnaccel.dispatch.generated import messages
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.ops.graph import OpGraph
from tests.cuda.test_generated_compile import ATTENTION

N = 30
#: softmax(i * j) * j, of one number for each head in the score
PLAIN = Expression((Input("i", "head"), Input("j", "head"), Input("j", "row")), 0,
                   (Step("mul", (0, 1)),), 2, 3)


def graph(device: torch.device, hub: bool = False) -> OpGraph:
    """Some nodes have no edges, one has a single one, and one has 3,000 if it is a ``hub``."""
    ei = torch.randint(0, N - 3, (2, 200))
    ei[1, ei[1] == 5] = 6
    ei[1, 17] = 5
    if hub:
        more = torch.randint(0, N, (2, 6000))
        more[1, :3000], more[0, 3000:] = 7, 8
        more[1, 3000:] %= 5
        ei = torch.cat([ei, more], 1)
    return OpGraph(ei.to(device), N, N)


def inputs(of: Expression, seen: tuple[int, int], over: OpGraph) -> list[torch.Tensor]:
    heads, width = seen
    sizes = {"row": heads * width, "head": heads, "one": 1}
    rows = {"i": N, "j": N, "e": over.num_edges, "p": 1}
    return [torch.randn(rows[one.end], sizes[one.mode], device=over.edge_index.device)
            for one in of.inputs]


def computed(of: Expression, seen, over: OpGraph, given: list[torch.Tensor], needs,
             exact: bool) -> list[torch.Tensor]:
    """The result, and the gradient of each input that needs one."""
    tensors = [(t.double() if exact else t).detach().requires_grad_(need)
               for t, need in zip(given, needs)]
    more = Generated(of, tuple(tensors), (0.2, 1.5)[:of.numbers], (seen[0] * seen[1],), seen)
    if exact:
        index = over.edge_index[1]
        made = messages.made(over, more)
        out = made.new_zeros(N, made.shape[1]).index_add(0, index, made)
    else:
        out = messages.run(over, "sum", more)
    grads = torch.autograd.grad(out, [t for t in tensors if t.requires_grad],
                                torch.linspace(-1, 1, out.numel()).to(out).view(out.shape).sin())
    return [out.detach(), *grads]


def check(of: Expression, seen, over: OpGraph, given, needs=None) -> list[torch.Tensor]:
    needs = needs or (True,) * len(of.inputs)
    got, exact = (computed(of, seen, over, given, needs, way) for way in (False, True))
    for a, b in zip(got, exact):
        scale = b[b.isfinite()].abs().max().clamp(min=1.0)
        assert torch.allclose(a.double() / scale, b / scale, 1e-4, 2e-5, equal_nan=True)
    return got


@pytest.mark.long
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("seen", [(2, 8), (1, 64), (3, 5), (40, 4), (1, 130), (8, 8)])
def test_all_kinds_of_inputs(device, seen, hub):
    over = graph(device, hub)
    check(ATTENTION, seen, over, inputs(ATTENTION, seen, over))


@pytest.mark.long
@pytest.mark.parametrize("left_out", range(len(ATTENTION.inputs)))
def test_single_gradients(device, left_out):
    """One input alone wants a gradient, or all others."""
    over, seen = graph(device), (2, 8)
    given = inputs(ATTENTION, seen, over)
    for alone in (True, False):
        check(ATTENTION, seen, over, given,
              tuple((k == left_out) is alone for k in range(len(given))))


@pytest.mark.parametrize("hub", [False, True])
def test_scores_without_sums(device, hub):
    over = graph(device, hub)
    check(PLAIN, (4, 8), over, inputs(PLAIN, (4, 8), over))


@pytest.mark.parametrize("hub", [False, True])
def test_large_scores_and_masks(device, hub):
    """Scores of hundreds; edges of -inf beside others weigh nothing, and a row of such alone is
    NaN, as is one with inf or NaN."""
    over = graph(device, hub)
    given = inputs(PLAIN, (4, 8), over)
    given[0], given[1] = ((t * 16.0).round() for t in given[:2])  # so that products are exact
    given[0][:, 0], given[1][:, 0] = 1.0, torch.randn(N)
    given[1][::3, 0] = -float("inf")
    check(PLAIN, (4, 8), over, given)
    for value in (-float("inf"), float("inf"), float("nan")):
        given[1][:, 1], given[0][:, 1] = value, 1.0
        got = check(PLAIN, (4, 8), over, given)
        some = over.edge_index[1].unique()
        assert got[0].view(N, 4, 8)[some, 1].isnan().all()
        assert got[0].view(N, 4, 8)[some][:, 2:].isfinite().all()


def test_a_single_edge_has_no_gradient_of_its_score(device):
    """Not even by rounding: an optimizer would make steps of it."""
    ei = torch.stack([torch.randint(0, N, (N,)), torch.arange(N)])
    over = OpGraph(ei.to(device), N, N)
    given = inputs(ATTENTION, (2, 8), over)
    got = computed(ATTENTION, (2, 8), over, given, (True,) * len(given), False)
    for k, one in enumerate(ATTENTION.inputs, 1):
        zero = one.end in "pe" and k != 6 or k in (2, 7)
        assert (got[k] == 0).all() == zero, one


def test_results_repeat(device):
    over = graph(device, True)
    given = inputs(ATTENTION, (2, 8), over)
    runs = [computed(ATTENTION, (2, 8), over, given, (True,) * len(given), False) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_results_may_be_changed_in_place(device):
    over = graph(device)
    given = inputs(PLAIN, (4, 8), over)
    found = []
    for changed in (False, True):
        tensors = [t.detach().requires_grad_() for t in given]
        out = messages.run(over, "sum", Generated(PLAIN, tuple(tensors), (), (32,), (4, 8)))
        out = out.mul_(2.0) if changed else out * 2.0
        found.append(torch.autograd.grad(out.sin().sum(), tensors))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_no_other_reductions(device):
    from gnnaccel.dispatch.ops import aggregation_messages
    from gnnaccel.dispatch.ops.aggregation import Aggregation
    from gnnaccel.dispatch.policy.reasons import Reason

    over = graph(device)
    more = Generated(PLAIN, tuple(inputs(PLAIN, (4, 8), over)), (), (32,), (4, 8))
    for reduce in ("mean", "max"):
        given = Aggregation(reduce, more.inputs[2], None, (32,), more)
        assert type(aggregation_messages.kernel(over, given)) is Reason
