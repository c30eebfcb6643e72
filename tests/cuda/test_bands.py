"""Rows gathered in bands of their channels: when, and that results are those of whole rows."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gnnaccel.cuda.attention import additive as additive_kernels, pairwise as pairwise_kernels
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.traverse import aggregate
from tests.attention_cases import additive, check, graph, pairwise
from tests.cuda import test_aggregate as sums
from tests.helpers import on_devices

pytestmark = pytest.mark.usefixtures("poison")
CPU = torch.device("cpu")
HUB = dict(nodes=200_000, rows=200_000, edges=20_000_000, device=CPU, size=4)


@pytest.fixture
def cache(monkeypatch):
    """``cache(bytes)``: the L2 is that large, and no rows are too few."""
    def of(size: int) -> None:
        monkeypatch.setattr(bands, "LEAST", 0)
        monkeypatch.setattr(bands, "l2_bytes", lambda device: size)
    return of


@pytest.mark.parametrize("wanted, change", [
    (True, {}), (False, dict(row=256, nodes=100_000)), (False, dict(edges=1_000_000)),
    (False, dict(rows=2_000_000)),
    (False, dict(nodes=2_400_000, rows=2_400_000, edges=124_000_000)), (False, dict(least=512)),
    (True, dict(least=256)),
    (False, dict(row=128)), (False, dict(row=256, nodes=230_000, size=2)),
    (True, dict(row=256, nodes=230_000)),
], ids=lambda value: str(value))
def test_when_bands_pay(cache, wanted, change):
    cache(60 * 2**20)
    assert bands.pay(**{**HUB, "row": 512, **change}) is wanted


def test_few_rows_are_left_whole_without_a_look_for_other_kernels(monkeypatch):
    looked = []
    for module in (aggregate, additive_kernels):
        monkeypatch.setattr(module, "_in_bands", lambda variant,
                            *more: looked.append(variant) or (variant,))
    monkeypatch.setattr(bands, "l2_bytes", lambda device: 2**25)
    float32, many, least = torch.float32, 20_000_000, bands.LEAST // (8 * 64 * 4)
    for whole in (aggregate.variant(8, 64, float32, float32, "head", "place", False, False, False),
                  additive_kernels.variant(8, 64, float32, float32, False, False, True, False)):
        assert whole.banded(least - 1, least - 1, many, CPU) is whole and not looked
        whole.banded(2 * least, 1000, many, CPU)
        assert looked.pop() is whole


def test_never_where_no_cache_is_known():
    assert bands.l2_bytes(CPU) == 0 and not bands.pay(**HUB, row=512)


@pytest.mark.parametrize("total, size, some",
                         [(128, 4, 32), (256, 2, 64), (100, 4, 20), (160, 4, 32), (602, 4, 0),
                          (96, 2, 48), (131, 4, 0), (24, 4, 24)])
def test_bands_divide_rows(total, size, some):
    assert bands.channels(total, size) == some


def test_heads_of_a_band():
    assert [bands.heads(width, 4)
            for width in (1, 8, 16, 24, 32, 64, 512)] == [32, 4, 2, 1, 1, 1, 1]


@on_devices("heads,width,weight,row",
            [(1, 128, "edge", torch.float32), (4, 32, "head", torch.float32),
             (1, 256, "none", torch.bfloat16), (8, 12, "head", torch.float32)],
            [(h, d, kind, torch.float32)
             for h, d in ((1, 128), (1, 100), (4, 64), (3, 40), (16, 16)) for kind in sums.KINDS]
            + [(h, d, kind, torch.float16) for h, d in ((1, 128), (4, 64), (3, 80))
               for kind in sums.KINDS if (h, kind) != (1, "head")])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_sums(device, chunk_edges, cache, heads, width, weight, row, chunk):
    chunk_edges(chunk)
    rows = graph(device, 20, 20, 700).csc()
    cache(14 * heads * width * row.itemsize)
    for more in (dict(), dict(scale=True, bias=True), dict(mean=True, at="place")):
        problem = sums.make(rows, 20, heads, width, weight, row=row, **more)
        cut = problem.variant.banded(20, rows.rows, rows.other.shape[0], rows.other.device)
        assert cut is not problem.variant and cut.layout.tiles > problem.variant.layout.tiles
        sums.check(problem)


def test_rows_aligned_for_narrow_loads_only(device, cache):
    """A band would be loaded four channels at once, its rows whole only one by one."""
    rows = graph(device, 20, 20, 700).csc()
    cache(20 * 96 * 2)
    narrow = aggregate.variant(32, 3, torch.float32, torch.float32, "none", "position", False,
                               False, False)
    assert narrow.banded(20, 20, 700, device) is narrow
    memory = torch.randn(20 * 96 + 1, device=device)
    sums.check(sums.Sum(narrow, rows, memory[1:].view(20, 32, 3)))


def test_int8_and_rows_of_edges_go_whole(cache):
    cache(1000)
    for whole in (aggregate.variant(1, 512, torch.int8, torch.float32, "none", "position", False,
                                    False, False),
                  aggregate.variant(1, 512, torch.float32, torch.float32, "none", "position", True,
                                    False, False)):
        assert whole.banded(7, 7, 700, CPU) is whole


@on_devices("heads,width,edge,dropout",
            [(8, 8, False, 0.0), (4, 32, True, 0.3), (3, 40, False, 0.0)],
            [(h, d, e, p) for h, d in ((8, 8), (16, 8), (4, 64), (3, 40))
             for e, p in ((False, 0.0), (True, 0.3))])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_attention(device, chunk_edges, cache, heads, width, edge, dropout, chunk):
    chunk_edges(chunk)
    whole = additive_kernels.variant(heads, width, torch.float32, torch.float32)
    cache(20 * max(heads * width * 2, width * 4))
    for back in (False, True):
        cut = whole.banded(20, 20, 700, device, back)
        assert cut is not whole and cut.layout.tiles > whole.layout.tiles
    check(additive(graph(device, 20, 20, 700), heads, width, "same", edge, dropout))


@on_devices("score,heads,width,edge,dropout",
            [("dot", 4, 32, True, 0.3), ("gatv2", 4, 32, False, 0.0),
             ("cosine", 3, 40, False, 0.0)],
            [(score, h, d, e, p) for score in ("gatv2", "dot", "mx", "sd")
             for h, d in ((4, 64), (3, 40))
             for e, p in ((False, 0.0), (score in ("gatv2", "dot"), 0.3))])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_pairwise_attention(device, chunk_edges, cache, score, heads, width, edge, dropout, chunk):
    chunk_edges(chunk)
    problem = pairwise(score, graph(device, 20, 20, 700), heads, width, edge, dropout)
    arrays = 2 if score == "dot" else 1
    cache(20 * arrays * heads * width * 2)
    whole = pairwise_kernels.variant(heads, width, torch.float32, torch.float32, score=score)
    cut = whole.banded(20, problem.graph.csc(), arrays)
    assert cut is not whole and cut.layout.tiles > whole.layout.tiles
    check(problem)


def test_pairwise_attention_of_narrow_heads_goes_whole(cache):
    cache(20 * 32 * 4 * 4)
    rows = SimpleNamespace(rows=20, other=torch.zeros(700))
    whole = [pairwise_kernels.variant(heads, 128 // heads, torch.float32, torch.float32)
             for heads in (8, 4)]
    assert [one.banded(20, rows, 2).tile for one in whole] == [0, 1]


def test_one_head_and_int8_values_go_whole(cache):
    cache(1000)
    for whole in (additive_kernels.variant(1, 256, torch.float32, torch.float32),
                  additive_kernels.variant(4, 64, torch.int8, torch.float32)):
        assert whole.banded(3, 3, 700, CPU) is whole
    assert additive_kernels.variant(4, 64, torch.int8,
                                    torch.float32).banded(3, 3, 700, CPU, True).tile == 1
