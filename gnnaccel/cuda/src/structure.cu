// Building the index arrays of a graph from its edge list, without a sort and without telling the
// host anything.
//
//   count_i64, count_int   degrees; bad ids are skipped and flagged, self loops dropped where nodes
//            get loops of their own; for ids of 64 and of 32 bits
//   scan     where rows begin, in place of their degrees, and more (row_split.cu)
//   place_i64, place_int   edges into their rows
//   order    the entries of each row in ascending order of their places (row_order.cu)
//   count_src, place_src   as `count` and `place` for the transposed graph, from the finished CSC
//   small_i64, small_int, small_src   all of that in one launch, for small graphs (small.cuh)
//
// An edge's number within its row is what `count` had counted before it, so their order varies from
// run to run until `order` has run. If the list is already sorted by destination, which `count`
// finds out on the way, `place` uses that order instead.
//
// In the same text, as it is small too: how edges of several types are put together (join.cuh).
#include "report.cuh"
#include "join.cuh"

__device__ __forceinline__ int take(int* counter) { return atomicAdd(counter, 1); }
__device__ __forceinline__ i64 take(i64* counter) { return (i64)atomicAdd((u64*)counter, (u64)1); }

// Mostly it is up already, and many writes of one word would take turns.
__device__ __forceinline__ void raise_flag(int* flag) {
    if (*flag == 0) *flag = 1;
}

// With `loops`, edges i -> i are dropped and one is added for each node below it, as the hosts do
// before attention.
template <typename T>
__device__ __forceinline__ bool read_edge(const T* src, const T* dst, i64 e, i64 num_src,
                                          i64 num_dst, i64 loops, i64& s, i64& d, bool& valid) {
    s = src[e];
    d = dst[e];
    valid = s >= 0 && s < num_src && d >= 0 && d < num_dst;
    return valid && !(loops && s == d);
}

// degree[d + 1]: how many edges end in d. number[e]: how many of its row were counted before edge
// e.
template <typename T>
__device__ __forceinline__ void count(const T* __restrict__ src, const T* __restrict__ dst,
                                      i64 edges, i64 num_src, i64 num_dst, i64 loops,
                                      OFF_T* __restrict__ degree, OFF_T* __restrict__ number,
                                      int* __restrict__ flags) {
    const i64 e = thread_id();
    if (e >= edges) return;
    i64 s, d;
    bool valid;
    if (read_edge(src, dst, e, num_src, num_dst, loops, s, d, valid)) number[e] = take(&degree[d + 1]);
    if (!valid) raise_flag(flags + FLAG_INVALID);
    if (!valid || (e > 0 && dst[e - 1] > d)) raise_flag(flags + FLAG_UNSORTED);
}

template <typename T>
__device__ __forceinline__ void place(const T* __restrict__ src, const T* __restrict__ dst,
                                      i64 edges, i64 num_src, i64 num_dst, i64 loops,
                                      const OFF_T* __restrict__ indptr,
                                      const OFF_T* __restrict__ number,
                                      const int* __restrict__ flags,
                                      Entry* __restrict__ entries) {
    const i64 e = thread_id();
    if (e < edges) {
        i64 s, d;
        bool valid;
        if (!read_edge(src, dst, e, num_src, num_dst, loops, s, d, valid)) return;
        const bool sorted = !loops && flags[FLAG_UNSORTED] == 0;
        const OFF_T at = sorted ? (OFF_T)e : indptr[d] + number[e];
        entries[at] = {(OFF_T)e, (OFF_T)s};
    } else if (e < edges + loops) {  // the loop takes its row's last place
        const i64 i = e - edges;
        entries[indptr[i + 1] - 1] = {(OFF_T)e, (OFF_T)i};
    }
}

// The row of place p: the last one that starts at or before it.
__device__ __forceinline__ int row_of(const OFF_T* indptr, int rows, i64 p) {
    int low = 0, high = rows;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        if (indptr[mid] <= p) low = mid;
        else high = mid;
    }
    return low;
}

#include "small.cuh"

#define OF_IDS(T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                         \
    count_##T(const T* __restrict__ src, const T* __restrict__ dst, i64 edges, i64 num_src,       \
              i64 num_dst, i64 loops, OFF_T* __restrict__ degree, OFF_T* __restrict__ number,     \
              int* __restrict__ flags) {                                                          \
        count(src, dst, edges, num_src, num_dst, loops, degree, number, flags);                   \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                         \
    place_##T(const T* __restrict__ src, const T* __restrict__ dst, i64 edges, i64 num_src,       \
              i64 num_dst, i64 loops, const OFF_T* __restrict__ indptr,                           \
              const OFF_T* __restrict__ number, const int* __restrict__ flags,                    \
              Entry* __restrict__ entries) {                                                      \
        place(src, dst, edges, num_src, num_dst, loops, indptr, number, flags, entries);          \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(SMALL_THREADS)                                   \
    small_##T(const T* __restrict__ src, const T* __restrict__ dst, i64 edges, i64 num_src,       \
              i64 num_dst, i64 loops, int size, OFF_T* __restrict__ indptr,                       \
              int* __restrict__ other, OFF_T* __restrict__ place, int chunk_edges,                \
              int* __restrict__ counters, int2* __restrict__ chunks, int4* __restrict__ heavy,    \
              int* __restrict__ flags, volatile int* __restrict__ host, int tag) {                \
        DYNAMIC_SHARED(shared);                                                                   \
        const Small small = {(u32*)shared, size, {counters, chunks, heavy, flags, host, tag}};    \
        small.by_dst(src, dst, edges, num_src, num_dst, loops, chunk_edges, flags, indptr, other, \
                     place);                                                                      \
    }
OF_IDS(i64)
OF_IDS(int)

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
    entries[indptr_src[col[p]] + number[p]] = {(OFF_T)p, (OFF_T)row_of(indptr, num_dst, p)};
}

extern "C" __global__ void __launch_bounds__(SMALL_THREADS)
small_src(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int num_dst, int num_src,
          int size, OFF_T* __restrict__ indptr_src, int* __restrict__ other,
          OFF_T* __restrict__ place, int chunk_edges, int* __restrict__ counters,
          int2* __restrict__ chunks, int4* __restrict__ heavy, int* __restrict__ flags,
          volatile int* __restrict__ host, int tag) {
    DYNAMIC_SHARED(shared);
    const Small small = {(u32*)shared, size, {counters, chunks, heavy, flags, host, tag}};
    small.by_src(indptr, col, num_dst, num_src, chunk_edges, flags, indptr_src, other, place);
}
