// dW[s] = sum over the rows i of segment s of scale[i] X[g(i), :]^T dY[d(i), :]. See
// cuda/segment/segment_gemm_grad.py. With SUMS, behind each dW[s], the sum of scale[i] dY[d(i), :] alone,
// by the blocks that have the first rows of dW.
//
// A block sums a TA x TN tile of dW over its share of the row tiles (of TR rows), which lie side by
// side; segment_merge.cuh says where its sums go.
#define MATRICES ((i64)BLOCKS * K * N)
#define WEIGHT (MATRICES + SUMS * BLOCKS * N)  // of a segment
#define X_TILE TA
#define Y_TILE TN
#define X_PITCH (BLOCKS * K)
#define Y_PITCH (BLOCKS * N)
#include "segment_merge.cuh"
#include "segment_stages.cuh"
#include "segment_tile.cuh"

#define A_TILES ((K + TA - 1) / TA)
#define N_TILES ((N + TN - 1) / TN)
#define SUM_COLUMNS ((TN + THREADS - 1) / THREADS)

static_assert(TA == WM * WARPS_M && TN == WN * WARPS_N, "the warps' tiles make up the block's");

typedef Operand<false, X_STRIDE> Left;
typedef Scaled<Operand<false, Y_STRIDE>> Right;

// The tile of dW that a block sums.
struct Place {
    int a, n, block;

    __device__ __forceinline__ Place()
        : a(blockIdx.y / N_TILES % A_TILES * TA), n(blockIdx.y % N_TILES * TN),
            block(blockIdx.y / (N_TILES * A_TILES)) {}
};

struct Target {
    Sums sums;
    int row, column;  // the warp's corner in the tile
};

// Sums of the columns of dY, every THREADS-th by each thread; those of a tile are added up before
// they join.
struct ColumnSums {
    float of[SUM_COLUMNS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < SUM_COLUMNS; ++i) of[i] = 0.f;
    }
    __device__ __forceinline__ void add(const Right& right) {
#pragma unroll
        for (int i = 0; i < SUM_COLUMNS; ++i) {
            const int column = i * THREADS + threadIdx.x;
            if (TN % THREADS && column >= TN) continue;
            float sum = 0.f;
#pragma unroll 8
            for (int line = 0; line < TR; ++line) sum += right.at(column, line);
            of[i] += sum;
        }
    }
    __device__ __forceinline__ void leave(const Place& place, float* base) const {
#pragma unroll
        for (int i = 0; i < SUM_COLUMNS; ++i) {
            const int column = i * THREADS + threadIdx.x;
            if (column < TN && place.n + column < N)
                base[MATRICES + place.block * N + place.n + column] = of[i];
        }
    }
};

__device__ __forceinline__ void write(const Target& to, const Feed& feed, int segment,
                                      const Accumulators& acc, const ColumnSums& sums) {
    const Place place;
    float* base = to.sums.of(feed.segments, segment, feed.begin, feed.begin + feed.count);
    if (SUMS && place.a == 0) sums.leave(place, base);
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
    Accumulators acc;
    ColumnSums sums;
    const bool summing = SUMS && Place().a == 0;
    const auto change = [&](int before, int) {
        if (before >= 0) write(to, feed, before, acc, sums);
        clear(acc);
        sums.clear();
    };
    const int last = walk_tiles(feed, change, [&](int tile, const Walk&) {
        const Right right = {{feed.stage(tile) + X_SIZE}, feed.factors(tile)};
        multiply_tile<TR>(Left{feed.stage(tile)}, right, to.row, to.column, acc);
        if (summing) sums.add(right);
    });
    write(to, feed, last, acc, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
weight_grad(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count,
            const ROW_T* __restrict__ x, const int* __restrict__ index,
            const ROW_T* __restrict__ dy, const int* __restrict__ dy_index,
            const float* __restrict__ scale, float* __restrict__ out, float* __restrict__ partial) {
    DYNAMIC_SHARED(shared);
    copies_begin();
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int count = range_begin(blockIdx.x + 1, gridDim.x, tiles)
        - begin, warp = threadIdx.x >> 5;
    if (count == 0) return;
    const Place place;
    ROW_T* const stages = (ROW_T*)shared;
    Feed feed = {segments, x + place.block * K + place.a, dy + place.block * N + place.n, index,
                 dy_index, scale, stages,
                 (int*)(stages + STAGES * STAGE_SIZE), begin, count, K - place.a, N - place.n,
                     Walk(), 0, 0, 0.f, false};
    run(feed, Target{{out, partial}, warp / WARPS_N * WM, warp % WARPS_N * WN});
}
