// Softmax aggregation, channel by channel: sums of messages weighted with the softmax of t times
// themselves.
//
//   forward, merge:  out[r] = sum over r's edges e of a(e) m(e), a the softmax of t m over them,
//   where m(e) is x[other(e)] or,
//                    with EDGE, relu(x[other(e)] + edge[e]) + constant; for backward the same in
//                    fp32, `center`, and `total`,
//                    the sum of exp(t (m(e) - center))
//   backward, add:   over the transposed graph, where x[r] is sent along e to i = other(e): the
//   gradient of the message,
//                    a(e) grad[i] (1 + t (m(e) - out[i])), or without its second term; that of the
//                    edge's features, at each edge;
//                    its sum over r's edges, that of x; and the sum over r's edges of a(e) grad[i]
//                    (m(e) - out[i])^2, of which
//                    the sum over all rows is the gradient of t
//
// Backward takes scores relative to that of the mean, not to the largest: a(e) = exp(t (m(e) -
// center)) / total, and the same difference is in the second term. So it gathers two rows, and
// large scores cost no digits, as no logarithm of a sum is added to one. The mean's score is at
// most log(n) below the largest of n, so nothing overflows. `share` is grad / total. Features of
// edges are read, and their gradients written, at the edges' places. Nothing else has the size of
// the edges.
#include "walk.cuh"

// t per channel: `each` has one number (stride 0) or one per channel (stride 1); without it all are
// `number`.
struct Temperature {
    const float* each;
    int stride;
    float number;

    __device__ __forceinline__ void load(const Lanes& at, Row& t) const {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const int channel = at.owns(k / KV, k % KV) ? at.offset(k / KV, k % KV) + c : 0;
                t[k][c] = each ? each[channel * stride] : number;
            }
    }
};

__device__ __forceinline__ float exp_of(float d) { return exp2f(d * LOG2E); }

// What the messages so far come to: the one with the largest score; relative to that score the sum
// of the weights, that of the weighted messages, and that of their weighted distances to that one.
// A sum of 0: none yet.
struct Running {
    Row top, sum, weighted, off;

    __device__ __forceinline__ Running() {
        clear_row(top);
        clear_row(sum);
        clear_row(weighted);
        clear_row(off);
    }
    // One exponential serves whichever of the two is larger.
    __device__ __forceinline__ void fold(float m, float t, int k, int c) {
        const float distance = m - top[k][c], d = t * distance, p = exp_of(-fabsf(d));
        const bool above = d > 0.f || sum[k][c] == 0.f;
        const float before = above ? p : 1.f, own = above ? 1.f : p;
        off[k][c] = fmaf(off[k][c], before, (above ? -p * sum[k][c] : p) * distance);
        sum[k][c] = fmaf(sum[k][c], before, own);
        weighted[k][c] = fmaf(weighted[k][c], before, own * m);
        top[k][c] = above ? m : top[k][c];
    }
    __device__ __forceinline__ void join(float its_top, float its_sum, float its_weighted,
                                         float its_off, float t, int k, int c) {
        const float distance = its_top - top[k][c], d = t * distance, p = exp_of(-fabsf(d));
        const bool above = its_sum != 0.f && (d > 0.f || sum[k][c] == 0.f);
        const float before = above ? p : 1.f, its = above ? 1.f : p;
        off[k][c] = before * (above ? off[k][c] - sum[k][c] * distance : off[k][c])
                    + its * (above ? its_off : its_off + its_sum * distance);
        sum[k][c] = fmaf(its_sum, its, sum[k][c] * before);
        weighted[k][c] = fmaf(its_weighted, its, weighted[k][c] * before);
        top[k][c] = above ? its_top : top[k][c];
    }
    __device__ __forceinline__ void join_slots(const Row& t) {
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    const float its_top = __shfl_xor_sync(FULL_WARP, top[k][c], w);
                    const float its_sum = __shfl_xor_sync(FULL_WARP, sum[k][c], w);
                    const float its_weighted = __shfl_xor_sync(FULL_WARP, weighted[k][c], w);
                    join(its_top, its_sum, its_weighted, __shfl_xor_sync(FULL_WARP, off[k][c], w),
                         t[k][c], k, c);
                }
    }
    // The mean, from zero or from the top, whichever is nearer: sums are as exact as they are
    // small. Backward asks how far messages are from it, times t; where large ones nearly agree, or
    // one takes nearly all, sums of their size would lose that.
    __device__ __forceinline__ float mean(int k, int c) const {
        if (sum[k][c] == 0.f) return 0.f;
        const bool near = fabsf(off[k][c]) < fabsf(weighted[k][c]);
        const float found = near ? top[k][c] + off[k][c] / sum[k][c] : weighted[k][c] / sum[k][c],
            below = top[k][c] - found;
        return below == below ? found : below;  // scores that are infinite have no softmax
    }
};

__device__ __forceinline__ float message(float x, float edge, float constant) {
#if EDGE
    const float s = x + edge;
    return (s <= 0.f ? 0.f : s) + constant;
#else
    return x;
#endif
}

__device__ __forceinline__ void load_edge(const Lanes& at, const ROW_T* edge, u64 place, bool on,
                                          Row& r) {
#if EDGE
    load_row(at, edge, place, on, r);
#else
    clear_row(r);
#endif
}

__device__ __forceinline__ u64 place_of(const OFF_T* place, OFF_T position, bool on) {
    return EDGE && on ? (u64)place[position] : 0;
}

__device__ __forceinline__ void finish(const Lanes& at, int row, const Running& f, const Row& t,
                                       ROW_T* out, float* center, float* total) {
    Row mean, sum;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
            mean[k][c] = f.mean(k, c);
            sum[k][c] = f.sum[k][c] == 0.f ? 1.f
                : f.sum[k][c] * exp_of(t[k][c] * (f.top[k][c] - mean[k][c]));
        }
    store_row(at, out, row, mean);
    if (!center) return;
    store_row(at, center, row, mean);
    store_row(at, total, row, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge, float constant,
        const float* __restrict__ each, int stride, float number, ROW_T* __restrict__ out,
        float* __restrict__ center, float* __restrict__ total, float* __restrict__ tops,
        float* __restrict__ sums, float* __restrict__ weighted) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row t;
    const Temperature temperature = {each, stride, number};
    temperature.load(at, t);
    Running f;
    struct Edge { Row a, b; };
    const auto load = [&](Edge& e, OFF_T position, bool on) {
        load_row(at, x, on ? (u64)other[position] : 0, on, e.a);
        load_edge(at, edge, place_of(place, position, on), on, e.b);
    };
    walk<Edge, EDGE ? AHEAD : UNROLL>(at, it, load, [&](const Edge& e, OFF_T, bool on) {
        if (!on) return;
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) f.fold(message(e.a[k][c], e.b[k][c], constant), t[k][c],
                                                 k, c);
    });
    f.join_slots(t);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        finish(at, it.row, f, t, out, center, total);
        return;
    }
    store_row(at, tops, (u64)it.chunk, f.top);
    store_row(at, sums, (u64)it.chunk, f.sum);
    store_row(at, weighted, 2 * (u64)it.chunk, f.weighted);
    store_row(at, weighted, 2 * (u64)it.chunk + 1, f.off);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const float* __restrict__ each, int stride, float number, const float* __restrict__ tops,
      const float* __restrict__ sums, const float* __restrict__ weighted, ROW_T* __restrict__ out,
      float* __restrict__ center, float* __restrict__ total) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row t;
    const Temperature temperature = {each, stride, number};
    temperature.load(at, t);
    Running f;
    for (int i = at.slot; i < row.z; i += SLOTS) {
        Running one;
        load_row(at, tops, (u64)(row.y + i), true, one.top);
        load_row(at, sums, (u64)(row.y + i), true, one.sum);
        load_row(at, weighted, 2 * (u64)(row.y + i), true, one.weighted);
        load_row(at, weighted, 2 * (u64)(row.y + i) + 1, true, one.off);
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c)
                f.join(one.top[k][c], one.sum[k][c], one.weighted[k][c], one.off[k][c], t[k][c], k,
                       c);
    }
    __syncwarp();
    f.join_slots(t);
    if (at.slot == 0) finish(at, row.x, f, t, out, center, total);
}

// ---- gradients
// -------------------------------------------------------------------------------------------------------

// The gradient of a message into `share`, and what it adds to that of t.
__device__ __forceinline__ float grad_of(float m, float t, float center, float& share, int whole) {
    const float off = m - center, d = t * off, weighted = exp_of(d) * share;
    share = whole ? fmaf(weighted, d, weighted) : weighted;
    return weighted * off * off;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge, float constant,
         const float* __restrict__ each, int stride, float number, const float* __restrict__ center,
         const float* __restrict__ share, int whole, ROW_T* __restrict__ edge_grad,
         ROW_T* __restrict__ x_grad, float* __restrict__ t_grad, float* __restrict__ part,
         float* __restrict__ t_part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row t, own, sum, to_t;
    const Temperature temperature = {each, stride, number};
    temperature.load(at, t);
    clear_row(sum);
    clear_row(to_t);
    load_row(at, x, (u64)it.row, it.end > it.begin, own);
    struct Edge { u64 to; Row e, c, g; };
    const auto load = [&](Edge& of, OFF_T position, bool on) {
        const u64 from = on ? (u64)other[position] : 0;
        of.to = place_of(place, position, on);
        load_edge(at, edge, of.to, on, of.e);
        load_row(at, center, from, on, of.c);
        load_row(at, share, from, on, of.g);
    };
    const auto use = [&](Edge& of) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float m = message(own[k][c], of.e[k][c], constant);
                to_t[k][c] += grad_of(m, t[k][c], of.c[k][c], of.g[k][c], whole);
                if (EDGE && own[k][c] + of.e[k][c] <= 0.f) of.g[k][c] = 0.f;
                sum[k][c] += of.g[k][c];
            }
        if (EDGE && edge_grad) store_row(at, edge_grad, of.to, of.g);
    };
    // past the last edge there are zeros, which could be infinitely far from a mean
    if constexpr (AHEAD > 1)
        walk<Edge, AHEAD>(at, it, load, [&](Edge& of, OFF_T, bool on) { if (on) use(of); });
    else
        walk_singly<Edge>(at, it, [&](Edge& of, OFF_T position) { load(of, position, true); }, use);
    sum_slots(sum);
    if (t_grad) sum_slots(to_t);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        store_row(at, x_grad, it.row, sum);
        if (t_grad) store_row(at, t_grad, it.row, to_t);
    } else {
        store_row(at, part, it.chunk, sum);
        if (t_grad) store_row(at, t_part, it.chunk, to_t);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
add(const int* __restrict__ counters, const int4* __restrict__ heavy,
    const float* __restrict__ part, const float* __restrict__ t_part, ROW_T* __restrict__ x_grad,
    float* __restrict__ t_grad) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) store_row(at, x_grad, row.x, sum);
    if (!t_grad) return;
    add_chunks(at, row.y, row.z, t_part, sum);
    if (at.slot == 0) store_row(at, t_grad, row.x, sum);
}
