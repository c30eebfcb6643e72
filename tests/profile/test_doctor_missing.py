"""The doctor in processes in which a package is missing: truthful, and with a remedy."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gnnaccel
from gnnaccel import session
from gnnaccel.profile.doctor import packages
from gnnaccel.profile.doctor.show import Finding
from tests.profile.test_doctor import of

ROOT = Path(gnnaccel.__file__).parent.parent

#: as users would see it: each in a process of its own, which has what the one before it has
#: imported, but for what is missing
FORKING = """
import contextlib, importlib, importlib.metadata, io, json, os, sys
from gnnaccel.__main__ import main
true = importlib.metadata.version

def run(name, modules, distributions):
    class Blocker:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] in modules:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def version(name):
        if name in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return true(name)

    child = os.fork()
    if child:
        return os.waitpid(child, 0)
    for known in [known for known in sys.modules if known.partition(".")[0] in modules]:
        del sys.modules[known]
    sys.meta_path.insert(0, Blocker)
    importlib.metadata.version = version
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as wrong:
        status = main(["doctor", "--json"])
    with open(f"{name}.json", "w") as file:
        json.dump([status, json.loads(said.getvalue()), wrong.getvalue()], file)
    os._exit(0)

for step in json.loads(sys.argv[1]):
    if step == "hosts":  # what reading their functions has cached serves all that follow
        from gnnaccel.profile.doctor import places
        list(places.hosts())
    elif isinstance(step, str):
        with contextlib.suppress(ImportError):
            importlib.import_module(step)
    else:
        run(*step)
"""
SMALL = [name for name in packages.REQUIRED if name not in ("torch", "numpy")]
MISSING = {"torch": ("torch",), "everything": (*packages.REQUIRED, *packages.HOSTS, "cupy"),
           "numpy": ("numpy",), "hosts": tuple(packages.HOSTS),
           **{name: (name,) for name in ("cupy", *packages.HOSTS, *SMALL)}}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What the doctor says in processes without packages, by the names of `MISSING`: (status,
    report, what stderr got)."""
    folder = tmp_path_factory.mktemp("doctor")
    runs = {name: [name, modules,
                   [d for module in modules for d in session.PACKAGES.get(module, (module,))]]
            for name, modules in MISSING.items()}
    # torch must not have been imported, or with numpy
    bare = [runs.pop(name) for name in ("torch", "everything", "numpy")]
    steps = [*bare, "torch", runs.pop("hosts"), "torch_geometric", "dgl", "hosts", *runs.values()]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GNNACCEL")}
    done = subprocess.run([sys.executable, "-c", FORKING, json.dumps(steps)], capture_output=True,
                          text=True, cwd=folder,
                          env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                               "XDG_CACHE_HOME": str(folder)})
    assert done.returncode == 0 and done.stdout == "", done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in MISSING}


@pytest.mark.long
@pytest.mark.parametrize("name", MISSING)
def test_in_a_process_without(without, name):
    status, report, said = without[name]
    modules = set(MISSING[name])
    findings = [Finding(**finding) for finding in report["findings"]]
    for module in modules & set(packages.REQUIRED):
        assert of(findings,
                  module).status == "fail" and "not installed" in of(findings, module).text
        assert of(findings,
                  module).remedy.startswith(
                      f"pip install {'' if module != 'torch' else chr(39)}{module}")
    needed = bool(modules & set(packages.REQUIRED))
    assert status == needed and report["ok"] is not needed and said == "", said
    for host in modules & set(packages.HOSTS):
        assert of(findings, host).status == "note" and "pip install" in of(findings, host).text
        assert not [f for f in findings if f.group == "hosts" and f.name == host]
    if set(packages.HOSTS) <= modules:
        assert of(findings,
                  "hosts").status == "warn" and not [f for f in findings if f.group == "hosts"
                                                     and f.name != "torch"]
    if "cupy" in modules and not [f for f in findings if f.name == "device 0"]:
        assert of(findings,
                  "CuPy").status == "note" and "gnnaccel[cuda" in of(findings, "CuPy").text
    if "torch" in modules:
        assert of(findings,
                  "device").text.startswith("not checked") and of(findings, "all",
                                                                  "kernels").status == "note"
    if "platformdirs" in modules:
        assert "GNNACCEL_CACHE_DIR" in of(findings, "gnnaccel", "caches").remedy
    if name == "numpy" and importlib.util.find_spec("torch_geometric"):
        assert of(findings, "torch_geometric").remedy == "pip install numpy"
