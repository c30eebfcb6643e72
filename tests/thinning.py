"""``--each-value``: a smaller, fixed set of the tests, for `make test`.

``@pytest.mark.parametrize`` put twice on a test runs it for every pair of values; three times, for
every triple. The smaller set keeps just enough cases that every value of every list occurs. So a
test with a single list keeps all of it, and a test without parameters is run. Under the emulation
nearly every case compiles kernels of its own, which takes longer than all else together; there a
test keeps one case, chosen by the test's name, so that different tests keep different ones. Tests
marked ``long`` are left out as well. Tests marked ``gpu`` are never left out.
"""
from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

OPTION = "--each-value"
# parameters that say where a test runs: each place has a smaller set of its own
PLACES = ("device", "route")
_EMULATED = "emulated"


def thinned(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(tests kept, tests left out), each in the order given."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    kept = {id(item) for group, cases in groups.items() for item in _chosen(group, cases)}
    return ([item for item in items if id(item) in kept],
            [item for item in items if id(item) not in kept])


def cover(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Positions of cases that together have every value that occurs in any case.

    They are chosen one by one: the case with most values that are still missing; among equals the
    one whose values were taken least often so far; among those the first.
    """
    missing = {value for case in cases for value in case}
    taken: Counter = Counter()
    left, found = list(range(len(cases))), []
    while missing:
        best = max(left, key=lambda at: (len(missing.intersection(cases[at])),
                                         -sum(taken[value] for value in cases[at])))
        left.remove(best)
        found.append(best)
        taken.update(cases[best])
        missing.difference_update(cases[best])
    return found


def _group(item: Any) -> tuple[str, ...]:
    """The test function and the places where the case runs; of a test on a GPU the case itself."""
    if item.get_closest_marker("gpu") is not None:
        return (item.nodeid,)
    spec = getattr(item, "callspec", None)
    places = ([] if spec is None
              else [str(spec.params[place]) for place in PLACES if place in spec.params])
    return item.nodeid.partition("[")[0], *places


def _chosen(group: tuple[str, ...], cases: list[Any]) -> list[Any]:
    cases = [case for case in cases
             if case.get_closest_marker("gpu") or not case.get_closest_marker("long")]
    if _EMULATED in group[1:]:
        return cases and [cases[zlib.crc32(group[0].encode()) % len(cases)]]
    return [cases[at] for at in cover([_values(case) for case in cases])]


def _values(item: Any) -> tuple[Hashable, ...]:
    """One value for each list of parameters: its place among them and its name in the test's id."""
    spec = getattr(item, "callspec", None)
    return ("",) if spec is None else tuple(enumerate(spec._idlist))
