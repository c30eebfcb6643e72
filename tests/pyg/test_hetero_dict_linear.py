"""HeteroDictLinear against the host's own code."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import HeteroDictLinear, Linear

import gnnaccel
from gnnaccel.dispatch.relational import costs, statements
from gnnaccel.dispatch.relational.request import RelationalRequest
from gnnaccel.errors import FallbackError
from tests.helpers import relative
from tests.pyg.judge import compare, on_routes, runs_natively, took

SIZES = {"a": 7, "empty": 0, "b": 1, "long": 40, "c": 3, "last": 16}


def layer(inner=8, columns=16, types=tuple(SIZES), **options) -> HeteroDictLinear:
    return HeteroDictLinear(inner, columns, types=list(types), **options)


def rows(inner=8, sizes=SIZES) -> dict:
    return {name: torch.randn(n, inner) for name, n in sizes.items()}


@on_routes("shape", [(8, 16), (5, 3)], [(1, 1), (64, 64), (7, 40), (130, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_shapes(route, shape, bias):
    compare(route, layer(*shape, bias=bias), rows(shape[0]))


def test_missing_and_unknown_types_and_their_order(route):
    made, x = layer().to(route.device), {name: t.to(route.device) for name, t in rows().items()}
    given = {"unknown": x["a"], "last": x["last"], "a": x["a"]}
    expected = made(given)
    with route.on():
        found = made(given)
    took(route, 1)
    assert list(found) == list(expected) == ["a",
                                             "last"] and all(relative(found[k], expected[k]) < 1e-5
                                                             for k in found)
    found["a"].sum().backward()
    assert made.lins["b"].weight.grad is None


def test_a_type_whose_result_is_not_used_gets_no_gradient(route):
    made, x = layer().to(route.device), {name: t.to(route.device).requires_grad_()
                                         for name, t in rows().items()}
    with route.on():
        found = made(x)
    (found["long"].square().sum() + found["empty"].sum()).backward()
    for name, lin in made.lins.items():
        used = name in ("long", "empty")
        assert all((p.grad is not None) is used for p in (lin.weight, lin.bias, x[name]))
    assert not made.lins["empty"].weight.grad.any()


def test_results_may_be_changed_in_place(route):
    made = layer(bias=False).to(route.device)
    x = {name: t.to(route.device) for name, t in rows().items()}
    expected = {k: t.relu() for k, t in made(x).items()}
    with route.on():
        found = {k: t.relu_() for k, t in made(x).items()}
    assert all(relative(found[k], expected[k]) < 1e-5 for k in found)
    sum(t.sum() for t in found.values()).backward()


@pytest.mark.parametrize("frozen", ["x", "weights", "biases", "one"])
def test_gradients_of_some(route, frozen):
    made, x = layer(), {name: t.requires_grad_() for name, t in rows().items()}
    lins = list(made.lins.values())
    some = {"x": list(x.values()), "weights": [lin.weight for lin in lins],
            "biases": [lin.bias for lin in lins],
            "one": [lins[3].weight, lins[0].bias, x["last"]]}[frozen]
    for t in some:
        t.requires_grad_(False)
    compare(route, made, x, require=False)


def test_odd_strides_and_parameters(route):
    x = {name: torch.randn(n, 16)[:, ::2] for name, n in SIZES.items()}
    compare(route, layer(), {**x, "a": torch.nn.Parameter(torch.randn(7, 8))})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    made, x = layer().to(route.device), {name: t.to(route.device) for name, t in rows().items()}
    expected = made(x)
    for inside in (mode, torch.enable_grad):  # what one call leaves behind serves the next
        with inside(), route.on():
            found = made(x)
        assert all(relative(found[k], expected[k]) < 1e-5 for k in found)
    sum(t.sum() for t in found.values()).backward()
    took(route, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(route, dtype, autocast):
    made, x = layer().to(route.device), {name: t.to(route.device) for name, t in rows().items()}
    exact = made.double()({k: t.double() for k, t in x.items()})
    made = made.to(torch.float32 if autocast else dtype)
    x = {k: t.to(made.lins["a"].weight.dtype).requires_grad_() for k, t in x.items()}
    with torch.autocast(route.device.type, dtype, enabled=autocast):
        native = made(x)
        with route.on():
            got = made(x)
    sum(t.float().sum() for t in got.values()).backward()
    for k in got:
        assert got[k].dtype == native[k].dtype
        assert not SIZES[k] or relative(got[k], exact[k]) < 2 * relative(native[k], exact[k]) + 1e-4
        assert x[k].grad.dtype == x[k].dtype and all(p.grad.dtype == p.dtype
                                                     for p in made.lins[k].parameters())


def test_rows_in_several_dtypes_under_autocast(route):
    made, x = layer().to(route.device), {name: t.to(route.device) for name, t in rows().items()}
    x["a"] = x["a"].bfloat16()
    with torch.autocast(route.device.type, torch.bfloat16):
        native = made(x)
        with route.on():
            got = made(x)
    assert all(got[k].dtype == native[k].dtype
               and (not SIZES[k] or relative(got[k], native[k]) < 2e-2) for k in got)


def test_the_other_half_type_under_autocast(route):
    made = layer().to(route.device).half()
    x = {name: t.to(route.device).half() for name, t in rows().items()}
    with torch.autocast(route.device.type, torch.bfloat16):
        native = made(x)
        with route.on():
            got = made(x)
    sum(t.float().sum() for t in got.values()).backward()
    assert all(got[k].dtype == native[k].dtype
               and (not SIZES[k] or relative(got[k], native[k]) < 2e-2) for k in got)
    assert all(p.grad.dtype == torch.float16 for p in made.parameters())


def test_second_derivatives(emulated):
    made = layer(3, 4, ("a", "b", "c"))
    x = {name: torch.randn(n, 3, requires_grad=True) for name, n in (("a", 4), ("b", 0), ("c", 2))}

    def penalty():
        out = made(x)
        first = torch.autograd.grad((out["a"].pow(3).sum() + out["c"].pow(2).sum()),
                                    [x["a"], made.lins["c"].weight], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first),
                                   [x["a"], x["c"], made.lins["a"].weight])

    expected = penalty()
    with emulated.on():
        found = penalty()
    assert all(relative(a, b) < 1e-5 for a, b in zip(found, expected))


def test_the_structure_is_kept_by_sizes(route):
    made = layer().to(route.device)
    with route.on(records=10):
        for sizes in (SIZES, SIZES, {**SIZES, "a": 8}, SIZES):
            made({name: t.to(route.device) for name, t in rows(sizes=sizes).items()})
        assert [r["cache"] for r in gnnaccel.records()] == ["miss", "hit", "miss", "hit"]


# ---- what stays native ----

@pytest.mark.long
def test_causes(route):
    x = {name: t.to(route.device) for name, t in rows().items()}
    made = layer().to(route.device)
    runs_natively(route, "GA208", HeteroDictLinear({"a": 8, "b": 5}, 16).to(route.device),
                  {"a": x["a"], "b": x["last"][:, :5].contiguous()})
    runs_natively(route, "GA303", made, {"empty": x["empty"]})
    runs_natively(route, "GA303", made, {"unknown": x["a"]})
    runs_natively(route, "GA206", made, {**x, "a": x["a"].unsqueeze(0)})
    hooked = layer().to(route.device)
    hooked.lins["a"].register_forward_hook(lambda module, args, out: 2 * out)
    runs_natively(route, "GA208", hooked, x)
    if route.backend == "cuda":
        runs_natively(route, "GA203", layer().double().to(route.device),
                      {k: t.double() for k, t in x.items()})


def test_few_types_go_native_at_a_glance_and_are_counted():
    made, x = layer(types="ab"), {"a": torch.randn(3, 8), "b": torch.randn(3, 8)}
    with gnnaccel.enabled():
        made(x)
    assert gnnaccel.stats()["HeteroDictLinear"] == {"calls": 1, "routes": {"native": 1},
                                                    "reasons": {"GA301": 1}}
    with gnnaccel.enabled(records=5):
        made(x)
        assert [(r["layer"], r["route"])
                for r in gnnaccel.records()] == [("HeteroDictLinear", "native")]
    with gnnaccel.disabled():
        made(x)
    with gnnaccel.enabled(on_fallback="raise"), pytest.raises(FallbackError):
        made(x)


@pytest.mark.parametrize("types, bits, grad, pays",
                         [(64, 10, False, True), (64, 10, True, True), (24, 8, True, True),
                          (10, 8, False, True), (64, 24, False, False), (64, 24, True, False)])
def test_few_rows_pay_and_many_do_not(types, bits, grad, pays):
    shapes = ("x", (64,)), ("weight", (64, 64)), ("types", (types,))
    request = RelationalRequest(statements.typed_linear(transposed=True), "HeteroDictLinear",
                                shapes, torch.float32, torch.float32, "cuda", bits, bits, bits,
                                types.bit_length(), grad, False)
    assert (costs.cuda(request) < costs.native(request)) is pays


BAD_CALLS = {
    "no argument": lambda l, x: l(), "tensor": lambda l, x: l(x["a"]), "list": lambda l,
    x: l(list(x.values())),
    "width": lambda l, x: l({**x, "a": x["a"][:, 1:]}), "dtype": lambda l,
    x: l({**x, "a": x["a"].double()}),
    "none": lambda l, x: l({**x, "a": None}), "too many": lambda l, x: l(x, x), "keyword": lambda l,
    x: l(x_dict=x, y=1),
}


@pytest.mark.parametrize("what", list(BAD_CALLS))
def test_wrong_calls_raise_what_the_host_raises(route, what):
    made, x = layer().to(route.device), {name: t.to(route.device) for name, t in rows().items()}
    found = []
    for block in (gnnaccel.disabled(), route.on(on_fallback="native")):
        try:
            with block:
                BAD_CALLS[what](made, x)
            found.append(None)
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1] and (found[0] is None) == (what == "list")


def test_lazy_channels_and_keywords(route):
    made, x = layer(-1,
                    types="abc"), {name: torch.randn(5, 8, device=route.device) for name in "abc"}
    with route.on():
        found = made.to(route.device)(x)  # its own hook has filled it in by then
        assert torch.equal(made(x_dict=x)["a"], found["a"])
    took(route, 2)
    assert isinstance(made.lins["a"], Linear) and tuple(made.lins["a"].weight.shape) == (16, 8)


@pytest.mark.parametrize("all_types, code", [(False, "GA208"), (True, "GA206")])
def test_biases_that_the_host_broadcasts(route, all_types, code):
    made, x = layer().to(route.device), {k: t.to(route.device) for k, t in rows().items()}
    for name in SIZES if all_types else ("a",):
        made.lins[name].bias = torch.nn.Parameter(torch.full((1,), 0.5, device=route.device))
    runs_natively(route, code, made, x)
