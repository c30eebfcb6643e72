"""`report` and `explain` say what layers over a part exchange."""
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

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
F = graphs.FEATURES


class Two(nn.Module):
    def __init__(self):
        from torch_geometric.nn import GATConv, GCNConv

        super().__init__()
        self.first, self.second = GCNConv(F, 8), GATConv(8, 4)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


def observed(rank, world, folder):
    import gnnaccel

    torch.manual_seed(0)
    part, model = distributed.load_part(folder), Two()
    with gnnaccel.enabled(when="supported"), distributed.use(part):
        explained = gnnaccel.explain(model, part.data.x, part.data.edge_index)
        before = distributed.exchanged()["node"]
        with gnnaccel.report() as report:
            for _ in range(2):
                x = part.data.x.clone().requires_grad_()
                model(x, part.data.edge_index).sum().backward()
        after = distributed.exchanged()["node"]
        model(part.data.x, part.data.edge_index)  # nobody listens any more
    rows = part.rows["node"]
    return (len(rows.send_rows), len(rows.halo), str(explained), explained.as_dicts(), str(report),
            report.exchanged.as_dicts(), {key: after[key] - before[key] for key in after})


@pytest.mark.long
def test_bytes_and_times_by_layer(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for rank, (out, back, text, layers, table, found, sent) in enumerate(
            start(2, observed, folder)):
        first, second = (layer for layer in layers if layer["layer"] != "pyg.scatter")
        # GCN sends rows after its linear map, and a degree for each, once; GAT what goes in
        assert first["sent_bytes"] == out * (8 + 1) * 4 and second["sent_bytes"] == out * 8 * 4
        assert "sent MB" in text
        by_name = {entry["name"]: entry for entry in found}
        assert by_name.keys() == {"first", "second"}
        for name, width in (("first", 8), ("second", 4)):  # rows after their linear maps
            entry = by_name[name]
            assert entry["forward_bytes"] == 2 * out * width * 4 and entry["forwards"] == 2
            assert entry["backward_bytes"] == 2 * back * width * 4 and entry["backwards"] == 2
            assert entry["forward_ms"] > 0 and entry["backward_ms"] > 0
        assert sum(e["forward_bytes"] + e["backward_bytes"] for e in found) == sent["bytes"]
        assert f"exchanged with other processes, by rank {rank}" in table


def test_without_parts_nothing_is_said():
    import gnnaccel

    data = graphs.homogeneous()
    explained = gnnaccel.explain(Two(), data.x, data.edge_index)
    assert "sent MB" not in str(explained)
    assert all(one.sent_bytes is None for one in explained.layers)
    with gnnaccel.enabled(when="supported"), gnnaccel.report() as report:
        Two()(data.x, data.edge_index)
    assert "exchanged" not in str(report) and not report.exchanged.as_dicts()


def test_exchanges_are_ranges_for_nsight(monkeypatch):
    from gnnaccel.dispatch.observe.exchanges import Exchange, around
    from gnnaccel.profile.report import Report

    said = []
    monkeypatch.setattr(torch.version, "cuda", "12.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    exchange = Exchange("GATConv", False, 12, torch.device("cpu"))
    for nvtx in (True, False):
        with Report(nvtx), contextlib.suppress(ValueError), around(exchange):
            raise ValueError
    assert said == ["gnnaccel exchange GATConv", "end"]
