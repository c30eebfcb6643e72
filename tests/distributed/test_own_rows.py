"""HGTConv over own and halo rows: what is computed for own rows alone, and that results are those
of all rows."""
from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch_geometric")

import gnnaccel
import gnnaccel.distributed as distributed
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.relational import by_type, pair_maps
from tests.distributed import graphs
from tests.distributed.processes import start
from tests.helpers import assert_accurate
from tests.routes import clean, opened, route  # noqa: F401

#: rows by type, and how many of them are own: of one type all, of another none
NODES = {"paper": 20, "author": 13, "venue": 6, "field": 5}
OWN = {"paper": 8, "author": 13, "venue": 0, "field": 2}
RELATIONS = [("author", "writes", "paper"), ("paper", "written", "author"),
             ("paper", "cites", "paper"), ("venue", "prints", "paper"),
             ("field", "of", "field"), ("paper", "in", "venue")]
#: name -> (edge types of the layer, those of the call, whether maps by type are made as one)
CASES = {
    "all types": (RELATIONS, RELATIONS, True),
    "edge types that are not given": (RELATIONS, RELATIONS[:3], True),
    "a type that is a source only": (RELATIONS[:5], RELATIONS[:5], False),
    "types that are destinations only": ([RELATIONS[0], RELATIONS[3]], [RELATIONS[0]], False),
    "one type": (RELATIONS[2:3], RELATIONS[2:3], True),
}


def made(case, channels=16):
    from torch_geometric.nn import HGTConv

    types = sorted({kind for name in CASES[case][0] for kind in (name[0], name[2])})
    return HGTConv(channels, 16, (types, CASES[case][0]), 2)


def features(layer, channels=16):
    device = layer.k_rel.weight.device
    return {kind: torch.randn(NODES[kind], channels).to(device) for kind in layer.node_types}


def edges(case, own=OWN, device="cpu"):
    """Edges of each type, with an edge at the last node that may have one."""
    found = {}
    for name in CASES[case][1]:
        count = 30 if own[name[2]] else 0
        found[name] = torch.stack([torch.randint(0, NODES[name[0]], (count,)),
                                   torch.randint(0, max(own[name[2]], 1), (count,))])
        found[name][:, -1:] = torch.tensor([[NODES[name[0]] - 1], [own[name[2]] - 1]])[:, :count]
    return {name: ids.to(device) for name, ids in found.items()}


needs_distributed = pytest.mark.skipif(not dist.is_available(),
                                       reason="this torch has no torch.distributed")


@contextlib.contextmanager
def told(own):
    state.own_rows = own
    try:
        yield
    finally:
        state.own_rows = None


def results(layer, x, edge_index, own, frozen=()):
    """The own rows' results, and the gradients of all inputs and parameters."""
    x = {kind: rows.detach().clone().requires_grad_(kind not in frozen) for kind, rows in x.items()}
    out = {kind: rows[:own[kind]] for kind, rows in layer(x, edge_index).items()}
    g = torch.Generator().manual_seed(3)
    seeds = {kind: torch.randn(own[kind], 16, generator=g, dtype=torch.float64)
             for kind in sorted(out)}
    layer.zero_grad()
    sum((out[kind] * seeds[kind].to(out[kind])).sum() for kind in out).backward()
    return {**{f"out of {kind}": rows.detach() for kind, rows in out.items()},
            **{f"x of {kind}": rows.grad for kind, rows in x.items()},
            **{name: p.grad for name, p in layer.named_parameters()}}


def check(layer, x, edge_index, own, found, frozen=()):
    """``found`` against what the host's layer gives for all rows."""
    with gnnaccel.disabled():
        plain = results(layer, x, edge_index, own, frozen)
        exact = results(copy.deepcopy(layer).double(), {kind: t.double() for kind, t in x.items()},
                        edge_index, own, frozen)
    assert found.keys() == exact.keys()
    for name in [name for name in exact if name.startswith(("skip", "p_rel"))]:
        # a sum of one or two numbers, which cancel; beside those of other types it is measured
        # against the largest
        joined = name.partition(".")[0]
        sums = [grads.pop(name) for grads in (found, plain, exact)]
        if sums[2] is not None:
            for grads, one in zip((found, plain, exact), sums):
                grads[joined] = torch.cat([grads.get(joined, one.flatten()[:0]), one.flatten()])
    for name, truth in exact.items():
        if truth is None or not truth.numel():
            assert found[name] is None or not found[name].any(), name
        else:
            assert_accurate(name, found[name], plain[name], truth, floor=1e-6)


@contextlib.contextmanager
def mapped():
    """Fills a list with the numbers of rows that GELU is given, which the last maps see."""
    found = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                record_shapes=True) as profile:
        yield found
    found += [event.input_shapes[0][0] for event in profile.events() if event.name == "aten::gelu"]


@pytest.mark.long
@pytest.mark.parametrize("channels", [16, 7])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_all_rows(route, case, channels):
    layer = made(case, channels).to(route.device)
    own = {kind: OWN[kind] for kind in layer.node_types}
    for frozen in ((), ("paper",), tuple(NODES)):
        x, edge_index = features(layer, channels), edges(case, device=route.device)
        with route.on(), told(own):
            found = [results(layer, x, edge_index, own, frozen) for _ in range(3)]
        for each in found:
            check(layer, x, edge_index, own, each, frozen)


@pytest.mark.long
@pytest.mark.parametrize("case", ["all types", "one type"])
def test_keys_and_values_of_pairs(route, case, monkeypatch):
    monkeypatch.setattr(pair_maps, "WORTH_FROM", 0)
    layer = made(case).to(route.device)
    own, x = {kind: OWN[kind] for kind in layer.node_types}, features(layer)
    edge_index = edges(case, device=route.device)
    for frozen in ((), tuple(NODES)):
        with route.on(), told(own):
            found = results(layer, x, edge_index, own, frozen)
        check(layer, x, edge_index, own, found, frozen)


@pytest.mark.long
def test_what_is_computed_for_own_rows_alone(route, monkeypatch):
    """Of 44 rows 23 are own: keys and values are of all, queries and last maps of these."""
    layer, products, product = made("all types").to(route.device), [], by_type.product
    x, edge_index = features(layer), edges("all types", device=route.device)
    monkeypatch.setattr(by_type, "product", lambda blocks, *args, **kwargs: products.append(
        blocks.count) or product(blocks, *args, **kwargs))
    for _ in range(2):
        with mapped() as rows, route.on(), told(OWN), torch.no_grad():
            out = layer(x, edge_index)
        assert {kind: len(t) for kind, t in out.items()} == OWN
        if route.backend == "cuda":
            assert rows == [23] and products == [23, 44, 44, 23]
        else:
            assert sorted(rows) == sorted(OWN.values())
        products.clear()


@pytest.mark.long
def test_calls_over_a_part_and_over_all_rows_are_told_apart(route):
    """The same layer, edges and sizes."""
    layer, found = made("all types").to(route.device), []
    x, edge_index = features(layer), edges("all types", device=route.device)
    other = {**OWN, "paper": 9, "venue": 1}
    with route.on():  # within one block calls are remembered
        for own in (OWN, None, other, OWN, other, None, None):
            with told(own):
                found.append((own or NODES, results(layer, x, edge_index, own or NODES)))
                assert {kind: len(rows) for kind, rows in layer(x, edge_index).items()} == (
                    own or NODES)
    for own, each in found:
        check(layer, x, edge_index, own, each)


def test_graphs_that_change(route):
    """Other edges each time, with more rows and with as many."""
    layer, found = made("all types").to(route.device), []
    x = features(layer)
    with route.on():
        for step in range(7):
            own = {**OWN, "paper": 8 + step // 2}
            if step < 6:
                edge_index = edges("all types", own, route.device)
            else:  # written in place
                edge_index["paper", "cites", "paper"][0].fill_(1)
            copies = {name: ids.clone() for name, ids in edge_index.items()}
            with told(own):
                found.append((copies, own, results(layer, x, edge_index, own)))
    for graph, own, each in found:
        check(layer, x, graph, own, each)


def test_second_derivatives(route):
    layer = made("all types").double()
    x = {kind: rows.double().requires_grad_() for kind, rows in features(layer).items()}
    edge_index = edges("all types")

    def penalty():
        out = layer(x, edge_index)
        first = torch.autograd.grad(sum(t[:OWN[kind]].pow(2).sum() for kind, t in out.items()),
                                    list(x.values()), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), list(x.values()))

    with gnnaccel.disabled():
        wanted = penalty()
    with gnnaccel.enabled(backend=route.backend, when="supported"), told(OWN):
        found = penalty()
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs)


# ---- over several processes ----

def over_parts(rank, world, folder, name):
    """Own rows, those with halo, and those of GELU in two calls over the part, each with one over
    all rows after it."""
    part = distributed.load_part(folder)
    torch.manual_seed(0)
    from torch_geometric.nn import HGTConv

    layer = HGTConv(graphs.FEATURES, 4, part.data.metadata(), 2)
    with opened(name) as found, distributed.use(part):
        x, edge_index = part.data.x_dict, part.data.edge_index_dict
        every = {kind: state.current.extend(kind, t) for kind, t in x.items()}
        with mapped() as rows, gnnaccel.enabled(backend=found.backend, when="supported"):
            for _ in range(2):
                out = layer(x, edge_index)
                with distributed.paused():
                    whole = layer(every, edge_index)
        with gnnaccel.disabled(), distributed.paused():
            wanted = layer(every, edge_index)
    own = {kind: len(t) for kind, t in x.items()}
    for kind, t in wanted.items():
        torch.testing.assert_close(whole[kind], t, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[kind], t[:own[kind]], rtol=1e-5, atol=1e-6)
    return own, {kind: len(t) for kind, t in every.items()}, rows


def compared(rank, world, folder):
    """What `compare` says over a part, and the results' rows before it and after."""
    from torch_geometric.nn import HGTConv

    torch.manual_seed(0)
    part = distributed.load_part(folder)
    layer = HGTConv(graphs.FEATURES, 4, part.data.metadata(), 2)
    with gnnaccel.enabled(when="supported"), distributed.use(part):
        x, edge_index = part.data.x_dict, part.data.edge_index_dict
        before = {kind: len(t) for kind, t in layer(x, edge_index).items()}
        found = gnnaccel.compare(layer, x, edge_index)
        return before, str(found), {kind: len(t) for kind, t in layer(x, edge_index).items()}


@pytest.mark.long
@needs_distributed
def test_calls_over_parts_are_compared(tmp_path):
    """With the host's own layer, which has results for halo rows, too."""
    folder = graphs.cut(graphs.heterogeneous(), 2, tmp_path)["random"]
    for before, text, after in start(2, compared, folder):
        assert before == after
        assert "same" in text and "mismatch" not in text


@pytest.mark.long
@needs_distributed
@pytest.mark.parametrize("name", ["torch", "emulated"])
def test_layers_over_parts_compute_results_for_own_rows(tmp_path, name):
    folder = graphs.cut(graphs.heterogeneous(), 2, tmp_path)["random"]
    for own, every, rows in start(2, over_parts, folder, name):
        assert sum(own.values()) < sum(every.values())
        count = [sum(own.values()), sum(every.values())]
        both = [*own.values(), *every.values()] if name == "torch" else count
        assert rows == both * 2
