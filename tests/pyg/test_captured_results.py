"""``enable(capture=True)``: results that hang together, and what a call writes to."""
from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data
from torch_geometric.nn import FastRGCNConv

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import PLACE, Net, given, on, refused, replays, same  # noqa: F401


def both(model, run, times: int = 10) -> None:
    """What ``run(model, *args)`` gives, beside a twin that runs natively; all have to be equal."""
    twin, args = copy.deepcopy(model), given()
    for number in range(times):
        found = run(model, *args)
        with gnnaccel.disabled():
            expected = run(twin, *args)
        assert [one is None for one in found] == [one is None for one in expected], number
        assert same([one for one in found if one is not None],
                    [one for one in expected if one is not None]), number


def features() -> torch.Tensor:
    return given()[0]


class Apart(Net):
    """Two results that share nothing."""

    def forward(self, x, edge_index):
        return self.one(x, edge_index), self.two(torch.cat([x, x[:, :2]], 1), edge_index)


def gradients(out, model) -> list:
    return list(torch.autograd.grad(out.pow(2).sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("turned", [False, True])
def test_a_backward_for_each_result(on, turned):
    def run(model, *args):
        outs = model(*args)
        return [g for out in (reversed(outs) if turned else outs) for g in gradients(out, model)]

    both(Apart(), run)
    assert replays("Apart") == 6
    model, args = Apart(), given()
    for _ in range(6):
        one, two = model(*args)
        gradients(one, model), gradients(two, model)
        with pytest.raises(RuntimeError, match="second time"):
            gradients(one, model)


def test_a_second_backward_has_the_same_numbers(on):
    """What it needs is not written over by the first one."""
    def run(model, *args):
        out = model(*args)
        first = torch.autograd.grad(out.pow(2).sum(), list(model.parameters()), retain_graph=True)
        return [*first, *gradients(out, model)]

    both(Net(0.0), run)
    assert replays() == 6


class Singular(Net):
    """The second result has infinite derivatives."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def forward(self, x, edge_index):
        return [self.two(torch.cat([x, x[:, :2]], 1), edge_index), *[
            self.two(torch.cat([x, x[:, number:number + 2]], 1), edge_index).mul(0).sqrt()
            for number in range(1, self.results)]]


@pytest.mark.parametrize("results", [2, 3])
def test_no_gradients_through_a_result_that_is_not_used(on, results):
    """Zeros times an infinite derivative are no zeros."""
    def run(model, *args):
        found = gradients(model(*args)[0], model)
        assert all(g is None or g.isfinite().all() for g in found)
        return found

    both(Singular(results), run)
    assert replays("Singular") == 6


class Three(Net):
    def forward(self, x, edge_index):
        hidden = self.norm(self.one(x, edge_index))
        return (self.two(hidden, edge_index), self.one(x * 2, edge_index).sigmoid(),
                hidden.exp().sum(1))


@pytest.mark.parametrize("used", [(0, 1), (0, 2), (1, 2), (1,), (0, 1, 2)])
def test_gradients_through_some_of_the_results(on, used):
    def run(model, *args):
        outs = model(*args)
        return gradients(torch.cat([outs[n].flatten() for n in used]), model)

    both(Three(), run)
    assert replays("Three") == 6


class Largest(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).max(dim=0)


def test_a_result_of_a_class_of_torchs(on):
    def run(model, *args):
        out = model(*args)
        assert type(out) is torch.return_types.max
        return [out.indices, *gradients(out.values, model)]

    both(Largest(), run)
    assert replays("Largest") == 6


class Clamping(Net):
    def forward(self, x, edge_index):
        x.clamp_(max=9.0)
        return super().forward(x, edge_index)


def test_an_argument_that_is_written_as_it_was(on):
    model, (x, edge_index) = Clamping().eval(), given()
    for number in range(12):
        here = x * (1 if number < 9 else 99)
        with torch.no_grad():
            model(here, edge_index)
        assert here.max() <= 9


class Hidden(Net):
    def forward(self, x, edge_index):
        hidden = self.norm(self.one(x, edge_index)).relu()
        return self.two(hidden, edge_index), hidden


def of_hidden(model, *args):
    out, hidden = model(*args)
    return list(torch.autograd.grad(out.pow(2).sum(), [hidden, *model.parameters()]))


def kept(model, *args):
    model.zero_grad()
    out, hidden = model(*args)
    hidden.retain_grad()
    out.pow(2).sum().backward()
    return [hidden.grad, *[p.grad for p in model.parameters()]]


def hooked(model, *args):
    model.zero_grad()
    out, hidden = model(*args)
    hidden.register_hook(lambda grad: grad * 3)
    out.pow(2).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("run", [of_hidden, kept, hooked])
def test_a_result_that_another_one_is_computed_from(on, run):
    both(Hidden(), run)
    assert not replays("Hidden")


class Ways(Net):
    """Forward calls one of the functions below."""

    def __init__(self, way):
        super().__init__()
        self.way = WAYS.index(way)
        self.count = torch.zeros(1, device=features().device)
        self.register_buffer("total", torch.zeros(3, device=features().device))

    def forward(self, x, edge_index):
        return WAYS[self.way](self, Net.forward(self, x, edge_index))


def twice(model, out):
    return out, out


def with_a_buffer(model, out):
    return out, model.total


def with_an_attribute(model, out):
    return out, model.count


def counting(model, out):
    model.count += 1
    return out, out + 1


def decaying(model, out):
    model.one.bias.data.add_(1)
    return out * 2, out + 1


WAYS = (twice, with_a_buffer, with_an_attribute, counting, decaying)


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_the_module_and_of_other_results(on, way):
    def run(model, *args):
        with torch.no_grad():
            one, two = model(*args)
            two.mul_(0.5).add_(1)
            return [one.clone(), model.count.clone(), model.total.clone(), model.one.bias.clone()]

    both(Ways(way).eval(), run)


class Taking(Net):
    """Puts what it computes into its argument."""

    def forward(self, held):
        x, edge_index = (held[0], held[1]) if isinstance(held, list) else (
            held["x"], held["edge_index"])
        hidden = super().forward(x, edge_index)
        if isinstance(held, list):
            held.append(hidden)
        else:
            held["hidden"] = hidden
        return hidden * 2


@pytest.mark.parametrize("make", [
    lambda x, e: [x, e], lambda x, e: dict(x=x, edge_index=e), lambda x, e: Data(x, e)])
def test_arguments_that_a_module_puts_something_into(on, make):
    def run(model, *args):
        held = make(*args)
        model(held)
        return [held[2] if isinstance(held, list) else held["hidden"]]

    both(Taking().eval(), run)
    assert refused("Taking") == ["it changes its arguments"]


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


class Failing(Forward):
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("there is none")


class OneWay(Net):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, edge_index):
        return self.function(super().forward(x, edge_index))


@pytest.mark.parametrize("function", [lambda x: Forward.apply(x), lambda x: Failing.apply(x)])
def test_a_backward_that_there_is_not(on, function):
    """Nobody asked for it."""
    both(OneWay(function), lambda model, *args: [model(*args).detach()])
    assert not replays("OneWay") and "raises" in refused("OneWay")[0]


def test_cached_parametrizations(on):
    model = Net()
    parametrizations.weight_norm(model.two.lin)

    def run(model, *args):
        with parametrize.cached():
            return gradients(model(*args), model)

    both(model, run)


class Halved(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out / 2 if function is torch.nn.functional.linear else out


def test_a_mode_that_sees_functions(on):
    model, args = Net().eval(), given()

    def run(model, *args):
        with Halved():
            return [model(*args).detach()]

    for _ in range(6):
        model(*args)
    assert replays() == 2
    with gnnaccel.disabled():
        expected = run(model, *args)
    assert same(run(model, *args), expected) and replays() == 2


def test_a_module_changed_before_gradients_of_gradients(on):
    model, (x, edge_index) = Net().train(), given()
    x.requires_grad_()
    for _ in range(6):
        before = replays()
        out = model(x, edge_index)
        model.eval()
        if replays() > before:
            with pytest.raises(RuntimeError, match="was changed between forward"):
                torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        model.train()
    assert replays()


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_backward_reads_is_not_written_in_between(on, create_graph):
    """As with the host: an error for a parameter that its backward reads, none for any other. With
    ``create_graph``, which runs the module's code again, it is an error for these as well."""
    def raises(model, name: str) -> bool:
        loss = model(*args).pow(2).sum()
        with torch.no_grad():
            model.get_parameter(name).mul_(1.5)
        try:
            torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
        except RuntimeError as problem:
            assert "modified by an inplace operation" in str(problem) or (
                create_graph and "were changed since its forward" in str(problem))
            return True
        return False

    model, args = Net(0.0), given()
    for _ in range(6):
        gradients(model(*args), model)
    for name, _ in model.named_parameters():
        with gnnaccel.disabled():
            expected = raises(copy.deepcopy(model), name)
        before = replays()
        found = raises(model, name)
        # kernels keep all that they were given for their backward (docs/limits.md)
        assert found == expected or (found and (create_graph or PLACE[0] == "cuda")), name
        assert replays() == before + 1
        gradients(model(*args), model)


def test_a_backward_reads_what_its_own_result_needs(on):
    model, args = Apart(), given()
    for _ in range(6):
        for out in model(*args):
            gradients(out, model)
    before = replays("Apart")
    one, two = model(*args)
    assert replays("Apart") == before + 1
    with torch.no_grad():
        model.two.att_src.mul_(1.5)
    gradients(one, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(two, model)


def test_a_layer_that_its_own_code_changes(on):
    """`FastRGCNConv` sets ``fuse`` where PyG's code runs, which may first be for the capture."""
    torch.manual_seed(0)
    model, (x, edge_index) = FastRGCNConv(6, 4, 3).to(PLACE[0]), given()
    model.fuse = True
    kind = torch.arange(edge_index.shape[1], device=edge_index.device) % 3
    twin = copy.deepcopy(model)
    for _ in range(9):
        found, expected = [], []
        for layer, results in ((model, found), (twin, expected)):
            with gnnaccel.disabled() if layer is twin else contextlib.nullcontext():
                out = layer(x, edge_index, kind)
                first = torch.autograd.grad(out.pow(2).sum(), list(layer.parameters()),
                                            create_graph=True)
                results += [out, *first, *torch.autograd.grad(
                    sum(g.pow(2).sum() for g in first), list(layer.parameters()))]
        assert same(found, expected)
    assert replays("FastRGCNConv")
