"""Every layer that may run over a part gives what it gives over the whole graph."""
from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch_geometric")

from tests.distributed import graphs, layer_cases
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")


#: which PyG itself cannot run over no edges
NOT_OVER_NOTHING = {"FeaStConv"}


def run_all(rank, world, folder, enabled, names):
    import gnnaccel
    import gnnaccel.distributed as distributed

    warnings.simplefilter("ignore")
    part = distributed.load_part(folder)
    switched = gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled()
    with switched, distributed.use(part):
        return part.own, {name: layer_cases.run(name, part.data, part.own) for name in names}


def run_by_kernels(rank, world, folder, names):
    import gnnaccel
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver

    with driver.using(EmulatedDriver()):
        gnnaccel.reset_stats()
        found = run_all(rank, world, folder, True, names)
    routes = {name: gnnaccel.stats()[name]["routes"] for name in names}
    return *found, routes


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulation of kernels needs g++")
def test_kernels_run_over_parts(tmp_path):
    """By each of the two ways in which layers get halo rows."""
    data, names = layer_cases.data(), ["GCNConv", "SAGEConv", "GATConv", "RGCNConv"]
    found = start(2, run_by_kernels, graphs.cut(data, 2, tmp_path)["random"], names)
    for *_, routes in found:
        assert routes == {name: {"cuda": 1} for name in names}
    judge(data, [rank[:2] for rank in found], names)


@pytest.mark.long
@pytest.mark.parametrize("world, way, enabled", [
    (2, "random", False), pytest.param(2, "random", True, marks=pytest.mark.long),
    pytest.param(4, "ugly", False, marks=pytest.mark.long)])
def test_layers_over_parts(tmp_path, world, way, enabled):
    from gnnaccel.adapters.pyg.distributed import layers

    data = layer_cases.data()
    folder = graphs.cut(data, world, tmp_path)[way]
    assert set(layer_cases.CASES) == layers.COMPARED
    names = sorted(layers.COMPARED - (NOT_OVER_NOTHING if way == "ugly" else set()))
    judge(data, start(world, run_all, folder, enabled, names), names)


def judge(data, found, names):
    for name in names:
        out, gradients = layer_cases.run(name, data)
        mine, features = torch.empty_like(out), torch.zeros_like(data.x)
        for own, results in found:
            mine[own], features[own] = results[name][0], results[name][1].pop("x")
        close(mine, out, name)
        close(features, gradients.pop("x"), f"{name}: gradients of x")
        for key, truth in gradients.items():
            shares = [results[name][1].get(key) for _, results in found]
            close(sum(share for share in shares if share is not None), truth, f"{name}: {key}")


def close(found, truth, what):
    scale = max(1.0, truth.abs().max().item())
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5 * scale,
                               msg=lambda text: f"{what}: {text}")
