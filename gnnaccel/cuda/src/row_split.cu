// Where the rows of a graph's index arrays begin, and which of them are long.
//
//   scan     where rows begin, in place of their degrees; the list of rows that are longer than a
//            warp should carry, cut into chunks; and statistics for the host
//   split    what `scan` does beside its sums, where `indptr` is there already
#include "report.cuh"

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
