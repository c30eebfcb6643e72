"""Models and ways to call layers beyond those of test_training.py: outputs and gradients over two
parts are those over the whole graph."""
from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from tests.distributed import graphs
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
F = graphs.FEATURES


def sage_of_types(data, own):
    """A model of `to_hetero`, whose layers gnnaccel would join over a whole graph."""
    from torch_geometric.nn import GraphSAGE, to_hetero

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a type that nothing enters
        model = to_hetero(GraphSAGE(F, 8, 2), data.metadata())
    return model, lambda: model(data.x_dict, data.edge_index_dict)["paper"]


def numbers_for_features(data, own):
    """RGCN's weight for each node."""
    from torch_geometric.nn import RGCNConv

    model = RGCNConv(graphs.NODES, 8, 3, num_bases=2)
    return model, lambda: model(own, data.edge_index, data.edge_type)


def checkpointed(data, own, reentrant):
    from torch.utils.checkpoint import checkpoint
    from torch_geometric.nn import GCNConv, GATConv

    model = nn.ModuleList([GCNConv(F, 8), GATConv(8, 8)])
    x = data.x.clone().requires_grad_()
    def run():
        out = x
        for layer in model:
            out = checkpoint(layer, out, data.edge_index, use_reentrant=reentrant).tanh()
        return out
    return model, run


def cached(data, own):
    from torch_geometric.nn import GCNConv

    model = nn.ModuleList([GCNConv(F, 8, cached=True), GCNConv(8, 8, cached=True)])

    def run():
        for _ in range(2):
            out = model[1](model[0](data.x, data.edge_index).relu(), data.edge_index)
        return out
    return model, run


def of_the_users(data, own):
    """A class that names its arguments as it likes, and one that derives from a layer."""
    from torch_geometric.nn import GATConv, MessagePassing

    class Mine(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean")
            self.lin = nn.Linear(2 * F, 8)

        def forward(self, edges, features, scale):
            return self.propagate(edges, h=features, scale=scale.view(-1, 1))

        def message(self, h_i, h_j, scale):
            return scale * self.lin(torch.cat([h_i, h_j - h_i], -1))

    class Scaled(GATConv):
        def forward(self, x, edge_index):
            return 2 * super().forward(x.tanh(), edge_index)

    model = nn.ModuleList([Mine(), Scaled(8, 8)])
    return model, lambda: model[1](model[0](data.edge_index, data.x, data.edge_weight),
                                   data.edge_index)


def dropped_edges(data, own):
    """Edges that the script has left out, in the part's numbers."""
    from torch_geometric.nn import SAGEConv

    model = SAGEConv(F, 8)
    return model, lambda: model(data.x, data.edge_index[:, data.edge_weight < 0.6])


def deep(data, own):
    from torch_geometric.nn import GIN

    model = GIN(F, 8, 3, jk="cat")
    return model, lambda: model(data.x, data.edge_index)


def compiled(data, own):
    """Layers run as they are, what is around them compiled."""
    from torch_geometric.nn import GATConv, GCNConv, Sequential

    model = Sequential("x, edges", [(GCNConv(F, 8), "x, edges -> x"), nn.Tanh(),
                                    (GATConv(8, 8), "x, edges -> x")])
    return model, lambda: torch.compile(model, backend="eager")(data.x, data.edge_index)


MODELS = {"compiled": compiled, "to_hetero": sage_of_types, "numbers": numbers_for_features,
          "cached": cached, "users": of_the_users, "dropped": dropped_edges, "deep": deep,
          "checkpoint": functools.partial(checkpointed, reentrant=False),
          "reentrant": functools.partial(checkpointed, reentrant=True)}


def result(make, data, own):
    torch.manual_seed(0)
    model, run = make(data, own)
    out = run()
    share = torch.randn(graphs.NODES, 8, generator=graphs.generator(5))[own]
    (out * share).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def run_all(rank, world, folder, typed, enabled, exchange):
    import gnnaccel

    found = {}
    switched = gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled()
    with switched:
        for name, make in MODELS.items():
            part = distributed.load_part(typed if name == "to_hetero" else folder)
            own = part.rows["paper" if name == "to_hetero" else "node"].own
            with distributed.use(part, exchange=exchange):
                found[name] = own, *result(make, part.data, own)
    return found


@pytest.mark.parametrize("enabled, exchange, close", [
    (False, "fp32", 1e-5), (True, "fp32", 1e-5),
    pytest.param(False, "bf16", 3e-2, marks=pytest.mark.long),
    pytest.param(False, "int8", 6e-2, marks=pytest.mark.long)])
def test_models_over_two_parts(tmp_path, enabled, exchange, close):
    data, typed = graphs.homogeneous(), graphs.heterogeneous()
    folders = [graphs.cut(graph, 2, tmp_path / name)["random"]
               for name, graph in (("plain", data), ("typed", typed))]
    found = start(2, run_all, *folders, enabled, exchange)
    for name, make in MODELS.items():
        graph = typed if name == "to_hetero" else data
        out, gradients = result(make, graph, torch.arange(18 if name == "to_hetero" else 26))
        mine = torch.empty_like(out)
        for rank in found:
            mine[rank[name][0]] = rank[name][1]
        torch.testing.assert_close(mine, out, rtol=close, atol=close, msg=f"{name}: outputs")
        for key, truth in gradients.items():
            shares = [rank[name][2][key] for rank in found if rank[name][2][key] is not None]
            if truth is None:
                assert not any(share.any() for share in shares), f"{name}: {key}"
                continue
            scale = max(1.0, truth.abs().max().item())
            torch.testing.assert_close(sum(shares), truth, rtol=0, atol=close * scale,
                                       msg=f"{name}: {key}")
        if exchange != "fp32" and name != "numbers":
            assert not torch.equal(mine, out)  # rows were rounded, numbers of nodes not
