// The product of segment_gemm.cu for matrices that fit in shared memory as a whole. See
// cuda/segment_direct.py.
//
// A warp computes tiles of WM rows and all N columns of a diagonal block (blockIdx.y), so each
// value of X is loaded and split once, straight into the registers from which the tensor cores take
// it (segment_fragments.cuh), DEPTH chunks of k ahead. W lies in shared memory as fragments. A
// block has a contiguous range of tiles, of which its warps take every WARPS_M-th; only where the
// segment changes do they wait for each other. The sum over k has a fixed order.
#include "segment_epilogue.cuh"
#include "segment_fragments.cuh"

#define ROUNDS (CHUNKS / DEPTH)

static_assert(CHUNKS % DEPTH == 0 && N == WN,
              "a round of loads fills all slots; a warp has all columns");

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
                read_words<LOAD_X>(x + (i64)rows.number[m][half] * (BLOCKS * K) + first,
                                   slot[m][half]);
    }
};

// One tile from global memory, for values that cannot be split.
__device__ __forceinline__ void plain_tile(const ROW_T* x, const int* index, const ROW_T* w,
                                           const Walk& at, Accumulators& acc) {
    Rows rows;
    rows.pick(at, index);
    plain_product([&](int m, int half,
                      int k) { return to_float(x[(i64)rows.number[m][half] * (BLOCKS * K) + k]); },
                      w, 0, acc);
}

#if TENSOR_CORES && PRECISION != FMA

// Whether all values could be split.
__device__ __forceinline__ bool multiply_rows(Slot (&slots)[DEPTH], Feed& feed, const u32* matrix,
                                              Accumulators& acc) {
    float odd = 0.f;
    clear(acc);
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        feed.next_round();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
            multiply_chunk(slots[i], matrix + (round * DEPTH + i) * CHUNK_WORDS, 0, acc, odd,
                           [&] { feed.load(slots[i], i); });
    }
    return __all_sync(FULL_WARP, odd == 0.f);
}

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, int begin, const Epilogue& to,
                                    int block, float* scratch) {
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

__device__ __forceinline__ void run(Feed& feed, const Matrix& matrix, int, const Epilogue& to,
                                    int block, float* scratch) {
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
multiply(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count,
         const ROW_T* __restrict__ x, const int* __restrict__ index, const ROW_T* __restrict__ w,
         i64 w_segment, i64 w_block, const float* __restrict__ bias, i64 bias_step,
         const float* __restrict__ scale, int activation, float slope,
         const int* __restrict__ out_index, OUT_T* __restrict__ out, const float* __restrict__ att,
         i64 att_step, float* __restrict__ dots, i64 plane, const float* __restrict__ share,
         const OUT_T* __restrict__ rest) {
    DYNAMIC_SHARED(shared);
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int end = range_begin(blockIdx.x + 1, gridDim.x, tiles), block = blockIdx.y,
        warp = threadIdx.x >> 5;
    if (begin == end) return;
    u32* const fragments = (u32*)shared;
    int* const odd = (int*)(fragments + CHUNKS * CHUNK_WORDS);
    float* const scratch = (float*)(odd + 4) + warp * 16 * SCRATCH_STRIDE;
    if (threadIdx.x == 0) *odd = -1;
    const Epilogue to = {bias, scale, att, bias_step, att_step, activation, slope, out_index, out,
                         dots, plane, share, rest};
    const Matrix matrix = {w + block * w_block, w_segment, fragments, odd};
    Feed feed = {segments, x + block * K, index, begin + warp, end, Walk(), {}, {}, 0};
    run(feed, matrix, begin, to, block, scratch);
}
