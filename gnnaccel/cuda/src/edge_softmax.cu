// Softmax of numbers per edge and head over the edges of each row, and its gradient.
//
//   forward:   out[e, h] = exp(x[e, h] - max) / sum over the edges of e's row of exp(x - max)
//   backward:  dx[e, h] = out[e, h] (g[e, h] - sum over the edges of e's row of out g)
//
// Arrays over edges are addressed by place. A lane stands for one head and every SLOTS-th edge of
// the row; it keeps what it read first, so that most rows are read once. Chunks of split rows leave
// what they know of themselves, and `forward_chunks` and `backward_chunks` put that together and
// write the edges. As with the hosts, a row of nothing but -inf becomes NaN.
#include "items.cuh"

#define KEEP 4
#define TURN (KEEP * SLOTS)

struct Edges {
    const OFF_T* place;
    int head;
    bool on;  // the lane has a head

    // Where the lane's u-th edge of the turn at `first` has its number; -1 beyond the end.
    __device__ __forceinline__ i64 at(OFF_T first, OFF_T end, int slot, int u) const {
        const i64 e = (i64)first + u * SLOTS + slot;
        return on && e < (i64)end ? (i64)place[e] * H + head : -1;
    }
};

// Maximum so far, and the sum of exponentials relative to it.
struct State {
    float top, sum;

    __device__ __forceinline__ void add(float other_top, float other_sum) {
        const float larger = fmaxf(top, other_top), base = reference(larger);
        // nothing summed yet is nothing, however far off the new maximum
        sum = (sum == 0.f ? 0.f : sum * expf(top - base))
            + (other_sum == 0.f ? 0.f : other_sum * expf(other_top - base));
        top = larger;
    }
};

// Over the lanes of one head; all get the first slot's bits.
__device__ __forceinline__ void merge_slots(const Lanes& at, State& s) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1) {
        const float top = __shfl_xor_sync(FULL_WARP, s.top, w),
            sum = __shfl_xor_sync(FULL_WARP, s.sum, w);
        s.add(top, sum);
    }
    s.top = __shfl_sync(FULL_WARP, s.top, at.lane % ROW_LANES);
    s.sum = __shfl_sync(FULL_WARP, s.sum, at.lane % ROW_LANES);
}

__device__ __forceinline__ float slots_sum(float x) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1) x += __shfl_xor_sync(FULL_WARP, x, w);
    return x;
}

struct Turn {
    i64 at[KEEP];
    float x[KEEP];
};

__device__ __forceinline__ void load_turn(const Edges& edges, const Lanes& lanes, OFF_T first,
                                          OFF_T end, const ROW_T* x, float none, Turn& t) {
#pragma unroll
    for (int u = 0; u < KEEP; ++u) {
        t.at[u] = edges.at(first, end, lanes.slot, u);
        t.x[u] = t.at[u] >= 0 ? to_float(x[t.at[u]]) : none;
    }
}

__device__ __forceinline__ void add_turn(const Turn& t, State& s) {
    float top = t.x[0], sum = 0.f;
#pragma unroll
    for (int u = 1; u < KEEP; ++u) top = fmaxf(top, t.x[u]);
    const float base = reference(top);
#pragma unroll
    for (int u = 0; u < KEEP; ++u) sum += t.at[u] >= 0 ? expf(t.x[u] - base) : 0.f;
    s.add(top, sum);
}

__device__ __forceinline__ void write_turn(const Turn& t, const State& s, ROW_T* out) {
    const float base = reference(s.top);
#pragma unroll
    for (int u = 0; u < KEEP; ++u)
        if (t.at[u] >= 0) out[t.at[u]] = from_float<ROW_T>(expf(t.x[u] - base) / s.sum);
}

#define GRAPH_ARGS const OFF_T* __restrict__ indptr, const int* __restrict__ other, const OFF_T* __restrict__ place, int rows, \
        const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(GRAPH_ARGS, const ROW_T* __restrict__ x, ROW_T* __restrict__ out,
        float* __restrict__ part_top, float* __restrict__ part_sum) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Edges edges = {place, at.head(0), at.head(0) < H};
    State s = {NEG_INF, 0.f};
    Turn t;
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        load_turn(edges, at, it.end - rest, it.end, x, NEG_INF, t);
        add_turn(t, s);
    }
    merge_slots(at, s);
    if (it.chunk >= 0) {
        if (at.slot == 0 && edges.on) {
            part_top[(u64)it.chunk * H + edges.head] = s.top;
            part_sum[(u64)it.chunk * H + edges.head] = s.sum;
        }
        return;
    }
    const bool kept = it.end - it.begin <= TURN;
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        if (!kept) load_turn(edges, at, it.end - rest, it.end, x, NEG_INF, t);
        write_turn(t, s, out);
    }
}

// The chunks of the row that chunk `w` is of: the first, and how many.
__device__ __forceinline__ int2 siblings(int w, const int2* chunks, const OFF_T* indptr,
                                         int chunk_edges) {
    const int2 c = chunks[w];
    const OFF_T edges = indptr[c.x + 1] - indptr[c.x];
    return make_int2(w - c.y, (int)((edges + chunk_edges - 1) / chunk_edges));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward_chunks(GRAPH_ARGS, const ROW_T* __restrict__ x, ROW_T* __restrict__ out,
               const float* __restrict__ part_top, const float* __restrict__ part_sum) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (warp_id() >= chunk_slots || !item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Edges edges = {place, at.head(0), at.head(0) < H};
    const int2 group = siblings(it.chunk, chunks, indptr, chunk_edges);
    State s = {NEG_INF, 0.f};
    for (int c = at.slot; c < group.y && edges.on; c += SLOTS) {
        const u64 p = (u64)(group.x + c) * H + edges.head;
        s.add(part_top[p], part_sum[p]);
    }
    merge_slots(at, s);
    Turn t;
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        load_turn(edges, at, it.end - rest, it.end, x, NEG_INF, t);
        write_turn(t, s, out);
    }
}

// ---- gradient
// --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void write_grads(const Turn& y, const Turn& g, float total, ROW_T* dx) {
#pragma unroll
    for (int u = 0; u < KEEP; ++u)
        if (y.at[u] >= 0) dx[y.at[u]] = from_float<ROW_T>(y.x[u] * (g.x[u] - total));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(GRAPH_ARGS, const ROW_T* __restrict__ y, const ROW_T* __restrict__ grad,
         ROW_T* __restrict__ dx, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Edges edges = {place, at.head(0), at.head(0) < H};
    float total = 0.f;
    Turn t, g;
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        load_turn(edges, at, it.end - rest, it.end, y, 0.f, t);
        load_turn(edges, at, it.end - rest, it.end, grad, 0.f, g);
#pragma unroll
        for (int u = 0; u < KEEP; ++u) total = fmaf(t.x[u], g.x[u], total);
    }
    total = slots_sum(total);
    if (it.chunk >= 0) {
        if (at.slot == 0 && edges.on) part[(u64)it.chunk * H + edges.head] = total;
        return;
    }
    const bool kept = it.end - it.begin <= TURN;
    // gradients that all but agree: what the first total has left of them, relative to its own mean
    if (kept) {
        float left = 0.f;
#pragma unroll
        for (int u = 0; u < KEEP; ++u) {
            g.x[u] -= total;
            left = fmaf(t.x[u], g.x[u], left);
        }
        total = slots_sum(left);
    }
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        if (!kept) {
            load_turn(edges, at, it.end - rest, it.end, y, 0.f, t);
            load_turn(edges, at, it.end - rest, it.end, grad, 0.f, g);
        }
        write_grads(t, g, total, dx);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward_chunks(GRAPH_ARGS, const ROW_T* __restrict__ y, const ROW_T* __restrict__ grad,
                ROW_T* __restrict__ dx, const float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (warp_id() >= chunk_slots || !item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Edges edges = {place, at.head(0), at.head(0) < H};
    const int2 group = siblings(it.chunk, chunks, indptr, chunk_edges);
    float total = 0.f;
    for (int c = at.slot; c < group.y && edges.on; c += SLOTS)
        total += part[(u64)(group.x + c) * H + edges.head];
    total = slots_sum(total);
    Turn t, g;
    for (OFF_T rest = it.end - it.begin; rest > 0; rest -= TURN) {
        load_turn(edges, at, it.end - rest, it.end, y, 0.f, t);
        load_turn(edges, at, it.end - rest, it.end, grad, 0.f, g);
        write_grads(t, g, total, dx);
    }
}
