"""torch_scatter's functions against naive loops in fp64."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.adapters.standins.scatter import composite
from gnnaccel.adapters.standins.scatter import reduce as scatters
from gnnaccel.adapters.standins.scatter import segment as segments
from tests.standins import naive

REDUCES = ("sum", "add", "mul", "mean", "min", "max")
# shape of src, shape of index, dim
SHAPES = [((7,), (7,), -1), ((5, 6), (6,), 1), ((5, 6), (5,), 0), ((5, 6), (5, 6), -1),
          ((3, 5, 2), (5,), 1), ((3, 5, 2), (3, 5), 1), ((3, 5, 2), (5,), -2), ((4, 1), (4,), 0)]


def drawn(shape, index_shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randint(-4, 5, shape).to(dtype), torch.randint(0, 4, index_shape)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.float16])
@pytest.mark.parametrize("shape, index_shape, dim", SHAPES)
def test_values(shape, index_shape, dim, dtype, reduce):
    src, index = drawn(shape, index_shape, dtype)
    wide, dim_ = scatters.broadcast(index, src, dim), dim % len(shape)
    for size in (None, 6):
        expected, place = naive.scatter(src, wide, dim_, size or int(index.max()) + 1, reduce)
        got = scatters.scatter(src, index, dim, dim_size=size, reduce=reduce)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected)
        named = getattr(scatters, f"scatter_{reduce}")(src, index, dim, dim_size=size)
        if reduce in ("min", "max"):
            assert torch.equal(named[1], place)
            named = named[0]
        assert torch.equal(named, got)


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients(reduce):
    torch.manual_seed(0)
    src, index = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.tensor(
        [0, 2, 2, 0, 4, 2])

    def function(src):
        return scatters.scatter(src, index, 0, dim_size=6, reduce=reduce)

    assert torch.autograd.gradcheck(function, src)
    assert torch.autograd.gradgradcheck(function, src)


def test_an_extremum_gives_its_gradient_to_the_first_of_equal_ones():
    src = torch.tensor([1.0, 3.0, 3.0], requires_grad=True)
    value, place = scatters.scatter_max(src, torch.tensor([1, 1, 1]), dim_size=3)
    value.sum().backward()
    assert src.grad.tolist() == [0, 1, 0]
    assert value.tolist() == [0, 3, 0] and place.tolist() == [3, 1, 3]


def test_nan_and_infinities_never_win():
    src = torch.tensor([float("nan"), 1.0, float("-inf"), float("nan")])
    value, place = scatters.scatter_max(src, torch.tensor([0, 0, 1, 2]))
    assert value.tolist() == [1, 0, 0] and place.tolist() == [1, 4, 4]


@pytest.mark.parametrize("reduce", REDUCES)
def test_out_takes_part_and_is_written(reduce):
    src, index = drawn((5, 2), (5,))
    out = torch.tensor([[3.0, -3.0]] * 6, dtype=torch.float64)
    given = out.clone()
    got = scatters.scatter(src, index, 0, out=out, reduce=reduce)
    assert got is out
    for group in range(6):
        rows = src[index == group]
        joined = torch.cat([rows, given[group:group + 1]])
        if reduce == "mean":
            expected = joined.sum(0) / max(len(rows), 1)
        elif reduce == "mul":
            expected = joined.prod(0)
        else:
            expected = {"sum": joined.sum, "add": joined.sum, "min": joined.amin,
                        "max": joined.amax}[reduce](0)
        torch.testing.assert_close(out[group], expected)


def test_arguments_are_kept_where_out_wins():
    out = torch.tensor([5.0, 0.0])
    value, place = scatters.scatter_max(torch.tensor([4.0, 5.0, 1.0]), torch.tensor([0, 0, 1]),
                                        out=out)
    assert value.tolist() == [5, 1] and place.tolist() == [3, 2]


@pytest.mark.parametrize("reduce", REDUCES)
def test_empty(reduce):
    src = torch.empty(0, 3, requires_grad=True)
    index = torch.empty(0, dtype=torch.int64)
    assert scatters.scatter(src, index, 0, reduce=reduce).shape == (0, 3)
    got = scatters.scatter(src, index, 0, dim_size=4, reduce=reduce)
    assert torch.equal(got, torch.full((4, 3), float(reduce == "mul")))
    got.sum().backward()
    assert src.grad.shape == (0, 3)


def test_unknown_reductions():
    src, index = torch.ones(2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="'median' is not known; use one of sum, add, mul"):
        scatters.scatter(src, index, reduce="median")
    with pytest.raises(ValueError, match="'mul' is not known; use one of sum, add, mean"):
        segments.segment_coo(src, index, reduce="mul")
    with pytest.raises(ValueError, match="'mul' is not known"):
        segments.segment_csr(src, index, reduce="mul")


# --- composite ------------------------------------------------------------------------------------

INDEX = torch.tensor([0, 2, 2, 0, 4, 2])
GROUPS = [(group, (INDEX == group).nonzero().flatten()) for group in (0, 2, 4)]


@pytest.fixture
def src():
    torch.manual_seed(1)
    return torch.randn(6, 3, dtype=torch.float64, requires_grad=True)


def test_softmax(src):
    soft = composite.scatter_softmax(src, INDEX, 0)
    log = composite.scatter_log_softmax(src, INDEX, 0, dim_size=9)
    for _, rows in GROUPS:
        torch.testing.assert_close(soft[rows], src[rows].softmax(0))
        torch.testing.assert_close(log[rows], src[rows].log_softmax(0))
    for function in (composite.scatter_softmax, composite.scatter_log_softmax):
        assert torch.autograd.gradcheck(lambda src, f=function: f(src, INDEX, 0), src)


def test_logsumexp(src):
    got = composite.scatter_logsumexp(src, INDEX, 0, dim_size=6)
    for group, rows in GROUPS:
        torch.testing.assert_close(got[group], src[rows].logsumexp(0))
    assert not got[[1, 3, 5]].any()
    assert torch.autograd.gradcheck(lambda src: composite.scatter_logsumexp(src, INDEX, 0), src)
    out = torch.zeros(6, 3, dtype=torch.float64)
    composite.scatter_logsumexp(src.detach(), INDEX, 0, out=out)
    both = torch.cat([src[INDEX == 2], torch.zeros(1, 3, dtype=torch.float64)])
    torch.testing.assert_close(out[2], both.logsumexp(0).detach())


@pytest.mark.parametrize("unbiased", [True, False])
def test_std(src, unbiased):
    got = composite.scatter_std(src, INDEX, 0, unbiased=unbiased)
    for group, rows in GROUPS[:2]:
        torch.testing.assert_close(got[group], src[rows].std(0, unbiased=unbiased), rtol=1e-5,
                                   atol=1e-6)
    assert not got[[1, 3, 4]].any()


@pytest.mark.parametrize("name", ["scatter_softmax", "scatter_log_softmax", "scatter_logsumexp"])
def test_integers_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} needs floating point numbers and got torch.int64"):
        getattr(composite, name)(torch.tensor([1, 2]), torch.tensor([0, 0]))


# --- segments -------------------------------------------------------------------------------------

SEGMENTS = [((7,), (7,)), ((5, 6), (5,)), ((5, 6), (5, 6)), ((5, 6), (1, 6)), ((3, 5, 2), (3, 5))]


@pytest.mark.parametrize("reduce", segments.REDUCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("shape, index_shape", SEGMENTS)
def test_segments(shape, index_shape, dtype, reduce):
    torch.manual_seed(0)
    dim = len(index_shape) - 1
    src = torch.randint(0, 9, shape).to(dtype)
    index = torch.randint(0, 4, index_shape).sort(-1)[0]
    wide = segments._trailing(index.expand(shape[:dim + 1]), src)
    expected, place = naive.scatter(src, wide, dim, 6, reduce)
    got = segments.segment_coo(src, index, dim_size=6, reduce=reduce)
    torch.testing.assert_close(got, expected)
    ptr = torch.searchsorted(index.contiguous(), torch.arange(7).expand(*index_shape[:-1],
                                                                        7).contiguous())
    torch.testing.assert_close(segments.segment_csr(src, ptr, reduce=reduce), expected)
    if reduce in ("min", "max"):
        for found in (getattr(segments, f"segment_{reduce}_coo")(src, index, dim_size=6),
                      getattr(segments, f"segment_{reduce}_csr")(src, ptr)):
            assert torch.equal(found[1], place)


def test_what_lies_outside_of_all_segments_is_left_out():
    src = torch.arange(1.0, 7.0, requires_grad=True)
    got = segments.segment_csr(src, torch.tensor([1, 3, 3, 5]))
    assert got.tolist() == [5, 0, 9]
    got.sum().backward()
    assert src.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_out_of_segments():
    src, index = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2])
    out = torch.full((3,), 3.0)
    assert segments.segment_coo(src, index, out=out) is out and out.tolist() == [6, 3, 7]
    assert segments.segment_csr(src, torch.tensor([0, 2, 2, 3]), out=out) is out
    assert out.tolist() == [3, 0, 4]


def test_gather():
    src = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 0, 1, 3, 3]] * 3)
    torch.testing.assert_close(segments.gather_coo(src, index), src[:, index[0]])
    ptr = torch.tensor([0, 2, 3, 3, 5])
    torch.testing.assert_close(segments.gather_csr(src, ptr.expand(3, 5)), src[:, index[0]])
    out = torch.empty(3, 5, 2, dtype=torch.float64)
    assert segments.gather_coo(src.detach(), index, out) is out
    assert torch.equal(out, src.detach()[:, index[0]])
    assert torch.autograd.gradcheck(lambda src: segments.gather_coo(src, index), src)
    with pytest.raises(ValueError, match="3 offsets for 4 entries; it needs one more"):
        segments.gather_csr(src[0], torch.tensor([0, 1, 2]))
