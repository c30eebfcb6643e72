// out[block, c] = sum of x[r, c] over the rows r that fall to the block: the gradient of a bias. A
// second launch over the blocks' sums, by blocks that are one pack or a few wide, makes the total.
// The order of summation depends on the sizes alone, so results repeat.
//
// A block is 1 << shift packs of VEC columns wide and THREADS >> shift rows high; blockIdx.y walks
// wider rows.
#include "common.cuh"

#define THREADS 256
#define IN_FLIGHT 4

extern "C" __global__ void __launch_bounds__(THREADS)
column_sum(i64 rows, int columns, int shift, const ROW_T* __restrict__ x,
           float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    float* const sums = (float*)shared;  // [height][packs][VEC]
    const int packs = 1 << shift, height = THREADS >> shift;
    const int pack = threadIdx.x & (packs - 1), high = threadIdx.x >> shift;
    const int column = (blockIdx.y * packs + pack) * VEC;
    const i64 stride = (i64)gridDim.x * height;
    float sum[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = 0.f;
    if (column < columns) {
        const ROW_T* const base = x + column;
        i64 row = (i64)blockIdx.x * height + high;
        for (; row + (IN_FLIGHT - 1) * stride < rows; row += IN_FLIGHT * stride) {
            float part[IN_FLIGHT][VEC];
#pragma unroll
            for (int u = 0; u < IN_FLIGHT; ++u)
                load_pack<ROW_T, VEC>(base + (row + u * stride) * columns, part[u]);
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                sum[v] += (part[0][v] + part[1][v]) + (part[2][v] + part[3][v]);
        }
        for (; row < rows; row += stride) {
            float part[VEC];
            load_pack<ROW_T, VEC>(base + row * columns, part);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += part[v];
        }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) sums[threadIdx.x * VEC + v] = sum[v];
#pragma unroll 1
    for (int half = height / 2; half; half /= 2) {
        __syncthreads();
        if (high < half) {
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                sums[threadIdx.x * VEC + v] += sums[(threadIdx.x + half * packs) * VEC + v];
        }
    }
    if (high == 0 && column < columns) {
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            out[(u64)blockIdx.x * columns + column + v] = sums[threadIdx.x * VEC + v];
    }
}
