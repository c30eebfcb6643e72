// Additive attention, backward (GAT), with one gather of rows in all: each source folds the output gradients of its
// destinations. Everything else follows from sums over rows that are already there:
//
//   w_e   = alpha_e * dropout_e                        g_e = 1 where z_e > 0, else slope
//   P_j, M_j = sum_e w_e dO_i over the edges out of j with z_e > 0, and over the others     (phase 2, as in forward)
//   da_src_j = <v_j, P_j + slope M_j> - sum_e g_e alpha_e delta_i,       delta_i = <dO_i, O_i>
//   da_dst_i = (1 - slope) (<dO_i, plus_i> mass_minus_i - <dO_i, minus_i> mass_plus_i)
//   dv_j     = P_j + M_j (+ da_src_j att_src + da_dst_j att_dst, the way of the gradient through the scores)
//
// plus, minus and the masses were saved by forward. The line for da_dst uses that softmax gradients sum to zero over a
// destination; written with both masses it loses nothing when one edge takes nearly all of the softmax. Kernels: `prepare` (per
// destination), `sources` (per source, chunked), `merge` (split sources). head_dot.cu has the gradients of att_src, att_dst.
#include "additive_direct.cuh"

// packed [rows, 4, H]: a_dst, lse, delta, unused. One 16-byte piece per head when H is 1, three full sectors when it is 8.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
prepare(int rows, const OUT_T* __restrict__ grad, const float* __restrict__ plus, const float* __restrict__ minus,
        const float* __restrict__ mass, const float* __restrict__ lse, const float* __restrict__ a_dst, float slope,
        float* __restrict__ packed, float* __restrict__ d_a_dst) {
    const Lanes at;
    const long long row = warp_id() * SLOTS + at.slot;
    const bool on = row < rows;
    Row g, p, m;
    load_row(at, grad, (u64)row, on, g);
    load_row(at, plus, (u64)row, on, p);
    load_row(at, minus, (u64)row, on, m);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        float up = 0.f, down = 0.f;
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                up = fmaf(g[kh * KV + kv][v], p[kh * KV + kv][v], up);
                down = fmaf(g[kh * KV + kv][v], m[kh * KV + kv][v], down);
            }
        up = lane_sum<LH>(up);
        down = lane_sum<LH>(down);
        const int h = at.head(kh);
        if (on && at.lh == 0 && h < H) {
            const u64 i = (u64)row * H + h;
            float* q = packed + (u64)row * 4 * H + h;
            q[0] = a_dst ? a_dst[i] : 0.f;
            q[H] = lse[i];
            q[2 * H] = up + down;
            d_a_dst[i] = (1.f - slope) * (up * mass[i + (u64)rows * H] - down * mass[i]);
        }
    }
}

struct Finish {
    const ROW_T* values;
    const float *att_src, *att_dst, *d_a_dst;  // d_a_dst null: destinations are other nodes than sources
    float slope;
    ROW_T* d_values;
    float* d_a_src;
};

// `lost` is sum g alpha delta of the lane's phase-1 head; it crosses to phase 2's heads by shared memory.
__device__ __forceinline__ void finish(const Lanes& at, const Scratch& sh, int row, float lost, Row& minus, const Row& plus,
                                       const Finish& f) {
    if (at.lane < HT) sh.factor[at.lane] = lost;
    __syncwarp();
    Row v;
    load_row(at, f.values, (u64)row, true, v);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        float dot = 0.f;
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                const int k = kh * KV + kv;
                dot = fmaf(v[k][x], fmaf(f.slope, minus[k][x], plus[k][x]), dot);
            }
        const int h = at.head(kh);
        const float d_src = lane_sum<LH>(dot) - sh.factor[kh * HL + at.hl];
#pragma unroll
        for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x) minus[k][x] += plus[k][x];
        const float d_dst = f.d_a_dst && h < H ? f.d_a_dst[(u64)row * H + h] : 0.f;
        if (at.slot == 0 && at.lh == 0 && h < H) f.d_a_src[(u64)row * H + h] = d_src;
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
            if (at.owns(kh, kv)) {
#pragma unroll
                for (int x = 0; x < VEC; ++x) {
                    float& a = minus[kh * KV + kv][x];
                    const int c = at.offset(kh, kv) + x;
                    a = fmaf(d_src, f.att_src[c], a);
                    if (f.d_a_dst) a = fmaf(d_dst, f.att_dst[c], a);
                }
            }
    }
    if (at.slot == 0) store_row(at, f.d_values, row, minus);
}

struct Edges {
    const int* nbr;
    const OFF_T *position, *eid;
    const float *packed, *a_edge;
    float slope;
};

// Phase 1: signed weights; with EDGE_GRAD also extra = alpha * delta. Returns the tile's share of sum g alpha delta.
__device__ __forceinline__ float weight_tile(const Edges& g, const Dropout& drop, const Scratch& sh, OFF_T base, int n, int j,
                                             int head, bool on, float src_term) {
    const int lane = threadIdx.x & 31, h = lane % HT;
    float lost = 0.f;
#pragma unroll
    for (int it = 0; it < HT; ++it) {
        if (it * EDGES_PER_STEP < n) {
            const int e = it * EDGES_PER_STEP + lane / HT;
            const int i = __shfl_sync(FULL_WARP, j, e);
            float w = 0.f, alpha_delta = 0.f;
            bool up = false;
            if (e < n && on) {
                const float* q = g.packed + (u64)i * 4 * H + head;
                float z = src_term + q[0];
#if EDGE || DROPOUT
                const OFF_T p = g.position[base + e];
#else
                const OFF_T p = 0;
#endif
#if EDGE
                z += g.a_edge[(u64)g.eid[p] * H + head];
#endif
                up = z > 0.f;
                const float alpha = exp2f(scaled_leaky(z, g.slope) - q[H]);
                alpha_delta = alpha * q[2 * H];
                lost += (up ? 1.f : g.slope) * alpha_delta;
                w = alpha * drop.factor(p, head);
            }
            sh.weight[e * HT + h] = up ? w : -w;
#if EDGE_GRAD
            sh.extra[e * HT + h] = alpha_delta;
#endif
        }
    }
    __syncwarp();
    return lost;
}

#if DIRECT && !EDGE_GRAD
// Both phases in one where few lanes share a head: each lane makes the weights of its own heads. Returns sum g alpha delta of
// the lane's phase-1 head.
__device__ __forceinline__ float gather_direct(const Lanes& at, const Item& it, const Edges& g, const Dropout& drop,
                                               const Scratch& sh, const float* a_src, const OUT_T* grad, Row& minus, Row& plus) {
    float lost[KH], src_term[KH];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        lost[kh] = 0.f;
        src_term[kh] = at.head(kh) < H ? a_src[(u64)it.row * H + at.head(kh)] : 0.f;
    }
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? g.nbr[base + at.lane] : 0;
        for (int first = 0; first < n; first += SLOTS * UNROLL) {
            Row v[UNROLL];
            float dst[UNROLL][KH], lse[UNROLL][KH], delta[UNROLL][KH];
            OFF_T place[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int e = first + u * SLOTS + at.slot;
                const u64 i = (u64)__shfl_sync(FULL_WARP, j, e & 31);
                load_row(at, grad, i, e < n, v[u]);
                place[u] = (EDGE || DROPOUT) && e < n ? g.position[base + e] : 0;
#pragma unroll
                for (int kh = 0; kh < KH; ++kh) {
                    const bool mine = e < n && at.head(kh) < H;
                    const float* q = g.packed + i * 4 * H + at.head(kh);
                    dst[u][kh] = mine ? q[0] : 0.f;
                    lse[u][kh] = mine ? q[H] : infinity();  // weight zero
                    delta[u][kh] = mine ? q[2 * H] : 0.f;
#if EDGE
                    if (mine) dst[u][kh] += g.a_edge[(u64)g.eid[place[u]] * H + at.head(kh)];
#endif
                }
            }
#pragma unroll
            for (int kh = 0; kh < KH; ++kh) {
                float factor[UNROLL];
                draw<UNROLL>(at, drop, place, at.head(kh), factor);
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const float z = src_term[kh] + dst[u][kh];
                    const float alpha = exp2f(scaled_leaky(z, g.slope) - lse[u][kh]);
                    lost[kh] = fmaf((z > 0.f ? 1.f : g.slope) * alpha, delta[u][kh], lost[kh]);
                    add_signed<true>(kh, z > 0.f, alpha * factor[u], v[u], minus, plus);
                }
            }
        }
    }
    return to_phase_1(at, sh.weight, lost);
}
#endif

#if EDGE_GRAD
// d a_edge = g (w <dO, v> - alpha delta), one dot product per edge and head; only built when an edge term needs it.
__device__ __forceinline__ void edge_grad_tile(const Lanes& at, const Edges& g, const Scratch& sh, OFF_T base, int n, int j,
                                               const OUT_T* grad, const Row& v, float* d_a_edge) {
    for (int first = 0; first < n; first += SLOTS) {
        const int e = first + at.slot;
        const bool on = e < n;
        Row o;
        load_row(at, grad, (u64)__shfl_sync(FULL_WARP, j, e & 31), on, o);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            float dot = 0.f;
#pragma unroll
            for (int kv = 0; kv < KV; ++kv)
#pragma unroll
                for (int x = 0; x < VEC; ++x) dot = fmaf(o[kh * KV + kv][x], v[kh * KV + kv][x], dot);
            dot = lane_sum<LH>(dot);
            const int h = at.head(kh), s = e * HT + kh * HL + at.hl;
            if (on && at.lh == 0 && h < H) {
                const float w = sh.weight[s];
                const float d = fabsf(w) * dot - sh.extra[s];
                d_a_edge[(u64)g.eid[g.position[base + e]] * H + h] = negative(w) ? g.slope * d : d;
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
sources(const OFF_T* __restrict__ indptr, const int* __restrict__ nbr, const OFF_T* __restrict__ position,
        const OFF_T* __restrict__ eid, int rows, const int* __restrict__ counters, const int2* __restrict__ chunks,
        int chunk_edges, int chunk_slots, const float* __restrict__ packed, const float* __restrict__ a_src,
        const float* __restrict__ a_edge, float slope, float drop_p, float drop_scale, u64 seed, u64 offset,
        const OUT_T* __restrict__ grad, const ROW_T* __restrict__ values, const float* __restrict__ att_src,
        const float* __restrict__ att_dst, const float* __restrict__ d_a_dst, ROW_T* __restrict__ d_values,
        float* __restrict__ d_a_src, float* __restrict__ d_a_edge, float* __restrict__ part_minus,
        float* __restrict__ part_plus, float* __restrict__ part_lost) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Edges g = {nbr, position, eid, packed, a_edge, slope};
    const Dropout drop = {drop_p, drop_scale, seed, offset};
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const float src_term = on ? a_src[(u64)it.row * H + head] : 0.f;
    float lost = 0.f;
    Row minus, plus;
    clear_row(minus);
    clear_row(plus);
#if EDGE_GRAD
    Row v;
    load_row(at, values, (u64)it.row, true, v);
#endif
#if DIRECT && !EDGE_GRAD
    lost = gather_direct(at, it, g, drop, sh, a_src, grad, minus, plus);
#else
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? nbr[base + at.lane] : 0;
        lost += weight_tile(g, drop, sh, base, n, j, head, on, src_term);
        gather_tile<OUT_T, true>(at, j, n, sh.weight, grad, minus, plus);
#if EDGE_GRAD
        edge_grad_tile(at, g, sh, base, n, j, grad, v, d_a_edge);
#endif
        __syncwarp();
    }
    lost = sum_same_head(lost);
#endif
    sum_slots(minus);
    sum_slots(plus);
    if (it.chunk >= 0) {
        if (at.slot == 0) {
            store_row(at, part_minus, it.chunk, minus);
            store_row(at, part_plus, it.chunk, plus);
        }
        if (at.lane < HT && on) part_lost[(u64)it.chunk * H + head] = lost;
    } else {
        const Finish f = {values, att_src, att_dst, d_a_dst, slope, d_values, d_a_src};
        finish(at, sh, it.row, lost, minus, plus, f);
    }
}

// One warp per split source.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, float slope, const ROW_T* __restrict__ values,
      const float* __restrict__ att_src, const float* __restrict__ att_dst, const float* __restrict__ d_a_dst,
      ROW_T* __restrict__ d_values, float* __restrict__ d_a_src, const float* __restrict__ part_minus,
      const float* __restrict__ part_plus, const float* __restrict__ part_lost) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    float lost = 0.f;
    if (head < H)
        for (int c = at.lane / HT; c < row.z; c += 32 / HT) lost += part_lost[(u64)(row.y + c) * H + head];
    lost = sum_same_head(lost);
    Row minus, plus;
    add_chunks(at, row.y, row.z, part_minus, minus);
    add_chunks(at, row.y, row.z, part_plus, plus);
    const Finish f = {values, att_src, att_dst, d_a_dst, slope, d_values, d_a_src};
    finish(at, sh, row.x, lost, minus, plus, f);
}
