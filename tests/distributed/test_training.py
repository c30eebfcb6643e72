"""Training over a partitioned graph: losses and gradients are those of one process, for any cut.

The same processes train all models over all cuts.
"""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("torch_geometric")

from tests.distributed import graphs, models
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
STEPS = 20


def losses_of(model, data):
    """The loss of each own node that counts."""
    out = model(data)
    if isinstance(out, dict):
        return torch.cat([F.cross_entropy(out[kind], data[kind].y, reduction="none")
                          for kind in sorted(out)])
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")


def train(model, data, mean) -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean(losses_of(model, data))
        loss.backward()
        losses.append(loss.item())
        if step in (0, STEPS - 1):
            gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return {"losses": losses, "gradients": gradients}


def train_all(rank, world, folders, cuts):
    """By (model, cut): what `train` gives; every other cut with gnnaccel's own layers."""
    from torch.nn.parallel import DistributedDataParallel

    import gnnaccel
    import gnnaccel.distributed as distributed

    found = {}
    for way in cuts:
        switched = gnnaccel.enabled(when="supported") if way == "random" else gnnaccel.disabled()
        with switched, warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in models.NAMES:
                part = distributed.load_part(folders[name == "hetero"][way])
                with distributed.use(part):
                    model = DistributedDataParallel(models.make(name))
                    found[name, way] = train(model, part.data, distributed.mean_loss)
    return found


def alone(name: str) -> dict:
    data = graphs.heterogeneous() if name == "hetero" else graphs.homogeneous()
    return train(models.make(name), data, torch.mean)


@pytest.mark.long
@pytest.mark.parametrize("world, cuts", [
    (4, ("random", "ugly")), pytest.param(4, ("edges",), marks=pytest.mark.long),
    *(pytest.param(world, ("edges", "random", "ugly"), marks=pytest.mark.long)
      for world in (1, 2))])
def test_losses_and_gradients_are_those_of_one_process(tmp_path, world, cuts):
    folders = [graphs.cut(graphs.homogeneous(), world, tmp_path / "homogeneous"),
               graphs.cut(graphs.heterogeneous(), world, tmp_path / "heterogeneous")]
    trained = start(world, train_all, folders, cuts)
    for name in models.NAMES:
        truth = alone(name)
        assert truth["losses"][-1] < truth["losses"][0]
        for way in cuts:
            compare(truth, [rank[name, way] for rank in trained], f"{name} over {way}")


def compare(truth: dict, found: list[dict], what: str) -> None:
    for rank in found:
        assert rank["losses"] == pytest.approx(truth["losses"], abs=1e-5), what
        assert rank["losses"] == found[0]["losses"], what  # the mean is that of all, on all
        for mine, right in zip(rank["gradients"], truth["gradients"]):
            for a, b in zip(mine, right):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5,
                                           msg=lambda text: f"{what}: {text}")
