// What the kernels share that are written for messages of users (cuda/messages/message_text.py).
//
// A message is an expression of rows at the source, the destination and the edge. Each kernel goes
// over the edges of a row as all others do, and computes the expression, and what reaches its inputs
// of a gradient, in registers. Inputs may have a number for each channel ("row"), for each head, or
// one for all channels. The gradients of the last two are sums over channels.
#pragma once
#include "extrema.cuh"
#include "pointwise.cuh"
#include "walk.cuh"

// How many edges of a slot are in flight of which each brings so many rows.
#define IN_FLIGHT_OF(rows) (PACKS * VEC * (rows) > 8 ? 1 : PACKS * VEC * (rows) > 4 ? 2 : 4)

// Over all numbers of a row that a lane has: k is the pack, c the place in it.
#define EACH_CHANNEL \
    _Pragma("unroll") for (int k = 0; k < PACKS; ++k) \
        _Pragma("unroll") for (int c = 0; c < VEC; ++c)

#define GRAPH \
    const OFF_T *__restrict__ indptr, const int *__restrict__ other, \
        const OFF_T *__restrict__ place, int rows, const int *__restrict__ counters, \
        const int2 *__restrict__ chunks, int chunk_edges, int chunk_slots

#define MERGE const int *__restrict__ counters, const int4 *__restrict__ heavy

typedef float Heads[KH];

// ---- inputs that have no number of their own for each channel
// ------------------------------------------------------------------------

__device__ __forceinline__ void load_heads(const Lanes& at, const float* base, u64 row, bool on,
                                           Heads& r) {
#pragma unroll
    for (int h = 0; h < KH; ++h)
        r[h] = on && at.has(h) ? __ldg(base + row * (u64)H + at.head(h)) : 0.f;
}

__device__ __forceinline__ float load_one(const float* base, u64 row, bool on) {
    return on ? __ldg(base + row) : 0.f;
}

__device__ __forceinline__ void clear_heads(Heads& r) {
#pragma unroll
    for (int h = 0; h < KH; ++h) r[h] = 0.f;
}

// Sums over the channels of a head, or over those of a tile of the row, which are in several lanes.
__device__ __forceinline__ void sum_channels(Heads& r) {
#pragma unroll
    for (int h = 0; h < KH; ++h) r[h] = lane_sum<LH>(r[h]);
}
__device__ __forceinline__ void sum_channels(float& r) { r = lane_sum<ROW_LANES>(r); }

// Adds up what the slots of a warp have; every lane gets the sum.
__device__ __forceinline__ void sum_slots(float& r) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1) r += __shfl_xor_sync(FULL_WARP, r, w);
}
__device__ __forceinline__ void sum_slots(Heads& r) {
#pragma unroll
    for (int h = 0; h < KH; ++h) sum_slots(r[h]);
}

// Stores what `sum_channels` left in every lane: [rows, H], or [rows, tiles].
__device__ __forceinline__ void store(const Lanes& at, float* base, u64 row, const Heads& r) {
    if (at.lh != 0) return;
#pragma unroll
    for (int h = 0; h < KH; ++h)
        if (at.has(h)) base[row * (u64)H + at.head(h)] = r[h];
}
__device__ __forceinline__ void store(const Lanes& at, float* base, u64 row, float r) {
    if (at.lane % ROW_LANES == 0) base[row * (u64)gridDim.y + blockIdx.y] = r;
}
__device__ __forceinline__ void store(const Lanes& at, float* base, u64 row, const Row& r) {
    store_row(at, base, row, r);
}
__device__ __forceinline__ void sum_channels(const Row&) {}

// The sum over an item's edges: a row's result, or a chunk's part of it.
template <class Sum>
__device__ __forceinline__ void store_total(const Lanes& at, const Item& it, Sum& sum, float* out,
                                            float* part) {
    sum_slots(sum);
    sum_channels(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) store(at, out, it.row, sum);
    else store(at, part, it.chunk, sum);
}

// A row of a result lies `stride` numbers behind the one before.
__device__ __forceinline__ void store_total(const Lanes& at, const Item& it, Row& sum, float* out,
                                            int stride, float* part) {
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) store_row(at, out + stride * (u64)it.row, 0, sum);
    else store_row(at, part, it.chunk, sum);
}

// Sums the chunks of a split row, of rows or of `width` numbers each.
__device__ __forceinline__ void merge_rows(const Lanes& at, const int4& row, const float* part,
                                           float* out) {
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) store_row(at, out, row.x, sum);
}
__device__ __forceinline__ void merge_rows(const Lanes& at, const int4& row, const float* part,
                                           float* out, int stride) {
    merge_rows(at, make_int4(0, row.y, row.z, row.w), part, out + stride * (u64)row.x);
}
__device__ __forceinline__ void merge_numbers(const Lanes& at, const int4& row, const float* part,
                                              float* out, int width) {
    if (blockIdx.y != 0) return;
    for (int n = at.lane; n < width; n += 32) {
        float sum = 0.f;
#pragma unroll 8
        for (int i = 0; i < row.z; ++i) sum += part[(u64)(row.y + i) * width + n];
        out[(u64)row.x * width + n] = sum;
    }
}

// `walk` in steps that all slots take together, so that `use` may exchange numbers between lanes, and
// all loads of a step are in flight together.
template <class Edge, int Ahead, class Load, class Use>
__device__ __forceinline__ void walk_together(const Lanes& at, const Item& it, const Load& load,
                                              const Use& use) {
    for (OFF_T first = it.begin; first < it.end; first += SLOTS * Ahead) {
        Edge e[Ahead];
#pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const OFF_T position = first + u * SLOTS + at.slot;
            load(e[u], position, position < it.end);
        }
        __syncwarp();  // or the compiler would begin to use the first of these before it loads the last
#pragma unroll
        for (int u = 0; u < Ahead; ++u) {
            const OFF_T position = first + u * SLOTS + at.slot;
            use(e[u], position, position < it.end);
        }
    }
    __syncwarp();
}

// What a message has of the gradient of its row's mean.
__device__ __forceinline__ float share_of(const OFF_T* offsets, u64 row) {
    return 1.f / (float)(offsets[row + 1] - offsets[row]);
}

// Stores the sum of `count` messages, or their mean.
__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T count, int mean, Row& sum,
                                       float* out) {
    const float share = mean && count > 0 ? 1.f / (float)count : 1.f;
    EACH_CHANNEL sum[k][c] *= share;
    store_row(at, out, row, sum);
}

// ---- extrema
// ------------------------------------------------------------------------

// The largest or smallest message of each channel, and how many messages are equal to it: numbers
// up to 2^24, as the host counts them.
struct Extremum { Row best, times; };

template <bool Largest> __device__ __forceinline__ void clear_extremum(Extremum& f) {
    EACH_CHANNEL f.best[k][c] = worst<Largest>();
    clear_row(f.times);
}

template <bool Largest> __device__ __forceinline__ void join_slots(Extremum& f) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1)
        EACH_CHANNEL {
            const float value = __shfl_xor_sync(FULL_WARP, f.best[k][c], w),
                times = __shfl_xor_sync(FULL_WARP, f.times[k][c], w);
            keep<Largest>(value, times, f.best[k][c], f.times[k][c]);
        }
}

// Joins the chunks of a split row: rows 2 i and 2 i + 1 of `part` are those of chunk i.
template <bool Largest>
__device__ __forceinline__ void join_chunks(const Lanes& at, const int4& row, const float* part,
                                            Extremum& f) {
    clear_extremum<Largest>(f);
    for (int i = at.slot; i < row.z; i += SLOTS) {
        Extremum one;
        load_row(at, part, 2 * (u64)(row.y + i), true, one.best);
        load_row(at, part, 2 * (u64)(row.y + i) + 1, true, one.times);
        EACH_CHANNEL keep<Largest>(one.best[k][c], one.times[k][c], f.best[k][c], f.times[k][c]);
    }
    __syncwarp();
    join_slots<Largest>(f);
}

// Stores a row's extremum, and among how many its gradient is shared unless `counts` is null. An
// extremum of 0 keeps a share for itself, as where results begin as zeros that take part; NaN makes
// all shares NaN.
__device__ __forceinline__ void finish(const Lanes& at, int row, Extremum& f, float* out,
                                       float* counts) {
    EACH_CHANNEL {
        f.best[k][c] = extremum_or_zero(f.best[k][c], f.times[k][c]);
        f.times[k][c] = f.best[k][c] != f.best[k][c] ? f.best[k][c]
            : f.times[k][c] + (f.best[k][c] == 0.f ? 1.f : 0.f);
    }
    store_row(at, out, row, f.best);
    if (counts) store_row(at, counts, row, f.times);
}

__device__ __forceinline__ void store_total(const Lanes& at, const Item& it, Extremum& f,
                                            float* out, float* counts, float* part) {
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        finish(at, it.row, f, out, counts);
        return;
    }
    store_row(at, part, 2 * (u64)it.chunk, f.best);
    store_row(at, part, 2 * (u64)it.chunk + 1, f.times);
}

// What reaches a message of the gradient that all extrema of its row get.
__device__ __forceinline__ float of_extremum(float message, float best, float share) {
    return message == best || best != best ? share : 0.f;
}
