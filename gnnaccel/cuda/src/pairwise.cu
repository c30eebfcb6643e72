// Attention whose scores need both rows of an edge, forward: GATv2, dot product, cosine, SuperGAT
// (see pairwise.cuh).
//
// One gather per edge serves the score and, where values are the keys, the sum as well: a warp's
// slots take edges side by side, UNROLL of them in flight, with an online softmax in registers.
// Kernels: `forward` (whole rows and chunks in one launch) and `merge` (split rows).
#include "pairwise.cuh"

struct Inputs {
    const ROW_T *keys, *values, *edges;
    const float *c_src, *c_dst;
    const OFF_T* eid;
    Constants c;
};

struct State {
    float m[KH], l[KH];
    Row acc;
};

// One step: UNROLL edges in each slot, the first at `first` of the tile that starts at `base`.
// Whole: all of them are there.
template <bool Whole>
__device__ __forceinline__ void step(const Lanes& at, const Inputs& in, const Dropout& drop,
                                     const Row& q, const Row& att, const float (&c_dst)[KH],
                                     OFF_T base, int first, int n, int j, State& st) {
    Row k[UNROLL], v[OWN_VALUES ? UNROLL : 1];
    float s[UNROLL][KH], dot[KH][UNROLL];
    OFF_T position[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const u64 src = (u32)__shfl_sync(FULL_WARP, j, e & 31);
        const bool on = Whole || e < n;
        position[u] = base + e;
        gather_row(at, in.keys, SOURCE_ROW(src), on, k[u]);
        if (OWN_VALUES) gather_row(at, in.values, SOURCE_ROW(src), on, v[OWN_VALUES ? u : 0]);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            s[u][kh] = SCORE == COSINE
                || SCORE == MX ? node_term(in.c_src, src, at.head(kh), on) : 0.f;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        Row key;
#if EDGE
        const bool on = Whole || first + u * SLOTS + at.slot < n;
        load_row(at, in.edges, (u64)(on ? in.eid[position[u]] : 0), on, key);
        if (OWN_VALUES) add_row(v[OWN_VALUES ? u : 0], key);
        add_row(key, k[u]);
        const Row& operand = key;
#else
        const Row& operand = k[u];
        (void)key;
#endif
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) dot[kh][u] = partial_score(operand, q, att, kh, in.c);
    }
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        lane_sums<LH>(dot[kh]);
        float top = st.m[kh], factor[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool on = Whole || first + u * SLOTS + at.slot < n;
            s[u][kh] = on ? score(dot[kh][u], s[u][kh], c_dst[kh], in.c) : NEG_INF;
            top = fmaxf(top, s[u][kh]);
        }
        draw<UNROLL>(at, drop, position, at.head(kh), factor);
        const float base_score = reference(top), fade = exp_above(st.m[kh], base_score);
        st.m[kh] = top;
        st.l[kh] *= fade;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool on = Whole || first + u * SLOTS + at.slot < n;
            const float p = on ? exp_above(s[u][kh], base_score) : 0.f;
            st.l[kh] += p;
            s[u][kh] = p * factor[u];
        }
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                const int i = kh * KV + kv;
                float a = st.acc[i][x] * fade;
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    a = fmaf(s[u][kh], OWN_VALUES ? v[OWN_VALUES ? u : 0][i][x] : k[u][i][x], a);
                st.acc[i][x] = a;
            }
    }
}

// The slots' states into one; a slot that saw no edge has m = -inf and counts nothing.
__device__ __forceinline__ void join_slots(State& st) {
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        float top = st.m[kh];
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1)
            top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, w));
        const float f = exp_above(st.m[kh], reference(top));
        st.m[kh] = top;
        st.l[kh] *= f;
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1)
            st.l[kh] += __shfl_xor_sync(FULL_WARP, st.l[kh], w);
#pragma unroll
        for (int i = kh * KV; i < (kh + 1) * KV; ++i)
#pragma unroll
            for (int x = 0; x < VEC; ++x) st.acc[i][x] *= f;
    }
    sum_slots(st.acc);
}

// norm [2, rows, H], for backward: what the scores were taken relative to, and the reciprocal of
// the softmax's sum.
__device__ __forceinline__ void finish(const Lanes& at, int row, int rows, bool edges, State& st,
                                       OUT_T* out, float* raw, const float* bias, float* norm) {
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        const float inverse = reciprocal(st.l[kh], edges);
#pragma unroll
        for (int i = kh * KV; i < (kh + 1) * KV; ++i)
#pragma unroll
            for (int x = 0; x < VEC; ++x) st.acc[i][x] *= inverse;
        if (TRAIN && at.slot == 0 && at.lh == 0 && at.head(kh) < H) {
            float* n = norm + (u64)row * H + at.head(kh);
            n[0] = reference(st.m[kh]);
            n[(u64)rows * H] = inverse;
        }
    }
    if (at.slot != 0) return;
    // for backward, where the result itself is biased or may be changed
    if (raw) store_row(at, raw, row, st.acc);
    add_bias(at, bias, st.acc);
    store_row(at, out, row, st.acc);
}

extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ col,
        const OFF_T* __restrict__ eid, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ keys, const ROW_T* __restrict__ values,
        const ROW_T* __restrict__ queries, const ROW_T* __restrict__ edges,
        const float* __restrict__ att_vector, const float* __restrict__ c_src,
        const float* __restrict__ c_dst, float scale, float slope, float drop_p, float drop_scale,
        u64 seed, u64 offset, OUT_T* __restrict__ out, float* __restrict__ raw,
        const float* __restrict__ bias, float* __restrict__ norm, float* __restrict__ part_acc,
        float* __restrict__ part_stats) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Inputs in = {keys, values, edges, c_src, c_dst, eid, {scale, slope}};
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    Row q, att;
    load_row(at, queries, (u64)it.row, true, q);
    load_row(at, att_vector, VECTORS ? VECTOR(c_dst, it.row) : 0, SCORE == GATV2, att);
    State st;
    float dst_term[KH];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        st.m[kh] = NEG_INF;
        st.l[kh] = 0.f;
        dst_term[kh] = SCORE == MX ? node_term(c_dst, it.row, at.head(kh), true) : 0.f;
    }
    clear_row(st.acc);
    for (OFF_T base = it.begin; base < it.end; base += 32) {
        const int n = it.end - base < 32 ? (int)(it.end - base) : 32;
        const int j = at.lane < n ? col[base + at.lane] : 0;
        each_step<true>(n, [&](auto kind, int first) {
            step<decltype(kind)::whole>(at, in, drop, q, att, dst_term, base, first, n, j, st);
        });
    }
    join_slots(st);
    if (it.chunk < 0) {
        finish(at, it.row, rows, it.end > it.begin, st, out, raw, bias, norm);
        return;
    }
    if (at.slot == 0) {
        store_row(at, part_acc, it.chunk, st.acc);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            if (at.lh == 0 && at.head(kh) < H) {
                float* s = part_stats + (u64)it.chunk * 3 * H + at.head(kh);
                s[0] = st.m[kh];
                s[H] = st.l[kh];
                s[2 * H] = 0.f;
            }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, int rows,
      OUT_T* __restrict__ out, float* __restrict__ raw, const float* __restrict__ bias,
      float* __restrict__ norm, const float* __restrict__ part_acc,
      const float* __restrict__ part_stats) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    const Softmax run = merge_stats(at, row.y, row.z, head, head < H, sh, part_stats);
    State st;
    if (at.lane < HT) sh.factor[at.lane] = run.sum();
    __syncwarp();
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        st.m[kh] = sh.extra[kh * HL + at.hl];
        st.l[kh] = sh.factor[kh * HL + at.hl];
    }
    gather_chunks(at, row.y, row.z, sh, part_stats, part_acc, st.acc);
    finish(at, row.x, rows, true, st, out, raw, bias, norm);
}
