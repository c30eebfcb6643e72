// The entries of each row of a graph's index arrays in ascending order of their places.
#include "structure.cuh"
#include "row_order.cuh"

// heavy, counters: as `split` made them. The first `heavy_blocks` * `windows` blocks have the rows
// longer than chunk_edges <= COMPARED. In the other blocks each warp has GROUP rows, and passes
// over those.
extern "C" __global__ void __launch_bounds__(THREADS)
order(const OFF_T* __restrict__ indptr, int rows, int chunk_edges,
      const int* __restrict__ counters, const int4* __restrict__ heavy, int heavy_blocks,
      int windows, const Entry* __restrict__ in, int* __restrict__ other_out,
      OFF_T* __restrict__ place_out) {
    DYNAMIC_SHARED(shared);
    const Entries entries = {in, other_out, place_out};
    const int block = (int)blockIdx.x, first = heavy_blocks * windows;
    if (block < first) {
        order_heavy(entries, indptr, heavy, counters[1], block % heavy_blocks, heavy_blocks,
                    block / heavy_blocks, shared);
        return;
    }
    order_block(entries, indptr, (i64)(block - first) * (THREADS / 32 * GROUP), rows, chunk_edges,
                shared);
}
