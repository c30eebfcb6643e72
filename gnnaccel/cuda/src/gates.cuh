// What kernels of gated messages share: the gate, and two sums per row that come together.
#pragma once
#include "walk.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2f(-x * LOG2E)); }

// The two sums of a chunk, side by side.
__device__ __forceinline__ void store_pair(const Lanes& at, float* part, int chunk, const Row& a,
                                           const Row& b) {
    store_row(at, part, 2 * (u64)chunk, a);
    store_row(at, part, 2 * (u64)chunk + 1, b);
}

__device__ __forceinline__ void add_pairs(const Lanes& at, int first, int count, const float* part,
                                          Row& a, Row& b) {
    clear_row(a);
    clear_row(b);
    for (int i = at.slot; i < count; i += SLOTS) {
        Row v;
        load_row(at, part, 2 * (u64)(first + i), true, v);
        add_row(a, v);
        load_row(at, part, 2 * (u64)(first + i) + 1, true, v);
        add_row(b, v);
    }
    __syncwarp();
    sum_slots(a);
    sum_slots(b);
}

// Both sums over an item, as `store_sum` stores one.
__device__ __forceinline__ void store_sums(const Lanes& at, const Item& it, Row& a, Row& b,
                                           ROW_T* a_out, ROW_T* b_out, float* part) {
    sum_slots(a);
    sum_slots(b);
    if (at.slot != 0) return;
    if (it.chunk < 0) {
        store_row(at, a_out, it.row, a);
        store_row(at, b_out, it.row, b);
    } else {
        store_pair(at, part, it.chunk, a, b);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
add_both(const int* __restrict__ counters, const int4* __restrict__ heavy,
         const float* __restrict__ part, ROW_T* __restrict__ a_out, ROW_T* __restrict__ b_out) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row a, b;
    add_pairs(at, row.y, row.z, part, a, b);
    if (at.slot != 0) return;
    store_row(at, a_out, row.x, a);
    store_row(at, b_out, row.x, b);
}
