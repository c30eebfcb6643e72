// Where the rows of a graph's index arrays begin, and which of them are long.
//
//   scan     where rows begin, in place of their degrees; the list of rows that are longer than a
//            warp should carry, cut into chunks; and statistics for the host
//   split    what `scan` does beside its sums, where `indptr` is there already
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

extern "C" __global__ void __launch_bounds__(THREADS)
split(const OFF_T* __restrict__ indptr, int rows, int chunk_edges, int* __restrict__ counters,
      int2* __restrict__ chunks, int4* __restrict__ heavy, const int* __restrict__ flags,
      volatile int* __restrict__ host, int tag) {
    DYNAMIC_SHARED(shared);
    const Report report = {counters, chunks, heavy, flags, host, tag};
    report.begin((int*)shared);
    const i64 row = thread_id();
    if (row < rows) report.add((int*)shared, row, indptr[row + 1] - indptr[row], chunk_edges);
    report.end((int*)shared, indptr, rows);
}

#include "scan.cuh"

// indptr [rows + 1]: degree of row r at r + 1 before, where rows begin after. Rows below `loops`
// get one edge more. state [blocks + 1]: zeros before; the last is the number of blocks that have
// begun.
extern "C" __global__ void __launch_bounds__(THREADS)
scan(OFF_T* __restrict__ indptr, int rows, i64 loops, int chunk_edges, u64* __restrict__ state,
     int* __restrict__ counters, int2* __restrict__ chunks, int4* __restrict__ heavy,
     const int* __restrict__ flags, volatile int* __restrict__ host, int tag) {
    DYNAMIC_SHARED(shared);
    u64* parts = (u64*)shared;              // [THREADS / 32 + 1]
    int* bins = (int*)(parts + THREADS / 32 + 1);  // [BINS + 1]
    const Report report = {counters, chunks, heavy, flags, host, tag};
    report.begin(bins);
    const i64 first = begin_block(state, parts) * SCANNED + (i64)threadIdx.x * EACH_SCANNED;
    OFF_T length[EACH_SCANNED];
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < EACH_SCANNED; ++i) {
        const i64 row = first + i;
        length[i] = row < rows ? indptr[row + 1] + (row < loops) : 0;
        sum += (u64)length[i];
    }
    u64 before = sum_before(sum, first / SCANNED, state, parts);
#pragma unroll
    for (int i = 0; i < EACH_SCANNED; ++i) {
        const i64 row = first + i;
        if (row < rows) {
            before += (u64)length[i];
            indptr[row + 1] = (OFF_T)before;
            report.add(bins, row, length[i], chunk_edges);
        }
    }
    report.end(bins, indptr, rows);
}
