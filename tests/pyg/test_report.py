"""report(): what it counts and times in a training, that it changes nothing, and what the command
line makes of it."""
from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, HeteroConv, PNAConv, SAGEConv

import gnnaccel
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe import records, watch
from gnnaccel.profile import observe, page
from gnnaccel.profile.report import Report
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.own_layers import Copying


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables that fold nothing, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "200")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = GATConv(F, 8, 2), GATConv(16, 8, 2), GATv2Conv(16, 4)

    def forward(self, x, edge_index):
        return self.last(self.second(self.first(x, edge_index), edge_index), edge_index)


@pytest.fixture
def net(route):
    return Net().to(route.device)


def steps(net, inputs, count=3):
    for _ in range(count):
        net.zero_grad()
        net(*inputs).sum().backward()


def by_name(report):
    return {entry.name: entry for entry in report.entries}


@pytest.mark.long
def test_every_layer_has_its_calls_times_and_cache_hits(route, net, inputs):
    with route.on():  # kernels are compiled, which would be all of the first layer's time
        steps(net, (inputs[0], inputs[1].clone()), 1)
    with route.on(), gnnaccel.report() as found:
        steps(net, inputs)
        with torch.no_grad():
            net(*inputs)
    entries = by_name(found)
    assert sorted(entries) == ["first", "last", "second"]
    for entry in entries.values():
        assert (entry.calls, entry.timed, entry.backwards, entry.route) == (4, 4, 3, route.backend)
        assert entry.forward_ms > 0 and entry.backward_ms > 0 and entry.overhead_us > 0 and entry.inside_ms == 0
        assert sum(entry.cache.values()) == 4 and entry.cache[
            "hit"] >= 3 and entry.moved > 0 and entry.flops > 0
        assert (entry.kept_bytes is None) == (route.device.type == "cpu")
    assert sum(entry.cache.get("miss", 0) for entry in entries.values()) == 1
    text = str(found)
    assert "first (GATConv)" in text and "100%" not in text and "3/4" in text
    json.dumps(found.as_dicts())


def test_decisions_around_which_nobody_stands_are_counted_without_a_time():
    reason = dict(candidate="kernels", code="GA301", text="no gain", hint="none")
    with gnnaccel.report() as found:
        for _ in range(2):
            records.emit(records.new(host="pyg", layer="Some", route="native", rejected=[reason]))
        records.emit(records.new(host="pyg", layer="Some", route="native", direction="backward",
                                 forward_call=1))
    (entry,) = found.entries
    assert (entry.name, entry.calls, entry.timed, entry.own_ms) == ("Some", 2, 0, 0.0)
    assert [(f["code"], f["calls"])
            for f in found.fallbacks()] == [("GA301", 2)] and "Some" in str(found)


def test_plain_layers_are_measured_under_their_class_and_names(route, inputs):
    net = torch.nn.Sequential(GCNConv(F, 8), SAGEConv(8, 8), GINConv(torch.nn.Linear(8, 8)),
                              Copying(),
                              PNAConv(8, 4, ["mean", "std"], ["identity"],
                                      torch.tensor([1, 3, 5]))).to(route.device)

    def run():
        x = inputs[0]
        for layer in net:
            x = layer(x, inputs[1])
        x.sum().backward()

    with route.on(), gnnaccel.report() as found:
        for _ in range(3):
            run()
    entries = by_name(found)
    assert sorted(entries) == ["Copying #1", "GCNConv #1", "GINConv #1", "PNAConv #1",
                               "SAGEConv #1"]
    for entry in entries.values():
        assert (entry.calls, entry.timed, entry.backwards, entry.route) == (3, 3, 3, route.backend)
        assert entry.forward_ms > 0 and entry.backward_ms > 0 and entry.cache[
            "hit"] >= 1 and entry.graph["num_edges"] >= E
        assert entry.layer == "PNAConv" or entry.moved > 0 and entry.flops > 0
    gnnaccel.name_layers(net, "net")
    with route.on(exclude=["SAGEConv"], on_fallback="native"), gnnaccel.report() as found:
        run()
    assert sorted(by_name(found)) == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    assert by_name(found)["net.1"].reasons[0]["code"] == "GA101"


def test_names_given_are_used(route, net, inputs):
    gnnaccel.name_layers(net)
    with route.on(), gnnaccel.report() as found:
        steps(net, inputs, 1)
    assert sorted(by_name(found)) == ["first", "last", "second"]


def test_reasons_are_ranked_by_the_time_they_cost(inputs, net, route):
    gnnaccel.exclude(net.first)
    with route.on(on_fallback="native"), gnnaccel.report() as found:
        steps(net, inputs)
        net.last(*inputs[:0], net.second(net.first(*inputs), inputs[1]), inputs[1],
                 return_attention_weights=True)
    entries = found.entries
    for entry, ms in ((e, 500.0 if e.reasons and e.reasons[0]["code"] == "GA208" else 1.0)
                      for e in entries):
        entry.forward_ms, entry.backward_ms = ms, 0.0
    assert [(f["code"], f["calls"]) for f in found.fallbacks()] == [("GA208", 1), ("GA101", 4)]
    assert found.fallbacks()[1]["layers"] == ["first"] and "include" in found.fallbacks()[1][
        "hint"]
    assert "native, by what it took" in str(found)


def test_layers_inside_a_native_one_are_counted_once(route):
    edges = {("a", "to", "b"): graphs.bipartite(N, 20), ("b", "back", "a"): graphs.bipartite(20, N)}
    net = HeteroConv({key: GATConv((F, F), 8, add_self_loops=False) for key in edges})
    x = {"a": graphs.features(), "b": graphs.features(20)}
    net.to(route.device)
    x, edges = ({k: v.to(route.device) for k, v in d.items()} for d in (x, edges))
    with route.on(on_fallback="native", exclude=["HeteroConv"]), gnnaccel.report() as found:
        sum(out.sum() for out in net(x, edges).values()).backward()
    outer, inner = by_name(found)["HeteroConv #1"], [e for e in found.entries
                                                     if e.layer == "GATConv"]
    assert outer.route == "native" and len(inner) == 2
    assert outer.inside_ms == pytest.approx(sum(e.total_ms
                                                for e in inner)) and outer.own_ms < outer.total_ms


def test_relational_layers_bring_what_their_passes_counted(route):
    edges = {("a", "to", "b"): graphs.bipartite(N, 20), ("b", "back", "a"): graphs.bipartite(20, N)}
    net = HeteroConv({key: SAGEConv((F, F), 8) for key in edges}).to(route.device)
    x = {"a": graphs.features().to(route.device), "b": graphs.features(20).to(route.device)}
    with route.on(), gnnaccel.report() as found:
        net(x, {k: v.to(route.device) for k, v in edges.items()})
    (entry,) = found.entries
    assert entry.passes["relations"] == 2 and entry.moved == entry.passes["orderings"][0]["bytes"]


def test_results_are_the_same_and_nothing_stays(route, net, inputs):
    def once():
        net.zero_grad()
        out = net(*inputs)
        out.sum().backward()
        return [out.detach(), *(p.grad.clone() for p in net.parameters())]

    with route.on():
        plain = once()
        with gnnaccel.report():
            measured = once()
    exact = route.device.type == "cpu"
    assert all(torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)
               for a, b in zip(plain, measured))
    assert not records.listening() and not watch._watchers


def test_what_a_layer_raises_comes_through(route, net, inputs):
    with route.on(on_fallback="native"), gnnaccel.report() as found:
        with pytest.raises(RuntimeError):
            net(inputs[0][:, :3], inputs[1])
        net(*inputs)
    assert all(entry.calls == 1 for entry in found.entries)


def test_a_report_goes_on_where_it_left_off_and_is_measured_once(route, net, inputs):
    found = gnnaccel.report()
    with route.on():
        for _ in range(2):
            with found:
                steps(net, inputs, 1)
                with pytest.raises(RuntimeError, match="being measured already"):
                    found.start()
    assert all(entry.calls == 2 for entry in found.entries) and not watch._watchers


def test_inside_the_block_report_is_what_runs(route, net, inputs):
    with route.on(), gnnaccel.report() as found:
        steps(net, inputs, 1)
        assert gnnaccel.report() is found and len(gnnaccel.report().entries) == 3
    assert gnnaccel.report() is not found


def test_without_a_measurement_it_tells_counts_and_how_to_measure(route, net, inputs):
    with route.on():
        steps(net, inputs, 1)
    text = str(gnnaccel.report())
    assert "nothing was measured" in text and "with gnnaccel.report()" in text and "GATv2Conv" in text


def test_compiling_has_a_line_of_its_own(net, inputs):
    found = gnnaccel.report()
    net.cpu()
    with gnnaccel.enabled(backend="torch", when="supported"):
        for seconds in (0.5, 0.75):
            with found:
                driver.count_compile(seconds)
                net(*(t.cpu() for t in inputs))
            driver.count_compile(9.0)
    assert found.compiled == (pytest.approx(1.25), 2)
    assert str(found).splitlines()[0] == "2 kernels compiled, or loaded from the cache, in 1.25 s"
    assert "<p>2 kernels compiled, or loaded from the cache, in 1.25 s</p>" in page.page(found)


def test_nvtx_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="nvtx=True needs a torch with CUDA"):
        gnnaccel.report(nvtx=True)


def test_nvtx_ranges_are_named_after_layers_and_closed(route, net, inputs, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with route.on(), Report(nvtx=True):
        net(*inputs)
    assert seen == ["gnnaccel GATConv", "pop", "gnnaccel GATConv", "pop", "gnnaccel GATv2Conv",
                    "pop"]


# ---- around a script ----

def test_the_command_line_gets_tables_and_a_page(route, net, inputs, tmp_path, capsys):
    path = tmp_path / "out.html"
    observer = observe.start(True, True, str(path))
    with route.on():
        steps(net, inputs)
    observe.finish(observer)
    err = capsys.readouterr()
    assert "first (GATConv)" in err.err and "same" in err.err and str(path) in err.err and err.out == ""
    assert path.read_text(encoding="utf-8").count(
        "<svg") >= 3 and not watch._watchers and not records.listening()


def test_comparing_is_not_measured(route, net, inputs):
    observer = observe.start(True, True, None)
    with route.on():
        steps(net, inputs, 2)
    observe.finish(observer)
    assert [(e.calls, e.backwards) for e in observer.measured.entries] == [(2, 2)] * 3
    found = observer.comparer.result
    assert [(one.who, one.verdict)
            for one in found.layers] == [("first (GATConv)", "same"), ("second (GATConv)", "same"),
                                         ("last (GATv2Conv)", "same")], str(found)


@pytest.mark.parametrize("profile, compare", [(False, True), (False, False), (True, False)])
def test_only_what_was_asked_for(profile, compare, route, net, inputs, capsys):
    observer = observe.start(profile, compare, None)
    with route.on():
        steps(net, inputs, 1)
    observe.finish(observer)
    err = capsys.readouterr().err
    assert ("in layers, by" in err, "verdict" in err) == (profile, compare)


def test_ranks_write_pages_and_lines_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    observe.finish(observe.start(False, False, str(tmp_path / "out.html")))
    assert [p.name
            for p in tmp_path.iterdir()] == [
                "out.rank3.html"] and "rank 3: report: " in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said_before_the_script_runs(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "out.html"):
        with pytest.raises(OSError, match="name a file in a folder that exists"):
            observe.start(False, False, str(path))
    assert not watch._watchers


# ---- on a GPU ----

@pytest.mark.gpu
def test_times_are_those_of_events_around_the_calls(gpu):
    net = Net().to(gpu.device)
    net.second, net.last = GATConv(16, 8, 8).to(gpu.device), GATv2Conv(64, 8, 8).to(gpu.device)
    x = torch.randn(200_000, F, device=gpu.device)
    edge_index = torch.randint(0, 200_000, (2, 20_000_000), device=gpu.device)
    events = []

    def around(layer):
        native = layer.forward

        def forward(*args):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = native(*args)
            end.record()
            events.append((start, end))
            return out

        return forward

    with gpu.on():
        steps(net, (x, edge_index), 3)
        for layer in net.children():
            layer.forward = around(layer)
        torch.cuda.synchronize()
        with gnnaccel.report() as found:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            steps(net, (x, edge_index), 10)
            end.record()
        torch.cuda.synchronize()
    forward, whole = sum(s.elapsed_time(e) for s, e in events), start.elapsed_time(end)
    ours = sum(entry.forward_ms for entry in found.entries)
    assert 0.5 * forward <= ours <= 1.02 * forward, (ours, forward)
    total = sum(entry.total_ms for entry in found.entries)
    # the layers are nearly all of a step
    assert ours < total and 0.5 * whole <= total <= 1.02 * whole, (total, whole)


@pytest.mark.gpu
def test_measuring_waits_for_nothing(gpu):
    net = Net().to(gpu.device)
    inputs = graphs.features().to(gpu.device), graphs.square().to(gpu.device)
    with gpu.on():
        steps(net, inputs, 3)
        with gnnaccel.report() as found:
            steps(net, inputs, 2)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                steps(net, inputs, 3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert all(entry.calls == 5 and entry.kept_bytes > 0 for entry in found.entries)


@pytest.mark.gpu
def test_a_cuda_graph_is_captured_as_without(gpu):
    net = Net().to(gpu.device)
    inputs = graphs.features().to(gpu.device), graphs.square().to(gpu.device)
    with gpu.on(), torch.no_grad(), gnnaccel.report():
        for _ in range(3):
            expected = net(*inputs)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), torch.cuda.graph(graph):
            out = net(*inputs)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.allclose(out, expected, atol=1e-5)


def test_edges_are_told_of_each_layer(route, net, inputs):
    with route.on(), gnnaccel.report() as found:
        net(*inputs)
    assert all(entry.graph["num_edges"] == E for entry in found.entries)
