"""Kernels that come with the package: which file a GPU gets, and that a driver loads it."""
from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import warnings
from collections import Counter

import pytest
import torch

import gnnaccel
from gnnaccel.cuda.runtime import driver, make_ready, nvrtc, ready, sources
from gnnaccel.cuda.runtime.cupy_driver import CupyDriver
from gnnaccel.dispatch.plan import planner
from tests.emulation.test_driver import FakeCuda
from tests.helpers import needs_nvrtc

DEFINES = (("A", "1"),)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In place of the package's, which a checkout does not have."""
    monkeypatch.setattr(ready, "FOLDER", tmp_path / "ready")
    yield tmp_path / "ready"
    ready.manifest.cache_clear()


@pytest.fixture
def fake(monkeypatch, folder):
    made = FakeCuda(monkeypatch, True)
    monkeypatch.setattr(ready, "FOLDER", folder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return made


def fill(folder, *texts, nvrtc_version=(13, 0)):
    """As `make_ready.make`, of (architecture, family, defines), with any bytes as kernels."""
    files: dict = {}
    for arch, family, defines in texts:
        text, content = ready.digest(family, defines), f"{arch} {family}".encode()
        where = ready.file_of(folder, arch, text)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(content)
        files.setdefault(str(arch), {})[text] = hashlib.sha256(content).hexdigest()
    (folder / ready.MANIFEST).write_text(json.dumps({"nvrtc": nvrtc_version, "files": files}))
    ready.manifest.cache_clear()


def found(capability, cuda=13, family="pairs", defines=()):
    """The architecture whose file is found."""
    path = ready.Ready(capability, cuda, ready.manifest(ready.FOLDER)).path(family, defines)
    return path and int(path.split("sm_")[1].partition("/")[0])


@pytest.mark.parametrize("capability, arch", [
    ((7, 5), 75), ((7, 0), None), ((7, 2), None), ((8, 0), 80), ((8, 6), 86), ((8, 9), 86),
    ((8, 7), None), ((9, 0), 90), ((10, 0), None), ((12, 0), 120), ((12, 1), 120), ((6, 1), None)])
def test_a_gpu_gets_its_own_or_the_next_older_of_its_major_version(folder, capability, arch):
    fill(folder, *((a, "pairs", ()) for a in (75, 80, 86, 90, 120)))
    assert found(capability) == arch


def test_a_text_that_the_exact_architecture_lacks(folder):
    fill(folder, (80, "pairs", ()), (80, "adam", ()), (86, "adam", ()))
    assert found((8, 6)) == 80 and found((8, 6), family="adam") == 86
    assert len(ready.Ready((8, 6), 13, ready.manifest(folder))) == 2


@pytest.mark.parametrize("cuda, arch", [(12, None), (13, 90), (14, 90)])
def test_an_older_driver_gets_none(folder, cuda, arch):
    fill(folder, (90, "pairs", ()), nvrtc_version=(13, 5))
    assert found((9, 0), cuda) == arch


def test_another_source_definition_or_option_is_another_text(folder, monkeypatch):
    fill(folder, (90, "pairs", ()))
    assert found((9, 0)) == 90
    assert found((9, 0), defines=DEFINES) is None and found((9, 0), family="adam") is None
    with monkeypatch.context() as patch:
        patch.setattr(sources, "options", lambda defines: ("--std=c++20",))
        assert found((9, 0)) is None
    source = sources.source
    monkeypatch.setattr(sources, "source", lambda family: source(family) + " ")
    assert found((9, 0)) is None


@pytest.mark.parametrize("spoil", [lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"),
                                   lambda file: file.unlink()], ids=["changed", "missing"])
def test_a_changed_file_is_told_and_not_used(folder, spoil):
    fill(folder, (80, "pairs", ()), (86, "pairs", ()))
    spoil(ready.file_of(folder, 86, ready.digest("pairs", ())))
    one = ready.Ready((8, 6), 13, ready.manifest(folder))
    with pytest.warns(RuntimeWarning, match="not the file that came with the package"):
        assert "sm_80" in one.path("pairs", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert "sm_80" in one.path("pairs", ())


def test_without_files_nothing_is_asked(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    monkeypatch.setattr(ready, "digest", None)
    one = ready.on_device(0)
    assert one.path("pairs", ()) is None and len(one) == 0 and ready.made_by() is None
    folder.mkdir()
    (folder / ready.MANIFEST).write_text("not read any more")
    assert ready.on_device(0).path("pairs", ()) is None


def test_the_driver_loads_the_file(fake, folder):
    fill(folder, (90, "a", DEFINES))
    cupy, before = CupyDriver(), driver.compile_seconds()[1]
    assert cupy.ready(lambda: cupy.kernel("a", "k", DEFINES))
    assert not cupy.ready(lambda: [cupy.kernel("a", "k", DEFINES), cupy.kernel("b", "k", ())])
    assert fake.loaded == fake.compiled == []
    cupy.kernel("a", "k", DEFINES)((2, 1), 32, 0, ())
    path = str(ready.file_of(folder, 90, ready.digest("a", DEFINES)))
    assert fake.loaded == [(0, path)] and fake.compiled == []
    assert fake.launches == [(0, "k", (2, 1), 32, (), 0, 0)]
    cupy.kernel("b", "k", ())
    assert len(fake.compiled) == 1 and driver.compile_seconds()[1] == before + 2


def test_what_the_package_brings_is_not_compiled_early(fake, folder):
    fill(folder, (90, "a", ()))
    cupy = CupyDriver()
    cupy.together(lambda: [cupy.kernel(family, "k", ()) for family in ("a", "b")])
    assert fake.loaded == [] and [code for _, code, _ in fake.compiled] == [
        sources.defined("b", ())]


def test_an_older_driver_compiles(fake, folder):
    fill(folder, (90, "a", ()))
    fake.cuda = 12080
    cupy = CupyDriver()
    assert not cupy.ready(lambda: cupy.kernel("a", "k", ()))
    cupy.kernel("a", "k", ())
    assert fake.loaded == [] and len(fake.compiled) == 1


def test_each_device_gets_its_own_file(fake, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device, 0))
    fill(folder, (80, "a", ()), (90, "a", ()))
    kernel = CupyDriver().kernel("a", "k", ())
    fake.device = 1
    kernel((1, 1), 32, 0, ())
    assert [(device, path.split("/")[-2]) for device, path in fake.loaded] == [(0, "sm_90"),
                                                                               (1, "sm_80")]


# --- making them ----------------------------------------------------------------------------------

def test_the_list_is_of_families_that_there_are():
    builds = make_ready.builds()
    assert {family for family, _, _ in builds} <= set(sources.families())
    assert len(builds) == len(set(builds)) and len({build[:2] for build in builds}) <= 300
    needed = [("structure", (("OFF_T", "int"),)), ("pairs", ()), ("adam", (("FMAD", "0"),))]
    assert {(*text, arch) for text in needed for arch in make_ready.ARCHITECTURES} <= set(builds)


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_each_gpu_gets_all_that_is_listed_for_it(folder, arch):
    """Some by files of another architecture."""
    fill(folder, *((one, family, defines) for family, defines, one in make_ready.builds()))
    one = ready.Ready(divmod(arch, 10), 13, ready.manifest(folder))
    wanted = make_ready.builds(architectures=[arch])
    assert wanted and all(one.path(family, defines) for family, defines, _ in wanted)


def test_what_a_run_on_a_gpu_made_can_be_listed(tmp_path, monkeypatch):
    """Where definitions depend on shared memory, for the architectures that have as much."""
    pytest.importorskip("torch_geometric")
    from tests import record_ready

    noted, listed = tmp_path / "noted.json", tmp_path / "ready.json"
    wanted = ("aggregate", (("D", "5"),)), ("segment_gemm", (("K", "5"),))
    noted.write_text(json.dumps([(family, "entry", defines) for family, defines in wanted]
                                + [("generated_" + "0" * 16, "entry", ())]))
    assert record_ready.merged(noted) == set(wanted)
    monkeypatch.setattr(record_ready, "recorded", lambda arch: {("pairs", ())})
    monkeypatch.setattr(record_ready, "_apart", lambda function, argument: function(argument))
    monkeypatch.setattr(record_ready, "LIST", listed)
    record_ready.main(["--merge", str(noted), "--arch", "86"])
    assert make_ready.builds(listed, (80, 89, 90)) == [
        ("aggregate", (("D", "5"),), 80), ("pairs", (), 80),
        ("aggregate", (("D", "5"),), 89), ("pairs", (), 89), ("segment_gemm", (("K", "5"),), 89),
        ("aggregate", (("D", "5"),), 90), ("pairs", (), 90)]


@pytest.mark.long
@needs_nvrtc
def test_what_is_made_is_found(folder, capsys):
    wanted = [("pairs", (), 80), ("adam", (("FMAD", "0"),), 80), ("pairs", (), 90)]
    (folder / "sm_75").mkdir(parents=True)  # of an earlier run
    sizes = make_ready.make(folder, wanted, 1)
    ready.manifest.cache_clear()
    assert sizes.keys() == {"pairs", "adam"} and not (folder / "sm_75").exists()
    assert ready.made_by() == "{}.{}".format(*nvrtc.version())
    major = nvrtc.version()[0]
    assert found((8, 9), major) == 80 and found((9, 0), major) == 90
    assert found((8, 9), major, "adam", (("FMAD", "0"),)) == 80
    assert len(list(folder.rglob("*.cubin"))) == 3
    assert ready.file_of(folder, 80, ready.digest("pairs", ())).read_bytes()[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("most, status", [(90_001, 0), (90_000, 1)])
def test_what_is_too_large_for_a_wheel_is_told_by_family(monkeypatch, folder, capsys, most, status):
    monkeypatch.setattr(make_ready, "MOST", most)
    monkeypatch.setattr(make_ready, "builds", lambda architectures: [("pairs", (), 80)])
    monkeypatch.setattr(make_ready, "make", lambda *args: Counter(pairs=9000, adam=80_000))
    monkeypatch.setattr(ready, "made_by", lambda: "13.0")
    monkeypatch.setattr(make_ready, "rest", lambda package: 1000)
    assert make_ready.main([]) == status
    told = capsys.readouterr().err
    assert (told.index("adam") < told.index("pairs") < told.index("0.09 MB") if status
            else not told)


def test_git_leaves_the_files_alone():
    done = subprocess.run(["git", "check-ignore", "gnnaccel/cuda/ready/manifest.json",
                           "gnnaccel/cuda/ready.json"], capture_output=True, text=True)
    if "not a git repository" in done.stderr:
        pytest.skip("not a repository")
    assert done.stdout.split() == ["gnnaccel/cuda/ready/manifest.json"]


# --- on a GPU -------------------------------------------------------------------------------------

def _cubin(family: str, defines: tuple, arch: int) -> tuple[bytes, tuple[int, int]]:
    """The kernels for this GPU, with the version of the compiler: CuPy's, where NVRTC is no
    package."""
    if nvrtc.found_at() is not None:
        return nvrtc.cubin(family, defines, arch), nvrtc.version()
    import cupy

    made, _ = cupy.cuda.compiler.compile_using_nvrtc(
        sources.defined(family, defines), (*sources.options(defines), "-ftz=true"), arch=str(arch))
    return made, tuple(cupy.cuda.nvrtc.getVersion())


@pytest.mark.gpu
@pytest.mark.skipif(not driver.available()[0], reason=driver.available()[1])
def test_a_layer_runs_by_files(folder, monkeypatch):
    """All of its kernels come from files, and compute what compiled ones do."""
    geometric = pytest.importorskip("torch_geometric.nn")
    import cupy

    torch.manual_seed(0)
    layer = geometric.GATConv(16, 8, heads=8).cuda()
    x = torch.randn(500, 16, device="cuda", requires_grad=True)
    edges = torch.randint(0, 500, (2, 6000), device="cuda")

    def run() -> list[torch.Tensor]:
        planner.forget()
        mine = copy.deepcopy(layer)  # of which nothing is remembered
        with driver.using(CupyDriver()), gnnaccel.enabled(backend="cuda", when="supported"):
            out = mine(x, edges.clone())
            return [out, *torch.autograd.grad(out.square().sum(), [x, *mine.parameters()])]

    since = len(driver.noted())
    expected = run()
    texts = {(family, defines) for family, _, defines in driver.noted(since)}
    assert {"structure", "additive", "additive_backward"} <= {family for family, _ in texts}
    major, minor = torch.cuda.get_device_capability()
    files, version = {}, (0, 0)
    for family, defines in texts:
        text = ready.digest(family, defines)
        content, version = _cubin(family, defines, 10 * major + minor)
        where = ready.file_of(folder, 10 * major + minor, text)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(content)
        files[text] = hashlib.sha256(content).hexdigest()
    (folder / ready.MANIFEST).write_text(json.dumps(
        {"nvrtc": version, "files": {str(10 * major + minor): files}}))
    ready.manifest.cache_clear()
    given, true = [], cupy.RawModule
    monkeypatch.setattr(cupy, "RawModule", lambda **how: (given.append(how), true(**how))[1])
    for got, wanted in zip(run(), expected):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert given and all(how.keys() == {"path"} for how in given)
