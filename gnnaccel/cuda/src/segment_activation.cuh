// The activation of X as kernels read it: rows in memory are Z, and X = act(Z). ACT_VALUE and
// ACT_SLOPE are the bodies of its value and of its gradient for a gradient g (cuda/traverse/activation.py);
// without them X is what is in memory. fp32 alone.
#pragma once
#include "segment_fragments.cuh"

#ifdef ACT_VALUE
#define ACT 1
#include "pointwise.cuh"
static_assert(sizeof(ROW_T) == 4, "activations of fp32 rows");
__device__ __forceinline__ float act(float e0) { ACT_VALUE }
__device__ __forceinline__ float act_grad(float e0, float g) { ACT_SLOPE }
#else
#define ACT 0
__device__ __forceinline__ float act(float x) { return x; }
#endif

__device__ __forceinline__ void activate(Slot& slot) {
#if ACT
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                slot[m][half][i] = __float_as_uint(act(__uint_as_float(slot[m][half][i])));
#endif
}
