// Putting the chunks of split rows together, for every attention family: one warp per split row and
// tile of heads.
//
// Two mappings of lanes meet here, as everywhere in these kernels: "edge-parallel", where lane % HT
// is the head, and "feature-parallel" (layout.cuh). Per-head numbers cross between them through the
// warp's Scratch.
#pragma once
#include "items.cuh"

#define TILE 32
#define EDGES_PER_STEP (32 / HT)

struct Scratch {
    float *weight, *factor, *extra;  // [TILE][HT], [HT], [TILE][HT]; one of each per warp
    float2* pair;                    // [TILE][HT], in the place of weight and extra

    __device__ __forceinline__ Scratch(unsigned char* shared) {
        float* base = (float*)shared + (threadIdx.x >> 5) * (2 * TILE * HT + HT + HT % 2);
        weight = base;
        pair = (float2*)base;
        extra = base + TILE * HT;
        factor = base + 2 * TILE * HT;
    }
};

// Sums over the lanes that work on the same head in phase 1.
__device__ __forceinline__ float sum_same_head(float x) {
#pragma unroll
    for (int w = HT; w < 32; w <<= 1) x += __shfl_xor_sync(FULL_WARP, x, w);
    return x;
}

__device__ __forceinline__ float max_same_head(float x) {
#pragma unroll
    for (int w = HT; w < 32; w <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, w));
    return x;
}

__device__ __forceinline__ float leaky(float x, float slope) { return x > 0.f ? x : slope * x; }

// exp(s - base). The difference is taken first: between scores that matter to each other it is
// exact, or nearly so, however large they are, while scores kept times log2(e) would each bring a
// rounding of their own size. `__fsub_rn` keeps a product that made the score from being fused into
// the difference: forward and backward are to see the same score.
__device__ __forceinline__ float exp_above(float s,
                                           float base) { return exp2f(__fsub_rn(s, base) * LOG2E); }

// A lane's part of an inner product, in chains of four terms that come together in pairs: a single
// chain of 16 would round the sum more often, and each step would wait for the one before.
struct Chains {
    float s[(KV * VEC + 3) / 4];

    __device__ __forceinline__ Chains() {
#pragma unroll
        for (int i = 0; i < (KV * VEC + 3) / 4; ++i) s[i] = 0.f;
    }
    __device__ __forceinline__ void add(int term, float a,
                                        float b) { s[term / 4] = fmaf(a, b, s[term / 4]); }
    __device__ __forceinline__ float sum() {
#pragma unroll
        for (int w = 1; w < (KV * VEC + 3) / 4; w *= 2)
#pragma unroll
            for (int i = 0; i + w < (KV * VEC + 3) / 4; i += 2 * w) s[i] += s[i + w];
        return s[0];
    }
};

__device__ __forceinline__ float partial_dot(const Row& a, const Row& b, int kh) {
    Chains s;
#pragma unroll
    for (int i = 0; i < KV; ++i)
#pragma unroll
        for (int x = 0; x < VEC; ++x) s.add(i * VEC + x, a[kh * KV + i][x], b[kh * KV + i][x]);
    return s.sum();
}

// The inner product over head kh, twofold: for what is computed once a row.
__device__ __forceinline__ Twofold inner(const Row& a, const Row& b, int kh) {
    Twofold s = {0.f, 0.f};
#pragma unroll
    for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
        for (int x = 0; x < VEC; ++x) add_product(s, a[k][x], b[k][x]);
    return lane_sum<LH>(s);
}

// Running maximum and sum of a softmax. The sum is kept in two parts, over negative and positive z,
// because additive attention's backward needs both shares and a small one must not be had as a
// difference; others use `minus` alone.
struct Softmax {
    float m, minus, plus;

    __device__ __forceinline__ float sum() const { return minus + plus; }
};

// Chunks of one row in flight: a hub has a hundred, which one warp reads, so what it waits for is
// latency.
#define IN_FLIGHT (PACKS * VEC <= 4 ? 2 * UNROLL : UNROLL)

// Sums the chunks of one split row with the factors exp(m_chunk - m), m from `merge_stats`.
__device__ __forceinline__ void gather_chunks(const Lanes& at, int first, int count,
                                              const Scratch& sh, const float* stats,
                                              const float* part, Row& total) {
    clear_row(total);
    for (int c = 0; c < count; c += SLOTS * IN_FLIGHT) {
        Row v[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const int i = c + u * SLOTS + at.slot;
            load_row(at, part, (u64)(first + i), i < count, v[u]);
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const int i = c + u * SLOTS + at.slot;
#pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                const int h = at.head(k / KV);
                float f = 1.f;
                if (i < count && h < H)
                    f = exp_above(stats[(u64)(first + i) * 3 * H + h],
                                  sh.extra[(k / KV) * HL + at.hl]);
#pragma unroll
                for (int x = 0; x < VEC; ++x) total[k][x] = fmaf(f, v[u][k][x], total[k][x]);
            }
        }
    }
    sum_slots(total);
}

// The statistics of a split row from those of its chunks. Leaves the maximum per head in sh.extra.
__device__ __forceinline__ Softmax merge_stats(const Lanes& at, int first, int count, int head,
                                               bool on, const Scratch& sh, const float* stats) {
    Softmax run = {NEG_INF, 0.f, 0.f};
    const int group = at.lane / HT, h = at.lane % HT;
    if (on)
#pragma unroll 8
        for (int c = group; c < count; c += 32 / HT)
            run.m = fmaxf(run.m, stats[(u64)(first + c) * 3 * H + head]);
    run.m = max_same_head(run.m);
    if (on)
#pragma unroll 8
        for (int c = group; c < count; c += 32 / HT) {
            const float* s = stats + (u64)(first + c) * 3 * H + head;
            const float f = exp_above(s[0], reference(run.m));
            run.minus += f * s[H];
            run.plus += f * s[2 * H];
        }
    run.minus = sum_same_head(run.minus);
    run.plus = sum_same_head(run.plus);
    if (at.lane < HT) sh.extra[h] = reference(run.m);
    __syncwarp();
    return run;
}

// The plain sum of a split row's partial rows.
__device__ __forceinline__ void add_chunks(const Lanes& at, int first, int count, const float* part,
                                           Row& total) {
    clear_row(total);
    for (int c = 0; c < count; c += SLOTS * IN_FLIGHT) {
        Row v[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const int i = c + u * SLOTS + at.slot;
            load_row(at, part, (u64)(first + i), i < count, v[u]);
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int x = 0; x < VEC; ++x) total[k][x] += v[u][k][x];
    }
    sum_slots(total);
}

// The plain sum over an item: a row's result, or a chunk's part of it.
template <typename T>
__device__ __forceinline__ void store_sum(const Lanes& at, const Item& it, Row& sum, T* out,
                                          float* part) {
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) store_row(at, out, it.row, sum);
    else store_row(at, part, it.chunk, sum);
}
