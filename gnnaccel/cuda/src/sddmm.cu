// What two operands have at each edge, added or multiplied:
//
//   elementwise:  out[e, :] = lhs[lhs_index[e], :] op rhs[rhs_index[e], :]
//
// An index of null is e itself. Rows have WIDTH numbers, read VEC at a time; a thread makes one
// pack of the result, and those of a warp lie side by side. Edges come in the caller's order, so no
// structure of the graph is needed.
#include "common.cuh"

#define PACKS (WIDTH / VEC)

__device__ __forceinline__ i64 row_of(const INDEX_T* index,
                                      i64 edge) { return index ? (i64)index[edge] : edge; }

extern "C" __global__ void __launch_bounds__(256)
elementwise(const INDEX_T* __restrict__ lhs_index, const INDEX_T* __restrict__ rhs_index, i64 edges,
            const ROW_T* __restrict__ lhs, const ROW_T* __restrict__ rhs, ROW_T* __restrict__ out) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= edges * PACKS) return;
    const i64 edge = at / PACKS;
    const int channel = (int)(at % PACKS) * VEC;
    float a[VEC], b[VEC];
    load_pack<ROW_T, VEC>(lhs + row_of(lhs_index, edge) * WIDTH + channel, a);
    load_pack<ROW_T, VEC>(rhs + row_of(rhs_index, edge) * WIDTH + channel, b);
#pragma unroll
    for (int i = 0; i < VEC; ++i) a[i] = MULTIPLY ? a[i] * b[i] : a[i] + b[i];
    store_pack<ROW_T, VEC>(out + edge * WIDTH + channel, a);
}
