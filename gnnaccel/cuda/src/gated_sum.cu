// Sums of gated messages that leave nothing at the edges: gates are made anew wherever they are
// needed.
//
//   forward, merge:        out[r] = sum over r's edges e of gate(e) values[other(e)], or their
//   mean, where
//                          gate(e) = sigmoid(left[other(e)] + right[r] + edge[e])
//   by_row, add_parts:     the sum over r's edges of the gradient of what is in the sigmoid (that
//   of right); at each edge, that
//                          gradient itself (that of edge), and gate(e) grad[r] (that of beside)
//   by_other, add_both:    over the transposed graph: its sums (that of left), and those of gate(e)
//   grad[other(e)] (of values)
//
// EDGE: 1 where there are features of edges; they are read, and their gradients written, at the
// edges' places. 2 where there are more of them, `beside`, added to what is sent: values[other(e)]
// + beside[e].
// For means, `grad` was divided beforehand.
#include "gates.cuh"

__device__ __forceinline__ void load_edge(const Lanes& at, const ROW_T* edge, const OFF_T* place,
                                          OFF_T position, bool on, Row& r) {
#if EDGE
    load_row(at, edge, on ? (u64)place[position] : 0, on, r);
#else
    clear_row(r);
#endif
}

__device__ __forceinline__ void add_beside(const Lanes& at, const ROW_T* beside, const OFF_T* place,
                                           OFF_T position, bool on, Row& r) {
#if EDGE == 2
    Row more;
    load_row(at, beside, on ? (u64)place[position] : 0, on, more);
    add_row(r, more);
#endif
}

__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T count, int mean, Row& sum,
                                       ROW_T* out) {
    const float share = mean && count > 0 ? 1.f / (float)count : 1.f;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[k][c] *= share;
    store_row(at, out, row, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ left, const ROW_T* __restrict__ right,
        const ROW_T* __restrict__ edge, const ROW_T* __restrict__ values,
        const ROW_T* __restrict__ beside, int mean, ROW_T* __restrict__ out,
        float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, sum;
    clear_row(sum);
    load_row(at, right, (u64)it.row, it.end > it.begin, own);
    struct Edge { Row a, b, v; };
    const auto load = [&](Edge& e, OFF_T position, bool on) {
        const u64 from = on ? (u64)other[position] : 0;
        load_row(at, left, from, on, e.a);
        load_row(at, values, from, on, e.v);  // 0 where there is no edge
        load_edge(at, edge, place, position, on, e.b);
        add_beside(at, beside, place, position, on, e.v);
    };
    walk<Edge, AHEAD>(at, it, load, [&](const Edge& e, OFF_T, bool) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC;
                 ++c) sum[k][c] = fmaf(sigmoid(e.a[k][c] + own[k][c] + e.b[k][c]), e.v[k][c],
                                       sum[k][c]);
    });
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, mean, sum, out);
    else store_row(at, part, it.chunk, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const OFF_T* __restrict__ indptr, const float* __restrict__ part, int mean,
      ROW_T* __restrict__ out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) finish(at, row.x, indptr[row.x + 1] - indptr[row.x], mean, sum, out);
}

// ---- gradients
// -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32 * WARPS)
by_row(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
       const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
       const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
       const ROW_T* __restrict__ left, const ROW_T* __restrict__ right,
       const ROW_T* __restrict__ edge, const ROW_T* __restrict__ values,
       const ROW_T* __restrict__ beside, const ROW_T* __restrict__ grad,
       ROW_T* __restrict__ edge_grad, ROW_T* __restrict__ beside_grad,
       ROW_T* __restrict__ right_grad, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, g, sum;
    clear_row(sum);
    load_row(at, right, (u64)it.row, it.end > it.begin, own);
    load_row(at, grad, (u64)it.row, it.end > it.begin, g);
    struct Edge { Row a, b, v; };
    const auto load = [&](Edge& e, OFF_T position, bool on) {
        const u64 from = on ? (u64)other[position] : 0;
        load_row(at, left, from, on, e.a);
        load_row(at, values, from, on, e.v);
        load_edge(at, edge, place, position, on, e.b);
        add_beside(at, beside, place, position, on, e.v);
    };
    walk<Edge, AHEAD>(at, it, load, [&](Edge& e, OFF_T position, bool on) {
        if (!on) return;  // its zeros would make NaN of an infinite gradient
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float gate = sigmoid(e.a[k][c] + own[k][c] + e.b[k][c]);
                e.b[k][c] = gate * g[k][c];
                e.v[k][c] *= g[k][c] * (gate * (1.f - gate));
                sum[k][c] += e.v[k][c];
            }
#if EDGE
        if (edge_grad) store_row(at, edge_grad, (u64)place[position], e.v);
#endif
#if EDGE == 2
        if (beside_grad) store_row(at, beside_grad, (u64)place[position], e.b);
#endif
    });
    store_sum(at, it, sum, right_grad, part);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
by_other(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ left, const ROW_T* __restrict__ right,
         const ROW_T* __restrict__ edge, const ROW_T* __restrict__ values,
         const ROW_T* __restrict__ beside, const ROW_T* __restrict__ grad,
         ROW_T* __restrict__ left_grad, ROW_T* __restrict__ values_grad, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, sent, to_left, to_values;
    clear_row(to_left);
    clear_row(to_values);
    load_row(at, left, (u64)it.row, it.end > it.begin, own);
    load_row(at, values, (u64)it.row, it.end > it.begin, sent);
    struct Edge { Row a, b, g; };
    const auto load = [&](Edge& e, OFF_T position, bool on) {
        const u64 to = on ? (u64)other[position] : 0;
        load_row(at, right, to, on, e.a);
        load_row(at, grad, to, on, e.g);
        load_edge(at, edge, place, position, on, e.b);
    };
    walk<Edge, AHEAD>(at, it, load, [&](const Edge& e, OFF_T position, bool on) {
        if (!on) return;
        Row v;
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) v[k][c] = sent[k][c];
        add_beside(at, beside, place, position, true, v);
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float gate = sigmoid(own[k][c] + e.a[k][c] + e.b[k][c]);
                to_values[k][c] = fmaf(gate, e.g[k][c], to_values[k][c]);
                to_left[k][c] = fmaf(v[k][c] * e.g[k][c], gate * (1.f - gate), to_left[k][c]);
            }
    });
    store_sums(at, it, to_left, to_values, left_grad, values_grad, part);
}
