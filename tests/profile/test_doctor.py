"""The doctor: truthful with any package missing, with and without a GPU, and never without a
remedy."""
from __future__ import annotations

import configparser
import functools
import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
from torch import cuda
from torch import distributed as dist

import gnnaccel
from gnnaccel import adapters, autostart, session
from gnnaccel.__main__ import main
from gnnaccel.adapters import seams
from gnnaccel.cuda.runtime import driver, probe, ready
from gnnaccel.profile.doctor import cli, packages, places, show
from gnnaccel.profile.doctor.show import STATUSES, Finding

ROOT = Path(gnnaccel.__file__).parent.parent


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("GNNACCEL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(ready, "FOLDER", tmp_path / "ready")
    yield
    session.disable()


def of(findings, name, group=None):
    """The finding of that name."""
    return next(f for f in findings if f.name == name and group in (None, f.group))


def missing(monkeypatch, *modules):
    """As if these were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    true = packages.importlib.metadata.version

    def version(name):
        if any(name in session.PACKAGES.get(module, (module,)) for module in modules):
            raise packages.importlib.metadata.PackageNotFoundError(name)
        return true(name)

    monkeypatch.setattr(packages.importlib.metadata, "version", version)


# --- missing packages -----------------------------------------------------------------------------

@pytest.mark.parametrize("module",
                         [name for name in packages.REQUIRED if name not in ("torch", "numpy")])
def test_without_a_small_package(monkeypatch, module):
    missing(monkeypatch, module, "torch_geometric", "dgl")
    findings = list(packages.check())
    assert [f.name for f in findings if f.status == "fail"] == [module]
    assert of(findings, module).remedy == f"pip install {module}"
    assert show.block(findings)


@pytest.mark.parametrize("host, other", [("torch_geometric", "dgl"), ("dgl", "torch_geometric")])
def test_without_one_host(monkeypatch, host, other):
    pytest.importorskip(other)
    missing(monkeypatch, host)
    findings = list(packages.check())
    assert of(findings, host).status == "note" and "pip install" in of(findings, host).text
    assert of(findings, other).status == "ok" and not [f for f in findings if f.name == "hosts"]


def test_installed_and_broken_is_told_from_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    findings = list(packages.check())
    assert "is installed and cannot be imported" in of(findings, "rich").text
    assert "--force-reinstall" in of(findings, "rich").remedy


def test_old_versions(monkeypatch):
    true = packages.version_of
    old = {"torch": "2.3.1+cu118", "torch_geometric": "2.4.0"}
    monkeypatch.setattr(packages, "version_of", lambda module: old.get(module) or true(module))
    findings = list(packages.check())
    assert of(findings, "torch").text == "2.3.1+cu118 is older than 2.4"
    assert of(findings, "torch").remedy == "pip install 'torch>=2.4'"
    if of(findings, "torch_geometric").status != "note":
        assert of(findings, "torch_geometric").remedy == "pip install 'torch-geometric>=2.6'"


def test_the_oldest_versions_are_those_of_setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.sub(r",<[\d.]+", "", setup["options"]["install_requires"]).split()
    assert {f"{name}>={least}" if least else name
            for name, least in packages.REQUIRED.items()} == set(required)
    extras = "\n".join(setup["options.extras_require"][name] for name in ("pyg", "dgl", "cuda13"))
    extras = re.sub(r",<[\d.]+|;.*", "", extras).split()
    assert {f"{name.replace('_', '-')}>={least}"
            for name, least in packages.HOSTS.items()} <= set(extras)
    assert f"cupy-cuda13x>={probe.LEAST_CUPY}" in extras
    assert all(f"cuda{cuda}" in setup["options.extras_require"] for cuda in probe.EXTRAS)
    low, high = packages.PYTHONS
    assert setup["options"]["python_requires"] == f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"


# --- GPUs -----------------------------------------------------------------------------------------

H200 = dict(name="NVIDIA H200", capability=(9, 0), memory=150 * 2**30, l2=60 * 2**20)
GOOD = dict(cupy="14.2.0", cupy_cuda="13.0", nvrtc="13.0", driver_cuda="13.1")


def gpu(monkeypatch, torch=("13.0", [H200], None), driver_text="580.65", names=("cupy-cuda13x",),
        problems=(), nccl=(2, 27, 5), **cupy):
    """The findings about CUDA on a machine that is like this."""
    monkeypatch.setattr(packages, "_torch_cuda", lambda: torch)
    monkeypatch.setattr(probe, "driver_text", lambda: driver_text)
    monkeypatch.setattr(probe, "cupy",
                        lambda: probe.Probe(**{**GOOD, **cupy}, problems=dict(problems)))
    monkeypatch.setattr(packages.probe, "version_of",
                        lambda *given: "14.2.0" if set(given) & set(names) else None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl is not None)
    monkeypatch.setattr(cuda.nccl, "version", lambda: nccl)
    return list(packages._cuda())


def test_gpus_without_nccl(monkeypatch):
    one = of(gpu(monkeypatch, nccl=None), "NCCL")
    two = of(gpu(monkeypatch, torch=("13.0", [H200, H200], None), nccl=None), "NCCL")
    assert (one.status, two.status) == ("note", "warn") and "gloo" in two.text
    assert "brings NCCL" in two.remedy
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert "no torch.distributed" in of(gpu(monkeypatch), "NCCL").text


def brought(monkeypatch, files):
    """As if the package brought these files."""
    monkeypatch.setattr(ready, "manifest", lambda folder: {"nvrtc": [13, 5], "files": files})


@pytest.mark.parametrize("files, driver_cuda, text", [
    (None, "13.1", "this package brings none"),
    ({"90": {"a": "1"}}, "12.8", "for CUDA 13.5, the driver runs CUDA 12.8"),
    ({"90": {"a": "1"}}, None, "the driver runs CUDA of unknown version"),
    ({"80": {"a": "1"}}, "13.1", "0 sources for compute capability 9.0")])
def test_kernels_that_the_package_does_not_bring(monkeypatch, files, driver_cuda, text):
    if files is not None:
        brought(monkeypatch, files)
    found = of(gpu(monkeypatch, driver_cuda=driver_cuda), "ready kernels")
    assert found.status == "note" and text in found.text and not found.remedy


def test_a_good_gpu(monkeypatch):
    brought(monkeypatch, {"90": {"a": "1", "b": "2"}, "80": {"a": "1"}})
    findings = gpu(monkeypatch)
    assert {f.status for f in findings} == {"ok"}
    assert of(findings, "ready kernels").text == (
        "2 sources for compute capability 9.0, compiled by NVRTC 13.5")
    assert of(findings, "device 0").text == "NVIDIA H200, compute capability 9.0, 150 GiB"
    assert of(findings, "NCCL").text == "2.27.5"
    assert of(findings, "NVRTC").text == "13.0, CuPy for CUDA 13.0, driver up to CUDA 13.1"


@pytest.mark.parametrize("change, name, status, text, remedy", [
    (dict(torch=(None, [], None)), "torch", "fail", "built without CUDA", "CUDA build of torch"),
    (dict(torch=("13.0", [], None)), "torch", "fail", "torch sees no GPU", "update the driver"),
    (dict(torch=("13.0", [], "RuntimeError: driver too old")), "torch", "fail", "driver too old",
     "nvidia-smi"),
    (dict(names=("cupy-cuda12x", "cupy-cuda13x")), "CuPy", "fail", "overwrite each other",
     "pip uninstall -y cupy-cuda13x cupy-cuda12x"),
    (dict(names=(), problems=[("cupy", "ModuleNotFoundError: No module named 'cupy'")]), "CuPy",
     "fail", "No module", "gnnaccel[cuda13]"),
    (dict(torch=("12.6", [H200], None), problems=[("cupy", "ImportError: x")]), "CuPy", "fail",
     "ImportError", "gnnaccel[cuda12]"),
    (dict(torch=("11.8", [H200], None), problems=[("cupy", "ImportError: x")]), "CuPy", "fail",
     "ImportError", "'cupy-cuda11x>=13'"),
    (dict(cupy="12.3"), "CuPy", "fail", "12.3 is older than 13", "gnnaccel[cuda13]"),
    (dict(cupy_cuda="12.8"), "CUDA", "warn", "two CUDAs in one process", "gnnaccel[cuda13]"),
    (dict(names=("cupy-cuda12x",)), "CUDA", "warn",
     "torch is built for CUDA 13.0, but cupy-cuda12x is installed",
     "pip uninstall -y cupy-cuda12x, then pip install 'gnnaccel[cuda13]'"),
    (dict(driver_cuda="12.8"), "NVRTC", "fail", "13.0 is newer than the CUDA 12.8 of the driver",
     "gnnaccel[cuda12]"),
    (dict(nvrtc=None, problems=[("nvrtc", "OSError: libnvrtc.so")]), "NVRTC", "fail",
     "OSError: libnvrtc.so", "pip install"),
    (dict(torch=("13.0", [{**H200, "capability": (6, 1)}], None)), "device 0", "warn", "6.1",
     "7.5 and later")])
def test_what_does_not_agree_is_found_and_has_a_remedy(monkeypatch, change, name, status, text,
                                                       remedy):
    found = [f for f in gpu(monkeypatch, **change) if f.name == name and f.status == status]
    assert len(found) == 1 and text in found[0].text and remedy in found[0].remedy, found


def test_without_a_gpu_nothing_has_failed(monkeypatch):
    for names, problems in ((),
                            [("cupy", "ImportError")]), (("cupy-cuda13x",),
                                                         [("cupy", "ImportError")]):
        findings = gpu(monkeypatch, nccl=None, torch=(None, [], None), driver_text=None, names=names,
                       problems=problems)
        assert {f.status for f in findings} == {"note"}


@pytest.mark.parametrize("torch_cuda, installed, found", [
    ("13.0", ("cupy-cuda12x",), "gnnaccel[cuda13]"), ("12.6", ("cupy-cuda13x",), "gnnaccel[cuda12]"),
    ("11.8", ("cupy-cuda12x",), "cupy-cuda11x>=13"), ("13.0", ("cupy-cuda13x",), None),
    ("13.0", ("cupy-cuda12x", "cupy-cuda13x"), None), ("13.0", ("cupy",), None), ("13.0", (), None),
    (None, ("cupy-cuda12x",), None)])
def test_another_cuda_is_known_by_names(torch_cuda, installed, found):
    told = probe.mismatch(torch_cuda, installed)
    assert told is None if found is None else found in told[1]


def test_the_probe_asks_without_raising(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert list(probe.cupy().problems) == ["cupy"] and probe.cupy().nvrtc is None
    assert probe._dotted(12080) == "12.8" and probe._dotted(0) is None


@pytest.mark.parametrize("text, version", [
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC ...",
     "580.65.06"), ("", None)])
def test_the_drivers_version(tmp_path, monkeypatch, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(probe, "_DRIVER_FILE", tmp_path / "version")
    assert probe.driver_text() == version
    monkeypatch.setattr(probe, "_DRIVER_FILE", tmp_path / "none")
    assert probe.driver_text() is None


# --- the whole ------------------------------------------------------------------------------------

@pytest.mark.long
def test_json_and_text_say_the_same(capsys, tmp_path):
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1 and report["ok"] is (status == 0)
    # which checks statuses and remedies
    findings = [Finding(**finding) for finding in report["findings"]]
    assert {"packages", "GPU", "kernels", "caches", "settings"} <= {f.group for f in findings}
    assert main(["doctor"]) == status
    said = capsys.readouterr().out
    assert said == "\n".join([*show.lines(findings), "", show.verdict(findings), ""])
    assert report["report"].startswith("```\npython -m gnnaccel doctor\n") and all(
        f.text in report["report"] for f in findings)


def test_wrong_kernels_are_a_failure(device, monkeypatch, capsys):
    from gnnaccel.cuda.traverse import column_sum

    true = column_sum.column_sum
    assert not any(f.status == "fail" for f in cli._kernels())
    monkeypatch.setattr(column_sum, "column_sum", lambda x: true(x) + 1)
    findings = list(cli._kernels())
    assert [f.name for f in findings if f.status == "fail"] == ["column_sum"]
    assert "backend='torch'" in of(findings,
                                   "column_sum").remedy and "column_sum" not in of(findings,
                                                                                   "right").text


def test_kernels_without_a_gpu_are_not_said_to_work(monkeypatch):
    monkeypatch.setattr(driver, "available", lambda: (False, "torch reports no CUDA device"))
    assert [(f.status, f.text)
            for f in cli._kernels()] == [("note", "not checked: torch reports no CUDA device")]


def test_a_finding_that_is_wrong_needs_a_remedy():
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("a", "b", "warn", "c")
    with pytest.raises(ValueError, match="status='bad'"):
        Finding("a", "b", "bad", "c")
    assert [Finding("a", "b", status, "c", "d").status for status in STATUSES] == list(STATUSES)


def test_verdicts():
    ok, warn, fail = (Finding("a", status, status, "text", "do it")
                      for status in ("ok", "warn", "fail"))
    assert show.verdict([ok]) == "everything is in order"
    assert show.verdict([ok, warn]) == "no failure, 1 warnings"
    assert show.verdict([ok, warn, fail, fail]) == "2 failed, 1 warnings: see the remedies above"
    assert show.lines([ok, fail]) == ["a:", "  ok   ok: text", "         -> do it",
                                      "  FAIL fail: text", "         -> do it"]


def test_on_a_terminal_there_is_a_table_and_the_block(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    findings = [Finding("a", "one", "ok", "text"), Finding("a", "two", "fail", "worse", "mend it")]
    show.show(findings)
    said = capsys.readouterr().out
    assert show.block(findings) in said and said.index("mend it") < said.index("1 failed")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show.show(findings)
    assert "\n".join(show.lines(findings)) in capsys.readouterr().out


# --- hosts ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("host", list(adapters.HOSTS))
def test_the_installed_hosts_are_as_recorded(host):
    pytest.importorskip(adapters.HOSTS[host][0].partition(".")[0])
    found = seams.compare(host)
    if not found.known:
        pytest.skip(f"{host} {found.version} is not recorded: python -m tests.record_seams")
    # torch.compile puts a function of its own around it for good, so that it depends on the process
    constructor = {"torch.nn.modules.module.Module.__init__"}
    assert not {*found.changed, *found.gone} - constructor, "python -m tests.record_seams, once the tests pass with these"
    assert set(seams.collect(host)) - constructor == set(seams.recorded()[host][found.version]) - constructor


def test_a_function_that_an_older_host_lacks_is_told_as_gone(monkeypatch):
    bases = pytest.importorskip("torch_geometric.nn.to_hetero_with_bases_transformer")
    name = f"{bases.__name__}.hook"
    monkeypatch.delattr(bases, "hook")
    assert seams.compare("pyg").gone == (name,)


def test_layers_that_are_only_watched_count_with_their_forward(monkeypatch):
    """On a GPU with a DGL built without CUDA, layers without an adapter are replaced too."""
    pytest.importorskip("dgl")
    from dgl.nn import SGConv

    import gnnaccel.adapters.dgl as adapter

    install = adapter.install

    def more(patches):
        names = install(patches)
        patches.set(SGConv, "forward", lambda self, graph, feat: None)
        return names

    before = seams.collect("dgl")
    monkeypatch.setattr(adapter, "install", more)
    found = set(seams.collect("dgl")) - set(before)
    assert found and all(".SGConv." in name for name in found)


def test_layers_made_before_change_nothing():
    """PyG writes a ``propagate`` for each class that is made, which is replaced too."""
    nn = pytest.importorskip("torch_geometric.nn")
    nn.GCNConv(3, 4), type("Own", (nn.MessagePassing,), {})()
    assert not [name for name in seams.collect("pyg") if name.endswith(".propagate")]


def with_record(monkeypatch, version, **changes):
    """PyG's record, as of ``version``, with other hashes; None takes a function out."""
    pytest.importorskip("torch_geometric")
    true = dict(seams.collect("pyg"))
    true.update({name: value for name, value in changes.items() if value})
    monkeypatch.setattr(seams, "recorded",
                        lambda: {"pyg": {version: true}, "dgl": {"2.1.0": {}},
                                 "torch": {"2.13.0": {}}})
    return of(list(places.hosts()), "torch_geometric", "hosts")


GAT = "torch_geometric.nn.conv.gat_conv.GATConv.message"


@pytest.mark.long
def test_a_changed_function_is_named_with_its_layer(monkeypatch):
    import torch_geometric

    installed = torch_geometric.__version__
    found = with_record(monkeypatch, "2.5.9", **{GAT: "0" * 16})
    assert found.status == "warn" and "differs from 2.5.9 in 1 of" in found.text and "GATConv.message" in found.text
    assert "torch-geometric==2.5.9" in found.remedy and "gnnaccel.exclude('GATConv')" in found.remedy
    found = with_record(monkeypatch, installed, **{GAT: "0" * 16})
    assert "was changed by hand in 1 of" in found.text
    found = with_record(monkeypatch, installed,
                        **{"torch_geometric.nn.conv.old_conv.OldConv.forward": "0" * 16})
    assert found.status == "warn" and "OldConv.forward" in found.text


def test_another_version_that_reads_alike_is_fine(monkeypatch):
    found = with_record(monkeypatch, "2.5.9")
    assert found.status == "ok" and "reads as 2.5.9, which was tested" in found.text


def test_a_host_that_cannot_be_patched_is_a_failure(monkeypatch):
    pytest.importorskip("torch_geometric")
    from gnnaccel.adapters import pyg

    monkeypatch.setitem(pyg.LAYERS, "NoSuchConv", ("gat", 0))
    found = of(list(places.hosts()), "torch_geometric", "hosts")
    assert found.status == "fail" and "NoSuchConv" in found.text and "pip install torch-geometric==" in found.remedy
    assert "gnnaccel" not in pyg.__dict__ and not session.status()["enabled"]


@pytest.mark.parametrize("version, expected",
                         [("2.8.1", "2.8.1"), ("2.8.0", "2.8.1"), ("2.7.3", "2.5.0"),
                          ("2.10.0", "2.8.1"), ("2.4.0", "2.5.0")])
def test_the_nearest_tested_version(version, expected):
    assert seams.nearest(version, ["2.8.1", "2.5.0"]) == expected


def test_a_hash_is_of_the_code_and_not_of_its_place():
    def one(x):
        return x + 1

    class Other:
        def one(x):

            return x + 1

        def two(x):
            return x + 2

    assert seams.digest(one) == seams.digest(Other.one) != seams.digest(Other.two) and seams.digest(
        len) == ""


# --- folders and variables ------------------------------------------------------------------------

def test_caches(tmp_path, monkeypatch):
    findings = list(places.caches())
    assert [f.text.endswith(": nothing yet") for f in findings
            if f.name != "calibration"] == [True, True]
    (tmp_path / "kernels" / "a").mkdir(parents=True)
    (tmp_path / "kernels" / "a" / "k.cubin").write_bytes(bytes(3 * 2**20))
    assert of(places.caches(), "kernels").text.endswith(": 1 files, 3.0 MiB")
    (tmp_path / "cache").write_text("a file")
    found = of(places.caches(), "gnnaccel")
    assert found.status == "warn" and "cannot be written" in found.text and "GNNACCEL_CACHE_DIR" in found.remedy


def test_paths_do_not_tell_the_users_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    assert places.short(tmp_path / "somebody"
                        / ".cache") == "~/.cache" and places.short(Path("/opt/x")) == "/opt/x"


@pytest.mark.parametrize("name, value, status, text", [
    ("GNNACCEL_BACKND", "cuda", "warn", "Did you mean 'GNNACCEL_BACKEND'"),
    ("GNNACCEL_BACKEND", "gpu", "fail", "GNNACCEL_BACKEND='gpu'"),
    ("GNNACCEL", "maybe", "fail", "GNNACCEL='maybe'"),
    ("GNNACCEL_CACHE_BYTES", "much", "fail", "is not a size"),
    ("GNNACCEL_WHEN", "supported", "ok", "GNNACCEL_WHEN=supported")])
def test_variables(monkeypatch, name, value, status, text):
    monkeypatch.setenv(name, value)
    assert [f for f in places.environment() if f.status == status and text in f.text]


def test_autostart_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(autostart, "folder", lambda: tmp_path)
    assert of(places.environment(), "autostart").text == "not installed"
    monkeypatch.setenv("GNNACCEL", "1")
    assert of(places.environment(), "autostart").status == "warn"
    autostart.install(tmp_path)
    assert of(places.environment(), "autostart").status == "ok"
    (tmp_path / autostart.NAME).write_text("import x")
    assert of(places.environment(), "autostart").remedy == "python -m gnnaccel autostart install"


TRUE = seams.recorded()


def unheard_of(monkeypatch, **changes):
    """PyG's record under a version that is not installed, with other hashes; None takes a function
    out of the host."""
    pytest.importorskip("torch_geometric")
    true = {**seams.collect("pyg"), **changes}
    monkeypatch.setattr(seams, "recorded", lambda: {"pyg": {"0.9.0": true}, "dgl": TRUE["dgl"]})
    monkeypatch.setattr(adapters, "_told", {})


def test_a_version_that_reads_otherwise_is_told_once_when_enabled(monkeypatch):
    from gnnaccel.profile.page import page

    unheard_of(monkeypatch,
               **{GAT: "0" * 16, "torch_geometric.nn.conv.old_conv.OldConv.forward": "0" * 16})
    said = (r"is not among the tested versions \(0.9.0\) and differs from 0.9.0 in 2 of "
            r".*GATConv.message, nn.conv.old_conv.OldConv")
    with pytest.warns(RuntimeWarning, match=said), gnnaccel.enabled():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gnnaccel.enabled():
            with gnnaccel.report() as found:
                pass
    assert "GATConv.message" in page(found) and adapters.drifts()


def test_versions_that_read_alike_or_were_tested_are_not_told(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(adapters, "_told", {})
        with gnnaccel.enabled():
            pass
        unheard_of(monkeypatch)
        with gnnaccel.enabled():
            pass
    assert not adapters.drifts()


def test_what_a_user_has_replaced_is_no_drift(monkeypatch):
    unheard_of(monkeypatch)
    from torch_geometric.nn import GATConv

    native = GATConv.message
    monkeypatch.setattr(GATConv, "message",
                        functools.wraps(native)(lambda self, *args: native(self, *args)))
    assert not seams.untested("pyg").changed
