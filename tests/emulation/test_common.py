"""common.cuh against torch's conversions and published Philox vectors."""
from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

from gnnaccel.cuda.runtime import nvrtc, sources
from tests.emulation.emulator import EmulatedDriver, EmulationError, guarded
from tests.helpers import needs_nvrtc

TEXT = """
#include "common.cuh"
extern "C" __global__ void unpack(const T* x, float* y, i64 packs) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    float v[N];
    load_pack<T, N>(x + i * N, v);
    for (int j = 0; j < N; ++j) y[i * N + j] = v[j];
}
extern "C" __global__ void pack(const float* x, T* y, i64 packs) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    float v[N];
    for (int j = 0; j < N; ++j) v[j] = x[i * N + j];
    store_pack<T, N>(y + i * N, v);
}
extern "C" __global__ void random(u64 seed, u64 offset, u64 counter, u32* words, float* uniform, u32 bits) {
    const uint4 r = philox<ROUNDS>(seed, offset, counter);
    words[0] = r.x; words[1] = r.y; words[2] = r.z; words[3] = r.w;
    *uniform = uniform01(bits);
}
"""
CASES = [(torch.float32, "float", n) for n in (1, 2, 4)] + [
    (dtype, name, n) for dtype, name in ((torch.float16, "f16"), (torch.bfloat16, "bf16"))
    for n in (1, 2, 4, 8)]


@functools.cache
def kernels(name="float", n=1, rounds=10):
    return EmulatedDriver().load_text(TEXT, (("T", name), ("N", str(n)), ("ROUNDS", str(rounds))))


def convert(entry, name, n, x, dtype):
    """``x`` (1-d) through ``pack`` or ``unpack``, N at a time; both arrays guarded."""
    n_packs = x.numel() // n
    inside, outside = guarded(x), guarded(torch.zeros(x.numel(), dtype=dtype))
    kernels(name, n)[entry](((n_packs + 127) // 128, 1), 128, 0,
                            (inside.tensor.data_ptr(), outside.tensor.data_ptr(),
                             np.int64(n_packs)))
    inside.check()
    outside.check()
    return outside.tensor


def same_bits(a, b):
    """Equal, -0 and 0 apart, any NaN like any other."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(integer)[~nan], b.view(integer)[~nan])


def interesting_floats():
    """All 16-bit values as fp32, the midpoints of neighbours (ties), what lies next to those, and
    random bits."""
    every = torch.arange(-2**15, 2**15).to(torch.int16)
    parts = []
    for dtype in (torch.float16, torch.bfloat16):
        values = every.view(dtype).float()
        finite = values[values.isfinite()].sort().values.double()
        middle = ((finite[1:] + finite[:-1]) / 2).float()
        inf = torch.tensor(float("inf"))
        parts += [values, middle, torch.nextafter(middle, inf), torch.nextafter(middle, -inf)]
    generator = torch.Generator().manual_seed(0)
    parts.append(torch.randint(-2**31, 2**31, (40000,),
                               generator=generator).to(torch.int32).view(torch.float32))
    parts.append(torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 3.0**-25,
                               1e-45, 3.4e38]))
    x = torch.cat(parts)
    return x[:x.numel() // 8 * 8]


@pytest.mark.parametrize("dtype, name, n", CASES)
def test_load_pack_equals_torch(dtype, name, n):
    bits = torch.arange(-2**15, 2**15).to(torch.int16)
    x = interesting_floats() if dtype is torch.float32 else bits.view(dtype)
    assert same_bits(convert("unpack", name, n, x, torch.float32), x.float())


@pytest.mark.parametrize("dtype, name, n", CASES)
def test_store_pack_equals_torch(dtype, name, n):
    x = interesting_floats()
    assert same_bits(convert("pack", name, n, x, dtype), x.to(dtype))


def test_pack_needs_its_alignment():
    x, y = torch.zeros(16, dtype=torch.float16), torch.zeros(16)
    with pytest.raises(EmulationError, match="misaligned"):
        kernels("f16", 8)["unpack"]((1, 1), 1, 0, (x.data_ptr() + 2, y.data_ptr(), np.int64(1)))


@needs_nvrtc
@pytest.mark.parametrize("name, n, bits",
                         [("float", 4, 128), ("float", 2, 64), ("float", 1, 32), ("f16", 8, 128),
                          ("bf16", 8, 128), ("bf16", 4, 64), ("f16", 2, 32), ("f16", 1, 16)])
def test_a_pack_is_one_instruction(name, n, bits):
    text = f"""#include "common.cuh"
    extern "C" __global__ void k(const {name}* x, {name}* y) {{
        float v[{n}]; load_pack<{name}, {n}>(x, v); store_pack<{name}, {n}>(y, v); }}"""
    ptx = nvrtc.compile_ptx(sources.inline(text), (), 80)
    for kind in ("ld", "st"):
        widths = re.findall(rf"\b{kind}\.global(?:\.nc)?(?:\.v(\d))?\.[a-z](\d+)", ptx)
        assert [int(lanes or 1) * int(width) for lanes, width in widths] == [bits]


def philox_reference(rounds, key, counter):
    """Philox4x32 as published, on plain integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(rounds):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (
            first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def philox(rounds, key, counter, bits=0):
    words, uniform = torch.zeros(4, dtype=torch.int32), torch.zeros(1)
    seed, count, offset = (np.uint64(low | high << 32)
                           for low, high in (key, counter[:2], counter[2:]))
    kernels(rounds=rounds)["random"]((1, 1), 1, 0,
                                     (seed, offset, count, words.data_ptr(), uniform.data_ptr(),
                                      np.uint32(bits)))
    return [w % 2**32 for w in words.tolist()], uniform.item()


ONES = 0xFFFFFFFF
PI = ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))


@pytest.mark.parametrize("key, counter, expected", [  # Random123's known-answer vectors for philox4x32, 10 rounds
    ((0, 0), (0, 0, 0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (*PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
])
def test_philox_known_answers(key, counter, expected):
    assert philox_reference(10, key, counter) == expected
    assert philox(10, key, counter)[0] == expected


@pytest.mark.parametrize("rounds", [6, 7])
def test_philox_with_fewer_rounds(rounds):
    assert philox(rounds, *PI)[0] == philox_reference(rounds, *PI)
    assert philox(rounds, (1, 2), (3, 4, 5, 6))[0] == philox_reference(rounds, (1, 2), (3, 4, 5, 6))


def test_uniform01_stays_below_one():
    values = {bits: philox(10, (0, 0), (0, 0, 0, 0), bits)[1]
              for bits in (0, 255, 256, 2**31, ONES)}
    assert values == {0: 0.0, 255: 0.0, 256: 2.0**-24, 2**31: 0.5, ONES: 1 - 2.0**-24}
