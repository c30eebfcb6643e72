// SMMF: one row or chunk folded in two phases, scores by edge, sums by feature (see additive.cuh).
#pragma once
#include "additive.cuh"

// Phase 1 with a running softmax. KNOWN (PMF) skips the running part: m is what the row's scores
// are taken relative to then. `scale` is that of lane e's row, for int8: it joins the weight, not
// the softmax.
template <bool KNOWN>
__device__ __forceinline__ void score_tile(const Scores& scores, const Dropout& drop,
                                           const Scratch& sh, OFF_T base, int n, int j, float scale,
                                           int head, bool on, float dst_term, Softmax& run) {
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
        const float fade = exp_above(run.m, reference(top));
        run.minus *= fade;
        run.plus *= fade;
        run.m = top;
        if (lane < HT) sh.factor[h] = fade;
    }
    const float base_score = KNOWN ? run.m : reference(run.m);
#pragma unroll
    for (int it = 0; it < HT; ++it) {
        if (it * EDGES_PER_STEP < n) {
            const int e = it * EDGES_PER_STEP + lane / HT;
            float p = e < n && on ? exp_above(s[it], base_score) : 0.f;
            const float own = INT8 ? __shfl_sync(FULL_WARP, scale, e) : 1.f;
            const bool up = s[it] > 0.f;
            if (up) run.plus += p;
            else run.minus += p;
            if (e < n && on) p *= drop.factor(base + e, head);
            if (INT8) p *= own;
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

// Folds one item; on return `minus` and `plus` hold the whole warp's sums and `run` the head's
// statistics.
template <bool KNOWN>
__device__ __forceinline__ void fold(const Lanes& at, const Item& it, const Scores& scores,
                                     const Dropout& drop, const Scratch& sh, const int* col,
                                     const Gathered<ROW_T>& values, int head, bool on, Softmax& run,
                                     Row& minus, Row& plus) {
    const float dst_term = scores.dst(it.row, head);
    clear_row(minus);
    clear_row(plus);
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? col[base + at.lane] : 0;
        const float scale = INT8 && at.lane < n ? values.scale[j] : 0.f;
        score_tile<KNOWN>(scores, drop, sh, base, n, j, scale, head, on, dst_term, run);
        if (!KNOWN && base != it.begin) {
            fade_row(at, sh.factor, minus);
            if (TRAIN) fade_row(at, sh.factor, plus);
        }
        const BySign<TRAIN != 0> weights = {sh.weight};
        gather_tile<ROW_T, TRAIN != 0, false>(at, j, n, weights, values.rows, minus, plus);
        __syncwarp();
    }
    sum_slots(minus);
    if (TRAIN) sum_slots(plus);
    run.minus = sum_same_head(run.minus);
    run.plus = sum_same_head(run.plus);
}
