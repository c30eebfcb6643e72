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

// The first edge from `from` on, before `end`, whose source may have the value `first` in its channel
// `channel` but for rounding; `end` if there is none. All lanes of the warp have the same arguments
// and look at an edge each.
template <typename T>
__device__ __forceinline__ OFF_T next_near(const Lanes& at, const int* nbr, OFF_T from, OFF_T end,
                                           const T* values, int channel, float first) {
    for (OFF_T base = from; base < end; base += 32) {
        const bool on = at.lane < end - base;
        const float x = on ? to_float(values[(u64)nbr[base + at.lane] * (H * D) + channel]) : 0.f;
        const u32 near = __ballot_sync(FULL_WARP,
                                       on && fabsf(x - first) <= 4.f * ULP * fabsf(first));
        if (near) return base + __ffs(near) - 1;
    }
    return end;
}

// Whether the edges of a slot's row that share its softmax for head kh are copies of one edge: as
// many come from one source, and the result is this source's value but for rounding. `inverse`: 1 /
// sum of the softmax, 0 where nothing is asked. All lanes of the warp call it, and look together at
// one row after the other: they are few, but may be long. Int8 values and results after dropout are
// not looked at.
template <typename T>
__device__ __forceinline__ bool copies(const Lanes& at, const OFF_T* indptr, const int* nbr,
                                       long long row, const T* values, const Row& out, int kh,
                                       float inverse) {
    const int count = DROPOUT || sizeof(T) == 1 ? 0 : sharing(inverse);
    bool found = false;
    for (u32 asked = __ballot_sync(FULL_WARP, count && at.lh == 0); asked; asked &= asked - 1) {
        const int leader = __ffs(asked) - 1, same = __shfl_sync(FULL_WARP, count, leader);
        const bool mine = (at.lane & ~(LH - 1)) == leader;  // this lane has channels of the head
        const long long of = __shfl_sync(FULL_WARP, row, leader);
        const float first = __shfl_sync(FULL_WARP, out[kh * KV][0], leader);
        const int channel = __shfl_sync(FULL_WARP, at.head(kh) * D, leader);
        const OFF_T begin = indptr[of], end = indptr[of + 1];
        if (end - begin <= same || end - begin > LONGEST_ROW) continue;
        bool near = false;
        int source = 0;
        for (OFF_T e = begin; !near; ++e) {
            e = next_near(at, nbr, e, end, values, channel, first);
            if (e >= end) break;
            source = nbr[e];
            Row v;
            load_row(at, values, (u64)source, mine, v);
            bool equal = true;
#pragma unroll
            for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
                for (int x = 0; x < VEC; ++x)
                    equal = equal && fabsf(v[k][x] - out[k][x]) <= 4.f * ULP * fabsf(out[k][x]);
            near = __all_sync(FULL_WARP, !mine || equal);
        }
        int times = 0;
        for (OFF_T e = begin; near && e < end; e += 32)
            times += __popc(__ballot_sync(FULL_WARP,
                                          at.lane < end - e && nbr[e + at.lane] == source));
        if (mine) found = near && times == same;
    }
    return found;
}
