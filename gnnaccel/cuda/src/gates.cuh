// What kernels of gated messages share: the gate, and two sums per row that come together.
#pragma once
#include "merge.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2f(-x * LOG2E)); }

// The two sums of a chunk, side by side.
__device__ __forceinline__ void store_pair(const Lanes& at, float* part, int chunk, const Row& a, const Row& b) {
    store_row(at, part, 2 * (u64)chunk, a);
    store_row(at, part, 2 * (u64)chunk + 1, b);
}

__device__ __forceinline__ void add_pairs(const Lanes& at, int first, int count, const float* part, Row& a, Row& b) {
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
