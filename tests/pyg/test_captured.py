"""``enable(capture=True)``: modules whose calls repeat are replayed, and only those."""
from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import pickle
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import gnnaccel
from gnnaccel.adapters.captured import counts, modules
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import reasons
from tests.pyg.recorded import recorded  # noqa: F401

SCALE = 1.0
PLACE = ["cpu"]


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.norm = pyg.GCNConv(6, 8), nn.BatchNorm1d(8)
        self.two, self.p = pyg.GATConv(8, 3, heads=2), p
        self.slope, self.sizes = 0.1, [1, 2]
        self.to(PLACE[0])

    def forward(self, x, edge_index):
        x = F.leaky_relu(self.norm(self.one(x, edge_index)), self.slope)
        return self.two(F.dropout(x, self.p, self.training), edge_index) * SCALE * self.sizes[0]


def given() -> tuple:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(20, 6, generator=generator).to(PLACE[0]),
            torch.randint(0, 20, (2, 60), generator=generator).to(PLACE[0]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request):
    """On a CPU a stand-in takes the place of CUDA graphs."""
    if request.param == "cpu":
        request.getfixturevalue("recorded")
    PLACE[0] = request.param
    modules.reset()
    with gnnaccel.enabled(capture=True, when="supported"):
        yield
    PLACE[0] = "cpu"


def step(model, *args, **kwargs) -> list:
    model.zero_grad()
    out = model(*args, **kwargs)
    out.pow(2).sum().backward()
    return [out.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None],
            *[b.clone() for b in model.buffers()]]


def same(found: list, expected: list) -> bool:
    size = 1 + max(float(b.abs().max()) for b in expected)  # before a BatchNorm a bias has none
    return len(found) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size) for a, b in zip(found, expected))


def replays(name: str = "Net") -> int:
    return gnnaccel.status()["captured"]["replays"].get(name, 0)


def refused(name: str = "Net") -> list[str]:
    return list(gnnaccel.status()["captured"]["refused"].get(name, {}))


def trained(model, args, steps: int = 12) -> list:
    """Each step beside that of a twin that runs natively."""
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, twin)]
    for number in range(steps):
        torch.manual_seed(number)
        found = step(model, *args)
        torch.manual_seed(number)
        with gnnaccel.disabled():
            expected = step(twin, *args)
        assert same(found, expected), number
        for one in optimizers:
            one.step()
    return found


def test_nothing_is_captured_while_kernels_are_compiled(on, monkeypatch):
    """A capture would wait for those that it needs, and be made anew when others come."""
    model, args = Net(), given()
    states = {"any": reasons.reason(compiling.PENDING)}
    monkeypatch.setattr(compiling, "_states", states)
    trained(model, args, 9)
    assert replays() == 0 and refused() == []
    states.clear()
    trained(model, args, 9)
    assert replays() == 9


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_training_is_that_of_the_module(on, p):
    """Buffers move once a step, masks are those of a call, weights those of the optimizer."""
    trained(Net(p), given())
    assert replays() == 8 and refused() == []


def test_autocast_runs_as_ever(on):
    """torch remembers the weights that it has cast, and a replay would not see new ones."""
    model, args = Net(), given()
    for _ in range(8):
        with torch.autocast(PLACE[0], torch.bfloat16):
            model(*args).float().sum().backward()
    assert replays() == 0 and refused() == ["autocast is on"]
    trained(model, args)
    assert replays() == 8


def test_evaluation_is_captured_apart(on):
    model, args = Net(), given()
    trained(model, args)
    model.eval()
    before = replays()
    with torch.no_grad():
        outs = [model(*args) for _ in range(6)]
    with gnnaccel.disabled(), torch.no_grad():
        expected = model(*args)
    assert replays() == before + 2 and all(torch.allclose(o, expected, atol=1e-5) for o in outs)


def test_captures_of_before_are_let_go_when_all_is_decided_anew(on):
    """As when kernels have been compiled: each capture holds memory."""
    model, args = Net(), given()
    trained(model, args)
    assert replays() == 8
    captured = weakref.ref(next(iter(modules.entries[id(model)].kinds.values())).captured)
    configs.renew()
    trained(model, args)
    gc.collect()
    assert replays() == 16 and captured() is None
    with gnnaccel.enabled(records=0):  # the same options, so the same epoch
        trained(model, args, 2)
    assert len(modules.entries[id(model)].kinds) == 1 and replays() == 18


def test_results_are_the_callers_own(on):
    model, args = Net().eval(), given()
    with torch.no_grad():
        outs = [model(*args) for _ in range(8)]
        outs[-1].add_(1)
        assert torch.allclose(outs[-2] + 1, outs[-1]) and replays() == 4
        assert outs[-1].data_ptr() != model(*args).data_ptr()


CHANGES = {
    "an attribute": lambda m, a: setattr(m, "slope", 0.9),
    "a list in place": lambda m, a: m.sizes.__setitem__(0, 3),
    "a submodule": lambda m, a: setattr(m, "one", pyg.GCNConv(6, 8).to(PLACE[0])),
    "a submodule's option": lambda m, a: setattr(m.two, "negative_slope", 0.9),
    "a weight": lambda m, a: setattr(m.one.lin, "weight", nn.Parameter(
        torch.randn(8, 6).to(PLACE[0]))),
    "a weight's numbers": lambda m, a: m.one.lin.weight.data.mul_(2),
    "a weight's memory": lambda m, a: setattr(m.one.lin.weight, "data",
                                               torch.randn(8, 6).to(PLACE[0])),
    "a frozen weight": lambda m, a: m.one.lin.weight.requires_grad_(False),
    "a hook": lambda m, a: m.one.register_forward_hook(lambda m, i, o: o * 2),
    "a hook of messages": lambda m, a: m.one.register_propagate_forward_hook(
        lambda m, i, o: o * 2),
    "training": lambda m, a: m.norm.eval(),
    "the edges in place": lambda m, a: a[1][0].fill_(4),
    "the features in place": lambda m, a: a[0].mul_(2),
    "a method on the object": lambda m, a: setattr(m.one, "forward", lambda x, e: x[:, :1] + m.two
                                                   .att_src.new_zeros(20, 8)),
    "a buffer": lambda m, a: m.norm.running_mean.add_(1),
    "a class": lambda m, a: setattr(m, "__class__", Doubled),
}


class Doubled(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * 2


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_is_seen(on, what, grad):
    torch.manual_seed(1)
    model, args = Net(), given()
    model.train(grad)
    run = step if grad else lambda m, *a: [m(*a).detach()]
    for _ in range(6):
        with torch.set_grad_enabled(grad):
            run(model, *args)
    assert replays() == 2
    CHANGES[what](model, args)
    twin = copy.deepcopy(model)
    if "method" in what:  # a copy's methods are those of the module that was copied
        twin = model
    for _ in range(6):
        before = [b.clone() for b in model.buffers()]
        with torch.set_grad_enabled(grad):
            found = run(model, *args)
        if twin is model:
            for b, held in zip(model.buffers(), before):
                b.copy_(held)
        with gnnaccel.disabled(), torch.set_grad_enabled(grad):
            assert same(found, run(twin, *args))


def test_globals_are_seen(on, monkeypatch):
    model, args = Net().eval(), given()
    with torch.no_grad():
        first = [model(*args) for _ in range(6)][-1]
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        assert torch.allclose(model(*args), first * 3, atol=1e-5)


class Held(Net):
    """Functions are among its attributes."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x, edge_index):
        act = self.act[0] if isinstance(self.act, list) else self.act
        return act(super().forward(x, edge_index))


def times(factor, x):
    return x * factor * TIMES


def closing(box):
    return lambda x: x * box[0]


TIMES = 2.0
HELD = {"a global": (lambda: lambda x: x * TIMES, lambda act: globals().update(TIMES=3.0)),
        "a partial's function": (lambda: functools.partial(times, 0.5),
                                 lambda act: globals().update(TIMES=3.0)),
        "in a list": (lambda: [lambda x: x * TIMES], lambda act: globals().update(TIMES=3.0)),
        "a partial's argument": (lambda: functools.partial(times, torch.ones((), device=PLACE[0])),
                                 lambda act: act.args[0].mul_(2)),
        "a closure": (lambda: closing([1.0]),
                      lambda act: act.__closure__[0].cell_contents.__setitem__(0, 4.0)),
        "its code": (lambda: lambda x: x * 2,
                     lambda act: setattr(act, "__code__", (lambda x: x + 1).__code__))}


@pytest.mark.parametrize("what", HELD)
def test_functions_among_the_attributes(on, what, monkeypatch):
    monkeypatch.setitem(globals(), "TIMES", 2.0)
    make, change = HELD[what]
    model, args = Held(make()).eval(), given()
    with torch.no_grad():
        for _ in range(8):
            found = model(*args)
        assert counts.summary()["replays"] == {"Held": 4}
        change(model.act[0] if isinstance(model.act, list) else model.act)
        found = model(*args)
        with gnnaccel.disabled():
            assert same([found], [model(*args)])


@pytest.mark.parametrize("act", [
    lambda x: print(end="") or x,
    [type("Told", (), {"times": lambda self, x: x * 2})().times]])
def test_functions_that_are_not_followed(on, act):
    model, args = Held(act).eval(), given()
    with torch.no_grad():
        for _ in range(8):
            found = model(*args)
        with gnnaccel.disabled():
            assert same([found], [model(*args)])
    assert "Held" not in counts.summary()["replays"] and counts.summary()["refused"]["Held"]


def test_a_replaced_forward_is_seen(on, monkeypatch):
    model, args = Net().eval(), given()
    with torch.no_grad():
        for _ in range(6):
            model(*args)
        monkeypatch.setattr(Net, "forward", lambda self, x, edge_index: x + 1)
        assert torch.equal(model(*args), args[0] + 1)


def test_other_arguments_run_as_ever(on):
    model, (x, edge_index) = Net().eval(), given()
    with torch.no_grad():
        for _ in range(6):
            model(x, edge_index)
        other = edge_index.flip(0).clone()
        found = [model(x, other), model(x[:, :], edge_index), model(x + 1, edge_index)]
        with gnnaccel.disabled():
            expected = [model(x, other), model(x, edge_index), model(x + 1, edge_index)]
    assert same(found, expected)


def test_features_that_differ_are_copied(on):
    model, (x, edge_index) = Net().eval(), given()
    with torch.no_grad():
        for number in range(10):
            found = model(x + number, edge_index)
            with gnnaccel.disabled():
                assert torch.allclose(found, model(x + number, edge_index), atol=1e-5)
    assert replays() > 3


def test_gradients_of_features(on):
    model, (x, edge_index) = Net(), given()
    for number in range(10):
        one, two = [(x + number).requires_grad_() for _ in range(2)]
        model(one, edge_index).sum().backward()
        with gnnaccel.disabled():
            copy.deepcopy(model)(two, edge_index).sum().backward()
        assert torch.allclose(one.grad, two.grad, atol=1e-5)
    assert replays() > 3


def test_two_forwards_before_a_backward(on):
    """The second one may not overwrite what the first one's backward needs."""
    model, args = Net(), given()
    for _ in range(6):
        step(model, *args)
    before = replays()
    model.zero_grad()
    one, two = model(*args), model(*args)
    assert replays() == before + 1
    (one.sum() + two.pow(2).sum()).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with gnnaccel.disabled():
        (model(*args).sum() + model(*args).pow(2).sum()).backward()
    assert same(found, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("captured_at", [3, 4])
def test_a_capture_between_forwards_and_their_backward(on, captured_at):
    """The first forward has kept its batch norm's buffers, which the second one's capture puts
    back. Four calls repeat each other before one is captured."""
    model, args = Net(), given()
    twin = copy.deepcopy(model)
    for _ in range(captured_at - 1):
        step(model, *args)
        with gnnaccel.disabled():
            step(twin, *args)
    found = []
    for one, block in ((model, contextlib.nullcontext()), (twin, gnnaccel.disabled())):
        one.zero_grad()
        with block:
            outs = [one(*args) for _ in range(3)]
            sum(out.pow(2).sum() for out in outs).backward()
        found.append([*(p.grad for p in one.parameters()), *one.buffers()])
    assert replays() and same(*found)


def test_gradients_add_up(on):
    model, args = Net(), given()
    for _ in range(6):
        step(model, *args)
    model.zero_grad()
    for _ in range(3):
        model(*args).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with gnnaccel.disabled():
        for _ in range(3):
            model(*args).sum().backward()
    assert same(found, [p.grad for p in model.parameters()])


def test_backward_twice(on):
    model, args = Net(), given()
    for _ in range(6):
        step(model, *args)
    model.zero_grad()
    out = model(*args).sum()
    out.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    out.backward()
    with gnnaccel.disabled():  # the second pass reads what the first one read
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(*args).sum().backward()
    assert same(once, [p.grad for p in twin.parameters()])
    assert same([p.grad for p in model.parameters()], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_gradients_of_gradients(on):
    model, (x, edge_index) = Net(), given()
    x = x.clone().requires_grad_()
    for _ in range(6):
        step(model, x, edge_index)

    def second() -> list:
        first, = torch.autograd.grad(model(x, edge_index).pow(3).sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.pow(2).sum(), [model.two.lin.weight, model.one.lin.weight]))

    before = replays()
    found = second()
    assert replays() == before + 1
    with gnnaccel.disabled():
        assert same(found, second())


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2).to(PLACE[0])

    def forward(self, x, edge_index):
        x = self.norm(self.one(x, edge_index))
        return self.two(x, edge_index), self.other(x)


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_that_no_loss_reads_gives_no_gradients(on, which):
    """Zeros would let weight decay move its weights."""
    model, args = TwoHeads(), given()
    for number in range(8):
        model.zero_grad()
        outs = model(*args)
        (outs[which].sum() if number == 7 else outs[0].sum() + outs[1].sum()).backward()
    assert replays("TwoHeads") == 4
    unused = model.other if which == 0 else model.two
    assert all(p.grad is None for p in unused.parameters())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with gnnaccel.disabled():
        model(*args)[which].sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and same([*found.values()], [*expected.values()])


class Waiting(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * float(x.sum() > 0)


class Printing(Net):
    def forward(self, x, edge_index):
        print("called")
        return super().forward(x, edge_index)


class Counting(Net):
    calls = 0

    def forward(self, x, edge_index):
        self.calls += 1
        return super().forward(x, edge_index) * self.calls


class Keeping(Net):
    def forward(self, x, edge_index):
        self.last = super().forward(x, edge_index)
        return self.last * 1


class Drawing(Net):
    def forward(self, x, edge_index):
        import random

        return super().forward(x, edge_index) * random.random()


@pytest.mark.parametrize("cls, why", [(Waiting, ("cannot be captured", "waits")), (Printing, ("print",)),
                                      (Counting, ("changes",)), (Keeping, ("changes",)),
                                      (Drawing, ("random",))])
def test_what_a_replay_would_leave_out(on, cls, why):
    model, args = cls(), given()
    for _ in range(12):
        step(model, *args)
    assert replays(cls.__name__) == 0 and any(part in text for text in refused(cls.__name__)
                                                   for part in why)


def test_modules_in_one_that_cannot_be_captured(on):
    model, args = Printing().eval(), given()
    with torch.no_grad():
        for _ in range(8):
            found = model(*args)
        with gnnaccel.disabled():
            assert torch.allclose(found, model(*args), atol=1e-5)
    assert replays("GCNConv") > 0


@pytest.mark.long
def test_new_graphs_run_as_ever(on):
    model, (x, _) = Net(), given()
    for number in range(100):
        step(model, x, torch.randint(0, 20, (2, 60 + number % 7)).to(PLACE[0]))
    assert replays() == 0 and refused()


def test_what_is_given_up_is_hardly_looked_at(on):
    """After twenty calls that repeat nothing arguments are not taken apart any more, and modules
    inside cost one function each."""
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rest = pyg.GCNConv(6, 8), nn.Sequential(*[nn.ReLU() for _ in range(9)])

        def forward(self, x, edge_index):
            return self.rest(self.conv(x, edge_index))

    model, (x, _) = Deep().to(PLACE[0]), given()
    for number in range(22):
        model(x, torch.randint(0, 20, (2, 60 + number)).to(PLACE[0]))
    names: collections.Counter = collections.Counter()
    given_up = x, torch.randint(0, 20, (2, 90)).to(PLACE[0])
    sys.setprofile(lambda frame, event, _: names.update([frame.f_code.co_name] * (event == "call")))
    model(*given_up)
    sys.setprofile(None)
    assert not names["apart"] and names["is_compiling"] < 9 < names["call"]


def test_a_model_is_its_own(on):
    """It is let go of, copied and written as without captures."""
    import gc
    import weakref

    model, args = Net(), given()
    for _ in range(6):
        step(model, *args)
    assert replays()
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is Net and vars(loaded).keys() == vars(copy.deepcopy(model)).keys()
    ref, x = weakref.ref(model), weakref.ref(args[0])
    del model, args
    gc.collect()
    assert ref() is None and x() is None


def test_a_capture_without_memory_is_none(on, monkeypatch):
    def full(self) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(modules.graphs.Captured, "_warm_up", full)
    model, args = Net(), given()
    trained(model, args)
    assert replays() == 0 and refused() == ["a capture takes more memory than there is"]


def test_without_the_option(recorded):
    before = nn.Module.__call__
    with gnnaccel.enabled():
        assert nn.Module.__call__ is before
        model, args = Net(), given()
        for _ in range(6):
            step(model, *args)
    assert replays() == 0
    with gnnaccel.enabled(capture=True):
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before


class Of(nn.Module):
    """A model that takes its arguments in another way."""

    def __init__(self, take) -> None:
        super().__init__()
        self.net, self.how = Net(), take.__name__

    def forward(self, given, **more):
        x, edge_index = WAYS[self.how][1](given)
        return self.net(x, edge_index)


def data(x, edge_index):
    return Data(x=x, edge_index=edge_index, name="a graph")


def namespace(x, edge_index):
    return types.SimpleNamespace(x=x, edge_index=edge_index)


def named(x, edge_index):
    return Pair(x, edge_index)


def ordered(x, edge_index):
    return collections.OrderedDict(x=x, edge_index=edge_index)


Pair = collections.namedtuple("Pair", "x edge_index")
WAYS = {"data": (data, lambda g: (g.x, g.edge_index)),
        "namespace": (namespace, lambda g: (g.x, g.edge_index)),
        "named": (named, lambda g: (g.x, g.edge_index)),
        "ordered": (ordered, lambda g: (g["x"], g["edge_index"]))}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_in_other_forms(on, way):
    make = WAYS[way][0]
    model, args = Of(make), given()
    more = {"how": {"sum", "mean"}, "function": torch.relu}
    for number in range(12):
        if number == 9:
            args[1][0].fill_(3)
        model.zero_grad()
        buffers = [b.clone() for b in model.buffers()]
        out = model(make(*args), **more)
        out.pow(2).sum().backward()
        found = [out.detach(), *[p.grad.clone() for p in model.parameters()]]
        for b, held in zip(model.buffers(), buffers):
            b.data.copy_(held)
        model.zero_grad()
        with gnnaccel.disabled():
            expected = step(model, make(*args), **more)[:len(found)]
        assert same(found, expected), number
    assert replays("Of") >= 4 and refused("Of") == []


def test_two_dictionaries(on):
    """HeteroConv: dictionaries of features and edges, and of results."""
    relations = [("a", "to", "b"), ("b", "to", "a")]
    conv = pyg.HeteroConv({r: pyg.SAGEConv((6, 6), 4) for r in relations}).to(PLACE[0])
    x, edge_index = given()
    xs, edges = {"a": x, "b": x + 1}, dict.fromkeys(relations, edge_index)
    for _ in range(8):
        conv.zero_grad()
        found = conv(xs, edges)
        sum(out.pow(2).sum() for out in found.values()).backward()
    grads = [p.grad.clone() for p in conv.parameters()]
    with gnnaccel.disabled():
        conv.zero_grad()
        expected = conv(xs, edges)
        sum(out.pow(2).sum() for out in expected.values()).backward()
    assert replays("HeteroConv") and same(list(found.values()), list(expected.values()))
    assert same(grads, [p.grad for p in conv.parameters()])


@pytest.mark.long
def test_capture_goes_on_and_off_over_what_is_remembered(recorded):
    """What was decided of calls without it holds with it, and the other way round."""
    PLACE[0] = "cpu"
    modules.reset()
    model, args, seen = Net(), given(), []
    with gnnaccel.enabled(capture=True, when="supported"):
        for capture in (False, True, False, True):
            with gnnaccel.enabled(capture=capture):
                trained(model, args)
            seen.append(replays())
    assert seen[0] == 0 and seen[1] == seen[2] == 8 and seen[3] > 8
