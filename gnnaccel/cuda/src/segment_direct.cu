// The product of segment_gemm.cu for matrices that fit in shared memory as a whole. See cuda/segment_direct.py.
//
// A warp computes tiles of WM rows and all N columns of a diagonal block (blockIdx.y), so each value of X is loaded and
// split once, straight into the registers from which the tensor cores take it (segment_fragments.cuh), DEPTH chunks of k
// ahead. W lies in shared memory as fragments. A block has a contiguous range of tiles, of which its warps take every
// WARPS_M-th; only where the segment changes do they wait for each other. The sum over k has a fixed order.
#include "segment_epilogue.cuh"
#include "segment_fragments.cuh"

#define ROUNDS (CHUNKS / DEPTH)
#define TOGETHER (NT % GROUP == 0 ? GROUP : 1)  // groups of columns whose chains of products run side by side

static_assert(CHUNKS % DEPTH == 0, "a round of loads fills all slots");

typedef u32 Slot[MT][2][WORDS];  // a chunk of rows g and g + 8 of each 16

// The rows of X that a lane has of a tile.
struct Rows {
    int number[MT][2];

    // Behind the tile's end, the last row stands in: nobody writes its result.
    __device__ __forceinline__ void pick(const Walk& at, const int* index) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = 16 * m + 8 * half + ((threadIdx.x & 31) >> 2), row = at.row + (r < at.rows ? r : at.rows - 1);
                number[m][half] = index ? __ldg(index + row) : row;
            }
    }
};

// Loads what the warp will need, a round ahead; the numbers of the rows are read a tile ahead of that. Behind its last tile
// the warp goes on with the block's last one, which costs less than asking each time.
struct Feed {
    const Segments& segments;
    const ROW_T* x;
    const int* index;
    int tile, end;  // the tile whose numbers are read next
    Walk ahead;
    Rows coming, rows;
    int round;

    __device__ __forceinline__ void read_numbers() {
        ahead.seek(segments, tile < end ? tile : end - 1);
        coming.pick(ahead, index);
        tile += WARPS_M;
    }
    __device__ __forceinline__ void next_round() {
        if (++round < ROUNDS) return;
        round = 0;
        rows = coming;
        read_numbers();
    }
    __device__ __forceinline__ void load(Slot& slot, int place) const {
        const int first = (round * DEPTH + place) * CHUNK + (threadIdx.x & 3) * WORDS * PER_WORD;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                read_words<LOAD_X>(x + (i64)rows.number[m][half] * (BLOCKS * K) + first, slot[m][half]);
    }
};

// One tile by fp32 multiply-adds from global memory: for values that cannot be split.
__device__ __forceinline__ void plain_tile(const ROW_T* x, const int* index, const ROW_T* w, const Walk& at, Accumulators& acc) {
    Rows rows;
    rows.pick(at, index);
    clear(acc);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        float left[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) left[m][half] = to_float(x[(i64)rows.number[m][half] * (BLOCKS * K) + k]);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = column_at(n, threadIdx.x & 3, e);
                const float right = to_float(w[TRANSPOSED ? column * K + k : k * N + column]);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        acc[m][n][2 * half + e] = fmaf(left[m][half], right, acc[m][n][2 * half + e]);
            }
    }
}

#if TENSOR_CORES && PRECISION != FMA

// Words 2 step and 2 step + 1 of a slot as the left operand.
__device__ __forceinline__ void left_words(const Slot& slot, int step, LeftWords& x) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) x[m][r] = slot[m][r & 1][2 * step + (r >> 1)];
}

#if PRECISION == FP32

// TOGETHER groups of columns from n on: three products each, starting from zero.
__device__ __forceinline__ void add_products(const LeftWords& big, const LeftWords& small, const u32* chunk, int step, int n,
                                             Accumulators& acc) {
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    u32 y_big[TOGETHER][2], y_small[TOGETHER][2];
    float sum[TOGETHER][MT][4];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        u32 quad[4];
        read_quad(chunk, step, n + i, quad);
        y_big[i][0] = quad[0], y_big[i][1] = quad[1], y_small[i][0] = quad[2], y_small[i][1] = quad[3];
    }
#define EACH(left, right, from)                          \
    _Pragma("unroll") for (int i = 0; i < TOGETHER; ++i) \
    _Pragma("unroll") for (int m = 0; m < MT; ++m) Mma<float>::multiply(sum[i][m], left[m], right[i], from);
    EACH(small, y_big, zero)
    EACH(big, y_small, sum[i][m])
    EACH(big, y_big, sum[i][m])
#undef EACH
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n + i][e] += sum[i][m][e];
}

// A chunk of the product; the slot is loaded again as soon as its values are split. odd becomes NaN where one cannot be.
__device__ __forceinline__ void multiply_chunk(Slot& slot, const Feed& feed, int place, const u32* chunk, Accumulators& acc,
                                               float& odd) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        LeftWords x, big, small;
        left_words(slot, step, x);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) odd = fmaf(split_in_two(__uint_as_float(x[m][r]), big[m][r], small[m][r]), 0.f, odd);
        if (step == STEPS - 1) feed.load(slot, place);
#pragma unroll
        for (int n = 0; n < NT; n += TOGETHER) add_products(big, small, chunk, step, n, acc);
    }
}

#else

// The sums are short, so they may stay in the accumulators.
__device__ __forceinline__ void multiply_chunk(Slot& slot, const Feed& feed, int place, const u32* chunk, Accumulators& acc,
                                               float&) {
    LeftWords x[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        left_words(slot, step, x[step]);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int r = 0; r < 4 && PRECISION == TF32; ++r) x[step][m][r] = tf32_from_float(__uint_as_float(x[step][m][r]));
    }
    feed.load(slot, place);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        u32 quad[4];
        read_quad(chunk, 0, n, quad);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 y[2] = {quad[2 * step], quad[2 * step + 1]};
#pragma unroll
            for (int m = 0; m < MT; ++m) Mma<ROW_T>::multiply(acc[m][n], x[step][m], y, acc[m][n]);
        }
    }
}

#endif

// Whether all values could be split.
__device__ __forceinline__ bool multiply_rows(Slot (&slots)[DEPTH], Feed& feed, const u32* matrix, Accumulators& acc) {
    float odd = 0.f;
    clear(acc);
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        feed.next_round();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) multiply_chunk(slots[i], feed, i, matrix + (round * DEPTH + i) * CHUNK_WORDS, acc, odd);
    }
    return __all_sync(FULL_WARP, odd == 0.f);
}

// The block's copy of W.
struct Matrix {
    const ROW_T* w;
    i64 segment;
    u32* fragments;
    int* odd;  // the last segment with values that cannot be split

    __device__ __forceinline__ const ROW_T* of(int which) const { return w + which * segment; }
    __device__ __forceinline__ void change(int to) const {
        __syncthreads();  // nobody reads the one before any more
        if (write_fragments(of(to), fragments)) *odd = to;
        __syncthreads();
    }
};

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, int begin, const Epilogue& to, int block, float* scratch) {
    const Corner corner = {0, 0, block};
    Slot slots[DEPTH];
    Walk at;
    int tile = feed.tile;
    feed.round = ROUNDS - 1;
    feed.read_numbers();
    feed.next_round();
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) feed.load(slots[i], i);
    for (int first = begin; first < feed.end; first = at.next) {
        at.enter(feed.segments, first);
        matrix.change(at.segment);
        const bool whole = *matrix.odd != at.segment;
        for (; tile < at.next && tile < feed.end; tile += WARPS_M) {
            Accumulators acc;
            at.place(tile);
            if (!multiply_rows(slots, feed, matrix.fragments, acc) || !whole)
                plain_tile(feed.x, feed.index, matrix.of(at.segment), at, acc);
            finish(to, at, corner, acc);
#if DOTS
            inner_products(to, at, corner, acc, scratch);
#endif
            store(to, at, corner, acc);
        }
    }
}

#else

struct Matrix {
    const ROW_T* w;
    i64 segment;
    u32* fragments;
    int* odd;
};

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, int, const Epilogue& to, int block, float* scratch) {
    const Corner corner = {0, 0, block};
    for (Walk at; feed.tile < feed.end; feed.tile += WARPS_M) {
        Accumulators acc;
        at.seek(feed.segments, feed.tile);
        plain_tile(feed.x, feed.index, matrix.w + at.segment * matrix.segment, at, acc);
        finish(to, at, corner, acc);
#if DOTS
        inner_products(to, at, corner, acc, scratch);
#endif
        store(to, at, corner, acc);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
multiply(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count, const ROW_T* __restrict__ x,
         const int* __restrict__ index, const ROW_T* __restrict__ w, i64 w_segment, i64 w_block,
         const float* __restrict__ bias, i64 bias_step, const float* __restrict__ scale, int activation, float slope,
         const int* __restrict__ out_index, OUT_T* __restrict__ out, const float* __restrict__ att, i64 att_step,
         float* __restrict__ dots, i64 plane, const float* __restrict__ share, const OUT_T* __restrict__ rest) {
    DYNAMIC_SHARED(shared);
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int end = range_begin(blockIdx.x + 1, gridDim.x, tiles), block = blockIdx.y, warp = threadIdx.x >> 5;
    if (begin == end) return;
    u32* const fragments = (u32*)shared;
    int* const odd = (int*)(fragments + CHUNKS * CHUNK_WORDS);
    float* const scratch = (float*)(odd + 4) + warp * 16 * SCRATCH_STRIDE;
    if (threadIdx.x == 0) *odd = -1;
    const Epilogue to = {bias, scale, att, bias_step, att_step, activation, slope, out_index, out, dots, plane, share, rest};
    const Matrix matrix = {w + block * w_block, w_segment, fragments, odd};
    Feed feed = {segments, x + block * K, index, begin + warp, end, Walk(), {}, {}, 0};
    run(feed, matrix, begin, to, block, scratch);
}
