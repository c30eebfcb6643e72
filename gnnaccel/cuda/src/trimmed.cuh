// Rows of results beside padded rows. Int8 rows are STRIDE bytes long, and where no head has a
// weight of its own a warp sums all of them, padding too; the result's rows have WIDTH channels,
// OUT_VEC of which are aligned to be moved at once. Rows in other formats have no padding.
#pragma once
#include "gathered.cuh"

#if INT8
template <typename T>
__device__ __forceinline__ void load_result(const Lanes& at, const T* base, u64 row, Row& r,
                                            bool on = true) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int i = 0; i < VEC; i += OUT_VEC) {
            const int c = at.offset(k / KV, k % KV) + i;
            float (&some)[OUT_VEC] = reinterpret_cast<float(&)[OUT_VEC]>(r[k][i]);
            if (on && at.owns(k / KV, k % KV) && c < WIDTH) {
                load_pack<T, OUT_VEC>(base + row * (u64)WIDTH + c, some);
            } else {
#pragma unroll
                for (int x = 0; x < OUT_VEC; ++x) some[x] = 0.f;
            }
        }
}

template <typename T>
__device__ __forceinline__ void store_result(const Lanes& at, T* base, u64 row, const Row& r) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int i = 0; i < VEC; i += OUT_VEC) {
            const int c = at.offset(k / KV, k % KV) + i;
            if (at.owns(k / KV, k % KV) && c < WIDTH)
                store_pack<T, OUT_VEC>(base + row * (u64)WIDTH + c,
                                       reinterpret_cast<const float(&)[OUT_VEC]>(r[k][i]));
        }
}
#else
template <typename T>
__device__ __forceinline__ void load_result(const Lanes& at, const T* base, u64 row, Row& r,
                                            bool on = true) {
    load_row(at, base, row, on, r);
}

template <typename T>
__device__ __forceinline__ void store_result(const Lanes& at, T* base, u64 row, const Row& r) {
    store_row(at, base, row, r);
}
#endif
