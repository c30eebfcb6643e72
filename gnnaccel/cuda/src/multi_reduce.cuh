// What the kernels of several reduces in one pass share: how the reduces are numbered, and a row's
// edges and messages.
//
// SUM_AT .. MIN_AT say where a reduce stands among the REDUCES of the result, -1 that it is not
// asked for. The message of edge e is m(e) = w(e, h) x[other(e), h, :]; WEIGHT says whether w is 1,
// one number per edge or one per edge and head, at the edge's place. With ADDED_ROW it is
// m(e) = x[other(e), h, :] + w(e, h, :), of a row w of ROW_T for each edge. Messages are rounded to
// ROW_T before anything is made of them: backward then finds the same ones equal as forward did.
#pragma once
#include "merge.cuh"

#define NO_WEIGHT 0
#define EDGE_WEIGHT 1
#define HEAD_WEIGHT 2
#define ADDED_ROW 3
#define FACTOR (WEIGHT == EDGE_WEIGHT || WEIGHT == HEAD_WEIGHT)

#define TOTAL (SUM_AT >= 0 || MEAN_AT >= 0)
#define MOMENTS (VAR_AT >= 0 || STD_AT >= 0)
#define TOP (MAX_AT >= 0)
#define BOTTOM (MIN_AT >= 0)
#define LINEAR (TOTAL || MOMENTS)
// rows of partial results per chunk; rows of counts; rows of coefficients, and where the shares
// begin among those
#define PARTS ((TOTAL ? 1 : 0) + (MOMENTS ? 2 : 0) + (TOP ? 2 : 0) + (BOTTOM ? 2 : 0))
#define COUNTS ((TOP ? 1 : 0) + (BOTTOM ? 1 : 0))
#define SHARES ((LINEAR ? 1 : 0) + (MOMENTS ? 1 : 0))
#define TERMS (SHARES + COUNTS)
#define SMALLEST_VARIANCE 1e-5f

struct Graph {
    const OFF_T* indptr;
    const int* other;
    const OFF_T* place;
    const ROW_T* x;
    const float* weight;
};

// Up to 32 edges of those that end at `end`, `rest` in number. They are loaded edge-parallel and
// passed round by shuffles.
struct Turn {
    int edges, other;
    OFF_T place;
    float weight;

    __device__ __forceinline__ Turn(const Lanes& at, const Graph& g, OFF_T end, OFF_T rest) {
        edges = rest < 32 ? (int)rest : 32;
        const bool on = at.lane < edges;
        const OFF_T position = end - rest + at.lane;
        other = on ? g.other[position] : 0;
        place = WEIGHT != NO_WEIGHT && on ? g.place[position] : 0;
        weight = WEIGHT == EDGE_WEIGHT && on ? g.weight[place] : 0.f;
    }
    // All lanes must ask.
    __device__ __forceinline__ u64 row(int e) const { return (u64)__shfl_sync(FULL_WARP, other,
                                                                              e & 31); }
    __device__ __forceinline__ u64 line(int e) const { return (u64)__shfl_sync(FULL_WARP, place,
                                                                               e & 31); }
    __device__ __forceinline__ void weights(const Lanes& at, const Graph& g, int e, bool on,
                                            float (&w)[KH]) const {
        const float one = WEIGHT == EDGE_WEIGHT ? __shfl_sync(FULL_WARP, weight, e & 31) : 1.f;
        const u64 from = WEIGHT == HEAD_WEIGHT ? line(e) : 0;
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            w[kh] = WEIGHT != HEAD_WEIGHT ? one : on
                && at.head(kh) < H ? g.weight[from * H + at.head(kh)] : 0.f;
    }
};

__device__ __forceinline__ float message(float x, float w) {
    return FACTOR ? to_float(from_float<ROW_T>(__fmul_rn(x, w))) : x;
}

// The lane's share of what edge `line` adds to a row; nothing where no edge adds any.
__device__ __forceinline__ void load_added(const Lanes& at, const Graph& g, u64 line, bool on,
                                           Row& r) {
    if (WEIGHT == ADDED_ROW) load_row(at, (const ROW_T*)g.weight, line, on, r);
}

__device__ __forceinline__ void add_rounded(Row& a, const Row& b) {
    if (WEIGHT != ADDED_ROW) return;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int c = 0; c < VEC; ++c)
            a[k][c] = to_float(from_float<ROW_T>(__fadd_rn(a[k][c], b[k][c])));
}
