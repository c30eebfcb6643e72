"""enable, disable, enabled, disabled; with hosts imported before and after."""
from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import threading
import warnings

import pytest

import gnnaccel
from gnnaccel import adapters, session
from gnnaccel.cuda.runtime import driver, probe
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.policy import config, rules
from gnnaccel.errors import UnknownLayerError

from .conftest import REAL_HOSTS


def snapshot(nn):
    return {cls: dict(vars(cls)) for cls in (nn.Base, nn.Conv, nn.Plain)}


def record():
    return records.new(host="pyg", layer="Conv", route="native")


# --- patching hosts -------------------------------------------------------------------------------

def test_host_imported_before(host):
    nn = host.load()
    before = snapshot(nn)
    layer = nn.Conv()
    gnnaccel.enable()
    assert layer.forward(1) == 102 and nn.Plain().forward(1) == 101 and nn.Base().forward(1) == 1
    assert gnnaccel.status()["hosts"]["fake"] == {"patched": ["Conv", "Plain"], "pending": False,
                                                  "error": None}
    gnnaccel.disable()
    assert snapshot(nn) == before and layer.forward(1) == 2
    assert "forward" not in vars(nn.Plain)


def test_host_imported_after(host):
    gnnaccel.enable()
    assert gnnaccel.status()["hosts"]["fake"] == {"patched": [], "pending": True, "error": None}
    nn = host.load()
    assert nn.Conv().forward(1) == 102
    assert gnnaccel.status()["hosts"]["fake"] == {"patched": ["Conv", "Plain"], "pending": False,
                                                  "error": None}
    gnnaccel.disable()
    assert nn.Conv().forward(1) == 2 and "forward" not in vars(nn.Plain)


def test_host_imported_after_disabling_stays_native(host):
    gnnaccel.enable()
    gnnaccel.disable()
    assert host.load().Conv().forward(1) == 2


def test_idempotent(host):
    nn = host.load()
    before = snapshot(nn)
    gnnaccel.enable()
    wrapped = nn.Conv.forward
    gnnaccel.enable()
    gnnaccel.enable(when="supported")
    assert nn.Conv.forward is wrapped
    gnnaccel.disable()
    gnnaccel.disable()
    assert snapshot(nn) == before
    gnnaccel.enable()
    assert nn.Conv().forward(1) == 102


def test_a_failing_adapter_of_an_imported_host_fails_enable(make_host):
    host = make_host("def install(patches):\n    raise RuntimeError('drifted')\n")
    nn = host.load()
    with pytest.raises(RuntimeError, match="drifted"):
        gnnaccel.enable(records=3)
    assert config.current() is None and not records.listening() and nn.Conv().forward(1) == 2
    assert gnnaccel.status()["hosts"]["fake"] == {"patched": [], "pending": False, "error": None}


def test_a_failing_adapter_leaves_no_other_host_patched(make_host, monkeypatch):
    good = make_host()
    monkeypatch.setitem(adapters.HOSTS, "good", adapters.HOSTS["fake"])
    bad = make_host("def install(patches):\n    raise RuntimeError('drifted')\n")
    nn = good.load()
    bad.load()
    monkeypatch.setattr(adapters, "HOSTS", dict(sorted(adapters.HOSTS.items(), reverse=True)))
    assert list(adapters.HOSTS) == ["good", "fake"]
    with pytest.raises(RuntimeError, match="drifted"):
        adapters.install()
    assert nn.Conv().forward(1) == 2 and not adapters._hosts


def test_a_failing_adapter_of_a_later_host_is_a_warning(make_host):
    host = make_host("def install(patches):\n    import NAME.nn\n"
                     "    patches.set(NAME.nn.Conv, 'forward', None)\n    raise "
                     "RuntimeError('drifted')\n")
    gnnaccel.enable()
    with pytest.warns(RuntimeWarning, match="runs natively: RuntimeError: drifted"):
        nn = host.load()
    assert nn.Conv().forward(1) == 2
    assert gnnaccel.status()["hosts"]["fake"] == {"patched": [], "pending": False,
                                                  "error": "RuntimeError: drifted"}


def test_every_real_host_has_an_adapter_with_install():
    assert {key: module for key, (module, _) in REAL_HOSTS.items()} == {
        "pyg": "torch_geometric.nn", "dgl": "dgl", "torch": "torch"}
    for _, package in REAL_HOSTS.values():
        assert callable(importlib.import_module(package).install)


# --- options --------------------------------------------------------------------------------------

def test_enable_again_changes_the_options_given():
    gnnaccel.enable(backend="torch", records=5, include=["re:A"])
    gnnaccel.enable(when="supported")
    assert config.current() == config.Config(backend="torch", when="supported", records=5,
                                             include=("re:A",))
    gnnaccel.enable(backend="auto", records=0, include=())
    assert config.current() == config.Config(when="supported")
    gnnaccel.disable()
    gnnaccel.enable()
    assert config.current() == config.Config()


@pytest.mark.parametrize("options, error", [
    (dict(backend="gpu"), ValueError), (dict(include=["Nothing"]), UnknownLayerError),
    (dict(exclude=["re:("]), ValueError), (dict(log="no/such/dir/x"), OSError),
    (dict(passes=["fusion"]), ValueError),
    (dict(passes=1), ValueError),
])
@pytest.mark.parametrize("was_on", [False, True])
def test_a_wrong_option_changes_nothing(host, options, error, was_on):
    nn = host.load()
    if was_on:
        gnnaccel.enable(when="supported", records=3)
    before = (config.current(), records.listening(), nn.Conv.forward, adapters.state())
    with pytest.raises(error):
        gnnaccel.enable(**options)
    with pytest.raises(error):
        with gnnaccel.enabled(**options):
            raise AssertionError("entered")
    assert (config.current(), records.listening(), nn.Conv.forward, adapters.state()) == before


def test_lists_are_checked_against_the_classes_of_the_host(host):
    host.load()
    gnnaccel.enable(include=["Conv"])
    with pytest.raises(UnknownLayerError,
                       match=r"enable\(exclude=\['Plian'\]\).*Did you mean 'Plain'"):
        gnnaccel.enable(exclude=["Plian"])


def test_names_stated_before_the_host_is_known_are_checked_when_it_is(host, monkeypatch):
    monkeypatch.setattr(rules, "_awaited", {"any": frozenset})
    gnnaccel.exclude("Plian")
    gnnaccel.exclude("Conv")
    host.load()
    with pytest.raises(UnknownLayerError, match=r"exclude\('Plian'\).*Did you mean 'Plain'"):
        gnnaccel.enable()
    assert config.current() is None
    gnnaccel.enable()
    assert set(rules._shared) == {"Conv"}


def test_names_stated_before_a_later_import_are_warned_about(host):
    gnnaccel.enable(exclude=["Plian", "Plain"])
    with pytest.warns(RuntimeWarning, match="'Plian'.*Did you mean 'Plain'") as caught:
        host.load()
    assert len(caught) == 1


def test_names_are_checked_against_the_host_that_is_imported(make_host, monkeypatch):
    """A name that no host has is reported, also while another host is installed but not imported.

    That is the case of DGL where scripts use PyG alone.
    """
    first, second = make_host(), make_host()
    monkeypatch.setitem(adapters.HOSTS, "first", (f"{first.name}.nn", first.adapter))
    first.load()
    (tmp := second.root / second.name / "nn" / "more").mkdir()
    (tmp / "late.py").write_text("class LateConv: ...\n")
    with pytest.warns(RuntimeWarning,
                      match=r"enable\(exclude=\['Plian'\]\).*Did you mean 'Plain'") as caught:
        gnnaccel.enable(exclude=["Plian", "Plain"], include=["LateConv", "Conv"])
    assert [warning.filename for warning in caught] == [__file__] and second.name not in sys.modules
    with pytest.warns(RuntimeWarning, match="'LateCnov'.*Did you mean 'LateConv'") as caught:
        with gnnaccel.enabled(include=["LateCnov"]):
            pass
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(RuntimeWarning, match="'LateConv'") as caught:
        second.load()
    assert len(caught) == 1, ("a class of the host that is no layer gnnaccel knows, "
                              "and nothing told twice")


def test_a_warning_made_an_error_leaves_everything_as_before(make_host, monkeypatch):
    first = make_host()
    monkeypatch.setitem(adapters.HOSTS, "first", (f"{first.name}.nn", first.adapter))
    make_host()
    nn = first.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="Plian"):
            gnnaccel.enable(exclude=["Plian"])
    assert config.current() is None and nn.Conv().forward(1) == 2


# --- what cannot have an effect ------------------------------------------------------------------

def test_without_torch_a_warning_says_so(host, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *args: None if name == "torch" else found(name, *args))
    with pytest.warns(RuntimeWarning, match="torch is not installed.*pip install torch") as caught:
        gnnaccel.enable()
    assert len(caught) == 1 and config.current() is not None


def test_kernels_that_cannot_run_are_told_where_they_are_asked_for(monkeypatch, recwarn):
    monkeypatch.setattr(driver, "available", lambda: (False, "torch reports no CUDA device"))
    for options in ({}, {"backend": "torch"}, {"backend": "auto"}):
        gnnaccel.enable(**options)
    assert not recwarn
    gnnaccel.enable(backend="cuda")
    with gnnaccel.enabled(backend="cuda"):
        pass
    assert ["torch reports no CUDA device. Every layer runs natively" in str(w.message)
            for w in recwarn] == [True] * 2
    assert {w.filename for w in recwarn} == {__file__}
    gnnaccel.disable()
    recwarn.clear()
    with driver.using(object()):
        gnnaccel.enable(backend="cuda")
    monkeypatch.setattr(driver, "available", lambda: (True, ""))
    gnnaccel.enable(backend="cuda")
    assert not recwarn


def test_kernels_are_looked_for_once_torch_is_there(host, monkeypatch, recwarn):
    monkeypatch.setattr(driver, "available", lambda: (False, "torch reports no CUDA device"))
    monkeypatch.setitem(adapters.HOSTS, "torch", adapters.HOSTS.pop("fake"))
    with monkeypatch.context() as early:
        early.delitem(sys.modules, "torch")
        gnnaccel.enable(backend="cuda")
    assert not recwarn
    host.load()
    assert "backend='cuda' was asked for" in str(recwarn.pop(RuntimeWarning).message)


def test_a_cupy_for_another_cuda_is_told_with_what_to_install(host, monkeypatch, recwarn):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for installed in ((), ("cupy-cuda13x",), ("cupy",)):
        monkeypatch.setattr(probe, "cupy_installed", lambda installed=installed: installed)
        gnnaccel.enable()
    monkeypatch.setattr(probe, "cupy_installed", lambda: ("cupy-cuda12x",))
    gnnaccel.enable(backend="torch")  # needs no CuPy
    assert not recwarn
    gnnaccel.enable(backend="auto")
    text = str(recwarn.pop(RuntimeWarning).message)
    assert "\n" not in text and "torch is built for CUDA 13.0, but cupy-cuda12x is installed" in text
    assert "pip install 'gnnaccel[cuda13]'" in text and not recwarn
    monkeypatch.setattr(torch.version, "cuda", None)
    gnnaccel.enable(backend="auto")
    assert not recwarn


# --- blocks ---------------------------------------------------------------------------------------

def test_enabled_restores_not_enabled(host):
    nn = host.load()
    before = snapshot(nn)
    with gnnaccel.enabled(backend="torch"):
        assert nn.Conv().forward(1) == 102 and config.current().backend == "torch"
        assert config.active() is None
    assert config.current() is None and snapshot(nn) == before
    with pytest.raises(KeyError):
        with gnnaccel.enabled():
            raise KeyError
    assert config.current() is None and snapshot(nn) == before


def test_blocks_nest_and_inherit(host):
    nn = host.load()
    gnnaccel.enable(when="supported")
    outer = config.current()
    with gnnaccel.enabled(backend="torch"):
        assert config.current() == config.Config(backend="torch", when="supported")
        with gnnaccel.disabled():
            assert config.current() is None and nn.Conv().forward(1) == 2
            with gnnaccel.enabled(on_fallback="warn"):
                assert config.current() == config.Config(when="supported", on_fallback="warn")
                assert nn.Conv().forward(1) == 102
            assert config.current() is None
        assert config.current().backend == "torch"
    assert config.current() is outer and nn.Conv().forward(1) == 102


def test_disable_inside_a_block_leaves_the_block(host):
    nn = host.load()
    gnnaccel.enable()
    with gnnaccel.enabled(backend="torch"):
        gnnaccel.disable()
        assert nn.Conv().forward(1) == 102
    assert config.current() is None and nn.Conv().forward(1) == 2


def test_disabled_is_of_its_thread(host):
    nn = host.load()
    gnnaccel.enable()
    seen = []
    with gnnaccel.disabled():
        thread = threading.Thread(target=lambda: seen.append(nn.Conv().forward(1)))
        thread.start()
        thread.join()
        assert nn.Conv().forward(1) == 2
    assert seen == [102]


def test_overlapping_blocks_of_two_threads(host):
    """The patches stay until the last block ends, whichever began first."""
    nn = host.load()
    before = snapshot(nn)
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with gnnaccel.enabled():
            entered.set()
            leave.wait(10)
            seen.append(nn.Conv().forward(1))

    thread = threading.Thread(target=other)
    with gnnaccel.enabled():
        thread.start()
        assert entered.wait(10)
    assert nn.Conv().forward(1) == 2  # natively here, though still patched
    assert snapshot(nn) != before
    leave.set()
    thread.join()
    assert seen == [102] and snapshot(nn) == before


def test_many_threads_enable_and_disable(host):
    nn = host.load()
    before = snapshot(nn)
    errors = []

    def work(n):
        try:
            for i in range(30):
                if n % 2:
                    gnnaccel.enable(records=n)
                    gnnaccel.disable()
                else:
                    with gnnaccel.enabled(records=i + 1):
                        assert nn.Conv().forward(1) == 102
                        with gnnaccel.disabled():
                            assert nn.Conv().forward(1) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gnnaccel.disable()
    assert errors == [] and snapshot(nn) == before


def test_imports_and_enabling_race(host):
    gnnaccel.enable()
    threads = [threading.Thread(target=host.load) for _ in range(4)]
    threads += [threading.Thread(target=gnnaccel.enable, kwargs={"when": "supported"})
                for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert host.load().Conv().forward(1) == 102


# --- records and logs -----------------------------------------------------------------------------

def test_records_outlive_their_block():
    assert gnnaccel.records() == [] and not records.listening()
    with gnnaccel.enabled(records=2):
        made = [record() for _ in range(3)]
        for item in made:
            records.emit(item)
        with gnnaccel.enabled(records=1):
            assert len(gnnaccel.records()) == 2
    assert not records.listening() and gnnaccel.records() == made[1:]
    gnnaccel.clear_records()
    assert gnnaccel.records() == []


def test_log_file_is_closed_when_done(tmp_path):
    path = tmp_path / "run.jsonl"
    gnnaccel.enable(log=path)
    sink = session._sinks["log", str(path)]
    records.emit(record())
    with gnnaccel.enabled(log=path, when="supported"):
        records.emit(record())
    assert session._sinks["log", str(path)] is sink
    gnnaccel.enable(log=False)
    assert not records.listening() and sink._file.closed
    assert [json.loads(text)["layer"] for text in path.read_text().splitlines()] == ["Conv", "Conv"]


def test_one_line_on_enable_and_then_quiet(caplog, host):
    with caplog.at_level(logging.INFO):
        gnnaccel.enable()
        gnnaccel.enable(when="supported")
        with gnnaccel.disabled(), gnnaccel.enabled():
            records.emit(record())
        host.load()
        gnnaccel.disable()
    (entry,) = [entry for entry in caplog.records if entry.name == "gnnaccel"]
    assert entry.levelno == logging.INFO and "enabled" in entry.getMessage()
    assert "fake waiting for its import" in entry.getMessage()


def test_log_true_and_the_loggers_own_level_both_give_lines(caplog):
    gnnaccel.enable(log=True)
    records.emit(record())
    gnnaccel.enable(log=False)
    assert not records.listening()
    gnnaccel.disable()
    assert sum("Conv" in entry.getMessage() for entry in caplog.records) == 1
    with caplog.at_level(logging.INFO, logger="gnnaccel"):
        gnnaccel.enable()
        records.emit(record())
        gnnaccel.enable(log=True)
        records.emit(record())
        gnnaccel.enable(log=False)
        gnnaccel.enable()
        records.emit(record())
        gnnaccel.disable()
        records.emit(record())
    assert sum("Conv" in entry.getMessage() for entry in caplog.records) == 4


def test_nothing_warns_in_plain_use(host):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.load()
        with gnnaccel.enabled(exclude=["Conv"]):
            pass


def test_a_sink_that_cannot_be_opened_leaves_the_others_as_they_were():
    with pytest.raises(OSError):
        with gnnaccel.enabled(log=True):
            gnnaccel.enable(log="no/such/dir/x")
    assert not session._sinks and logging.getLogger("gnnaccel").level == logging.NOTSET


def test_an_import_that_was_under_way_is_noticed_by_the_next_enable(tmp_path, host):
    """enable() in the middle of the host's own import, say from a plugin."""
    (tmp_path / host.name / "__init__.py").write_text(
        f"import gnnaccel\ngnnaccel.enable()\nimport {host.name}.nn\nversion = 7\n")
    nn = host.load()
    gnnaccel.enable()
    assert nn.Conv().forward(1) == 102
