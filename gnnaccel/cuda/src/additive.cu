// Additive attention, forward (GAT): s = leaky_relu(a_src[j] + a_dst[i] + a_edge[e]), softmax over
// the edges into i, then the weighted sum of the rows.
//
// With TRAIN the kernel also leaves what backward needs: the softmax's numbers (small: see
// `save_softmax`), and the parts of the output from edges with z > 0 and from the others (plus,
// minus: [rows, H*D] fp32).
//
// Values in int8 (INT8) bring their scales into the weights; the scores' terms, the softmax and the
// sums are fp32.
//
// Kernels: `forward` (whole rows and chunks in one launch), `merge` (split rows). Two ways to fold
// a row: the two phases of SMMF, and DIRECT (additive_direct.cuh) where few lanes share a head, so
// that each can as well score for itself.
#include "additive_direct.cuh"
#include "additive_fold.cuh"

// `run` belongs to the lane's phase-1 head, the rows to its phase-2 heads: the divisor crosses by
// shared memory.
__device__ __forceinline__ void finish(const Lanes& at, const Scratch& sh, int row, bool edges,
                                       int head, bool on, const Softmax& run, Row& minus, Row& plus,
                                       const Out& o) {
    const float inverse = reciprocal(run.sum(), edges);
    if (at.lane < HT) {
        sh.factor[at.lane] = inverse;
        if (TRAIN && on) save_softmax(o.small, o.rows, row, head, run, inverse);
    }
    __syncwarp();
    fade_row(at, sh.factor, minus);
    if (TRAIN) fade_row(at, sh.factor, plus);
    write_parts(at, row, minus, plus, o);
}

// Partial results of chunks: minus and plus [chunks, H*D], stats [chunks, 3, H] = m and the two
// sums.
struct Partial {
    float *minus, *plus, *stats;
};

__device__ __forceinline__ void leave(const Lanes& at, int chunk, int head, bool on,
                                      const Softmax& run, const Row& minus, const Row& plus,
                                      const Partial& part) {
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
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ col,
        const OFF_T* __restrict__ eid, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const float* __restrict__ a_src, const float* __restrict__ a_dst,
        const float* __restrict__ a_edge, float slope, float drop_p, float drop_scale, u64 seed,
        u64 offset, GATHERED(values), OUT_T* __restrict__ out, const float* __restrict__ bias,
        float* __restrict__ small, float* __restrict__ plus_out, float* __restrict__ minus_out,
        float* __restrict__ part_minus, float* __restrict__ part_plus,
        float* __restrict__ part_stats) {
    DYNAMIC_SHARED(shared);
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    const Scratch sh(shared);
    const Scores scores = {a_src, a_dst, a_edge, eid, slope};
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    const int head = at.tile + at.lane % HT;
    const bool on = head < H;
    const Gathered<ROW_T> rows_of_values = ROWS_OF(values);
    Softmax run = {NEG_INF, 0.f, 0.f};
    Row minus, plus;
#if DIRECT
    fold_direct(at, it, scores, drop, sh, col, rows_of_values, run, minus, plus);
#else
    fold<false>(at, it, scores, drop, sh, col, rows_of_values, head, on, run, minus, plus);
#endif
    if (it.chunk >= 0) {
        const Partial part = {part_minus, part_plus, part_stats};
        leave(at, it.chunk, head, on, run, minus, plus, part);
    } else {
        const Out o = {out, bias, small, plus_out, minus_out, rows};
        finish(at, sh, it.row, it.end > it.begin, head, on, run, minus, plus, o);
    }
}

// One warp per split row: `heavy` holds (row, first chunk, chunks, unused).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy, int rows,
      OUT_T* __restrict__ out, const float* __restrict__ bias, float* __restrict__ small,
      float* __restrict__ plus_out, float* __restrict__ minus_out,
      const float* __restrict__ part_minus, const float* __restrict__ part_plus,
      const float* __restrict__ part_stats) {
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
    const Out o = {out, bias, small, plus_out, minus_out, rows};
    finish(at, sh, row.x, true, head, on, run, minus, plus, o);
}
