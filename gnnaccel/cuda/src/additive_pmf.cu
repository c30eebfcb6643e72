// PMF for the long rows of additive attention: scores by edge over all chunks at once, the softmax
// settled before any feature row is read, then a balanced aggregation relative to the final maximum
// (after DF-GNN's parallelism-maximising fusion, without its arrays of the size of the edges:
// scores are computed again instead of kept).
#include "additive_fold.cuh"

// First: softmax statistics of the chunks of the long rows, edge-parallel; no feature row is
// touched.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
softmax_chunks(const OFF_T* __restrict__ indptr, const int* __restrict__ col,
               const OFF_T* __restrict__ eid,
           const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges,
           int chunk_slots, const float* __restrict__ a_src, const float* __restrict__ a_dst,
           const float* __restrict__ a_edge, float slope, float* __restrict__ part_stats) {
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
        const float top = fmaxf(run.m, s), base_score = reference(top);
        const float fade = exp_above(run.m, base_score), p = exp_above(s, base_score);
        run.minus = run.minus * fade + (s > 0.f ? 0.f : p);
        run.plus = run.plus * fade + (s > 0.f ? p : 0.f);
        run.m = top;
    }
    const float top = max_same_head(run.m), fade = exp_above(run.m, reference(top));
    run.minus = sum_same_head(run.minus * fade);
    run.plus = sum_same_head(run.plus * fade);
    if (at.lane < HT && on) {
        float* s = part_stats + (u64)it.chunk * 3 * H + head;
        s[0] = top;
        s[H] = run.minus;
        s[2 * H] = run.plus;
    }
}

// Second: their softmax as backward keeps it.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
softmax_merge(const int* __restrict__ counters, const int4* __restrict__ heavy, int rows,
              const float* __restrict__ part_stats, float* __restrict__ small) {
    DYNAMIC_SHARED(shared);
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    const Scratch sh(shared);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const Softmax run = merge_stats(at, row.y, row.z, head, on, sh, part_stats);
    if (at.lane < HT && on)
        save_softmax(small, rows, row.x, head, run, reciprocal(run.sum(), true));
}

// Third: aggregation of the chunks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
aggregate_chunks(const OFF_T* __restrict__ indptr, const int* __restrict__ col,
                 const OFF_T* __restrict__ eid, const int* __restrict__ counters,
                 const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
                 const float* __restrict__ a_src, const float* __restrict__ a_dst,
                 const float* __restrict__ a_edge, float slope, float drop_p, float drop_scale,
                 u64 seed, u64 offset, GATHERED(values), const float* __restrict__ small,
                 float* __restrict__ part_minus, float* __restrict__ part_plus) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), 0, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Scores scores = {a_src, a_dst, a_edge, eid, slope};
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    Softmax run = {on ? small[(u64)it.row * H + head] : 0.f, 0.f, 0.f};
    const Gathered<ROW_T> rows_of_values = ROWS_OF(values);
    Row minus, plus;
    fold<true>(at, it, scores, drop, sh, col, rows_of_values, head, on, run, minus, plus);
    if (at.slot == 0) {
        store_row(at, part_minus, it.chunk, minus);
        if (TRAIN) store_row(at, part_plus, it.chunk, plus);
    }
}

// Last: the sum of the chunks over the sum of the softmax.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
sum_chunks(const int* __restrict__ counters, const int4* __restrict__ heavy,
           OUT_T* __restrict__ out, const float* __restrict__ bias, const float* __restrict__ small,
           int rows, float* __restrict__ plus_out, float* __restrict__ minus_out,
           const float* __restrict__ part_minus, const float* __restrict__ part_plus) {
    const long long w = warp_id();
    if (w >= counters[1]) return;
    const int4 row = heavy[w];
    const Lanes at;
    Row minus, plus;
    add_chunks(at, row.y, row.z, part_minus, minus);
    if (TRAIN) add_chunks(at, row.y, row.z, part_plus, plus);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int h = at.head(k / KV);
        const float inverse = h < H ? small[((u64)rows + row.x) * H + h] : 0.f;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            minus[k][v] *= inverse;
            if (TRAIN) plus[k][v] *= inverse;
        }
    }
    const Out o = {out, bias, nullptr, plus_out, minus_out, 0};
    write_parts(at, row.x, minus, plus, o);
}
