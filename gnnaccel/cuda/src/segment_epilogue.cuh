// What happens to a tile of the product before it is written: bias, factor of the row, activation,
// inner products with attention vectors; and the writing. All in fp32, rounded at the store.
//
// WRITE says how: PLAIN; ATOMIC, added to what is there, by any number of writers; BLEND, added to
// what is there by the only writer of each element, or, with `rest`, v share + rest (1 - share) of
// the segment's share; GELU_GRAD, times the derivative of GELU at `rest`.
#pragma once
#include "segment_rows.cuh"
#include "segment_tile.cuh"
#include "segment_walk.cuh"

#define COLUMNS (BLOCKS * N)
#define COLUMN_TILES ((N + TN - 1) / TN)
#define RELU 1
#define LEAKY_RELU 2
#define PLAIN 0
#define ATOMIC 1
#define BLEND 2
#define GELU_GRAD 3
#define SCRATCH_STRIDE (WN + 1)

struct Epilogue {
    const float *bias, *scale, *att;
    i64 bias_step, att_step;  // from one segment to the next; 0 where all share one
    int activation;
    float slope;
    const int* out_index;
    OUT_T* out;
    float* dots;
    i64 plane;
    const float* share;  // of each segment, where there is a `rest`
    const OUT_T* rest;   // with rows as those of `out`
};

// The part of the output that a warp has: `row` in the tile, `column` in the diagonal block
// `block`.
struct Corner {
    int row, column, block;

    __device__ __forceinline__ int row_of(int m,
                                          int half) const { return row + 16 * m + 8 * half
                                                            + ((threadIdx.x & 31) >> 2); }
    __device__ __forceinline__ int column_of(int n,
                                             int e) const { return column
                                                            + column_at(n, threadIdx.x & 3, e); }
};

__device__ __forceinline__ float activated(const Epilogue& to, float v) {
    if (to.activation == RELU) return v < 0.f ? 0.f : v;  // NaN stays NaN
    if (to.activation == LEAKY_RELU) return v > 0.f ? v : v * to.slope;
    return v;
}

__device__ __forceinline__ void finish(const Epilogue& to, const Walk& at, const Corner& corner,
                                       Accumulators& acc) {
    if (!to.bias && !to.scale && !to.activation) return;
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = corner.row_of(m, half);
            factor[m][half] = to.scale && r < at.rows ? __ldg(to.scale + at.row + r) : 1.f;
        }
    const float* bias = to.bias ? to.bias + at.segment * to.bias_step + corner.block * N : nullptr;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = corner.column_of(n, e & 1);
            const float b = bias && column < N ? __ldg(bias + column) : 0.f;
#pragma unroll
            for (int m = 0; m < MT; ++m)
                acc[m][n][e] = activated(to, (acc[m][n][e] + b) * factor[m][e >> 1]);
        }
}

#if DOTS

// Which of the strips of WN columns that warps compute holds a column of the output.
__device__ __forceinline__ int strip_of(int column) {
    const int inner = column % N;
    return (column / N * COLUMN_TILES + inner / TN) * WARPS_N + inner % TN / WN;
}

// Sums of 16 rows' products over the heads that this strip touches. A head in several strips gets a
// sum in each, in planes of their own, which the caller adds up.
__device__ __forceinline__ void sum_heads(const Epilogue& to, const Walk& at, const Corner& corner,
                                          int first_row, const float* products) {
    const int begin = corner.block * N + corner.column;
    const int end = corner.block * N + (corner.column + WN < N ? corner.column + WN : N);
    const int first = begin / D, heads = (end - 1) / D - first + 1;
    for (int i = threadIdx.x & 31; i < 16 * heads; i += 32) {
        const int r = first_row + (i & 15), h = first + (i >> 4);
        const int from = h * D > begin ? h * D : begin, stop = (h + 1) * D < end ? (h + 1) * D
            : end;
        if (r >= at.rows) continue;
        const float* line = products + (i & 15) * SCRATCH_STRIDE - begin;
        float sum = 0.f;
        for (int column = from; column < stop; ++column) sum += line[column];
        const i64 plane = strip_of(begin) - strip_of(h * D);
        to.dots[plane * to.plane + (i64)(at.row + r) * H + h] = sum;
    }
}

// products: the warp's own 16 x SCRATCH_STRIDE floats of shared memory.
__device__ __forceinline__ void inner_products(const Epilogue& to, const Walk& at,
                                               const Corner& corner, const Accumulators& acc,
                                               float* products) {
    if (corner.column >= N) return;  // a strip of padding: the whole warp
    const float* att = to.att + at.segment * to.att_step + corner.block * N;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = corner.column_of(n, e & 1);
                const int at_row = corner.row_of(m, e >> 1) - corner.row - 16 * m;
                products[at_row * SCRATCH_STRIDE + column - corner.column] =
                    column < N ? acc[m][n][e] * __ldg(att + column) : 0.f;
            }
        __syncwarp();
        sum_heads(to, at, corner, corner.row + 16 * m, products);
        __syncwarp();
    }
}

#endif

// With GELU(x) = x P(x), P being the normal distribution: P(x) + x P'(x).
__device__ __forceinline__ float gelu_grad(float x) {
    return 0.5f + 0.5f * erff(x * 0.70710678f) + x * (0.39894228f * exp2f(x * x * -0.72134752f));
}

// What is blended into one row.
struct Blend {
    const OUT_T* line;
    float mine, other;

    template <int Count> __device__ __forceinline__ void into(int column, float (&v)[Count]) const {
        if (WRITE != BLEND && WRITE != GELU_GRAD) return;
        PackWord<OUT_T, Count> u;  // not through the read-only path: it may be what is written to
        u.word = *reinterpret_cast<const typename Word<sizeof(OUT_T)
            * Count>::type*>(line + column);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float x = to_float(u.pack.v[i]);
            v[i] = WRITE == BLEND ? fmaf(other, x, mine * v[i]) : v[i] * gelu_grad(x);
        }
    }
};

// One row's NT * 8 columns, of which this lane has two of every eight (v[n]).
__device__ __forceinline__ void store_line(OUT_T* line, const Blend& blend, bool on,
                                           const Corner& corner, const float (&v)[NT][2]) {
#if WRITE == ATOMIC
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (on && corner.column_of(n, e) < N) atomicAdd(line + corner.column_of(n, e), v[n][e]);
#elif STORE > 2 * SIDE
    static_assert(STORE == 4 && SIDE == 1, "lanes trade pairs");
    // Lanes c and c ^ 1 trade halves of two groups of eight columns, so that each has four columns
    // side by side.
    const int odd = threadIdx.x & 1;
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        float got[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
            got[e] = __shfl_xor_sync(FULL_WARP, odd ? v[n][e] : v[n + 1][e], 1);
        float four[4] = {odd ? got[0] : v[n][0], odd ? got[1] : v[n][1], odd ? v[n + 1][0] : got[0],
                               odd ? v[n + 1][1] : got[1]};
        const int column = corner.column_of(n + odd, 0) - 2 * odd;
        if (!on || column >= N) continue;
        blend.into(column, four);
        store_pack<OUT_T, 4>(line + column, four);
    }
#else
#pragma unroll
    for (int n = 0; n < NT; n += SIDE)
#pragma unroll
        for (int first = 0; first < 2 * SIDE; first += STORE) {
            const int column = corner.column_of(n, 0) + first;
            float pack[STORE];
#pragma unroll
            for (int i = 0; i < STORE; ++i) pack[i] = v[n + (first + i) / 2][(first + i) % 2];
            if (!on || column >= N) continue;
            blend.into(column, pack);
            store_pack<OUT_T, STORE>(line + column, pack);
        }
#endif
}

__device__ __forceinline__ void store(const Epilogue& to, const Walk& at, const Corner& corner,
                                      const Accumulators& acc) {
    const float share = WRITE == BLEND && to.rest ? __ldg(to.share + at.segment) : 1.f;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = corner.row_of(m, half);
            const bool on = r < at.rows;
            const i64 row = !on ? 0 : to.out_index ? __ldg(to.out_index + at.row + r) : at.row + r;
            float v[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n)
                v[n][0] = acc[m][n][2 * half], v[n][1] = acc[m][n][2 * half + 1];
            const i64 first = row * COLUMNS + corner.block * N;
            const Blend blend = {(to.rest ? to.rest : to.out) + first, share,
                                 to.rest ? 1.f - share : 1.f};
            store_line(to.out + first, blend, on, corner, v);
        }
}
