// Rows sorted by segment, cut into tiles of at most TR rows that never cross a segment, and a block's way through them.
// tile_ptr[s] is the number of tiles before segment s. Every block takes an equal, contiguous range of all tiles.
#pragma once
#include "common.cuh"

struct Segments {
    const int* ptr;
    const int* tile_ptr;
    int count;

    __device__ __forceinline__ int tiles() const { return __ldg(tile_ptr + count); }
};

// The first tile of block b of `blocks`; that of b + 1 is where b ends.
__device__ __forceinline__ int range_begin(int b, int blocks, int tiles) { return (int)((i64)b * tiles / blocks); }

// Where a tile lies. Tiles are visited in ascending order.
struct Walk {
    int segment, next;  // the segment, and the first tile behind it
    int row, rows;      // the tile's first row, and how many it has

    __device__ __forceinline__ Walk() : segment(-1), next(0), row(0), rows(0) {}

    // The last segment with tile_ptr <= tile is the one that holds it: segments without rows share their tile_ptr with
    // the next one. By bisection, since there may be thousands of those in between.
    __device__ __forceinline__ void seek(const Segments& s, int tile) {
        if (tile >= next) {
            int low = segment + 1, high = s.count;
            while (high - low > 1) {
                const int middle = (low + high) >> 1;
                if (__ldg(s.tile_ptr + middle) <= tile) low = middle;
                else high = middle;
            }
            segment = low;
            next = __ldg(s.tile_ptr + low + 1);
        }
        row = __ldg(s.ptr + segment) + (tile - __ldg(s.tile_ptr + segment)) * TR;
        const int left = __ldg(s.ptr + segment + 1) - row;
        rows = left < TR ? left : TR;
    }
};
