"""The emulation itself: it runs correct kernels correctly, and it finds planted faults."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from gnnaccel.cuda.runtime.driver import CompileError
from tests.emulation.emulator import EmulatedDriver, EmulationError, digest, guarded

ORDERS = ("normal", "reversed", "uneven")


@pytest.fixture(params=ORDERS)
def driver(request):
    return EmulatedDriver(order=request.param, seed=7)


def build(driver, body, parameters="int* out", defines=(), head=""):
    text = f'#include "common.cuh"\n{head}\nextern "C" __global__ void k({parameters}) {{ {body} }}'
    return driver.load_text(text, defines)["k"]


def launch(driver, body, threads=32, shared=0, grid=(1, 1), size=None, dtype=torch.int32, fill=0):
    """Run ``body`` with one output array (threads * blocks elements, or ``size``) and return it."""
    ctype = {torch.int32: "int", torch.float32: "float", torch.float64: "double",
             torch.int64: "i64"}[dtype]
    out = torch.full((size or threads * grid[0] * grid[1],), fill, dtype=dtype)
    build(driver, body, f"{ctype}* out")(grid, threads, shared, (out.data_ptr(),))
    return out


# ---- correct kernels ----

BLOCK_SUM = """
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(BLOCK) block_sum(const float* __restrict__ x, double* __restrict__ total,
                                                              int n) {
    DYNAMIC_SHARED(bytes);
    float* part = reinterpret_cast<float*>(bytes);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float sum = lane_sum<32>(i < n ? x[i] : 0.0f);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.0f;
        for (int w = 0; w < BLOCK / 32; ++w) all += part[w];
        atomicAdd(total, (double)all);
    }
}
"""


def test_block_reduction(driver):
    kernel = driver.load_text(BLOCK_SUM, (("BLOCK", "128"),))["block_sum"]
    x, total = torch.arange(1000, dtype=torch.float32), torch.zeros(1, dtype=torch.float64)
    kernel((8, 1), 128, 16, (x.data_ptr(), total.data_ptr(), np.int32(1000)))
    assert total.item() == 499500.0


@pytest.mark.parametrize("call, source", [
    ("__shfl_sync(FULL_WARP, lane, 5)", lambda i: 5),
    ("__shfl_sync(FULL_WARP, lane, 5, 4)", lambda i: i // 4 * 4 + 1),
    ("__shfl_up_sync(FULL_WARP, lane, 3)", lambda i: i - 3 if i >= 3 else i),
    ("__shfl_up_sync(FULL_WARP, lane, 3, 8)", lambda i: i - 3 if i % 8 >= 3 else i),
    ("__shfl_down_sync(FULL_WARP, lane, 3)", lambda i: i + 3 if i < 29 else i),
    ("__shfl_down_sync(FULL_WARP, lane, 3, 8)", lambda i: i + 3 if i % 8 < 5 else i),
    ("__shfl_xor_sync(FULL_WARP, lane, 9)", lambda i: i ^ 9),
    # a lane of a later segment may be out of reach; one of an earlier segment is not
    ("__shfl_xor_sync(FULL_WARP, lane, 8, 8)", lambda i: i ^ 8 if i & 8 else i),
    ("(int)(__shfl_xor_sync(FULL_WARP, lane * 0x100000000ll, 1) >> 32)", lambda i: i ^ 1),
    ("(int)__shfl_xor_sync(FULL_WARP, (float)lane, 1)", lambda i: i ^ 1),
    ("(int)__shfl_xor_sync(FULL_WARP, (double)lane, 1)", lambda i: i ^ 1),
    ("(int)__shfl_xor_sync(FULL_WARP, (u32)lane, 1)", lambda i: i ^ 1),
    ("(int)__ballot_sync(FULL_WARP, lane % 3 == 0)", lambda i: 0x49249249),
    ("__any_sync(FULL_WARP, lane == 31) * 2 + __any_sync(FULL_WARP, lane == 32)", lambda i: 2),
    ("__all_sync(FULL_WARP, lane < 32) * 2 + __all_sync(FULL_WARP, lane < 31)", lambda i: 2),
])
def test_warp_collectives(driver, call, source):
    out = launch(driver, f"const int lane = threadIdx.x; out[lane] = {call};")
    assert out.tolist() == [source(i) for i in range(32)]


def test_collective_of_half_a_warp(driver):
    body = """const int lane = threadIdx.x; const u32 mine = lane < 16 ? 0x0000ffffu : 0xffff0000u;
              out[lane] = -1; if (lane >= 16) out[lane] = __shfl_xor_sync(mine, lane, 1);"""
    assert launch(driver, body).tolist() == [-1] * 16 + [i ^ 1 for i in range(16, 32)]


@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_lane_sum_and_lane_max(driver, width):
    x = launch(driver, f"const int lane = threadIdx.x; out[lane] = lane_sum<{width}>((float)lane);"
                       f"out[lane + 32] = lane_max<{width}>(-(float)lane);", dtype=torch.float32,
               size=64)
    groups = torch.arange(32.0).view(-1, width)
    assert torch.equal(x[:32].view(-1, width), groups.sum(1, keepdim=True).expand_as(groups))
    assert torch.equal(x[32:].view(-1, width), -groups[:, :1].expand_as(groups))


@pytest.mark.parametrize("width, count", product((1, 4, 8, 16, 32), (1, 2, 4, 8)))
def test_several_sums_at_once_have_the_bits_of_each(driver, width, count):
    x = launch(driver, f"""
        const int lane = threadIdx.x;
        float x[{count}];
        for (int i = 0; i < {count}; ++i) x[i] = sinf(37.f * lane + 11.f * i);
        for (int i = 0; i < {count}; ++i) out[32 * i + lane] = lane_sum<{width}>(x[i]);
        lane_sums<{width}>(x);
        for (int i = 0; i < {count}; ++i) out[32 * ({count} + i) + lane] = x[i];""",
               dtype=torch.float32, size=64 * count)
    assert torch.equal(*x.view(2, -1)) and len(x.unique()) >= 32 // width * count


def test_atomics(driver):
    body = """const int i = blockIdx.x * 64 + threadIdx.x; u32* u = (u32*)out;
        atomicAdd(out, i); atomicMax(out + 1, i); atomicMin(out + 2, -i); atomicOr(u + 3, 1u << (i % 32));
        atomicAnd(u + 4, ~(1u << (i % 16))); atomicAdd((float*)out + 5, 0.5f); atomicAdd((u64*)out + 3, 1ull << 30);
        int seen = out[8];
        while (true) { const int old = atomicCAS(out + 8, seen, seen + 2); if (old == seen) break; seen = old; }
        if (atomicExch(out + 9, 1) == 0) atomicAdd(out + 10, 1);
        if (atomicInc(u + 11, 127) == 127) out[12] = 1;"""
    out = torch.zeros(13, dtype=torch.int32)
    out[4] = -1
    build(driver, body)((2, 1), 64, 0, (out.data_ptr(),))
    assert out[[0, 1, 2, 3, 8, 9, 10, 11, 12]].tolist() == [8128, 127, -127, -1, 256, 1, 1, 0, 1]
    assert out[4].item() == -65536
    assert out[5:6].view(torch.float32).item() == 64.0
    assert out[6:8].view(torch.int64).item() == 128 << 30


def test_grid_and_block_indices(driver):
    out = launch(driver, "const int b = blockIdx.y * gridDim.x + blockIdx.x;"
                         "out[b * blockDim.x + threadIdx.x] = b * 1000 + threadIdx.x;", threads=40,
                 grid=(3, 2))
    assert out.tolist() == [b * 1000 + t for b in range(6) for t in range(40)]


def test_bit_functions():
    body = """out[0] = __popc(0xf0f0u); out[1] = __ffs(8); out[2] = __ffs(0); out[3] = __clz(1); out[4] = __clz(0);
        out[5] = (int)__umulhi(0x80000000u, 6u); out[6] = __float_as_int(1.0f);
        out[7] = (int)__int_as_float(0x40400000);
        out[8] = (int)(rsqrtf(0.25f) * 8); out[9] = (int)exp2f(5.0f); out[10] = min(3, 4) * 10 + max(3, 4);
        out[11] = isinf(infinity()) + 2 * isnan(quiet_nan()) + 4 * isinf(quiet_nan()) + 8 * isnan(1.0f);
        out[12] = (int)fmaxf(quiet_nan(), 2.0f); out[13] = (int)fmaf(2.0f, 3.0f, 1.0f); out[14] = (int)__brev(1u);"""
    out = launch(EmulatedDriver(), body, threads=1, size=15)
    assert out.tolist() == [8, 4, 0, 31, 32, 3, 0x3f800000, 3, 16, 32, 34, 3, 2, 7, -2**31]


def test_activemask_promises_only_the_caller():
    body = "out[threadIdx.x] = (int)__activemask();"
    assert launch(EmulatedDriver("reversed"),
                  body).tolist() == [1 << i if i < 31 else -2**31 for i in range(32)]


# ---- planted faults ----

def everywhere(body, **options):
    return [launch(EmulatedDriver(order, seed=3), body, **options).tolist() for order in ORDERS]


REVERSE_IN_BLOCK = """DYNAMIC_SHARED(bytes); int* s = (int*)bytes; const int t = threadIdx.x;
    s[t] = t; SYNC; out[t] = s[127 - t];"""


def test_missing_syncthreads_shows():
    good = everywhere(REVERSE_IN_BLOCK.replace("SYNC", "__syncthreads()"), threads=128, shared=512)
    assert good == [list(range(127, -1, -1))] * 3
    bad = everywhere(REVERSE_IN_BLOCK.replace("SYNC", "__syncwarp()"), threads=128, shared=512)
    assert all(result != good[0] for result in bad)


def test_overwriting_what_another_warp_still_reads_shows():
    # the write after the second read needs a barrier before it, although all reads see written
    # memory
    body = """DYNAMIC_SHARED(bytes); int* s = (int*)bytes; const int t = threadIdx.x;
        s[t] = t; __syncthreads(); const int other = s[(t + 32) % 128]; SYNC; s[t] = -1; out[t] = other;"""
    expected = [(t + 32) % 128 for t in range(128)]
    assert everywhere(body.replace("SYNC", "__syncthreads()"), threads=128,
                      shared=512) == [expected] * 3
    assert any(r != expected for r in everywhere(body.replace("SYNC", ""), threads=128, shared=512))


def test_missing_syncwarp_shows():
    body = """DYNAMIC_SHARED(bytes); int* s = (int*)bytes; const int t = threadIdx.x;
        s[t] = t; SYNC; out[t] = s[t ^ 1];"""
    good = everywhere(body.replace("SYNC", "__syncwarp()"), shared=128)
    assert good == [[t ^ 1 for t in range(32)]] * 3
    assert all(r != good[0] for r in everywhere(body.replace("SYNC", ""), shared=128))


def test_dependence_on_block_order_shows():
    body = "if (blockIdx.x == 0) out[1] = 5; else out[0] = out[1];"
    assert len({tuple(r) for r in everywhere(body, threads=1, grid=(2, 1))}) > 1


@pytest.mark.parametrize("body, message", [
    ("bytes[64] = 1;", r"past the end of shared memory: byte 64 of 64"),
    ("if (threadIdx.x == 3) ((int*)bytes)[16 + 5] = 1;",
     r"past the end of shared memory: byte 84 of 64"),
    ("bytes[-1] = 1;", r"before the start of shared memory: byte -1"),
])
def test_write_outside_shared_memory(driver, body, message):
    with pytest.raises(EmulationError, match=message):
        launch(driver, "DYNAMIC_SHARED(bytes); " + body, shared=64)


def test_shared_memory_is_poisoned_in_each_block(driver):
    out = launch(driver,
                 "DYNAMIC_SHARED(bytes); int* s = (int*)bytes; out[blockIdx.x] = s[0]; s[0] = 5;",
                 threads=1, shared=4, grid=(3, 1))
    assert out.tolist() == [-1, -1, -1]


DIVERGENT = [
    ("if (threadIdx.x < 16) out[0] = __shfl_xor_sync(FULL_WARP, 1, 1);", 32,
     "threads 16-31: exited"),
    ("if (threadIdx.x == 4) return; __syncwarp();", 32, "threads 4-4: exited"),
    ("if (threadIdx.x < 16) __syncwarp(); else __ballot_sync(FULL_WARP, 1);", 32,
     "at __ballot_sync"),
    ("if (threadIdx.x < 16)\n__syncwarp();\nelse\n__syncwarp();", 32,
     r"threads 16-31: at __syncwarp"),
    ("if (threadIdx.x < 16) __syncwarp(0x1ffffu); else __syncwarp(0xffff0000u);", 32,
     "mask 0001ffff"),
    ("if (threadIdx.x < 32) __syncthreads(); else __syncwarp();", 64, "__syncthreads"),
    ("if (threadIdx.x >= 32) return; __syncthreads();", 64, "threads 32-63: exited"),
    ("if (threadIdx.x == 0) __syncthreads(); else __shfl_sync(FULL_WARP, 1, 0);", 32,
     "threads 1-31: at __shfl_sync"),
    ("__syncwarp(threadIdx.x == 5 ? 1u : FULL_WARP);", 32, "not in the mask"),
    ("__syncwarp();", 40, "beyond the end of the block"),
    ("out[0] = __shfl_sync(1u << threadIdx.x, 1, (threadIdx.x + 1) % 32);", 32, "does not name"),
    ("out[0] = __shfl_sync(FULL_WARP, 1, 0, 12);", 32, "not a power of two"),
    ("if (threadIdx.x == 9) __trap();", 32, r"thread 9: __trap"),
]


@pytest.mark.parametrize("body, threads, message", DIVERGENT)
def test_divergence_is_an_error(driver, body, threads, message):
    with pytest.raises(EmulationError, match=message):
        launch(driver, body, threads=threads)
    # the library goes on working after an abandoned block
    with pytest.raises(EmulationError, match=message):
        launch(driver, body, threads=threads)


def test_errors_name_kernel_block_and_line():
    with pytest.raises(EmulationError, match=r"text\.cu: k: block \(2,1\): .*\[text\.cu:5\]"):
        launch(EmulatedDriver(), "\n\nif (blockIdx.x == 2 && blockIdx.y == 1) __trap();",
               grid=(3, 2))


@pytest.mark.parametrize("access", ["*(float4*)((float*)out + 1) = make_float4(0, 0, 0, 0);",
                                    "float v[4]; load_pack<float, 4>((float*)out + 2, v); out[0] = "
                                    "v[1];",
                                    "float v[8] = {}; store_pack<f16, 8>((f16*)out + 4, v);",
                                    "*(i64*)(out + 1) = 5;"])
def test_misaligned_access_is_an_error(driver, access):
    with pytest.raises(EmulationError, match="misaligned access"):
        launch(driver, access, threads=1, size=16)


def test_too_much_local_memory_is_an_error():
    body = ("volatile char big[64 * 1024]; for (int i = 0; i < sizeof(big); ++i) big[i] = 1; "
            "out[0] = big[7];")
    with pytest.raises(EmulationError, match="local memory"):
        launch(EmulatedDriver(), body, threads=1)


def test_guarded_tensors():
    kernel = build(EmulatedDriver(), "out[i] = 3;", "int* out, int i")
    inside = guarded(torch.arange(6).int().view(2, 3))
    kernel((1, 1), 1, 0, (inside.tensor.data_ptr(), np.int32(5)))
    inside.check()
    assert inside.tensor.tolist() == [[0, 1, 2], [3, 4, 3]]
    for index, byte in ((6, 24), (-1, -4), (200, 800)):
        outside = guarded(torch.zeros(2, 3, dtype=torch.int32))
        kernel((1, 1), 1, 0, (outside.tensor.data_ptr(), np.int32(index)))
        with pytest.raises(AssertionError, match=f"first is at byte {byte} of 24"):
            outside.check()
    odd = guarded(torch.zeros(3, dtype=torch.uint8))
    odd.check()
    assert guarded(torch.zeros(0)).tensor.shape == (0,)


# ---- arguments and launches ----

@pytest.mark.parametrize("args, message", [
    ((0, np.int32(1), np.float32(1), np.int64(1)), "takes 5 arguments"),
    ((0.0, np.int32(1), np.float32(1), np.int64(1), np.bool_(1)),
     r"parameter 0 \('p'\) is a pointer"),
    ((np.int64(0), np.int32(1), np.float32(1), np.int64(1), np.bool_(1)),
     r"parameter 0 \('p'\) is a pointer"),
    ((0, 1, np.float32(1), np.int64(1), np.bool_(1)), r"parameter 1 \('n'\) is a 4-byte integer"),
    ((0, np.int64(1), np.float32(1), np.int64(1), np.bool_(1)), r"parameter 1 \('n'\).*int64"),
    ((0, np.int32(1), 1.0, np.int64(1), np.bool_(1)), r"parameter 2 \('x'\).*numpy scalar"),
    ((0, np.int32(1), np.float64(1), np.int64(1), np.bool_(1)), r"parameter 2 \('x'\).*float64"),
    ((0, np.int32(1), np.int32(1), np.int64(1), np.bool_(1)), r"parameter 2 \('x'\).*int32"),
    ((0, np.int32(1), np.float32(1), np.int32(1), np.bool_(1)),
     r"parameter 3 \('big'\) is a 8-byte integer"),
    ((0, np.int32(1), np.float32(1), np.int64(1), np.int32(1)),
     r"parameter 4 \('flag'\) is a 1-byte integer"),
])
def test_arguments_must_fit(args, message):
    kernel = build(EmulatedDriver(), "",
                   "const T* __restrict__ p, int n, const float x, u64 big, bool flag",
                   (("T", "float"),))
    kernel((1, 1), 32, 0, (0, np.int32(1), np.float32(1), np.uint64(1), np.bool_(True)))
    with pytest.raises(TypeError, match=message):
        kernel((1, 1), 32, 0, args)


def test_argument_values_arrive():
    out = torch.zeros(4, dtype=torch.float64)
    kernel = build(EmulatedDriver(),
                   "out[0] = a; out[1] = (double)b; out[2] = c; out[3] = d ? 7 : 8;",
                   "double* out, float a, i64 b, unsigned char c, bool d")
    kernel((1, 1), 1, 0,
           (out.data_ptr(), np.float32(-1.5), np.int64(-2**40), np.uint8(200), np.bool_(True)))
    assert out.tolist() == [-1.5, -2.0**40, 200.0, 7.0]


@pytest.mark.parametrize("grid, threads, shared",
                         [((1, 1), 129, 0), ((1, 1), 0, 0), ((1, 70000), 32, 0), ((1,), 32, 0),
                          ((1, 1), 32, 300000), ((-1, 1), 32, 0)])
def test_launches_that_a_gpu_refuses(grid, threads, shared):
    kernel = EmulatedDriver().load_text(BLOCK_SUM, (("BLOCK", "(64 * 2)"),))["block_sum"]
    with pytest.raises(ValueError, match="block_sum"):
        kernel(grid, threads, shared, (0, 0, np.int32(0)))


def test_empty_grid_runs_nothing():
    kernel = build(EmulatedDriver(), "__trap();")
    kernel((0, 1), 32, 0, (0,))
    with pytest.raises(EmulationError):
        kernel((1, 1), 32, 0, (0,))


def test_compile_errors_name_the_line_and_the_definitions():
    with pytest.raises(CompileError, match=r"(?s)\('WRONG', 'nothing'\).*text\.cu:3:.*nothing"):
        EmulatedDriver().load_text(
            '\n#include "common.cuh"\nextern "C" __global__ void k() { WRONG x; }',
                                   (("WRONG", "nothing"),))
    with pytest.raises(CompileError, match="all_shared_memory_is_dynamic"):
        build(EmulatedDriver(), "__shared__ int s[4];")


def test_unknown_entry_and_family():
    driver = EmulatedDriver()
    with pytest.raises(FileNotFoundError, match="no_such_family"):
        driver.kernel("no_such_family", "k", ())
    with pytest.raises(ValueError, match="sideways"):
        EmulatedDriver(order="sideways")


def test_digest_depends_on_text_and_definitions():
    sets = [("t", ()), ("u", ()), ("t", (("A", "1"),)), ("t", (("A", "11"),)),
            ("t", (("A1", "1"),)), ("t", (("A", "1"), ("B", "2"))), ("t", (("A", "1B=2"),))]
    assert len({digest(*pair) for pair in sets}) == len(sets)
    assert digest("t", (("A", "1"),)) == digest("t", (("A", "1"),))
