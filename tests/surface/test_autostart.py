"""GNNACCEL=1 for a process tree: the line in site-packages, and the command that puts it there."""
from __future__ import annotations

import os
import subprocess
import sys
import venv

import pytest

import gnnaccel
from gnnaccel import autostart
from gnnaccel.__main__ import main

ROOT = os.path.dirname(os.path.dirname(gnnaccel.__file__))
SAY = "import sys; print('gnnaccel' in sys.modules and sys.modules['gnnaccel'].status()['enabled'])"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A Python of its own, with the line installed by its own command line."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    done = run(python, "-m", "gnnaccel", "autostart", "install")
    assert done.returncode == 0 and done.stdout.startswith("installed "), done.stderr
    return python


def run(python, *arguments, **environment):
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("GNNACCEL", "PYTHON"))}
    return subprocess.run([python, *arguments], env={**env, "PYTHONPATH": ROOT, **environment},
                          capture_output=True, text=True)


@pytest.mark.parametrize("value, on",
                         [("1", "True"), ("on", "True"), (" Yes ", "True"), (None, "False"),
                          ("", "False"), ("0", "False"),
                          ("off", "False"), ("nonsense", "False")])
def test_the_variable_decides(interpreter, value, on):
    done = run(interpreter, "-c", SAY, **({} if value is None else {"GNNACCEL": value}))
    assert done.stdout.strip() == on and done.stderr == ""


def test_children_and_their_options(interpreter):
    child = SAY + "; import gnnaccel; print(gnnaccel.status()['config']['when'])"
    code = ("import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', "
            f"{child!r}]).returncode)")
    done = run(interpreter, "-c", code, GNNACCEL="1", GNNACCEL_WHEN="supported")
    assert done.stdout.split() == ["True", "supported"]


def test_unset_it_imports_nothing(interpreter):
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith('gnnaccel')))"
    assert run(interpreter, "-c", code).stdout.strip() == "[]"
    listed = "import sys; print(sorted(sys.modules))"
    home = (interpreter.parent.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
            / "site-packages")
    assert autostart.state(home) == "installed"
    with_line = run(interpreter, "-c", listed).stdout
    autostart.remove(home)
    try:
        assert run(interpreter, "-c", listed).stdout == with_line
    finally:
        autostart.install(home)


def test_a_wrong_option_does_not_keep_python_from_starting(interpreter):
    done = run(interpreter, "-c", SAY, GNNACCEL="1", GNNACCEL_BACKEND="gpu")
    assert done.returncode == 0 and done.stdout.strip() == "False"
    assert done.stderr.startswith("gnnaccel: GNNACCEL=1 has no effect in this process: environment "
                                  "variable GNNACCEL_BACKEND=")
    assert len(done.stderr.splitlines()) == 1


def test_install_status_remove(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GNNACCEL", raising=False)

    def said(*words):
        assert main(["autostart", *words, "--folder", str(tmp_path)]) == 0
        return capsys.readouterr().out

    assert said("status").startswith("not installed: ") and said("remove").startswith(
        "nothing to remove")
    said("install")
    assert said("install").startswith("installed ") and os.listdir(tmp_path) == [autostart.NAME]
    assert said("status").splitlines() == [f"installed: {tmp_path / autostart.NAME}",
                                           "variables: none is set"]
    (tmp_path / autostart.NAME).write_text("import os\n")
    assert said("status").startswith("outdated: ")
    assert said("remove").startswith("removed ") and not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_with_a_way_out(tmp_path, capsys):
    assert main(["autostart", "install", "--folder", str(tmp_path / "none")]) == 1
    assert "none" in (said := capsys.readouterr().err) and "--user-site" in said


def test_the_line_is_one_that_site_executes():
    assert autostart.LINE.startswith("import ") and autostart.LINE.count(
        "\n") == 1 and autostart.folder().name == "site-packages"
    assert sys.prefix in str(autostart.folder()) or sys.base_prefix in str(autostart.folder())
