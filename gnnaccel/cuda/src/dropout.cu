// The dropout factors of all edges, as the attention kernels draw them: only for second derivatives
// and for tests.
#include "items.cuh"

extern "C" __global__ void __launch_bounds__(256)
factors(i64 edges, float drop_p, float drop_scale, u64 seed, u64 offset, float* __restrict__ out) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n >= edges * H) return;
    const Dropout drop = dropout(drop_p, drop_scale, seed, offset);
    out[n] = drop.factor((OFF_T)(n / H), (int)(n % H));
}
