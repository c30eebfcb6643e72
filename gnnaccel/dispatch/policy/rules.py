"""Opting layers in and out.

A rule is in effect from the next call on. When several speak about one layer, the most specific
wins:

1. instance: ``exclude(layer)``; covers the modules inside it, so ``exclude(model)`` works too;
2. exact name: ``exclude("convs.0", model=model)``, or a name given by ``name_layers``;
3. pattern: ``exclude("re:convs\\..*", model=model)``, or against the layer's own dotted class path
   and given name;
4. class: ``exclude(GATConv)``, ``exclude("GATConv")``, a dotted path, or the class attribute
   ``__gnnaccel__``.
   Subclasses are covered; the nearest class in the MRO wins; on one class an explicit rule beats
   the attribute, which
   is read at a layer's first call and after changes of rules or options;
5. default: inside, unless ``enable(include=[...])`` is not empty.

The lists of ``enable()`` are rules given at the time of that call. At equal level the later call
wins; within one call ``exclude`` wins over ``include``.
"""
from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import names
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.names import IdentityMap, name_layers, qualified_name
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.errors import UnknownLayerError
from gnnaccel.suggest import did_you_mean

__all__ = ["KNOWN", "Verdict", "exclude", "include", "name_layers", "qualified_name",
           "register_class", "reset_rules", "verdict"]

T = TypeVar("T")
PATTERN = "re:"
ATTRIBUTE = "__gnnaccel__"
INSTANCE, NAME, REGEX = "instance", "name", "pattern"


@dataclass(frozen=True)
class Verdict:
    """Whether a layer may be taken over (``inside``); ``reason`` says why not."""

    inside: bool
    reason: Reason | None = None


@dataclass(frozen=True)
class Rule:
    """A statement of the user. ``order`` sorts by time; ``text`` is how the user wrote it."""

    inside: bool
    order: tuple[int, int, int]
    text: str

    def verdict(self) -> Verdict:
        return (INSIDE
                if self.inside else Verdict(False, reason("GA101", f"excluded by {self.text}")))


INSIDE = Verdict(True)
DISABLED = Verdict(False, reason("GA104"))

#: class name -> dotted paths of the layer classes with that name; adapters fill it through
#: `register_class`
KNOWN: dict[str, set[str]] = {}
#: hosts whose classes are not registered yet, each with a function that gives the class names that
#: it may bring; while there are any, an unknown class name may still turn out right
_awaited: dict[str, Callable[[], frozenset[str]]] = {"any": frozenset}
_deferred: dict[str, str] = {}
# names in `_deferred` that the user was warned about, and where they stood
_told: set[tuple[str, str]] = set()

_lock = threading.RLock()
_own: IdentityMap[dict[str, Rule]] = IdentityMap()
_shared: dict[str | type, Rule] = {}  # replaced, never changed in place: readers take no lock
_memo: IdentityMap[tuple[int, Verdict]] = IdentityMap()


# --- the user's statements ------------------------------------------------------------------------

def include(target: T, model: Any = None) -> T:
    """Let gnnaccel take over ``target``; the opposite of `exclude`, with the same targets. Returns
    ``target``."""
    return _state(True, target, model)


def exclude(target: T, model: Any = None) -> T:
    """Keep ``target`` native. Returns ``target``, so that it can decorate a class.

    ``target`` is a layer (with the modules inside it), a class, a class name, a dotted class path,
    a name given by ``name_layers``, or ``"re:"`` and a pattern that has to match in full a dotted
    class path or a given name. With ``model``, a string is a qualified name inside that model (or a
    pattern for such names), bound to the modules that have it now: rules follow neither copies nor
    replacements. Precedence: see this module's docstring.

    Raises UnknownLayerError, with near matches, when a string names nothing; ValueError for a
    pattern that is not a regular expression; TypeError for any other target.
    """
    return _state(False, target, model)


def reset_rules() -> None:
    """Drop every rule given by `include` and `exclude`. Lists given to ``enable()`` and names of
    layers stay."""
    global _shared
    with _lock:
        _own.clear()
        _deferred.clear()
        _told.clear()
        _shared = {}
        configs.bump()


def _state(inside: bool, target: Any, model: Any) -> Any:
    verb = "include" if inside else "exclude"
    with _lock:
        order = (configs.generation() + 1, 0, 0)
        if isinstance(target, str):
            if model is None:
                check(target, f"{verb}({target!r})")
                _add_shared(target, Rule(inside, order, f"{verb}({target!r})"))
                for message in take_unknown():
                    warnings.warn(f"gnnaccel: {message}", RuntimeWarning, stacklevel=3)
            else:
                _add_named(target, names.require_model(model), inside, order)
        elif model is not None:
            raise TypeError(f"{verb}({target!r}, model=...): model goes with a qualified "
                            "name, given as a string")
        elif isinstance(target, type):
            _add_shared(target, Rule(inside, order, f"{verb}({target.__qualname__})"))
        elif names.is_module(target):
            rule = Rule(inside, order, f"{verb}(<{type(target).__name__} object>)")
            for module in target.modules():
                _add_own(module, INSTANCE, rule)
        else:
            raise TypeError(f"{verb}({target!r}) of type {type(target).__name__}: pass a "
                            "layer, a class, or a string")
        configs.bump()
    return target


def _add_shared(target: str | type, rule: Rule) -> None:
    global _shared
    _shared = {**_shared, target: rule}


def _add_own(module: Any, level: str, rule: Rule) -> None:
    _own.set(module, {**(_own.get(module) or {}), level: rule})


def _add_named(text: str, model: Any, inside: bool, order: tuple[int, int, int]) -> None:
    """Bind a name or pattern inside ``model`` to its modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    modules.pop("")
    verb, owner = "include" if inside else "exclude", type(model).__name__
    rule = Rule(inside, order, f"{verb}({text!r}, model={owner})")
    if text.startswith(PATTERN):
        pattern = compiled(text)
        matching = [module for name, module in modules.items() if pattern.fullmatch(name)]
        if not matching:
            raise UnknownLayerError(
                f"{text!r} matches no module of {owner}; a pattern has to match the whole name, "
                                    f"such as {', '.join(map(repr, list(modules)[:5]))}")
        for module in matching:
            _add_own(module, REGEX, rule)
        return
    if text not in modules:
        raise UnknownLayerError(
            f"{owner} has no module named {text!r}.{did_you_mean(text, modules)} "
                                f"model.named_modules() lists the names")
    for module in modules[text].modules():
        _add_own(module, NAME, rule)


# --- which names exist ----------------------------------------------------------------------------

def register_class(path: str) -> None:
    """Note that an adapter knows the layer class with this dotted path, such as
    torch_geometric.nn.conv.gat_conv.GATConv."""
    KNOWN.setdefault(path.rpartition(".")[2], set()).add(path)


def await_hosts(hosts: Mapping[str, Callable[[], frozenset[str]]]) -> None:
    """Say which hosts have yet to register their classes.

    Each comes with a function that gives the names of its classes. Until no such host is left,
    unknown class names are accepted.
    """
    _awaited.clear()
    _awaited.update(hosts)


def complete() -> bool:
    """Whether every host has registered its classes: a name that is unknown then is wrong."""
    return not _awaited


def check(text: str, where: str) -> None:
    """Check that a string without a model names something. UnknownLayerError, or ValueError for a
    bad pattern, if not."""
    if text.startswith(PATTERN):
        compiled(text)
    elif not _names_something(text):
        if not _awaited:
            raise UnknownLayerError(_unknown(text, where))
        _deferred[text] = where


def take_unknown() -> list[str]:
    """Messages, once each, for names that were accepted and that name nothing.

    These are names of no class of the registered hosts, and none in the files of the awaited ones.
    There are no messages while no host is registered. When no host is awaited, the rules with such
    names are dropped.
    """
    global _shared
    with _lock:
        if _awaited and not KNOWN:
            return []
        wrong = {text: where for text, where in _deferred.items()
                 if not _names_something(text) and not _may_come(text)}
        fresh = [_unknown(*entry) for entry in wrong.items() if entry not in _told]
        _told.update(wrong.items())
        if not _awaited:
            _deferred.clear()
            _told.clear()
            if wrong:
                _shared = {target: rule for target, rule in _shared.items() if target not in wrong}
                configs.bump()
        return fresh


def compiled(text: str) -> re.Pattern[str]:
    """The pattern behind ``re:``. ValueError when it is not a regular expression."""
    try:
        return re.compile(text[len(PATTERN):])
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error


def _names_something(text: str) -> bool:
    return (text in KNOWN or any(text in paths for paths in KNOWN.values())
            or text in names.known_names()
            or _resolve(text) is not None)


def _may_come(text: str) -> bool:
    """Whether a host that is awaited defines a class of this name."""
    return any(text.rpartition(".")[2] in classes() for classes in _awaited.values())


def _unknown(text: str, where: str) -> str:
    words = [*KNOWN, *(path for paths in KNOWN.values() for path in paths), *names.known_names()]
    words += [name for classes in _awaited.values() for name in sorted(classes())]
    return (f"{where}: no layer class or named layer is called "
            f"{text!r}.{did_you_mean(text, words)} For a class of "
            "your own pass the class itself; for a name inside a model pass model=, or call "
            "gnnaccel.name_layers(model)")


def _resolve(path: str) -> type | None:
    """The class at a dotted path, aliases such as torch_geometric.nn.GATConv included, if its
    module is imported."""
    module, _, name = path.rpartition(".")
    value = getattr(sys.modules.get(module), name, None) if module else None
    return value if isinstance(value, type) else None


# --- the verdict ----------------------------------------------------------------------------------

def verdict(layer: Any, config: Config | None) -> Verdict:
    """Whether ``layer`` may be taken over under ``config``. Kept weakly per layer, for the epoch of
    ``config``.

    Raises TypeError when a class's ``__gnnaccel__`` is not a bool.
    """
    if config is None:
        return DISABLED
    # IdentityMap.get, inlined: this runs at every call of every layer
    entry = _memo.entries.get(id(layer))
    if entry is not None and entry[1][0] == config.epoch and entry[0]() is layer:
        return entry[1][1]
    decision = _decide(layer, config)
    _memo.set(layer, (config.epoch, decision))
    return decision


def _decide(layer: Any, config: Config) -> Verdict:
    own = _own.get(layer) or {}
    cls = type(layer)
    rules = [*_shared.items(), *_listed(config)]
    name = qualified_name(layer)
    own_names = [word for word in (name, path_of(cls)) if word is not None]
    levels: tuple[list[Rule], ...] = (
        [],
        [rule for target, rule in rules if isinstance(target, str) and target == name],
        [rule for target, rule in rules if isinstance(target, str) and target.startswith(PATTERN)
         and any(compiled(target).fullmatch(word) for word in own_names)],
    )
    for level, shared in zip((INSTANCE, NAME, REGEX), levels):
        candidates = [*([own[level]] if level in own else []), *shared]
        if candidates:
            return max(candidates, key=lambda rule: rule.order).verdict()
    return _by_class(cls, rules) or _default(cls, config)


def _listed(config: Config) -> Iterator[tuple[str | type, Rule]]:
    """The lists of ``enable()`` as rules."""
    for option, inside in (("include", True), ("exclude", False)):
        for target in getattr(config, option):
            name = target.__qualname__ if isinstance(target, type) else repr(target)
            rule = Rule(inside, (config.stamp, 1, not inside), f"enable({option}=[{name}])")
            yield target, rule


def _by_class(cls: type, rules: list[tuple[str | type, Rule]]) -> Verdict | None:
    for base in cls.__mro__:
        explicit = [rule for target, rule in rules if _means(target, base)]
        if explicit:
            return max(explicit, key=lambda rule: rule.order).verdict()
        if ATTRIBUTE in vars(base):
            return _by_attribute(base)
    return None


def _by_attribute(cls: type) -> Verdict:
    value = vars(cls)[ATTRIBUTE]
    if not isinstance(value, bool):
        raise TypeError(f"{path_of(cls)}.{ATTRIBUTE} is {value!r}; set it to True or False")
    return (INSIDE
            if value
            else Verdict(False, reason("GA103", f"{cls.__qualname__}.{ATTRIBUTE} is False")))


def _default(cls: type, config: Config) -> Verdict:
    if config.include:
        return Verdict(False, reason("GA102", f"{cls.__name__} is not in enable(include=...)"))
    return INSIDE


def _means(target: str | type, cls: type) -> bool:
    if isinstance(target, type):
        return target is cls
    return target in (cls.__name__, path_of(cls)) or _resolve(target) is cls


def path_of(cls: type) -> str:
    """The dotted path of a class, as `register_class` takes it."""
    return f"{cls.__module__}.{cls.__qualname__}"
