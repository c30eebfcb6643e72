"""Which rows of a layer's linear maps are computed where, and which are sent."""
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from tests.distributed import graphs
from tests.distributed.processes import start
from tests.routes import clean, route  # noqa: F401

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
F = graphs.FEATURES


def shifted():
    """A class of the user's, which writes over what its map made."""
    from torch_geometric.nn import MessagePassing

    class Shifted(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean")
            self.lin = Linear(F, 4)
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x, edge_index):
            h = self.lin(x)
            h += self.shift
            return self.propagate(edge_index, x=h)

    from torch_geometric.nn import Linear
    return Shifted()


def layers():
    """name -> (a layer, numbers of a row that it sends forward where the features have gradients,
    and where they have none)."""
    from torch_geometric import nn as pyg

    return {
        "gat": (pyg.GATConv(F, 2, 2), 4, F),
        "gat of two maps": (pyg.GATConv((F, F), 2, 2), 4, F),
        "gat, wider": (pyg.GATConv(F, 4, 2), F, F),
        "gatv2": (pyg.GATv2Conv(F, 2, 2), 4, F),
        "gatv2, shared": (pyg.GATv2Conv(F, 2, 2, share_weights=True, residual=True), 4, F),
        "transformer": (pyg.TransformerConv(F, 2, 2), F, F),
        "gcn": (pyg.GCNConv(F, 4), 4, F),
        "gcn, narrow": (pyg.GCNConv(F, 2), 2, 2),
        "frozen gcn": (pyg.GCNConv(F, 4).requires_grad_(False), 4, 4),
        "watched gat": (pyg.GATConv(F, 2, 2), F, F),
        "leconv": (pyg.LEConv(F, 4), 4, F),
        "written": (shifted(), 4, 4),
    }


def watch(name, layer):
    """Hooks on the map of a layer that is to be watched, which see own and halo rows."""
    if name.startswith("watched"):
        layer.lin.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def run(layer, data, own, x):
    out = layer(x, data.edge_index)
    share = torch.randn(graphs.NODES, *out.shape[1:], generator=graphs.generator(5))[own]
    if out.requires_grad:
        (out * share).sum().backward()
    found = {name: weight.grad.clone() for name, weight in layer.named_parameters()
             if weight.grad is not None}
    layer.zero_grad()
    return out.detach(), found, x.grad


def over_parts(rank, world, folder, enabled):
    import gnnaccel

    part, found = distributed.load_part(folder), {}
    switched = gnnaccel.enabled(when="supported") if enabled else contextlib.nullcontext()
    for name in layers():
        torch.manual_seed(0)
        layer = watch(name, layers()[name][0])
        with switched, distributed.use(part):
            for trains in (True, False):
                x = part.data.x.clone().requires_grad_(trains)
                results = run(layer, part.data, part.own, x)
                sent = distributed.exchanged()["node"]
                before = sent["bytes"]
                if not trains:  # the same features again
                    run(layer, part.data, part.own, x)
                    results = *results, distributed.exchanged()["node"]["bytes"] - before
                found[name, trains] = results
        switched = gnnaccel.enabled(when="supported") if enabled else contextlib.nullcontext()
    return part.own, found


@pytest.mark.long
@pytest.mark.parametrize("enabled", [False, True])
def test_results_are_those_of_the_whole_graph(tmp_path, enabled):
    data = graphs.homogeneous()
    found = start(2, over_parts, graphs.cut(data, 2, tmp_path)["random"], enabled)
    for name in layers():
        torch.manual_seed(0)
        layer = watch(name, layers()[name][0])
        for trains in (True, False):
            x = data.x.clone().requires_grad_(trains)
            out, gradients, d_x = run(layer, data, slice(None), x)
            for own, results in found:
                mine = results[name, trains]
                close(mine[0], out[own], name)
                if trains:
                    close(mine[2], d_x[own], name)
            for key, truth in gradients.items():
                close(sum(results[name, trains][1][key] for _, results in found), truth,
                      f"{name}: {key}")


def close(found, truth, name):
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"edge_dim": 3}, {"residual": True},
                                     {"concat": False, "bias": False}], ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_destinations_that_are_the_first_sources(route, options, trains):
    """One map makes the rows of both; results are those of two."""
    from torch_geometric.nn import GATConv

    from gnnaccel.adapters.pyg.distributed import maps
    from gnnaccel.dispatch.distributed import state

    layer = GATConv(6, 3, 2, add_self_loops=False, **options).to(route.device)
    rows = torch.randn(20, 6, device=route.device).requires_grad_(trains)
    edges = torch.stack([torch.randint(0, 20, (60,)), torch.randint(0, 13, (60,))]).to(route.device)
    attr = torch.randn(60, 3, device=route.device) if "edge_dim" in options else None
    mapped = []

    def once(module, given):
        mapped.append(len(given))
        return type(module).forward(module, given)

    def run(leading):
        torch.manual_seed(1)
        with maps._replaced(layer, ["lin"], once):
            state.leading = rows if leading else None
            try:
                out = layer((rows, rows[:13]), edges, attr)
            finally:
                state.leading = None
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
        inputs = [*layer.parameters(), *([rows] if trains else [])]
        return [out, *torch.autograd.grad((out * seed).sum(), inputs)]

    with route.on():
        for _ in range(2):
            wanted, both = run(False), list(mapped)
            mapped.clear()
            found, one = run(True), list(mapped)
            mapped.clear()
            assert both == [20, 13] and one == [20]
            for ours, theirs in zip(found, wanted, strict=True):
                close(ours, theirs, "gat")


def widths(rank, world, folder):
    """Numbers of a row that each layer's first call sends, and its second."""
    part, found = distributed.load_part(folder), {}
    count = len(part.rows["node"].send_rows)
    for name in layers():
        for trains in (True, False):
            layer = watch(name, layers()[name][0])
            with distributed.use(part):
                x = part.data.x.clone().requires_grad_(trains)
                seen = []
                for _ in range(2):
                    before = distributed.exchanged()["node"]["bytes"]
                    layer(x, part.data.edge_index)
                    seen.append((distributed.exchanged()["node"]["bytes"] - before) / 4 / count)
            found[name, trains] = seen
    return found


@pytest.mark.long
def test_the_narrower_rows_are_sent(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for found in start(2, widths, folder):
        for name, (_, with_gradients, without) in layers().items():
            degrees = "gcn" in name  # once
            assert found[name, True][0] == with_gradients + degrees, name
            assert found[name, False][0] == without + degrees, name
            kept = without == F
            assert found[name, False][1] == (0 if kept else without), name


def written(rank, world, folder):
    """Features that are written, or of which the memory is exchanged, between two calls; and a
    map that is applied to other rows than the features."""
    from torch_geometric.nn import GCNConv, Linear

    torch.manual_seed(0)
    part, layer = distributed.load_part(folder), GCNConv(F, 4)
    with distributed.use(part):
        x = part.data.x.clone()
        found = [layer(x, part.data.edge_index)]
        x.mul_(2)
        found.append(layer(x, part.data.edge_index))
        x.data = part.data.x * 3
        found.append(layer(x, part.data.edge_index))
        with torch.no_grad():
            found.append(layer(x, part.data.edge_index))
            layer.lin.weight.mul_(2)
        found.append(layer(x, part.data.edge_index))
    assert type(layer.lin) is Linear
    return part.own, [out.detach() for out in found]


@pytest.mark.long
def test_features_that_are_written(tmp_path):
    from torch_geometric.nn import GCNConv

    torch.manual_seed(0)
    data, layer = graphs.homogeneous(), GCNConv(F, 4)
    once = layer(data.x, data.edge_index).detach()
    for own, found in start(2, written, graphs.cut(data, 2, tmp_path)["random"]):
        for factor, out in zip((1, 2, 3, 3, 6), found):
            close(out, factor * once[own], f"times {factor}")


def test_a_call_over_a_part_is_not_one_of_a_pair(route):
    """The same layer, edges and sizes; the destinations are rows of their own once."""
    import gnnaccel
    from gnnaccel.dispatch.distributed import state
    from torch_geometric.nn import GATConv

    layer = GATConv(6, 3, 2, add_self_loops=False).to(route.device)
    rows, other = torch.randn(20, 6, device=route.device), torch.randn(13, 6, device=route.device)
    edges = torch.stack([torch.randint(0, 20, (60,)), torch.randint(0, 13, (60,))]).to(route.device)
    found = []
    with route.on():  # within one block calls are remembered
        for leading in (True, False, True, False, False, True):
            x_dst = rows[:13] if leading else other
            state.leading = rows if leading else None
            try:
                found.append((x_dst, layer((rows, x_dst), edges)))
            finally:
                state.leading = None
    with gnnaccel.disabled():
        for x_dst, out in found:
            close(out, layer((rows, x_dst), edges), "gat")


class Typed(nn.Module):
    def __init__(self, metadata):
        from torch_geometric.nn import HGTConv

        super().__init__()
        self.first, self.second = HGTConv(F, F, metadata, 2), HGTConv(F, 4, metadata, 2)

    def forward(self, data):
        x = self.first(data.x_dict, data.edge_index_dict)
        return self.second({kind: rows.relu() for kind, rows in x.items()}, data.edge_index_dict)


def by_type(data, rows):
    torch.manual_seed(0)
    model = Typed(data.metadata())
    out = model(data)
    g = graphs.generator(5)
    shares = {kind: torch.randn(count, 4, generator=g)
              for kind, count in (("paper", 18), ("author", 9))}
    sum((out[kind] * shares[kind][rows[kind]]).sum() for kind in out).backward()
    return ({kind: x.detach() for kind, x in out.items()},
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def types_over_parts(rank, world, folder, enabled):
    import gnnaccel

    part = distributed.load_part(folder)
    own = {kind: rows.own for kind, rows in part.rows.items()}
    switched = gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled()
    with switched, distributed.use(part):
        return own, *by_type(part.data, own)


@pytest.mark.parametrize("way, world, enabled", [
    ("random", 2, False), ("random", 2, True),
    pytest.param("ugly", 4, False, marks=pytest.mark.long),
    pytest.param("ugly", 4, True, marks=pytest.mark.long)])
def test_hgt_over_parts(tmp_path, way, world, enabled):
    data = graphs.heterogeneous()
    everything = {kind: slice(None) for kind in data.node_types}
    out, gradients = by_type(data, everything)
    found = start(world, types_over_parts, graphs.cut(data, world, tmp_path)[way], enabled)
    for own, mine, _ in found:
        for kind in out:
            close(mine[kind], out[kind][own[kind]], kind)
    for key, truth in gradients.items():
        close(sum(shares[key] for *_, shares in found if key in shares), truth, key)


def wrong(rank, world, folder):
    from torch_geometric.nn import HGTConv

    part = distributed.load_part(folder)
    data, layer = part.data, HGTConv(F, 4, part.data.metadata(), 2)
    said = []
    with distributed.use(part):
        for x, edges in ((data.x_dict, data["paper", "cites", "paper"].edge_index),
                         (data.x_dict, {("a", "b", "c"): torch.zeros(2, 0, dtype=torch.long)}),
                         (data.x_dict, {("paper", "cites", "paper"): torch.eye(3).to_sparse()}),
                         ({"paper": data["paper"].x[1:]}, {("paper", "cites", "paper"): data[
                             "paper", "cites", "paper"].edge_index})):
            with pytest.raises(distributed.PartitionError) as error:
                layer(x, edges)
            said.append(str(error.value))
    return said


def test_typed_calls_that_do_not_fit(tmp_path):
    folder = graphs.cut(graphs.heterogeneous(), 2, tmp_path)["random"]
    for said in start(2, wrong, folder):
        assert "needs both by type" in said[0]
        assert "edges ('a', 'b', 'c'), which this part does not have" in said[1]
        assert "needs a dense tensor" in said[2] and "own nodes" in said[3]


def repeated(rank, world, folder):
    """How many of gnnaccel's functions a layer's forward runs over a part, the fourth time."""
    import gnnaccel
    from torch_geometric import nn as pyg
    from tests.call_counts import counted

    part, found = distributed.load_part(folder), {}
    made = {"gat": pyg.GATConv(F, 2, 2), "gcn": pyg.GCNConv(F, 4), "sage": pyg.SAGEConv(F, 4)}
    with gnnaccel.enabled(when="supported"), distributed.use(part):
        for name, layer in made.items():
            for trains in (True, False):
                x = part.data.x.clone().requires_grad_(trains)

                def call(layer=layer, x=x):
                    layer(x, part.data.edge_index)

                for _ in range(3):
                    call()
                found[name, trains] = counted(call).python
    return found


#: with gradients of the features, and without; lower one when a change makes a layer cheaper. One
#: or two are the constructors of modules that are made in a call
MOST = {"gat": (137, 110), "gcn": (99, 90), "sage": (77, 92)}


@pytest.mark.long
def test_repeated_calls_are_known(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for found in start(2, repeated, folder):
        for name, bounds in MOST.items():
            counts = found[name, True], found[name, False]
            assert counts[0] <= bounds[0] and counts[1] <= bounds[1], (name, counts)
