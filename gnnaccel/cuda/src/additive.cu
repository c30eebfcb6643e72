// Additive attention, forward (GAT): s = leaky_relu(a_src[j] + a_dst[i] + a_edge[e]), softmax over the edges into i, then
// the weighted sum of the rows. Scores are kept times log2(e), so exponentials are exp2.
//
// With TRAIN the kernel also leaves what backward needs: lse (base 2), the parts of the output from edges with z > 0 and
// from the others (plus, minus: [rows, H*D] fp32), and the shares of the softmax on them (mass [2, rows, H], plus first).
//
// Kernels: `forward` (SMMF and split rows in one launch), `merge` (split rows), and for PMF `lse_chunks`, `lse_merge`
// and `aggregate_chunks`: the softmax statistics of the long rows first, then their aggregation with final weights.
#include "additive.cuh"

struct Scores {
    const float *a_src, *a_dst, *a_edge;
    const OFF_T* eid;
    float slope;

    // Score of the tile's edge e (source row src) for `head`, times log2(e).
    __device__ __forceinline__ float at(OFF_T edge, int src, int head, float dst_term) const {
        float z = a_src[(u64)src * H + head] + dst_term;
#if EDGE
        z += a_edge[(u64)eid[edge] * H + head];
#endif
        return scaled_leaky(z, slope);
    }
    __device__ __forceinline__ float dst(int row, int head) const {
        return a_dst && head < H ? a_dst[(u64)row * H + head] : 0.f;
    }
};

// Phase 1 with a running softmax. `known` (PMF) skips the running part: m is the final log-sum-exp then.
template <bool KNOWN>
__device__ __forceinline__ void score_tile(const Scores& scores, const Dropout& drop, const Scratch& sh, OFF_T base, int n,
                                           int j, int head, bool on, float dst_term, Softmax& run) {
    const int lane = threadIdx.x & 31, h = lane % HT;
    float s[HT];
    float top = run.m;
#pragma unroll
    for (int it = 0; it < HT; ++it) {
        s[it] = NEG_INF;
        if (it * EDGES_PER_STEP < n) {
            const int e = it * EDGES_PER_STEP + lane / HT;
            const int src = __shfl_sync(FULL_WARP, j, e);
            if (e < n && on) s[it] = scores.at(base + e, src, head, dst_term);
            if (!KNOWN) top = fmaxf(top, s[it]);
        }
    }
    if (!KNOWN) {
        top = max_same_head(top);
        const float fade = exp2f(run.m - top);
        run.minus *= fade;
        run.plus *= fade;
        run.m = top;
        if (lane < HT) sh.factor[h] = fade;
    }
#pragma unroll
    for (int it = 0; it < HT; ++it) {
        if (it * EDGES_PER_STEP < n) {
            const int e = it * EDGES_PER_STEP + lane / HT;
            float p = e < n && on ? exp2f(s[it] - run.m) : 0.f;
            const bool up = s[it] > 0.f;
            if (up) run.plus += p;
            else run.minus += p;
            if (e < n && on) p *= drop.factor(base + e, head);
            sh.weight[e * HT + h] = up ? p : -p;
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void fade_row(const Lanes& at, const float* factor, Row& r) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) r[k][v] *= factor[(k / KV) * HL + at.hl];
}

// Folds one item; on return `minus` and `plus` hold the whole warp's sums and `run` the head's statistics.
template <bool KNOWN>
__device__ __forceinline__ void fold(const Lanes& at, const Item& it, const Scores& scores, const Dropout& drop,
                                     const Scratch& sh, const int* col, const ROW_T* rows, int head, bool on, Softmax& run,
                                     Row& minus, Row& plus) {
    const float dst_term = scores.dst(it.row, head);
    clear_row(minus);
    clear_row(plus);
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? col[base + at.lane] : 0;
        score_tile<KNOWN>(scores, drop, sh, base, n, j, head, on, dst_term, run);
        if (!KNOWN && base != it.begin) {
            fade_row(at, sh.factor, minus);
            if (TRAIN) fade_row(at, sh.factor, plus);
        }
        gather_tile<ROW_T, TRAIN != 0>(at, j, n, sh.weight, rows, minus, plus);
        __syncwarp();
    }
    sum_slots(minus);
    if (TRAIN) sum_slots(plus);
    run.minus = sum_same_head(run.minus);
    run.plus = sum_same_head(run.plus);
}

struct Out {
    OUT_T* out;
    float *lse, *plus, *minus, *mass;
    int rows;
};

// The output row, and under TRAIN its two parts.
__device__ __forceinline__ void write_parts(const Lanes& at, int row, Row& minus, const Row& plus, const Out& o) {
    if (at.slot != 0) return;
    if (TRAIN) {
        store_row(at, o.minus, row, minus);
        store_row(at, o.plus, row, plus);
        add_row(minus, plus);
    }
    store_row(at, o.out, row, minus);
}

// `run` belongs to the lane's phase-1 head, the rows to its phase-2 heads: the divisor crosses by shared memory.
__device__ __forceinline__ void finish(const Lanes& at, const Scratch& sh, int row, int head, bool on, const Softmax& run,
                                       Row& minus, Row& plus, const Out& o) {
    const float inverse = run.sum() > 0.f ? 1.f / run.sum() : run.sum();  // no edges: 0; NaN stays NaN
    if (at.lane < HT) {
        sh.factor[at.lane] = inverse;
        if (TRAIN && on) {
            const u64 i = (u64)row * H + head;
            o.lse[i] = run.m + log2f(run.sum());
            o.mass[i] = run.plus * inverse;
            o.mass[i + (u64)o.rows * H] = run.minus * inverse;
        }
    }
    __syncwarp();
    fade_row(at, sh.factor, minus);
    if (TRAIN) fade_row(at, sh.factor, plus);
    write_parts(at, row, minus, plus, o);
}

// Partial results of chunks: minus and plus [chunks, H*D], stats [chunks, 3, H] = m and the two sums.
struct Partial {
    float *minus, *plus, *stats;
};

__device__ __forceinline__ void leave(const Lanes& at, int chunk, int head, bool on, const Softmax& run, const Row& minus,
                                      const Row& plus, const Partial& part) {
    if (at.slot == 0) {
        store_row(at, part.minus, chunk, minus);
        if (TRAIN) store_row(at, part.plus, chunk, plus);
    }
    if (at.lane < HT && on) {
        float* s = part.stats + (u64)chunk * 3 * H + head;
        s[0] = run.m;
        s[H] = run.minus;
        s[2 * H] = run.plus;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ col, const OFF_T* __restrict__ eid, int rows,
        const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const float* __restrict__ a_src, const float* __restrict__ a_dst, const float* __restrict__ a_edge, float slope,
        float drop_p, float drop_scale, u64 seed, u64 offset, const ROW_T* __restrict__ values, OUT_T* __restrict__ out,
        float* __restrict__ lse, float* __restrict__ plus_out, float* __restrict__ minus_out,
        float* __restrict__ mass, float* __restrict__ part_minus, float* __restrict__ part_plus, float* __restrict__ part_stats) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Scores scores = {a_src, a_dst, a_edge, eid, slope};
    const Dropout drop = {drop_p, drop_scale, seed, offset};
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    Softmax run = {NEG_INF, 0.f, 0.f};
    Row minus, plus;
    fold<false>(at, it, scores, drop, sh, col, values, head, on, run, minus, plus);
    if (it.chunk >= 0) {
        const Partial part = {part_minus, part_plus, part_stats};
        leave(at, it.chunk, head, on, run, minus, plus, part);
    } else {
        const Out o = {out, lse, plus_out, minus_out, mass, rows};
        finish(at, sh, it.row, head, on, run, minus, plus, o);
    }
}

// One warp per split row: `heavy` holds (row, first chunk, chunks, unused).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, int rows, OUT_T* __restrict__ out,
      float* __restrict__ lse, float* __restrict__ plus_out, float* __restrict__ minus_out, float* __restrict__ mass,
      const float* __restrict__ part_minus, const float* __restrict__ part_plus, const float* __restrict__ part_stats) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const Softmax run = merge_stats(at, row.y, row.z, head, on, sh, part_stats);
    Row minus, plus;
    gather_chunks(at, row.y, row.z, sh, part_stats, part_minus, minus);
    if (TRAIN) gather_chunks(at, row.y, row.z, sh, part_stats, part_plus, plus);
    const Out o = {out, lse, plus_out, minus_out, mass, rows};
    finish(at, sh, row.x, head, on, run, minus, plus, o);
}

#if PMF
// PMF, first kernel: softmax statistics of the chunks of the long rows, edge-parallel; no feature row is touched.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lse_chunks(const OFF_T* __restrict__ indptr, const int* __restrict__ col, const OFF_T* __restrict__ eid,
           const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
           const float* __restrict__ a_src, const float* __restrict__ a_dst, const float* __restrict__ a_edge, float slope,
           float* __restrict__ part_stats) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), 0, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Scores scores = {a_src, a_dst, a_edge, eid, slope};
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const float dst_term = scores.dst(it.row, head);
    Softmax run = {NEG_INF, 0.f, 0.f};
    for (OFF_T base = it.begin + at.lane / HT; base < it.end; base += EDGES_PER_STEP) {
        const float s = on ? scores.at(base, col[base], head, dst_term) : NEG_INF;
        const float top = fmaxf(run.m, s), fade = exp2f(run.m - top), p = exp2f(s - top);
        run.minus = run.minus * fade + (s > 0.f ? 0.f : p);
        run.plus = run.plus * fade + (s > 0.f ? p : 0.f);
        run.m = top;
    }
    const float top = max_same_head(run.m), fade = run.sum() > 0.f ? exp2f(run.m - top) : run.sum();
    run.minus = sum_same_head(run.minus * fade);
    run.plus = sum_same_head(run.plus * fade);
    if (at.lane < HT && on) {
        float* s = part_stats + (u64)it.chunk * 3 * H + head;
        s[0] = top;
        s[H] = run.minus;
        s[2 * H] = run.plus;
    }
}

// PMF, second kernel: their log-sum-exp and mass.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
lse_merge(const int* __restrict__ counters, const int4* __restrict__ heavy, int rows, const float* __restrict__ part_stats,
          float* __restrict__ lse, float* __restrict__ mass) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const Softmax run = merge_stats(at, row.y, row.z, head, on, sh, part_stats);
    if (at.lane < HT && on) {
        const u64 i = (u64)row.x * H + head;
        lse[i] = run.m + log2f(run.sum());
        mass[i] = run.plus / run.sum();
        mass[i + (u64)rows * H] = run.minus / run.sum();
    }
}

// PMF, third kernel: aggregation of the chunks with final weights.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
aggregate_chunks(const OFF_T* __restrict__ indptr, const int* __restrict__ col, const OFF_T* __restrict__ eid,
                 const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
                 const float* __restrict__ a_src, const float* __restrict__ a_dst, const float* __restrict__ a_edge,
                 float slope, float drop_p, float drop_scale, u64 seed, u64 offset, const ROW_T* __restrict__ values,
                 const float* __restrict__ lse, float* __restrict__ part_minus, float* __restrict__ part_plus) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), 0, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Scores scores = {a_src, a_dst, a_edge, eid, slope};
    const Dropout drop = {drop_p, drop_scale, seed, offset};
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    Softmax run = {on ? lse[(u64)it.row * H + head] : 0.f, 0.f, 0.f};
    Row minus, plus;
    fold<true>(at, it, scores, drop, sh, col, values, head, on, run, minus, plus);
    if (at.slot == 0) {
        store_row(at, part_minus, it.chunk, minus);
        if (TRAIN) store_row(at, part_plus, it.chunk, plus);
    }
}

// PMF, last kernel: the sum of the chunks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
sum_chunks(const int* __restrict__ counters, const int4* __restrict__ heavy, OUT_T* __restrict__ out,
           float* __restrict__ plus_out, float* __restrict__ minus_out, const float* __restrict__ part_minus,
           const float* __restrict__ part_plus) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row minus, plus;
    add_chunks(at, row.y, row.z, part_minus, minus);
    if (TRAIN) add_chunks(at, row.y, row.z, part_plus, plus);
    const Out o = {out, nullptr, plus_out, minus_out, nullptr, 0};
    write_parts(at, row.x, minus, plus, o);
}
#endif
