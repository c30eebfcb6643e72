// Rows of destinations whose result does not depend on the softmax, because all that counts in them
// comes from one source. Gradients of their scores are zero, but would be computed as differences
// of large numbers that are rounded apart.
#pragma once
#include "merge.cuh"

#define MOST_COPIES 64.f  // of one edge, which share a softmax
#define LONGEST_ROW 2048  // in which they are looked for

// Whether the sum of a softmax is a whole number, as it is where all scores are equal: each edge
// adds exp(0). `inverse`: its reciprocal, 0 without edges. Sums so large that all are: yes.
__device__ __forceinline__ bool whole(float inverse) {
    const float sum = rintf(__fdividef(1.f, inverse));  // rounded, so that a few digits are enough
    return fabsf(fmaf(sum, inverse, -1.f)) <= ULP || (inverse > 0.f && inverse < 1.e-6f);
}

// Whether all edges of a slot's row come from one source, however many they are. Without edges: no.
// `maybe`: asked for one head of each lane; a row is only looked at where it is true of one, since
// reading two arrays, one after the other, takes longer than all else that `prepare` does.
// All lanes of the warp call it. Rows with two sources are mostly known by their first edges.
__device__ __forceinline__ bool one_source(const Lanes& at, const OFF_T* indptr, const int* nbr,
                                           long long row, bool maybe) {
    const u32 asked = __ballot_sync(FULL_WARP, maybe);
    if (!asked) return false;
    const u32 slot = (ROW_LANES == 32 ? FULL_WARP : (1u << (ROW_LANES % 32)) - 1)
        << (at.slot * ROW_LANES);
    const bool on = asked & slot;
    const OFF_T begin = on ? indptr[row] : 0, end = on ? indptr[row + 1] : 0;
    const int first = begin < end ? nbr[begin] : 0, own = at.lane % ROW_LANES;
    bool same = begin < end;
    for (OFF_T e = begin + own; __any_sync(FULL_WARP, same && e - own < end); e += ROW_LANES)
        if (__ballot_sync(FULL_WARP, same && e < end && nbr[e] != first) & slot) same = false;
    return same;
}

// How many edges share a softmax equally while all others weigh nothing: its sum, if that is a
// whole number; else 0.
__device__ __forceinline__ int sharing(float inverse) {
    if (!whole(inverse)) return 0;
    const float sum = rintf(1.f / inverse);
    return sum >= 2.f && sum <= MOST_COPIES && 1.f / sum == inverse ? (int)sum : 0;
}

// Whether the edges of a slot's row that share its softmax for head kh are copies of one edge: as
// many come from one source, and the result is this source's value but for rounding. `inverse`: 1 /
// sum of the softmax, 0 where nothing is asked. All lanes of the warp call it. Int8 values and
// results after dropout are not looked at.
template <typename T>
__device__ __forceinline__ bool copies(const Lanes& at, const OFF_T* indptr, const int* nbr,
                                       long long row, const T* values, const Row& out, int kh,
                                       float inverse) {
    const int count = DROPOUT || sizeof(T) == 1 ? 0 : sharing(inverse);
    if (!__any_sync(FULL_WARP, count)) return false;
    const OFF_T begin = count ? indptr[row] : 0, end = count ? indptr[row + 1] : 0;
    const u32 head = (LH == 32 ? FULL_WARP : (1u << (LH % 32)) - 1) << (at.lane & ~(LH - 1));
    bool asked = end - begin > count && end - begin <= LONGEST_ROW, found = false;
    for (OFF_T e = begin; __any_sync(FULL_WARP, asked && e < end); ++e) {
        bool near = asked && e < end;
        const int source = near ? nbr[e] : 0;
        Row v;
        load_row(at, values, (u64)source, near, v);
#pragma unroll
        for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x)
                near = near && fabsf(v[k][x] - out[k][x]) <= 4.f * ULP * fabsf(out[k][x]);
        if ((__ballot_sync(FULL_WARP, near) & head) != head) continue;
        int same = 0;
        for (OFF_T other = begin; other < end; ++other) same += nbr[other] == source;
        found = same == count;
        asked = false;
    }
    return found;
}
