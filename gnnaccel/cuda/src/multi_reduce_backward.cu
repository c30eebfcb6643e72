// Gradients of several reduces of each row's messages.
//
//   spread:               what the gradients of row r mean for each of its messages: coefficients
//   [r, TERMS, h, :], once per row
//   backward, add_parts:  out[s, h, :] = sum over s's edges e of w(e, h) dm(e), over the transposed
//   graph
//   edge_grad:            <x[other(e), h, :], dm(e)> for every edge e of r: the gradient of w; of a
//   row w that is added, dm(e) itself, of which those of x are the sums
//
// A message's gradient is
//   dm(e) = A[r] + B[r] m(e) + (m(e) is r's largest) * top[r] + (m(e) is r's smallest) * bottom[r];
// equal messages share the gradient of an extremum evenly. Where the extremum is NaN, so is every
// message's gradient.
#include "multi_reduce.cuh"
#include "walk.cuh"

#define REPEATED (TOP || BOTTOM)
// rows that an edge of the transposed graph brings, and so how many edges are in flight
#define GATHERED (SHARES + (TOP ? 1 : 0) + (BOTTOM ? 1 : 0))
#define FLIGHT (UNROLL / GATHERED > 0 ? UNROLL / GATHERED : 1)

// What a row knows of its messages' gradients.
struct Terms {
    Row a, b, top, bottom;
};

__device__ __forceinline__ u64 term(u64 row, int n) { return row * TERMS + n; }

__device__ __forceinline__ void load_terms(const Lanes& at, u64 row, bool on, const ROW_T* out,
                                           const float* coefficients, Terms& t) {
    if (LINEAR) load_row(at, coefficients, term(row, 0), on, t.a);
    if (MOMENTS) load_row(at, coefficients, term(row, 1), on, t.b);
    if (TOP) load_row(at, out, row * REDUCES + MAX_AT, on, t.top);
    if (BOTTOM) load_row(at, out, row * REDUCES + MIN_AT, on, t.bottom);
}

// Shares are read only where they count: few messages are extrema.
__device__ __forceinline__ float share(float m, float best, const float* shares, u64 index) {
    return best != best ? best : m == best ? shares[index] : 0.f;
}

__device__ __forceinline__ float message_grad(const Terms& t, int k, int c, float m,
                                              const float* coefficients, u64 row, int offset) {
    float d = LINEAR ? t.a[k][c] : 0.f;
    if (MOMENTS) d = fmaf(t.b[k][c], m, d);
    if (TOP) d += share(m, t.top[k][c], coefficients, term(row, SHARES) * (H * D) + offset);
    if (BOTTOM)
        d += share(m, t.bottom[k][c], coefficients, term(row, TERMS - 1) * (H * D) + offset);
    return d;
}

// Gradients of a row's results. The struct's rows are zero where nobody asked.
struct Gradients {
    Row sum, mean, var, std, top, bottom;
};

template <int At>
__device__ __forceinline__ void load_gradient(const Lanes& at, const ROW_T* from, u64 row, bool on,
                                              Row& r) {
    if (At >= 0) load_row(at, from, row * REDUCES + (At >= 0 ? At : 0), on, r);
    else clear_row(r);
}

// zero_share: an extremum of 0 keeps a share for itself, as it does where results begin as zeros
// that take part.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
spread(const OFF_T* __restrict__ indptr, int rows, const ROW_T* __restrict__ grad,
       const ROW_T* __restrict__ out, const int* __restrict__ counts,
       const float* __restrict__ mean, int zero_share, float* __restrict__ coefficients) {
    const Lanes at;
    const long long row = warp_id() * SLOTS + at.slot;
    if (row >= rows) return;
    const OFF_T degree = indptr[row + 1] - indptr[row];
    const bool on = degree > 0;
    const float edges = on ? (float)degree : 1.f;
    Gradients g;
    Row average, variance, deviation, top, bottom, a, b;
    load_gradient<SUM_AT>(at, grad, row, on, g.sum);
    load_gradient<MEAN_AT>(at, grad, row, on, g.mean);
    load_gradient<VAR_AT>(at, grad, row, on, g.var);
    load_gradient<STD_AT>(at, grad, row, on, g.std);
    load_gradient<MAX_AT>(at, grad, row, on, g.top);
    load_gradient<MIN_AT>(at, grad, row, on, g.bottom);
    load_gradient<VAR_AT>(at, out, row, on, variance);
    load_gradient<STD_AT>(at, out, row, on, deviation);
    load_gradient<MAX_AT>(at, out, row, on, top);
    load_gradient<MIN_AT>(at, out, row, on, bottom);
    if (MOMENTS) load_row(at, mean, row, on, average);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
            const float wide = deviation[k][c] > 0.f ? g.std[k][c] / (2.f * deviation[k][c]) : 0.f;
            // equal messages have no variance: b m would leave the rounding of a. A variance that
            // 16 bits round to zero says nothing, and a is rounded far less than they are
            const bool equal = degree < 2 || (sizeof(ROW_T) == 4 && variance[k][c] == 0.f);
            b[k][c] = 2.f * ((equal ? 0.f : g.var[k][c]) + wide) / edges;
            a[k][c] = g.sum[k][c] + g.mean[k][c] / edges;
            if (MOMENTS) a[k][c] = fmaf(-b[k][c], average[k][c], a[k][c]);
        }
    if (LINEAR) store_row(at, coefficients, term(row, 0), a);
    if (MOMENTS) store_row(at, coefficients, term(row, 1), b);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        if (side == 0 ? !TOP : !BOTTOM) continue;
        const int* times = counts + ((u64)row * COUNTS + (side == 0 ? 0 : COUNTS - 1)) * (H * D);
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const bool mine = on && at.owns(k / KV, k % KV);
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float best = side == 0 ? top[k][c] : bottom[k][c],
                    whole = side == 0 ? g.top[k][c] : g.bottom[k][c];
                const int equal = mine
                    ? times[at.offset(k / KV, k % KV) + c] + (zero_share && best == 0.f) : 1;
                a[k][c] = whole / (float)equal;
            }
        }
        store_row(at, coefficients, term(row, side == 0 ? SHARES : TERMS - 1), a);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ x, const float* __restrict__ weight,
         const ROW_T* __restrict__ reduced, const float* __restrict__ coefficients,
         ROW_T* __restrict__ out, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Graph g = {indptr, other, place, x, weight};
    Row own, sum;
    clear_row(sum);
    if (MOMENTS || REPEATED) load_row(at, x, (u64)it.row, it.end > it.begin, own);
    else clear_row(own);
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= 32) {
        const Turn t(at, g, it.end, rest);
        // summed apart, so that a long row rounds a number of the sum's size once per turn only
        Row of_turn;
        clear_row(of_turn);
        for (int first = 0; first < t.edges; first += SLOTS * FLIGHT) {
            Terms terms[FLIGHT];
            u64 row[FLIGHT];
            float w[FLIGHT][KH];
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u) {
                const int e = first + u * SLOTS + at.slot;
                row[u] = t.row(e);
                t.weights(at, g, e, e < t.edges, w[u]);
                load_terms(at, row[u], e < t.edges, reduced, coefficients, terms[u]);
            }
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u)
#pragma unroll
                for (int k = 0; k < PACKS; ++k) {
                    if (first + u * SLOTS + at.slot >= t.edges || !at.owns(k / KV, k % KV))
                        continue;
#pragma unroll
                    for (int c = 0; c < VEC; ++c) {
                        const float f = w[u][k / KV];
                        const float d = message_grad(terms[u], k, c, message(own[k][c], f),
                                                     coefficients, row[u],
                                                     at.offset(k / KV, k % KV) + c);
                        of_turn[k][c] = FACTOR ? fmaf(f, d, of_turn[k][c]) : of_turn[k][c] + d;
                    }
                }
        }
        add_row(sum, of_turn);
    }
    store_sum(at, it, sum, out, part);
}

// With a weight per edge out is [edges, tiles of heads], with one per head [edges, H], with a row of
// ROW_T that is added [edges, H, D].
extern "C" __global__ void __launch_bounds__(32 * WARPS)
edge_grad(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
          const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
          const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
          const ROW_T* __restrict__ x, const float* __restrict__ weight,
          const ROW_T* __restrict__ reduced, const float* __restrict__ coefficients,
          float* __restrict__ out) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Graph g = {indptr, other, place, x, weight};
    Terms terms;
    load_terms(at, (u64)it.row, it.end > it.begin, reduced, coefficients, terms);
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= 32) {
        const Turn t(at, g, it.end, rest);
        for (int first = 0; first < t.edges; first += SLOTS) {
            const int e = first + at.slot;
            const bool on = e < t.edges;
            const u64 line = t.line(e);
            Row v;
            float w[KH], of_edge = 0.f;
            load_row(at, x, t.row(e), on, v);
            t.weights(at, g, e, on, w);
            if (WEIGHT == ADDED_ROW) {
                Row d;
                load_added(at, g, line, on, d);
                add_rounded(v, d);
#pragma unroll
                for (int k = 0; k < PACKS; ++k)
#pragma unroll
                    for (int c = 0; c < VEC; ++c)
                        d[k][c] = on && at.owns(k / KV, k % KV)
                            ? message_grad(terms, k, c, v[k][c], coefficients, (u64)it.row,
                                           at.offset(k / KV, k % KV) + c) : 0.f;
                if (on) store_row(at, (ROW_T*)out, line, d);
                continue;
            }
#pragma unroll
            for (int kh = 0; kh < KH; ++kh) {
                float s = 0.f;
#pragma unroll
                for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
                    for (int c = 0; c < VEC; ++c)
                        if (on && at.owns(kh, k % KV))
                            s = fmaf(v[k][c],
                                     message_grad(terms, k, c, message(v[k][c], w[kh]),
                                                  coefficients, (u64)it.row,
                                                           at.offset(kh, k % KV) + c), s);
                s = lane_sum<LH>(s);
                of_edge += s;
                if (WEIGHT == HEAD_WEIGHT && on && at.lh == 0 && at.head(kh) < H)
                    out[line * H + at.head(kh)] = s;
            }
            if (WEIGHT != EDGE_WEIGHT) continue;
#pragma unroll
            for (int step = LH; step < ROW_LANES; step <<= 1)
                of_edge += __shfl_xor_sync(FULL_WARP, of_edge, step);
            if (on && at.lane % ROW_LANES == 0) out[line * gridDim.y + blockIdx.y] = of_edge;
        }
    }
}
