"""calibrate, warmup, cache: on the emulation, where ceilings are small but real; and what the cost
model makes of them."""
from __future__ import annotations

import copy
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import gnnaccel
from gnnaccel import store
from gnnaccel.__main__ import main
from gnnaccel.cuda.runtime import driver, probe
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.policy import calibration
from gnnaccel.profile import calibrate, warmup
from gnnaccel.profile.doctor import places

H200 = cost._published()["cuda"]["ceilings"]
HALF = {name: 2 * value if name == "launch" else value / 2 for name, value in H200.items()}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    cost._for_device.cache_clear()
    yield tmp_path / "cache"
    cost._for_device.cache_clear()


def options(**given):
    return SimpleNamespace(**{"json": False, "dry_run": False, **given})


# --- calibrate ------------------------------------------------------------------------------------

def test_every_ceiling_is_measured(device):
    small = calibrate.Sizes(copy=1 << 20, edges=2048, hbm_rows=512)
    sizes = small if device.type == "cpu" else calibrate.sizes_for(8 << 30)
    found = calibrate.measure(device, sizes, 1 << 16 if device.type == "cpu" else 40 << 20,
                              repeats=2, batch_ms=1.0)
    assert calibration.problem(found) is None
    if device.type == "cuda":
        assert calibration.implausible(found, cost._published()["cuda"]["ceilings"]) is None
        assert found["gather_l2"] > found["gather_hbm"] / 2


@pytest.mark.parametrize("memory", [1 << 28, 8 << 30, 140 << 30])
def test_what_is_measured_on_fits_the_memory(memory):
    sizes = calibrate.sizes_for(memory)
    rows, ids = 256 * sizes.hbm_rows, 4 * 16 * sizes.edges
    assert max(2 * sizes.copy,
               rows + ids) <= memory and sizes.hbm_rows * 256 >= min(memory // 8, 1 << 31) - 256


def test_it_is_kept_by_the_name_of_the_gpu(folder, capsys):
    assert calibrate.keep("GPU A", HALF, options()) == 0
    assert calibrate.keep("GPU B", H200, options()) == 0
    held = json.loads((folder / "calibration.json").read_text())
    assert list(held["devices"]) == ["GPU A", "GPU B"] and held["schema"] == 1
    about = held["devices"]["GPU A"]
    assert about["ceilings"] == HALF and set(about["versions"]) == {"torch", "cupy", "driver"}
    assert calibration.of("GPU A")["ceilings"] == HALF and calibration.of("GPU C") is None
    said = capsys.readouterr()
    assert "device copy                    2.11 TB/s   (4.23)" in said.out and "kept in" in said.err


def test_a_dry_run_keeps_nothing(folder, capsys):
    assert calibrate.keep("GPU A", HALF, options(dry_run=True, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["GPU A"]["ceilings"] == HALF and not folder.exists()


@pytest.mark.parametrize("change, message",
                         [(dict(copy=float("nan")), "copy=nan is no positive number"),
                          (dict(launch=0.0), "launch=0.0"),
                          (dict(gather_l2=1e9),
                           "gather_l2=1e.09 is 0.0001.. times that of the reference")])
def test_numbers_that_cannot_be_are_not_kept(folder, capsys, change, message):
    assert calibrate.keep("GPU A", {**H200, **change}, options()) == 1
    assert re.search(message, said := capsys.readouterr().err) and "nothing is kept" in said and not folder.exists()


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(driver, "available", lambda: (False, "torch reports no CUDA device"))
    assert main(["calibrate"]) == 2 and main(["warmup", "GATConv:8x8"]) == 2
    assert capsys.readouterr().err.count(
        "torch reports no CUDA device. Run python -m gnnaccel doctor") == 2


def test_what_cannot_be_written_is_said(monkeypatch, capsys):
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", os.devnull)
    assert calibrate.keep("GPU A", HALF,
                          options()) == 1 and "cannot be kept" in capsys.readouterr().err
    monkeypatch.delenv("GNNACCEL_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert calibrate.keep("GPU A", HALF,
                          options()) == 1 and "GNNACCEL_CACHE_DIR" in capsys.readouterr().err


# --- the cost model -------------------------------------------------------------------------------

def on_gpu(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cost, "_name_of", {0: name}.get)


def test_the_reference_itself_changes_no_rate():
    published = cost._published()
    made = calibration.scaled(published, "H200", {"ceilings": published["cuda"]["ceilings"]})
    for part in ("cuda", "cpu", "relational"):
        one, other = copy.deepcopy(published[part]), made[part]
        if part == "cuda":
            assert other.pop("provenance").endswith(one.pop("provenance"))
        assert one == other


def test_a_gpu_of_half_the_speed(monkeypatch):
    calibrate.keep("GPU A", HALF, options())
    published = cost._published()
    before = copy.deepcopy(published)
    on_gpu(monkeypatch, "GPU A")
    made = cost.constants()
    gpu, reference = made["cuda"], published["cuda"]
    for name, factor in dict(launch=2, gather_l2=0.5, gather_hbm=0.5, l2_bytes=0.5,
                             native_bandwidth=0.5, structure_per_edge=2).items():
        assert gpu[name] == pytest.approx(factor * reference[name]), name
    orderings = made["relational"]["cuda"]["orderings"]
    assert orderings["bandwidth"] == pytest.approx(
        published["relational"]["cuda"]["orderings"]["bandwidth"] / 2)
    assert made["relational"]["cuda"]["structure"]["forward"] == pytest.approx(
        [2 * rate for rate in published["relational"]["cuda"]["structure"]["forward"]])
    assert made["cpu"] == published["cpu"] and "calibrated on GPU A" in gpu["provenance"]
    assert published == before and cost.constants() is made
    on_gpu(monkeypatch, "GPU B")
    assert cost.constants() is published


def test_while_cuda_is_not_started_nothing_asks_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: pytest.fail("that starts CUDA"))
    assert cost.constants() is cost._published()


@pytest.mark.parametrize("held",
                         [{"schema": 2, "devices": {"G": {"ceilings": HALF}}},
                          {"schema": 1, "devices": {"G": {"ceilings": {}}}},
                          {"schema": 1, "devices": {"G": 3}}, {"schema": 1}])
def test_what_is_not_understood_counts_as_not_measured(held):
    store.update("calibration.json", lambda _: held)
    assert calibration.of("G") is None


def test_the_doctor_tells_of_it(folder):
    found = places._calibration()
    assert found.status == "note" and "calibrate" in found.text
    calibrate.keep("GPU A", HALF, options())
    assert places._calibration().status == "ok" and "GPU A, 20" in places._calibration().text
    held = json.loads((folder / "calibration.json").read_text())
    held["devices"]["GPU A"]["versions"]["torch"] = "1.0"
    (folder / "calibration.json").write_text(json.dumps(held))
    assert "by other versions" in places._calibration().text
    (folder / "calibration.json").write_text("{")
    assert places._calibration().status == "warn" and places._calibration().remedy == "python -m gnnaccel cache clear"


# --- warmup ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("layer", ["GATConv:2x4", "RGCNConv:8"])
def test_a_layer_is_compiled_by_running_it(device, monkeypatch, capsys, layer):
    pytest.importorskip("torch_geometric")
    from gnnaccel.adapters.pyg.bench import samples

    monkeypatch.setattr(samples, "_NODES", 40)
    monkeypatch.setattr(samples, "_EDGES", 200)
    kernels = []
    true = type(driver.current()).kernel
    monkeypatch.setattr(type(driver.current()), "kernel", lambda self,
                        *key: kernels.append(key[0]) or true(self, *key))
    assert main(["warmup", layer, "--inputs", "8", "--relations", "3"]) == 0
    assert layer in (said := capsys.readouterr().out) and "compiling or loading" in said
    assert set(kernels) or device.type == "cuda"
    assert not gnnaccel.status()["enabled"]


def test_a_log_tells_what_to_compile(device, tmp_path, monkeypatch, capsys):
    nn = pytest.importorskip("torch_geometric.nn")
    layer, x = nn.GATConv(8, 4, heads=2).to(device), torch.randn(40, 8, device=device)
    edge_index, path = torch.randint(0, 40, (2, 200), device=device), str(tmp_path / "run.jsonl")
    fresh = type(driver.current())

    def steps(**more):
        with gnnaccel.enabled(backend="cuda", when="supported", on_fallback="raise", **more):
            for _ in range(2):
                layer(x, edge_index).sum().backward()

    monkeypatch.setattr(driver, "_noted", [])
    with driver.using(fresh()):
        steps(log=path)
    recorded = driver.noted()
    assert {"additive", "additive_backward"} <= {family for family, *_ in recorded}
    with driver.using(fresh()):
        begin = len(driver.noted())
        assert main(["warmup", "--log", path]) == 0
        assert set(recorded) <= set(driver.noted(begin))
        begin = len(driver.noted())
        steps()
        assert driver.noted(begin) == []
    count = len(warmup._recorded(path))
    assert f"{count} of {count} kernels" in capsys.readouterr().out


@pytest.mark.parametrize("kernel, message", [
    (("additif", "forward", {}), "forward of additif is no kernel of this version"),
    (("gather", "sum", {}), "sum of gather is no"),
    (("gather", "row_gather", {"A": "1\n#include </etc/passwd>"}), "is no definition"),
    (None, "tells of no kernel")])
def test_logs_whose_kernels_there_are_not(device, tmp_path, capsys, kernel, message):
    from gnnaccel.dispatch.observe import records

    kernels = [dict(zip(("family", "entry", "defines"), kernel))] if kernel else []
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(records.new(host="pyg", layer="GATConv", route="native",
                                           kernels=kernels)))
    assert main(["warmup", "--log", str(path)]) == (1
                                                    if kernel
                                                    else 2) and message in capsys.readouterr().err


def test_kernels_written_for_messages_are_left_for_their_first_use(device, tmp_path, capsys):
    from gnnaccel.cuda.runtime import sources
    from gnnaccel.dispatch.observe import records

    family = sources.write('extern "C" __global__ void forward(float* x) {}', "message")
    assert sources.is_written(family) and not any(map(sources.is_written, sources.families()))
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(records.new(host="pyg", layer="Mine", route="native",
                                           kernels=[dict(family=family, entry="forward",
                                                         defines={})])))
    assert main(["warmup", "--log", str(path)]) == 0
    assert "1 kernels are written for messages" in capsys.readouterr().out


def test_warming_up_nothing_is_refused(capsys):
    assert main(["warmup"]) == 2 and "--log FILE.jsonl" in capsys.readouterr().err


def test_what_kernels_are_built_with_can_be_read_from_a_log():
    from gnnaccel.cuda.runtime import sources
    from tests.cuda import variants

    pairs = {pair for family in sources.families() for defines in variants.sample_defines(family)
             for pair in defines}
    assert pairs and all(warmup._NAME.fullmatch(name) and warmup._VALUE.fullmatch(value)
                         for name, value in pairs)


@pytest.mark.parametrize("text, message",
                         [("GATConf:8x8", "Did you mean 'GATConv'"),
                          ("GATConv:8", "heads times width"), ("GATConv:0x8", "at least 1"),
                          ("RGCNConv:8x8", "output channels"), ("RGCNConv", "output channels"),
                          ("Linear:3", "names no class")])
def test_layers_that_are_none(capsys, text, message):
    assert main(["warmup", text]) == 2 and message in capsys.readouterr().err


def test_a_layer_that_stays_native_is_said(monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    monkeypatch.setattr(driver, "available", lambda: (True, ""))
    true = warmup.run_once
    monkeypatch.setattr(warmup, "run_once", lambda sample, dtype,
                        device: true(sample, dtype, "cpu"))
    assert main(["warmup", "GATConv:2x4", "--inputs", "4"]) == 1
    assert "GATConv:2x4 float32: not compiled: GATConv would run natively" in capsys.readouterr().err


# --- cache ----------------------------------------------------------------------------------------

def test_only_what_is_ours_is_cleared(folder, tmp_path, capsys):
    calibrate.keep("GPU A", HALF, options())
    (folder / "other.npz").write_bytes(bytes(10))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cubin").write_bytes(bytes(1 << 20))
    (tmp_path / "kernels" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main(["cache", "info"]) == 0
    assert "kernels, kept by CuPy" in (
        said := capsys.readouterr().out) and "2 files, 1.0 MiB" in said
    assert main(["cache", "clear"]) == 0
    assert store.read("calibration.json") is None
    assert (tmp_path / "kernels" / "a.cubin").exists() and (folder / "other.npz").exists()
    assert main(["cache", "clear", "--kernels"]) == 0
    assert os.listdir(tmp_path / "kernels") == ["notes.txt"]
    assert "compiled kernels: 1 files removed, 1.0 MiB" in capsys.readouterr().out


def test_a_cache_whose_place_is_not_known(monkeypatch, capsys):
    monkeypatch.delenv("GNNACCEL_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert main(["cache", "info"]) == 1 and "GNNACCEL_CACHE_DIR" in capsys.readouterr().err


def test_cupys_own_rule_for_its_folder(monkeypatch, tmp_path):
    assert probe.kernel_cache() == tmp_path / "kernels"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.kernel_cache() == tmp_path / ".cupy" / "kernel_cache"
