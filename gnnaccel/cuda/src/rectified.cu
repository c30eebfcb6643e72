// Sums of rectified messages: what a node's neighbours send it, each with the features of its edge.
//
//   forward, merge:       out[r] = sum over r's edges e of (relu(x[other(e)] + edge[e]) +
//   constant), or their mean
//   backward, add_parts:  over the transposed graph, where x[r] is sent along e to other(e): the
//   gradient of the edge's features,
//                         grad[other(e)] where x[r] + edge[e] is not rectified, at each edge; and
//                         its sum over r's edges, of x
//
// Features of edges are read, and their gradients written, at the edges' places. Nothing else has
// the size of the edges. A message is NaN where the sum is, and then passes its gradient on, as
// torch's relu does.
#include "walk.cuh"

// Stores the sum of `count` messages, or their mean; the constants of all are added here.
__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T count, float constant,
                                       int mean, Row& sum, ROW_T* out) {
    const float share = mean && count > 0 ? 1.f / (float)count : 1.f;
    const float added = count == 0 ? 0.f : mean ? constant : constant * (float)count;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[k][c] = fmaf(sum[k][c], share, added);
    store_row(at, out, row, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge, float constant, int mean,
        ROW_T* __restrict__ out, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row sum;
    clear_row(sum);
    struct Edge { Row a, b; };
    const auto load = [&](Edge& e, OFF_T position, bool on) {
        load_row(at, x, on ? (u64)other[position] : 0, on, e.a);
        load_row(at, edge, on ? (u64)place[position] : 0, on, e.b);
    };
    walk<Edge, AHEAD>(at, it, load, [&](const Edge& e, OFF_T, bool) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float s = e.a[k][c] + e.b[k][c];
                sum[k][c] += s <= 0.f ? 0.f : s;
            }
    });
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, constant, mean, sum, out);
    else store_row(at, part, it.chunk, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const OFF_T* __restrict__ indptr, const float* __restrict__ part, float constant, int mean,
      ROW_T* __restrict__ out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0)
        finish(at, row.x, indptr[row.x + 1] - indptr[row.x], constant, mean, sum, out);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge,
         const ROW_T* __restrict__ grad, ROW_T* __restrict__ edge_grad, ROW_T* __restrict__ x_grad,
         float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, sum;
    clear_row(sum);
    load_row(at, x, (u64)it.row, it.end > it.begin, own);
    struct Edge { u64 to; Row e, g; };
    const auto load = [&](Edge& of, OFF_T position, bool on) {
        of.to = on ? (u64)place[position] : 0;
        load_row(at, edge, of.to, on, of.e);
        load_row(at, grad, on ? (u64)other[position] : 0, on, of.g);
    };
    walk<Edge, AHEAD>(at, it, load, [&](Edge& of, OFF_T, bool on) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                if (own[k][c] + of.e[k][c] <= 0.f) of.g[k][c] = 0.f;
                sum[k][c] += of.g[k][c];
            }
        if (edge_grad && on) store_row(at, edge_grad, of.to, of.g);
    });
    store_sum(at, it, sum, x_grad, part);
}
