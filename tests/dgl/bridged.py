"""What the bridge's tests share: the device on which they run, and results held against the same
operation on the host."""
from __future__ import annotations

from collections.abc import Mapping

import dgl
import pytest
import torch
from torch import Tensor

import gnnaccel
from tests.dgl import graphs, simulated


def _gpu(monkeypatch) -> torch.device:
    from gnnaccel.adapters.dgl import bridge

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    gnnaccel.enable()
    if not bridge.state()["active"]:
        pytest.skip(bridge.state()["text"])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """A device that the bridge is in for, simulated on the CPU or a GPU; gnnaccel is enabled."""
    if request.param == "cuda":
        yield _gpu(monkeypatch)
        return
    with simulated.device(monkeypatch) as found:
        gnnaccel.enable(backend="torch")
        yield found
        gnnaccel.disable()


@pytest.fixture
def gpu_place(monkeypatch):
    """A GPU; for tests marked ``gpu``."""
    return _gpu(monkeypatch)


# --- graphs with features, on the host ------------------------------------------------------------

def homogeneous() -> dgl.DGLGraph:
    g = graphs.square()
    g.ndata["x"], g.edata["w"] = graphs.features(), torch.rand(g.num_edges(), 1)
    return g


def csc() -> dgl.DGLGraph:
    """Made of a CSC in which edges do not lie in the order of their ids."""
    indptr, src, _ = graphs.square().adj_tensors("csc")
    return dgl.graph(("csc", (indptr, src, torch.randperm(len(src)))), num_nodes=graphs.N)


def int32() -> dgl.DGLGraph:
    return homogeneous().int()


def hetero() -> dgl.DGLGraph:
    g = dgl.heterograph({("a", "r", "b"): ([0, 1, 1, 2], [1, 0, 2, 2]),
                         ("b", "s", "a"): ([0, 2], [1, 1]), ("a", "t", "b"): ([1, 0], [0, 1]),
                         ("a", "l", "a"): ([0, 1, 2], [1, 2, 0])})
    for kind in g.ntypes:
        g.nodes[kind].data["x"] = torch.randn(g.num_nodes(kind), 5)
    for etype in g.canonical_etypes:
        g.edges[etype].data["w"] = torch.rand(g.num_edges(etype), 1)
    return g


def block() -> dgl.DGLGraph:
    return graphs.block()


def batched() -> dgl.DGLGraph:
    return dgl.batch([homogeneous() for _ in range(3)])


# --- comparing ------------------------------------------------------------------------------------

def ids(g: dgl.DGLGraph, values: list[int]) -> Tensor:
    """Ids as the graph takes them."""
    return torch.tensor(values, dtype=g.idtype, device=g.device)


def against_host(make, question, place) -> None:
    """``question`` of the graph that ``make`` makes gets the same answer on ``place`` as on the
    host."""
    g = make()
    want = question(g)
    same(question(g.to(place)), want, place)


def same(got, want, place, where: str = "result") -> None:
    """``got`` lies on ``place`` and says the same as ``want``, which lies on the host."""
    assert type(got).__name__.replace("OnDevice",
                                      "Tensor") == type(want).__name__.replace("OnDevice",
                                                                               "Tensor"), where
    if isinstance(want, dgl.DGLGraph):
        _same_graph(got, want, place, where)
    elif isinstance(want, Tensor):
        assert got.device == place and want.device.type == "cpu", f"{where} is on {got.device}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-3, atol=1e-4,
                                   equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, Mapping):
        assert set(got) == set(want), where
        for key in want:
            same(got[key], want[key], place, f"{where}[{key!r}]")
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), where
        for i, (a, b) in enumerate(zip(got, want)):
            same(a, b, place, f"{where}[{i}]")
    else:
        assert got == want, f"{where}: {got}, not {want}"


def _same_graph(got, want, place, where):
    assert got.device == place and want.device.type == "cpu", f"{where} is on {got.device}"
    assert (got.idtype, got.ntypes,
            got.canonical_etypes) == (want.idtype, want.ntypes, want.canonical_etypes), where
    assert (got.is_block, got.batch_size) == (want.is_block, want.batch_size), where
    for etype in range(len(want.canonical_etypes)):
        same(got._graph.edges(etype, "eid")[:2], want._graph.edges(etype, "eid")[:2], place,
             f"{where}'s edges {etype}")
    for frames in ("_node_frames", "_edge_frames"):
        for kind, (a, b) in enumerate(zip(getattr(got, frames), getattr(want, frames))):
            assert a.num_rows == b.num_rows, f"{where}.{frames}[{kind}]"
            same(dict(a), dict(b), place, f"{where}.{frames}[{kind}]")
