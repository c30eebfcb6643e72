// Rows between pinned host memory and the device, which reads and writes the former in place: rows
// are copied by number, as words of BYTES bytes. Neighbouring lanes take neighbouring words, so
// that a row crosses the link in whole packets, and each has several words under way.
#include "common.cuh"

#define IN_FLIGHT 4
typedef Word<BYTES>::type Piece;

// Word `n` of the rows that lie close together, and its place among the rows by number.
__device__ __forceinline__ u64 place(const int* __restrict__ ids, u32 n, u32 words) {
    const u32 row = n / words;
    return (u64)ids[row] * words + (n - row * words);
}

// close[r] = far[ids[r]]; `count` words in all
extern "C" __global__ void __launch_bounds__(256)
fetch_rows(u32 count, u32 words, const int* __restrict__ ids, const Piece* __restrict__ far,
           Piece* __restrict__ close) {
    const u32 stride = gridDim.x * 256;
    u32 n = blockIdx.x * 256 + threadIdx.x;
    for (; n < count && count - n > (IN_FLIGHT - 1) * stride; n += IN_FLIGHT * stride) {
        Piece held[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) held[u] = far[place(ids, n + u * stride, words)];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) close[n + u * stride] = held[u];
    }
    for (; n < count; n += stride) close[n] = far[place(ids, n, words)];
}

// far[ids[r]] = close[r]; no number may stand twice
extern "C" __global__ void __launch_bounds__(256)
put_rows(u32 count, u32 words, const int* __restrict__ ids, const Piece* __restrict__ close,
         Piece* __restrict__ far) {
    const u32 stride = gridDim.x * 256;
    for (u32 n = blockIdx.x * 256 + threadIdx.x; n < count; n += stride)
        far[place(ids, n, words)] = close[n];
}
