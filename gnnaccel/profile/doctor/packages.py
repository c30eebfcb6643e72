"""Which packages are there, can be imported, are recent enough, and agree with each other and with
the driver."""
from __future__ import annotations

import importlib
import platform
import re
import sys
from collections.abc import Iterator

from gnnaccel import adapters
from gnnaccel._version import __version__
from gnnaccel.cuda.runtime import probe, ready
from gnnaccel.profile.doctor.show import Finding
from gnnaccel.session import PACKAGES

PYTHONS = ((3, 10), (3, 14))  # from the first, before the second
#: module -> oldest version, None for any: as in setup.cfg
REQUIRED = {"torch": "2.4", "numpy": None, "packaging": None, "platformdirs": None, "rich": None,
            "filelock": None}
HOSTS = {"torch_geometric": "2.6", "dgl": "2.1"}


def check() -> Iterator[Finding]:
    """Every finding about packages; imports torch, the hosts and CuPy."""
    yield _python()
    yield Finding("packages", "gnnaccel", "ok", __version__)
    for module, least in REQUIRED.items():
        yield _required(module, least)
    yield from _hosts()
    yield from _cuda()


def version_of(module: str) -> str | None:
    """The installed distribution's version, None where there is none."""
    return probe.version_of(*PACKAGES.get(module, (module,)))


def import_problem(module: str) -> str | None:
    """Why a module cannot be imported; None where it can."""
    try:
        importlib.import_module(module)
    except Exception as problem:  # noqa: BLE001 - packages fail in many ways
        return f"{type(problem).__name__}: {problem}".partition("\n")[0]
    return None


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        return Finding("packages", "Python", "ok", text)
    return Finding("packages", "Python", "warn", f"{text} is not tested", "use Python 3.10 to 3.13")


def _required(module: str, least: str | None) -> Finding:
    problem, version = import_problem(module), version_of(module)
    wanted = f"pip install '{module}>={least}'" if least else f"pip install {module}"
    if problem is not None:
        said = ("is not installed" if version is None
                else f"{version} is installed and cannot be imported")
        return Finding("packages", module, "fail", f"{said}: {problem}",
                       wanted if version is None else f"repair it: {wanted} --force-reinstall")
    return _recent(module, version, least, wanted)


def _recent(module: str, version: str | None, least: str | None, wanted: str) -> Finding:
    if version is None:
        return Finding("packages", module, "ok", "is there, of unknown version")
    if least is not None and _older(version, least):
        return Finding("packages", module, "fail", f"{version} is older than {least}", wanted)
    return Finding("packages", module, "ok", version)


def _older(version: str, least: str) -> bool:
    try:
        from packaging.version import Version
    except ImportError:  # which is a finding of its own
        return False
    return Version(version) < Version(least)


# --- the hosts ------------------------------------------------------------------------------------

def _hosts() -> Iterator[Finding]:
    found = []
    for module, least in HOSTS.items():
        version = version_of(module)
        wanted = f"pip install '{module.replace('_', '-')}>={least}'"
        problem = import_problem(module) if version is not None else "not installed"
        if version is None:
            yield Finding("packages", module, "note", f"is not installed: {wanted} if you use it")
        elif problem is not None:
            yield Finding("packages", module, "fail",
                          f"{version} is installed and cannot be imported: {problem}",
                          _import_remedy(module, problem))
        else:
            found.append(module)
            yield _recent(module, version, least, wanted)
    if not found:
        yield Finding("packages", "hosts", "warn",
                      "neither PyG nor DGL can be imported, so there is nothing to accelerate",
                      "pip install torch-geometric, or dgl pandas")


def _import_remedy(module: str, problem: str) -> str:
    other = re.search(r"No module named '(\w+)", problem)
    if other is not None and other[1] != module:  # not the host's own fault
        return f"pip install {other[1]}"
    if module == "dgl":
        return ("import gnnaccel before dgl; DGL also needs pandas: pip install pandas. "
                "docs/dgl.md has what else it wants")
    return f"pip install --force-reinstall {module.replace('_', '-')}"


def bridge() -> Finding | None:
    """How DGL gets to a GPU; None without DGL."""
    if adapters.HOSTS["dgl"][0] not in sys.modules:
        return None
    from gnnaccel.adapters.dgl import bridge as bridging

    why = bridging.reason_against()
    return Finding("GPU", "DGL", "note",
                   why or "this DGL was built without CUDA: enabled, gnnaccel bridges its graphs "
                          "to the GPU")


# --- CUDA -----------------------------------------------------------------------------------------

def _cuda() -> Iterator[Finding]:
    torch_cuda, devices, broken = _torch_cuda()
    driver = probe.driver_text()
    if import_problem("torch") is not None:
        yield Finding("GPU", "device", "note",
                      f"not checked: torch cannot be imported; NVIDIA driver: {driver or 'none'}")
        yield from _cupy(None, [])
        return
    if broken is not None:
        yield Finding("GPU", "torch", "fail", f"torch cannot ask for GPUs: {broken}",
                      "repair torch, or the NVIDIA driver: see nvidia-smi")
    if devices:
        yield from _devices(devices, torch_cuda, driver)
    elif driver is not None and broken is None:
        text = f"an NVIDIA driver ({driver}) is loaded, but torch sees no GPU"
        if torch_cuda is None:
            yield Finding("GPU", "torch", "fail", f"{text}: this torch is built without CUDA",
                          "install a CUDA build of torch")
        else:
            yield Finding("GPU", "torch", "fail", f"{text} (torch is for CUDA {torch_cuda})",
                          "update the driver, or look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    elif broken is None:
        yield Finding("GPU", "device", "note",
                      "no NVIDIA GPU here: layers run on the torch backend or natively")
    if broken is None:
        yield _nccl(len(devices))
    yield from _cupy(torch_cuda, devices)


def _nccl(gpus: int) -> Finding:
    """Whether processes of several GPUs can exchange rows of a graph by NCCL."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("GPU", "NCCL", "note", "this torch has no torch.distributed: no graph over "
                                              "several processes")
    if dist.is_nccl_available():
        return Finding("GPU", "NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    text = "this torch has none: processes exchange rows by gloo, through the CPU's memory"
    if gpus > 1:
        return Finding("GPU", "NCCL", "warn", text, "install a CUDA build of torch for Linux, "
                                                    "which brings NCCL")
    return Finding("GPU", "NCCL", "note", text)


def _torch_cuda() -> tuple[str | None, list[dict], str | None]:
    """(CUDA version of torch, its devices, what went wrong)."""
    if import_problem("torch") is not None:
        return None, [], None
    import torch

    try:
        return torch.version.cuda, probe.devices(), None
    except Exception as problem:  # noqa: BLE001 - of a driver that does not fit
        return torch.version.cuda, [], f"{type(problem).__name__}: {problem}".partition("\n")[0]


def _devices(devices: list[dict], torch_cuda: str | None, driver: str | None) -> Iterator[Finding]:
    yield Finding("GPU", "driver", "ok",
                  f"{driver or 'of unknown version'}, torch for CUDA {torch_cuda}")
    for index, about in enumerate(devices):
        major, minor = about["capability"]
        gib = about['memory'] / 2**30
        text = f"{about['name']}, compute capability {major}.{minor}, {gib:.0f} GiB"
        if about["capability"] < probe.LEAST_CAPABILITY:
            yield Finding("GPU", f"device {index}", "warn", text,
                          "the kernels are for 7.5 and later; layers stay native on this one")
        else:
            yield Finding("GPU", f"device {index}", "ok", text)


def _cupy(torch_cuda: str | None, devices: list[dict]) -> Iterator[Finding]:
    gpu = bool(devices)
    names = [name for name in PACKAGES["cupy"] if probe.version_of(name)]
    wanted = probe.install_command(probe.major(torch_cuda or "13"))
    if not names and not gpu:
        yield Finding("GPU", "CuPy", "note", f"is not installed; with a GPU: {wanted}")
        return
    if len(names) > 1:
        yield Finding("GPU", "CuPy", "fail",
                      f"{', '.join(names)} are installed together and overwrite each other",
                      f"pip uninstall -y {' '.join(names)}, then {wanted}")
    wrong = probe.mismatch(torch_cuda, names)
    if wrong is not None:
        yield Finding("GPU", "CUDA", "warn" if gpu else "note", *wrong)
    found = probe.cupy()
    if "cupy" in found.problems:
        yield Finding("GPU", "CuPy", "fail" if gpu else "note",
                      f"cannot be imported: {found.problems['cupy']}", wanted)
        return
    yield _recent("CuPy", found.cupy, probe.LEAST_CUPY, wanted)
    if gpu:
        yield from _agreement(found, None if wrong else torch_cuda, wanted)
        yield _ready(devices, found.driver_cuda)


def _ready(devices: list[dict], driver_cuda: str | None) -> Finding:
    """How many kernels need not be compiled on each GPU."""
    made_by, held = ready.made_by(), ready.manifest(ready.FOLDER)
    if made_by is None:
        return Finding("GPU", "ready kernels", "note",
                       "this package brings none; kernels are compiled at first use")
    cuda = probe.major(driver_cuda or "0")
    if cuda < probe.major(made_by):
        return Finding("GPU", "ready kernels", "note",
                       f"those of the package are for CUDA {made_by}, the driver runs CUDA "
                       f"{driver_cuda or 'of unknown version'}; kernels are compiled at first use")
    counts = {one["capability"]: len(ready.Ready(one["capability"], cuda, held)) for one in devices}
    text = ", ".join(f"{count} sources for compute capability {major}.{minor}"
                     for (major, minor), count in counts.items())
    return Finding("GPU", "ready kernels", "ok" if all(counts.values()) else "note",
                   f"{text}, compiled by NVRTC {made_by}")


def _agreement(found: probe.Probe, torch_cuda: str | None, wanted: str) -> Iterator[Finding]:
    """NVRTC compiles for the driver that CuPy uses; torch brings a CUDA of its own, which had
    better be the same major one."""
    if found.nvrtc is None:
        yield Finding("GPU", "NVRTC", "fail",
                      f"cannot be loaded: {found.problems.get('nvrtc', 'unknown')}", wanted)
    elif found.driver_cuda and probe.major(found.nvrtc) > probe.major(found.driver_cuda):
        yield Finding("GPU", "NVRTC", "fail",
                      f"{found.nvrtc} is newer than the CUDA {found.driver_cuda} of the driver",
                      "update the driver, or "
                      + probe.install_command(probe.major(found.driver_cuda)))
    else:
        yield Finding("GPU", "NVRTC", "ok",
                      f"{found.nvrtc}, CuPy for CUDA {found.cupy_cuda}, driver up to CUDA "
                      f"{found.driver_cuda}")
    if torch_cuda and found.cupy_cuda and probe.major(torch_cuda) != probe.major(found.cupy_cuda):
        yield Finding("GPU", "CUDA", "warn",
                      f"torch is for CUDA {torch_cuda}, CuPy for {found.cupy_cuda}: two CUDAs in "
                      "one process", wanted)
