// Edges of several types as one list: the nodes of each type get a range of their own, and each
// edge its type as a number.
//
// A thread per edge finds its part by bisection. What is known of the parts lies in one array, so
// that it comes by one copy:
//
//   table   [1 + parts + PART * parts] 64 bits: `wrong`, the first edge of each part, and for each
//   part
//           the addresses of its sources and destinations, each with its pitch (twice the elements
//           from one id to the next, plus
//           one where ids have 64 bits); relation; first source, number of sources; first
//           destination, number of destinations
//
// A part without addresses counts upwards: its edge i goes from the i-th source to the i-th
// destination. `wrong` holds twice the number of parts; what is left there is the least 2 * part +
// end whose ids are not all in range. Such ids become -1, which is no node to whoever reads them.
#ifndef GNNACCEL_JOIN_CUH
#define GNNACCEL_JOIN_CUH

#include "structure.cuh"

#define PART 9

__device__ __forceinline__ i64 id_at(i64 address, i64 pitch, i64 at) {
    if (!address) return at;
    const i64 place = at * (pitch >> 1);
    return pitch & 1 ? ((const i64*)address)[place] : (i64)((const int*)address)[place];
}

extern "C" __global__ void __launch_bounds__(THREADS)
join(int parts, int edges, i64* __restrict__ table, int* __restrict__ src, int* __restrict__ dst,
     int* __restrict__ relation) {
    const i64 e = thread_id();
    if (e >= edges) return;
    const i64* first = table + 1;
    // the last part that begins at or before this edge; those before it that begin there are empty
    int low = 0, high = parts;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        if (first[mid] <= e) low = mid;
        else high = mid;
    }
    const i64* part = first + parts + (i64)low * PART;
    const i64 at = e - first[low];
    relation[e] = (int)part[4];
#pragma unroll
    for (int end = 0; end < 2; ++end) {
        const i64 id = id_at(part[2 * end], part[2 * end + 1], at);
        const bool valid = id >= 0 && id < part[6 + 2 * end];
        if (!valid) atomicMin((u64*)table, (u64)(2 * (i64)low + end));
        (end ? dst : src)[e] = valid ? (int)(id + part[5 + 2 * end]) : -1;
    }
}

#endif
