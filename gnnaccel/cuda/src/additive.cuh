// What the forward and backward kernels of additive attention (GAT) share: a warp's tile of 32
// edges, treated twice.
//
// Phase 1, edge-parallel: each lane scores (edge, head) pairs and leaves the weights in shared
// memory. Phase 2, feature-parallel: the lanes lie along the feature row and fold the neighbours'
// rows with those weights. This change of mapping is the idea of DF-GNN's SMMF: no lane computes an
// exponential twice, every row is read with wide loads.
//
// A weight carries the sign of its pre-activation z = a_src + a_dst (+ a_edge): weights are never
// negative themselves, and training needs the sums over z > 0 ("plus") and over the rest ("minus")
// apart. -0.0f keeps the sign of a weight that dropout or underflow made zero.
#pragma once
#include "gathered.cuh"

__device__ __forceinline__ bool negative(float w) { return __float_as_int(w) < 0; }

// The weights by which an edge's row joins two sums: forward's, apart by the sign. Without TWO the
// first sum takes all.
template <bool TWO> struct BySign {
    const float* weight;

    // NaN joins the first
    __device__ __forceinline__ void load(int s, bool on, float& first, float& second) const {
        const float w = on ? weight[s] : 0.f;
        first = !TWO ? fabsf(w) : w > 0.f ? 0.f : -w;
        second = w > 0.f ? w : 0.f;
    }
};

// Phase 2, over the first n edges of the tile; `j` holds, in lane e, the row of edge e. TWO keeps
// two sums, with weights of their own; otherwise `minus` takes the whole sum. STEPS adds up the
// UNROLL rows of a step before they join it: one addition more for each step, and chains of
// roundings so much shorter.
template <typename T, bool TWO, bool STEPS, typename Weights>
__device__ __forceinline__ void gather_tile(const Lanes& at, int j, int n, const Weights& weights,
                                            const T* rows, Row& minus, Row& plus) {
    each_step<(KH > 1)>(n, [&](auto kind, int first) {
        constexpr bool whole = decltype(kind)::whole;
        Loaded<T> v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int e = first + u * SLOTS + at.slot;
            const int i = __shfl_sync(FULL_WARP, j, e & 31);
            v[u].load(at, rows, (u32)i, whole || e < n);
        }
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float below[VEC], above[VEC];
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                below[x] = STEPS ? 0.f : minus[k][x];
                above[x] = STEPS || !TWO ? 0.f : plus[k][x];
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int e = first + u * SLOTS + at.slot;
                const int s = e * HT + (k / KV) * HL + at.hl;
                float down = 0.f, up = 0.f, some[VEC];
                // with several heads a branch is faster, measured with 4x64: forward 712 -> 671 us
                const bool on = whole || e < n;
                if (KH == 1 || on) weights.load(s, on, down, up);
                v[u].pack(k, some);
#pragma unroll
                for (int x = 0; x < VEC; ++x) {
                    below[x] = fmaf(down, some[x], below[x]);
                    if (TWO) above[x] = fmaf(up, some[x], above[x]);
                }
            }
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                minus[k][x] = STEPS ? minus[k][x] + below[x] : below[x];
                if (TWO) plus[k][x] = STEPS ? plus[k][x] + above[x] : above[x];
            }
        }
    });
}

// The forward's scores.
struct Scores {
    const float *a_src, *a_dst, *a_edge;
    const OFF_T* eid;
    float slope;

    // Score of the tile's edge e (source row src) for `head`.
    __device__ __forceinline__ float at(OFF_T edge, int src, int head, float dst_term) const {
        float z = a_src[(u64)src * H + head] + dst_term;
#if EDGE
        z += a_edge[(u64)eid[edge] * H + head];
#endif
        return leaky(z, slope);
    }
    __device__ __forceinline__ float dst(int row, int head) const {
        return a_dst && head < H ? a_dst[(u64)row * H + head] : 0.f;
    }
};

struct Out {
    OUT_T* out;
    const float* bias;  // [H*D] or null
    float *small, *plus, *minus;
    int rows;
};

// Leaves the softmax of (row, head) for backward in small [4, rows, H]: what its scores were taken
// relative to, the reciprocal of its sum, and the shares of the edges with z > 0 and of the others.
__device__ __forceinline__ void save_softmax(float* small, int rows, int row, int head,
                                             const Softmax& run, float inverse) {
    const u64 all = (u64)rows * H;
    float* s = small + (u64)row * H + head;
    s[0] = reference(run.m);
    s[all] = inverse;
    s[2 * all] = run.plus * inverse;
    s[3 * all] = run.minus * inverse;
}

// The output row, and under TRAIN its two parts.
__device__ __forceinline__ void write_parts(const Lanes& at, int row, Row& minus, const Row& plus,
                                            const Out& o) {
    if (at.slot != 0) return;
    if (TRAIN) {
        store_row(at, o.minus, row, minus);
        store_row(at, o.plus, row, plus);
        add_row(minus, plus);
    }
    add_bias(at, o.bias, minus);
    store_row(at, o.out, row, minus);
}
