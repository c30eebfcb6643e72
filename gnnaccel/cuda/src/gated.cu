// Gated sums: what a node's neighbours send it, weighted channel by channel with the sigmoid of a
// number at each edge.
//
//   forward, merge:        e = left[other(e)] + right[r] + edge[e]
//                          out[r] = sum over r's edges of sigmoid(e) values[other(e)] / total[r],
//                          where
//                          total[r] = epsilon + that sum of sigmoid(e)
//   by_row, add_parts:     the gradient of e, at each edge, and its sum over r's edges (the
//   gradient of right)
//   by_other, add_both:    the sums of that gradient over the edges of the transposed graph (that
//   of left), and of
//                          sigmoid(e) ratio[other(e)] (that of values)
//
// e is kept at the edges' places because it is a result; gates are made of it as it is stored, so
// that all passes see the same.
#include "gates.cuh"

__device__ __forceinline__ void finish(const Lanes& at, int row, const Row& sum, const Row& gates,
                                       float epsilon, ROW_T* out, float* total) {
    Row ratio, whole;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
            whole[k][c] = gates[k][c] + epsilon;
            ratio[k][c] = sum[k][c] / whole[k][c];
        }
    store_row(at, out, row, ratio);
    store_row(at, total, row, whole);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ left, const ROW_T* __restrict__ right,
        const ROW_T* __restrict__ edge, const ROW_T* __restrict__ values, float epsilon,
        ROW_T* __restrict__ score, ROW_T* __restrict__ out, float* __restrict__ total,
        float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, sum, gates;
    clear_row(sum);
    clear_row(gates);
    load_row(at, right, (u64)it.row, it.end > it.begin, own);
    struct Edge { u64 to; Row a, b, v; };
    const auto load = [&](Edge& e, OFF_T position) {
        const u64 from = (u64)other[position];
        e.to = (u64)place[position];
        load_row(at, left, from, true, e.a);
        load_row(at, edge, e.to, true, e.b);
        load_row(at, values, from, true, e.v);
    };
    walk_singly<Edge>(at, it, load, [&](Edge& e) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                e.a[k][c] = to_float(from_float<ROW_T>(e.a[k][c] + own[k][c] + e.b[k][c]));
                const float gate = sigmoid(e.a[k][c]);
                sum[k][c] = fmaf(gate, e.v[k][c], sum[k][c]);
                gates[k][c] += gate;
            }
        store_row(at, score, e.to, e.a);
    });
    sum_slots(sum);
    sum_slots(gates);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, sum, gates, epsilon, out, total);
    else store_pair(at, part, it.chunk, sum, gates);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const float* __restrict__ part, float epsilon, ROW_T* __restrict__ out,
      float* __restrict__ total) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum, gates;
    add_pairs(at, row.y, row.z, part, sum, gates);
    if (at.slot == 0) finish(at, row.x, sum, gates, epsilon, out, total);
}

// ---- gradients
// -------------------------------------------------------------------------------------------------------
// ratio[r] = grad[r] / total[r] is made beforehand, in fp32.

extern "C" __global__ void __launch_bounds__(32 * WARPS)
by_row(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
       const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
       const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
       const ROW_T* __restrict__ score, const ROW_T* __restrict__ values,
       const ROW_T* __restrict__ reduced, const float* __restrict__ ratio,
       const ROW_T* __restrict__ score_grad, ROW_T* __restrict__ edge_grad, ROW_T* __restrict__ out,
       float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, mean, sum;
    clear_row(sum);
    load_row(at, ratio, (u64)it.row, it.end > it.begin, own);
    load_row(at, reduced, (u64)it.row, it.end > it.begin, mean);
    struct Edge { u64 to; Row s, v, d; };
    const auto load = [&](Edge& e, OFF_T position) {
        e.to = (u64)place[position];
        load_row(at, score, e.to, true, e.s);
        load_row(at, values, (u64)other[position], true, e.v);
        load_row(at, score_grad, e.to, score_grad != nullptr, e.d);
    };
    walk_singly<Edge>(at, it, load, [&](Edge& e) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float gate = sigmoid(e.s[k][c]);
                e.d[k][c] = fmaf(own[k][c] * (e.v[k][c] - mean[k][c]), gate * (1.f - gate),
                                 e.d[k][c]);
                sum[k][c] += e.d[k][c];
            }
        store_row(at, edge_grad, e.to, e.d);
    });
    store_sum(at, it, sum, out, part);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
by_other(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ score, const ROW_T* __restrict__ edge_grad,
         const float* __restrict__ ratio, ROW_T* __restrict__ left_grad,
         ROW_T* __restrict__ values_grad, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row left, values;
    clear_row(left);
    clear_row(values);
    struct Edge { Row s, d, g; };
    const auto load = [&](Edge& e, OFF_T position) {
        const u64 at_edge = (u64)place[position];
        load_row(at, score, at_edge, true, e.s);
        load_row(at, edge_grad, at_edge, true, e.d);
        load_row(at, ratio, (u64)other[position], true, e.g);
    };
    walk_singly<Edge>(at, it, load, [&](const Edge& e) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                left[k][c] += e.d[k][c];
                values[k][c] = fmaf(sigmoid(e.s[k][c]), e.g[k][c], values[k][c]);
            }
    });
    store_sums(at, it, left, values, left_grad, values_grad, part);
}
