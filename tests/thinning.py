"""``--few``: a smaller, fixed set of the tests, for `make test`; `make test-all` runs all of them.

Every test function is run, but for those marked ``long``. Of one with parameters `MOST` cases run;
of one that runs on torch operations and under the emulation a single case in one of these places,
since the emulation compiles kernels for nearly every case. Which cases are kept depends on the
test's name, so that different tests keep different ones. Tests marked ``gpu`` are never left out.

``--minutes N``: tests that have not begun N minutes after the start are skipped, for a run that is
ended at a fixed time. Files are then in another order each day, so that it is not always the same
tests that a slow machine leaves out.
"""
from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

OPTION = "--few"
MINUTES = "--minutes"
MOST = 2
# parameters that say where a test runs
PLACES = ("device", "route")


def thinned(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(tests kept, tests left out), each in the order given."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    kept = {id(item) for name, cases in groups.items() for item in _chosen(name, cases)}
    return ([item for item in items if id(item) in kept],
            [item for item in items if id(item) not in kept])


def turned(items: Sequence[Any], day: int) -> list[Any]:
    """The tests, from another file on each ``day``, and those of a file together."""
    files: dict[Any, list[Any]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files.values())
    first = zlib.crc32(str(day).encode()) % max(1, len(order))
    return [item for file in (*order[first:], *order[:first]) for item in file]


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


def spread(count: int, most: int, name: str) -> list[int]:
    """At most ``most`` of the positions below ``count``, evenly far apart.

    The name of the test says where they begin.
    """
    start = zlib.crc32(name.encode())
    return sorted({(start + at * count // most) % count for at in range(most)} if count > most
                  else range(count))


def _group(item: Any) -> str:
    """The test function; of a test on a GPU the case itself."""
    gpu = item.get_closest_marker("gpu") is not None
    return item.nodeid if gpu else item.nodeid.partition("[")[0]


def _place(item: Any) -> str | None:
    """Where a case runs, if it runs in several places."""
    spec = getattr(item, "callspec", None)
    params = {} if spec is None else spec.params
    return next((str(params[place]) for place in PLACES if place in params), None)


def _chosen(name: str, cases: list[Any]) -> list[Any]:
    cases = [case for case in cases
             if case.get_closest_marker("gpu") or not case.get_closest_marker("long")]
    places = sorted({place for place in map(_place, cases) if place is not None})
    if places:
        place = places[zlib.crc32(name.encode()) % len(places)]
        cases = [case for case in cases if _place(case) == place]
    cases = [cases[at] for at in cover([_values(case) for case in cases])]
    return [cases[at] for at in spread(len(cases), 1 if places else MOST, name)]


def _values(item: Any) -> tuple[Hashable, ...]:
    """One value for each list of parameters: its place among them and its name in the test's id."""
    spec = getattr(item, "callspec", None)
    return ("",) if spec is None else tuple(enumerate(spec._idlist))
