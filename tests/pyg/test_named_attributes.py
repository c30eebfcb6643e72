"""Messages that read their layer by `getattr`, or modules that it holds in a dictionary."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.utils import softmax

import gnnaccel
from gnnaccel.adapters.pyg.propagate import traced_aggregates
from gnnaccel.adapters.tracing.layer import traced_layer
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import close, compare
from tests.pyg.own_attention import Scored


LAST = "twice"  # the method that a message calls
LAST_OF_TENSORS = "relu"


class Named(Message):
    def __init__(self):
        super().__init__()
        self.w_0, self.w_1 = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.lin, self.scale, self.first = nn.Linear(WIDTH, WIDTH), 2.0, "lin"

    def twice(self, x):
        return 2 * x

    def message(self, x_i, x_j):
        out = getattr(self, self.first)(x_j) * getattr(self, "scale", 1.0)
        for k in range(2):
            out = out * torch.sigmoid(getattr(self, f"w_{k}") * x_i)
        return getattr(self, LAST)(out) + getattr(self, "shift", 0.5)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.end = nn.Linear(WIDTH, WIDTH), "n"

    def forward(self, x):
        return torch.tanh(getattr(self, f"li{self.end}")(x)) * getattr(self, "factor", 1.5)


class Nested(Message):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def message(self, x_i, x_j):
        return self.inner(x_i) * x_j


class Dictionary(Message):
    """With a module of torch's, and of the user's own."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleDict({"node": nn.Linear(WIDTH, WIDTH), "edge": nn.Sequential(
            nn.Linear(EDGE, WIDTH), nn.SiLU()), "inner": Inner()})

    def message(self, x_i, x_j, edge_attr):
        out = self.maps["edge"](edge_attr) * self.maps["inner"](x_i)
        return out * torch.sigmoid(self.maps["node"](x_j) + x_i)


class All(Dictionary):
    def __init__(self):
        super().__init__()
        del self.maps["edge"]

    def message(self, x_i, x_j):
        out = x_j
        for name, one in self.maps.items():
            out = out * one(x_i) if name != "inner" else out + one(x_i)
        return out


class Texts(Message):
    """Weights and branches by texts of the layer and of the call (CompGCN, SuperGAT)."""

    def __init__(self, kind="distmult_masked"):
        super().__init__()
        self.w_in, self.w_out, self.kind = (nn.Parameter(torch.randn(WIDTH, WIDTH)),
                                            nn.Parameter(torch.randn(WIDTH, WIDTH)), kind)

    def forward(self, x, edge_index):
        return (self.propagate(edge_index, x=x, mode="in", name="w_{}")
                + self.propagate(edge_index.flip(0), x=x, mode="OUT", name="w_{}"))

    def message(self, x_i, x_j, mode, name):
        rows = x_i * x_j if self.kind.startswith("distmult") else x_i - x_j
        rows = torch.mm(rows, getattr(self, name.format(mode.lower())))
        return torch.sigmoid(x_i) * rows if self.kind.endswith("masked") else rows


class Attention(Scored):
    by = "score"

    def message(self, x_i, x_j, index, size_i):
        alpha = self.act(getattr(self, self.by)(torch.cat((x_j, x_i), -1)))
        return softmax(alpha, index, num_nodes=size_i) * x_j


@pytest.mark.parametrize("cls", [Named, Nested, Dictionary, All])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:3 if cls is Dictionary else 2])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["distmult_masked", "transe"])
def test_texts(kernels, kind):
    layer, args = Texts(kind), arguments(Message)[:2]
    compare(kernels, layer, *args, calls=2)
    layer.kind = "masked"
    compare(kernels, layer, *args, calls=2)


def test_attention(route):
    compare(route, Attention(WIDTH, 8), graphs.features(), graphs.square())


def changes(layer):
    """What is done to a layer between calls."""
    if isinstance(layer, Named):
        return [lambda: setattr(layer, "shift", 3.0), lambda: setattr(layer, "scale", 1),
                lambda: delattr(layer, "shift"), lambda: delattr(layer, "scale"),
                lambda: setattr(layer, "shift", nn.Parameter(torch.randn(WIDTH))),
                lambda: setattr(layer, "lin", nn.Linear(WIDTH, WIDTH)),
                lambda: setattr(layer, "twice", lambda x: 3 * x)]
    if isinstance(layer, Nested):
        return [lambda: setattr(layer.inner, "factor", 0.5), lambda: delattr(layer.inner, "factor")]
    maps = layer.maps
    return [lambda: maps.update({"node": nn.Linear(WIDTH, WIDTH)}),
            lambda: maps.update({"more": nn.Tanh()}), lambda: maps.pop("more"),
            lambda: maps.update({"inner": maps.pop("node"), "node": maps.pop("inner")}),
            lambda: maps.update({"node": nn.Tanh()}),
            lambda: maps["node"].register_forward_hook(lambda *args: args[-1] * 2)]


@pytest.mark.long
@pytest.mark.parametrize("cls", [Named, Nested, Dictionary, All])
def test_what_changes_between_calls(emulated, cls):
    """Attributes that come and go, modules that are replaced, renamed, and watched."""
    layer, (x, ei, edge) = cls(), arguments(Message)
    given = (x, ei, edge) if cls is Dictionary else (x, ei)
    for change in [lambda: None, *changes(layer)]:
        change()
        expected = layer(*given)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(*given), expected)


@pytest.mark.long
def test_a_module_that_is_gone(emulated):
    layer, given = Dictionary(), arguments(Message)
    with emulated.on(on_fallback="native"):
        layer(*given)
        layer.maps["node"] = None
        with pytest.raises(TypeError):
            layer(*given)


class OfTensors(Message):
    """Read by `getattr` from something else than the layer."""

    def message(self, x_j):
        return getattr(x_j, LAST_OF_TENSORS)()


class ByCode(Named):
    """Finds what is not there."""

    def __getattr__(self, name):
        return 5.0 if name == "shift" else super().__getattr__(name)

    def message(self, x_i, x_j):
        return torch.relu(x_i) * x_j * getattr(self, "shift", 1.0)


class ByCount(Named):
    """Named by what a stand-in has another number of, by an f-string and by `format`."""

    def __init__(self):
        super().__init__()
        setattr(self, f"shift_{graphs.E}", 3.0)

    def message(self, x_i, x_j):
        return torch.relu(x_i) * x_j * getattr(self, f"shift_{x_j.size(0)}", 1.0)


class ByFormat(ByCount):
    def message(self, x_i, x_j):
        name = "shift_{}".format(x_j.shape[0])  # noqa: UP032 - as users write it
        return torch.relu(x_i) * x_j * getattr(self, name, 1.0)


class ByText(ByCount):
    """The text of a tensor."""

    def message(self, x_i, x_j):
        return torch.relu(x_i) * (x_j if f"{x_j}".startswith("tensor") else x_i)


class Asks(Message):
    """Goes another way where ``asks`` says so."""

    def __init__(self):
        super().__init__()
        self.sizes, self.none, self.names = [3, 4], [], ["mean", "max"]
        self.lin, self.factor = nn.Linear(WIDTH, WIDTH), 2.0
        self.same, self.other, self.nothing = self.lin, nn.Linear(WIDTH, WIDTH), nn.Sequential()

    def message(self, x_i, x_j):
        out = torch.relu(x_i) * x_j
        return out * 3.0 if self.asks(x_j) else out


class OfTheDictionary(Asks):
    def asks(self, x_j):
        return "factor" in self.__dict__


class OfTheDocs(Asks):
    def asks(self, x_j):
        return self.__doc__ is None


class OfTheModule(Asks):
    def asks(self, x_j):
        return self.__module__.endswith("attributes")


class OfTheText(Asks):
    def asks(self, x_j):
        return f"{self}".startswith("Of")


class OfATensorsText(Asks):
    def asks(self, x_j):
        return f"{x_j!r} {[x_j]}".startswith("tensor")


class OfADevicesText(Asks):
    def asks(self, x_j):
        return f"{(x_j.device,)}".startswith("(device")


class OfAModulesText(Asks):
    def asks(self, x_j):
        return f"{self.lin}".startswith("Linear")


def once(x):
    return 1.0 * x


def thrice(x):
    return 3.0 * x


class OfTheText2(Asks):
    """Of a message that has a simpler form."""

    def message(self, x_j):
        return x_j * 3.0 if f"{self}".startswith("Of") else x_j


class OfTheDictionary2(Asks):
    def message(self, x_j):
        return x_j * 3.0 if "factor" in self.__dict__ else x_j


class OfLists(Asks):
    def asks(self, x_j):
        return self.sizes == [3, 4] and self.names != ["mean"] and self.sizes[1:] == [4]


class OfEmptyLists(Asks):
    def asks(self, x_j):
        return self.none == []


class OfListsTexts(Asks):
    def asks(self, x_j):
        return f"{self.sizes}".startswith("[")


class OfShared(Asks):
    def asks(self, x_j):
        return self.lin is self.same and self.lin is not self.other


class OfFunctions(Asks):
    way, ways = staticmethod(thrice), {"other": thrice, "first": once}

    def asks(self, x_j):
        return self.way is thrice and self.ways["other"] is self.way and self.way is not once


class OfNames(Asks):
    """Names that what stands for a layer might have for itself."""

    def __init__(self):
        super().__init__()
        self._method, self._module, self._shown = "dot", nn.Linear(WIDTH, WIDTH), None

    def _function(self, x):
        return self._module(x)

    def message(self, x_i, x_j):
        out = torch.relu(x_i) * self._function(x_j)
        return out * 3.0 if self._method == "dot" and self._shown is None else out


class OfTruth(Asks):
    def asks(self, x_j):
        return self.lin and not self.nothing


@pytest.mark.long
@pytest.mark.parametrize("cls", [OfLists, OfEmptyLists, OfListsTexts, OfShared, OfTruth,
                                 OfFunctions, OfNames])
def test_lists_and_shared_modules(emulated, cls):
    layer, given = cls(), arguments(Message)[:2]
    for change in (lambda: None, lambda: layer.sizes.append(5), lambda: layer.none.append(1),
                   lambda: setattr(layer, "sizes", (3, 4)),
                   lambda: setattr(layer, "same", nn.Linear(WIDTH, WIDTH)),
                   lambda: layer.nothing.append(nn.ReLU()), lambda: setattr(layer, "way", once),
                   lambda: setattr(layer, "_method", "cosine")):
        change()
        expected = layer(*given)
        with emulated.on():
            for _ in range(2):
                assert close(layer(*given), expected)


def test_what_stands_for_layers_has_no_names_of_users():
    for cls in (traced_layer.Layer, traced_layer.Inside, traced_aggregates._Layer):
        assert all(name.startswith(("__", "_traced")) for name in dir(cls)), cls


class Changes(Asks):
    """A list of the layer."""

    def asks(self, x_j):
        self.names.append("min")
        return len(self.names) > 3


def test_lists_that_a_message_changes(emulated):
    layer, other, given = Changes(), Changes(), arguments(Message)[:2]
    expected = [other(*given) for _ in range(4)]
    with emulated.on(on_fallback="native"):
        for one in expected:
            assert close(layer(*given), one)
    assert layer.names == other.names


def stays_native(emulated, cls):
    """A layer of the class gives what PyG's code gives, by PyG's code."""
    layer, given = cls(), arguments(Message)[:2]
    expected = layer(*given)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        assert close(layer(*given), expected)
    assert routes(layer) == {"native": 1}


@pytest.mark.long
@pytest.mark.parametrize("cls", [
    OfTensors, ByCode, ByCount, ByFormat, ByText, OfTheDictionary, OfTheDocs, OfTheModule,
    OfTheText, OfATensorsText, OfADevicesText, OfAModulesText, OfTheText2, OfTheDictionary2])
def test_others_stay_native(emulated, cls):
    stays_native(emulated, cls)
