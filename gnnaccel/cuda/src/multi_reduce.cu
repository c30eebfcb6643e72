// Several reduces of each row's messages in one pass.
//
//   forward, merge:  out[r, AT, h, :] = that reduce over the messages of r's edges; for backward
//   the number of equal extrema, and
//                    the mean where moments are asked for
//
// Rows without edges are zero throughout. NaN is larger and smaller than everything. Moments are of
// the distance to the row's first message, so that a mean far from zero costs the variance no
// digits.
#include "extrema.cuh"
#include "multi_reduce.cuh"

// What a channel's messages have come to: their sum, their first two moments about the shift, the
// extrema and how often.
struct Channel {
    float sum, first, second, top, bottom;
    int tops, bottoms;
};

typedef Channel Found[PACKS][VEC];

__device__ __forceinline__ void clear_found(Found& f) {
    const Channel none = {0.f, 0.f, 0.f, NEG_INF, infinity(), 0, 0};
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) f[k][c] = none;
}

__device__ __forceinline__ void add_message(Channel& a, float m, float shift) {
    if (TOTAL) a.sum += m;
    if (MOMENTS) {
        const float distance = m - shift;
        a.first += distance;
        a.second = fmaf(distance, distance, a.second);
    }
    if (TOP) keep<true>(m, 1, a.top, a.tops);
    if (BOTTOM) keep<false>(m, 1, a.bottom, a.bottoms);
}

__device__ __forceinline__ void join(Channel& a, const Channel& b) {
    a.sum += b.sum;
    a.first += b.first;
    a.second += b.second;
    keep<true>(b.top, b.tops, a.top, a.tops);
    keep<false>(b.bottom, b.bottoms, a.bottom, a.bottoms);
}

__device__ __forceinline__ void join_slots(Found& f) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                Channel& a = f[k][c];
                Channel b = {0.f, 0.f, 0.f, NEG_INF, infinity(), 0, 0};
                if (TOTAL) b.sum = __shfl_xor_sync(FULL_WARP, a.sum, w);
                if (MOMENTS) b.first = __shfl_xor_sync(FULL_WARP, a.first, w);
                if (MOMENTS) b.second = __shfl_xor_sync(FULL_WARP, a.second, w);
                if (TOP) b.top = __shfl_xor_sync(FULL_WARP, a.top, w);
                if (TOP) b.tops = __shfl_xor_sync(FULL_WARP, a.tops, w);
                if (BOTTOM) b.bottom = __shfl_xor_sync(FULL_WARP, a.bottom, w);
                if (BOTTOM) b.bottoms = __shfl_xor_sync(FULL_WARP, a.bottoms, w);
                join(a, b);
            }
}

// The first message of a row that has one.
__device__ __forceinline__ void load_shift(const Lanes& at, const Graph& g, int row, bool some,
                                           Row& shift) {
    if (!MOMENTS) return;
    const OFF_T position = g.indptr[row];
    load_row(at, g.x, some ? (u64)g.other[position] : 0, some, shift);
    if (WEIGHT == NO_WEIGHT || !some) return;
    const u64 place = (u64)g.place[position];
    if (WEIGHT == ADDED_ROW) {
        Row added;
        load_added(at, g, place, true, added);
        add_rounded(shift, added);
        return;
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int head = at.head(k / KV);
        const float w = WEIGHT == EDGE_WEIGHT ? g.weight[place] : head < H
            ? g.weight[place * H + head] : 0.f;
#pragma unroll
        for (int c = 0; c < VEC; ++c) shift[k][c] = message(shift[k][c], w);
    }
}

__device__ __forceinline__ void fold(const Lanes& at, const Graph& g, const Turn& t, int first,
                                     const Row& shift, Found& f) {
    Row v[UNROLL], added[WEIGHT == ADDED_ROW ? UNROLL : 1];
    float w[UNROLL][KH];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        load_row(at, g.x, t.row(e), e < t.edges, v[u]);
        if (WEIGHT == ADDED_ROW) load_added(at, g, t.line(e), e < t.edges, added[u]);
        t.weights(at, g, e, e < t.edges, w[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (WEIGHT == ADDED_ROW) add_rounded(v[u], added[u]);
        if (first + u * SLOTS + at.slot < t.edges)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int c = 0; c < VEC; ++c)
                    add_message(f[k][c], message(v[u][k][c], w[u][k / KV]),
                                MOMENTS ? shift[k][c] : 0.f);
    }
}

struct Results {
    ROW_T* out;
    int* counts;   // of equal extrema, or null where no gradient is wanted
    float* mean;   // of rows whose moments are wanted, or null
};

// Channels are taken one reduce after the other: each writes whole packs.
template <class Value>
__device__ __forceinline__ void put(const Lanes& at, ROW_T* out, u64 row, const Found& f,
                                    const Value& value) {
    Row r;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) r[k][c] = value(f[k][c]);
    store_row(at, out, row, r);
}

struct Sum { __device__ __forceinline__ float operator()(const Channel& a) const { return a.sum;
                                                                                   } };
struct Mean {
    float edges;
    __device__ __forceinline__ float operator()(const Channel& a) const { return a.sum / edges; }
};
struct Variance {
    float edges;
    __device__ __forceinline__ float operator()(const Channel& a) const {
        const float mean = a.first / edges, found = fmaf(-mean, mean, a.second / edges);
        return found < 0.f ? 0.f : found;
    }
};
struct Deviation {
    float edges;
    __device__ __forceinline__ float operator()(const Channel& a) const {
        const Variance variance = {edges};
        const float found = variance(a);
        return found <= SMALLEST_VARIANCE ? 0.f : sqrtf(found);
    }
};
struct Top { __device__ __forceinline__ float operator()(const Channel& a) const { return extremum_or_zero(a.top, a.tops); } };
struct Bottom {
    __device__ __forceinline__ float operator()(const Channel& a) const { return extremum_or_zero(a.bottom, a.bottoms); }
};

__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T degree, const Found& f,
                                       const Row& shift, const Results& to) {
    const float edges = degree > 0 ? (float)degree : 1.f;
    const u64 base = (u64)row * REDUCES;
    const Mean mean = {edges};
    const Variance variance = {edges};
    const Deviation deviation = {edges};
    if (SUM_AT >= 0) put(at, to.out, base + SUM_AT, f, Sum());
    if (MEAN_AT >= 0) put(at, to.out, base + MEAN_AT, f, mean);
    if (VAR_AT >= 0) put(at, to.out, base + VAR_AT, f, variance);
    if (STD_AT >= 0) put(at, to.out, base + STD_AT, f, deviation);
    if (TOP) put(at, to.out, base + MAX_AT, f, Top());
    if (BOTTOM) put(at, to.out, base + MIN_AT, f, Bottom());
    if (MOMENTS && to.mean) {
        Row r;
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c)
                r[k][c] = degree > 0 ? shift[k][c] + f[k][c].first / edges : 0.f;
        store_row(at, to.mean, row, r);
    }
    if (COUNTS && to.counts) {
        int* p = to.counts + (u64)row * (COUNTS * H * D);
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            if (at.owns(k / KV, k % KV))
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    const int offset = at.offset(k / KV, k % KV) + c;
                    if (TOP) p[offset] = f[k][c].tops;
                    if (BOTTOM) p[(COUNTS - 1) * H * D + offset] = f[k][c].bottoms;
                }
    }
}

// Partial results of chunk i: row PARTS i + n of `part` is the n-th of them; counts lie there as
// integers.
template <bool Store> __device__ __forceinline__ void move(float* part, u64 from, Channel& a) {
    float* p = part + from;
    int* q = (int*)p;
    int n = 0;
    if (TOTAL) {
        if (Store) p[n] = a.sum; else a.sum = p[n];
        n += H * D;
    }
    if (MOMENTS) {
        if (Store) p[n] = a.first; else a.first = p[n];
        n += H * D;
        if (Store) p[n] = a.second; else a.second = p[n];
        n += H * D;
    }
    if (TOP) {
        if (Store) p[n] = a.top; else a.top = p[n];
        n += H * D;
        if (Store) q[n] = a.tops; else a.tops = q[n];
        n += H * D;
    }
    if (BOTTOM) {
        if (Store) p[n] = a.bottom; else a.bottom = p[n];
        n += H * D;
        if (Store) q[n] = a.bottoms; else a.bottoms = q[n];
    }
}

__device__ __forceinline__ u64 part_at(const Lanes& at, int chunk, int k, int c) {
    return (u64)chunk * (PARTS * H * D) + at.offset(k / KV, k % KV) + c;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ x, const float* __restrict__ weight, ROW_T* __restrict__ out,
        int* __restrict__ counts, float* __restrict__ mean, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Graph g = {indptr, other, place, x, weight};
    Row shift;
    Found f;
    clear_found(f);
    load_shift(at, g, it.row, it.end > it.begin, shift);
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= 32) {
        const Turn t(at, g, it.end, rest);
        for (int first = 0; first < t.edges; first += SLOTS * UNROLL)
            fold(at, g, t, first, shift, f);
    }
    join_slots(f);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        const Results to = {out, counts, mean};
        finish(at, it.row, it.end - it.begin, f, shift, to);
        return;
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (at.owns(k / KV, k % KV))
#pragma unroll
            for (int c = 0; c < VEC; ++c) move<true>(part, part_at(at, it.chunk, k, c), f[k][c]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const OFF_T* __restrict__ indptr, const int* __restrict__ other,
      const OFF_T* __restrict__ place, const ROW_T* __restrict__ x,
      const float* __restrict__ weight, float* __restrict__ part, ROW_T* __restrict__ out,
      int* __restrict__ counts, float* __restrict__ mean) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Graph g = {indptr, other, place, x, weight};
    Row shift;
    Found f;
    clear_found(f);
    load_shift(at, g, row.x, true, shift);
    for (int i = at.slot; i < row.z; i += SLOTS)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            if (at.owns(k / KV, k % KV))
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    Channel one = {0.f, 0.f, 0.f, NEG_INF, infinity(), 0, 0};
                    move<false>(part, part_at(at, row.y + i, k, c), one);
                    join(f[k][c], one);
                }
    join_slots(f);
    if (at.slot != 0) return;
    const Results to = {out, counts, mean};
    finish(at, row.x, indptr[row.x + 1] - indptr[row.x], f, shift, to);
}
