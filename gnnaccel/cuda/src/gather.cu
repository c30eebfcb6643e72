// The floor that every aggregation is measured against: gather the rows once along the CSC, add
// them up, nothing else.
#include "items.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
row_gather(const OFF_T* __restrict__ indptr, const int* __restrict__ col, int rows,
           const int* __restrict__ counters, const int2* __restrict__ chunks, int chunk_edges,
           int chunk_slots, const ROW_T* __restrict__ x, float* __restrict__ out,
           float* __restrict__ part) {
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(warp_id(), rows, indptr, split, it)) return;
    const Lanes at;
    Row sum;
    clear_row(sum);
    for (OFF_T base = it.begin; base < it.end; base += 32) {
        const int n = it.end - base < 32 ? (int)(it.end - base) : 32;
        const int j = at.lane < n ? col[base + at.lane] : 0;
        for (int first = 0; first < n; first += SLOTS * UNROLL) {
            Row v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int e = first + u * SLOTS + at.slot;
                load_row(at, x, (u64)__shfl_sync(FULL_WARP, j, e & 31), e < n, v[u]);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
#pragma unroll
                for (int k = 0; k < PACKS; ++k)
#pragma unroll
                    for (int c = 0; c < VEC; ++c) sum[k][c] += v[u][k][c];
        }
    }
    sum_slots(sum);
    if (at.slot == 0) {
        if (it.chunk < 0) store_row(at, out, it.row, sum);
        else store_row(at, part, it.chunk, sum);
    }
}
