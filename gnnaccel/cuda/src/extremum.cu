// The largest or smallest message of each row, which edge it came from, and the way back of its
// gradient.
//
//   forward, merge:   out[r, h, :] = best over r's edges e of op(x[other(e), h, :], w(e, h));  arg:
//   the place of that edge, or -1
//   pick, add_parts:  out[r, h, :] = sum over r's edges e of grad[other(e), h, :] where
//   arg[other(e), h, :] is e's place
//
// The first is over a graph by destination, the second over the same graph by source. OP is COPY,
// ADD or MUL; PER_HEAD says whether w is one number per edge or one per edge and head, at the
// edge's place; under IDENTITY other(e) and the place are the position itself. Among equals the
// edge with the smallest place wins, so results do not depend on the order of a row's edges; NaN
// loses against everything. Rows without edges are -inf (inf).
#include "walk.cuh"

#define COPY 0
#define ADD 1
#define MUL 2
#define NO_EDGE 0x7fffffff

typedef int Arg[PACKS][VEC];

__device__ __forceinline__ float worst() { return LARGEST ? NEG_INF : infinity(); }

__device__ __forceinline__ bool better(float value, int place, float than, int than_place) {
    return (LARGEST ? value > than : value < than) || (value == than && place < than_place);
}

__device__ __forceinline__ void clear_best(Row& best, Arg& arg) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
            best[k][c] = worst();
            arg[k][c] = NO_EDGE;
        }
}

__device__ __forceinline__ void take(float value, int place, float& best, int& arg) {
    const bool found = better(value, place, best, arg);
    best = found ? value : best;
    arg = found ? place : arg;
}

__device__ __forceinline__ float weight_of(const Lanes& at, const float* weight, bool on, int place,
                                           int kh) {
    if (!on || at.head(kh) >= H) return 0.f;
    return weight[PER_HEAD ? (u64)place * H + at.head(kh) : (u64)place];
}

__device__ __forceinline__ void fold(const Lanes& at, OFF_T first, OFF_T end, const int* other,
                                     const OFF_T* places, const ROW_T* x, const float* weight,
                                     Row& best, Arg& arg) {
    Row v[UNROLL];
    int place[UNROLL];
    bool on[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const i64 e = (i64)first + u * SLOTS + at.slot;
        on[u] = e < (i64)end;
        place[u] = !on[u] ? 0 : IDENTITY ? (int)e : (int)places[e];
        load_row(at, x, !on[u] ? 0 : IDENTITY ? (u64)e : (u64)other[e], on[u], v[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const float w = OP == COPY ? 0.f : weight_of(at, weight, on[u], place[u], k / KV);
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float value = OP == COPY ? v[u][k][c] : OP == ADD ? v[u][k][c] + w
                    : v[u][k][c] * w;
                if (on[u]) take(value, place[u], best[k][c], arg[k][c]);
            }
        }
}

__device__ __forceinline__ void merge_slots(Row& best, Arg& arg) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int c = 0; c < VEC; ++c) {
                const float value = __shfl_xor_sync(FULL_WARP, best[k][c], w);
                const int place = __shfl_xor_sync(FULL_WARP, arg[k][c], w);
                take(value, place, best[k][c], arg[k][c]);
            }
}

__device__ __forceinline__ void store_args(const Lanes& at, int* base, u64 row, const Arg& arg,
                                           bool last) {
    int* p = base + row * (u64)(H * D);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (at.owns(k / KV, k % KV))
#pragma unroll
            for (int c = 0; c < VEC; ++c)
                p[at.offset(k / KV, k % KV) + c] = last && arg[k][c] == NO_EDGE ? -1 : arg[k][c];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ x, const float* __restrict__ weight, ROW_T* __restrict__ out,
        int* __restrict__ arg_out, float* __restrict__ part, int* __restrict__ part_arg) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row best;
    Arg arg;
    clear_best(best, arg);
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= SLOTS * UNROLL)
        fold(at, it.end - rest, it.end, other, place, x, weight, best, arg);
    merge_slots(best, arg);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        store_row(at, out, it.row, best);
        store_args(at, arg_out, it.row, arg, true);
    } else {
        store_row(at, part, it.chunk, best);
        store_args(at, part_arg, it.chunk, arg, false);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const float* __restrict__ part, const int* __restrict__ part_arg, ROW_T* __restrict__ out,
      int* __restrict__ arg_out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row best;
    Arg arg;
    clear_best(best, arg);
    for (int i = at.slot; i < row.z; i += SLOTS) {
        const u64 base = (u64)(row.y + i) * (H * D);
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            if (at.owns(k / KV, k % KV))
#pragma unroll
                for (int c = 0; c < VEC; ++c) {
                    const u64 p = base + at.offset(k / KV, k % KV) + c;
                    take(part[p], part_arg[p], best[k][c], arg[k][c]);
                }
    }
    merge_slots(best, arg);
    if (at.slot != 0) return;
    store_row(at, out, row.x, best);
    store_args(at, arg_out, row.x, arg, true);
}

// ---- gradient
// --------------------------------------------------------------------------------------------------------

// The gradient is read only where the edge was chosen.
__device__ __forceinline__ void add_pick(const Lanes& at, int row, int place, const int* arg,
                                         const ROW_T* grad, const float* weight, Row& sum) {
    const u64 base = (u64)row * (H * D);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        if (!at.owns(k / KV, k % KV)) continue;
        const u64 p = base + at.offset(k / KV, k % KV);
        const float w = OP == MUL ? weight_of(at, weight, true, place, k / KV) : 1.f;
#pragma unroll
        for (int c = 0; c < VEC; ++c)
            if (arg[p + c] == place) sum[k][c] = fmaf(w, to_float(grad[p + c]), sum[k][c]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
pick(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
     const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
     const int2* __restrict__ chunks, int chunk_edges, int chunk_slots, const int* __restrict__ arg,
     const ROW_T* __restrict__ grad, const float* __restrict__ weight, ROW_T* __restrict__ out,
     float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row sum;
    clear_row(sum);
    struct Edge { int row, place; };
    const auto load = [&](Edge& e, OFF_T position) { e = {other[position], (int)place[position]}; };
    walk_singly<Edge>(at, it, load,
                      [&](const Edge& e) { add_pick(at, e.row, e.place, arg, grad, weight, sum); });
    store_sum(at, it, sum, out, part);
}
