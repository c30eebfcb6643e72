// Backward of pairwise attention. Weights are recomputed from the softmax's saved maximum and sum:
// nothing of the size of the edges is kept or made but with KEPT. The same kernel runs twice,
// BY_SRC = 1 over the rows of the transposed graph (gradients of keys and values) and BY_SRC = 0
// over the destinations (gradients of queries, of the attention vector and of edge rows):
//
//   alpha = exp(s - m_i) / sum_i,  w = alpha dropout,  t = <dO_i, v_j>,  delta_i = <dO_i, O_i>,  ds
//   = alpha (dropout t - delta_i)
// and ds = 0 for an edge that takes all of the softmax, for the edges of a row whose softmax does
// not matter (`one_source`), and where the difference is no larger than what t and delta are
// rounded by: among equal neighbours it is nothing else. An item's own rows stay in registers, the
// other end's are gathered. Operands a are those of the score (k or q), operands b those of the
// value (v or dO).
//
// With KEPT (dot product without edge rows) the pass by source leaves the gradient of each score,
// times the scale, in the order of its edges, and `queries` takes the place of the pass by
// destination: it gathers keys, and no values.
#include "pairwise.cuh"
#include "alike.cuh"

#ifndef KEPT
#define KEPT 0
#endif
static_assert(!KEPT || (SCORE == DOT && !EDGE),
              "what is kept is all that the gradient of queries needs beside the keys");

#define SRC_TERM (SCORE == COSINE || SCORE == MX)
#define DST_TERM (SCORE == MX)

// Whether the edges of a row that come from one source have the same score, or at least the same
// value and no dropout: then their softmax does not matter.
#define ALIKE (!EDGE || (!OWN_VALUES && !DROPOUT))

// Up to this, t - delta is what equal numbers are rounded apart by. It is 0 where one edge takes
// nearly all of the softmax (`inverse`: 1 / sum): delta is all but that edge's t then, and their
// difference, however small, is a gradient, which balances those of the row's other edges.
#define NEARLY_ALL 0.999f
__device__ __forceinline__ float noise(float delta, float inverse) {
    return inverse > NEARLY_ALL && fabsf(delta) < infinity() ? 0.f : 4.f * ULP * fabsf(delta);
}

#if BY_SRC

// `prepare` is compiled with the pass by source, which reads what it makes, as that by destination
// does.
//
// packed [rows, H, 4]: m, 1 / sum, delta, and the node term c_dst or the limit below which a
// difference from delta is noise: one 16-byte load per edge and head in the pass by source. An
// infinite delta marks a row whose softmax does not matter: no difference is beyond its limit. A
// delta that is infinite by itself becomes NaN, as the gradients then are.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
prepare(int rows, const OUT_T* __restrict__ grad, const float* __restrict__ out,
        const float* __restrict__ norm, const float* __restrict__ c_dst,
        const OFF_T* __restrict__ indptr, const int* __restrict__ nbr,
        float* __restrict__ packed) {
    const Lanes at;
    const long long row = warp_id() * SLOTS + at.slot;
    const bool on = row < rows;
    Row g, o;  // on their way while the edges are looked at
    load_row(at, grad, (u64)row, on, g);
    load_row(at, out, (u64)row, on, o);
    const int some = at.head(0);
    const bool maybe = on && some < H && (EDGE || whole(norm[((u64)rows + row) * H + some]));
    const bool none = ALIKE && one_source(at, indptr, nbr, row, maybe);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        const Twofold delta = inner(g, o, kh);
        const int h = at.head(kh);
        const u64 i = (u64)row * H + h;
        const float inverse = on && h < H ? norm[i + (u64)rows * H] : 0.f;
        if (on && at.lh == 0 && h < H) {
            const float sum = delta.hi + delta.lo, d = none ? infinity() : sum - 0.f * sum;
            const float p[4] = {norm[i], inverse, d, DST_TERM ? c_dst[i] : noise(d, inverse)};
            store_pack<float, 4>(packed + 4 * i, p);
        }
    }
}

typedef ROW_T SELF_B_T;
typedef OUT_T OTHER_B_T;
#define OTHER_B 1
#else
typedef OUT_T SELF_B_T;
typedef ROW_T OTHER_B_T;
#define OTHER_B OWN_VALUES
#endif
#define OWN_ROW(i) (BY_SRC ? SOURCE_ROW(i) : (u64)(i))
#define OTHER_ROW(i) (BY_SRC ? (u64)(i) : SOURCE_ROW(i))
#define SUM_B (BY_SRC && OWN_VALUES)          // gradients of values apart from those of keys
#define SUM_ATT (!BY_SRC && SCORE == GATV2)   // gradient of the attention vector
#define SUM_VECTOR (SUM_ATT && VECTORS)       // gradient of each row's vector, [rows, H, D] in place of that of the node term
#define STEPS (UNROLL > 2)                    // the edges of a step are added up before they join the sums: shorter chains of
                                              // roundings, in registers that only narrow rows have
                                              // to spare

// The inner products of all edges of a step by one `lane_sums`. Where two rows are gathered for each
// edge, waiting for those of all edges costs more than it saves.
#define AT_ONCE (!EDGE && !OTHER_B && LH >= 8)

// Whether a step that has all of its edges is compiled by itself: its loads are then in flight
// together.
#define APART TOGETHER

struct Inputs {
    const ROW_T* other_a;
    const OTHER_B_T* other_b;
    const ROW_T* edges;
    const float *packed, *c_src;
    const OFF_T *position, *eid;
    Constants c;
    ROW_T* d_edges;
    float* kept;  // [edges, H]
};

// What `packed` holds of a destination for one head.
struct Destination {
    float m, inverse, delta, last;

    __device__ __forceinline__ float term() const { return DST_TERM ? last : 0.f; }
    __device__ __forceinline__ float limit() const {
        return DST_TERM ? noise(delta, inverse) : last;
    }
};

__device__ __forceinline__ Destination destination(const float* packed, u64 row, int head,
                                                   bool on) {
    float p[4] = {0.f, 0.f, 0.f, 0.f};
    const bool here = on && is_head(head);
    const float* of = packed + head * 4 + row * (u64)(H * 4);
    if (TOGETHER || here) load_pack<float, 4>(here ? of : (const float*)NOTHING, p);
    const Destination d = {p[0], p[1], p[2], p[3]};
    return d;
}

// An item's own row: `dst` where it is a destination, `src_term` where it is a source.
struct Self {
    Row a, b, att;
    Destination dst[KH];
    float src_term[KH];
};

struct Sums {
    // b: values' gradient, or the attention vector's (which goes on over rows, where there is only
    // one)
    Row a, b;
    float node[KH];

    __device__ __forceinline__ void clear() {
        clear_row(a);
        clear_row(b);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) node[kh] = 0.f;
    }
    __device__ __forceinline__ void add(const Sums& other) {
        add_row(a, other.a);
        if (SUM_B || SUM_ATT) add_row(b, other.b);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) node[kh] += other.node[kh];
    }
};

// Adds one edge, given its rows and scalars: `dot` and `t` are whole inner products. Returns the
// gradient of `dot`.
__device__ __forceinline__ float add_edge(const Lanes& at, const Inputs& in, const Self& self,
                                          const Row& own, const Row& a, const Row& b, int kh,
                                          float dot, float t, float src_term,
                                          const Destination& dst, float factor, bool on,
                                          Row& d_edge, Sums& sums) {
    const float alpha = on ? exp_above(score(dot, src_term, dst.term(), in.c), dst.m) * dst.inverse
                           : 0.f,
                w = alpha * factor, gap = factor * t - dst.delta;
    // written so, it is two compares without a branch; NaN is kept
    const bool keep = !(alpha >= 1.f) && !(fabsf(gap) <= dst.limit());
    const float ds = keep ? alpha * gap : 0.f;
    float d_dot, d_node;
    score_grad(ds, dot, src_term, dst.term(), in.c, d_dot, d_node);
    sums.node[kh] += d_node;
#pragma unroll
    for (int i = kh * KV; i < (kh + 1) * KV; ++i)
#pragma unroll
        for (int x = 0; x < VEC; ++x) {
            float d = d_dot * a[i][x];
            if (SCORE == GATV2) {
                const float z = own[i][x] + a[i][x];
                d = d_dot * self.att[i][x] * leaky_grad(z, in.c.slope);
                if (SUM_ATT) sums.b[i][x] = fmaf(d_dot, leaky(z, in.c.slope), sums.b[i][x]);
            }
            sums.a[i][x] += d;
            if (BY_SRC) {
                if (SUM_B) sums.b[i][x] = fmaf(w, b[i][x], sums.b[i][x]);
                else sums.a[i][x] = fmaf(w, b[i][x], sums.a[i][x]);
            } else if (EDGE) {  // edge rows act like keys; under DOT like values too
                const float via_key = SCORE == GATV2 ? d : d_dot * own[i][x];
                d_edge[i][x] = OWN_VALUES ? fmaf(w, self.b[i][x], via_key) : via_key;
            }
        }
    return d_dot;
}

template <bool Whole>
__device__ __forceinline__ void step(const Lanes& at, const Inputs& in, const Dropout& drop,
                                     const Self& self, OFF_T base, int first, int n, int j,
                                     Sums& sums) {
    Row a[UNROLL], b[OTHER_B ? UNROLL : 1];
    Destination dst[UNROLL][KH];
    float src_term[UNROLL][KH];
    OFF_T position[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const u64 i = (u32)__shfl_sync(FULL_WARP, j, e & 31);
        const bool on = Whole || e < n;
        gather_row(at, in.other_a, OTHER_ROW(i), on, a[u]);
        if (OTHER_B) gather_row(at, in.other_b, OTHER_ROW(i), on, b[OTHER_B ? u : 0]);
        position[u] = base + e;
        if (BY_SRC && (DROPOUT || EDGE)) position[u] = on ? in.position[base + e] : 0;
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            dst[u][kh] = BY_SRC ? destination(in.packed, i, at.head(kh), on) : self.dst[kh];
            src_term[u][kh] = BY_SRC ? self.src_term[kh] : SRC_TERM
                ? node_term(in.c_src, i, at.head(kh), on) : 0.f;
        }
    }
    Sums part, &to = STEPS ? part : sums;
    part.clear();
    float factor[KH][UNROLL];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) draw<UNROLL>(at, drop, position, at.head(kh), factor[kh]);
#if AT_ONCE
    float dots[KH][2 * UNROLL];  // each edge's dot and t
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            dots[kh][2 * u] = partial_score(self.a, a[u], self.att, kh, in.c);
            dots[kh][2 * u + 1] = partial_dot(self.b, a[u], kh);
        }
        lane_sums<LH>(dots[kh]);
    }
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const bool on = Whole || e < n;
        Row& value = b[OTHER_B ? u : 0];
        Row own, d_edge;
#if EDGE
        Row edge;
        const u64 id = on ? (u64)in.eid[position[u]] : 0;
        load_row(at, in.edges, id, on, edge);
#endif
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x) own[k][x] = self.a[k][x];
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            float dot, t;
#if EDGE
            // The edge row belongs to the key; which side holds the key decides where it is added.
            Row key, val;
#pragma unroll
            for (int i = kh * KV; i < (kh + 1) * KV; ++i)
#pragma unroll
                for (int x = 0; x < VEC; ++x) {
                    key[i][x] = (BY_SRC ? own[i][x] : a[u][i][x]) + edge[i][x];
                    const float plain = BY_SRC ? self.b[i][x] : OTHER_B ? value[i][x] : a[u][i][x];
                    val[i][x] = OWN_VALUES ? plain + edge[i][x] : plain;
                }
#if BY_SRC
            dot = lane_sum<LH>(partial_score(key, a[u], self.att, kh, in.c));
            t = lane_sum<LH>(partial_dot(val, value, kh));
            add_edge(at, in, self, key, a[u], value, kh, dot, t, src_term[u][kh], dst[u][kh],
                     factor[kh][u], on, d_edge, to);
#else
            dot = lane_sum<LH>(partial_score(key, own, self.att, kh, in.c));
            t = lane_sum<LH>(partial_dot(val, self.b, kh));
            add_edge(at, in, self, own, key, value, kh, dot, t, src_term[u][kh], dst[u][kh],
                     factor[kh][u], on, d_edge, to);
#endif
#else
#if AT_ONCE
            dot = dots[kh][2 * u];
            t = dots[kh][2 * u + 1];
#else
            dot = lane_sum<LH>(partial_score(own, a[u], self.att, kh, in.c));
            t = lane_sum<LH>(OTHER_B ? partial_dot(self.b, value, kh)
                             : partial_dot(self.b, a[u], kh));
#endif
            const float d = add_edge(at, in, self, own, a[u], value, kh, dot, t, src_term[u][kh],
                                     dst[u][kh], factor[kh][u], on, d_edge, to);
            if (KEPT && on && at.lh == 0 && at.has(kh))
                in.kept[(u64)(base + e) * H + at.head(kh)] = d;
#endif
        }
#if EDGE
        if (!BY_SRC && on && in.d_edges) store_row(at, in.d_edges, id, d_edge);
#endif
    }
    if (STEPS) sums.add(part);
}

__device__ __forceinline__ void load_self(const Lanes& at, const Inputs& in, const ROW_T* self_a,
                                          const SELF_B_T* self_b, int row, Self& self) {
    load_row(at, self_a, OWN_ROW(row), true, self.a);
    load_row(at, self_b, OWN_ROW(row), true, self.b);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        const int h = at.head(kh);
        self.dst[kh] = destination(in.packed, (u64)row, h, !BY_SRC);
        self.src_term[kh] = BY_SRC && SRC_TERM ? node_term(in.c_src, row, h, true) : 0.f;
    }
}

// Writes an item's sums: to the gradients, or to the partial results of its chunk.
struct Gradients {
    ROW_T *a, *b;
    float* node;
    float *part_a, *part_b, *part_node;
};

__device__ __forceinline__ void leave(const Lanes& at, const Item& it, const Gradients& g,
                                      Sums& sums) {
    const u64 row = it.chunk < 0 ? it.row : it.chunk;
    sum_slots(sums.a);
    if (SUM_B || SUM_VECTOR) sum_slots(sums.b);
    if (at.slot == 0) {
        if (it.chunk < 0) {
            store_row(at, g.a, OWN_ROW(row), sums.a);
            if (SUM_B) store_row(at, g.b, OWN_ROW(row), sums.b);
            if (SUM_VECTOR) store_row(at, g.node, row, sums.b);
        } else {
            store_row(at, g.part_a, row, sums.a);
            if (SUM_B || SUM_VECTOR) store_row(at, g.part_b, row, sums.b);
        }
    }
    if (BY_SRC ? SRC_TERM : DST_TERM) {
        float* node = it.chunk < 0 ? g.node : g.part_node;
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            float s = sums.node[kh];
#pragma unroll
            for (int w = ROW_LANES; w < 32; w <<= 1) s += __shfl_xor_sync(FULL_WARP, s, w);
            if (at.slot == 0 && at.lh == 0 && at.head(kh) < H) node[row * H + at.head(kh)] = s;
        }
    }
}

// The block's share of the attention vector's gradient, added in a fixed order: [blocks, H*D].
__device__ __forceinline__ void leave_att(const Lanes& at, unsigned char* shared, Row& sum,
                                          float* part_att) {
    sum_slots(sum);
    float* mine = (float*)shared + (threadIdx.x >> 5) * HT * D;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (at.slot == 0 && at.owns(k / KV, k % KV))
            store_pack<float, VEC>(mine + at.offset(k / KV, k % KV) - at.tile * D, sum[k]);
    __syncthreads();
    const int width = (H - at.tile < HT ? H - at.tile : HT) * D;
    for (int c = threadIdx.x; c < width; c += 32 * WARPS) {
        float s = 0.f;
        for (int w = 0; w < WARPS; ++w) s += ((const float*)shared)[w * HT * D + c];
        part_att[(u64)blockIdx.x * (H * D) + at.tile * D + c] = s;
    }
}

#if BY_SRC || !KEPT

extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ nbr,
         const OFF_T* __restrict__ position, const OFF_T* __restrict__ eid, int rows,
         const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges,
         int chunk_slots, const ROW_T* __restrict__ self_a, const SELF_B_T* __restrict__ self_b,
         const ROW_T* __restrict__ other_a, const OTHER_B_T* __restrict__ other_b,
         const ROW_T* __restrict__ edges, const float* __restrict__ att_vector,
         const float* __restrict__ c_src, const float* __restrict__ packed, float scale,
         float slope, float drop_p, float drop_scale, u64 seed, u64 offset, ROW_T* __restrict__ d_a,
         ROW_T* __restrict__ d_b, float* __restrict__ d_node, ROW_T* __restrict__ d_edges,
         float* __restrict__ kept, float* __restrict__ part_a, float* __restrict__ part_b,
         float* __restrict__ part_node, float* __restrict__ part_att) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    const Lanes at;
    const Inputs in = {other_a, other_b, edges, packed, c_src, position, eid, {scale, slope},
                       d_edges, kept};
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    const Gradients g = {d_a, d_b, d_node, part_a, part_b, part_node};
    Self self;
    Sums sums;
    if (!VECTORS) load_row(at, att_vector, 0, SCORE == GATV2, self.att);
    clear_row(sums.b);
    const long long total = (long long)chunk_slots + rows, stride = (long long)gridDim.x * WARPS;
    for (long long w = warp_id(); w < total; w += stride) {
        Item it;
        if (!item_at(w, rows, indptr, split, it)) continue;
        load_self(at, in, self_a, self_b, it.row, self);
        if (VECTORS) load_row(at, att_vector, VECTOR(c_src, it.row), true, self.att);
        clear_row(sums.a);
        if (!SUM_ATT || VECTORS) clear_row(sums.b);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) sums.node[kh] = 0.f;
        for (OFF_T base = it.begin; base < it.end; base += 32) {
            const int n = it.end - base < 32 ? (int)(it.end - base) : 32;
            const int j = at.lane < n ? nbr[base + at.lane] : 0;
            each_step<APART>(n, [&](auto kind, int first) {
                step<decltype(kind)::whole>(at, in, drop, self, base, first, n, j, sums);
            });
        }
        leave(at, it, g, sums);
    }
    if (SUM_ATT && !VECTORS) leave_att(at, shared, sums.b, part_att);
}

#else

// UNROLL edges in each slot, the first at `first`: the gradients of their scores times their keys.
// j, p: each lane's source, and where its edge lies in the order of the pass by source.
template <bool Whole>
__device__ __forceinline__ void add_keys(const Lanes& at, const ROW_T* keys, const float* kept,
                                         int first, int n, int j, OFF_T p, Row& sum) {
    Row key[UNROLL], part, &to = STEPS ? part : sum;
    float d[UNROLL][KH];
    clear_row(part);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const bool on = Whole || e < n;
        const u64 i = (u32)__shfl_sync(FULL_WARP, j, e & 31),
            line = (u64)__shfl_sync(FULL_WARP, p, e & 31);
        gather_row(at, keys, SOURCE_ROW(i), on, key[u]);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            d[u][kh] = __ldg(on && at.has(kh) ? kept + line * H + at.head(kh)
                             : (const float*)NOTHING);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
#pragma unroll
            for (int x = 0; x < VEC; ++x) to[i][x] = fmaf(d[u][i / KV], key[u][i][x], to[i][x]);
    if (STEPS) add_row(sum, part);
}

// The gradient of queries. inverse[e]: where edge e of a destination lies in the order of the pass
// by source.
extern "C" __global__ void BOUNDS(LEAST_BLOCKS)
queries(const OFF_T* __restrict__ indptr, const int* __restrict__ nbr,
        const OFF_T* __restrict__ inverse, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const ROW_T* __restrict__ keys, const float* __restrict__ kept,
        ROW_T* __restrict__ d_queries, float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row sum;
    clear_row(sum);
    for (OFF_T base = it.begin; base < it.end; base += 32) {
        const int n = it.end - base < 32 ? (int)(it.end - base) : 32;
        const int j = at.lane < n ? nbr[base + at.lane] : 0;
        const OFF_T p = at.lane < n ? inverse[base + at.lane] : 0;
        each_step<APART>(n, [&](auto kind, int first) {
            add_keys<decltype(kind)::whole>(at, keys, kept, first, n, j, p, sum);
        });
    }
    store_sum(at, it, sum, d_queries, part);
}

#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, ROW_T* __restrict__ d_a,
      ROW_T* __restrict__ d_b, float* __restrict__ d_node, const float* __restrict__ part_a,
      const float* __restrict__ part_b, const float* __restrict__ part_node) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row total;
    add_chunks(at, row.y, row.z, part_a, total);
    if (at.slot == 0) store_row(at, d_a, OWN_ROW(row.x), total);
    if (SUM_B) {
        add_chunks(at, row.y, row.z, part_b, total);
        if (at.slot == 0) store_row(at, d_b, OWN_ROW(row.x), total);
    }
    if (SUM_VECTOR) {
        add_chunks(at, row.y, row.z, part_b, total);
        if (at.slot == 0) store_row(at, d_node, row.x, total);
    }
    if (BY_SRC ? SRC_TERM : DST_TERM) {
        const int head = at.tile + at.lane % HT;
        float s = 0.f;
        if (head < H)
            for (int c = at.lane / HT; c < row.z; c += 32 / HT)
                s += part_node[(u64)(row.y + c) * H + head];
        s = sum_same_head(s);
        if (at.lane < HT && head < H) d_node[(u64)row.x * H + head] = s;
    }
}
