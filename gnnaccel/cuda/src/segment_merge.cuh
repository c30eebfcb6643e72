// Sums over segments of WEIGHT values each by blocks that take a share of the row tiles, which lie
// side by side.
//
// A segment that begins and ends in a block's share is written at once. Otherwise each block that
// has a part of it writes a partial sum, and `merge`, or `merge_wide`, adds those up in the order
// of the blocks. A block has at most two such parts: of a segment that began before its share (slot
// 2 b), and of another one that goes on behind it (slot 2 b + 1).
#pragma once
#include "segment_walk.cuh"

#define MERGE_THREADS 256
#define MERGE_COLUMNS 32
#define MERGE_GROUPS (MERGE_THREADS / MERGE_COLUMNS)
#define MERGE_EACH 4  // columns of a thread of merge_wide

struct Sums {
    float *out, *partial;

    // Where this block, which has the tiles from begin up to end, leaves what it has of a segment.
    __device__ __forceinline__ float* of(const Segments& segments, int segment, int begin,
                                         int end) const {
        const bool before = __ldg(segments.tile_ptr + segment) < begin;
        const bool behind = __ldg(segments.tile_ptr + segment + 1) > end;
        return before
            || behind ? partial + (2 * (i64)blockIdx.x + (before ? 0 : 1)) * WEIGHT
            : out + segment * WEIGHT;
    }
};

// The blocks that have parts of a segment.
struct Share {
    int first, last;

    // The block whose share holds a tile: the last one that begins at or before it.
    static __device__ __forceinline__ int owner(int tile, int blocks, int tiles) {
        return (int)((((i64)tile + 1) * blocks - 1) / tiles);
    }
    __device__ __forceinline__ Share(const int* tile_ptr, int segment, int blocks, int tiles)
        : first(0), last(0) {
        const int begin = __ldg(tile_ptr + segment), end = __ldg(tile_ptr + segment + 1);
        if (begin == end) return;
        first = owner(begin, blocks, tiles);
        last = owner(end - 1, blocks, tiles);
    }
};

// A piece of a divided segment's columns, and all that is needed to add up its parts.
struct Piece {
    Share share;
    int chunk, blocks, tiles;
    const float* partial;
    float* out;  // of the segment

    __device__ __forceinline__ const float* part(int block, i64 column, int slot) const {
        return partial + (2 * (i64)block + slot) * WEIGHT + column;
    }
    // Where there are fewer tiles than blocks, some blocks have written nothing. (Asked in the
    // loop, it would keep loads apart.)
    __device__ __forceinline__ bool all_wrote() const { return tiles >= blocks; }
    template <bool All> __device__ __forceinline__ bool wrote(int block) const {
        return All || range_begin(block, blocks, tiles) < range_begin(block + 1, blocks, tiles);
    }
};

// Few parts: each thread adds up those of MERGE_EACH columns, without waiting for others.
struct Wide {
    static constexpr int COLUMNS = MERGE_THREADS * MERGE_EACH;

    template <bool All> static __device__ __forceinline__ void add(const Piece& p, i64 first,
                                                                   float (&sum)[MERGE_EACH]) {
#pragma unroll 4
        for (int b = p.share.first + 1; b <= p.share.last; ++b)
            if (p.wrote<All>(b))
#pragma unroll
                for (int i = 0; i < MERGE_EACH; ++i)
                    if (first + i * MERGE_THREADS < WEIGHT)
                        sum[i] += *p.part(b, first + i * MERGE_THREADS, 0);
    }
    static __device__ __forceinline__ void merge(const Piece& p, float*) {
        const i64 first = (i64)p.chunk * COLUMNS + threadIdx.x;
        float sum[MERGE_EACH];
#pragma unroll
        for (int i = 0; i < MERGE_EACH; ++i)
            sum[i] = first + i * MERGE_THREADS < WEIGHT
                ? *p.part(p.share.first, first + i * MERGE_THREADS, 1) : 0.f;
        if (p.all_wrote()) add<true>(p, first, sum);
        else add<false>(p, first, sum);
#pragma unroll
        for (int i = 0; i < MERGE_EACH; ++i)
            if (first + i * MERGE_THREADS < WEIGHT) p.out[first + i * MERGE_THREADS] = sum[i];
    }
};

// Many parts: groups of threads take every MERGE_GROUPS-th part of a column, then their sums are
// added in order.
struct Shared {
    static constexpr int COLUMNS = MERGE_COLUMNS;

    template <bool All> static __device__ __forceinline__ void add(const Piece& p, i64 column,
                                                                   int group, float& sum) {
#pragma unroll 8
        for (int b = p.share.first + 1 + group; b <= p.share.last; b += MERGE_GROUPS)
            if (p.wrote<All>(b)) sum += *p.part(b, column, 0);
    }
    static __device__ __forceinline__ void merge(const Piece& p, float* sums) {
        const int group = threadIdx.x / MERGE_COLUMNS;
        const i64 column = (i64)p.chunk * COLUMNS + threadIdx.x % MERGE_COLUMNS;
        float sum = 0.f;
        if (column < WEIGHT) {
            if (group == 0) sum = *p.part(p.share.first, column, 1);
            if (p.all_wrote()) add<true>(p, column, group, sum);
            else add<false>(p, column, group, sum);
        }
        __syncthreads();  // the sums of the columns before have been read
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (group == 0 && column < WEIGHT) {
#pragma unroll
            for (int other = 1; other < MERGE_GROUPS; ++other)
                sum += sums[other * MERGE_COLUMNS + threadIdx.x];
            p.out[column] = sum;
        }
    }
};

// Adds up the parts of all divided segments, in the order of the blocks that made them. Only the
// device knows which those are: each block looks at all segments, MERGE_THREADS at a time, and does
// its share of the columns of those that it finds.
template <typename How>
__device__ __forceinline__ void merge_all(const int* tile_ptr, int segment_count, int blocks,
                                          const float* partial, float* out, float* shared) {
    constexpr i64 GROUPS = (WEIGHT + How::COLUMNS - 1) / How::COLUMNS;
    float* const sums = shared;
    int* const found = (int*)(sums + MERGE_THREADS);  // divided segments
    int* const counts = found + MERGE_THREADS;        // of each warp's
    const int tiles = __ldg(tile_ptr + segment_count), lane = threadIdx.x & 31,
        warp = threadIdx.x >> 5;
    i64 before = 0;  // pieces of work in the segments looked at so far
    for (int base = 0; base < segment_count; base += MERGE_THREADS) {
        const int mine = base + threadIdx.x;
        bool divided = false;
        if (mine < segment_count) {
            const Share share(tile_ptr, mine, blocks, tiles);
            divided = share.first < share.last;
        }
        const u32 all = __ballot_sync(FULL_WARP, divided);
        if (lane == 0) counts[warp] = __popc(all);
        __syncthreads();
        int count = 0, place = __popc(all & ((1u << lane) - 1u));
        for (int other = 0; other < MERGE_THREADS / 32; ++other) {
            if (other < warp) place += counts[other];
            count += counts[other];
        }
        if (divided) found[place] = mine;
        __syncthreads();
        const i64 pieces = (i64)count * GROUPS;
        for (i64 i = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x; i < pieces;
             i += gridDim.x) {
            const int segment = found[i / GROUPS];
            const Share share(tile_ptr, segment, blocks, tiles);
            How::merge({share, (int)(i % GROUPS), blocks, tiles, partial, out + segment * WEIGHT},
                       sums);
        }
        before += pieces;
        __syncthreads();  // before the lists are written again
    }
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge(const int* __restrict__ tile_ptr, int segment_count, int blocks,
      const float* __restrict__ partial, float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    merge_all<Shared>(tile_ptr, segment_count, blocks, partial, out, (float*)shared);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_wide(const int* __restrict__ tile_ptr, int segment_count, int blocks,
           const float* __restrict__ partial, float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    merge_all<Wide>(tile_ptr, segment_count, blocks, partial, out, (float*)shared);
}
