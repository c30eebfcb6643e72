// Rows that are gathered, in any format. INT8: they are whole numbers, STRIDE bytes apart
// (cuda/int8/quantize.py), and each is to be multiplied with a scale of its own, which kernels put into
// the weights of the edges.
#pragma once
#include "merge.cuh"

#ifndef INT8
#define INT8 0
#endif

template <typename T> struct Gathered {
    const T* rows;
    const float* scale;  // null but for int8
};

// A kernel's parameters for rows of ROW_T, and what they make.
#if INT8
#define GATHERED(x) const ROW_T *__restrict__ x, const float *__restrict__ x##_scale
#define ROWS_OF(x) {x, x##_scale}
#else
#define GATHERED(x) const ROW_T* __restrict__ x
#define ROWS_OF(x) {x, nullptr}
#endif

// s + the inner product of two packs, four bytes at a time.
template <int Count> __device__ __forceinline__ int dot_bytes(const PackWord<q8, Count>& a,
                                                              const PackWord<q8, Count>& b, int s) {
    if constexpr (Count < 4) {
#pragma unroll
        for (int i = 0; i < Count; ++i) s += (int)a.pack.v[i].bits * (int)b.pack.v[i].bits;
    } else {
        const u32(&x)[Count / 4] = reinterpret_cast<const u32(&)[Count / 4]>(a.word);
        const u32(&y)[Count / 4] = reinterpret_cast<const u32(&)[Count / 4]>(b.word);
#pragma unroll
        for (int i = 0; i < Count / 4; ++i) s = __dp4a((int)x[i], (int)y[i], s);
    }
    return s;
}
