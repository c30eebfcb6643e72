// Backward of out = y share + rest (1 - share), row by row with the share of the row's segment: the
// gradient of `rest`, and the sums over each segment's rows of <rest, grad>. See
// cuda/attention/blend_grad.py.
//
// A block has a contiguous range of the rows by segment, and leaves a sum for each segment in it:
// out[block, segment].
#include "common.cuh"

#define THREADS 256
#define PACKS (COLUMNS / VEC)

__device__ __forceinline__ float block_sum(float mine, float* shared) {
    mine = lane_sum<32>(mine);
    __syncthreads();  // the sums before have been read
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = mine;
    __syncthreads();
    float sum = 0.f;
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += shared[warp];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
blend_grad(const int* __restrict__ ptr, int segments, const int* __restrict__ order,
           const ROW_T* __restrict__ grad, const ROW_T* __restrict__ rest,
           const float* __restrict__ share, ROW_T* __restrict__ d_rest, float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    const i64 rows = __ldg(ptr + segments), begin = rows * blockIdx.x / gridDim.x,
        end = rows * (blockIdx.x + 1) / gridDim.x;
    for (int s = 0; s < segments; ++s) {
        const i64 from = __ldg(ptr + s), to = __ldg(ptr + s + 1);
        const i64 first = from > begin ? from : begin, stop = to < end ? to : end;
        const float other = 1.f - __ldg(share + s);
        float sum = 0.f;
#pragma unroll 4
        for (i64 i = first * PACKS + threadIdx.x; i < stop * PACKS; i += THREADS) {
            const i64 row = order ? __ldg(order + i / PACKS) : i / PACKS,
                at = row * COLUMNS + i % PACKS * VEC;
            float g[VEC], x[VEC];
            load_pack<ROW_T, VEC>(grad + at, g);
            load_pack<ROW_T, VEC>(rest + at, x);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                sum = fmaf(g[v], x[v], sum);
                g[v] *= other;
            }
            if (d_rest) store_pack<ROW_T, VEC>(d_rest + at, g);
        }
        if (first >= stop) continue;  // for the whole block
        sum = block_sum(sum, (float*)shared);
        if (threadIdx.x == 0) out[(i64)blockIdx.x * segments + s] = sum;
    }
}
