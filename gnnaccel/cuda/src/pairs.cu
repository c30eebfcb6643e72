// The distinct pairs of a node and a relation at the ends of edges, and nodes by their types: what
// relational layers need to know of a graph before anything else, in few launches, as a graph that
// comes once is bound by the host.
//
//   collect           looks at the ids of all edges, copies them as int32, marks the keys relation
//   * nodes + node of both ends
//   number            the keys that were marked, in order: torch's cumsum has added the marks up in
//   between
//   count, share...   1 / the edges of an edge's pair
//   tally, arrange    nodes in any order of types: how many there are of each, and a stable order
//   by type
//
// In the same text, as it is small too: where the tiles of segments begin (tile_ptr.cuh).
//
// Marks and numbers do not depend on who comes first: threads that write to the same place write
// the same there.
#include "common.cuh"
#include "tile_ptr.cuh"

// What `collect`, and `number` after it, tell the host.
#define INVALID 0  // ids out of range were seen
#define PAIRS 1    // the pairs of the first end, of the second

__device__ __forceinline__ i64 thread_id() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

// int64 if `wide`, else int32; `step` bytes apart, as a column of an array lies.
__device__ __forceinline__ i64 id_at(const char* ids, i64 step, int wide, i64 at) {
    const char* p = ids + at * step;
    return wide ? *(const i64*)p : (i64)*(const int*)p;
}

__device__ __forceinline__ bool within(i64 id, i64 limit) { return id >= 0 && id < limit; }

// A null copy is not made, null marks are not set.
extern "C" __global__ void __launch_bounds__(THREADS)
collect(const char* src, i64 src_step, int src_wide, const char* dst, i64 dst_step, int dst_wide,
        const char* relation, i64 relation_step, int relation_wide, i64 edges, i64 num_src,
        i64 num_dst, i64 num_relations, int* src_copy, int* dst_copy, int* relation_copy,
        int* src_marks, int* dst_marks, int* told) {
    const i64 e = thread_id();
    if (e >= edges) return;
    const i64 s = id_at(src, src_step, src_wide, e), d = id_at(dst, dst_step, dst_wide, e);
    const i64 r = id_at(relation, relation_step, relation_wide, e);
    if (!within(s, num_src) || !within(d, num_dst) || !within(r, num_relations)) {
        told[INVALID] = 1;
        return;
    }
    if (src_copy) src_copy[e] = (int)s;
    if (dst_copy) dst_copy[e] = (int)d;
    if (relation_copy) relation_copy[e] = (int)r;
    if (src_marks) src_marks[r * num_src + s] = 1;
    if (dst_marks) dst_marks[r * num_dst + d] = 1;
}

// blockIdx.y is the end. `sums`: the marks of the first end's keys, then of the second's, added up;
// `second`: where those begin.
extern "C" __global__ void __launch_bounds__(THREADS)
number(const char* ids0, i64 step0, int wide0, const char* ids1, i64 step1, int wide1,
       const char* relation, i64 relation_step, int relation_wide, i64 edges, i64 num_relations,
       const int* __restrict__ sums, i64 second, i64 nodes0, i64 nodes1, int* node0, int* relation0,
       int* ptr0, int* pair0, int* node1, int* relation1, int* ptr1, int* pair1, int* told) {
    if (told[INVALID]) return;
    const bool last = blockIdx.y == 1;
    const i64 begin = last ? second : 0, nodes = last ? nodes1 : nodes0;
    const int before = begin ? sums[begin - 1] : 0;
    const i64 at = thread_id();
    if (at < edges) {
        const i64 n = last ? id_at(ids1, step1, wide1, at) : id_at(ids0, step0, wide0, at);
        const i64 r = id_at(relation, relation_step, relation_wide, at);
        const int pair = sums[begin + r * nodes + n] - before - 1;
        (last ? pair1 : pair0)[at] = pair;
        (last ? node1 : node0)[pair] = (int)n;
        (last ? relation1 : relation0)[pair] = (int)r;
    }
    if (at <= num_relations) {
        const i64 key = begin + at * nodes;  // the relation's first
        const int pairs = key ? sums[key - 1] - before : 0;
        (last ? ptr1 : ptr0)[at] = pairs;
        if (at == num_relations) told[PAIRS + blockIdx.y] = pairs;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
count(const int* __restrict__ pair, i64 edges, int* __restrict__ counts) {
    const i64 e = thread_id();
    if (e < edges) atomicAdd(&counts[pair[e]], 1);
}

// out[i] for the edge order[i], int64 if `wide`, or i where there is no order.
template <typename Float> __device__ __forceinline__ void write_share(const int* pair,
                                                                      const int* counts,
                                                                      const char* order, int wide,
                                                                      i64 edges, Float* out) {
    const i64 at = thread_id();
    if (at >= edges) return;
    const i64 e = order ? id_at(order, wide ? 8 : 4, wide, at) : at;
    out[at] = (Float)1 / (Float)counts[pair[e]];
}

extern "C" __global__ void __launch_bounds__(THREADS)
share_float(const int* __restrict__ pair, const int* __restrict__ counts,
            const char* __restrict__ order, int wide, i64 edges, float* __restrict__ out) {
    write_share<float>(pair, counts, order, wide, edges, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
share_double(const int* __restrict__ pair, const int* __restrict__ counts,
             const char* __restrict__ order, int wide, i64 edges, double* __restrict__ out) {
    write_share<double>(pair, counts, order, wide, edges, out);
}

// A thread takes `run` nodes one after the other, so that places need no atomics and are always the
// same. counts [num_types, parts]: the nodes of a type that a thread has seen, zero before.
#define UNSORTED 1

extern "C" __global__ void __launch_bounds__(THREADS)
tally(const char* types, i64 step, int wide, i64 nodes, i64 num_types, i64 run, i64 parts,
      int* copy, int* counts, int* flags) {
    const i64 part = thread_id();
    if (part >= parts) return;
    const i64 end = (part + 1) * run < nodes ? (part + 1) * run : nodes;
    i64 previous = part ? id_at(types, step, wide, part * run - 1) : 0;
    for (i64 i = part * run; i < end; ++i) {
        const i64 t = id_at(types, step, wide, i);
        if (t < previous) flags[UNSORTED] = 1;
        previous = t;
        if (within(t, num_types)) {
            ++counts[t * parts + part];
            copy[i] = (int)t;
        } else flags[INVALID] = 1;
    }
}

// `sums`: the counts added up. told [num_types + 3]: where each type begins, the number of nodes,
// the flags.
extern "C" __global__ void __launch_bounds__(THREADS)
arrange(const int* __restrict__ types, const int* __restrict__ sums, i64 nodes, i64 num_types,
        i64 run, i64 parts, int* __restrict__ counts, const int* __restrict__ flags,
        int* __restrict__ order, int* __restrict__ told) {
    const i64 part = thread_id();
    if (part <= num_types) told[part] = part && parts ? sums[part * parts - 1] : 0;
    if (part < 2) told[num_types + 1 + part] = flags[part];
    if (part >= parts || flags[INVALID] || !flags[UNSORTED]) return;
    const i64 end = (part + 1) * run < nodes ? (part + 1) * run : nodes;
    for (i64 i = part * run; i < end; ++i) {
        const i64 cell = types[i] * parts + part;
        order[sums[cell] - counts[cell]--] = (int)i;
    }
}
