// out[h][s] = tiles of LEAST << h rows before segment s, for each height that products by segment
// cut their rows into. Torch's operations would take a launch for each step of this sum, at each
// height; the segments of a new graph are read once.
//
// Each block makes one height. A thread adds up a strip of segments, the block sums the strips.
#ifndef GNNACCEL_TILE_PTR_CUH
#define GNNACCEL_TILE_PTR_CUH

#include "common.cuh"

#define THREADS 256
#define LEAST 16

__device__ __forceinline__ int tiles(const int* ptr, int segment, int height) {
    return (ptr[segment + 1] - ptr[segment] + height - 1) / height;
}

extern "C" __global__ void __launch_bounds__(THREADS)
tile_ptr(const int* __restrict__ ptr, int segments, int* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    int* const sums = (int*)shared;  // [THREADS]
    const int height = LEAST << blockIdx.y;
    const int strip = (segments + THREADS - 1) / THREADS;
    const int begin = min((int)threadIdx.x * strip, segments), end = min(begin + strip, segments);
    int own = 0;
    for (int s = begin; s < end; ++s) own += tiles(ptr, s, height);
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int reach = 1; reach < THREADS; reach *= 2) {
        const int before = (int)threadIdx.x >= reach ? sums[threadIdx.x - reach] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    int* const row = out + (i64)blockIdx.y * (segments + 1);
    int total = sums[threadIdx.x] - own;
    for (int s = begin; s < end; ++s) {
        row[s] = total;
        total += tiles(ptr, s, height);
    }
    if (threadIdx.x == THREADS - 1) row[segments] = sums[threadIdx.x];
}

#endif
