// Sums of outer products of features of edges with rows of the other end.
//
//   forward, merge: out[r, k, d] = sum over r's edges e of feature(e, k) x[other(e), d], or their
//                   mean
//   backward:       at each edge e of row r, the gradients of its features and of its row:
//                   edge_grad[place(e), k] = sum over d of grad[r, k, d] x[other(e), d]
//                   x_grad[place(e), d] = sum over k of grad[r, k, d] feature(e, k)
//
// feature(e, k) is edge[place(e), k]. Where there are more `terms` than `features`, the last one is
// 1, so that the last row of a sum is that of the rows alone.
//
// A block of SIDE x SIDE threads does one row or chunk: forward a tile of RK * SIDE features by
// RD * SIDE channels, of which each thread keeps RK x RD in registers; backward all of it, KEYS
// features at a time.
#include "items.cuh"

#define THREADS (SIDE * SIDE)
#define TILE_K (RK * SIDE)
#define TILE_D (RD * SIDE)
#define TILES_D ((D + TILE_D - 1) / TILE_D)
#define STAGED 16  // edges of a step forward
#define KEYS 32
#define EDGES 8         // of a step backward
#define STRIDE (D | 1)  // odd: threads read one column of many rows
#define OWN ((EDGES * D + THREADS - 1) / THREADS)

struct Features {
    const float* edge;
    const OFF_T* place;
    int features, terms;

    __device__ __forceinline__ float at(OFF_T position, int k) const {
        return k < features ? edge[(u64)place[position] * features + k] : k < terms ? 1.f : 0.f;
    }
};

__device__ __forceinline__ float share_of(OFF_T count, int mean) {
    return mean && count > 0 ? 1.f / (float)count : 1.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
forward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
        const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
        const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
        const float* __restrict__ edge, int features, int terms, const float* __restrict__ x,
        int mean, float* __restrict__ out, float* __restrict__ part) {
    DYNAMIC_SHARED(shared);
    float* const keys = (float*)shared;              // [STAGED][TILE_K]
    float* const values = keys + STAGED * TILE_K;    // [STAGED][TILE_D]
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(blockIdx.x, rows, indptr, split, it)) return;
    const Features given = {edge, place, features, terms};
    const int k0 = blockIdx.y / TILES_D * TILE_K, d0 = blockIdx.y % TILES_D * TILE_D;
    const int key = threadIdx.x / SIDE, channel = threadIdx.x % SIDE;
    float sum[RK][RD];
#pragma unroll
    for (int i = 0; i < RK; ++i)
#pragma unroll
        for (int j = 0; j < RD; ++j) sum[i][j] = 0.f;
    for (OFF_T first = it.begin; first < it.end; first += STAGED) {
        const int count = it.end - first < STAGED ? (int)(it.end - first) : STAGED;
        __syncthreads();  // the last step's rows were read
        for (int i = threadIdx.x; i < count * TILE_K; i += THREADS)
            keys[i] = given.at(first + i / TILE_K, k0 + i % TILE_K);
        for (int i = threadIdx.x; i < count * TILE_D; i += THREADS) {
            const int d = d0 + i % TILE_D;
            values[i] = d < D ? x[(u64)other[first + i / TILE_D] * D + d] : 0.f;
        }
        __syncthreads();
        for (int e = 0; e < count; ++e) {
            float v[RD];
#pragma unroll
            for (int j = 0; j < RD; ++j) v[j] = values[e * TILE_D + j * SIDE + channel];
#pragma unroll
            for (int i = 0; i < RK; ++i) {
                const float k = keys[e * TILE_K + i * SIDE + key];
#pragma unroll
                for (int j = 0; j < RD; ++j) sum[i][j] = fmaf(k, v[j], sum[i][j]);
            }
        }
    }
    const bool whole = it.chunk < 0;
    const float share = whole ? share_of(it.end - it.begin, mean) : 1.f;
    float* const to = (whole ? out + (u64)it.row * terms * D : part + (u64)it.chunk * terms * D);
#pragma unroll
    for (int i = 0; i < RK; ++i)
#pragma unroll
        for (int j = 0; j < RD; ++j) {
            const int k = k0 + i * SIDE + key, d = d0 + j * SIDE + channel;
            if (k < terms && d < D) to[(u64)k * D + d] = sum[i][j] * share;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
merge(const int* __restrict__ counters, const int4* __restrict__ heavy,
      const OFF_T* __restrict__ indptr, const float* __restrict__ part, int terms, int mean,
      float* __restrict__ out) {
    if ((int)blockIdx.x >= counters[1]) return;
    const int4 row = heavy[blockIdx.x];
    const float share = share_of(indptr[row.x + 1] - indptr[row.x], mean);
    const int size = terms * D;
    for (int i = blockIdx.y * THREADS + threadIdx.x; i < size; i += gridDim.y * THREADS) {
        float sum = 0.f;
        for (int c = 0; c < row.z; ++c) sum += part[(u64)(row.y + c) * size + i];
        out[(u64)row.x * size + i] = sum * share;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
backward(const OFF_T* __restrict__ indptr, const int* __restrict__ other,
         const OFF_T* __restrict__ place, int rows, const int* __restrict__ counters,
         const int2* __restrict__ chunks, int chunk_edges, int chunk_slots,
         const float* __restrict__ edge, int features, int terms, const float* __restrict__ x,
         int mean, const float* __restrict__ grad, float* __restrict__ edge_grad,
         float* __restrict__ x_grad) {
    DYNAMIC_SHARED(shared);
    float* const keys = (float*)shared;           // [EDGES][KEYS]
    float* const values = keys + EDGES * KEYS;    // [EDGES][D]
    float* const grads = values + EDGES * D;      // [KEYS][STRIDE]
    const Split split = {counters, chunks, chunk_edges, chunk_slots};
    Item it;
    if (!item_at(blockIdx.x, rows, indptr, split, it)) return;
    const Features given = {edge, place, features, terms};
    const float share = share_of(indptr[it.row + 1] - indptr[it.row], mean);
    const float* const of_row = grad + (u64)it.row * terms * D;
    for (OFF_T first = it.begin; first < it.end; first += EDGES) {
        const int count = it.end - first < EDGES ? (int)(it.end - first) : EDGES;
        float sum[OWN];
#pragma unroll
        for (int j = 0; j < OWN; ++j) sum[j] = 0.f;
        for (int k0 = 0; k0 < terms; k0 += KEYS) {
            const int some = terms - k0 < KEYS ? terms - k0 : KEYS;
            __syncthreads();  // what the last step staged was read
            if (k0 == 0)
                for (int i = threadIdx.x; i < count * D; i += THREADS)
                    values[i] = x[(u64)other[first + i / D] * D + i % D];
            for (int i = threadIdx.x; i < count * KEYS; i += THREADS)
                keys[i] = given.at(first + i / KEYS, k0 + i % KEYS);
            for (int i = threadIdx.x; i < some * D; i += THREADS)
                grads[i / D * STRIDE + i % D] = of_row[(u64)k0 * D + i] * share;
            __syncthreads();
            for (int i = threadIdx.x; edge_grad && i < count * KEYS; i += THREADS) {
                const int e = i / KEYS, k = i % KEYS;
                if (k0 + k >= features) continue;
                float dot = 0.f;
                for (int d = 0; d < D; ++d)
                    dot = fmaf(grads[k * STRIDE + d], values[e * D + d], dot);
                edge_grad[(u64)place[first + e] * features + k0 + k] = dot;
            }
            if (x_grad) {
#pragma unroll
                for (int j = 0; j < OWN; ++j) {
                    const int i = j * THREADS + threadIdx.x;
                    if (i >= count * D) continue;
                    for (int k = 0; k < some; ++k)
                        sum[j] = fmaf(keys[i / D * KEYS + k], grads[k * STRIDE + i % D], sum[j]);
                }
            }
        }
        if (x_grad) {
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const int i = j * THREADS + threadIdx.x;
                if (i < count * D) x_grad[(u64)place[first + i / D] * D + i % D] = sum[j];
            }
        }
    }
}
