// Building the index arrays of a graph from its edge list, without a sort and without telling the
// host anything.
//
//   count    degrees; bad ids are skipped and flagged, self loops dropped when LOOPS asks for it
//   scan     where rows begin, in place of their degrees; the list of rows that are longer than a
//            warp should carry, cut into chunks; and statistics for the host
//   place    edges into their rows
//   order    the entries of each row in ascending order of their places (row_order.cuh)
//   count_src, place_src   as `count` and `place` for the transposed graph, from the finished CSC
//   split    what `scan` does beside its sums, where `indptr` is there already
//
// An edge's number within its row is what `count` had counted before it, so their order varies from
// run to run until `order` has run. If the list is already sorted by destination, which `count`
// finds out on the way, `place` uses that order instead.
#include "common.cuh"

#define THREADS 256
#include "row_order.cuh"
#define FLAG_UNSORTED 0
#define FLAG_INVALID 1

__device__ __forceinline__ int take(int* counter) { return atomicAdd(counter, 1); }
__device__ __forceinline__ i64 take(i64* counter) { return (i64)atomicAdd((u64*)counter, (u64)1); }

__device__ __forceinline__ i64 thread_id() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

// Mostly it is up already, and many writes of one word would take turns.
__device__ __forceinline__ void raise_flag(int* flag) {
    if (*flag == 0) *flag = 1;
}

// LOOPS: edges i -> i are dropped and one is added for each node below `loops`, as the hosts do
// before attention.
__device__ __forceinline__ bool read_edge(const INDEX_T* src, const INDEX_T* dst, i64 e,
                                          i64 num_src, i64 num_dst, i64& s, i64& d, bool& valid) {
    s = src[e];
    d = dst[e];
    valid = s >= 0 && s < num_src && d >= 0 && d < num_dst;
    return valid && !(LOOPS && s == d);
}

// degree[d + 1]: how many edges end in d. number[e]: how many of its row were counted before edge
// e.
extern "C" __global__ void __launch_bounds__(THREADS)
count(const INDEX_T* __restrict__ src, const INDEX_T* __restrict__ dst, i64 edges, i64 num_src,
      i64 num_dst, OFF_T* __restrict__ degree, OFF_T* __restrict__ number,
      int* __restrict__ flags) {
    const i64 e = thread_id();
    if (e >= edges) return;
    i64 s, d;
    bool valid;
    if (read_edge(src, dst, e, num_src, num_dst, s, d, valid)) number[e] = take(&degree[d + 1]);
    if (!valid) raise_flag(flags + FLAG_INVALID);
    if (!valid || (e > 0 && dst[e - 1] > d)) raise_flag(flags + FLAG_UNSORTED);
}

extern "C" __global__ void __launch_bounds__(THREADS)
place(const INDEX_T* __restrict__ src, const INDEX_T* __restrict__ dst, i64 edges, i64 num_src,
      i64 num_dst, i64 loops, const OFF_T* __restrict__ indptr, const OFF_T* __restrict__ number,
      const int* __restrict__ flags, Entry* __restrict__ entries) {
    const i64 e = thread_id();
    if (e < edges) {
        i64 s, d;
        bool valid;
        if (!read_edge(src, dst, e, num_src, num_dst, s, d, valid)) return;
        const bool sorted = !LOOPS && flags[FLAG_UNSORTED] == 0;
        const OFF_T at = sorted ? (OFF_T)e : indptr[d] + number[e];
        entries[at] = {(OFF_T)e, (OFF_T)s};
    } else if (e < edges + loops) {  // the loop takes its row's last place
        const i64 i = e - edges;
        entries[indptr[i + 1] - 1] = {(OFF_T)e, (OFF_T)i};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_src(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int num_dst,
          OFF_T* __restrict__ degree, OFF_T* __restrict__ number) {
    const i64 p = thread_id();
    if (p < indptr[num_dst]) number[p] = take(&degree[col[p] + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
place_src(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int num_dst,
          const OFF_T* __restrict__ indptr_src, const OFF_T* __restrict__ number,
          Entry* __restrict__ entries) {
    const i64 p = thread_id();
    if (p >= indptr[num_dst]) return;
    int low = 0, high = num_dst;  // the row of place p: the last one that starts at or before it
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        if (indptr[mid] <= p) low = mid;
        else high = mid;
    }
    entries[indptr_src[col[p]] + number[p]] = {(OFF_T)p, (OFF_T)low};
}

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

// heavy, counters: as `split` made them. The first `heavy_blocks` * `windows` blocks have the rows
// longer than chunk_edges <= COMPARED. In the other blocks each warp has GROUP rows, and passes
// over those.
extern "C" __global__ void __launch_bounds__(THREADS)
order(const OFF_T* __restrict__ indptr, int rows, int chunk_edges,
      const int* __restrict__ counters, const int4* __restrict__ heavy, int heavy_blocks,
      int windows, const Entry* __restrict__ in, int* __restrict__ other_out,
      OFF_T* __restrict__ place_out) {
    DYNAMIC_SHARED(shared);
    const Entries entries = {in, other_out, place_out};
    const int block = (int)blockIdx.x, first = heavy_blocks * windows;
    if (block < first) {
        order_heavy(entries, indptr, heavy, counters[1], block % heavy_blocks, heavy_blocks,
                    block / heavy_blocks, shared);
        return;
    }
    order_block(entries, indptr, (i64)(block - first) * (THREADS / 32 * GROUP), rows, chunk_edges,
                shared);
}
