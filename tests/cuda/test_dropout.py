"""The dropout factors: their distribution, and the random numbers bit by bit."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from gnnaccel.cuda.traverse.dropout import OFF, Dropout, draw, factors

pytestmark = pytest.mark.usefixtures("poison")


def philox7(seed: int, offset: int, counters: np.ndarray) -> np.ndarray:
    """[n, 4] words of Philox4x32 with seven rounds, from Salmon et al."""
    mask = np.uint64(0xFFFFFFFF)
    words = [counters & mask, counters >> np.uint64(32),
             np.full_like(counters, offset & 0xFFFFFFFF), np.full_like(counters, offset >> 32)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        first, second = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [(second >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]), second & mask,
                 (first >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]), first & mask]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, 1)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("seed, offset",
                         [(0, 0), (2**62 + 12345, 7), (0xFFFFFFFFFFFFFFFF, 2**40 + 4)])
def test_every_bit_is_as_published(device, heads, seed, offset):
    n = np.arange(101 * heads, dtype=np.uint64)
    words = philox7(seed, offset, n >> np.uint64(2))[np.arange(n.size),
                                                     (n & np.uint64(3)).astype(int)]
    uniform = (words >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    expected = np.where(uniform < np.float32(0.3), np.float32(0),
                        np.float32(1 / 0.7)).reshape(101, heads)
    assert np.array_equal(factors(Dropout(0.3, seed, offset), 101, heads, device).cpu().numpy(),
                          expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_zeros(device, p):
    edges, heads = (2000, 3) if device.type == "cpu" else (200_000, 3)
    mask = factors(draw(p, device), edges, heads, device)
    assert set(mask.unique().tolist()) == {0.0, np.float32(1 / (1 - p)).item()}
    zero = (mask == 0).double()
    for sample in (zero, *zero.unbind(1), zero[::2], zero[: edges // 4]):
        sigma = (p * (1 - p) / sample.numel()) ** 0.5
        assert abs(sample.mean().item() - p) < 5 * sigma


def test_heads_edges_and_calls_are_independent(device):
    zero = torch.stack([(factors(draw(0.5, device), 3000, 4, device) == 0).double() - 0.5
                        for _ in range(2)])
    sigma = 0.25 / 3000**0.5
    pairs = [(zero[0, :, a], zero[0, :, b]) for a in range(4) for b in range(a)]
    pairs += [(zero[0, 1:, h], zero[0, :-1, h])
              for h in range(4)] + [(zero[0, :, h], zero[1, :, h]) for h in range(4)]
    assert all(abs((a * b).mean().item()) < 5 * sigma for a, b in pairs)


def test_manual_seed_repeats_and_calls_differ(device):
    torch.manual_seed(3)
    first, second = draw(0.5, device), draw(0.5, device)
    torch.manual_seed(3)
    again = draw(0.5, device)
    torch.manual_seed(4)
    other = draw(0.5, device)
    assert first == again and len({first, second, other}) == 3
    masks = [factors(d, 200, 3, device) for d in (first, again, second, other)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[3])


def test_drawing_moves_torchs_own_stream(device):
    """Otherwise the same random numbers could serve a torch operation beside it."""
    torch.manual_seed(3)
    plain = torch.rand(8, device=device)
    torch.manual_seed(3)
    draw(0.5, device)
    assert not torch.equal(torch.rand(8, device=device), plain)


def test_more_edges_do_not_change_earlier_ones(device):
    key = draw(0.4, device)
    assert torch.equal(factors(key, 50, 3, device), factors(key, 170, 3, device)[:50])


def test_extremes(device):
    assert (factors(draw(1.0, device), 100, 3, device) == 0).all()
    assert factors(draw(0.5, device), 0, 3, device).shape == (0, 3)
    state = torch.get_rng_state()
    assert draw(0.0, device) is OFF and not OFF.on and torch.equal(torch.get_rng_state(), state)
