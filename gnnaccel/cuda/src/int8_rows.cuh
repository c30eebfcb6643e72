// The format of int8 rows (cuda/int8/quantize.py), for kernels that write it.
#pragma once
#include "common.cuh"

#define SMALLEST 1.5e-36f  // largest magnitudes below have denormal scales, which CuPy's flags flush
#define MAGIC 12582912.f   // 1.5 * 2^23: added to a small float it leaves the nearest integer in the low bits

// Compared as bits, magnitudes are in order and NaN is above infinity, so that one maximum finds
// both.
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The row's scale, written by one lane, and what to multiply its numbers by; 0 where they all
// become zero. `bits`: the largest magnitude of the row.
__device__ __forceinline__ float settle(i64 row, int rows, int lane, u32 bits, float* scale,
                                        int* flag) {
    const float top = __uint_as_float(bits);
    const bool bad = bits >= 0x7f800000u, plain = !bad && top >= SMALLEST;
    if (lane == 0 && row < rows) {
        scale[row] = plain ? top / 127.f : bad ? quiet_nan() : 0.f;
        if (bad && flag) *flag = 1;
    }
    return plain ? 127.f / top : 0.f;
}

// The low byte is x * inverse to nearest, in two's complement.
__device__ __forceinline__ u32 nearest_byte(float x,
                                            float inverse) { return __float_as_uint(fmaf(x, inverse,
                                                                                         MAGIC)); }
