// Tiles of rows of X and dY in shared memory, TR lines of X_TILE and Y_TILE columns, STAGES of them
// in flight. X_PITCH and Y_PITCH are elements of a whole row. The numbers of the rows to copy are
// read one tile earlier still.
#pragma once
#include "segment_rows.cuh"
#include "segment_walk.cuh"

#define X_STRIDE SIDE_STRIDE(X_TILE)
#define Y_STRIDE SIDE_STRIDE(Y_TILE)
#define X_SIZE (TR * X_STRIDE)
#define STAGE_SIZE (X_SIZE + TR * Y_STRIDE)
#define SLOTS (STAGES + 1)  // tiles between the reading of row numbers and the use of the factors read with them

#ifndef LINE_OF
#define LINE_OF(row) (row)  // the line of a tile's row
#endif

static_assert(TR <= THREADS, "each thread reads the numbers of one row");

// Keeps the stages filled.
struct Feed {
    const Segments& segments;
    const ROW_T *x, *dy;  // the tile's first column
    const int *index, *dy_index;
    const float* scale;
    ROW_T* stages;
    int* list;  // [SLOTS][3][TR]: of each line the row of x, the row of dy, the factor
    int begin, count;
    int x_width, dy_width;
    Walk ahead;
    int x_row, dy_row;
    float factor;
    bool read;

    __device__ __forceinline__ void read_numbers(int tile) {
        read = tile < count;
        if (!read) return;
        ahead.seek(segments, begin + tile);
        x_row = picked_row(index, ahead.row, ahead.rows);
        dy_row = picked_row(dy_index, ahead.row, ahead.rows);
        factor = scale && threadIdx.x < ahead.rows ? __ldg(scale + ahead.row + threadIdx.x) : 0.f;
    }
    __device__ __forceinline__ int* numbers(int tile) const { return list + tile % SLOTS * 3 * TR; }
    __device__ __forceinline__ void publish(int tile) {
        if (read && threadIdx.x < TR) {
            int* to = numbers(tile) + LINE_OF(threadIdx.x);
            to[0] = x_row;
            to[TR] = dy_row;
            to[2 * TR] = __float_as_int(factor);
        }
        read = false;
    }
    __device__ __forceinline__ ROW_T* stage(int tile) const { return stages + tile % STAGES
                                                              * STAGE_SIZE; }
    __device__ __forceinline__ const float* factors(int tile) const {
        return scale ? (const float*)(numbers(tile) + 2 * TR) : nullptr;
    }
    __device__ __forceinline__ void start(int tile) {
        if (tile >= count) return;
        read_numbers(tile + 1);
        copy_rows<TR, X_TILE, X_STRIDE, COPY_X>(stage(tile), x, X_PITCH, numbers(tile), x_width);
        copy_rows<TR, Y_TILE, Y_STRIDE, COPY_Y>(stage(tile) + X_SIZE, dy, Y_PITCH,
                                                numbers(tile) + TR, dy_width);
    }
};

// Tile after tile of those of `feed`, while later ones are copied: `use(tile, at)`, after
// `change(before, segment)` where another segment begins (before -1: the first). Returns the last
// segment.
template <class Change, class Use>
__device__ __forceinline__ int walk_tiles(Feed& feed, const Change& change, const Use& use) {
    Walk at;
    int segment = -1;
    feed.read_numbers(0);
    feed.publish(0);
    for (int tile = 1 - STAGES; tile < feed.count; ++tile) {
        copies_wait<STAGES - 2>();
        // this tile's copies are there, for all threads; and the tile before is done with its stage
        __syncthreads();
        feed.start(tile + STAGES - 1);
        copies_commit();
        if (tile >= 0) {
            at.seek(feed.segments, feed.begin + tile);
            if (at.segment != segment) {
                change(segment, at.segment);
                segment = at.segment;
            }
            use(tile, at);
        }
        feed.publish(tile + STAGES);
    }
    return segment;
}
