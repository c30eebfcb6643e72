// Sums of rectified messages: what a node's neighbours send it, each with the features of its edge.
//
//   forward, merge:     out[r] = sum over r's edges e of (relu(x[other(e)] + edge[e]) + constant), or their mean
//   backward, add:      over the transposed graph, where x[r] is sent along e to other(e): the gradient of the edge's features,
//                       grad[other(e)] where x[r] + edge[e] is not rectified, at each edge; and its sum over r's edges, that of x
//
// Features of edges are read, and their gradients written, at the edges' places. Nothing else has the size of the edges.
// A message is NaN where the sum is, and then passes its gradient on, as torch's relu does.
#include "merge.cuh"

#define AHEAD (UNROLL > 1 ? UNROLL / 2 : 1)

// Stores the sum of `count` messages, or their mean; the constants of all are added here.
__device__ __forceinline__ void finish(const Lanes& at, int row, OFF_T count, float constant, int mean, Row& sum, ROW_T* out) {
    const float share = mean && count > 0 ? 1.f / (float)count : 1.f;
    const float added = count == 0 ? 0.f : mean ? constant : constant * (float)count;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[k][c] = fmaf(sum[k][c], share, added);
    store_row(at, out, row, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other, const OFF_T* __restrict__ place, int rows,
        const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge, float constant, int mean, ROW_T* __restrict__ out,
        float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row sum;
    clear_row(sum);
    for (OFF_T position = it.begin + at.slot; position < it.end; position += SLOTS * AHEAD) {
        Row a[AHEAD], b[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const OFF_T p = position + u * SLOTS;
            const bool on = p < it.end;
            load_row(at, x, on ? (u64)other[p] : 0, on, a[u]);
            load_row(at, edge, on ? (u64)place[p] : 0, on, b[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    const float s = a[u][k][c] + b[u][k][c];
                    sum[k][c] += s <= 0.f ? 0.f : s;
                }
    }
    __syncwarp();
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) finish(at, it.row, it.end - it.begin, constant, mean, sum, out);
    else store_row(at, part, it.chunk, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, const OFF_T* __restrict__ indptr,
      const float* __restrict__ part, float constant, int mean, ROW_T* __restrict__ out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) finish(at, row.x, indptr[row.x + 1] - indptr[row.x], constant, mean, sum, out);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ other, const OFF_T* __restrict__ place, int rows,
         const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const ROW_T* __restrict__ x, const ROW_T* __restrict__ edge, const ROW_T* __restrict__ grad,
         ROW_T* __restrict__ edge_grad, ROW_T* __restrict__ x_grad, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row own, sum;
    clear_row(sum);
    load_row(at, x, (u64)it.row, it.end > it.begin, own);
    for (OFF_T position = it.begin + at.slot; position < it.end; position += SLOTS * AHEAD) {
        Row e[AHEAD], g[AHEAD];
        u64 to[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const OFF_T p = position + u * SLOTS;
            const bool on = p < it.end;
            to[u] = on ? (u64)place[p] : 0;
            load_row(at, edge, to[u], on, e[u]);
            load_row(at, grad, on ? (u64)other[p] : 0, on, g[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    if (own[k][c] + e[u][k][c] <= 0.f) g[u][k][c] = 0.f;
                    sum[k][c] += g[u][k][c];
                }
            if (edge_grad && position + u * SLOTS < it.end) store_row(at, edge_grad, to[u], g[u]);
        }
    }
    __syncwarp();
    sum_slots(sum);
    if (at.slot != 0) return;
    if (it.chunk < 0) store_row(at, x_grad, it.row, sum);
    else store_row(at, part, it.chunk, sum);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
add(const int* __restrict__ counters, const int4* __restrict__ heavy, const float* __restrict__ part,
    ROW_T* __restrict__ x_grad) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) store_row(at, x_grad, row.x, sum);
}
