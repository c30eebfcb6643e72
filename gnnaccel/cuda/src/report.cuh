// What is found out about the rows of a graph's index arrays as they are made: which of them are
// long, and statistics for the host.
#ifndef GNNACCEL_REPORT_CUH
#define GNNACCEL_REPORT_CUH

#include "structure.cuh"

// counters [COUNTERS]: 0 chunks, 1 split rows, 2 longest row, 3 blocks done, 4-5 edges in split
// rows (64 bits), from BINS_AT rows by degree: bin b counts the degrees of b bits (0; 1; 2-3; 4-7;
// ...). `host` is pinned memory that the host reads whenever it likes: 0 the caller's tag, once all
// is there, 1 invalid ids seen, 2-3 edges (64 bits), from HOST_AT a copy of the counters.
#define BINS_AT 6
#define BINS 32
#define COUNTERS (BINS_AT + BINS)
#define HOST_AT 4

struct Report {
    int* counters;
    int2* chunks;
    int4* heavy;
    const int* flags;
    volatile int* host;
    int tag;

    // `bins` [BINS + 1]: shared memory; the last is the longest row.
    __device__ __forceinline__ void begin(int* bins) const {
        for (int i = threadIdx.x; i <= BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
    }

    __device__ __forceinline__ void add(int* bins, i64 row, OFF_T length, int chunk_edges) const {
        const int clipped = (int)(length < 0x7fffffff ? length : 0x7fffffff);
        atomicMax(&bins[BINS], clipped);
        atomicAdd(&bins[32 - __clz(clipped)], 1);
        if (length <= chunk_edges) return;
        const int n = (int)((length + chunk_edges - 1) / chunk_edges);
        const int first = atomicAdd(&counters[0], n), at = atomicAdd(&counters[1], 1);
        atomicAdd((u64*)(counters + 4), (u64)length);
        for (int c = 0; c < n; ++c) chunks[first + c] = make_int2((int)row, c);
        heavy[at] = make_int4((int)row, first, n, 0);
    }

    // The last block to be done reports.
    __device__ __forceinline__ void end(int* bins, const OFF_T* indptr, int rows) const {
        const int thread = threadIdx.x;
        __syncthreads();
        if (thread < BINS && bins[thread]) atomicAdd(&counters[BINS_AT + thread], bins[thread]);
        if (thread == 0) atomicMax(&counters[2], bins[BINS]);
        __threadfence();
        __syncthreads();
        if (thread == 0) bins[0] = atomicAdd(&counters[3], 1) == (int)gridDim.x - 1;
        __syncthreads();
        if (!bins[0]) return;
        if (thread == 0) {
            host[0] = 0;  // whatever stands there now is about to be wrong
            __threadfence_system();
        }
        __syncthreads();
        if (thread < COUNTERS) host[HOST_AT + thread] = atomicAdd(&counters[thread], 0);
        if (thread == 0) {
            const i64 edges = ((const volatile OFF_T*)indptr)[rows];
            host[1] = flags ? flags[FLAG_INVALID] : 0;
            host[2] = (int)(edges & 0xffffffff);
            host[3] = (int)(edges >> 32);
        }
        __threadfence_system();
        __syncthreads();
        if (thread == 0) {
            __threadfence_system();
            host[0] = tag;
        }
    }
};

#endif
