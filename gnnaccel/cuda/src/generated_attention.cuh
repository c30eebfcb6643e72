// What the kernels share that are written for attention of users: messages that a softmax over the
// edges of a row weights (cuda/messages/attention_text.py).
//
// Forward has one pass over the edges of a row, with a running maximum and sum (Milakov and
// Gimelshein, "Online normalizer calculation for softmax"). For backward it leaves for each row and
// head what scores are taken relative to, and 1 / sum of their exponentials.
#pragma once
#include "generated.cuh"

// Once for each head that a lane has: k is the head's first pack, c its first place.
#define EACH_HEAD _Pragma("unroll") for (int k = 0, c = 0; k < PACKS; k += KV)

// Of the edges so far, for each head of a lane: the largest score, the sum of the exponentials
// relative to it, and the sum of messages that are weighted by these.
struct Attended {
    Heads top, sum;
    Row row;
};

__device__ __forceinline__ void clear_attended(Attended& f) {
#pragma unroll
    for (int h = 0; h < KH; ++h) f.top[h] = NEG_INF;
    clear_heads(f.sum);
    clear_row(f.row);
}

// One more edge: its weight, and what the earlier ones' is to be multiplied with. As with the host,
// NaN and inf make all weights of the row NaN.
__device__ __forceinline__ void weigh(const Heads& score, Attended& f, Heads& before,
                                      Heads& weight) {
#pragma unroll
    for (int h = 0; h < KH; ++h) {
        const float larger = fmaxf(f.top[h], score[h]), base = reference(larger);
        before[h] = exp_above(f.top[h], base);
        weight[h] = exp_above(score[h], base);
        f.top[h] = larger;
        f.sum[h] = fmaf(f.sum[h], before[h], weight[h]);
    }
}

// The largest of what the slots of a warp have; every lane gets it.
__device__ __forceinline__ void max_slots(Heads& r) {
#pragma unroll
    for (int h = 0; h < KH; ++h)
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1)
            r[h] = fmaxf(r[h], __shfl_xor_sync(FULL_WARP, r[h], w));
}

// Adds up what the slots of a warp have.
__device__ __forceinline__ void join_slots(Attended& f) {
    if (SLOTS == 1) return;
    Heads own;
#pragma unroll
    for (int h = 0; h < KH; ++h) own[h] = f.top[h];
    max_slots(f.top);
#pragma unroll
    for (int h = 0; h < KH; ++h) {
        const float factor = exp_above(own[h], reference(f.top[h]));
        f.sum[h] *= factor;
#pragma unroll
        for (int k = h * KV; k < (h + 1) * KV; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) f.row[k][c] *= factor;
    }
    sum_slots(f.sum);
    sum_slots(f.row);
}

// Adds up the chunks of a split row.
__device__ __forceinline__ void join_chunks(const Lanes& at, const int4& row, const float* part,
                                            const float* tops, const float* sums, Attended& f) {
    clear_attended(f);
#pragma unroll 8
    for (int i = at.slot; i < row.z; i += SLOTS) {
        Heads top;
        load_heads(at, tops, (u64)(row.y + i), true, top);
#pragma unroll
        for (int h = 0; h < KH; ++h) f.top[h] = fmaxf(f.top[h], top[h]);
    }
    __syncwarp();
    max_slots(f.top);
#pragma unroll 8
    for (int i = at.slot; i < row.z; i += SLOTS) {
        Heads top, sum;
        Row one;
        load_heads(at, tops, (u64)(row.y + i), true, top);
        load_heads(at, sums, (u64)(row.y + i), true, sum);
        load_row(at, part, (u64)(row.y + i), true, one);
#pragma unroll
        for (int h = 0; h < KH; ++h) {
            const float factor = exp_above(top[h], reference(f.top[h]));
            f.sum[h] = fmaf(factor, sum[h], f.sum[h]);
#pragma unroll
            for (int k = h * KV; k < (h + 1) * KV; ++k)
#pragma unroll
                for (int c = 0; c < VEC; ++c) f.row[k][c] = fmaf(factor, one[k][c], f.row[k][c]);
        }
    }
    __syncwarp();
    sum_slots(f.sum);
    sum_slots(f.row);
}

// Where results go. For backward, unless these are null: `kept` has the results once more, as users
// may change theirs in place; `bases` and `shares` have what scores are taken relative to, and 1 /
// sum of their exponentials.
struct Results { float *out, *kept, *bases, *shares; };

__device__ __forceinline__ void finish(const Lanes& at, int row, bool edges, Attended& f,
                                       const Results& to) {
    Heads share;
#pragma unroll
    for (int h = 0; h < KH; ++h) {
        share[h] = reciprocal(f.sum[h], edges);
        f.top[h] = reference(f.top[h]);
    }
    EACH_CHANNEL f.row[k][c] *= share[k / KV];
    store_row(at, to.out, row, f.row);
    if (!to.kept) return;
    store_row(at, to.kept, row, f.row);
    store(at, to.bases, row, f.top);
    store(at, to.shares, row, share);
}

__device__ __forceinline__ void store_total(const Lanes& at, const Item& it, Attended& f,
                                            const Results& to, float* part, float* part_tops,
                                            float* part_sums) {
    join_slots(f);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        finish(at, it.row, it.end > it.begin, f, to);
        return;
    }
    store_row(at, part, it.chunk, f.row);
    store(at, part_tops, it.chunk, f.top);
    store(at, part_sums, it.chunk, f.sum);
}

// Whether the lane is the one that adds what belongs to a head as such.
__device__ __forceinline__ bool leads(const Lanes& at, int kh) { return at.lh == 0 && at.has(kh); }
