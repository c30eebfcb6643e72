// The product of segment_gemm.cu for matrices that fit in shared memory as a whole. See
// cuda/segment/segment_direct.py.
//
// A warp computes tiles of WM rows and all N columns of a diagonal block (blockIdx.y), so each
// value of X is loaded and split once, straight into the registers from which the tensor cores take
// it (segment_fragments.cuh), DEPTH chunks of k ahead. W lies in shared memory as fragments. A
// block has a contiguous range of tiles, of which its warps take every WARPS_M-th; only where the
// segment changes do they wait for each other. The sum over k has a fixed order.
//
// With FIRST, rows in memory are E of FIRST columns, and X = act(E W1 + b1): a warp makes the rows
// of its tile by a first product, whose results lie in its registers as the second takes them.
#include "segment_epilogue.cuh"
#include "segment_activation.cuh"

#ifndef FIRST
#define FIRST 0
#endif
#ifndef X_BLOCKS
#define X_BLOCKS BLOCKS  // of rows in memory: 1 where all diagonal blocks take the same
#endif
#define READ (FIRST ? FIRST : K)  // columns of a block of rows in memory
#define X_PITCH (X_BLOCKS * READ)
#define ROUNDS (READ / CHUNK / DEPTH)
#define FIRST_WORDS (FIRST / CHUNK * CHUNK_WORDS_OF(K))

static_assert(READ % (CHUNK * DEPTH) == 0 && N == WN,
              "a round of loads fills all slots; a warp has all columns");
static_assert(!FIRST || (TRANSPOSED && WORDS == 2 * SIDE && K % (8 * SIDE) == 0),
              "what a lane has of the first product is what it needs for the second");

// The rows of X that a lane has of a tile.
struct Rows {
    int number[MT][2];

    // Behind the tile's end, the last row stands in: nobody writes its result.
    __device__ __forceinline__ void pick(const Walk& at, const int* index) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = 16 * m + 8 * half + ((threadIdx.x & 31) >> 2), row = at.row
                    + (r < at.rows ? r : at.rows - 1);
                number[m][half] = index ? __ldg(index + row) : row;
            }
    }
};

// Loads what the warp will need, a round ahead; the numbers of the rows are read a tile ahead of
// that. Behind its last tile the warp goes on with the block's last one, which costs less than
// asking each time.
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
                read_words<LOAD_X>(x + (i64)rows.number[m][half] * X_PITCH + first,
                                   slot[m][half]);
    }
};

// The first product: W1 as [K, FIRST], its fragments, whether a value of it cannot be split, and
// where rows of Z = E W1 + b1 go, if they are kept.
struct First {
    const ROW_T* w;
    const float* bias;
    float* z;
    u32* fragments;
    int* odd;

    __device__ __forceinline__ void make() const {
#if FIRST && TENSOR_CORES && PRECISION != FMA
        if (threadIdx.x == 0) *odd = 0;
        __syncthreads();
        if (write_fragments<FIRST, K>(w, fragments)) *odd = 1;
#endif
    }
    // One number of Z, by fp32 multiply-adds.
    __device__ __forceinline__ float at(const ROW_T* e, int k) const {
        float sum = 0.f;
#pragma unroll 4
        for (int i = 0; i < FIRST; ++i) sum = fmaf(to_float(e[i]), to_float(w[k * FIRST + i]), sum);
        return bias ? sum + __ldg(bias + k) : sum;
    }
};

typedef float Hidden[MT][K / 8][4];

// One tile from global memory, for values that cannot be split.
__device__ __forceinline__ void plain_tile(const ROW_T* x, const int* index, const ROW_T* w,
                                           const First& first, const Walk& at, Accumulators& acc) {
    Rows rows;
    rows.pick(at, index);
    plain_product([&](int m, int half, int k) {
        const ROW_T* const row = x + (i64)rows.number[m][half] * X_PITCH;
        if (!FIRST) return act(to_float(row[k]));
        const float z = first.at(row, k);
        const int r = 16 * m + 8 * half + ((threadIdx.x & 31) >> 2);
        if (first.z && (threadIdx.x & 3) == 0 && r < at.rows)
            first.z[(i64)(at.row + r) * K + k] = z;
        return act(z);
    },
                  w, 0, acc);
}

#if TENSOR_CORES && PRECISION != FMA

#if FIRST

// Adds the bias, and writes Z where it is kept.
__device__ __forceinline__ void keep(const First& first, const Walk& at, Hidden& z) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < K / 8; n += SIDE) {
        const int column = column_at(n, c, 0);
        float bias[2 * SIDE];
#pragma unroll
        for (int i = 0; i < 2 * SIDE; ++i) bias[i] = first.bias ? __ldg(first.bias + column + i)
            : 0.f;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float pack[2 * SIDE];
#pragma unroll
                for (int i = 0; i < 2 * SIDE; ++i) {
                    float& value = z[m][n + i / 2][2 * half + i % 2];
                    pack[i] = value += bias[i];
                }
                const int r = 16 * m + 8 * half + g;
                if (first.z && r < at.rows)
                    store_pack<float, 2 * SIDE>(first.z + (i64)(at.row + r) * K + column, pack);
            }
    }
}

// Whether all values could be split.
__device__ __forceinline__ bool multiply_rows(Slot (&slots)[DEPTH], Feed& feed, const u32* matrix,
                                              const First& first, const Walk& at,
                                              Accumulators& acc) {
    float odd = 0.f;
    Hidden z;
    clear(z);
    clear(acc);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        feed.next_round();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
            multiply_chunk<K>(slots[i], first.fragments + (round * DEPTH + i) * CHUNK_WORDS_OF(K),
                              0, z, odd, [&] { feed.load(slots[i], i); });
    }
    keep(first, at, z);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        Slot slot;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    slot[m][half][i] = __float_as_uint(
                        act(z[m][chunk * SIDE + i / 2][2 * half + i % 2]));
        multiply_chunk(slot, matrix + chunk * CHUNK_WORDS, 0, acc, odd, [] {});
    }
    return __all_sync(FULL_WARP, odd == 0.f) && !*first.odd;
}

#else

// Whether all values could be split.
__device__ __forceinline__ bool multiply_rows(Slot (&slots)[DEPTH], Feed& feed, const u32* matrix,
                                              const First&, const Walk&, Accumulators& acc) {
    float odd = 0.f;
    clear(acc);
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        feed.next_round();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            activate(slots[i]);
            multiply_chunk(slots[i], matrix + (round * DEPTH + i) * CHUNK_WORDS, 0, acc, odd,
                           [&] { feed.load(slots[i], i); });
        }
    }
    return __all_sync(FULL_WARP, odd == 0.f);
}

#endif

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, const First& first_map,
                                    int begin, const Epilogue& to, int block, float* scratch) {
    const Corner corner = {0, 0, block};
    Slot slots[DEPTH];
    Walk at;
    int tile = feed.tile;
    first_map.make();
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
            if (!multiply_rows(slots, feed, matrix.fragments, first_map, at, acc) || !whole)
                plain_tile(feed.x, feed.index, matrix.of(at.segment), first_map, at, acc);
            finish(to, at, corner, acc);
#if DOTS
            inner_products(to, at, corner, acc, scratch);
#endif
            store(to, at, corner, acc);
        }
    }
}

#else

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, const First& first_map, int,
                                    const Epilogue& to, int block, float* scratch) {
    const Corner corner = {0, 0, block};
    for (Walk at; feed.tile < feed.end; feed.tile += WARPS_M) {
        Accumulators acc;
        at.seek(feed.segments, feed.tile);
        plain_tile(feed.x, feed.index, matrix.w + at.segment * matrix.segment, first_map, at, acc);
        finish(to, at, corner, acc);
#if DOTS
        inner_products(to, at, corner, acc, scratch);
#endif
        store(to, at, corner, acc);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
multiply(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count,
         const ROW_T* __restrict__ x, const int* __restrict__ index, const ROW_T* __restrict__ w,
         i64 w_segment, i64 w_block, const float* __restrict__ bias, i64 bias_step,
         const float* __restrict__ scale, int activation, float slope,
         const int* __restrict__ out_index, OUT_T* __restrict__ out, const float* __restrict__ att,
         i64 att_step, float* __restrict__ dots, i64 plane, const float* __restrict__ share,
         const OUT_T* __restrict__ rest
#if FIRST
         , const ROW_T* __restrict__ w1, const float* __restrict__ bias1, float* __restrict__ z
#endif
) {
    DYNAMIC_SHARED(shared);
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int end = range_begin(blockIdx.x + 1, gridDim.x, tiles), block = blockIdx.y,
        warp = threadIdx.x >> 5;
    if (begin == end) return;
    u32* const fragments = (u32*)shared;
    int* const odd = (int*)(fragments + CHUNKS * CHUNK_WORDS + FIRST_WORDS);
    float* const scratch = (float*)(odd + 4) + warp * 16 * SCRATCH_STRIDE;
    if (threadIdx.x == 0) *odd = -1;
    const Epilogue to = {bias, scale, att, bias_step, att_step, activation, slope, out_index, out,
                         dots, plane, share, rest};
    const Matrix matrix = {w + block * w_block, w_segment, fragments, odd};
#if FIRST
    const First first = {w1, bias1, z, fragments + CHUNKS * CHUNK_WORDS, odd + 1};
#else
    const First first = {};
#endif
    Feed feed = {segments, x + block % X_BLOCKS * READ, index, begin + warp, end, Walk(), {}, {}, 0};
    run(feed, matrix, first, begin, to, block, scratch);
}
