// The direct way through additive attention: where few lanes share a head (LH <= 4, as for 8 heads
// of 8), each lane scores the edges for its own heads while the rows are in flight. It repeats each
// exponential LH times and saves both the change of mapping and its barriers. Measured on an H200
// against the two phases: docs/notes/attention.md.
#pragma once
#include "additive.cuh"

// Adds the row for head kh to two sums, each with a weight of its own; without TWO to the first
// alone.
template <bool TWO, typename T>
__device__ __forceinline__ void add_twice(int kh, float one, float other, const Loaded<T>& v,
                                          Row& first, Row& second) {
#pragma unroll
    for (int k = kh * KV; k < (kh + 1) * KV; ++k) {
        float some[VEC];
        v.pack(k, some);
#pragma unroll
        for (int x = 0; x < VEC; ++x) {
            first[k][x] = fmaf(one, some[x], first[k][x]);
            if (TWO) second[k][x] = fmaf(other, some[x], second[k][x]);
        }
    }
}

// Sums a per-head number over the slots and hands it to the lanes of phase 1 (head = lane % HT)
// through `shared` [HT].
__device__ __forceinline__ float to_phase_1(const Lanes& at, float* shared, float (&x)[KH]) {
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1) x[kh] += __shfl_xor_sync(FULL_WARP, x[kh], w);
        if (at.slot == 0 && at.lh == 0) shared[kh * HL + at.hl] = x[kh];
    }
    __syncwarp();
    return shared[at.lane % HT];
}

// One step: UNROLL edges in each slot with a running softmax per slot.
struct Running {
    float m[KH], minus[KH], plus[KH];
};

template <bool Whole>
__device__ __forceinline__ void direct_step(const Lanes& at, const Scores& scores,
                                            const Dropout& drop, const float (&dst)[KH],
                                            const ROW_T* rows, OFF_T base, int first, int n, int j,
                                            float scale, Running& run, Row& minus, Row& plus) {
    Loaded<ROW_T> v[UNROLL];
    float s[UNROLL][KH], own[UNROLL];
    OFF_T position[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int e = first + u * SLOTS + at.slot;
        const int src = __shfl_sync(FULL_WARP, j, e & 31);
        position[u] = base + e;
        const bool on = Whole || e < n;
        v[u].load_or_nothing(at, rows, (u32)src, on);
        own[u] = INT8 ? __shfl_sync(FULL_WARP, scale, e & 31) : 1.f;
#pragma unroll
        for (int kh = 0; kh < KH; ++kh)
            s[u][kh] = on && at.has(kh) ? scores.at(base + e, src, at.head(kh), dst[kh]) : NEG_INF;
    }
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        float top = run.m[kh], factor[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) top = fmaxf(top, s[u][kh]);
        draw<UNROLL>(at, drop, position, at.head(kh), factor);
        const float base_score = reference(top), fade = exp_above(run.m[kh], base_score);
        run.m[kh] = top;
        run.minus[kh] *= fade;
        run.plus[kh] *= fade;
#pragma unroll
        for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                minus[k][x] *= fade;
                if (TRAIN) plus[k][x] *= fade;
            }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool up = s[u][kh] > 0.f;
            const bool on = Whole || first + u * SLOTS + at.slot < n;
            const float p = on ? exp_above(s[u][kh], base_score) : 0.f;
            run.plus[kh] += up ? p : 0.f;
            run.minus[kh] += up ? 0.f : p;
            const float w = INT8 ? p * factor[u] * own[u] : p * factor[u];
            add_twice<TRAIN != 0>(kh, TRAIN && up ? 0.f : w, up ? w : 0.f, v[u], minus, plus);
        }
    }
}

// `fold` of additive_fold.cuh, with the same results in the same places.
__device__ __forceinline__ void fold_direct(const Lanes& at, const Item& it, const Scores& scores,
                                            const Dropout& drop, const Scratch& sh, const int* col,
                                            const Gathered<ROW_T>& values, Softmax& run, Row& minus,
                                            Row& plus) {
    Running mine;
    float dst[KH];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        mine.m[kh] = NEG_INF;
        mine.minus[kh] = mine.plus[kh] = 0.f;
        dst[kh] = scores.dst(it.row, at.head(kh));
    }
    clear_row(minus);
    clear_row(plus);
    for (OFF_T base = it.begin; base < it.end; base += TILE) {
        const int n = it.end - base < TILE ? (int)(it.end - base) : TILE;
        const int j = at.lane < n ? col[base + at.lane] : 0;
        const float scale = INT8 && at.lane < n ? values.scale[j] : 0.f;
        each_step<true>(n, [&](auto kind, int first) {
            direct_step<decltype(kind)::whole>(at, scores, drop, dst, values.rows, base, first, n,
                                               j, scale, mine, minus, plus);
        });
    }
    float top[KH];
#pragma unroll
    // the slots' softmaxes into one; a slot that saw no edge counts nothing
    for (int kh = 0; kh < KH; ++kh) {
        top[kh] = mine.m[kh];
#pragma unroll
        for (int w = ROW_LANES; w < 32; w <<= 1)
            top[kh] = fmaxf(top[kh], __shfl_xor_sync(FULL_WARP, top[kh], w));
        const float f = exp_above(mine.m[kh], reference(top[kh]));
        mine.minus[kh] *= f;
        mine.plus[kh] *= f;
        if (at.slot != 0) top[kh] = 0.f;  // to_phase_1 sums over the slots
#pragma unroll
        for (int k = kh * KV; k < (kh + 1) * KV; ++k)
#pragma unroll
            for (int x = 0; x < VEC; ++x) {
                minus[k][x] *= f;
                plus[k][x] *= f;
            }
    }
    sum_slots(minus);
    if (TRAIN) sum_slots(plus);
    run.m = to_phase_1(at, sh.weight, top);
    run.minus = to_phase_1(at, sh.weight + HT, mine.minus);
    run.plus = to_phase_1(at, sh.weight + 2 * HT, mine.plus);
}
