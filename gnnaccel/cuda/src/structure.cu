// Building the index arrays of a graph from its edge list, without a sort and without telling the
// host anything.
//
//   count    degrees; bad ids are skipped and flagged, self loops dropped when LOOPS asks for it
//   place    edges into their rows (torch's cumsum made `indptr` in between)
//   count_src, place_src   the same for the transposed graph, from the finished CSC
//   split    the list of rows that are longer than a warp should carry, cut into chunks; and
//   statistics for the host
//   order    the entries of each row in ascending order of their places (row_order.cuh)
//
// Places within a row are taken with atomics, so their order varies from run to run until `order`
// has run. If the list is already sorted by destination, which `count` finds out on the way,
// `place` uses that order instead.
#include "common.cuh"

#define THREADS 256
#include "row_order.cuh"
#define FLAG_UNSORTED 0
#define FLAG_INVALID 1

__device__ __forceinline__ int take(int* counter) { return atomicAdd(counter, 1); }
__device__ __forceinline__ i64 take(i64* counter) { return (i64)atomicAdd((u64*)counter, (u64)1); }

__device__ __forceinline__ i64 thread_id() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

// LOOPS: edges i -> i are dropped and one is added for each node below `loops`, as the hosts do
// before attention.
__device__ __forceinline__ bool read_edge(const INDEX_T* src, const INDEX_T* dst, i64 e,
                                          i64 num_src, i64 num_dst, i64& s, i64& d, bool& valid) {
    s = src[e];
    d = dst[e];
    valid = s >= 0 && s < num_src && d >= 0 && d < num_dst;
    return valid && !(LOOPS && s == d);
}

extern "C" __global__ void __launch_bounds__(THREADS)
count(const INDEX_T* __restrict__ src, const INDEX_T* __restrict__ dst, i64 edges, i64 num_src,
      i64 num_dst, i64 loops, OFF_T* __restrict__ degree, int* __restrict__ flags) {
    const i64 e = thread_id();
    if (e < edges) {
        i64 s, d;
        bool valid;
        if (read_edge(src, dst, e, num_src, num_dst, s, d, valid)) take(&degree[d]);
        if (!valid) flags[FLAG_INVALID] = 1;
        if (!valid || (e > 0 && dst[e - 1] > d)) flags[FLAG_UNSORTED] = 1;
    } else if (e < edges + loops) {
        take(&degree[e - edges]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
place(const INDEX_T* __restrict__ src, const INDEX_T* __restrict__ dst, i64 edges, i64 num_src,
      i64 num_dst, i64 loops, const OFF_T* __restrict__ indptr, OFF_T* __restrict__ cursor,
      const int* __restrict__ flags, int* __restrict__ col, OFF_T* __restrict__ eid) {
    const i64 e = thread_id();
    if (e < edges) {
        i64 s, d;
        bool valid;
        if (!read_edge(src, dst, e, num_src, num_dst, s, d, valid)) return;
        const bool sorted = !LOOPS && flags[FLAG_UNSORTED] == 0;
        const OFF_T at = sorted ? (OFF_T)e : indptr[d] + take(&cursor[d]);
        col[at] = (int)s;
        eid[at] = (OFF_T)e;
    } else if (e < edges + loops) {  // the loop takes its row's last place
        const i64 i = e - edges;
        const OFF_T at = indptr[i + 1] - 1;
        col[at] = (int)i;
        eid[at] = (OFF_T)e;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_src(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int num_dst,
          OFF_T* __restrict__ degree) {
    const i64 p = thread_id();
    if (p < indptr[num_dst]) take(&degree[col[p]]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
place_src(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int num_dst,
          const OFF_T* __restrict__ indptr_src, OFF_T* __restrict__ cursor, int* __restrict__ nbr,
          OFF_T* __restrict__ position) {
    const i64 p = thread_id();
    if (p >= indptr[num_dst]) return;
    int low = 0, high = num_dst;  // the row of place p: the last one that starts at or before it
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        if (indptr[mid] <= p) low = mid;
        else high = mid;
    }
    const int s = col[p];
    const OFF_T at = indptr_src[s] + take(&cursor[s]);
    nbr[at] = low;
    position[at] = (OFF_T)p;
}

// counters [COUNTERS]: 0 chunks, 1 split rows, 2 longest row, 3 blocks done, 4-5 edges in split
// rows (64 bits), from BINS_AT rows by degree: bin b counts the degrees of b bits (0; 1; 2-3; 4-7;
// ...). `host` is pinned memory that the host reads whenever it likes: 0 the caller's tag, once all
// is there, 1 invalid ids seen, 2-3 edges (64 bits), from HOST_AT a copy of the counters.
#define BINS_AT 6
#define BINS 32
#define COUNTERS (BINS_AT + BINS)
#define HOST_AT 4

extern "C" __global__ void __launch_bounds__(THREADS)
split(const OFF_T* __restrict__ indptr, int rows, int chunk_edges, int* __restrict__ counters,
      int2* __restrict__ chunks, int4* __restrict__ heavy, const int* __restrict__ flags,
      volatile int* __restrict__ host, int tag) {
    DYNAMIC_SHARED(shared);
    int* bins = (int*)shared;     // [BINS]
    int* longest = bins + BINS;   // [1]
    for (int i = threadIdx.x; i <= BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const i64 row = thread_id();
    if (row < rows) {
        const OFF_T length = indptr[row + 1] - indptr[row];
        const int clipped = (int)(length < 0x7fffffff ? length : 0x7fffffff);
        atomicMax(longest, clipped);
        atomicAdd(&bins[32 - __clz(clipped)], 1);
        if (length > chunk_edges) {
            const int n = (int)((length + chunk_edges - 1) / chunk_edges);
            const int first = atomicAdd(&counters[0], n), at = atomicAdd(&counters[1], 1);
            atomicAdd((u64*)(counters + 4), (u64)length);
            for (int c = 0; c < n; ++c) chunks[first + c] = make_int2((int)row, c);
            heavy[at] = make_int4((int)row, first, n, 0);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (bins[i]) atomicAdd(&counters[BINS_AT + i], bins[i]);
    if (threadIdx.x == 0) atomicMax(&counters[2], *longest);
    __threadfence();
    __syncthreads();
    // the last block reports
    if (threadIdx.x == 0 && atomicAdd(&counters[3], 1) == (int)gridDim.x - 1) {
        const i64 edges = indptr[rows];
        host[0] = 0;  // whatever stands there now is about to be wrong
        __threadfence_system();
        host[1] = flags ? flags[FLAG_INVALID] : 0;
        host[2] = (int)(edges & 0xffffffff);
        host[3] = (int)(edges >> 32);
        for (int i = 0; i < COUNTERS; ++i) host[HOST_AT + i] = atomicAdd(&counters[i], 0);
        __threadfence_system();
        host[0] = tag;
    }
}

// heavy, counters: as `split` made them. The first `heavy_blocks` * `windows` blocks have the rows
// longer than chunk_edges, which is at most EACH * 32. In the other blocks each warp has one of the
// other rows.
extern "C" __global__ void __launch_bounds__(THREADS)
order(const OFF_T* __restrict__ indptr, int rows, int chunk_edges,
      const int* __restrict__ counters, const int4* __restrict__ heavy, int heavy_blocks,
      int windows, const int* __restrict__ other_in, const OFF_T* __restrict__ place_in,
      int* __restrict__ other_out, OFF_T* __restrict__ place_out) {
    DYNAMIC_SHARED(shared);
    const Entries entries = {other_in, place_in, other_out, place_out};
    const int block = (int)blockIdx.x, first = heavy_blocks * windows;
    if (block < first) {
        order_heavy(entries, indptr, heavy, counters[1], block % heavy_blocks, heavy_blocks,
                    block / heavy_blocks, shared);
        return;
    }
    const int warp = threadIdx.x / 32;
    const i64 row = (i64)(block - first) * (THREADS / 32) + warp;
    if (row >= rows) return;
    const i64 begin = indptr[row], length = (i64)indptr[row + 1] - begin;
    if (length > chunk_edges) return;
    order_by_comparing(entries, begin, (int)length, (OFF_T*)shared + warp * EACH * 32,
                       threadIdx.x % 32);
}
