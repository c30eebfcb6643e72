// Which edges a warp works on. Rows of at most `chunk_edges` edges are done whole by one warp;
// longer ones ("super-nodes") are cut into chunks, each done by another warp that leaves a partial
// result for the merge kernel. The first `chunk_slots` warps of the grid take chunks (the device
// knows how many there really are), the others take rows.
#pragma once
#include "layout.cuh"

struct Item {
    int row;
    OFF_T begin, end;
    int chunk;  // index of the partial result, -1 for a whole row
};

// counters[0] chunks, counters[1] split rows; chunks: (row, number within the row). Built by
// structure.cu.
struct Split {
    const int* counters;
    const int2* chunks;
    int chunk_edges, chunk_slots;
};

__device__ __forceinline__ bool item_at(long long w, int rows, const OFF_T* indptr, const Split& s,
                                        Item& it) {
    if (w < s.chunk_slots) {
        if (w >= s.counters[0]) return false;
        const int2 c = s.chunks[w];
        it.row = c.x;
        it.chunk = (int)w;
        const OFF_T stop = indptr[c.x + 1];
        it.begin = indptr[c.x] + (OFF_T)c.y * s.chunk_edges;
        it.end = it.begin + s.chunk_edges < stop ? it.begin + s.chunk_edges : stop;
        return true;
    }
    w -= s.chunk_slots;
    if (w >= rows) return false;
    it.row = (int)w;
    it.chunk = -1;
    it.begin = indptr[w];
    it.end = indptr[w + 1];
    return it.end - it.begin <= s.chunk_edges;
}

__device__ __forceinline__ long long warp_id() { return (long long)blockIdx.x * WARPS
                                                 + (threadIdx.x >> 5); }

// Dropout: the factor of edge `position` (in CSC order) and `head`: 0 or 1 / (1 - p). Any pass over
// the edges, in any order, draws the same number, so no mask is ever stored.
struct Dropout {
    float p, scale;
    u64 seed, offset;

    __device__ __forceinline__ float factor(OFF_T position, int head) const {
#if DROPOUT
        const u64 n = (u64)position * H + head;
        const uint4 r = philox<7>(seed, offset, n >> 2);
        const int c = (int)(n & 3);
        const u32 bits = c == 0 ? r.x : c == 1 ? r.y : c == 2 ? r.z : r.w;
        return uniform01(bits) < p ? 0.f : scale;
#else
        return 1.f;
#endif
    }
};

// Of a kernel's arguments; `seed` and `offset` as in `read_key`.
__device__ __forceinline__ Dropout dropout(float p, float scale, u64 seed, u64 offset) {
#if DROPOUT
    read_key(seed, offset);
#endif
    const Dropout made = {p, scale, seed, offset};
    return made;
}

// Dropout factors of COUNT edges for one head: each is drawn by one of the head's LH lanes only,
// then passed around.
template <int COUNT>
__device__ __forceinline__ void draw(const Lanes& at, const Dropout& drop,
                                     const OFF_T (&position)[COUNT], int head,
                                     float (&factor)[COUNT]) {
#if DROPOUT
    float mine[(COUNT + LH - 1) / LH];
#pragma unroll
    for (int i = 0; i < (COUNT + LH - 1) / LH; ++i) {
        OFF_T p = 0;
#pragma unroll
        for (int u = i * LH; u < (i + 1) * LH && u < COUNT; ++u)
            if (u - i * LH == at.lh) p = position[u];
        mine[i] = drop.factor(p, head);
    }
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
        factor[u] = __shfl_sync(FULL_WARP, mine[u / LH], (at.lane & ~(LH - 1)) + u % LH);
#else
#pragma unroll
    for (int u = 0; u < COUNT; ++u) factor[u] = 1.f;
#endif
}
