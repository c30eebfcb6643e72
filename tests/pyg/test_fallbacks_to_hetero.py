"""Models made by `to_hetero`: what goes the way of the model's own code, and that every change is
noticed."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import LEConv, SAGEConv, to_hetero
from torch_geometric.nn.fx import symbolic_trace

import gnnaccel
from gnnaccel.dispatch.observe import records
from tests.pyg.hetero_graphs import CITES, METADATA, OUT, WIDTH, edges, features, on, same
from tests.pyg.judge import native_again, took

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")
CITING = "__".join(CITES)


class Net(torch.nn.Module):
    def __init__(self, make=SAGEConv, **options):
        super().__init__()
        self.first, self.second = make(WIDTH, OUT, **options), make(OUT, OUT, **options)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def made_for(route, *args, **options) -> tuple[torch.nn.Module, dict, dict]:
    return (to_hetero(Net(*args, **options), METADATA, "mean").to(route.device),
            *on(route.device, features(), edges()))


def checked(route, made: torch.nn.Module, x: dict, ei: dict, **options) -> dict:
    """The host's result, and the counts."""
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on(**{"on_fallback": "native", **options}):
        same(made(x, ei), expected)
    return gnnaccel.stats()


def test_layers_that_cannot_run_as_one_are_no_fallback(route):
    for options in (dict(normalize=True), dict(aggr="max")):
        stats = checked(route, *made_for(route, **options), on_fallback="raise")
        assert stats["HeteroConv"]["reasons"] == {"GA210": 2} and stats["SAGEConv"]["calls"] == 10


def test_the_models_own_code_bit_for_bit(route):
    made, x, ei = made_for(route)
    expected = made(x, ei)
    with route.on(exclude=["HeteroConv", "SAGEConv"]):
        got = made(x, ei)
    assert all(native_again(got[k], t) for k, t in expected.items())
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA101": 2}


def test_layers_of_other_kinds_are_called_as_ever(route):
    names = [CITES, ("paper", "with", "paper")]
    made = to_hetero(Net(LEConv), (["paper"], names)).to(route.device)
    x, ei = on(route.device, {"paper": features()["paper"]}, edges(names))
    stats = checked(route, made, x, ei)
    assert stats.keys() == {"LEConv"} and stats["LEConv"]["calls"] == 4


@pytest.mark.parametrize("where", ["layer", "message", "lin", "model", "everywhere"])
def test_hooks(route, where):
    made, x, ei = made_for(route)
    conv, log = made.first[CITING], []
    register = {"layer": conv.register_forward_hook, "message": conv.register_message_forward_hook,
                "lin": conv.lin_l.register_forward_hook, "model": made.register_forward_hook,
                "everywhere": torch.nn.modules.module.register_module_forward_hook}[where]
    handle = register(lambda *args: log.append(1))
    try:
        checked(route, made, x, ei)
    finally:
        handle.remove()
    assert len(log) >= 2 and len(log) % 2 == 0
    checked(route, made, x, ei)
    took(route, 2)


@pytest.mark.long
def test_layers_that_are_replaced(route):
    made, x, ei = made_for(route)
    checked(route, made, x, ei)
    made.first[CITING] = SAGEConv(WIDTH, OUT).to(route.device)
    made.second[CITING].lin_l.weight = torch.nn.Parameter(torch.randn(OUT, OUT,
                                                                      device=route.device))
    checked(route, made, x, ei)
    took(route, 2)
    made.first[CITING] = LEConv(WIDTH, OUT).to(route.device)
    stats = checked(route, made, x, ei)
    assert stats["LEConv"]["calls"] == 1 and stats["HeteroConv"]["routes"][route.backend] == 2
    made.first = torch.nn.ModuleDict({key: SAGEConv(WIDTH, OUT).to(route.device)
                                      for key in made.first})
    checked(route, made, x, ei)
    took(route, 2)
    del made.first[CITING]
    for block in (route.on(), gnnaccel.disabled()):
        with block, pytest.raises(AttributeError, match=CITING):
            made(x, ei)


@pytest.mark.long
def test_a_forward_that_a_user_puts_on_the_models_class_runs(route):
    made, x, ei = made_for(route)
    checked(route, made, x, ei)
    generated = type(made).forward
    type(made).forward = lambda *args: {name: t * 2 for name, t in generated(*args).items()}
    checked(route, made, x, ei)
    type(made).forward = generated
    assert "HeteroConv" in checked(route, made, x, ei)


@pytest.mark.long
def test_rules(route):
    made, x, ei = made_for(route)
    gnnaccel.exclude(made.first[CITING])
    stats = checked(route, made, x, ei)
    assert stats["SAGEConv"]["reasons"] == {"GA101": 1} and stats["HeteroConv"]["reasons"] == {
        "GA210": 1}
    gnnaccel.include(made.first[CITING])
    gnnaccel.name_layers(made)
    gnnaccel.exclude("second")
    assert checked(route, made, x, ei)["HeteroConv"]["reasons"] == {"GA101": 1}
    gnnaccel.reset_rules()
    gnnaccel.exclude(made)
    assert set(checked(route, made, x, ei)["SAGEConv"]["reasons"]) == {"GA101"}
    gnnaccel.reset_rules()
    assert set(checked(route, made, x, ei,
                       include=["SAGEConv"])["HeteroConv"]["reasons"]) == {"GA102"}


def test_inputs_that_are_missing(route):
    made, x, ei = made_for(route)
    for given in (({k: t for k, t in x.items() if k != "author"}, ei),
                  (x, {k: t for k, t in ei.items() if k != CITES})):
        errors = []
        for block in (gnnaccel.disabled(), route.on(on_fallback="native")):
            with block, pytest.raises(Exception) as caught:
                made(*given)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]


@pytest.mark.long
def test_compiling_and_tracing(route):
    made, x, ei = made_for(route)
    expected = made(x, ei)
    outer = torch.nn.Sequential()
    outer.inner = made
    outer.forward = lambda x, ei: outer.inner(x, ei)
    with route.on(on_fallback="native"):
        for model in (made, outer):
            torch.compiler.reset()
            got = torch.compile(model, backend="eager", fullgraph=True)(x, ei)
            same(got, expected)
        assert not gnnaccel.stats()
        traced = symbolic_trace(made)
        assert traced.code.count("self.first") == len(ei)
        assert not gnnaccel.stats()
        same(traced(x, ei), expected)
        took(route, 2)  # what comes of tracing has the layers, too


def test_functional_calls_and_inference(route):
    made, x, ei = made_for(route)
    other = {name: torch.randn_like(t) for name, t in made.named_parameters()}
    expected = torch.func.functional_call(made, other, (x, ei))
    with route.on(on_fallback="native"):
        made(x, ei)
        same(torch.func.functional_call(made, other, (x, ei)), expected, 1e-5)
        with torch.inference_mode():
            made(x, ei)


def test_records_and_names(route):
    made, x, ei = made_for(route)
    gnnaccel.name_layers(made)
    with route.on(records=8):
        made(x, ei)
        found = gnnaccel.records()
    for record in found:
        records.validate(record)
    assert [(one["layer"], one["name"])
            for one in found] == [("HeteroConv", "first"), ("HeteroConv", "second")]
    assert found[0]["graph"]["num_relations"] == len(ei)


@pytest.mark.long
def test_explaining_and_comparing(route):
    made, x, ei = made_for(route)
    with route.on():
        explained = gnnaccel.explain(made, x, ei)
        assert [(one.name, one.layer, one.status) for one in explained.layers[:2]] == [
            ("first", "HeteroConv", "taken over"), ("second", "HeteroConv", "taken over")]
        assert not [one for one in explained.layers if one.status == "not called"]
        assert gnnaccel.compare(made, x, ei).ok
        program = gnnaccel.explain_program(made, x, ei)
    assert [one.layer
            for one in program.inside] == ["HeteroConv"] * 2 and "aggregate_first" in str(program)


@pytest.mark.long
def test_quantized_layers_inside_go_one_by_one(route):
    made, x, ei = made_for(route)
    with route.on(on_fallback="native"), torch.no_grad():
        gnnaccel.quantize(made, overrides={"second": "int8"})
        made.eval()(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA210": 2} and gnnaccel.stats()[
        "SAGEConv"]["calls"] == 10


def test_small_graphs_that_are_new_go_native():
    made, x = to_hetero(Net(), METADATA), features()
    for _ in range(2):
        ei = edges()
        expected = made(x, ei)
        with gnnaccel.enabled():
            got = made(x, ei)
        assert all(torch.equal(got[k], t) for k, t in expected.items())
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA401": 4}
    with gnnaccel.enabled(records=4):
        made(x, ei)
        assert len(gnnaccel.records()) >= 2  # who listens is told


def test_checkpoints(route):
    made, x, ei = made_for(route)
    x = {k: t.requires_grad_() for k, t in x.items()}

    def gradients(block) -> dict:
        made.zero_grad()
        with block:
            out = torch.utils.checkpoint.checkpoint(made, x, {k: t.clone() for k, t in ei.items()},
                                                    use_reentrant=False)
            sum(t.sum() for t in out.values()).backward()
        return {k: t.grad.clone() for k, t in made.named_parameters()}

    expected = gradients(gnnaccel.disabled())
    for block in (route.on(), gnnaccel.enabled()):
        same(gradients(block), expected)


def test_layers_that_gain_nothing_on_a_cpu_are_not_read_there():
    from torch_geometric.nn import GINConv

    made, x, ei = to_hetero(Net(lambda i, o: GINConv(torch.nn.Linear(i, o))),
                            METADATA), features(), edges()
    expected = made(x, ei)
    with gnnaccel.enabled():
        for _ in range(2):
            got = made(x, ei)
    assert all(torch.equal(got[k], t) for k, t in expected.items())
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA401": 4}
