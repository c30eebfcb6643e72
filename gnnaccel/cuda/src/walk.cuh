// What kernels share in which each slot of a warp sums edges of its own: the walk over an item's
// edges, and the sum of a split row's chunks.
#pragma once
#include "merge.cuh"

// How many edges of a slot are in flight where each of them brings several rows.
#define AHEAD (UNROLL > 1 ? UNROLL / 2 : 1)

// Each slot takes every SLOTS-th of the item's edges, Ahead of them at a time: `load(e, position,
// on)` for all of those, then `use(e, position, on)` for one after the other. Past the last edge
// `on` is false, and the position is none.
template <class Edge, int Ahead, class Load, class Use>
__device__ __forceinline__ void walk(const Lanes& at, const Item& it, const Load& load,
                                     const Use& use) {
    for (OFF_T first = it.begin + at.slot; first < it.end; first += SLOTS * Ahead) {
        Edge e[Ahead];
#pragma unroll
        for (int u = 0; u < Ahead; ++u)
            load(e[u], first + u * SLOTS, u == 0 || first + u * SLOTS < it.end);
#pragma unroll
        for (int u = 0; u < Ahead; ++u)
            use(e[u], first + u * SLOTS, u == 0 || first + u * SLOTS < it.end);
    }
    __syncwarp();
}

// The same one edge at a time: `load(e, position)`, `use(e)`. Compilers unroll this by themselves,
// better where it counts down.
template <class Edge, class Load, class Use>
__device__ __forceinline__ void walk_singly(const Lanes& at, const Item& it, const Load& load,
                                            const Use& use) {
    for (OFF_T rest = it.end - it.begin; rest > at.slot; rest -= SLOTS) {
        Edge e;
        load(e, it.end - rest + at.slot);
        use(e);
    }
    __syncwarp();
}

// Results that are plain sums, of rows that lie in chunks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
add_parts(const int* __restrict__ counters, const int4* __restrict__ heavy,
          const float* __restrict__ part, ROW_T* __restrict__ out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row sum;
    add_chunks(at, row.y, row.z, part, sum);
    if (at.slot == 0) store_row(at, out, row.x, sum);
}
