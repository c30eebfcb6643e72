// Inner products of node rows with one or two attention vectors, and their gradients.
//
//   dot:  a0[n, h] = <x[n, h, :], att0[h, :]>, and a1 with att1 when it is given; x is read once
//   for both. The vectors of two heads are `step` numbers apart, a multiple of VEC.
//   grad: partial[block, which, h, :] = sum over the block's nodes of d_a[n, h] x[n, h, :];
//   sum_blocks: their sum, as two arrays whose heads are `step` numbers apart.
#include "layout.cuh"

// The lane's share of all heads' vectors.
__device__ __forceinline__ void load_vectors(const Lanes& at, const float* att, int step, bool on,
                                             Row& r) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int kh = k / KV, kv = k % KV;
        if (on && at.owns(kh, kv)) {
            load_packs<float, VEC>(att + at.head(kh) * step + at.vec(kv) * VEC, r[k]);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) r[k][v] = 0.f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
dot(int rows, const ROW_T* __restrict__ x, const float* __restrict__ att0,
    const float* __restrict__ att1, int step, float* __restrict__ a0, float* __restrict__ a1) {
    const Lanes at;
    const long long row = ((long long)blockIdx.x * WARPS + (threadIdx.x >> 5)) * SLOTS + at.slot;
    const bool on = row < rows;
    Row v, p, q;
    load_row(at, x, (u64)row, on, v);
    load_vectors(at, att0, step, true, p);
    load_vectors(at, att1, step, att1 != nullptr, q);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        // Twofold, because a score's error becomes the relative error of its exponential; the time
        // goes into reading x anyway.
        Twofold s = {0.f, 0.f}, t = {0.f, 0.f};
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                add_product(s, v[kh * KV + kv][c], p[kh * KV + kv][c]);
                add_product(t, v[kh * KV + kv][c], q[kh * KV + kv][c]);
            }
        s = lane_sum<LH>(s);
        t = lane_sum<LH>(t);
        const int h = at.head(kh);
        if (on && at.lh == 0 && h < H) {
            a0[(u64)row * H + h] = s.hi + s.lo;
            if (att1) a1[(u64)row * H + h] = t.hi + t.lo;
        }
    }
}

// Grid-stride over the nodes: the number of partial sums is the grid's, not the graph's.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
grad(int rows, const ROW_T* __restrict__ x, const float* __restrict__ d0,
     const float* __restrict__ d1, float* __restrict__ partial) {
    DYNAMIC_SHARED(shared);
    const Lanes at;
    const int warp = threadIdx.x >> 5;
    Row s, t;
    clear_row(s);
    clear_row(t);
    const i64 stride = (i64)gridDim.x * WARPS * SLOTS;
    for (i64 base = ((i64)blockIdx.x * WARPS + warp) * SLOTS; base < rows; base += stride) {
        const long long row = base + at.slot;
        const bool on = row < rows;
        Row v;
        load_row(at, x, (u64)row, on, v);
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const int h = at.head(k / KV);
            const float a = on && h < H ? d0[(u64)row * H + h] : 0.f;
            const float b = on && h < H && d1 ? d1[(u64)row * H + h] : 0.f;
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                s[k][c] = fmaf(a, v[k][c], s[k][c]);
                t[k][c] = fmaf(b, v[k][c], t[k][c]);
            }
        }
    }
    sum_slots(s);
    sum_slots(t);
    // The warps add up in shared memory in a fixed order, so results repeat. [WARPS][2][HT*D]
    // floats.
    float* mine = (float*)shared + warp * 2 * HT * D;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (at.slot == 0 && at.owns(k / KV, k % KV)) {
            const int local = at.offset(k / KV, k % KV) - at.tile * D;
            store_pack<float, VEC>(mine + local, s[k]);
            store_pack<float, VEC>(mine + HT * D + local, t[k]);
        }
    __syncthreads();
    const int width = (H - at.tile < HT ? H - at.tile : HT) * D;
    for (int i = threadIdx.x; i < 2 * width; i += 32 * WARPS) {
        const int which = i / width, c = i % width;
        float sum = 0.f;
        for (int w = 0; w < WARPS; ++w) sum += ((const float*)shared)[(w * 2 + which) * HT * D + c];
        partial[((u64)blockIdx.x * 2 + which) * (H * D) + at.tile * D + c] = sum;
    }
}

// out[c] = sum over the blocks of partial[block, c], in a fixed order: 32 columns x 8 groups of
// blocks per block of threads. The first half of the columns goes to `first`, the rest to `second`,
// unless that is null.
extern "C" __global__ void __launch_bounds__(256)
sum_blocks(int blocks, int columns, const float* __restrict__ partial, float* __restrict__ first,
           float* __restrict__ second, int step) {
    DYNAMIC_SHARED(shared);
    float* sums = (float*)shared;  // [8][32]
    const int c = blockIdx.x * 32 + (threadIdx.x & 31), group = threadIdx.x >> 5;
    float sum = 0.f;
    if (c < columns) {
#pragma unroll 4
        for (int b = group; b < blocks; b += 8) sum += partial[(u64)b * columns + c];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && c < columns) {
        for (int g = 1; g < 8; ++g) sum += sums[g * 32 + threadIdx.x];
        const int i = c % (H * D);
        float* out = c < H * D ? first : second;
        if (out) out[i / D * step + i % D] = sum;
    }
}
