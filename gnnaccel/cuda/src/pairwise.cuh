// Scores that need the rows of both ends of an edge, chosen by SCORE:
//
//   0 GATV2   s = <att, leaky_relu(k + q)>                        values are the keys
//   1 DOT     s = scale <q, k>                                    values of their own
//   2 COSINE  s = <q, k> c_src        (c_src = 1 / |k|, AGNN)     values are the keys
//   3 MX      s = leaky_relu((c_src + c_dst) sigmoid(<q, k>))     values are the keys (SuperGAT)
//   4 SD      s = leaky_relu(scale <q, k>)                        values are the keys (SuperGAT)
//
// With VECTORS (GATV2) there are several attention vectors, att [vectors, H, D], and each row has
// one, the same at both ends of an edge: in place of the node terms stands its number, int32.
//
// k: rows of sources, q: rows of destinations. With EDGE an edge row e adds to k (and to the value
// under DOT). Every kind is symmetric in k and q, so one backward kernel serves both directions.
#pragma once
#include "merge.cuh"

#define GATV2 0
#define DOT 1
#define COSINE 2
#define MX 3
#define SD 4
#define OWN_VALUES (SCORE == DOT)

#ifndef VECTORS
#define VECTORS 0
#endif
static_assert(!VECTORS || SCORE == GATV2, "no other score has attention vectors");
#define VECTOR(of, row) ((u64)((const int*)(of))[row])

// With BESIDE a source's key and value lie side by side, so do their gradients: key i is row 2 i,
// and value i behind it.
#define SOURCE_ROW(i) ((u64)(i) * (1 + BESIDE))

// Whether the loads of a step are put together, as measured on an H200 (docs/notes/attention.md):
// they are where none stands under a condition and the compiler is told how many blocks a
// multiprocessor is to hold, few enough for what a step needs of registers.
#ifdef BY_SRC
#define TOGETHER (BY_SRC ? !OWN_VALUES || PACKS * VEC <= 8 : SCORE != GATV2 || KH > 1)
#else
#define TOGETHER (KH > 1 || (OWN_VALUES && LH < 16))
#endif
#ifndef LEAST_BLOCKS
#define LEAST_BLOCKS (!TOGETHER ? 0 : PACKS * VEC > 8 ? 2 : PACKS * VEC > 4 ? 4 : 8)
#endif

template <typename T> __device__ __forceinline__ void gather_row(const Lanes& at, const T* base,
                                                                 u64 row, bool on, Row& r) {
    if (TOGETHER) load_row_or_nothing(at, base, row, on, r);
    else load_row(at, base, row, on, r);
}

struct Constants {
    float scale, slope;
};

__device__ __forceinline__ float leaky_grad(float x, float slope) { return x > 0.f ? 1.f : slope; }

// The lane's part of the inner product for head kh.
__device__ __forceinline__ float partial_score(const Row& k, const Row& q, const Row& att, int kh,
                                               const Constants& c) {
    if (SCORE != GATV2) return partial_dot(k, q, kh);
    Chains s;
#pragma unroll
    for (int i = 0; i < KV; ++i)
#pragma unroll
        for (int x = 0; x < VEC; ++x)
            s.add(i * VEC + x, att[kh * KV + i][x],
                  leaky(k[kh * KV + i][x] + q[kh * KV + i][x], c.slope));
    return s.sum();
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2f(-x * LOG2E)); }

// From the inner product to the score; c_src and c_dst are the per-node terms of COSINE and MX.
__device__ __forceinline__ float score(float dot, float c_src, float c_dst, const Constants& c) {
    if (SCORE == GATV2) return dot;
    if (SCORE == DOT) return dot * c.scale;
    if (SCORE == COSINE) return dot * c_src;
    if (SCORE == MX) return leaky((c_src + c_dst) * sigmoid(dot), c.slope);
    return leaky(dot * c.scale, c.slope);
}

// Gradients of the score: of the inner product, and of the node terms (equal for both ends under
// MX).
__device__ __forceinline__ void score_grad(float ds, float dot, float c_src, float c_dst,
                                           const Constants& c, float& d_dot, float& d_node) {
    d_node = 0.f;
    d_dot = ds;
    if (SCORE == DOT) d_dot = ds * c.scale;
    if (SCORE == COSINE) {
        d_dot = ds * c_src;
        d_node = ds * dot;
    }
    if (SCORE == MX) {
        const float g = sigmoid(dot), u = c_src + c_dst;
        const float dy = ds * leaky_grad(u * g, c.slope);
        d_node = dy * g;
        d_dot = dy * u * g * (1.f - g);
    }
    if (SCORE == SD) d_dot = ds * c.scale * leaky_grad(dot * c.scale, c.slope);
}

__device__ __forceinline__ float node_term(const float* c, u64 row, int head, bool on) {
    return on && is_head(head) ? c[row * H + head] : 0.f;
}
