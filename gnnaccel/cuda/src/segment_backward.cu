// Both gradients of Y[i, :] = X[g(i), :] W[segment of i], from one reading of dY: dX[o(i), :] =
// dY[d(i), :] W[segment of i]^T, and dW[s], the sum over the rows i of segment s of X[g(i), :]^T
// dY[d(i), :]. With SUMS, behind each dW[s], the sum of dY[d(i), :] alone. With an activation, X =
// act(Z) of rows Z in memory, and dX is the gradient of those. See cuda/segment/segment_backward.py.
//
// K and N are those of the product that makes dX, as in segment_direct.cu: dY has K columns, X and
// dX have N. W, which stays in shared memory as fragments while its segment lasts, is read, and dW
// written, as [N, K] (TRANSPOSED) or [K, N].
//
// A block takes a contiguous share of the row tiles. Of each tile, staged by asynchronous copies,
// its warps compute WM x WN parts of dX, which they write, and add to GRAD_M x GRAD_N parts of [N,
// K] dW, which stay in registers until the segment ends; segment_merge.cuh says where they go then.
// Where there are more warps than such parts, they form LINE_GROUPS groups, each of which sums its
// share of a tile's lines.
#define TN N
#define DOTS 0
#define MATRICES ((i64)BLOCKS * K * N)
#define WEIGHT (MATRICES + SUMS * BLOCKS * K)  // of a segment
#define GRAD_WARPS (GRAD_WARPS_M * GRAD_WARPS_N)
#define X_TILE (GRAD_M * GRAD_WARPS_M)
#define Y_TILE (GRAD_N * GRAD_WARPS_N)
#define X_PITCH (BLOCKS * N)
#define Y_PITCH (BLOCKS * K)

// A quarter of a warp reads 16 bytes a lane of two of a tile's rows: these lie 16 banks apart if so
// many lines are between them. The sum over the lines takes them in any order.
#define LINE_OF(row) \
    (sizeof(ROW_T) == 4 ? ((row) & ~3) | ((row) & 1) << 1 | ((row) >> 1 & 1) : ((row) & ~7) | ((row) & 1) << 2 | ((row) >> 1 & 3))

#include "segment_merge.cuh"
#include "segment_stages.cuh"
#include "segment_epilogue.cuh"
#include "segment_activation.cuh"

#define LINE_GROUPS (WARPS_M * WARPS_N / GRAD_WARPS)
#define GROUP_LINES (TR / LINE_GROUPS)
#define GRAD_VALUES ((LINE_GROUPS - 1) * X_TILE * Y_TILE)  // that the other groups hand to the first
#define MATRIX_WORDS (CHUNKS * CHUNK_WORDS)
#define SUM_GROUPS (THREADS / K)  // of threads, each of which adds up a column over its share of the lines

static_assert(TR == WM * WARPS_M && N == WN * WARPS_N, "the warps' parts make up the tile of dX");
static_assert(X_TILE >= N && Y_TILE >= K && WARPS_M * WARPS_N % GRAD_WARPS == 0,
              "and, in whole groups, dW");
static_assert(TR % LINE_GROUPS == 0 && GROUP_LINES % K_STEP == 0 && THREADS >= K,
              "whole steps; a thread for each column");

typedef Operand<false, X_STRIDE> Left;
typedef Operand<false, Y_STRIDE> Right;
typedef float Gradient[GRAD_M / 16][GRAD_N / 8][4];

// What all warps need. area: of MATRIX_WORDS or GRAD_VALUES words, whichever are more.
struct Job {
    Feed& feed;
    const Matrix& matrix;
    const Epilogue& to;
    const Sums& sums;
    float *area, *column_area;
    int block, warp;

    __device__ __forceinline__ int group() const { return warp / GRAD_WARPS; }
    __device__ __forceinline__ int grad_row() const { return warp % GRAD_WARPS / GRAD_WARPS_N
                                                      * GRAD_M; }
    __device__ __forceinline__ int grad_column() const { return warp % GRAD_WARPS_N * GRAD_N; }
};

// ---- dX ----

__device__ __forceinline__ void read_slot(const ROW_T* lines, int row, int chunk, Slot& slot) {
    typedef typename Word<4 * WORDS>::type All;
    const int first = chunk * CHUNK + (threadIdx.x & 3) * WORDS * PER_WORD;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + 16 * m + 8 * half + ((threadIdx.x & 31) >> 2);
            union {
                u32 word[WORDS];
                All all;
            } u;
            u.all = *(const All*)(lines + LINE_OF(r) * Y_STRIDE + first);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) slot[m][half][i] = u.word[i];
        }
}

// For values that cannot be split, and where there are no tensor cores.
__device__ __forceinline__ void plain_rows(const ROW_T* lines, const ROW_T* w, const Corner& corner,
                                           Accumulators& acc) {
    plain_product([&](int m, int half,
                      int k) { return to_float(lines[LINE_OF(corner.row_of(m, half)) * Y_STRIDE
                                                     + k]); },
                  w, corner.column / 8, acc);
}

__device__ __forceinline__ void multiply_rows(const ROW_T* lines, const Matrix& matrix, int segment,
                                              const Corner& corner, Accumulators& acc) {
#if TENSOR_CORES && PRECISION != FMA
    Slot slot;
    float odd = 0.f;
    clear(acc);
    read_slot(lines, corner.row, 0, slot);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        multiply_chunk(slot, matrix.fragments + chunk * CHUNK_WORDS, corner.column / 8, acc, odd,
                       [&] {
            if (chunk + 1 < CHUNKS) read_slot(lines, corner.row, chunk + 1, slot);
        });
    }
    if (__all_sync(FULL_WARP, odd == 0.f) && *matrix.odd != segment) return;
#endif
    plain_rows(lines, matrix.of(segment), corner, acc);
}

// Takes the gradient of X, a warp's part of it, to that of Z, and puts X in the place of Z in
// shared memory. Rows behind the tile's end stay zeros.
__device__ __forceinline__ void activate(ROW_T* z, const Walk& at, const Corner& corner,
                                         Accumulators& acc) {
#if ACT
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = corner.row_of(m, half);
            ROW_T* const line = z + LINE_OF(r) * X_STRIDE;
#pragma unroll
            for (int n = 0; n < NT && r < at.rows; ++n) {
                float2* const two = (float2*)(line + corner.column_of(n, 0));
                const float2 v = *two;
                float* const d = acc[m][n] + 2 * half;
                d[0] = act_grad(v.x, d[0]), d[1] = act_grad(v.y, d[1]);
                *two = make_float2(act(v.x), act(v.y));
            }
        }
#endif
}

__device__ __forceinline__ void write_rows(const Job& job, ROW_T* stage, const Walk& at) {
    const Corner corner = {job.warp / WARPS_N * WM, job.warp % WARPS_N * WN, job.block};
    Accumulators acc;
    multiply_rows(stage + X_SIZE, job.matrix, at.segment, corner, acc);
    activate(stage, at, corner, acc);
    store(job.to, at, corner, acc);
}

// ---- dW ----

// What a warp has of dW, and a thread of the sums of a column.
struct Sum {
    Gradient of;
    float column;

    __device__ __forceinline__ void begin() {
        clear(of);
        column = 0.f;
    }
    __device__ __forceinline__ void add(const Job& job, const ROW_T* stage) {
        const int line = job.group() * GROUP_LINES;
        multiply_tile<GROUP_LINES>(Left{stage + line * X_STRIDE},
                                   Right{stage + X_SIZE + line * Y_STRIDE}, job.grad_row(),
                                   job.grad_column(), of);
        if (SUMS && threadIdx.x < SUM_GROUPS * K) {
            float sum = 0.f;
#pragma unroll 8
            for (int i = threadIdx.x / K; i < TR; i += SUM_GROUPS)
                sum += Right{stage + X_SIZE}.at(threadIdx.x % K, i);
            column += sum;
        }
    }
    // Of all groups to the first, in order.
    __device__ __forceinline__ void gather(const Job& job) {
        constexpr int MS = GRAD_M / 16, NS = GRAD_N / 8;
        float* const mine = job.area + threadIdx.x % (32 * GRAD_WARPS);
        if (SUMS) job.column_area[threadIdx.x] = column;
        if (LINE_GROUPS > 1 && job.group() > 0)
            each([&](int i,
                     float& value) { mine[((job.group() - 1) * MS * NS * 4 + i) * 32
                                          * GRAD_WARPS] = value; });
        if (LINE_GROUPS > 1 || SUMS) __syncthreads();
        if (LINE_GROUPS > 1 && job.group() == 0)
#pragma unroll
            for (int group = 0; group < LINE_GROUPS - 1; ++group)
                each([&](int i,
                         float& value) { value += mine[(group * MS * NS * 4 + i) * 32 * GRAD_WARPS];
                                         });
    }
    template <typename Do> __device__ __forceinline__ void each(const Do& act) {
        constexpr int MS = GRAD_M / 16, NS = GRAD_N / 8;
#pragma unroll
        for (int m = 0; m < MS; ++m)
#pragma unroll
            for (int n = 0; n < NS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) act((m * NS + n) * 4 + e, of[m][n][e]);
    }
    __device__ __forceinline__ void write(const Job& job, float* base) {
        const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
        if (SUMS && threadIdx.x < K) {
            float sum = job.column_area[threadIdx.x];
            for (int i = 1; i < SUM_GROUPS; ++i) sum += job.column_area[i * K + threadIdx.x];
            base[MATRICES + job.block * K + threadIdx.x] = sum;
        }
        if (job.group() > 0) return;
        base += (i64)job.block * K * N;
        each([&](int i, float& value) {
            const int row = job.grad_row() + i / 4 / (GRAD_N / 8) * 16 + 8 * (i >> 1 & 1) + g;
            const int column = job.grad_column() + i / 4 % (GRAD_N / 8) * 8 + 2 * c + (i & 1);
            if (row < N
                && column < K) base[TRANSPOSED ? row * K + column : column * N + row] = value;
        });
    }
};

// Behind a barrier after the last use of the matrix, whose memory the sums pass through.
__device__ __forceinline__ void leave(const Job& job, int segment, Sum& sum) {
    sum.gather(job);
    sum.write(job,
              job.sums.of(job.feed.segments, segment, job.feed.begin,
                          job.feed.begin + job.feed.count));
}

__device__ __forceinline__ void enter(const Job& job, int segment, Sum& sum) {
    sum.begin();
#if TENSOR_CORES && PRECISION != FMA
    job.matrix.change(segment);
#endif
}

__device__ __forceinline__ void run(const Job& job) {
    Sum sum;
    const auto change = [&](int before, int segment) {
        if (before >= 0) leave(job, before, sum);
        enter(job, segment, sum);
    };
    const int last = walk_tiles(job.feed, change, [&](int tile, const Walk& at) {
        write_rows(job, job.feed.stage(tile), at);
        if (ACT) __syncthreads();  // X is there, of all warps
        sum.add(job, job.feed.stage(tile));
    });
    __syncthreads();  // the matrix has been read
    leave(job, last, sum);
}

// Zeros for segments without rows, a share of them by each block.
__device__ __forceinline__ void clear_empty(const Segments& segments, float* out) {
    for (int s = blockIdx.x; s < segments.count && (BLOCKS == 1 || blockIdx.y == 0); s += gridDim.x)
        if (__ldg(segments.ptr + s) == __ldg(segments.ptr + s + 1))
            for (i64 i = threadIdx.x; i < WEIGHT; i += THREADS) out[s * WEIGHT + i] = 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward(const int* __restrict__ ptr, const int* __restrict__ tile_ptr, int segment_count,
         const ROW_T* __restrict__ x, const int* __restrict__ index, const ROW_T* __restrict__ dy,
         const int* __restrict__ dy_index, const ROW_T* __restrict__ w, i64 w_segment, i64 w_block,
         const int* __restrict__ out_index, OUT_T* __restrict__ dx, const OUT_T* __restrict__ rest,
         float* __restrict__ out, float* __restrict__ partial) {
    DYNAMIC_SHARED(shared);
    copies_begin();
    const Segments segments = {ptr, tile_ptr, segment_count};
    clear_empty(segments, out);
    const int tiles = segments.tiles(), begin = range_begin(blockIdx.x, gridDim.x, tiles);
    const int count = range_begin(blockIdx.x + 1, gridDim.x, tiles) - begin, block = BLOCKS > 1
        ? blockIdx.y : 0;
    if (count == 0) return;
    constexpr int AREA = MATRIX_WORDS > GRAD_VALUES ? MATRIX_WORDS : GRAD_VALUES;
    u32* const area = (u32*)shared;
    int* const odd = (int*)(area + AREA);
    float* const column_area = (float*)(odd + 4);
    ROW_T* const stages = (ROW_T*)(column_area + SUMS * THREADS);
    if (threadIdx.x == 0) *odd = -1;
    const Matrix matrix = {w + block * w_block, w_segment, area, odd};
    const Epilogue to = {nullptr, nullptr, nullptr, 0, 0, 0, 0.f, out_index, dx, nullptr, 0,
                         nullptr, rest};
    const Sums sums = {out, partial};
    Feed feed = {segments, x + block * N, dy + block * K, index, dy_index, nullptr, stages,
                 (int*)(stages + STAGES * STAGE_SIZE),
                 begin, count, N, K, Walk(), 0, 0, 0.f, false};
    run({feed, matrix, to, sums, (float*)area, column_area, block, (int)threadIdx.x >> 5});
}
