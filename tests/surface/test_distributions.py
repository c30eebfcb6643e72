"""The wheel and the source distribution, built from a copy of this checkout: what is in them, and
the wheel installed in an environment of its own, outside of the checkout."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import gnnaccel

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools puts its own arguments there
print(build_meta.build_sdist(out), build_meta.build_wheel(out), file=sys.stderr)
"""


def version_of(distribution: str) -> tuple[int, ...]:
    """(0,) where it is missing."""
    try:
        return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")
                     if part.isdigit())
    except importlib.metadata.PackageNotFoundError:
        return (0,)


pytestmark = [pytest.mark.long, pytest.mark.skipif(
    version_of("setuptools") < (77,) or not (ROOT / "setup.cfg").exists(),
    reason="building needs setuptools 77 and a checkout")]


def own(*arguments, cwd: Path, **more):
    """Run a command without this repository on the path of Python."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("GNNACCEL", "PYTHON"))}
    return subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, **more)


def files(folder: str) -> set[str]:
    """All files below a folder of the checkout that belong there."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source distribution). The checkout itself gets no build folder."""
    copy, out = tmp_path_factory.mktemp("copy") / "source", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis"))
    done = own(sys.executable, "-c", BUILD, str(out), cwd=copy)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_the_wheel_has_all_of_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files("gnnaccel")
    assert "gnnaccel/py.typed" in names and "gnnaccel/cuda/src/common.cuh" in names


def test_the_source_distribution_can_run_its_tests(built):
    with tarfile.open(built[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert files("tests") | files("gnnaccel") | files("docs") | files("examples") <= names
    for needed in ("Makefile", "constraints.txt", "setup.cfg", "pyproject.toml", "README.md",
                   "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "LICENSE",
                   ".ci/ruff.toml"):
        assert needed in names, needed


@pytest.fixture(scope="module")
def home(built, tmp_path_factory):
    """A new environment with the wheel and nothing else in it."""
    if version_of("pip") < (22, 3):
        pytest.skip("pip 22.3 or later is needed to install into another environment")
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, symlinks=True)
    done = own(sys.executable, "-m", "pip", "-q", "--python", str(home / "bin" / "python"),
               "install", "--no-deps", "--no-index", str(built[0]), cwd=home)
    assert done.returncode == 0, done.stderr
    return home


def test_installed_alone_it_is_imported_from_there(home):
    done = own(home / "bin" / "python", "-c", "import gnnaccel; print(gnnaccel.__file__, "
               "gnnaccel.__version__)", cwd=home)
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(home) and version == gnnaccel.__version__, done.stderr


@pytest.mark.parametrize("command", [("gnnaccel",), ("python", "-m", "gnnaccel")], ids=" ".join)
def test_the_command_and_the_module_say_their_version(home, command):
    done = own(home / "bin" / command[0], *command[1:], "--version", cwd=home)
    assert done.stdout == f"gnnaccel {gnnaccel.__version__}\n" and done.returncode == 0, done.stderr


def test_the_metadata_names_what_an_index_shows(home):
    code = ("import importlib.metadata as m; about = m.metadata('gnnaccel'); "
            "print(about['Author'], about['License-Expression'] or about['License'], about['Keywords']); "
            "print([p.name for p in m.entry_points(group='pytest11')])")
    said = own(home / "bin" / "python", "-c", code, cwd=home).stdout
    assert "gnnaccel developers" in said and "Apache-2.0" in said and "GNN" in said
    assert "['gnnaccel.pytest_plugin']" in said


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a run needs torch")
def test_the_command_runs_what_python_runs(home, tmp_path):
    """With the packages of this environment beside it: the working directory is on the path for -m,
    and what is run does not see the command."""
    (tmp_path / "beside.py").write_text("import sys, gnnaccel\n"
                                        "print(sys.path[0], sys.argv[1:], "
                                        "gnnaccel.status()['enabled'])\n1 / 0\n")
    outer = [path for path in sys.path if path.endswith("-packages")]
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text("\n".join(outer))
    done = own(home / "bin" / "gnnaccel", "-m", "beside", "word", cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path), "['word']", "True"]
    assert "beside.py" in done.stderr and str(home / "bin") not in done.stderr, done.stderr
