// Copying lines of matrices to shared memory by all threads of a block: lines one after another, or
// picked by a list.
#pragma once
#include "async_copy.cuh"

#define THREADS (32 * WARPS_M * WARPS_N)

// Padding of lines, in elements, with which a warp's fragment reads hit each bank once. WIDE: lines
// along k, of a multiple of 8 words; else lines along rows or columns, which lanes read side by
// side.
#define WIDE_STRIDE(width) ((width) + 16 / (int)sizeof(ROW_T))
#define SIDE_STRIDE(width) ((width) % 16 == 0 ? (width) + 8 : (width))

// Lines x Width elements, zeros from line `lines` and column `width` on. Bytes: the size of one
// copy, which divides a line.
template <int Lines, int Width, int Stride, int Bytes>
__device__ __forceinline__ void copy_lines(ROW_T* to, const ROW_T* from, int pitch, int lines,
                                           int width) {
    constexpr int COUNT = Bytes / sizeof(ROW_T), PIECES = Width / COUNT;
    static_assert(Width % COUNT == 0 && Stride * sizeof(ROW_T) % Bytes == 0,
                  "whole copies in a line");
    for (int i = threadIdx.x; i < Lines * PIECES; i += THREADS) {
        const int line = i / PIECES, column = i % PIECES * COUNT;
        const bool on = line < lines && column < width;
        copy_async<Bytes>(to + line * Stride + column,
                          on ? from + (i64)line * pitch + column : from, on);
    }
}

// The same with line i taken from row list[i] of a matrix; zeros where that is negative.
template <int Lines, int Width, int Stride, int Bytes>
__device__ __forceinline__ void copy_rows(ROW_T* to, const ROW_T* from, int pitch, const int* list,
                                          int width) {
    constexpr int COUNT = Bytes / sizeof(ROW_T), PIECES = Width / COUNT;
    static_assert(Width % COUNT == 0 && Stride * sizeof(ROW_T) % Bytes == 0,
                  "whole copies in a line");
    // each thread keeps its column: a third of the work
    if constexpr (THREADS % PIECES == 0 && Lines * PIECES % THREADS == 0) {
        constexpr int STEP = THREADS / PIECES, COPIES = Lines / STEP, AT_ONCE = COPIES % 4 ? 1 : 4;
        const int first = threadIdx.x / PIECES, column = threadIdx.x % PIECES * COUNT;
        const bool inside = column < width;
#pragma unroll
        for (int begin = 0; begin < COPIES; begin += AT_ONCE) {
            int row[AT_ONCE];  // a copy keeps what is read later from being read earlier
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) row[i] = list[first + (begin + i) * STEP];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 safe = row[i] < 0 ? 0 : row[i];
                copy_async<Bytes>(to + (first + (begin + i) * STEP) * Stride + column,
                                  from + column + (u64)safe * (u32)pitch, row[i] >= 0 && inside);
            }
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < Lines * PIECES; i += THREADS) {
            const int line = i / PIECES, column = i % PIECES * COUNT;
            const int row = list[line];
            const bool on = row >= 0 && column < width;
            copy_async<Bytes>(to + line * Stride + column,
                              on ? from + (i64)row * pitch + column : from, on);
        }
    }
}

// The row that thread i of a tile of `rows` rows copies for it, -1 behind the tile's end.
__device__ __forceinline__ int picked_row(const int* index, int row, int rows) {
    const int i = threadIdx.x;
    return i >= rows ? -1 : index ? __ldg(index + row + i) : row + i;
}
