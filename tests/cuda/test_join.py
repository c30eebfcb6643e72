"""Joining the edges of several types, against the same written out part by part."""
from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.structures import join
from gnnaccel.cuda.structures.join import Range
from tests.helpers import on_devices

pytestmark = pytest.mark.usefixtures("poison")

FORMS = ("rows", "turned", "strided", "apart")


def formed(edge_index: torch.Tensor, form: str):
    """The same edges laid out in another way."""
    if form == "turned":
        return edge_index.t().contiguous().t()
    if form == "strided":
        return torch.stack([edge_index, edge_index - 7], dim=2).flatten(1)[:, ::2]
    if form == "apart":
        src, dst = edge_index.unbind(0)
        return src.clone(), torch.stack([dst, dst + 3], dim=1)[:, 0]
    return edge_index


def typed(counts, device, dtype=torch.int64):
    """Edges of as many types, and the ranges of their nodes; each type has nodes of its own."""
    ranges, src, dst = [], 0, 0
    for at in range(len(counts)):
        num_src, num_dst = 3 + at % 5, 1 + at % 4
        ranges.append(Range(len(counts) - at, src, num_src, dst, num_dst))
        src, dst = src + num_src, dst + num_dst
    edges = [torch.stack([torch.randint(0, into.num_src, (n,)),
                          torch.randint(0, into.num_dst, (n,))]).to(device, dtype)
             for n, into in zip(counts, ranges)]
    return edges, ranges


def model(edges, ranges):
    """(src, dst, relation) as lists; ids out of range are -1; and the first end that has some."""
    src, dst, relation, wrong = [], [], [], 2 * len(ranges)
    for at, (part, into) in enumerate(zip(edges, ranges)):
        ids = [list(range(into.num_src))] * 2 if part is None else [end.tolist() for end in part]
        limits = (src, into.src, into.num_src), (dst, into.dst, into.num_dst)
        for end, (found, first, count) in enumerate(limits):
            found += [first + i if 0 <= i < count else -1 for i in ids[end]]
            if not all(0 <= i < count for i in ids[end]):
                wrong = min(wrong, 2 * at + end)
        relation += [into.relation] * len(ids[0])
    return src, dst, relation, wrong


def judge(edges, ranges, device, given=None):
    found = join.join(edges if given is None else given, ranges, device)
    ends = found[:3]
    assert all(t.dtype is torch.int32 and t.is_contiguous() and t.device == device for t in ends)
    assert (*(t.tolist() for t in ends), *found.wrong.tolist()) == model(edges, ranges)
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS)
def test_forms(device, form, dtype):
    edges, ranges = typed([40, 0, 1, 300, 7], device, dtype)
    judge(edges, ranges, device, [formed(t, form) for t in edges])


def test_each_part_in_a_form_of_its_own(device):
    edges, ranges = typed([20 + n for n in range(8)], device)
    mixed = [t.to(dtype) for t, dtype in zip(edges, itertools.cycle([torch.int32, torch.int64]))]
    judge(edges, ranges, device,
          [formed(t, form) for t, form in zip(mixed, [f for f in FORMS for _ in range(2)])])


@pytest.mark.parametrize("counts",
                         [[], [0], [0, 0, 0], [1], [256], [257], [513, 0], [0, 255, 0, 0, 1, 0]],
                         ids=str)
def test_sizes(device, counts):
    judge(*typed(counts, device), device)


def test_parts_of_types_without_nodes(device):
    edges = [torch.zeros(2, 0, dtype=torch.int64, device=device),
             torch.tensor([[0], [0]], device=device)]
    judge(edges, [Range(0, 0, 0, 0, 0), Range(1, 0, 0, 0, 1)], device)


@on_devices("parts", [700], [5000])
def test_many_parts(device, parts):
    edges, ranges = typed([at % 3 for at in range(parts)], device)
    edges[parts // 2][1, 0] = -1
    judge(edges, ranges, device)


@pytest.mark.parametrize("wrong", [-1, "count", 2**31, 2**32, -2**40])
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("part", [0, 2, 4])
def test_ids_out_of_range(device, part, end, wrong):
    edges, ranges = typed([30, 0, 9, 300, 1], device)
    edges[part][end, -1] = ranges[part][2 + 2 * end] if wrong == "count" else wrong
    found = judge(edges, ranges, device)
    assert found.wrong.tolist() == [2 * part + end]


def test_the_first_of_several_is_told(device):
    edges, ranges = typed([300, 300, 300], device)
    edges[1][:, 5], edges[2][0, :] = -1, 2**20
    assert judge(edges, ranges, device).wrong.tolist() == [2]


def test_negative_ids_of_32_bits(device):
    edges, ranges = typed([5, 5], device, torch.int32)
    edges[1][1, 2] = -3
    judge(edges, ranges, device)


def test_parts_that_count_upwards(device):
    edges, ranges = typed([30, 5], device)
    loops = [Range(1, 4, 300, 2, 300), Range(0, 0, 0, 9, 0), Range(7, 2, 1, 0, 1)]
    judge([*edges, None, None, None], [*ranges, *loops], device)
    judge([None, edges[0]], [loops[0], ranges[0]], device)


def test_the_last_ids_that_fit(device):
    most = 2**31 - 1
    found = judge([torch.tensor([[3], [0]], device=device)], [Range(most, most - 3, 4, most, 1)],
                  device)
    assert found.src.tolist() == found.dst.tolist() == found.relation.tolist() == [most]


def test_one_after_the_other_without_waiting(device):
    """Memory that a table is copied from may be used for the next one only when the copy is
    done."""
    made = [typed([n, 3, n // 2], device) for n in range(40)]
    found = [join.join(edges, ranges, device) for edges, ranges in made]
    for joined, (edges, ranges) in zip(found, made):
        assert (*(t.tolist() for t in joined[:3]), *joined.wrong.tolist()) == model(edges, ranges)


def test_any_order_of_threads():
    from tests.emulation.emulator import EmulatedDriver
    device = torch.device("cpu")
    edges, ranges = typed([300, 2, 300], device)
    edges[2][1, 7] = edges[0][1, 9] = 50
    for order in ("reversed", "uneven"):
        with driver.using(EmulatedDriver(order, seed=3)):
            judge(edges, ranges, device)


def test_one_launch(device):
    class Counting:
        def __init__(self, inner):
            self.inner, self.name, self.entries = inner, inner.name, []

        def kernel(self, family, entry, defines):
            launch = self.inner.kernel(family, entry, defines)
            return lambda *args: (self.entries.append(entry), launch(*args))

    edges, ranges = typed([5] * 30, device)
    with driver.using(Counting(driver.current())) as counting:
        join.join(edges, ranges, device)
    assert counting.entries == ["join"]


def test_what_does_not_fit_is_named(device):
    with pytest.raises(KeyError, match="int16"):
        join.join([torch.zeros(2, 3, dtype=torch.int16, device=device)], [Range(0, 0, 1, 0, 1)],
                  device)
    many = torch.zeros(2, 1, dtype=torch.int64, device=device).expand(2, 2**30)
    with pytest.raises(ValueError, match=f"{2**31} edges"):
        join.join([many, many], [Range(0, 0, 1, 0, 1)] * 2, device)
    with pytest.raises(ValueError):
        join.join([many], [], device)


@st.composite
def problems(draw):
    """For each part: nodes at both ends, edges, how they lie, whether ids have 64 bits, whether it
    only counts."""
    pairs = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), max_size=9)
    part = st.tuples(st.integers(0, 3), st.integers(0, 3), pairs, st.sampled_from(FORMS),
                     st.booleans(), st.booleans())
    return draw(st.lists(part, max_size=7))


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_any_parts(device, problem):
    edges, given, ranges = [], [], []
    for at, (num_src, num_dst, pairs, form, wide, counts) in enumerate(problem):
        t = torch.tensor(pairs, dtype=torch.int64 if wide else torch.int32,
                         device=device).view(-1, 2).t().contiguous()
        ranges.append(Range(at % 3, 5 * at, num_src, 3 * at, num_src if counts else num_dst))
        edges.append(None if counts else t)
        given.append(None if counts else formed(t, form))
    judge(edges, ranges, device, given)
