"""How many bands there are, and what each of them knows."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.distributed.building import EDGE
from gnnaccel.dispatch.distributed.ranges import BETWEEN
from gnnaccel.dispatch.offload import plan
from gnnaccel.dispatch.offload.memory import Memory, count
from gnnaccel.dispatch.offload.sizes import Widths
from gnnaccel.errors import GraphError, OffloadError

CPU = torch.device("cpu")
WIDTHS = Widths(512, 0, 512, False, True)


def places(where):
    return torch.arange(where.start, where.stop) if isinstance(where, slice) else where.long()


@pytest.mark.parametrize("chunk", [7, 1 << 26])
@pytest.mark.parametrize("room", [0, 10**9])
@pytest.mark.parametrize("sizes, relation", [((50, 50), EDGE), ((70, 20), BETWEEN),
                                             ((3, 40), BETWEEN)])
def test_bands_have_each_edge_once(sizes, relation, chunk, room, monkeypatch):
    monkeypatch.setattr(plan, "_CHUNK", chunk)
    edges = torch.stack([torch.randint(0, size, (300,)) for size in sizes])
    bands = plan.cut(edges, sizes, relation, 6, Memory(CPU), room)
    ids, own = [], {kind: [] for kind in bands.sizes}
    for band in bands.bands:
        for kind in own:
            own[kind].append(places(band.own[kind]))
        sources = torch.cat([places(band.own[bands.source]), places(band.halo)])
        found = torch.stack([sources[band.edges[0].long()],
                             places(band.own[bands.target])[band.edges[1].long()]])
        assert torch.equal(found, edges[:, band.edge_ids.long()])
        assert (band.edge_ids.diff() > 0).all()  # in the graph's order
        ids.append(band.edge_ids)
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(300, dtype=torch.int32))
    for kind, ranges in own.items():
        assert torch.equal(torch.cat(ranges), torch.arange(bands.sizes[kind]))
    assert bands.rows("edges") == 300


def test_a_range_that_is_nearly_full_is_copied_whole():
    edges = torch.stack([torch.arange(50), torch.zeros(50, dtype=torch.long)])
    edges[0, 30] = 31  # one row that is not needed
    first = plan.cut(edges, (50, 50), EDGE, 2, Memory(CPU)).bands[0]
    assert first.own["node"] == slice(0, 1) and first.halo == slice(1, 50)
    few = plan.cut(edges[:, ::5], (50, 50), EDGE, 2, Memory(CPU)).bands[0]
    assert few.halo.dtype == torch.int32 and count(few.halo) == 6


def test_empty_graphs():
    none = torch.empty(2, 0, dtype=torch.long)
    bands = plan.cut(none, (5, 5), EDGE, 3, Memory(CPU))
    assert [band.own["node"].stop - band.own["node"].start for band in bands.bands] == [2, 1, 2]
    empty, = plan.cut(none, (0, 0), EDGE, 3, Memory(CPU)).bands
    assert empty.count("node") == 0 and not bands.again()


def test_nodes_that_do_not_exist_and_numbers_that_are_too_large():
    for wrong in ([[0], [5]], [[-1], [0]], [[7], [0]]):
        with pytest.raises(GraphError, match="names nodes"):
            plan.cut(torch.tensor(wrong), (7, 5), BETWEEN, 1, Memory(CPU))
    with pytest.raises(OffloadError, match="2.31"):
        plan.cut(torch.zeros(2, 0, dtype=torch.long), (2**31, 5), BETWEEN, 1, Memory(CPU))


def test_the_number_of_bands():
    sizes, edges = (1_000_000, 1_000_000), 16_000_000
    parts = [WIDTHS.parts(sizes, edges, room) for room in (10**12, 5 * 10**9, 2 * 10**9, 10**9,
                                                           5 * 10**8, 10**8, 10**6)]
    assert parts == sorted(parts) and parts[0] == 1
    for one, room in zip(parts[:5], (10**12, 5 * 10**9, 2 * 10**9, 10**9, 5 * 10**8)):
        own = sizes[0] // one
        assert WIDTHS.need(own, 0, edges // one) <= room
    assert len({*parts, *(WIDTHS.parts(sizes, edges, 10**9 + step * 10**7)
                          for step in range(20))}) < 10
    assert WIDTHS.parts((3, 3), 5, 1) == 3
    # as many as overlap, where the rows are some GB
    assert WIDTHS.parts((10**7, 10**7), 10**7, 10**15) == 8


def test_room_is_left_for_rows_that_all_bands_need_where_they_fit():
    assert WIDTHS.near(900, 1_000_000) == int(900 * (512 * 1.1 + 8))
    assert WIDTHS.near(1040, 1_000_000) == 550_000
    assert WIDTHS.near(1100, 1_000_000) == 0
    assert WIDTHS._replace(node=0).near(10, 1_000_000) == 0  # rows of edges alone
    assert WIDTHS._replace(widest=64).near(5000, 1_000_000) == 550_000  # after a linear map
