// Y[o(i), :] = epilogue(X[g(i), :] W[segment of i]) for rows sorted by segment. See
// cuda/segment/segment_gemm.py for the shapes.
//
// A block computes TR x TN tiles of Y, one after another: blockIdx.y says which TN columns (of
// which diagonal block), blockIdx.x takes its share of the row tiles, which lie side by side, so
// that it meets few segments. W's columns stay in shared memory until the segment changes
// (RESIDENT), or come along with X, TK values of k at a time, where they are too many. X is copied
// STAGES - 1 steps ahead, a step being TK values of k of one tile; the numbers of the rows to copy
// are read one tile earlier still.
#include "segment_epilogue.cuh"

#define X_STRIDE WIDE_STRIDE(TK)
#define W_DEPTH (RESIDENT ? CHUNKS * TK : TK)
#define W_STRIDE (TRANSPOSED ? WIDE_STRIDE(W_DEPTH) : SIDE_STRIDE(TN))
#define W_SIZE (TRANSPOSED ? TN * W_STRIDE : W_DEPTH * W_STRIDE)
#define STAGE_SIZE (TR * X_STRIDE + (RESIDENT ? 0 : W_SIZE))

static_assert(TR <= THREADS, "each thread reads the number of one row");
static_assert(TR == WM * WARPS_M && TN == WN * WARPS_N, "the warps' tiles make up the block's");

typedef Operand<true, X_STRIDE> Left;
typedef Operand<TRANSPOSED, W_STRIDE> Right;

// Weights of this block's columns. segment, block: elements between consecutive ones.
struct Weights {
    const ROW_T* w;
    i64 segment;
    int column;  // first in the diagonal block

    // Starts copying W_DEPTH values of k from `first` on.
    __device__ __forceinline__ void copy(ROW_T* to, int which, int first) const {
        const ROW_T* from = w + which * segment;
        if (TRANSPOSED)
            copy_lines<TN, W_DEPTH, W_STRIDE, COPY_W>(to, from + (i64)column * K + first, K,
                                                      N - column, K - first);
        else
            copy_lines<W_DEPTH, TN, W_STRIDE, COPY_W>(to, from + (i64)first * N + column, N,
                                                      K - first, N - column);
    }
};

// Keeps the stages filled.
struct Feed {
    const Segments& segments;
    const Weights& weights;
    const ROW_T* x;
    const int* index;
    ROW_T* stages;
    int* list;        // [2][TR] numbers of rows: of the tile being copied and of the next
    int begin, count;  // this block's tiles
    Walk ahead;       // the tile whose numbers were read last
    int number, copied_segment;
    bool read;

    __device__ __forceinline__ void read_numbers(int tile) {
        read = tile < count;
        if (!read) return;
        ahead.seek(segments, begin + tile);
        number = picked_row(index, ahead.row, ahead.rows);
    }
    // After the tile before has been computed, so that nobody waits for the numbers.
    __device__ __forceinline__ void publish(int tile) {
        if (read && threadIdx.x < TR) list[(tile & 1) * TR + threadIdx.x] = number;
        read = false;
    }
    __device__ __forceinline__ ROW_T* stage(int step) const { return stages + step % STAGES
                                                              * STAGE_SIZE; }
    __device__ __forceinline__ void start(int step) {
        const int tile = step / CHUNKS, first = step % CHUNKS * TK;
        if (tile >= count) return;
        if (first == 0) {
            copied_segment = ahead.segment;
            read_numbers(tile + 1);
        }
        copy_rows<TR, TK, X_STRIDE, COPY_X>(stage(step), x + first, BLOCKS * K,
                                            list + (tile & 1) * TR, K - first);
        if (!RESIDENT) weights.copy(stage(step) + TR * X_STRIDE, copied_segment, first);
    }
};

__device__ __forceinline__ void write_tile(const Epilogue& to, const Walk& at, const Corner& corner,
                                           Accumulators& acc, float* scratch) {
    finish(to, at, corner, acc);
#if DOTS
    inner_products(to, at, corner, acc, scratch + (threadIdx.x >> 5) * 16 * SCRATCH_STRIDE);
#endif
    store(to, at, corner, acc);
}

// Waits for W of another segment, while nothing else is computed.
__device__ __forceinline__ void change_weights(const Weights& weights, ROW_T* to, int segment) {
    weights.copy(to, segment, 0);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void run(Feed& feed, const Weights& weights, ROW_T* resident,
                                    const Epilogue& to, const Corner& corner, int column,
                                    float* scratch) {
    Walk at;
    Accumulators acc;
    int loaded = -1;
    feed.read_numbers(0);
    feed.publish(0);
    for (int step = 1 - STAGES; step < feed.count * CHUNKS; ++step) {
        copies_wait<STAGES - 2>();
        // this step's copies are there, for all threads; and the step before is done with its stage
        __syncthreads();
        const int coming = step + STAGES - 1;
        feed.start(coming);
        copies_commit();
        if (step >= 0) {
            const int chunk = step % CHUNKS;
            if (chunk == 0) {
                at.seek(feed.segments, feed.begin + step / CHUNKS);
                clear(acc);
                if (RESIDENT && at.segment != loaded)
                    change_weights(weights, resident, loaded = at.segment);
            }
            const ROW_T* w = RESIDENT ? resident + chunk * TK * (TRANSPOSED ? 1 : W_STRIDE)
                : feed.stage(step) + TR * X_STRIDE;
            multiply_tile<TK>(Left{feed.stage(step)}, Right{w}, corner.row, column, acc);
            if (chunk == CHUNKS - 1) write_tile(to, at, corner, acc, scratch);
        }
        feed.publish(coming / CHUNKS + 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
multiply(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count,
         const ROW_T* __restrict__ x, const int* __restrict__ index, const ROW_T* __restrict__ w,
         i64 w_segment, i64 w_block, const float* __restrict__ bias, i64 bias_step,
         const float* __restrict__ scale, int activation, float slope,
         const int* __restrict__ out_index, OUT_T* __restrict__ out, const float* __restrict__ att,
         i64 att_step, float* __restrict__ dots, i64 plane, const float* __restrict__ share,
         const OUT_T* __restrict__ rest) {
    DYNAMIC_SHARED(shared);
    copies_begin();
    const Segments segments = {ptr, tile_ptr, segment_count};
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int count = range_begin(blockIdx.x + 1, gridDim.x, tiles) - begin;
    if (count == 0) return;
    const int block = blockIdx.y / COLUMN_TILES, first = blockIdx.y % COLUMN_TILES
        * TN, warp = threadIdx.x >> 5;
    const int row = warp / WARPS_N * WM, column = warp % WARPS_N * WN;
    const Weights weights = {w + block * w_block, w_segment, first};
    const Epilogue to = {bias, scale, att, bias_step, att_step, activation, slope, out_index, out,
                         dots, plane, share, rest};
    const Corner corner = {row, first + column, block};
    ROW_T* const resident = (ROW_T*)shared;
    ROW_T* const stages = resident + (RESIDENT ? W_SIZE : 0);
    int* const list = (int*)(stages + STAGES * STAGE_SIZE);
    Feed feed = {segments, weights, x + block * K, index, stages, list, begin, count, Walk(), 0, 0,
                 false};
    run(feed, weights, resident, to, corner, column, (float*)(list + 2 * TR));
}
