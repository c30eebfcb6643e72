// The largest or smallest of numbers, and how many there are of it. NaN is larger and smaller than
// everything.
#pragma once
#include "layout.cuh"

// What no number is worse than.
template <bool Largest> __device__ __forceinline__ float worst() {
    return Largest ? NEG_INF : infinity();
}

// Takes `value`, of which there are `count`, into the best so far, of which there are `times`. Bits
// are joined rather than conditions, so that it compiles to selects: with branches, maxima over the
// neighbours take up to a tenth longer.
template <bool Largest, class Count>
__device__ __forceinline__ void keep(float value, Count count, float& best, Count& times) {
    const bool wins = (value != value) | (Largest ? value > best : value < best);
    const bool joins = wins | (value == best);
    times = (wins ? Count(0) : times) + (joins ? count : Count(0));
    best = wins ? value : best;
}

template <class Count>
__device__ __forceinline__ float extremum_or_zero(float value, Count times) {
    return times ? value : 0.f;
}
