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

// Sorts `keys` [size], shared memory, by `threads`, all threads of the block. size: a power of two.
template <typename T>
__device__ __forceinline__ void sort_keys(T* keys, int size, int threads) {
    for (int run = 2; run <= size; run *= 2)
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += threads) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const T a = keys[low], b = keys[high];
                if ((a > b) == ((low & run) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
}

#endif
