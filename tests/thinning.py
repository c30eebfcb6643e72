"""``--few``: a smaller, fixed set of the tests, for `make test`; `make test-all` runs all of them.

Every test function is run, but for those marked ``long``, which take a second and more. Of one
with parameters one case runs. Which that is, and whether on torch operations or in the emulation,
depends on the test's name, so that different tests keep different ones. Tests marked ``gpu`` are
never left out.

``--minutes N``: tests that have not begun N minutes after the start are skipped, for a run that is
ended at a fixed time. Files are then in another order each day, so that it is not always the same
tests that a slow machine leaves out.
"""
from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

OPTION = "--few"
MINUTES = "--minutes"
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
    """All cases on a GPU; of others one that is not long."""
    if cases[0].get_closest_marker("gpu"):
        return cases
    cases = [case for case in cases if not case.get_closest_marker("long")]
    number = zlib.crc32(name.encode())
    places = sorted({place for place in map(_place, cases) if place is not None})
    if places:
        place = places[number % len(places)]
        cases = [case for case in cases if _place(case) == place]
    return cases and [cases[number // 2 % len(cases)]]
