"""A DGL without CUDA on a device, simulated or real: every operation against the same on the
host."""
from __future__ import annotations

import gc
import weakref

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.heterograph_index import HeteroGraphIndex
from torch.utils._pytree import tree_leaves

import gnnaccel
from gnnaccel.adapters.dgl import graphs as adapter
from tests.dgl import bridged, simulated
from tests.dgl.bridged import against_host, ids, place, same  # noqa: F401  (a fixture)

HOMOGENEOUS = [bridged.homogeneous, bridged.csc, bridged.int32]

#: questions and changes that a graph of one relation takes; each gets the graph, on the host and on
#: the device
QUERIES = {
    "edges": lambda g: g.edges(),
    "edges all": lambda g: g.edges(form="all"),
    "edges by source": lambda g: g.edges(form="all", order="srcdst"),
    "find_edges": lambda g: g.find_edges(ids(g, [3, 0, 7])),
    "find_edges one": lambda g: g.find_edges(5),
    "edge_ids": lambda g: g.edge_ids(*g.find_edges(ids(g, [2, 140]))) * 0,  # of several parallel edges, any
    "edge_ids all": lambda g: [t.sort()[0] for t in g.edge_ids(ids(g, [7]), ids(g, [7]), return_uv=True)],
    "has_nodes": lambda g: g.has_nodes(ids(g, [0, 29, 30, 1000])),
    "has_nodes one": lambda g: g.has_nodes(3),
    "has_edges_between": lambda g: g.has_edges_between(ids(g, [7, 0]), ids(g, [7, 0])),
    "has_edges_between one": lambda g: g.has_edges_between(7, 7),
    "successors": lambda g: g.successors(7).sort()[0],
    "predecessors": lambda g: g.predecessors(7).sort()[0],
    "in_edges": lambda g: [t.sort()[0] for t in g.in_edges(ids(g, [3, 7]), form="all")],
    "out_edges": lambda g: [t.sort()[0] for t in g.out_edges([3, 7], form="all")],
    "in_degrees": lambda g: g.in_degrees(),
    "in_degrees some": lambda g: g.in_degrees(ids(g, [1, 3, 3])),
    "in_degrees one": lambda g: g.in_degrees(3),
    "out_degrees": lambda g: g.out_degrees(),
    "out_degrees some": lambda g: g.out_degrees(ids(g, [1, 5, 3])),
    "out_degrees one": lambda g: g.out_degrees(5),
    "nodes": lambda g: g.nodes(),
    "counts": lambda g: (g.num_nodes(), g.num_edges(), g.is_multigraph, str(g.idtype), g.is_pinned()),
    "batch_num_nodes": lambda g: (g.batch_num_nodes(), g.batch_num_edges(), g.batch_size),
    "filter_nodes": lambda g: g.filter_nodes(lambda nodes: nodes.data["x"][:, 0] > 0) if "x" in g.ndata else None,
}
@pytest.mark.parametrize("make", HOMOGENEOUS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", QUERIES)
def test_questions(name, make, place):
    against_host(make, QUERIES[name], place)


@pytest.mark.parametrize("make", [*HOMOGENEOUS, bridged.hetero, bridged.block, bridged.batched],
                         ids=lambda f: f.__name__)
def test_there_and_back(make, place):
    g = make()
    there = g.to(place)
    same(there, g, place)
    back = there.cpu()
    assert back.device.type == "cpu" and there.device == place
    for etype in g.canonical_etypes:
        assert all(torch.equal(a, b) for a, b in zip(back.edges(etype=etype), g.edges(etype=etype)))
        assert torch.equal(back.in_degrees(etype=etype), g.in_degrees(etype=etype))
    same(back.to(place), g, place)


MAKING = {
    "of tensors": lambda place: dgl.graph((torch.tensor([0, 1, 2], device=place),
                                           torch.tensor([1, 2, 0], device=place))),
    "of lists": lambda place: dgl.graph(([0, 1, 2], [1, 2, 0]), device=place),
    "int32": lambda place: dgl.graph(([0, 1, 2], [1, 2, 0]), idtype=torch.int32, device=place),
    "csc": lambda place: dgl.graph(("csc",
                                    (torch.tensor([0, 1, 2, 3], device=place),
                                     torch.tensor([2, 0, 1], device=place), [])),
                                   device=place),
    "row_sorted": lambda place: dgl.graph((torch.tensor([0, 1], device=place),
                                           torch.tensor([1, 0], device=place)),
                                          row_sorted=True),
    "no edges": lambda place: dgl.graph(([], []), num_nodes=4, device=place),
    "nothing": lambda place: dgl.graph(([], []), device=place),
    "hetero": lambda place: dgl.heterograph({("a", "r", "b"): ([0, 1], [1, 0]),
                                             ("b", "s", "a"): ([0], [1])}, device=place),
    "hetero of tensors": lambda place: dgl.heterograph({("a", "r",
                                                         "a"): (torch.tensor([0, 1], device=place),
                                                                ) * 2}),
    "block": lambda place: dgl.create_block(([0, 1], [1, 0]), num_src_nodes=3, num_dst_nodes=2,
                                            device=place),
}


@pytest.mark.parametrize("name", MAKING)
def test_making(name, place):
    got, want = MAKING[name](place), MAKING[name](torch.device("cpu"))
    same(got, want, place)
    assert got.device == place


def test_devices_are_spelled_as_torch_spells_them(place):
    g = bridged.homogeneous()
    for spelling in ("cuda", f"cuda:{place.index}", torch.device("cuda"), place):
        assert g.to(spelling).device == place
    assert g.to(place).to(place).device == place


def test_frames(place):
    g = bridged.homogeneous().to(place)
    x = g.ndata["x"]
    assert x.device == place
    with g.local_scope():
        g.ndata["y"] = x + 1
        g.ndata.pop("x")
    assert "y" not in g.ndata and g.ndata["x"] is not None
    g.ndata["z"] = x.new_zeros(len(x))
    with pytest.raises(dgl.DGLError, match="device"):
        g.ndata["bad"] = torch.zeros(len(x), device="cpu")
    sub = g.subgraph(ids(g, [1, 3]))
    assert torch.equal(sub.ndata["x"].cpu(), x[[1, 3]].cpu()) and sub.ndata["x"].device == place
    assert sub.ndata[dgl.NID].device == place


def test_ids_of_the_wrong_device_are_refused_as_ever(place):
    g = bridged.homogeneous()
    with pytest.raises(dgl.DGLError, match="device"):
        g.to(place).in_degrees(torch.tensor([1], device="cpu"))
    with pytest.raises(dgl.DGLError, match="device"):
        g.in_degrees(torch.tensor([1], device=place))


# --- messages, readouts, layers -------------------------------------------------------------------

def pairs_of(g):
    """An edge-wise and a degree-wise function of the user's."""
    g.apply_edges(lambda edges: {"d": edges.src["x"] - edges.dst["x"]})
    g.update_all(lambda edges: {"m": edges.data["d"] * edges.data["w"]},
                 lambda nodes: {"o": nodes.mailbox["m"].max(1)[0]})
    return g.edata["d"], g.ndata["o"]


def builtins_of(g):
    g.update_all(fn.u_mul_e("x", "w", "m"), fn.mean("m", "o"))
    g.apply_edges(fn.u_dot_v("x", "x", "s"))
    return (g.ndata["o"], g.edata["s"], dgl.ops.edge_softmax(g, g.edata["s"]),
            dgl.ops.copy_u_max(g, g.ndata["x"]))


def hetero_messages(g):
    g.multi_update_all({"r": (fn.copy_u("x", "m"), fn.sum("m", "o")),
                        "t": (fn.u_mul_e("x", "w", "m"), fn.max("m", "o"))}, "sum")
    return g.nodes["b"].data["o"]


@pytest.mark.parametrize("make,messages",
                         [(bridged.homogeneous, pairs_of), (bridged.homogeneous, builtins_of),
                          (bridged.int32, builtins_of), (bridged.hetero, hetero_messages)],
                         ids=["functions", "builtins", "builtins int32", "hetero"])
def test_messages(make, messages, place):
    against_host(make, lambda g: messages(g.local_var()), place)


READOUTS = {
    "sum": lambda g: dgl.sum_nodes(g, "x"),
    "mean": lambda g: dgl.mean_nodes(g, "x"),
    "max": lambda g: dgl.max_nodes(g, "x"),
    "weighted": lambda g: dgl.sum_edges(g, "w"),
    "readout": lambda g: dgl.readout_nodes(g, "x", op="min"),
    "softmax": lambda g: dgl.softmax_nodes(g, "x"),
    "softmax of edges": lambda g: dgl.softmax_edges(g, "w"),
    "broadcast": lambda g: dgl.broadcast_nodes(g, dgl.sum_nodes(g, "x")),
    "topk": lambda g: dgl.topk_nodes(g, "x", 3, sortby=1),
    "topk of each": lambda g: dgl.topk_nodes(g, "x", 3)[0],
}


@pytest.mark.parametrize("make", [bridged.batched, bridged.homogeneous], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", READOUTS)
def test_readouts(name, make, place):
    against_host(make, READOUTS[name], place)


@pytest.mark.parametrize("ends", [dgl.function.u_add_v, dgl.function.u_dot_v],
                         ids=lambda f: f.__name__)
def test_gradients_of_messages(ends, place):
    def gradients(g):
        x = g.ndata["x"].detach().requires_grad_()
        with g.local_scope():
            g.ndata["h"] = x
            g.apply_edges(ends("h", "h", "s"))
            g.update_all(fn.copy_e("s", "m"), fn.max("m", "o"))
            out = g.ndata["o"].pow(2).sum()
        out.backward()
        return x.grad

    against_host(bridged.homogeneous, gradients, place)


# --- what is kept, and for how long ---------------------------------------------------------------

def test_structure_is_copied_once(place):
    g = bridged.homogeneous().to(place)
    found = adapter.homogeneous(g)
    assert found.edge_index.device == place and adapter.homogeneous(g) is found
    assert g.edges()[0].data_ptr() == found.edge_index.data_ptr()
    with g.local_scope():
        assert adapter.homogeneous(g) is found
    hetero = bridged.hetero().to(place)
    assert adapter.homogeneous(hetero["r"]) is adapter.relation(hetero, "r")


def test_kept_tensors_go_with_the_graph(place):
    g = bridged.homogeneous().to(place)
    g.in_degrees(), g.out_degrees(), g.edges(), g.adj_tensors("csr")
    gone = [weakref.ref(adapter.homogeneous(g).edge_index), weakref.ref(g.adj_tensors("csr")[0])]
    g.ndata.clear()
    del g
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_changed_graph_is_asked_anew(place):
    g = bridged.homogeneous().to(place)
    before = g.in_degrees()
    g.add_edges([0, 0], [2, 2])
    after = g.in_degrees()
    assert (after
            - before).sum() == 2 and after[2] - before[2] == 2 and g.edges()[0].shape[
                0] == g.num_edges()


def test_degrees_are_the_callers_own(place):
    g = bridged.homogeneous().to(place)
    g.in_degrees().fill_(0)
    assert g.in_degrees().sum() == g.num_edges()


def test_asked_in_inference_mode_and_trained_with_later(place):
    g = bridged.homogeneous().to(place)
    with torch.inference_mode():
        g.adj_tensors("csr"), g.edges(form="all", order="srcdst"), g.in_degrees(), g.edges()
    for found in (*g.adj_tensors("csr"), *g.edges(form="all", order="srcdst"), g.in_degrees(),
                  *g.edges()):
        assert not found.is_inference()


def test_read_in_inference_mode(place):
    g, layer = bridged.homogeneous().to(place), dgl.nn.GraphConv(12, 4).to(place)
    with torch.inference_mode():
        first = layer(g, g.ndata["x"])
    got = layer(g, g.ndata["x"].clone())
    got.sum().backward()
    assert torch.allclose(got.detach().cpu(), first.cpu())


# --- in and out -----------------------------------------------------------------------------------

def _attributes():
    import sys

    from dgl._ffi import ndarray
    from dgl._ffi.function import Function

    from gnnaccel.finder import GraphboltFinder
    owners = [HeteroGraphIndex, dgl.DGLGraph, Function, ndarray.NDArrayBase, ndarray, dgl.ndarray,
              dgl.backend, GraphboltFinder, sys.modules["dgl.backend.pytorch.tensor"],
              dgl.heterograph_index.FlattenedHeteroGraph, dgl.heterograph_index.HeteroPickleStates,
              dgl.cuda.GPUCache, sys.modules["dgl.nn.pytorch.network_emb"]]
    return [dict(vars(owner)) for owner in owners]


def test_disable_restores_everything(monkeypatch):
    before = _attributes()
    with simulated.device(monkeypatch):
        for _ in range(2):
            gnnaccel.enable()
            assert gnnaccel.status()["bridge"]["active"] and _attributes() != before
            gnnaccel.disable()
            assert not gnnaccel.status()["bridge"]["active"] and _attributes() == before
        with gnnaccel.enabled():
            assert bridged.homogeneous().to("cuda").device.type == "cuda"
        assert _attributes() == before


def test_status_says_why_not(monkeypatch):
    from gnnaccel.adapters.dgl import bridge

    assert gnnaccel.status()["bridge"] == {"active": False,
                                           "text": "gnnaccel is disabled, or DGL is not imported"}
    monkeypatch.setattr(bridge, "has_accelerator", lambda: False)
    gnnaccel.enable()
    assert gnnaccel.status()["bridge"] == {"active": False, "text": "torch sees no GPU"}
    gnnaccel.disable()
    monkeypatch.setattr(bridge, "has_accelerator", lambda: True)
    monkeypatch.setattr("dgl._ffi.function.get_global_func", lambda name,
                        allow_missing=False: object())
    gnnaccel.enable()
    assert not gnnaccel.status()["bridge"]["active"] and "built with CUDA" in gnnaccel.status()[
        "bridge"]["text"]


def test_a_graph_left_on_the_device(place):
    """After disabling, its host structure still answers, and DGL takes it for what it is: a graph
    on the host."""
    g = bridged.homogeneous().to(place)
    gnnaccel.disable()
    assert g.device.type == "cpu" and g.num_edges() == 150
    gnnaccel.enable()
    assert g.device == place and g.in_degrees().device == place


def test_the_host_is_left_alone(place):
    g = bridged.hetero()
    assert all(t.device.type == "cpu" for e in g.etypes
               for t in (*g.edges(etype=e), g.in_degrees(etype=e)))
    assert dgl.batch([g, g]).device.type == "cpu" and dgl.sampling.sample_neighbors(g, {"b": [0, 1]}, 1).device.type == "cpu"


@pytest.mark.parametrize("wrong", [[-1], [2, 30]], ids=["negative", "too large"])
@pytest.mark.parametrize("question", [
    lambda g, nodes: g.in_degrees(nodes), lambda g, nodes: g.out_degrees(nodes),
    lambda g, nodes: g.find_edges(nodes * 10), lambda g, nodes: g._graph.find_edges(0, nodes * 10),
], ids=["in_degrees", "out_degrees", "find_edges", "find_edges of the index"])
def test_ids_out_of_range(question, wrong, place):
    """A kernel that met them would end the process, and every handler with it."""
    g = bridged.homogeneous().to(place)
    with pytest.raises(dgl.DGLError, match="no such|[Ii]nvalid|non-negative"):
        question(g, ids(g, wrong))
    assert not simulated.asserts


def test_degrees_where_there_are_no_nodes(place):
    g = dgl.graph(([], [])).to(place)
    with pytest.raises(dgl.DGLError, match="no such node"):
        g.in_degrees([0])
    assert g.in_degrees().shape == (0,) and not simulated.asserts


def test_what_is_kept_is_told_of_streams(place):
    if place.type == "cuda" and not simulated.active:
        pytest.skip("torch does not say which streams it was told of")
    g = bridged.homogeneous().to(place)
    g.in_degrees(), g.adj_tensors("csr")
    kept = [t for t in tree_leaves(list(g._graph._cache["gnnaccel.bridge"].values()))
            if isinstance(t, torch.Tensor)]
    g.record_stream(torch.cuda.current_stream())
    found = {id(t) for t in simulated.recorded}
    assert len(kept) >= 4 and all(id(t) in found for t in kept)
    assert id(g._graph._cache["gnnaccel"].edges[0][0].edge_index) in found


def test_the_stream_that_dgl_is_on_is_torchs(place):
    from dgl._ffi import streams

    found = streams._dgl_get_stream(dgl.utils.to_dgl_context(place))
    assert (found.value or 0) == torch.cuda.current_stream(place).cuda_stream
