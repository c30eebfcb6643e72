"""Launches as counted, against those that are made: our kernels and torch's operations, forward and
backward."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnaccel.dispatch.relational import cuda_maps, cuda_program, cuda_steps, launches as counting
from gnnaccel.dispatch.relational.counting import shapes_of_all
from gnnaccel.dispatch.relational.execute import OPERATIONS, run
from gnnaccel.dispatch.relational.launches import launches
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.relational.request import shapes_of
from gnnaccel.dispatch.run import attention, written
from tests import relational_cases
from tests.emulation.emulator import EmulatedDriver, EmulatedKernel
from tests.relational_cases import STATEMENTS, statement, tensors, typed

#: layers whose orderings on a GPU are told apart by launches; of the others, some steps of backward
#: are only nearly right
EXACT = [name for name in STATEMENTS if name.startswith(("rgcn", "embedding", "rgat", "film"))
         and not any(word in name for word in ("raised", "product"))]
NEARLY = 3
#: features of a row, of the result, heads: gradients of products in one kernel, in two; score terms
#: that come with the attention
SIZES = (16, 16, 2), (4, 6, 2), (16, 16, 1)
CELLS = [(name, SIZES[0]) for name in STATEMENTS] + [(name, sizes) for name in ("rgcn mean", "rgat")
                                                     for sizes in SIZES[1:]]


class _Launches(TorchDispatchMode):
    """Counts operations of torch's that launch: neither views nor new memory."""

    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(r.alias_info is not None and not r.alias_info.is_write
                    for r in func._schema.returns)
        if (not views
            and not any(word in func._schema.name
                        for word in ("empty", "detach", "_unsafe_view", "set_"))):
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def made(monkeypatch):
    """``made(program, view, operands)``: how many launches a call over a known structure makes,
    (forward, backward)."""
    from gnnaccel.cuda.runtime import driver
    seen, call = Counter(), EmulatedKernel.__call__
    # copies of the first calls, until it is known what a caller writes to
    monkeypatch.setattr(written, "copies", lambda places, code, inputs, apart=0: (inputs, None))
    monkeypatch.setattr(EmulatedKernel, "__call__", lambda self,
                        *args: seen.update([self.entry]) or call(self, *args))

    def once(program, view, given):
        seen.clear()
        with _Launches(seen):
            if cuda_steps.steps_of(program) is not None:
                out = cuda_program.run(program, view, given)
            else:
                out = run(program, view, given, cuda_maps, attention.run_cuda)
        forward, grad = seen.total(), torch.ones_like(out)
        seen.clear()
        with _Launches(seen):
            torch.autograd.grad(out, [t for t in given.values() if t.requires_grad], grad)
        return forward, seen.total()

    with driver.using(EmulatedDriver()):
        yield lambda *args: (once(*args), once(*args))[1]  # the first builds index arrays


def test_every_operation_is_counted():
    assert set(counting._ONE_BY_ONE) == set(OPERATIONS)


@pytest.mark.parametrize("name, sizes", CELLS, ids=str)
def test_launches(made, monkeypatch, name, sizes):
    for what, size in zip(("K", "OUT", "HEADS"), sizes):
        monkeypatch.setattr(relational_cases, what, size)
    torch.manual_seed(0)
    graph = typed(edges=100, num_src=20, num_dst=20)
    for how, program in orderings(statement(name)):
        program = fuse(compact(program))
        given = tensors(name, graph, torch.float32)
        counted = launches(program, shapes_of_all(program, dict(shapes_of(program, given))))
        # by which no launch is spared
        for compacted in (True, False)[:1 + name.startswith("rgcn mean")]:
            found = made(program, graph.view(compact=compacted), given)
            assert counted[0] == found[0], how
            assert abs(counted[1] - found[1]) <= (0
                                                  if name in EXACT
                                                  else NEARLY), (how, counted, found)
