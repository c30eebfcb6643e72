// The product of two matrices in shared memory, each warp computing its part of the block's tile:
// WM x WN, or in functions that take the accumulators' size from those that they are given, 16 Mt x
// 8 Nt.
//
// Accumulators lie as in mma.cuh, whichever way the sums are made, so what comes before and after
// is the same for all. PRECISION says how:
//   FMA    fp32 multiply-adds; also where there are no tensor cores
//   FP32   three tf32 products per product: x = big + small with both in tf32, and small * small is
//   left out.
//   TF32   one product of the values rounded to tf32
//   HALF   f16 or bf16, products exact
// Tensor cores round towards zero when they accumulate, which would add up to a bias over thousands
// of rows; so each step (of 8 or 16; two of them but for FP32) starts from zero, and an ordinary
// addition brings its result to the accumulator.
#pragma once
#include "mma.cuh"

#define FMA 0
#define FP32 1
#define TF32 2
#define HALF 3

#define MT (WM / 16)
#define NT (WN / 8)
#define PER_WORD (4 / (int)sizeof(ROW_T))
#define K_STEP (8 * PER_WORD)

static_assert(WM % 16 == 0 && WN % 8 == 0, "a warp's tile is a multiple of 16 x 8");

typedef float Accumulators[MT][NT][4];

// How many groups of eight columns share theirs out in turn, so that a lane has 2 * SIDE columns
// side by side.
#ifndef SIDE
#define SIDE 1
#endif
static_assert(NT % SIDE == 0, "whole turns");

// The column, of a warp's, that stands at place 2 * pair + e of group n.
__device__ __forceinline__ int column_at(int n, int pair, int e) {
    return n / SIDE * 8 * SIDE + pair * 2 * SIDE + n % SIDE * 2 + e;
}

template <int Mt, int Nt> __device__ __forceinline__ void clear(float (&acc)[Mt][Nt][4]) {
#pragma unroll
    for (int m = 0; m < Mt; ++m)
#pragma unroll
        for (int n = 0; n < Nt; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

// A fragment register: one float, or two halves.
__device__ __forceinline__ u32 joined(float x, float) { return __float_as_uint(x); }
template <typename Half> __device__ __forceinline__ u32 joined(Half x, Half y) { return x.bits | (u32)y.bits << 16; }

// A matrix in shared memory; o is a row of the left operand or a column of the right one. KFirst: k
// is contiguous.
template <bool KFirst, int Stride> struct Operand {
    const ROW_T* p;

    __device__ __forceinline__ float at(int o,
                                        int k) const { return to_float(p[KFirst ? o * Stride + k
                                                                         : k * Stride + o]); }
    // Elements k .. k + PER_WORD - 1.
    __device__ __forceinline__ u32 word(int o, int k) const {
        if constexpr (KFirst) {
            return *(const u32*)(p + o * Stride + k);
        } else {
            const ROW_T* q = p + k * Stride + o;
            return joined(q[0], q[PER_WORD == 1 ? 0 : Stride]);
        }
    }
};

// An operand whose line k is multiplied by factor[k], if there is any; half products are rounded to
// half again.
template <typename Inner> struct Scaled {
    Inner inner;
    const float* factor;

    __device__ __forceinline__ float at(int o,
                                        int k) const { return inner.at(o, k)
                                                       * (factor ? factor[k] : 1.f); }
    __device__ __forceinline__ u32 word(int o, int k) const {
        if (!factor) return inner.word(o, k);
        const ROW_T x = from_float<ROW_T>(at(o, k));
        return joined(x, PER_WORD == 1 ? x : from_float<ROW_T>(at(o, k + 1)));
    }
};

// acc += A[:, k .. k + Count) B[k .. k + Count, :] by fp32 multiply-adds.
template <int Count, typename Left, typename Right, int Mt, int Nt>
__device__ __forceinline__ void fma_step(const Left& a, const Right& b, int row, int column, int k,
                                         float (&acc)[Mt][Nt][4]) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
    // a single step is the exception beside the tensor cores' work: short code
    constexpr int Unroll = Count > K_STEP ? 4 : 1;
#pragma unroll Unroll
    for (int i = k; i < k + Count; ++i) {
        float x[Mt][2];
#pragma unroll
        for (int m = 0; m < Mt; ++m)
            x[m][0] = a.at(row + 16 * m + g, i), x[m][1] = a.at(row + 16 * m + g + 8, i);
#pragma unroll
        for (int n = 0; n < Nt; ++n) {
            const float y[2] = {b.at(column + 8 * n + 2 * c, i),
                                b.at(column + 8 * n + 2 * c + 1, i)};
#pragma unroll
            for (int m = 0; m < Mt; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    acc[m][n][e] = fmaf(x[m][e >> 1], y[e & 1], acc[m][n][e]);
        }
    }
}

#if TENSOR_CORES && PRECISION != FMA

template <typename Left, int Mt>
__device__ __forceinline__ void load_left(const Left& a, int row, int k, u32 (&x)[Mt][4]) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int m = 0; m < Mt; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            x[m][r] = a.word(row + 16 * m + g + 8 * (r & 1), k + PER_WORD * (c + 4 * (r >> 1)));
}

template <typename Right, int Nt>
__device__ __forceinline__ void load_right(const Right& b, int column, int k, u32 (&y)[Nt][2]) {
    const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < Nt; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            y[n][r] = b.word(column + 8 * n + g, k + PER_WORD * (c + 4 * r));
}

#if PRECISION == HALF

// Halves of which k is not contiguous: the hardware turns 8 x 8 of them at a time, where `word`
// would read them one by one. Lane 8 q + i names line i of matrix q.
template <int Stride, int Mt>
__device__ __forceinline__ void load_left(const Operand<false, Stride>& a, int row, int k,
                                          u32 (&x)[Mt][4]) {
    const int i = threadIdx.x & 7, q = (threadIdx.x & 31) >> 3;
#pragma unroll
    for (int m = 0; m < Mt; ++m)
        load_turned(a.p + (k + 8 * (q >> 1) + i) * Stride + row + 16 * m + 8 * (q & 1), x[m]);
}

template <int Stride, int Nt>
__device__ __forceinline__ void load_right(const Operand<false, Stride>& b, int column, int k,
                                           u32 (&y)[Nt][2]) {
    const int i = threadIdx.x & 7, q = (threadIdx.x & 31) >> 3;
#pragma unroll
    for (int n = 0; n + 1 < Nt; n += 2) {
        u32 four[4];
        load_turned(b.p + (k + 8 * (q & 1) + i) * Stride + column + 8 * (n + (q >> 1)), four);
        y[n][0] = four[0], y[n][1] = four[1], y[n + 1][0] = four[2], y[n + 1][1] = four[3];
    }
    if constexpr (Nt % 2)
        load_turned(b.p + (k + 8 * (q & 1) + i) * Stride + column + 8 * (Nt - 1), y[Nt - 1]);
}

__device__ __forceinline__ ROW_T scaled_half(u32 bits, float factor) {
    const ROW_T x = {(u16)bits};
    return from_float<ROW_T>(to_float(x) * factor);
}

template <int Stride, int Nt>
__device__ __forceinline__ void load_right(const Scaled<Operand<false, Stride>>& b, int column,
                                           int k, u32 (&y)[Nt][2]) {
    load_right(b.inner, column, k, y);
    if (!b.factor) return;
    const int c = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float* f = b.factor + k + PER_WORD * (c + 4 * r);
#pragma unroll
        for (int n = 0; n < Nt; ++n)
            y[n][r] = joined(scaled_half(y[n][r], f[0]), scaled_half(y[n][r] >> 16, f[1]));
    }
}

#endif

// Whether x = big + small can be done: inf - inf is not 0, and 0 * inf and inf - inf among the
// three products would not be what fp32 gives. The bound is what rounds to infinity in tf32.
__device__ __forceinline__ bool splits(u32 word) { return fabsf(__uint_as_float(word)) < __uint_as_float(0x7f7ff000u); }

template <int Mt,
    int Nt> __device__ __forceinline__ bool all_split(const u32 (&x)[Mt][4],
                                                      const u32 (&y)[Nt][2]) {
    bool yes = true;
#pragma unroll
    for (int m = 0; m < Mt; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) yes = yes && splits(x[m][r]);
#pragma unroll
    for (int n = 0; n < Nt; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) yes = yes && splits(y[n][r]);
    return __all_sync(FULL_WARP, yes);
}

template <int Count>
__device__ __forceinline__ void split(const u32 (&word)[Count], u32 (&big)[Count],
                                      u32 (&small)[Count]) {
#pragma unroll
    for (int r = 0; r < Count; ++r) split_in_two(__uint_as_float(word[r]), big[r], small[r]);
}

template <int Mt, int Nt>
__device__ __forceinline__ void three_products(const u32 (&x)[Mt][4], const u32 (&y)[Nt][2],
                                               float (&acc)[Mt][Nt][4]) {
    u32 x_big[Mt][4], x_small[Mt][4];
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < Mt; ++m) split(x[m], x_big[m], x_small[m]);
#pragma unroll
    for (int n = 0; n < Nt; ++n) {
        u32 y_big[2], y_small[2];
        split(y[n], y_big, y_small);
#pragma unroll
        for (int m = 0; m < Mt; ++m) {
            float sum[4];
            Mma<float>::multiply(sum, x_small[m], y_big, zero);
            Mma<float>::multiply(sum, x_big[m], y_small, sum);
            Mma<float>::multiply(sum, x_big[m], y_big, sum);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] += sum[e];
        }
    }
}

// Steps of them, whose sum joins the accumulators at once.
template <int Steps, int Mt, int Nt>
__device__ __forceinline__ void products(u32 (&x)[Steps][Mt][4], u32 (&y)[Steps][Nt][2],
                                         float (&acc)[Mt][Nt][4]) {
#if PRECISION == TF32
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
#pragma unroll
        for (int m = 0; m < Mt; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) x[s][m][r] = tf32_from_float(__uint_as_float(x[s][m][r]));
#pragma unroll
        for (int n = 0; n < Nt; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) y[s][n][r] = tf32_from_float(__uint_as_float(y[s][n][r]));
    }
#endif
#pragma unroll
    for (int n = 0; n < Nt; ++n)
#pragma unroll
        for (int m = 0; m < Mt; ++m) {
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int s = 0; s < Steps; ++s) Mma<ROW_T>::multiply(sum, x[s][m], y[s][n], sum);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] += sum[e];
        }
}

#endif

// acc += A B over Depth values of k. row, column: the warp's corner of the tile.
template <int Depth, typename Left, typename Right, int Mt, int Nt>
__device__ __forceinline__ void multiply_tile(const Left& a, const Right& b, int row, int column,
                                              float (&acc)[Mt][Nt][4]) {
    static_assert(Depth % K_STEP == 0, "operands are padded with zeros to whole steps");
#if TENSOR_CORES && PRECISION == FP32
#pragma unroll 2
    for (int k = 0; k < Depth; k += K_STEP) {
        u32 x[Mt][4], y[Nt][2];
        load_left(a, row, k, x);
        load_right(b, column, k, y);
        if (!all_split(x, y)) {
            fma_step<K_STEP>(a, b, row, column, k, acc);
            continue;
        }
        three_products(x, y, acc);
    }
#elif TENSOR_CORES && PRECISION != FMA
    constexpr int Steps = Depth % (2 * K_STEP) ? 1 : 2;
#pragma unroll 2
    for (int k = 0; k < Depth; k += Steps * K_STEP) {
        u32 x[Steps][Mt][4], y[Steps][Nt][2];
#pragma unroll
        for (int s = 0; s < Steps; ++s) {
            load_left(a, row, k + s * K_STEP, x[s]);
            load_right(b, column, k + s * K_STEP, y[s]);
        }
        products(x, y, acc);
    }
#else
    fma_step<Depth>(a, b, row, column, 0, acc);
#endif
}
