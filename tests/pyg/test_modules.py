"""Layers as modules: copies, checkpoints, wrappers, hooks, lazy sizes, replaced parts."""
from __future__ import annotations

import copy
import gc
import io
import pickle
import socket
import threading

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch.nn.utils import prune
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.helpers import relative
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F
from tests.pyg.judge import close, spread, took
from tests.pyg.layers import CLASSES, NAMES, build


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.second = spread(GATConv(F, 8, 2, **options)), spread(GATv2Conv(16, 8, 2))

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def both(route, call):
    """(native, accelerated) results of ``call()``, which must take the route."""
    expected = call()
    gnnaccel.reset_stats()
    with route.on():
        got = call()
    took(route)
    return expected, got


# ---- copies ----

@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_of_a_used_layer(route, inputs, name):
    layer = build(name, device=route.device).eval()
    before = list(layer.state_dict()), set(vars(layer))
    with route.on():
        expected = layer(*inputs)
        twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), _saved(layer)]
        assert all(close(twin(*inputs), expected, 1e-6) for twin in twins)
    took(route, 4)
    assert (list(layer.state_dict()), set(vars(layer))) == before
    assert close(twins[1](*inputs), expected)


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_state_dict_goes_both_ways(route, inputs):
    accelerated, native = Model().to(route.device), Model().to(route.device)
    with route.on():
        expected = accelerated(*inputs)
        native.load_state_dict(accelerated.state_dict())
    assert close(native(*inputs), expected)
    other = Model().to(route.device)
    with route.on():
        other(*inputs)
        other.load_state_dict(native.state_dict())
        assert close(other(*inputs), expected)


def test_pickles_name_only_the_host():
    gnnaccel.enable()
    text = pickle.dumps(GATConv(F, 8, 2))
    assert b"gnnaccel" not in text and b"torch_geometric" in text


def test_trained_parameters_are_seen(route, inputs):
    model, twin = Model().to(route.device), None
    twin = copy.deepcopy(model)

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            model(*inputs).pow(2).mean().backward()
            optimizer.step()
        return model(*inputs).detach()

    expected = train(twin)
    with route.on():
        got = train(model)
    took(route, 12)
    assert close(got, expected, 1e-4)


# ---- wrappers ----

def test_ddp(route, inputs):
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    except RuntimeError as problem:
        pytest.skip(f"gloo cannot start here: {problem}")
    try:
        model = Model().to(route.device)
        twin = copy.deepcopy(model)
        twin(*inputs).pow(2).sum().backward()
        with route.on():
            trained_by_ddp(model, inputs)
        took(route, 4)
        grads = {name: p.grad for name, p in twin.named_parameters()}
        largest = max(g.norm() for g in grads.values())
        assert all((p.grad - grads[name]).norm() < 1e-5 * largest
                   for name, p in model.named_parameters())
    finally:
        dist.destroy_process_group()


def trained_by_ddp(model, inputs) -> None:
    """Two passes. The wrapper is gone when the process group is destroyed: as the last to hold the
    group it would wait for its threads with the interpreter's lock, for which one of these may
    wait."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # a gradient that never came would make the second call fail
        wrapped.zero_grad()
        wrapped(*inputs).pow(2).sum().backward()
    del wrapped
    gc.collect()


def replica_of(module):
    """What DataParallel makes of a module: its parameters are plain attributes, ``_parameters`` is
    empty."""
    twin = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        twin._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        setattr(twin, name, None if parameter is None else parameter.detach().clone())
    return twin


@pytest.mark.parametrize("name", NAMES)
def test_replicas_of_data_parallel(route, inputs, name):
    layer = build(name, device=route.device).eval()
    expected, got = layer(*inputs), None
    with route.on():
        got = replica_of(layer)(*inputs)
    took(route, 1)
    assert close(got, expected.detach())


@pytest.mark.parametrize("name", NAMES)
def test_functional_call(route, inputs, name):
    layer = build(name, device=route.device).eval()
    other = {k: torch.randn_like(v) for k, v in layer.named_parameters()}
    expected, got = both(route, lambda: torch.func.functional_call(layer, other, inputs))
    assert close(got, expected)


@pytest.mark.long
def test_threads(route, inputs):
    model, results, errors = Model().to(route.device), {}, []
    x, ei = inputs
    expected = [model(x * k, ei).detach() for k in range(1, 5)]

    def work(k: int):
        try:
            for _ in range(5):
                out = model(x * k, ei)
                out.sum().backward()
            results[k] = out.detach()
        except Exception as error:
            errors.append(error)

    gnnaccel.enable(backend=route.backend, when="supported", on_fallback="raise")
    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and all(close(results[k], expected[k - 1]) for k in range(1, 5))
    assert sum(entry["calls"] for entry in gnnaccel.stats().values()) == 40
    assert 1 <= cache.info()["entries"] <= 2


# ---- hooks ----

@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_the_layer(route, inputs, name):
    layer, x = build(name, device=route.device).eval(), inputs[0].clone().requires_grad_()

    def seen():
        log, handles = [], [
            layer.register_forward_pre_hook(lambda m,
                                            args: log.append(("before", [a.shape for a in args]))),
            layer.register_forward_hook(lambda m, args,
                                        out: log.append(("after", out.shape)) or out * 2),
            layer.register_full_backward_hook(lambda m, gi,
                                              go: log.append(("back", [g is None for g in gi],
                                                              go[0].shape)))]
        out = layer(x, inputs[1])
        grad, = torch.autograd.grad(out.sum(), x)
        [h.remove() for h in handles]
        return log, out.detach(), grad

    native, got = both(route, seen)
    assert got[0] == native[0] and len(got[0]) == 3 and close(got[1], native[1]) and close(got[2],
                                                                                           native[
                                                                                               2])


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv"])
@pytest.mark.parametrize("heads", [1, 2])
def test_hooks_of_the_linear_maps(route, inputs, name, heads):
    options = {} if name == "SuperGATConv" else dict(edge_dim=EDGE)
    layer = build(name, heads=heads, device=route.device, **options).eval()
    attr = [] if name == "SuperGATConv" else [graphs.edge_features().to(route.device)]

    def seen():
        log, handles = [], []
        for path, module in layer.named_modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor):
                handles.append(module.register_forward_hook(
                    lambda m, args, out,
                    path=path: log.append((path, tuple(out.shape))) or out + 1))
        out = layer(*inputs, *attr)
        [h.remove() for h in handles]
        return sorted(log), out.detach()

    native, got = both(route, seen)
    names = [name for name, _ in native[0]]
    assert [name
            for name, _ in got[0]] == names and len(names) >= 1 and close(got[1], native[1], 1e-4)


def test_hooks_of_a_folded_transformer(route, inputs):
    """One head: keys and values are not computed for the sources, unless somebody watches."""
    layer = build("TransformerConv", heads=1, device=route.device).eval()
    log = []
    for part in (layer.lin_key, layer.lin_value):
        part.register_forward_hook(lambda m, args, out: log.append(out.shape))
    native, got = both(route, lambda: layer(*inputs))
    assert len(log) == 4 and close(got, native)


def test_one_row_of_any_strides(route, monkeypatch):
    """Products are added to what kernels write; cuBLAS refuses a row whose strides are its own."""
    layer = build("TransformerConv", heads=1, device=route.device).eval()
    x = torch.randn(1, F, device=route.device).as_strided((1, F), (1, 1)).requires_grad_()
    edge_index = torch.zeros(2, 3, dtype=torch.long, device=route.device)
    add, targets = torch.Tensor.addmm_, []
    monkeypatch.setattr(torch.Tensor, "addmm_",
                        lambda t, *more: targets.append((*t.shape, *t.stride())) or add(t, *more))
    native, got = both(route, lambda: torch.autograd.grad(layer(x, edge_index).sum(), x)[0])
    assert close(got, native) and all(found == (1, found[1], found[1], 1) for found in targets)
    assert targets or route.name == "torch"


@pytest.mark.parametrize("gap", [10.0, 17.0, 20.0])
def test_a_source_that_weighs_next_to_nothing_has_its_gradient(route, gap):
    """Two sources, whose scores lie ``gap`` apart: beyond 16.6 the sum of the softmax is 1."""
    layer = TransformerConv(2, 2, root_weight=False, bias=False).to(route.device)
    with torch.no_grad():
        for part in (layer.lin_key, layer.lin_query, layer.lin_value):
            part.weight.copy_(torch.eye(2))
    x = torch.tensor([[0.0, 0.01], [-gap * 2**0.5, 0.5], [1.0, 0.0]], device=route.device)
    edge_index = torch.tensor([[0, 1], [2, 2]], device=route.device)

    def gradient(layer, x):
        out = layer(x, edge_index)[2] * torch.tensor([1.3, 0.7]).to(x)
        return torch.autograd.grad(out.sum(), layer.lin_query.weight)[0]

    exact = gradient(copy.deepcopy(layer).double(), x.double())
    with route.on():
        assert relative(gradient(layer, x), exact) < 1e-3


@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_global_hooks_see_every_module(route, inputs, name):
    """As profilers of modules register them; also aggregations, which a kernel would leave out."""
    layer = build(name, heads=1, device=route.device).eval()
    attr = {}
    if name == "GATConv":
        layer = build(name, edge_dim=EDGE, device=route.device).eval()
        attr = dict(edge_attr=graphs.edge_features().to(route.device))
    log = []
    with route.on():
        layer(*inputs, **attr)  # so that a repeated call could take a short way
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args,
                                                                  out: log.append(type(m).__name__))
    try:
        layer(*inputs, **attr)
        native = log.copy()
        log.clear()
        with route.on(on_fallback="native"):
            layer(*inputs, **attr)
    finally:
        handle.remove()
    assert log == native and len(native) > 3


# ---- replaced parts ----

def test_lazy_sizes(route, inputs):
    for name in ("GATConv", "GATv2Conv", "TransformerConv"):
        gnnaccel.reset_stats()
        layer = CLASSES[name](-1, 8, 2).to(route.device)
        with route.on(on_fallback="native"):
            first, second = layer(*inputs), layer(*inputs)
        assert gnnaccel.stats()[name]["reasons"] == {"GA209": 1}
        assert gnnaccel.stats()[name]["routes"] == {"native": 1,
                                                    route.backend: 1} and close(second, first)


class Stretched(torch.nn.Module):
    """A linear map in two parts, without a weight of its own; as adapters such as LoRA make
    them."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain = inner, torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x) * self.gain


@pytest.mark.parametrize("name,part",
                         [("GATConv", "lin"), ("GATConv", "lin_edge"), ("GATv2Conv", "lin_l"),
                          ("GATv2Conv", "lin_edge"), ("TransformerConv", "lin_key"),
                          ("TransformerConv", "lin_value"), ("SuperGATConv", "lin")])
@pytest.mark.parametrize("heads", [1, 2])
def test_another_linear_map(route, inputs, name, part, heads):
    options = dict(edge_dim=EDGE) if part == "lin_edge" else {}
    layer = build(name, heads=heads, **options).eval()
    setattr(layer, part, Stretched(getattr(layer, part)))
    attr = [graphs.edge_features().to(route.device)] if options else []
    layer = layer.to(route.device)
    expected, got = both(route, lambda: layer(*inputs, *attr))
    assert close(got, expected)


@pytest.mark.parametrize("name,part", [("GATConv", "lin"), ("TransformerConv", "lin_key")])
def test_a_scripted_linear_map(route, inputs, name, part):
    """Its parameters lie in no dictionary."""
    layer = build(name).eval()
    made = torch.nn.Linear(F, getattr(layer, part).out_channels)
    setattr(layer, part, torch.jit.script(made))
    layer = layer.to(route.device)
    expected, got = both(route, lambda: layer(*inputs))
    assert close(got, expected)


@pytest.mark.parametrize("what", ["bias", "weight"])
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "SuperGATConv"])
def test_pruned_and_parametrized(route, inputs, name, what):
    attention = {"GATConv": "att_src", "GATv2Conv": "att", "SuperGATConv": "att_l"}[name]
    target = "bias" if what == "bias" else attention
    pruned = build(name, device=route.device).eval()
    parametrized = build(name, device=route.device).eval()
    prune.random_unstructured(pruned, target, amount=0.5)
    parametrize.register_parametrization(parametrized, target, torch.nn.Softplus())
    for layer in (pruned, parametrized):
        expected, got = both(route, lambda layer=layer: layer(*inputs))
        assert close(got, expected)


def test_moved_to_another_dtype_and_back(route, inputs):
    model = Model().to(route.device)
    with route.on():
        expected = model(*inputs)
        model.to(torch.bfloat16).to(torch.float32)
        assert not torch.equal(model(*inputs), expected) and close(model(*inputs), expected, 0.05)
