// The largest or smallest of numbers, and how many there are of it. NaN is larger and smaller than
// everything.
#pragma once
#include "layout.cuh"

// What no number is worse than.
template <bool Largest> __device__ __forceinline__ float worst() {
    return Largest ? NEG_INF : infinity();
}

// Takes `value`, of which there are `count`, into the best so far, of which there are `times`.
template <bool Largest, class Count>
__device__ __forceinline__ void keep(float value, Count count, float& best, Count& times) {
    const bool wins = value != value || (Largest ? value > best : value < best);
    times = wins ? count : value == best ? times + count : times;
    best = wins ? value : best;
}

template <class Count>
__device__ __forceinline__ float extremum_or_zero(float value, Count times) {
    return times ? value : 0.f;
}
