// Rows that are gathered, in any format. INT8: they are whole numbers, STRIDE bytes apart (cuda/quantize.py), and each is to be
// multiplied with a scale of its own, which kernels put into the weights of the edges.
#pragma once
#include "merge.cuh"

#ifndef INT8
#define INT8 0
#endif

// Told how many blocks a multiprocessor is to hold, the compiler puts a step's loads together; untold, it spreads them over the step
// to save registers that nothing needs.
#if INT8
#define BOUNDS __launch_bounds__(32 * WARPS, BLOCKS)
#else
#define BOUNDS __launch_bounds__(32 * WARPS)
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
