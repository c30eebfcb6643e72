"""What `make test` leaves out: no test function but the long ones, and nothing that runs on a
GPU."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import thinning

TESTS = """
import pytest

@pytest.fixture(params=["torch", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def route(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2, 3, 4])
@pytest.mark.parametrize("b", [5, 6, 7])
@pytest.mark.parametrize("c, d", [(8, 9), (8, 10)])
def test_product(a, b, c, d): ...

@pytest.mark.parametrize("a, b", [(n, n % 2) for n in range(20)])
def test_list(a, b): ...

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_routes(route, a, b): ...

def test_plain_route(route): ...

def test_another_route(route): ...

def test_third_route(route): ...

@pytest.mark.long
@pytest.mark.parametrize("a", [1, 2])
def test_long(route, a): ...

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.long)])
def test_partly_long(a): ...

def test_plain(): ...
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Test function -> the ids in brackets that are kept of it; a file as it stands, collected by
    pytest."""
    tmp_path = tmp_path_factory.mktemp("thinned")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: GPU\n    long: long\n")
    found: dict[str, list[str]] = {}

    class Collected:
        def pytest_collection_modifyitems(self, items):
            for item in thinning.thinned(items)[0]:
                name, _, case = item.name.partition("[")
                found.setdefault(name, []).append(case.rstrip("]"))

    pytest.main(["--collect-only", "-qq", "--import-mode=importlib", "-p", "no:cacheprovider",
                 str(tmp_path)], plugins=[Collected()])
    return found


def test_of_many_cases_one_is_kept(kept):
    assert len(kept["test_product"]) == len(kept["test_list"]) == 1 and kept["test_plain"] == [""]


def test_different_tests_keep_different_cases():
    cases = [SimpleNamespace(nodeid=f"test_{name}[{case}]", get_closest_marker=lambda name: None)
             for name in range(6) for case in range(20)]
    kept, left = thinning.thinned(cases)
    assert len(kept) == 6 and len(left) == 114
    assert len({case.nodeid.partition("[")[2] for case in kept}) == 6


def test_places(kept):
    """All of a GPU, one case in one other place."""
    cases = kept["test_routes"]
    assert sum(case.startswith("cuda") for case in cases) == 6 and len(cases) == 7
    others = [set(kept[name]) - {"cuda"}
              for name in ("test_plain_route", "test_another_route", "test_third_route")]
    assert all(map(len, others)) and set.union(*others) == {"torch", "emulated"}


def test_long_tests_are_left_to_a_full_run_but_for_those_on_a_gpu(kept):
    assert kept["test_long"] == ["cuda-1", "cuda-2"] and kept["test_partly_long"] == ["1"]


def test_files_take_turns():
    items = [SimpleNamespace(path=path, name=name) for path in "abcde" for name in range(3)]
    orders = {tuple(item.path for item in thinning.turned(items, day)[::3]) for day in range(40)}
    assert orders == {tuple("abcde"[at:] + "abcde"[:at]) for at in range(5)}
    found = thinning.turned(items, 7)
    assert sorted(map(id, found)) == sorted(map(id, items))
    assert all([item.name for item in found[at:at + 3]] == [0, 1, 2] for at in range(0, 15, 3))
    assert thinning.turned([], 7) == []


@pytest.mark.long
@pytest.mark.parametrize("minutes, outcome", [("9", "1 passed"), ("0", "1 skipped")])
def test_what_has_not_begun_in_time_is_skipped(minutes, outcome):
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                          f"{__file__}::test_files_take_turns", thinning.MINUTES, minutes],
                         capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert outcome in run.stdout
