// Products of int8 rows with an int8 matrix on tensor cores: y[r, n] = x_scale[r] w_scale[n] sum_k
// x[r, k] w[n, k] (+ bias[n]).
//
// x [rows, STRIDE] and w [N, STRIDE] are rows in the format of cuda/int8/quantize.py, so both lie along
// k and are padded with zeros. Sums are whole numbers, exact; then fp32. With OUT_INT8 the result
// is such rows itself: a warp has all N columns of its 16 rows. With FULL it is written in fp32 as
// well.
//
// A warp takes 16 rows and NT tiles of 8 columns. Lanes load 16 bytes of a row of x and of w at the
// same places: which k goes to which step of the product does not matter as long as it is the same
// for both.
#include "int8_rows.cuh"
#include "mma.cuh"

#define WARPS 4
#define COLUMNS (8 * NT)

__device__ __forceinline__ uint4 load_bytes(const signed char* rows, int row, int at) {
    if (STRIDE % 64 != 0 && at >= STRIDE) return make_uint4(0u, 0u, 0u, 0u);
    return __ldg(reinterpret_cast<const uint4*>(rows + (u64)row * STRIDE + at));
}

// A lane's part of the product: acc[t][e] as in mma.cuh. Rows and columns beyond the last are those
// of the last.
__device__ __forceinline__ void multiply_rows(int first, int rows, int column, const signed char* x,
                                              const signed char* w, int (&acc)[NT][4]) {
    const int g = (threadIdx.x & 31) / 4, c = threadIdx.x & 3;
    const int upper = min(first + g, rows - 1), lower = min(first + g + 8, rows - 1);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[t][e] = 0;
    for (int k = 16 * c; k - 16 * c < STRIDE; k += 64) {
        const uint4 a = load_bytes(x, upper, k), b = load_bytes(x, lower, k);
        const u32 left[4] = {a.x, b.x, a.y, b.y}, right[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const uint4 m = load_bytes(w, min(column + 8 * t + g, N - 1), k);
            const u32 low[2] = {m.x, m.y}, high[2] = {m.z, m.w};
            multiply_int8(acc[t], left, low);
            multiply_int8(acc[t], right, high);
        }
    }
}

__device__ __forceinline__ float scaled(int sum, float x_scale, const float* w_scale,
                                        const float* bias, int n) {
    if (n >= N) return 0.f;
    const float product = __fmul_rn((float)sum, __fmul_rn(x_scale, w_scale[n]));
    return bias ? __fadd_rn(product, bias[n]) : product;
}

// Columns n and n + 1 of a row, of those that there are.
template <typename T> __device__ __forceinline__ void store_two(T* out, int row, int rows, int n,
                                                                const float (&v)[2]) {
    if (row >= rows || n >= N) return;
    T* p = out + (u64)row * N + n;
    if (N % 2 == 0) {
        store_pack<T, 2>(p, v);
    } else {
        p[0] = from_float<T>(v[0]);
        if (n + 1 < N) p[1] = from_float<T>(v[1]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
product(int rows, const signed char* __restrict__ x, const float* __restrict__ x_scale,
        const signed char* __restrict__ w, const float* __restrict__ w_scale,
        const float* __restrict__ bias,
#if OUT_INT8
        signed char* __restrict__ out, float* __restrict__ out_scale, int* __restrict__ flag,
        float* __restrict__ full) {
#else
        OUT_T* __restrict__ out) {
#endif
    const int first = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 16, column = blockIdx.y * COLUMNS;
    if (first >= rows) return;
    const int g = (threadIdx.x & 31) / 4, c = threadIdx.x & 3;
    int acc[NT][4];
    multiply_rows(first, rows, column, x, w, acc);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + g + 8 * half;
        const float own = row < rows ? x_scale[row] : 0.f;
#if OUT_INT8
        float v[NT][2];
        u32 top = 0u;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                v[t][i] = scaled(acc[t][2 * half + i], own, w_scale, bias, 8 * t + 2 * c + i);
                top = max(top, magnitude(v[t][i]));
            }
#if FULL
#pragma unroll
        for (int t = 0; t < NT; ++t) store_two<float>(full, row, rows, 8 * t + 2 * c, v[t]);
#endif
        top = max(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = max(top, __shfl_xor_sync(FULL_WARP, top, 2));
        const float inverse = settle(row, rows, c, top, out_scale, flag);
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const u32 low = inverse != 0.f ? nearest_byte(v[t][0], inverse) : 0u;
            const u32 high = inverse != 0.f ? nearest_byte(v[t][1], inverse) : 0u;
            if (row < rows && 8 * t < OUT_STRIDE)
                *reinterpret_cast<u16*>(out + (u64)row * OUT_STRIDE + 8 * t + 2 * c) =
                    (u16)__byte_perm(low, high, 0x0040);
        }
#else
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const int n = column + 8 * t + 2 * c;
            const float v[2] = {scaled(acc[t][2 * half], own, w_scale, bias, n),
                                scaled(acc[t][2 * half + 1], own, w_scale, bias, n + 1)};
            store_two<OUT_T>(out, row, rows, n, v);
        }
#endif
    }
}
