// What the kernels that build a graph's index arrays share (structure.cu, row_split.cu,
// row_order.cu). They are compiled apart, since `order` takes most of the time and depends on less.
#ifndef GNNACCEL_STRUCTURE_CUH
#define GNNACCEL_STRUCTURE_CUH

#include "common.cuh"

#define THREADS 256
#define FLAG_UNSORTED 0
#define FLAG_INVALID 1

__device__ __forceinline__ i64 thread_id() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

// An entry as `place` leaves it.
struct __align__(2 * sizeof(OFF_T)) Entry {
    OFF_T place, other;
};

#endif
