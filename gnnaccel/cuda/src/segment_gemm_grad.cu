// dW[s] = sum over the rows i of segment s of scale[i] X[g(i), :]^T dY[d(i), :]. See cuda/segment_gemm_grad.py.
//
// A block sums a TA x TN tile of dW over its share of the row tiles (of TR rows), which lie side by side. A segment that
// begins and ends in that share is written at once. Otherwise each block that has a part of it writes a partial sum, and
// `merge` adds those up in the order of the blocks. A block has at most two such parts: of a segment that began before its
// share (slot 2 b), and of another one that goes on behind it (slot 2 b + 1).
#include "segment_rows.cuh"
#include "segment_tile.cuh"
#include "segment_walk.cuh"

#define A_TILES ((K + TA - 1) / TA)
#define N_TILES ((N + TN - 1) / TN)
#define A_STRIDE SIDE_STRIDE(TA)
#define B_STRIDE SIDE_STRIDE(TN)
#define A_SIZE (TR * A_STRIDE)
#define STAGE_SIZE (A_SIZE + TR * B_STRIDE)
#define WEIGHT ((i64)BLOCKS * K * N)
#define SLOTS (STAGES + 1)  // tiles between the reading of row numbers and the use of the factors read with them
#define MERGE_COLUMNS 64

static_assert(TR <= THREADS, "each thread reads the numbers of one row");
static_assert(TA == WM * WARPS_M && TN == WN * WARPS_N, "the warps' tiles make up the block's");

typedef Operand<false, A_STRIDE> Left;
typedef Scaled<Operand<false, B_STRIDE>> Right;

// The tile of dW that a block sums.
struct Place {
    int a, n, block;

    __device__ __forceinline__ Place()
        : a(blockIdx.y / N_TILES % A_TILES * TA), n(blockIdx.y % N_TILES * TN), block(blockIdx.y / (N_TILES * A_TILES)) {}
};

// Keeps the stages filled.
struct Feed {
    const Segments& segments;
    const ROW_T *x, *dy;  // the tile's first column
    const int *index, *dy_index;
    const float* scale;
    ROW_T* stages;
    int* list;       // [SLOTS][3][TR]: rows of x, rows of dy, factors
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
            int* to = numbers(tile) + threadIdx.x;
            to[0] = x_row;
            to[TR] = dy_row;
            to[2 * TR] = __float_as_int(factor);
        }
        read = false;
    }
    __device__ __forceinline__ ROW_T* stage(int tile) const { return stages + tile % STAGES * STAGE_SIZE; }
    __device__ __forceinline__ const float* factors(int tile) const {
        return scale ? (const float*)(numbers(tile) + 2 * TR) : nullptr;
    }
    __device__ __forceinline__ void start(int tile) {
        if (tile >= count) return;
        read_numbers(tile + 1);
        copy_rows<TR, TA, A_STRIDE, COPY_X>(stage(tile), x, BLOCKS * K, numbers(tile), x_width);
        copy_rows<TR, TN, B_STRIDE, COPY_Y>(stage(tile) + A_SIZE, dy, BLOCKS * N, numbers(tile) + TR, dy_width);
    }
};

struct Target {
    float *out, *partial;
    int row, column;  // the warp's corner in the tile
};

__device__ __forceinline__ void write(const Target& to, const Feed& feed, int segment, const Accumulators& acc) {
    const Place place;
    const bool before = __ldg(feed.segments.tile_ptr + segment) < feed.begin;
    const bool behind = __ldg(feed.segments.tile_ptr + segment + 1) > feed.begin + feed.count;
    float* base = before || behind ? to.partial + (2 * (i64)blockIdx.x + (before ? 0 : 1)) * WEIGHT : to.out + segment * WEIGHT;
    base += (i64)place.block * K * N;
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int a = place.a + to.row + 16 * m + 8 * (e >> 1) + g;
                const int column = place.n + to.column + 8 * n + 2 * c + (e & 1);
                if (a < K && column < N) base[(i64)a * N + column] = acc[m][n][e];
            }
}

__device__ __forceinline__ void run(Feed& feed, const Target& to) {
    Walk at;
    Accumulators acc;
    int segment = -1;
    feed.read_numbers(0);
    feed.publish(0);
    for (int tile = 1 - STAGES; tile < feed.count; ++tile) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this tile's copies are there, for all threads; and the tile before is done with its stage
        feed.start(tile + STAGES - 1);
        copies_commit();
        if (tile >= 0) {
            at.seek(feed.segments, feed.begin + tile);
            if (at.segment != segment) {
                if (segment >= 0) write(to, feed, segment, acc);
                segment = at.segment;
                clear(acc);
            }
            const Right right = {{feed.stage(tile) + A_SIZE}, feed.factors(tile)};
            multiply_tile<TR>(Left{feed.stage(tile)}, right, to.row, to.column, acc);
        }
        feed.publish(tile + STAGES);
    }
    write(to, feed, segment, acc);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
weight_grad(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count, const ROW_T* __restrict__ x,
            const int* __restrict__ index, const ROW_T* __restrict__ dy, const int* __restrict__ dy_index,
            const float* __restrict__ scale, float* __restrict__ out, float* __restrict__ partial) {
    DYNAMIC_SHARED(shared);
    copies_begin();
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int count = range_begin(blockIdx.x + 1, gridDim.x, tiles) - begin, warp = threadIdx.x >> 5;
    if (count == 0) return;
    const Place place;
    ROW_T* const stages = (ROW_T*)shared;
    Feed feed = {segments, x + place.block * K + place.a, dy + place.block * N + place.n, index, dy_index, scale, stages,
                 (int*)(stages + STAGES * STAGE_SIZE), begin, count, K - place.a, N - place.n, Walk(), 0, 0, 0.f, false};
    run(feed, Target{out, partial, warp / WARPS_N * WM, warp % WARPS_N * WN});
}

// Adds up the parts of the segment that begins in block b's share of the tiles and goes on behind it. grid: (columns, b).
// Four groups of threads take every fourth part.
extern "C" __global__ void __launch_bounds__(256)
merge(const int* __restrict__ tile_ptr, int segment_count, int blocks, const float* __restrict__ partial,
      float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    float* const sums = (float*)shared;  // [4][MERGE_COLUMNS]
    const Segments segments = {tile_ptr, tile_ptr, segment_count};  // rows are not asked for
    const int tiles = segments.tiles(), b = blockIdx.y;
    const int begin = range_begin(b, blocks, tiles), end = range_begin(b + 1, blocks, tiles);
    if (begin == end) return;
    Walk at;
    at.seek(segments, end - 1);
    if (at.next <= end || __ldg(tile_ptr + at.segment) < begin) return;
    const int group = threadIdx.x / MERGE_COLUMNS;
    const i64 column = (i64)blockIdx.x * MERGE_COLUMNS + threadIdx.x % MERGE_COLUMNS;
    float sum = 0.f;
    if (column < WEIGHT) {
        if (group == 0) sum = partial[(2 * (i64)b + 1) * WEIGHT + column];
        for (int other = b + 1 + group; other < blocks && range_begin(other, blocks, tiles) < at.next; other += 4)
            if (range_begin(other, blocks, tiles) < range_begin(other + 1, blocks, tiles))  // more blocks than tiles
                sum += partial[2 * (i64)other * WEIGHT + column];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && column < WEIGHT) {
        for (int other = 1; other < 4; ++other) sum += sums[other * MERGE_COLUMNS + threadIdx.x];
        out[at.segment * WEIGHT + column] = sum;
    }
}
