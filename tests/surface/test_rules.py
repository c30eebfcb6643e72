"""Opting in and out: precedence, scope, what is refused."""
from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import names, rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.errors import UnknownLayerError
from tests.undone import forget_names


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(1, 1)


class SubConv(Conv):
    pass


class Net(nn.Module):
    def __init__(self, cls=SubConv):
        super().__init__()
        self.convs = nn.ModuleList([cls(), cls()])
        self.last = cls()


PATH = f"{__name__}.SubConv"


@pytest.fixture(autouse=True)
def known():
    for cls in (Conv, SubConv):
        rules.register_class(rules.path_of(cls))
    yield
    configs.set_active(None)


def inside(layer, **options) -> bool:
    return rules.verdict(layer, configs.with_epoch(configs.make(options))).inside


def code(layer, **options) -> str | None:
    found = rules.verdict(layer, configs.with_epoch(configs.make(options))).reason
    return None if found is None else found.code


def state(value, *args, **kwargs):
    (gnnaccel.include if value else gnnaccel.exclude)(*args, **kwargs)


# --- precedence -----------------------------------------------------------------------------------

@pytest.mark.parametrize("seed",
                         [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_precedence_table(seed, monkeypatch):
    """Every combination of in, out and silent on every level, stated in different orders: the most
    specific wins."""
    levels = ("instance", "name", "regex", "class", "attribute", "base class", "base attribute")
    options = (None, True, False)
    for values in itertools.product(options, repeat=len(levels)):
        gnnaccel.reset_rules()
        net = Net()
        layer = net.convs[1]
        statements = {
            "instance": lambda v: state(v, layer),
            "name": lambda v: state(v, "convs.1", model=net),
            "regex": lambda v: state(v, r"re:convs\..*", model=net),
            "class": lambda v: state(v, SubConv),
            "attribute": lambda v: monkeypatch.setattr(SubConv, "__gnnaccel__", v, raising=False),
            "base class": lambda v: state(v, Conv),
            "base attribute": lambda v: monkeypatch.setattr(Conv, "__gnnaccel__", v, raising=False),
        }
        table = [(level, value) for level, value in zip(levels, values) if value is not None]
        for level, value in (table, table[::-1], table[1::2] + table[::2],
                             table[::2] + table[1::2])[seed]:
            statements[level](value)
        expected = next((value for value in values if value is not None), None)
        assert inside(layer) is (True if expected is None else expected), values
        assert inside(layer, include=["SomethingElse"]) is bool(expected), values
        monkeypatch.undo()


TARGETS = {
    "name": ("last",),
    "regex": ("re:la.t",),
    "class": (SubConv, "SubConv", PATH),
    "base class": (Conv, "Conv", f"{__name__}.Conv"),
}


@pytest.mark.parametrize("level", TARGETS)
def test_lists_stand_on_the_level_of_what_they_name(level):
    """A list entry beats every less specific statement and yields to every more specific one."""
    order = list(TARGETS)
    for target, other in itertools.product(TARGETS[level], order):
        if other == level:
            continue
        net = Net()
        gnnaccel.reset_rules()
        forget_names()
        gnnaccel.name_layers(net)
        state(True, TARGETS[other][0])
        assert inside(net.last,
                      exclude=[target]) is (order.index(other) < order.index(level)), (target,
                                                                                       other)
    gnnaccel.include(net.last)
    assert inside(net.last, exclude=[target])


@pytest.mark.parametrize("target", [t for targets in TARGETS.values() for t in targets], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_later_call_wins_at_equal_level(target, last):
    net = Net()
    gnnaccel.name_layers(net)
    state(not last, target)
    state(last, target)
    assert inside(net.last) is last


def test_later_wins_between_different_spellings_of_one_level():
    spellings = (SubConv, "SubConv", PATH)
    for first, second in itertools.permutations(spellings, 2):
        for last in (True, False):
            gnnaccel.reset_rules()
            state(not last, first)
            state(last, second)
            assert inside(SubConv()) is last


def test_calls_and_lists_are_ordered_in_time():
    gnnaccel.include("SubConv")
    listed = configs.with_epoch(configs.make({"exclude": ["SubConv"]}))
    layer = SubConv()
    assert not rules.verdict(layer, listed).inside
    gnnaccel.include("SubConv")
    assert rules.verdict(layer, configs.with_epoch(listed)).inside
    assert not inside(layer, exclude=["SubConv"])


def test_exclude_wins_within_one_call():
    assert not inside(SubConv(), include=["SubConv"], exclude=["SubConv"])
    assert inside(SubConv(), include=["SubConv"], exclude=["Conv"])


def test_include_list_leaves_the_rest_out():
    assert inside(SubConv(), include=["Conv"]) and inside(Conv(), include=[Conv])
    assert not inside(nn.Linear(1, 1), include=["Conv"])
    assert not inside(Conv(), include=["SubConv"])


# --- reasons --------------------------------------------------------------------------------------

def test_reasons(monkeypatch):
    layer = SubConv()
    assert rules.verdict(layer, None).reason.code == "GA104"
    assert code(layer) is None
    assert code(layer, include=["Other"]) == "GA102"
    monkeypatch.setattr(Conv, "__gnnaccel__", False, raising=False)
    configs.bump()
    assert code(layer) == "GA103"
    gnnaccel.exclude("SubConv")
    assert code(layer) == "GA101"


@pytest.mark.parametrize("target, text",
                         [("SubConv", "exclude('SubConv')"), (Conv, "exclude(Conv)"),
                          ("re:.*Conv", "exclude('re:.*Conv')")])
def test_the_reason_quotes_the_rule(target, text):
    gnnaccel.exclude(target)
    assert text in rules.verdict(SubConv(), configs.with_epoch(Config())).reason.text


def test_the_reason_quotes_instance_name_and_list():
    net = Net()
    gnnaccel.exclude("last", model=net)
    assert "exclude('last', model=Net)" in rules.verdict(net.last,
                                                         configs.with_epoch(Config())).reason.text
    gnnaccel.exclude(net.last)
    assert "exclude(<SubConv object>)" in rules.verdict(net.last,
                                                        configs.with_epoch(Config())).reason.text
    listed = configs.with_epoch(Config(exclude=[Conv]))
    assert "enable(exclude=[Conv])" in rules.verdict(net.convs[0], listed).reason.text


# --- targets --------------------------------------------------------------------------------------

def test_decorator_returns_the_class():
    @gnnaccel.exclude
    class Mine(Conv):
        pass

    assert isinstance(Mine, type) and Mine.__name__ == "Mine"
    assert not inside(Mine()) and inside(Conv())


def test_every_target_is_returned():
    net = Net()
    for target in (net, Conv, "Conv"):
        assert gnnaccel.exclude(target) is target and gnnaccel.include(target) is target


def test_instance_covers_the_modules_inside():
    net, other = Net(), Net()
    gnnaccel.exclude(net)
    gnnaccel.include(net.convs)
    assert inside(net.convs[0]) and inside(net.convs[1]) and not inside(net.last) and inside(
        other.last)
    gnnaccel.exclude("convs", model=other)
    assert not inside(other.convs[1]) and inside(other.last)


def test_name_and_pattern_are_of_that_model_only():
    net, other = Net(), Net()
    gnnaccel.exclude("convs.0", model=net)
    assert [inside(layer)
            for layer in (*net.convs, net.last, *other.convs)] == [False, True, True, True, True]
    gnnaccel.exclude("re:(convs.1|last)", model=other)
    assert [inside(layer)
            for layer in (*other.convs, other.last, net.last)] == [True, False, False, True]


def test_pattern_has_to_match_in_full():
    net = Net()
    with pytest.raises(UnknownLayerError, match="matches no module of Net.*'convs.0'"):
        gnnaccel.exclude("re:conv", model=net)
    gnnaccel.exclude("re:Conv")
    assert inside(Conv()) and inside(SubConv())
    gnnaccel.exclude(r"re:.*\.SubConv")
    assert inside(Conv()) and not inside(SubConv())


def test_a_shared_module_is_found_under_each_name():
    net = Net()
    net.again = net.last
    gnnaccel.exclude("again", model=net)
    assert not inside(net.last)


def test_given_names_in_rules_and_lists():
    net = Net()
    assert gnnaccel.name_layers(net, prefix="net") == len(list(net.modules()))
    gnnaccel.exclude("net.last")
    assert not inside(net.last) and inside(net.convs[0])
    assert not inside(net.convs[0], exclude=["net.convs.0"])
    assert not inside(net.convs[1], exclude=[r"re:net\.convs\..*"])


def test_naming_later_renews_the_verdict():
    net = Net()
    gnnaccel.exclude(r"re:model\.last")
    configs.set_active(Config())
    assert rules.verdict(net.last, configs.current()).inside
    gnnaccel.name_layers(net, prefix="model")
    assert not rules.verdict(net.last, configs.current()).inside


def test_alias_path_of_a_class(monkeypatch):
    import sys
    import types

    alias = types.ModuleType("aliased_layers")
    alias.Short = SubConv
    monkeypatch.setitem(sys.modules, "aliased_layers", alias)
    gnnaccel.exclude("aliased_layers.Short")
    assert not inside(SubConv()) and inside(Conv())


# --- what is refused ------------------------------------------------------------------------------

@pytest.mark.parametrize("verb", ["include", "exclude"])
def test_unknown_names_list_near_matches(verb):
    call = getattr(gnnaccel, verb)
    with pytest.raises(UnknownLayerError, match=rf"{verb}\('SubCnov'\).*Did you mean 'SubConv'"):
        call("SubCnov")
    with pytest.raises(UnknownLayerError,
                       match="Net has no module named 'conv.0'.*Did you mean 'convs.0'"):
        call("conv.0", model=Net())
    assert inside(SubConv()) and not rules._shared


@pytest.mark.parametrize("args, kwargs, error, text", [
    (("re:(",), {}, ValueError, "not a regular expression"),
    (("re:(",), {"model": Net()}, ValueError, "not a regular expression"),
    (("convs.0",), {"model": "net"}, TypeError, "pass the torch.nn.Module"),
    ((Conv,), {"model": Net()}, TypeError, "model goes with a qualified name"),
    ((3,), {}, TypeError, "pass a layer, a class, or a string"),
])
def test_wrong_targets(args, kwargs, error, text):
    with pytest.raises(error, match=text):
        gnnaccel.exclude(*args, **kwargs)


def test_attribute_has_to_be_a_bool(monkeypatch):
    monkeypatch.setattr(Conv, "__gnnaccel__", "no", raising=False)
    with pytest.raises(TypeError, match="Conv.__gnnaccel__ is 'no'; set it to True or False"):
        inside(SubConv())


def test_unknown_names_wait_for_hosts_that_are_still_to_come(monkeypatch):
    monkeypatch.setattr(rules, "KNOWN", {})
    rules.await_hosts({"pyg": frozenset})
    gnnaccel.exclude("LateConv")
    gnnaccel.exclude("LateCnov")
    assert rules.take_unknown() == []
    rules.register_class("somewhere.LateConv")
    rules.await_hosts({})
    (message,) = rules.take_unknown()
    assert "exclude('LateCnov')" in message and "'LateConv'" in message
    assert set(rules._shared) == {"LateConv"} and rules.take_unknown() == []


@pytest.mark.parametrize("verb", ["include", "exclude"])
def test_unknown_names_are_warned_about_once_a_host_has_come(verb, recwarn):
    """What the awaited host's files define is let pass; the rest is told once, where it was
    written, and its rule stays."""
    rules.await_hosts({"dgl": lambda: frozenset({"LateConv"})})
    for name in ("SubConv", "LateConv", "dgl.nn.LateConv"):
        getattr(gnnaccel, verb)(name)
    assert not recwarn
    for name in ("SubCnov", "LateCnov"):
        getattr(gnnaccel, verb)(name)
        warning = recwarn.pop(RuntimeWarning)
        assert f"{verb}('{name}')" in str(warning.message) and warning.filename == __file__
        assert f"Did you mean '{name.replace('Cnov', 'Conv')}'" in str(warning.message)
    getattr(gnnaccel, verb)("SubCnov")
    assert not recwarn and "SubCnov" in rules._shared
    rules.register_class("dgl.nn.LateConv")
    rules.await_hosts({})
    assert rules.take_unknown() == [] and set(rules._shared) == {"SubConv", "LateConv",
                                                                 "dgl.nn.LateConv"}


def test_one_misspelt_name_is_told_for_each_list_that_has_it():
    rules.await_hosts({"dgl": lambda: frozenset({"LateConv"})})
    for verb in ("include", "exclude"):
        with pytest.warns(RuntimeWarning, match=f"{verb}.*LateCnov"):
            getattr(gnnaccel, verb)("LateCnov")


# --- nothing is stored on layers; weak; memo ------------------------------------------------------

def test_modules_stay_untouched():
    net = Net()
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    gnnaccel.name_layers(net)
    gnnaccel.exclude(net.last)
    assert not inside(net.last)
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == before
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert inside(other.last) and rules.qualified_name(other.last) is None


def test_layers_are_not_kept_alive():
    net = Net()
    gnnaccel.name_layers(net)
    gnnaccel.exclude(net)
    inside(net.last)
    ref, ids = weakref.ref(net.last), {id(module) for module in net.modules()}
    maps = (names._names, rules._own, rules._memo)
    assert all(ids & kept.entries.keys() for kept in maps)
    del net
    gc.collect()
    assert ref() is None and not any(ids & kept.entries.keys() for kept in maps)


def test_layers_that_define_equality():
    class Odd(Conv):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    first, second = Odd(), Odd()
    gnnaccel.exclude(first)
    assert not inside(first) and inside(second)


def test_reset_rules_restores_the_default():
    net = Net()
    gnnaccel.exclude(net)
    gnnaccel.exclude("Conv")
    gnnaccel.exclude("re:.*")
    assert not inside(net.last)
    gnnaccel.reset_rules()
    assert inside(net.last)


def test_verdict_is_remembered_per_epoch(monkeypatch):
    layer = SubConv()
    calls = []
    decide = rules._decide
    monkeypatch.setattr(rules, "_decide", lambda *args: calls.append(1) or decide(*args))
    configs.set_active(Config())
    for _ in range(3):
        assert rules.verdict(layer, configs.current()).inside
    assert len(calls) == 1
    gnnaccel.exclude(layer)
    for _ in range(3):
        assert not rules.verdict(layer, configs.current()).inside
    assert len(calls) == 2


def test_names():
    net = Net()
    assert rules.qualified_name(net.last) is None
    gnnaccel.name_layers(net)
    assert rules.qualified_name(net.convs[1]) == "convs.1" and rules.qualified_name(net) is None
    gnnaccel.name_layers(net, prefix="b")
    assert rules.qualified_name(net.convs[1]) == "b.convs.1" and rules.qualified_name(net) == "b"
    epoch = configs.with_epoch(Config()).epoch
    gnnaccel.name_layers(net, prefix="b")
    assert configs.with_epoch(Config()).epoch == epoch  # nothing new, so memos stay
    with pytest.raises(TypeError, match="torch.nn.Module"):
        gnnaccel.name_layers(torch.ones(1))
