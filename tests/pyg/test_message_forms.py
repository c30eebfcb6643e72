"""Which message functions are seen through, and that all others are left alone."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.adapters.tracing import message
from gnnaccel.dispatch.ops.messages import Gated, Rectified, Shifted

W = torch.randn(5, 2).abs()


class Copy:
    def message(self, x_j):
        return x_j


class Optional:
    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


class Default:
    def message(self, x_j, edge_weight=None):
        if edge_weight is not None:
            return edge_weight.unsqueeze(dim=-1) * x_j
        return x_j


class Swapped:
    def message(self, x_j, norm):
        return x_j * norm[:, None]


class Ellipsis_:
    def message(self, x_j, norm):
        return x_j * norm[..., None]


class Twice:
    def message(self, h_j, a, b):
        return a.view(-1, 1) * (h_j * b.view(-1, 1))


class Scaled:
    def message(self, x_j, a):
        return (0.5 * a.sigmoid()).reshape(-1, 1) * x_j


class ByTorch:
    def message(self, x_j, a):
        return torch.mul(a.unsqueeze(1), x_j)


class Method:
    def message(self, x_j, a):
        return x_j.mul(-a.unsqueeze(1))


class Unused:
    def message(self, x_j, index, size_i, ptr):
        return x_j


SEEN = {Copy: None, Default: lambda w: w.unsqueeze(-1), Optional: lambda w: w.view(-1, 1),
        Swapped: lambda w: w[:, None], Ellipsis_: lambda w: w[..., None],
        Scaled: lambda w: (0.5 * w.sigmoid()).reshape(-1, 1), ByTorch: lambda w: w.unsqueeze(1),
        Method: lambda w: -w.unsqueeze(1), Unused: None}


def kinds(cls):
    names = cls.message.__code__.co_varnames[1:cls.message.__code__.co_argcount]
    return {name.removesuffix("_j").removesuffix("_i"): "tensor" for name in names
            if name not in message.SPECIAL}


@pytest.mark.parametrize("cls", SEEN)
def test_seen(cls):
    found = message.form(cls.message, kinds(cls))
    assert found is not None and found.source == "x"
    if SEEN[cls] is None:
        assert found.weight is None
    else:
        (name,) = set(kinds(cls)) - {"x"}
        given = {name: W[:, 0]}
        assert torch.equal(found.weight(given), SEEN[cls](W[:, 0]))


class Difference:
    def message(self, y_i, x_j, a):
        return a.view(-1, 1) * (y_i - x_j)


class OfOwn:
    def message(self, x_i, x_j):
        return x_j - x_i


class OfOwnTurned:
    def message(self, x_i, x_j, a):
        return a.view(-1, 1) * (x_i - x_j)


class OfOwnNegated:
    def message(self, x_i, x_j):
        return -x_j + x_i


class OfOwnRectified:
    def message(self, x_i, x_j):
        return torch.relu(x_j) - x_i


@pytest.mark.parametrize("cls", [OfOwn, OfOwnTurned, OfOwnNegated, OfOwnRectified])
def test_differences_of_the_same_features_are_made_edge_by_edge(cls):
    assert message.form(cls.message, kinds(cls)) is None


def test_sums_of_the_same_features_are_split():
    class Added:
        def message(self, x_i, x_j):
            return x_i + x_j

    assert type(message.form(Added.message, kinds(Added)).more(X, None)) is Shifted


class Rectified_:
    def message(self, x_j, e):
        return 0.5 + torch.nn.functional.relu(x_j + e)


class Gate:
    def message(self, k_i, q_j, v_j, e):
        return v_j * torch.sigmoid(q_j + e + k_i)


class Hoisted:
    def message(self, x_j, w):
        return w[:, None] * ((-x_j).relu() + 1)


X = dict(x=(W[:3], W[2:]), y=(W[:3], W[2:]), k=W[:2], q=W[:3], v=W[1:4], a=W[:, 0], e=W, w=W[:, 1])


def test_messages_of_more():
    """What is in them, by name."""
    found = {cls: message.form(cls.message, kinds(cls))
             for cls in (Difference, Rectified_, Gate, Hoisted)}
    shifted, rectified, gated = (found[cls].more(X, None) for cls in (Difference, Rectified_, Gate))
    assert type(shifted) is Shifted and torch.equal(shifted.rows, W[2:]) and shifted.sign == 1.0
    assert torch.equal(found[Difference].apply(W),
                       -W) and torch.equal(found[Difference].weight(X), W[:, :1])
    assert found[Difference].ends == (("y", "i"),) and found[Difference].source == "x"
    assert type(rectified) is Rectified and torch.equal(rectified.edge,
                                                        W) and rectified.constant == 0.5
    assert type(gated) is Gated and found[Gate].source == "v" and found[Gate].ends == (("k", "i"),
                                                                                       ("q", "j"))
    assert torch.equal(gated.left, W[:3]) and torch.equal(gated.right,
                                                          W[:2]) and torch.equal(gated.edge, W)
    assert torch.equal(found[Hoisted].apply(W - 1),
                       (1 - W).relu() + 1) and torch.equal(found[Hoisted].weight(X), W[:, 1:])


def test_products_of_weights():
    found = message.form(Twice.message, kinds(Twice))
    assert found.source == "h"
    assert torch.equal(found.weight(dict(a=W[:, 0], b=W[:, 1])), (W[:, 0] * W[:, 1]).view(-1, 1))


@pytest.mark.parametrize("cls", [Optional, Default])
def test_absent_weights(cls):
    assert message.form(cls.message,
                        {"x": "tensor", "edge_weight": "none"}) == message.Form("x", None)


def test_absent_by_default():
    assert message.form(Default.message, {"x": "tensor"}) == message.Form("x", None)
    assert message.form(Optional.message, {"x": "tensor"}) is None


SIDE = []


class Printing:
    def message(self, x_j):
        print("seen")
        return x_j


class Appending:
    def message(self, x_j):
        SIDE.append(1)
        return x_j


class Keeping:
    def message(self, x_j):
        self.kept = x_j
        return x_j


class OwnParameter:
    def message(self, x_j):
        return self.weight * x_j


class Training:
    def message(self, x_j):
        return x_j if self.training else x_j.relu()


class RectifiedBoth:
    def message(self, x_i, x_j):
        return (x_i + x_j).relu()


class OfTargets:
    def message(self, x_i, e):
        return x_i


class GateAlone:
    def message(self, x_i, x_j):
        return (x_i + x_j).sigmoid()


class GateOfWeighted:
    def message(self, x_i, x_j, w):
        return (x_i + x_j).sigmoid() * (w.view(-1, 1) * x_j)


class Concatenated:
    def message(self, x_i, x_j):
        return torch.cat([x_i, x_j - x_i], -1)


class WeightedTwice:
    def message(self, x_i, x_j, w):
        return w.view(-1, 1) * x_j - x_i


class Exponential:
    def message(self, x_j):
        return x_j.exp()


class Aliased:
    def message(self, x_j, e):
        return F.relu(x_j + e)


class TargetInPlace:
    def message(self, x_j, e):
        e += x_j
        return e.relu()


class Squared:
    def message(self, x_j):
        return x_j * x_j


class Sized:
    def message(self, x_j, w):
        return w.view(x_j.size(0), 1) * x_j


class Branching:
    def message(self, x_j, w):
        return x_j if w else w.view(-1, 1) * x_j


class Dropping:
    def message(self, x_j, w):
        return torch.nn.functional.dropout(w, 0.5).view(-1, 1) * x_j


class Indexed:
    def message(self, x_j, index):
        return index.view(-1, 1) * x_j


class Looping:
    def message(self, x_j, w):
        return sum([x_j for _ in range(2)])


class EdgesAlone:
    def message(self, w):
        return w.view(-1, 1)


class Star:
    def message(self, x_j, *more):
        return x_j


class Sliced:
    def message(self, x_j, w):
        return w[:3, None] * x_j


class Scalar:
    def message(self, x_j, scale):
        return x_j * scale


class Parent:
    def message(self, x_j):
        return super().message(x_j)


class InPlace:
    def message(self, x_j, w):
        x_j *= w.view(-1, 1)
        return x_j


class WeightsInPlace:
    def message(self, x_j, w):
        w *= 2
        return w.view(-1, 1) * x_j


F = SIDE  # which Aliased names, and which is not torch.nn.functional
NOT_SEEN = [RectifiedBoth, OfTargets, GateAlone, GateOfWeighted, Concatenated, WeightedTwice,
            Exponential, Aliased, TargetInPlace, WeightsInPlace, Printing, Appending, Keeping,
            OwnParameter, Training, Squared, Sized, Branching, Dropping, Indexed, Looping,
            EdgesAlone, Star, Sliced, Parent]


@pytest.mark.parametrize("cls", NOT_SEEN, ids=lambda c: c.__name__)
def test_not_seen_and_not_run(cls, capsys):
    given = {"x": "tensor", "w": "tensor", "e": "tensor"}
    assert message.form(cls.message, given) is None
    assert not SIDE and not capsys.readouterr().out


def test_numbers_are_no_weights():
    assert message.form(Scalar.message, {"x": "tensor", "scale": "other"}) is None


def test_an_update_in_place_of_what_was_gathered_is_a_product():
    """The gathered rows are the message's own, so this changes nobody's tensor."""
    found = message.form(InPlace.message, {"x": "tensor", "w": "tensor"})
    assert found.source == "x" and found.weight is not None


def test_what_is_no_plain_function():
    import functools

    assert message.form(functools.partial(Copy.message), {"x": "tensor"}) is None
    assert message.form(lambda self, x_j: x_j, {"x": "tensor"}) == message.Form("x", None)

    def outer(scale):
        def inner(self, x_j):
            return scale * x_j
        return inner

    assert message.form(outer(2.0), {"x": "tensor"}) is None
