// A whole matrix W in shared memory as the fragments that tensor cores take, rows of X that fit
// them, and their product. W is [K, N], or a matrix of Depth x Columns where a function says so.
//
// A warp's WM rows times the WN columns of W that begin with the group of eight columns `first`, a
// multiple of SIDE. The sum over k may run in any order if both operands keep to it. A CHUNK of k
// is what four lanes read of a row with one access of WORDS words each; lane c (of four) has words
// c * WORDS to c * WORDS + WORDS - 1 of it, and step j of the chunk takes words 2 j and 2 j + 1 of
// each. W's fragments are stored for that order, ready made (split or rounded), and each lane finds
// its own side by side: one access of 16 bytes a lane, without conflicts.
#pragma once
#include "segment_tile.cuh"

#define ROW_BYTES (K * (int)sizeof(ROW_T))
#define WORDS (ROW_BYTES % 64 == 0 ? 4 : 2)
#define STEPS (WORDS / 2)
#define CHUNK (4 * WORDS * PER_WORD)
#define CHUNKS (K / CHUNK)
#define PARTS (PRECISION == FP32 ? 2 : 1)  // words that one of W becomes
#define CHUNK_WORDS_OF(columns) ((columns) / 8 * 32 * WORDS * PARTS)
#define CHUNK_WORDS CHUNK_WORDS_OF(N)
#define TOGETHER (NT % GROUP == 0 ? GROUP : 1)  // groups of columns whose chains of products run side by side

static_assert(K % CHUNK == 0 && N % WN == 0 && N / 8 % SIDE == 0,
              "whole chunks and strips of columns");

typedef u32 Slot[MT][2][WORDS];  // a chunk of rows g and g + 8 of each 16

// Words one after another, by accesses of at most Bytes bytes.
template <int Bytes> __device__ __forceinline__ void read_words(const ROW_T* from,
                                                                u32 (&words)[WORDS]) {
    constexpr int SIZE = Bytes < 4 * WORDS ? Bytes : 4 * WORDS;
    typedef typename Word<SIZE>::type Part;
    union {
        u32 word[WORDS];
        Part part[4 * WORDS / SIZE];
    } u;
#pragma unroll
    for (int i = 0; i < 4 * WORDS / SIZE; ++i) u.part[i] = __ldg((const Part*)from + i);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = u.word[i];
}

// Words of k from `first` on, of one column of W.
template <int Depth, int Columns>
__device__ __forceinline__ void read_column(const ROW_T* w, int first, int column,
                                            u32 (&words)[WORDS]) {
    if constexpr (TRANSPOSED) {
        read_words<LOAD_W>(w + column * Depth + first, words);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const ROW_T* p = w + (first + i * PER_WORD) * Columns + column;
            words[i] = joined(p[0], p[PER_WORD == 1 ? 0 : Columns]);
        }
    }
}

// acc = the rows whose elements left(m, half, k) gives, times W, by fp32 multiply-adds: for values
// that cannot be split.
template <typename Left>
__device__ __forceinline__ void plain_product(const Left& left, const ROW_T* w, int first,
                                              Accumulators& acc) {
    clear(acc);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        float x[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) x[m][half] = left(m, half, k);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * first + column_at(n, threadIdx.x & 3, e);
                const float y = to_float(w[TRANSPOSED ? column * K + k : k * N + column]);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        acc[m][n][2 * half + e] = fmaf(x[m][half], y, acc[m][n][2 * half + e]);
            }
    }
}

#if TENSOR_CORES && PRECISION != FMA

// What a lane needs of one chunk and group of columns, as it lies in shared memory.
struct Fragment {
    u32 word[WORDS * PARTS];

    // NaN where fp32 cannot be split, else 0.
    __device__ __forceinline__ float make(const u32 (&from)[WORDS]) {
        float odd = 0.f;
#if PRECISION == FP32
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            u32* to = word + i / 2 * 4 + i % 2;
            odd = fmaf(split_in_two(__uint_as_float(from[i]), to[0], to[2]), 0.f, odd);
        }
#else
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] = PRECISION == TF32 ? tf32_from_float(__uint_as_float(from[i])) : from[i];
#endif
        return odd;
    }
};

// Writes all of W. Whether some value could not be split.
template <int Depth, int Columns>
__device__ __forceinline__ bool write_fragments(const ROW_T* w, u32* to) {
    constexpr int QUADS = WORDS * PARTS / 4, GROUPS = Columns / 8;
    float odd = 0.f;
#pragma unroll 4
    for (int i = threadIdx.x; i < Depth / CHUNK * GROUPS * 32; i += THREADS) {
        const int lane = i & 31, n = i / 32 % GROUPS, chunk = i / 32 / GROUPS;
        u32 words[WORDS];
        read_column<Depth, Columns>(w, chunk * CHUNK + (lane & 3) * WORDS
                                    * PER_WORD, column_at(n, lane >> 3, lane >> 2 & 1), words);
        Fragment f;
        odd += f.make(words);
        if constexpr (QUADS == 0) {
            *(uint2*)(to + 2 * i) = make_uint2(f.word[0], f.word[1]);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; ++q)  // a quad of each step lies with those of all lanes
                *(uint4*)(to + chunk * CHUNK_WORDS_OF(Columns)
                          + ((q * GROUPS + n) * 32 + lane) * 4) =
                    make_uint4(f.word[4 * q], f.word[4 * q + 1], f.word[4 * q + 2],
                               f.word[4 * q + 3]);
        }
    }
    return odd != 0.f;
}

// Quad q of group n of a chunk: {big, big, small, small} of step q, or the words of two steps.
template <int Columns>
__device__ __forceinline__ void read_quad(const u32* chunk, int q, int n, u32 (&words)[4]) {
    const int lane = threadIdx.x & 31;
    if (WORDS * PARTS == 2) {
        const uint2 v = *(const uint2*)(chunk + (n * 32 + lane) * 2);
        words[0] = v.x, words[1] = v.y, words[2] = words[3] = 0u;
    } else {
        const uint4 v = *(const uint4*)(chunk + ((q * (Columns / 8) + n) * 32 + lane) * 4);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}

// Words 2 step and 2 step + 1 of a slot as the left operand.
__device__ __forceinline__ void left_words(const Slot& slot, int step, u32 (&x)[MT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) x[m][r] = slot[m][r & 1][2 * step + (r >> 1)];
}

#if PRECISION == FP32

// TOGETHER groups of columns from n on: three products each, starting from zero.
template <int Columns, int Nt>
__device__ __forceinline__ void add_products(const u32 (&big)[MT][4], const u32 (&small)[MT][4],
                                             const u32* chunk, int step, int first, int n,
                                             float (&acc)[MT][Nt][4]) {
    static_assert(Nt % TOGETHER == 0, "whole groups");
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    u32 y_big[TOGETHER][2], y_small[TOGETHER][2];
    float sum[TOGETHER][MT][4];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        u32 quad[4];
        read_quad<Columns>(chunk, step, first + n + i, quad);
        y_big[i][0] = quad[0], y_big[i][1] = quad[1], y_small[i][0] = quad[2],
            y_small[i][1] = quad[3];
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

// A chunk of the product; the slot is loaded again as soon as its values are split. odd becomes NaN
// where one cannot be.
template <int Columns = N, int Nt, typename Load>
__device__ __forceinline__ void multiply_chunk(Slot& slot, const u32* chunk, int first,
                                               float (&acc)[MT][Nt][4], float& odd,
                                               const Load& load) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 x[MT][4], big[MT][4], small[MT][4];
        left_words(slot, step, x);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                odd = fmaf(split_in_two(__uint_as_float(x[m][r]), big[m][r], small[m][r]), 0.f,
                           odd);
        if (step == STEPS - 1) load();
#pragma unroll
        for (int n = 0; n < Nt; n += TOGETHER)
            add_products<Columns>(big, small, chunk, step, first, n, acc);
    }
}

#else

// The sums are short, so they may stay in the accumulators.
template <int Columns = N, int Nt, typename Load>
__device__ __forceinline__ void multiply_chunk(Slot& slot, const u32* chunk, int first,
                                               float (&acc)[MT][Nt][4], float&, const Load& load) {
    u32 x[STEPS][MT][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        left_words(slot, step, x[step]);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int r = 0; r < 4 && PRECISION == TF32; ++r)
                x[step][m][r] = tf32_from_float(__uint_as_float(x[step][m][r]));
    }
    load();
#pragma unroll
    for (int n = 0; n < Nt; ++n) {
        u32 quad[4];
        read_quad<Columns>(chunk, 0, first + n, quad);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 y[2] = {quad[2 * step], quad[2 * step + 1]};
#pragma unroll
            for (int m = 0; m < MT; ++m) Mma<ROW_T>::multiply(acc[m][n], x[step][m], y, acc[m][n]);
        }
    }
}

#endif

#endif

// The block's copy of W.
struct Matrix {
    const ROW_T* w;
    i64 segment;
    u32* fragments;
    int* odd;  // the last segment with values that cannot be split

    __device__ __forceinline__ const ROW_T* of(int which) const { return w + which * segment; }
#if TENSOR_CORES && PRECISION != FMA
    __device__ __forceinline__ void change(int to) const {
        __syncthreads();  // nobody reads the one before any more
        if (write_fragments<K, N>(of(to), fragments)) *odd = to;
        __syncthreads();
    }
#endif
};
