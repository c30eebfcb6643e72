"""Choosing a route: what speaks against a kernel is found out before anything runs."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.plan import cost, planner
from gnnaccel.dispatch.plan.request import EXPECTED, Request
from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.policy.reasons import KINDS


class Broken:
    """A driver whose kernels of one family do not compile."""

    name = "broken"

    def __init__(self, family: str):
        self.family = family

    def kernel(self, family: str, entry: str, defines: tuple = ()):
        if family == self.family:
            raise driver.CompileError(f"{family}.cu did not compile\nand here is why")
        return lambda grid, threads, shared, args: None


@pytest.fixture(autouse=True)
def fresh_memo():
    planner.forget()
    yield
    planner.forget()


def request(program=None, row=torch.float32, width=8, grad=True, device="cpu"):
    program = program or attention_programs.gat(0.2, 0.0, True, True, False)
    return Request(program, "GATConv", 8, width, row, row, device, 12, 12, 14, grad, False)


def plan(asked, **options):
    return planner.plan(asked,
                        config.with_epoch(config.make({"when": "supported", "backend": "cuda",
                                                       **options})))


@pytest.mark.parametrize("family, grad",
                         [("additive", False), ("additive_backward", True), ("head_dot", False)])
def test_a_kernel_that_does_not_compile_is_a_reason(family, grad):
    with driver.using(Broken(family)):
        found = plan(request(grad=grad))
    assert found.route == "native" and found.code == "GA403"
    assert any(r.text == f"{family}.cu did not compile" for _, r in found.rejected)


def test_a_kernel_that_is_not_needed_may_fail():
    with driver.using(Broken("additive_backward")):
        assert plan(request(grad=False)).route == "cuda"


@pytest.mark.parametrize("asked, code", [
    (request(row=torch.float64), "GA203"),
    (request(width=513), "GA207"),
    (request(attention_programs.gat(-0.1, 0.0, True, True, False)), "GA208"),
])
def test_what_kernels_cannot_do(asked, code):
    with driver.using(Broken("none")):
        found = plan(asked)
    assert found.route == "native" and found.code == code


def test_without_a_device_the_environment_is_the_reason():
    found = plan(request())
    assert found.route == "native" and found.code == "GA401"


def test_the_cheapest_candidate_is_taken_and_the_others_say_why():
    with driver.using(Broken("none")):
        found = plan(request())
    assert found.route == "cuda" and found.seconds is not None
    assert "GA302" in {r.code for _, r in found.rejected} <= set(KINDS)


def test_plans_are_memoised_by_request_and_options():
    with driver.using(Broken("none")):
        asked = request()
        assert plan(asked) is plan(request())
        assert plan(request(grad=False)) is not plan(asked)
        assert plan(asked, backend="torch").route == "torch"


def gains(fresh, grad, loops, layer="GATConv", bits=13):
    """Whether a call over a small graph on a GPU is estimated to gain by kernels."""
    asked = request(device="cuda", grad=grad)._replace(fresh=fresh, loops=loops, native=layer,
                                                       edge_bits=bits)
    attention = attention_programs.attention(asked.program)
    return cost.fused(asked, attention) < cost.native(asked)


@pytest.mark.parametrize("grad", [False, True])
def test_calls_share_the_price_of_a_new_structure(grad):
    """Where one call alone does not pay for it, two do; more do where fewer did; known graphs
    always gain. On an H100 one `GATConv` over a new graph of 5,200 edges takes 0.6 of the host's
    time, one `TransformerConv` as long, and two of these less."""
    for layer in ("GATConv", "GATv2Conv", "AGNNConv"):
        assert gains(1, grad, False, layer) and gains(1, grad, True, layer)
    found = [gains(calls, grad, False, "TransformerConv") for calls in range(1, EXPECTED + 1)]
    assert found == [False] + [True] * (EXPECTED - 1)
    assert gains(0, grad, False, "TransformerConv")
    # a structure of more edges takes several launches
    assert gains(1, grad, False, bits=14) is not grad and gains(2, grad, False, bits=14)


def test_what_the_host_does_for_self_loops_is_saved_where_it_does_it():
    with_loops, without = (request(device="cuda")._replace(fresh=1, loops=loops)
                           for loops in (True, False))
    assert cost.native(with_loops) > cost.native(without)
    assert cost.native(with_loops._replace(fresh=0)) == cost.native(without._replace(fresh=0))
