"""HEATConv with its options, held against the host."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import HEATConv

import gnnaccel
from tests.helpers import relative
from tests.pyg.graphs import EDGE, F, N, edge_features, features, square
from tests.pyg.judge import compare, on_routes
from tests.pyg.test_options_film import R, types

NODE_TYPES = 3


def build(width: int = 8, **options) -> HEATConv:
    return HEATConv(F, width, NODE_TYPES, R, 4, EDGE, 3, **options)


def inputs() -> tuple:
    return features(), square(), torch.randint(0, NODE_TYPES, (N,)), types(), edge_features()


@on_routes("options",
           [{}, {"heads": 3}, {"heads": 2, "concat": False}, {"root_weight": False, "bias": False}],
           [{"negative_slope": 0.0}, {"heads": 2, "width": 1}, {"heads": 2, "width": 7}])
def test_options(route, options):
    torch.manual_seed(0)
    # its HeteroLinear is one more
    compare(route, build(**options), *inputs(), require=False, calls=2)


def test_gradients_of_the_inputs(route):
    torch.manual_seed(1)
    x, edge_index, node_type, edge_type, edge_attr = inputs()
    found = compare(route, build(heads=2), x, edge_index, node_type, edge_type, edge_attr, calls=2)
    # the fifth argument, here edge_attr
    assert found["x"].abs().sum() > 0 and found["weights"].abs().sum() > 0


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("before", [0, 3])
def test_embeddings_of_types_with_another_gradient(route, option, before):
    """``before``: so many calls of a plain embedding are remembered."""
    layer, args = build().to(route.device), [t.to(route.device) for t in inputs()]
    with route.on():
        for _ in range(before):
            layer(*args)
    for name, value in option.items():
        setattr(layer.edge_type_emb, name, value)
    weight = layer.edge_type_emb.weight
    with gnnaccel.disabled():
        (expected,) = torch.autograd.grad(layer(*args).square().sum(), weight)
    with route.on(on_fallback="native"):
        (found,) = torch.autograd.grad(layer(*args).square().sum(), weight)
    assert relative(found, expected) < 1e-5


@pytest.mark.long
def test_dropout_keeps_the_mean(route):
    torch.manual_seed(2)
    layer = build(heads=2, dropout=0.4).to(route.device)
    args = [t.to(route.device) for t in inputs()]
    with torch.no_grad():
        want = layer.eval()(*args)
        layer.train()
        with route.on():
            draws = torch.stack([layer(*args) for _ in range(300)])
    spread = draws.std(0) / 300 ** 0.5
    assert (draws.std(0) > 0).any()
    assert ((draws.mean(0) - want).abs() <= 6 * spread + 1e-5).all()


@pytest.mark.long
def test_derivatives():
    torch.manual_seed(3)
    layer = HEATConv(3, 2, 2, 3, 2, 2, 2, heads=2).double()
    x, attr = torch.randn(5,
                          3).double().requires_grad_(), torch.randn(12, 2).double().requires_grad_()
    edge_index = torch.randint(0, 5, (2, 12))
    node_type = torch.randint(0, 2, (5,))
    edge_type = torch.randint(0, 3, (12,))
    with gnnaccel.enabled(when="supported", on_fallback="raise"):
        assert torch.autograd.gradcheck(lambda x,
                                        attr: layer(x, edge_index, node_type, edge_type, attr),
                                        (x, attr))
        assert torch.autograd.gradgradcheck(lambda x,
                                            attr: layer(x, edge_index, node_type, edge_type, attr),
                                            (x, attr))


def _subclassed(layer: HEATConv) -> None:
    layer.lin = torch.nn.utils.parametrizations.weight_norm(layer.lin)


def _watched(layer: HEATConv) -> None:
    layer.edge_type_emb.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_subclassed, _watched])
def test_what_runs_natively(change):
    torch.manual_seed(4)
    layer, args = build(), inputs()
    change(layer)
    with gnnaccel.enabled(when="supported", records=2):
        got = layer(*args)
        found = [r for r in gnnaccel.records() if r["layer"] == "HEATConv"]
    assert found[-1]["rejected"][0]["code"] == "GA208"
    torch.testing.assert_close(got, layer(*args))


@pytest.mark.long
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("attribute, value", [("heads", 1), ("heads", 4), ("out_channels", 4),
                                              ("edge_type_emb.num_embeddings", 1)])
def test_an_attribute_that_is_no_longer_that_of_the_weights(route, attribute, value, called):
    """The host goes by the weights, or raises."""
    layer = build(heads=2).to(route.device)
    args = [t.to(route.device) for t in inputs()]
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*args)
    module, _, name = attribute.rpartition(".")
    setattr(layer.get_submodule(module), name, value)
    gnnaccel.reset_stats()
    try:
        expected = layer(*args)
    except Exception as error:
        with route.on(on_fallback="native"), pytest.raises(type(error)):
            layer(*args)
    else:
        with route.on(on_fallback="native"):
            assert relative(layer(*args), expected) < 1e-5
    assert gnnaccel.stats()["HEATConv"]["reasons"] == {"GA206": 1}
