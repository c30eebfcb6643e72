// Rows sorted by segment, cut into tiles of at most TR rows that never cross a segment, and a
// block's way through them. tile_ptr[s] is the number of tiles before segment s. Every block takes
// an equal, contiguous range of all tiles.
#pragma once
#include "common.cuh"

struct Segments {
    const int* ptr;
    const int* tile_ptr;
    int count;

    __device__ __forceinline__ int tiles() const { return __ldg(tile_ptr + count); }
};

// The first tile of block b of `blocks`; that of b + 1 is where b ends.
__device__ __forceinline__ int range_begin(int b, int blocks,
                                           int tiles) { return (int)((i64)b * tiles / blocks); }

// Where a tile lies. Tiles are visited in ascending order, by whole warps.
struct Walk {
    int segment, next;    // the segment, and the first tile behind it
    int row, rows;        // the tile's first row, and how many it has
    int tile, line, stop;  // the segment's first tile and first row, and the first row behind it

    __device__ __forceinline__ Walk() : segment(-1), next(0), row(0), rows(0), tile(0), line(0),
        stop(0) {}

    // The last segment with tile_ptr <= `wanted` is the one that holds it: segments without rows
    // share their tile_ptr with the next one, and there may be thousands of those in between. Each
    // lane asks for one of 32 parts.
    __device__ __forceinline__ void enter(const Segments& s, int wanted) {
        int low = segment + 1, high = s.count;
        while (high - low > 1) {
            const int part = (high - low + 31) >> 5, probe = low + (threadIdx.x & 31) * part;
            const u32 before = __ballot_sync(FULL_WARP, probe < high
                                             && __ldg(s.tile_ptr + probe) <= wanted);
            low += (31 - __clz((int)before)) * part;
            high = high < low + part ? high : low + part;
        }
        segment = low;
        tile = __ldg(s.tile_ptr + low);
        next = __ldg(s.tile_ptr + low + 1);
        line = __ldg(s.ptr + low);
        stop = __ldg(s.ptr + low + 1);
    }
    // The tile of this number, in the segment that was entered last.
    __device__ __forceinline__ void place(int wanted) {
        row = line + (wanted - tile) * TR;
        rows = stop - row < TR ? stop - row : TR;
    }
    __device__ __forceinline__ void seek(const Segments& s, int wanted) {
        if (wanted >= next) enter(s, wanted);
        place(wanted);
    }
};
