// Sums of weighted rows straight from a list of edges in any order, for graphs that come once and
// do not pay for index arrays.
//
//   add_edges:  out[into[e], :] += weight[e] scale[from[e]] x[from[e], :] over all edges e;
//   count[into[e]] += 1
//   average:    out[r, :] /= max(count[r], 1), and inverse[r] = 1 / max(count[r], 1)
//
// LANES lanes share a run of edges, one after the other, with VEC channels each; blockIdx.y walks
// the channels that do not fit. As long as edges in a row end in the same node their sum stays in
// registers, so lists grouped by destination, as samplers make them, take few atomics; others take
// one per edge, as the hosts' do. A null weight, scale or count is left out. Edges with ids outside
// the graph are skipped and raise `alarm`, pinned memory that the host reads whenever it likes.
#include "common.cuh"

#define THREADS 256
#define PACKS (WIDTH / VEC)
#define UNROLL 4

template <int Count> __device__ __forceinline__ void add_pack(float* p, const float (&v)[Count]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (Count == 4) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
        return;
    }
    if constexpr (Count == 2) {
        asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" :: "l"(p), "f"(v[0]),
                     "f"(v[1]) : "memory");
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < Count; ++i) atomicAdd(p + i, v[i]);
}

// The sum of the edges of a run that end in `row`, so far; -1: of none yet.
struct Sum {
    i64 row;
    int edges;
    float value[VEC];
};

__device__ __forceinline__ void flush(const Sum& s, float* out, float* count, int pack) {
    if (s.row < 0) return;
    if (pack < PACKS) add_pack<VEC>(out + s.row * WIDTH + pack * VEC, s.value);
    if (count && pack == 0) atomicAdd(count + s.row, (float)s.edges);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_edges(const INDEX_T* __restrict__ from, const INDEX_T* __restrict__ into, i64 edges,
          i64 num_from, i64 num_into, int run, const float* __restrict__ weight,
          const float* __restrict__ scale, const float* __restrict__ x, float* __restrict__ out,
          float* __restrict__ count, volatile int* __restrict__ alarm) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) / LANES * run;
    const i64 end = first + run < edges ? first + run : edges;
    const int pack = blockIdx.y * LANES + threadIdx.x % LANES;
    Sum s = {-1, 0, {}};
    for (i64 e = first; e < end; e += UNROLL) {
        i64 source[UNROLL], row[UNROLL];
        float factor[UNROLL], value[UNROLL][VEC];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool on = e + u < end;
            source[u] = on ? (i64)from[e + u] : 0;
            row[u] = on ? (i64)into[e + u] : -1;
            factor[u] = on && weight ? weight[e + u] : 1.f;
            if (on && (source[u] < 0 || source[u] >= num_from || row[u] < 0
                       || row[u] >= num_into)) {
                *alarm = 1;
                row[u] = -1;
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row[u] < 0 || pack >= PACKS) continue;
            load_pack<float, VEC>(x + source[u] * WIDTH + pack * VEC, value[u]);
            if (scale) factor[u] *= scale[source[u]];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row[u] < 0) continue;
            if (row[u] != s.row) {
                flush(s, out, count, pack);
                s = {row[u], 0, {}};
            }
            ++s.edges;
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                s.value[i] += pack < PACKS ? factor[u] * value[u][i] : 0.f;
        }
    }
    flush(s, out, count, pack);
}

extern "C" __global__ void __launch_bounds__(THREADS)
average(float* __restrict__ out, const float* __restrict__ count, i64 rows,
        float* __restrict__ inverse) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= rows * PACKS) return;
    const i64 row = at / PACKS;
    const int channel = (int)(at % PACKS) * VEC;
    const float edges = count[row] > 1.f ? count[row] : 1.f;
    float v[VEC];
    float* p = out + row * WIDTH + channel;
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = p[i] / edges;
    store_pack<float, VEC>(p, v);
    if (channel == 0) inverse[row] = 1.f / edges;
}
