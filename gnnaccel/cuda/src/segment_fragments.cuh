// A whole matrix W in shared memory as the fragments that tensor cores take, and the rows of X that fit them.
//
// The sum over k may run in any order if both operands keep to it. A CHUNK of k is what four lanes read of a row with one
// access of WORDS words each; lane c (of four) has words c * WORDS to c * WORDS + WORDS - 1 of it, and step j of the chunk
// takes words 2 j and 2 j + 1 of each. W's fragments are stored for that order, ready made (split or rounded), and each lane
// finds its own side by side: one access of 16 bytes a lane, without conflicts.
#pragma once
#include "segment_tile.cuh"

#define ROW_BYTES (K * (int)sizeof(ROW_T))
#define WORDS (ROW_BYTES % 64 == 0 ? 4 : 2)
#define STEPS (WORDS / 2)
#define CHUNK (4 * WORDS * PER_WORD)
#define CHUNKS (K / CHUNK)
#define PARTS (PRECISION == FP32 ? 2 : 1)  // words that one of W becomes
#define CHUNK_WORDS (NT * 32 * WORDS * PARTS)

static_assert(K % CHUNK == 0 && N == WN, "whole chunks, and all columns");

// Words one after another, by accesses of at most Bytes bytes.
template <int Bytes> __device__ __forceinline__ void read_words(const ROW_T* from, u32 (&words)[WORDS]) {
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
__device__ __forceinline__ void read_column(const ROW_T* w, int first, int column, u32 (&words)[WORDS]) {
    if constexpr (TRANSPOSED) {
        read_words<LOAD_W>(w + column * K + first, words);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const ROW_T* p = w + (first + i * PER_WORD) * N + column;
            words[i] = joined(p[0], p[PER_WORD == 1 ? 0 : N]);
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
        for (int i = 0; i < WORDS; ++i) word[i] = PRECISION == TF32 ? tf32_from_float(__uint_as_float(from[i])) : from[i];
#endif
        return odd;
    }
};

// Writes all of W. Whether some value could not be split.
__device__ __forceinline__ bool write_fragments(const ROW_T* w, u32* to) {
    constexpr int QUADS = WORDS * PARTS / 4;
    float odd = 0.f;
#pragma unroll 4
    for (int i = threadIdx.x; i < CHUNKS * NT * 32; i += THREADS) {
        const int lane = i & 31, n = i / 32 % NT, chunk = i / 32 / NT;
        u32 words[WORDS];
        read_column(w, chunk * CHUNK + (lane & 3) * WORDS * PER_WORD, column_at(n, lane >> 3, lane >> 2 & 1), words);
        Fragment f;
        odd += f.make(words);
        if constexpr (QUADS == 0) {
            *(uint2*)(to + 2 * i) = make_uint2(f.word[0], f.word[1]);
        } else {
#pragma unroll
            for (int q = 0; q < QUADS; ++q)  // a quad of each step lies with those of all lanes
                *(uint4*)(to + chunk * CHUNK_WORDS + ((q * NT + n) * 32 + lane) * 4) =
                    make_uint4(f.word[4 * q], f.word[4 * q + 1], f.word[4 * q + 2], f.word[4 * q + 3]);
        }
    }
    return odd != 0.f;
}

// Quad q of group n of a chunk: {big, big, small, small} of step q, or the words of two steps.
__device__ __forceinline__ void read_quad(const u32* chunk, int q, int n, u32 (&words)[4]) {
    const int lane = threadIdx.x & 31;
    if (WORDS * PARTS == 2) {
        const uint2 v = *(const uint2*)(chunk + (n * 32 + lane) * 2);
        words[0] = v.x, words[1] = v.y, words[2] = words[3] = 0u;
    } else {
        const uint4 v = *(const uint4*)(chunk + ((q * NT + n) * 32 + lane) * 4);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}

#endif
