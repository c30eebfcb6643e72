// Additive attention, backward (GAT), with one gather of rows in all: each source folds the output
// gradients of its destinations. Everything else follows from sums over rows that are already
// there:
//
//   w_e   = alpha_e * dropout_e                        g_e = 1 where z_e > 0, else slope
//   alpha_e = exp(s_e - m_i) / sum_i
//   W_j, S_j = sum_e w_e dO_i and sum_e g_e w_e dO_i over the edges out of j
//              (phase 2, as in forward)
//   da_src_j = <v_j, S_j> - sum_e g_e alpha_e delta_i,       delta_i = <dO_i, O_i>
//   da_dst_i = (1 - slope) (<dO_i, plus_i> mass_minus_i - <dO_i, minus_i> mass_plus_i)
//   dv_j     = W_j (+ da_src_j att_src + da_dst_j att_dst, the gradient through the scores)
//
// plus, minus and the masses were saved by forward. The line for da_dst uses that softmax gradients
// sum to zero over a destination; written with both masses it loses nothing when one edge takes
// nearly all of the softmax. A destination without edges has none, even where dO_i is not finite.
// The line for da_src is a small difference of large numbers. So rows are added up by steps, and
// inner products are computed twofold. With EDGE_GRAD each edge's term of da_src is computed
// anyway, not twofold, and da_src is their sum.
//
// Some edges have no gradient through their score, whatever that difference rounds to: g_e is 0
// for an edge that takes all of the softmax (alpha_e = 1), and for all edges of a row whose edges
// come from one source: their scores are equal, and whatever adds to all of them changes nothing.
// With an edge term they differ, which changes nothing either unless dropout takes some away. The
// same holds where copies of one edge share the softmax and all others weigh nothing.
//
// Where dO_i comes as int8 times a scale (GRAD_INT8), `prepare` leaves the scale in the reciprocal
// of the softmax's sum, so that every weight has it, and delta over the scale: the gather by source
// reads no more numbers than before. All is linear in dO, so what is rounded without bias gives
// gradients without bias. Int8 values (INT8) are read once per source.
//
// Kernels: `prepare` (per destination), `sources` (per source, chunked), `merge` (split sources).
// head_dot.cu has the gradients of att_src and att_dst.
#include "additive_direct.cuh"
#include "alike.cuh"

#define STEPS (UNROLL > 1)
#ifndef GRAD_INT8
#define GRAD_INT8 0
#endif
#ifndef GRAD_T
#define GRAD_T OUT_T
#endif
#if GRAD_INT8
#define GRAD_STRIDE STRIDE
#else
#define GRAD_STRIDE (H * D)
#endif
#if INT8
#define D_VALUES_T float
#define VALUE_STRIDE STRIDE
#else
#define D_VALUES_T ROW_T
#define VALUE_STRIDE (H * D)
#endif

// Short rows, of which a warp has several, gain more from warps than from registers. For rows of
// arxiv's size, 1x64: `sources` 218 -> 211 us, `prepare` 52 -> 48; 1x128 lost as much.
#define SHORT (SLOTS > 1 && PACKS * VEC <= 4)
#define LEAST_SOURCES (SHORT && HT == 1 ? 10 : 0)
#define LEAST_PREPARE (SHORT ? 16 : 0)

// One source's values.
__device__ __forceinline__ void load_values(const Lanes& at, const Gathered<ROW_T>& values, int row,
                                            Row& v) {
    load_row<ROW_T, VALUE_STRIDE>(at, values.rows, (u64)row, true, v);
#if INT8
    const float scale = values.scale[row];
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int x = 0; x < VEC; ++x) v[k][x] *= scale;
#endif
}

// packed [rows, H, 4]: a_dst, m, 1 / sum, delta: all that an edge and head needs of its
// destination, in one 16-byte load. 1 / sum is negative where scores have no gradient.
extern "C" __global__ void BOUNDS(LEAST_PREPARE)
prepare(int rows, const GRAD_T* __restrict__ grad,
#if GRAD_INT8
        const float* __restrict__ grad_scale,
#endif
        const float* __restrict__ plus, const float* __restrict__ minus,
        const float* __restrict__ small, const float* __restrict__ a_dst, float slope,
        const OFF_T* __restrict__ indptr, const int* __restrict__ nbr, GATHERED(values),
        float* __restrict__ packed, float* __restrict__ d_a_dst) {
    const Lanes at;
    const long long row = warp_id() * SLOTS + at.slot;
    const bool on = row < rows;
    Row g, p, m, o;  // on their way while the edges are looked at
    load_row<GRAD_T, GRAD_STRIDE>(at, grad, (u64)row, on, g);
    load_row(at, plus, (u64)row, on, p);
    load_row(at, minus, (u64)row, on, m);
    const int some = at.head(0);
    const bool maybe = on && some < H && (EDGE || whole(small[((u64)rows + row) * H + some]));
    const bool none = (!EDGE || !DROPOUT) && one_source(at, indptr, nbr, row, maybe);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int x = 0; x < VEC; ++x) o[k][x] = p[k][x] + m[k][x];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        const float up = lane_sum<LH>(partial_dot(g, p, kh)),
            down = lane_sum<LH>(partial_dot(g, m, kh));
        Twofold delta = {0.f, 0.f};
        // with EDGE_GRAD rounded as each edge's product: where O = v, they cancel to the last bit
        if (EDGE_GRAD) delta.hi = lane_sum<LH>(partial_dot(g, o, kh));
        else delta = inner(g, o, kh);
        const int h = at.head(kh);
        const u64 i = (u64)row * H + h, all = (u64)rows * H;
        const float inverse = on && h < H ? small[i + all] : 0.f;
        const bool few = copies(at, indptr, nbr, row, values, o, kh, none ? 0.f : inverse),
                   still = none || few;
        if (on && at.lh == 0 && h < H) {
            // of edges that weigh next to nothing beside copies, a_dst's formula loses nothing
            const float sign = still ? -1.f : 1.f, factor = none ? 0.f : 1.f - slope;
            const float high = small[i + 2 * all], low = small[i + 3 * all];
            const float turn = high == 0.f && low == 0.f  // no edges: whatever dO is
                ? 0.f : factor * (up * low - down * high);
#if GRAD_INT8
            const float own = grad_scale[row];
            const float q[4] = {a_dst ? a_dst[i] : 0.f, small[i], sign * inverse * own,
                                delta.hi + delta.lo};
            store_pack<float, 4>(packed + 4 * i, q);
            d_a_dst[i] = turn * own;
#else
            const float q[4] = {a_dst ? a_dst[i] : 0.f, small[i], sign * inverse,
                                delta.hi + delta.lo};
            store_pack<float, 4>(packed + 4 * i, q);
            d_a_dst[i] = turn;
#endif
        }
    }
}

struct Finish {
    Gathered<ROW_T> values;
    // d_a_dst null: destinations are other nodes than sources
    const float *att_src, *att_dst;
    int att_step;  // from a head's attention vector to the next one's
    const float* d_a_dst;
    D_VALUES_T* d_values;
    float* d_a_src;
};

// `lost` is sum g alpha delta (with EDGE_GRAD: minus da_src) of the lane's head in phase 1. Shared
// memory takes it to the lanes that have this head in phase 2.
__device__ __forceinline__ void finish(const Lanes& at, const Scratch& sh, int row, float lost,
                                       Row& whole, const Row& scored, const Finish& f) {
    if (at.lane < HT) sh.factor[at.lane] = lost;
    __syncwarp();
#if !EDGE_GRAD
    Row v;
    load_values(at, f.values, row, v);
#endif
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        const int h = at.head(kh);
        Twofold dot = {0.f, 0.f};
#if !EDGE_GRAD
        dot = inner(v, scored, kh);
#endif
        const float d_src = (dot.hi - sh.factor[kh * HL + at.hl]) + dot.lo;
        const float d_dst = f.d_a_dst && h < H ? f.d_a_dst[(u64)row * H + h] : 0.f;
        if (at.slot == 0 && at.lh == 0 && h < H) f.d_a_src[(u64)row * H + h] = d_src;
#pragma unroll
        for (int kv = 0; kv < KV; ++kv)
            if (at.owns(kh, kv)) {
#pragma unroll
                for (int x = 0; x < VEC; ++x) {
                    float& a = whole[kh * KV + kv][x];
                    const int c = h * f.att_step + at.vec(kv) * VEC + x;
                    a = fmaf(d_src, f.att_src[c], a);
                    if (f.d_a_dst) a = fmaf(d_dst, f.att_dst[c], a);
                }
            }
    }
    if (at.slot == 0) store_row(at, f.d_values, row, whole);
}

struct Edges {
    const int* nbr;
    const OFF_T *position, *eid;
    const float *packed, *a_edge;
    float slope;

    // What `packed` holds of destination i, with z in the place of a_dst: summed in forward's
    // order, so that it is the same z.
    __device__ __forceinline__ void load(u64 i, int head, float src_term, OFF_T place,
                                         float (&q)[4]) const {
        load_pack<float, 4>(packed + head * 4 + i * (u64)(H * 4), q);
        q[0] += src_term;
#if EDGE
        q[0] += a_edge[(u64)eid[place] * H + head];
#endif
    }
};

// Whether the score of an edge has no gradient: its alpha is negative, or 1 and more, as one compare
// of bits. NaN counts so, too. With GRAD_INT8 alpha holds the gradient's scale, so that it does not
// tell whether the edge takes all of the softmax.
__device__ __forceinline__ bool decided(float alpha) {
    return (u32)__float_as_int(alpha) >= (GRAD_INT8 ? 0x80000000u : 0x3f800000u);
}

// The weights by which an edge's row joins two sums, as phase 1 left them: w that of `whole`, g w
// that of `scored`. With EDGE_GRAD w has a sign, and there is one sum.
struct ByScore {
    const float2* pair;

    __device__ __forceinline__ void load(int s, bool on, float& whole, float& scored) const {
        const float2 p = on ? pair[s] : make_float2(0.f, 0.f);
        whole = EDGE_GRAD ? fabsf(p.x) : p.x;
        scored = p.y;
    }
};

// Phase 1: each edge's weight w and g w, side by side. With EDGE_GRAD the sign of w says which side
// of zero z is on, and alpha delta stands beside it, infinite if the score has no gradient (but NaN
// if alpha is).
// Returns the tile's share of sum g alpha delta.
__device__ __forceinline__ float weight_tile(const Edges& g, const Dropout& drop, const Scratch& sh,
                                             OFF_T base, int n, int j, int head, bool on,
                                             float src_term) {
    const int lane = threadIdx.x & 31, h = lane % HT;
    float lost = 0.f;
#pragma unroll
    for (int it = 0; it < HT; ++it) {
        if (it * EDGES_PER_STEP < n) {
            const int e = it * EDGES_PER_STEP + lane / HT;
            const int i = __shfl_sync(FULL_WARP, j, e);
            float w = 0.f, alpha_delta = 0.f, slope = 0.f;
            bool up = false, none = false;
            if (e < n && on) {
                const OFF_T place = EDGE || DROPOUT ? g.position[base + e] : 0;
                float q[4];
                g.load((u64)i, head, src_term, place, q);
                up = q[0] > 0.f;
                const float signed_alpha = exp_above(leaky(q[0], g.slope), q[1]) * q[2],
                            alpha = fabsf(signed_alpha);
                none = decided(signed_alpha);
                alpha_delta = alpha * q[3];
                slope = none ? 0.f : up ? 1.f : g.slope;
                lost = fmaf(slope, alpha_delta, lost);
                w = alpha * drop.factor(place, head);
            }
            sh.pair[e * HT + h] =
                make_float2(EDGE_GRAD && !up ? -w : w,
                            !EDGE_GRAD ? slope * w : none ? infinity() + w : alpha_delta);
        }
    }
    __syncwarp();
    return lost;
}

#if DIRECT && !EDGE_GRAD
// One step of `gather_direct`: UNROLL edges in each slot, the first at `first` of the tile that
// starts at `base`. Whole: all of them are there.
template <bool Whole>
__device__ __forceinline__ void source_step(const Lanes& at, const Edges& g, const Dropout& drop,
                                            const GRAD_T* grad, const float (&src_term)[KH],
                                            OFF_T base, int first, int n, int j, float (&lost)[KH],
                                            Row& whole, Row& scored) {
    Loaded<GRAD_T> v[UNROLL];
    float q[UNROLL][KH][4];
    OFF_T place[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const bool on = Whole || e < n;
        const u64 i = (u32)__shfl_sync(FULL_WARP, j, e & 31);
        v[u].load(at, grad, i, on);
        place[u] = (EDGE || DROPOUT) && on ? g.position[base + e] : 0;
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            q[u][kh][0] = q[u][kh][2] = q[u][kh][3] = 0.f;  // weight zero
            q[u][kh][1] = infinity();
            if (on && at.has(kh)) g.load(i, at.head(kh), src_term[kh], place[u], q[u][kh]);
        }
    }
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        float factor[UNROLL], loss = 0.f;
        Row some_whole, some_scored;
        clear_row(some_whole);
        clear_row(some_scored);
        draw<UNROLL>(at, drop, place, at.head(kh), factor);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float z = q[u][kh][0];
            const float signed_alpha = exp_above(leaky(z, g.slope), q[u][kh][1]) * q[u][kh][2],
                        alpha = fabsf(signed_alpha), w = alpha * factor[u],
                        slope = decided(signed_alpha) ? 0.f : z > 0.f ? 1.f : g.slope;
            loss = fmaf(slope * alpha, q[u][kh][3], loss);
            add_twice<true>(kh, w, slope * w, v[u], STEPS ? some_whole : whole,
                            STEPS ? some_scored : scored);
        }
        lost[kh] += loss;
#pragma unroll
        for (int k = kh * KV; STEPS && k < (kh + 1) * KV; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                whole[k][x] += some_whole[k][x];
                scored[k][x] += some_scored[k][x];
            }
    }
}

// Both phases in one where few lanes share a head: each lane makes the weights of its own heads.
// Returns sum g alpha delta of the lane's phase-1 head.
__device__ __forceinline__ float gather_direct(const Lanes& at, const Item& it, const Edges& g,
                                               const Dropout& drop, const Scratch& sh,
                                               const float* a_src, const GRAD_T* grad, Row& whole,
                                               Row& scored) {
    float lost[KH], src_term[KH];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        lost[kh] = 0.f;
        src_term[kh] = at.head(kh) < H ? a_src[(u64)it.row * H + at.head(kh)] : 0.f;
    }
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? g.nbr[base + at.lane] : 0;
        each_step<true>(n, [&](auto kind, int first) {
            source_step<decltype(kind)::whole>(at, g, drop, grad, src_term, base, first, n, j,
                                               lost, whole, scored);
        });
    }
    return to_phase_1(at, sh.weight, lost);
}
#endif

#if EDGE_GRAD
// d a_edge = g (w <dO, v> - alpha delta), one dot product per edge and head; only built when an
// edge term needs it. `d_src` gets the sum.
__device__ __forceinline__ void edge_grad_tile(const Lanes& at, const Edges& g, const Scratch& sh,
                                               OFF_T base, int n, int j, const GRAD_T* grad,
                                               const Row& v, float* d_a_edge,
                                               float (&d_src)[KH]) {
    for (int first = 0; first < n; first += SLOTS) {
        const int e = first + at.slot;
        const bool on = e < n;
        Row o;
        load_row<GRAD_T, GRAD_STRIDE>(at, grad, (u64)__shfl_sync(FULL_WARP, j, e & 31), on, o);
#pragma unroll
        for (int kh = 0; kh < KH; ++kh) {
            const float dot = lane_sum<LH>(partial_dot(o, v, kh));
            const int h = at.head(kh), s = e * HT + kh * HL + at.hl;
            if (on && h < H) {
                const float2 p = sh.pair[s];
                float d = fabsf(p.x) * dot - p.y;
                if (negative(p.x)) d *= g.slope;
                if (p.y == infinity()) d = 0.f;
                d_src[kh] += d;
                if (at.lh == 0) d_a_edge[(u64)g.eid[g.position[base + e]] * H + h] = d;
            }
        }
    }
}
#endif

extern "C" __global__ void BOUNDS(LEAST_SOURCES)
sources(const OFF_T* __restrict__ indptr, const int* __restrict__ nbr,
        const OFF_T* __restrict__ position, const OFF_T* __restrict__ eid, int rows,
        const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges,
        int chunk_slots, const float* __restrict__ packed, const float* __restrict__ a_src,
        const float* __restrict__ a_edge, float slope, float drop_p, float drop_scale, u64 seed,
        u64 offset, const GRAD_T* __restrict__ grad, GATHERED(values),
        const float* __restrict__ att_src, const float* __restrict__ att_dst, int att_step,
        const float* __restrict__ d_a_dst, D_VALUES_T* __restrict__ d_values,
        float* __restrict__ d_a_src, float* __restrict__ d_a_edge, float* __restrict__ part_whole,
        float* __restrict__ part_scored, float* __restrict__ part_lost) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Edges g = {nbr, position, eid, packed, a_edge, slope};
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const float src_term = on ? a_src[(u64)it.row * H + head] : 0.f;
    const Gathered<ROW_T> rows_of_values = ROWS_OF(values);
    float lost = 0.f;
    Row whole, scored;
    clear_row(whole);
    clear_row(scored);
    const ByScore weights = {sh.pair};
#if EDGE_GRAD
    Row v;
    load_values(at, rows_of_values, it.row, v);
    float d_src[KH];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) d_src[kh] = 0.f;
#endif
#if DIRECT && !EDGE_GRAD
    lost = gather_direct(at, it, g, drop, sh, a_src, grad, whole, scored);
#else
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? nbr[base + at.lane] : 0;
        lost += weight_tile(g, drop, sh, base, n, j, head, on, src_term);
        gather_tile<GRAD_T, !EDGE_GRAD, STEPS>(at, j, n, weights, grad, whole, scored);
#if EDGE_GRAD
        edge_grad_tile(at, g, sh, base, n, j, grad, v, d_a_edge, d_src);
#endif
        __syncwarp();
    }
#if EDGE_GRAD
    lost = -to_phase_1(at, sh.weight, d_src);
#else
    lost = sum_same_head(lost);
#endif
#endif
    sum_slots(whole);
    if (!EDGE_GRAD) sum_slots(scored);
    if (it.chunk >= 0) {
        if (at.slot == 0) {
            store_row(at, part_whole, it.chunk, whole);
            if (!EDGE_GRAD) store_row(at, part_scored, it.chunk, scored);
        }
        if (at.lane < HT && on) part_lost[(u64)it.chunk * H + head] = lost;
    } else {
        const Finish f = {rows_of_values, att_src, att_dst, att_step, d_a_dst, d_values,
                          d_a_src};
        finish(at, sh, it.row, lost, whole, scored, f);
    }
}

// One warp per split source.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, GATHERED(values),
      const float* __restrict__ att_src, const float* __restrict__ att_dst, int att_step,
      const float* __restrict__ d_a_dst, D_VALUES_T* __restrict__ d_values,
      float* __restrict__ d_a_src, const float* __restrict__ part_whole,
      const float* __restrict__ part_scored, const float* __restrict__ part_lost) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    float lost = 0.f;
    if (head < H)
        for (int c = at.lane / HT; c < row.z; c += 32 / HT)
            lost += part_lost[(u64)(row.y + c) * H + head];
    lost = sum_same_head(lost);
    Row whole, scored;
    add_chunks(at, row.y, row.z, part_whole, whole);
    if (!EDGE_GRAD) add_chunks(at, row.y, row.z, part_scored, scored);
    const Finish f = {ROWS_OF(values), att_src, att_dst, att_step, d_a_dst, d_values, d_a_src};
    finish(at, sh, row.x, lost, whole, scored, f);
}
