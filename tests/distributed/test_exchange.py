"""Rows of the halo: what comes, what goes home, in which bytes; and means over all parts."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from gnnaccel.errors import PartitionError
from tests.distributed import graphs
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")


def rows_and_gradients(rank, world, folder, exchange):
    """What `halo_rows` gives and what comes home, for features of several shapes and dtypes."""
    part = distributed.load_part(folder)
    found = {"own": part.own, "halo": part.rows["node"].halo}
    with distributed.use(part, exchange=exchange):
        for name, x in tensors().items():
            x = x[part.own]
            x = x.requires_grad_(x.is_floating_point())
            rows = distributed.halo_rows(x)
            found[name] = rows.detach()
            if x.requires_grad:
                weights = weights_of(rows, torch.cat([part.own, part.rows["node"].halo]), rank)
                first, = torch.autograd.grad((rows * rows * weights).sum(), x, create_graph=True)
                second, = torch.autograd.grad(first.sum(), x)
                found[name, "gradients"] = first.detach(), second
        found["sent"] = distributed.exchanged()["node"]
    return found


@functools.cache
def tensors():
    g = graphs.generator(2)
    count = graphs.NODES
    return {"matrix": torch.randn(count, 3, generator=g),
            "vector": torch.randn(count, generator=g),
            "heads": torch.randn(count, 2, 3, generator=g),
            "double": torch.randn(count, 2, generator=g).double(),
            "half": torch.randn(count, 3, generator=g).half(),
            "ids": torch.randint(0, 9, (count,), generator=g),
            "mask": torch.rand(count, 3, generator=g) < 0.5}


def weights_of(rows, ids, rank):
    """Anything that depends on the part and the node."""
    found = torch.sin(ids + 10.0 * rank).to(rows.dtype)
    return found.reshape(-1, *[1] * (rows.dim() - 1))


@pytest.mark.long
@pytest.mark.parametrize("way", ["random", "ugly"])
def test_rows_come_and_gradients_go_home(tmp_path, way):
    folder = graphs.cut(graphs.homogeneous(), 4, tmp_path)[way]
    found = start(4, rows_and_gradients, folder, "fp32")
    for name, x in tensors().items():
        home = torch.zeros_like(x, dtype=torch.double)
        for rank, mine in enumerate(found):
            ids = torch.cat([mine["own"], mine["halo"]])
            assert torch.equal(mine[name], x[ids])
            if x.is_floating_point():
                home.index_add_(0, ids, weights_of(x[ids], ids, rank).double().expand_as(x[ids]))
        if x.is_floating_point():
            for mine in found:
                first, second = mine[name, "gradients"]
                own = mine["own"]
                close = functools.partial(torch.testing.assert_close, rtol=1e-2 if name == "half"
                                          else 1e-5, atol=1e-2 if name == "half" else 1e-5)
                close(first.double(), 2 * x[own] * home[own])
                close(second.double(), 2 * home[own])


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["fp32", "bf16", "int8"])
def test_each_row_is_sent_once(tmp_path, exchange):
    """Forward, backward, and twice for second derivatives, in as many bytes as asked for."""
    folder = graphs.cut(graphs.homogeneous(), 4, tmp_path)["random"]
    found = start(4, rows_and_gradients, folder, exchange)
    rows = {"matrix": 3 * 4, "vector": 4, "heads": 6 * 4, "double": 2 * 8, "half": 3 * 2}
    if exchange == "bf16":
        rows = {"matrix": 3 * 2, "vector": 2, "heads": 6 * 2, "double": 2 * 2, "half": 3 * 2}
    if exchange == "int8":  # a scale of 4 bytes with each; no half, nor single numbers: it is more
        rows = {"matrix": 3 + 4, "vector": 4, "heads": 6 + 4, "double": 2 + 4, "half": 3 * 2}
    plain = 8 + 3  # ids and mask are sent as they are, and nothing comes back
    for rank, mine in enumerate(found):
        part = distributed.load_part(folder, rank).rows["node"]
        out, back = len(part.send_rows), len(part.halo)
        # forward and backward, and for second derivatives both again
        assert mine["sent"] == {"calls": 2 + 4 * len(rows),
                                "bytes": out * plain + 2 * (out + back) * sum(rows.values())}
    if exchange == "bf16":
        x, mine = tensors()["matrix"], found[0]
        assert torch.equal(mine["matrix"][:len(mine["own"])], x[mine["own"]])  # own rows stay
        assert torch.equal(mine["matrix"][len(mine["own"]):], x[mine["halo"]].bfloat16().float())


def negated(rank, world, folder):
    """Gradients that come home of ones that are views which negate, and of the same numbers."""
    part, found = distributed.load_part(folder), []
    with distributed.use(part):
        for dtype in (torch.float32, torch.float16):
            x = torch.ones(len(part.own), 3, dtype=dtype, requires_grad=True)
            rows = distributed.halo_rows(x)
            given = (torch.arange(rows.numel()) % 5).view(rows.shape).to(dtype)
            found.append([torch.autograd.grad(rows, x, grad, retain_graph=True)[0]
                          for grad in (torch._neg_view(given), -given)])
    return found


@pytest.mark.long
def test_gradients_that_negate_their_numbers_go_home(tmp_path):
    """Those of 16 bits go as bytes, of which such a view has none."""
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for mine in start(2, negated, folder):
        assert all(torch.equal(one, two) for one, two in mine)


def rounded(rank, world, folder):
    """What comes of rows with numbers of very different sizes, and of their gradients."""
    part = distributed.load_part(folder)
    own, halo = part.own, part.rows["node"].halo
    x = uneven()
    with distributed.use(part, exchange="int8"):
        mine = x[own].requires_grad_()
        rows = distributed.halo_rows(mine)
        (rows * x[torch.cat([own, halo])]).sum().backward()
    return own, halo, rows.detach(), mine.grad


def uneven():
    """Rows whose sizes differ by many orders; one of zeros, and one with an infinite number."""
    g = graphs.generator(3)
    x = torch.randn(graphs.NODES, 16, generator=g)
    x *= torch.logspace(-6, 6, graphs.NODES)[:, None]
    x[3], x[5, 2] = 0, torch.inf
    return x


@pytest.mark.long
def test_int8_rows_err_by_half_a_step_of_their_own_scale(tmp_path):
    x = uneven()
    step = x.abs().amax(1, keepdim=True) / 127
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    found = start(2, rounded, folder)
    used, home = torch.zeros(len(x)), torch.zeros_like(x)
    for own, halo, rows, _ in found:
        assert torch.equal(rows[:len(own)], x[own])  # own rows stay as they are
        came, truth = rows[len(own):], x[halo]
        infinite = halo == 5
        assert came[infinite].isnan().all()
        gap = (came - truth).abs()[~infinite]
        assert (gap <= 0.5001 * step[halo][~infinite]).all() and gap.any()
        assert not came[halo == 3].any()
        used[own] += 1
        used[halo] += 1
        home[own] = found[0][3] if own is found[0][0] else found[1][3]
    plain = torch.arange(len(x)) != 5
    gap = (home - used[:, None] * x).abs()[plain]
    assert (gap <= (0.5001 * step + 1e-5 * x.abs())[plain]).all() and gap.any()


def repeated(rank, world, folder):
    """Gradients of one exchange, several times over; and what is sent once for several users."""
    part = distributed.load_part(folder)
    with distributed.use(part):
        x = part.data.x.clone().requires_grad_()
        runs = []
        for _ in range(3):
            rows = distributed.halo_rows(x.tanh())
            runs.append(torch.autograd.grad((rows * torch.cos(rows)).sum(), x)[0])
        before = distributed.exchanged()["node"]["calls"]
        first = distributed.halo_rows(part.data.x)
        assert distributed.halo_rows(part.data.x) is first  # no gradient is asked of it
        hidden = x * 2
        shared = [distributed.halo_rows(hidden) for _ in range(3)]
        sum(s.sum() for s in shared).backward()
        calls = distributed.exchanged()["node"]["calls"] - before
        part.data.x.mul_(2)
        assert torch.equal(distributed.halo_rows(part.data.x), 2 * first)  # written: sent again
        with torch.no_grad():
            assert not distributed.halo_rows(hidden).requires_grad
        with torch.inference_mode():
            assert torch.equal(distributed.halo_rows(hidden.detach().clone()), shared[0])
    return runs, calls


@pytest.mark.long
def test_gradients_repeat_and_shared_rows_are_sent_once(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for runs, calls in start(2, repeated, folder):
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
        assert calls == 3


def normalised(rank, world, folder):
    """How often degrees are sent, by two layers in two steps, and after edges were dropped."""
    from torch_geometric.nn import GCNConv

    torch.manual_seed(0)
    part, first, second = distributed.load_part(folder), GCNConv(6, 4), GCNConv(4, 4)
    x, edges, found = part.data.x, part.data.edge_index, []
    with distributed.use(part):
        for given in ((edges,), (edges,), (edges[:, ::2],), (edges, part.data.edge_weight)):
            before = distributed.exchanged()["node"]["calls"]
            second(first(x, *given), *given)
            found.append(distributed.exchanged()["node"]["calls"] - before)
        with torch.inference_mode():  # what was kept before and is kept now serves both
            first(x, edges.clone())
        edges.copy_(edges.clone())  # written: computed anew
        before = distributed.exchanged()["node"]["calls"]
        first(x, edges).sum().backward()
        found.append(distributed.exchanged()["node"]["calls"] - before)
    return found


@pytest.mark.long
def test_degrees_are_sent_once_for_the_same_edges(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for found in start(2, normalised, folder):
        # features once, in training; rows of the second layer; degrees for new edges, and for both
        # layers where there are weights
        assert found == [3, 1, 2, 3, 1]


def means(rank, world, folder):
    losses = torch.arange(1.0, 1 + rank * 2).requires_grad_()  # none on rank 0
    mean = distributed.mean_loss(losses)
    mean.backward()
    return mean.item(), losses.grad.tolist(), distributed.loss_weight(len(losses))


def test_means_over_all_parts():
    for rank, (mean, gradient, weight) in enumerate(start(3, means, "")):
        assert mean == pytest.approx((1 + 2 + 1 + 2 + 3 + 4) / 6)
        assert gradient == pytest.approx([3 / 6] * (2 * rank)) and weight == 3 / 6
    assert distributed.mean_loss(torch.tensor([1.0, 3.0])).item() == 2
    assert distributed.loss_weight(4) == 0.25


def pairwise(rank, world, folder):
    from gnnaccel.dispatch.distributed import exchange

    exchange._ALL_TO_ALL = ()
    return rows_and_gradients(rank, world, folder, "fp32")


@pytest.mark.long
def test_backends_without_all_to_all_give_the_same(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 4, tmp_path)["ugly"]
    for mine, right in zip(start(4, pairwise, folder), start(4, rows_and_gradients, folder,
                                                             "fp32")):
        for name in tensors():
            assert torch.equal(mine[name], right[name])
        assert torch.equal(mine["matrix", "gradients"][0], right["matrix", "gradients"][0])


def test_what_needs_an_active_part():
    for call in (lambda: distributed.halo_rows(torch.ones(2, 3)), distributed.exchanged):
        with pytest.raises(PartitionError, match="needs an active part"):
            call()


def groups(rank, world, folder):
    """The groups that parts exchange by: of all processes, of a group of the same, and of all again
    once they were joined anew."""
    from gnnaccel.dispatch.distributed import state

    part, found = distributed.load_part(folder), []

    def used(group=None):
        with distributed.use(part, group=group):
            found.append(state.current.group)
            distributed.halo_rows(part.data.x)

    used()
    used()
    others = dist.new_group([0, 1])
    used(others)
    used(others)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/../joined-anew", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    used()
    return [found[0] is found[1], found[2] is found[3], found[0] is found[2], found[0] is found[4]]


def test_parts_share_a_group_of_their_own(tmp_path):
    folder = graphs.cut(graphs.homogeneous(), 2, tmp_path)["random"]
    for found in start(2, groups, folder):
        assert found == [True, True, False, False]
