// dW[s] = sum over the rows i of segment s of scale[i] X[g(i), :]^T dY[d(i), :]. See cuda/segment_gemm_grad.py. With SUMS,
// behind each dW[s], the sum of scale[i] dY[d(i), :] alone, by the blocks that have the first rows of dW.
//
// A block sums a TA x TN tile of dW over its share of the row tiles (of TR rows), which lie side by side. A segment that
// begins and ends in that share is written at once. Otherwise each block that has a part of it writes a partial sum, and
// `merge`, or `merge_wide`, adds those up in the order of the blocks. A block has at most two such parts: of a segment that
// began before its share (slot 2 b), and of another one that goes on behind it (slot 2 b + 1).
#include "segment_rows.cuh"
#include "segment_tile.cuh"
#include "segment_walk.cuh"

#define A_TILES ((K + TA - 1) / TA)
#define N_TILES ((N + TN - 1) / TN)
#define A_STRIDE SIDE_STRIDE(TA)
#define B_STRIDE SIDE_STRIDE(TN)
#define A_SIZE (TR * A_STRIDE)
#define STAGE_SIZE (A_SIZE + TR * B_STRIDE)
#define MATRICES ((i64)BLOCKS * K * N)
#define WEIGHT (MATRICES + SUMS * BLOCKS * N)  // of a segment
#define SUM_COLUMNS ((TN + THREADS - 1) / THREADS)
#define SLOTS (STAGES + 1)  // tiles between the reading of row numbers and the use of the factors read with them
#define MERGE_THREADS 256
#define MERGE_COLUMNS 32
#define MERGE_GROUPS (MERGE_THREADS / MERGE_COLUMNS)
#define MERGE_EACH 4  // columns of a thread of merge_wide

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

// Sums of the columns of dY, every THREADS-th by each thread; those of a tile are added up before they join.
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
            if (column < TN && place.n + column < N) base[MATRICES + place.block * N + place.n + column] = of[i];
        }
    }
};

__device__ __forceinline__ void write(const Target& to, const Feed& feed, int segment, const Accumulators& acc,
                                      const ColumnSums& sums) {
    const Place place;
    const bool before = __ldg(feed.segments.tile_ptr + segment) < feed.begin;
    const bool behind = __ldg(feed.segments.tile_ptr + segment + 1) > feed.begin + feed.count;
    float* base = before || behind ? to.partial + (2 * (i64)blockIdx.x + (before ? 0 : 1)) * WEIGHT : to.out + segment * WEIGHT;
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
    Walk at;
    Accumulators acc;
    ColumnSums sums;
    const bool summing = SUMS && Place().a == 0;
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
                if (segment >= 0) write(to, feed, segment, acc, sums);
                segment = at.segment;
                clear(acc);
                sums.clear();
            }
            const Right right = {{feed.stage(tile) + A_SIZE}, feed.factors(tile)};
            multiply_tile<TR>(Left{feed.stage(tile)}, right, to.row, to.column, acc);
            if (summing) sums.add(right);
        }
        feed.publish(tile + STAGES);
    }
    write(to, feed, segment, acc, sums);
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

// The blocks of `weight_grad` that have parts of a segment.
struct Share {
    int first, last;

    // The block whose share holds a tile: the last one that begins at or before it.
    static __device__ __forceinline__ int owner(int tile, int blocks, int tiles) {
        return (int)((((i64)tile + 1) * blocks - 1) / tiles);
    }
    __device__ __forceinline__ Share(const int* tile_ptr, int segment, int blocks, int tiles) : first(0), last(0) {
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
    // Where there are fewer tiles than blocks, some blocks have written nothing. (Asked in the loop, it would keep loads apart.)
    __device__ __forceinline__ bool all_wrote() const { return tiles >= blocks; }
    template <bool All> __device__ __forceinline__ bool wrote(int block) const {
        return All || range_begin(block, blocks, tiles) < range_begin(block + 1, blocks, tiles);
    }
};

// Few parts: each thread adds up those of MERGE_EACH columns, without waiting for others.
struct Wide {
    static constexpr int COLUMNS = MERGE_THREADS * MERGE_EACH;

    template <bool All> static __device__ __forceinline__ void add(const Piece& p, i64 first, float (&sum)[MERGE_EACH]) {
#pragma unroll 4
        for (int b = p.share.first + 1; b <= p.share.last; ++b)
            if (p.wrote<All>(b))
#pragma unroll
                for (int i = 0; i < MERGE_EACH; ++i)
                    if (first + i * MERGE_THREADS < WEIGHT) sum[i] += *p.part(b, first + i * MERGE_THREADS, 0);
    }
    static __device__ __forceinline__ void merge(const Piece& p, float*) {
        const i64 first = (i64)p.chunk * COLUMNS + threadIdx.x;
        float sum[MERGE_EACH];
#pragma unroll
        for (int i = 0; i < MERGE_EACH; ++i)
            sum[i] = first + i * MERGE_THREADS < WEIGHT ? *p.part(p.share.first, first + i * MERGE_THREADS, 1) : 0.f;
        if (p.all_wrote()) add<true>(p, first, sum);
        else add<false>(p, first, sum);
#pragma unroll
        for (int i = 0; i < MERGE_EACH; ++i)
            if (first + i * MERGE_THREADS < WEIGHT) p.out[first + i * MERGE_THREADS] = sum[i];
    }
};

// Many parts: groups of threads take every MERGE_GROUPS-th part of a column, then their sums are added in order.
struct Shared {
    static constexpr int COLUMNS = MERGE_COLUMNS;

    template <bool All> static __device__ __forceinline__ void add(const Piece& p, i64 column, int group, float& sum) {
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
            for (int other = 1; other < MERGE_GROUPS; ++other) sum += sums[other * MERGE_COLUMNS + threadIdx.x];
            p.out[column] = sum;
        }
    }
};

// Adds up the parts of all divided segments, in the order of the blocks that made them. Only the device knows which those
// are: each block looks at all segments, MERGE_THREADS at a time, and does its share of the columns of those that it finds.
template <typename How>
__device__ __forceinline__ void merge_all(const int* tile_ptr, int segment_count, int blocks, const float* partial, float* out,
                                          float* shared) {
    constexpr i64 CHUNKS = (WEIGHT + How::COLUMNS - 1) / How::COLUMNS;
    float* const sums = shared;
    int* const found = (int*)(sums + MERGE_THREADS);  // divided segments
    int* const counts = found + MERGE_THREADS;        // of each warp's
    const int tiles = __ldg(tile_ptr + segment_count), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
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
        const i64 pieces = (i64)count * CHUNKS;
        for (i64 i = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x; i < pieces; i += gridDim.x) {
            const int segment = found[i / CHUNKS];
            How::merge({Share(tile_ptr, segment, blocks, tiles), (int)(i % CHUNKS), blocks, tiles, partial, out + segment * WEIGHT},
                       sums);
        }
        before += pieces;
        __syncthreads();  // before the lists are written again
    }
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge(const int* __restrict__ tile_ptr, int segment_count, int blocks, const float* __restrict__ partial,
      float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    merge_all<Shared>(tile_ptr, segment_count, blocks, partial, out, (float*)shared);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_wide(const int* __restrict__ tile_ptr, int segment_count, int blocks, const float* __restrict__ partial,
           float* __restrict__ out) {
    DYNAMIC_SHARED(shared);
    merge_all<Wide>(tile_ptr, segment_count, blocks, partial, out, (float*)shared);
}
