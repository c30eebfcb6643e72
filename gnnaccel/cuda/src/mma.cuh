// Warp-wide matrix products on the tensor cores: the instructions, and the same sums on the CPU for
// the tests.
//
// Fragments of m16n8k(2*P*4), where a 32-bit register holds P elements (1 of tf32, 2 of f16 or
// bf16), g = lane / 4 and c = lane % 4:
//   A  register r: row g + 8 * (r & 1), elements k = P * (c + 4 * (r >> 1)) and on
//   B  register r: column g,            elements k = P * (c + 4 * r) and on
//   C  value e:    row g + 8 * (e >> 1), column 2 * c + (e & 1)
#pragma once
#include "common.cuh"

#if defined(GNNACCEL_EMULATE) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800)
#define TENSOR_CORES 1
#else
#define TENSOR_CORES 0  // sm_75 knows only a smaller product, and none of bf16 or tf32
#endif

// tf32 keeps the upper 19 bits of a float, and the tensor cores ignore the rest: adding half of the
// last place that is kept rounds to nearest, ties away from zero. (The instruction for it is five
// on sm_90.)
__device__ __forceinline__ u32 with_half(float x) { return __float_as_uint(x) + 0x1000u; }

// For the tensor cores. Infinity and NaN stay, the largest numbers become infinite.
__device__ __forceinline__ u32 tf32_from_float(float x) { return fabsf(x) < infinity()
                                                          ? with_half(x) : __float_as_uint(x); }

// x = big + small to 22 bits. Returns small before its rounding: not finite where x is not or big
// would not be, which has to be computed in another way.
__device__ __forceinline__ float split_in_two(float x, u32& big, u32& small) {
    big = with_half(x) & ~0x1fffu;
    const float rest = x - __uint_as_float(big);
    small = with_half(rest);
    return rest;
}

// The product for elements of Type; float stands for tf32.
template <typename Type> struct Mma;

#if defined(GNNACCEL_EMULATE)

// Tensor cores round the sum towards zero. The products are exact in double, and nearly so is their
// sum.
__device__ __forceinline__ float rounded_to_zero(double sum) {
    const float x = (float)sum;
    return isfinite(x)
        && fabs((double)x) > fabs(sum) ? __uint_as_float(__float_as_uint(x) - 1u) : x;
}

__device__ __forceinline__ float element(float, u32 word,
                                         int) { return __uint_as_float(word & ~0x1fffu); }
template <typename Type> __device__ __forceinline__ float element(Type, u32 word, int which) {
    const Type x = {(u16)(word >> (16 * which))};
    return to_float(x);
}

// One host thread runs all lanes, so they can meet in a static array.
template <typename Type> struct Mma {
    static inline void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                const float (&c)[4]) {
        constexpr int P = 4 / sizeof(Type);
        static u32 all[32][32][6];
        const int lane = threadIdx.x & 31;
        u32 (&words)[32][6] = all[threadIdx.x >> 5];
        for (int r = 0; r < 4; ++r) words[lane][r] = a[r];
        for (int r = 0; r < 2; ++r) words[lane][4 + r] = b[r];
        __syncwarp();
        float result[4];
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + 8 * (e >> 1), column = 2 * (lane % 4) + (e & 1);
            double sum = c[e];
            for (int k = 0; k < 8 * P; ++k) {
                const int q = k / P;
                const u32 x = words[(row & 7) * 4 + (q & 3)][(row >> 3) + 2 * (q >> 2)];
                const u32 y = words[column * 4 + (q & 3)][4 + (q >> 2)];
                sum += (double)element(Type(), x, k % P) * (double)element(Type(), y, k % P);
            }
            result[e] = rounded_to_zero(sum);
        }
        __syncwarp();
        for (int e = 0; e < 4; ++e) d[e] = result[e];
    }
};

#elif TENSOR_CORES

#define MMA_OF(Type, shape, kinds)                                                                                  \
    template <> struct Mma<Type> {                                                                                  \
        static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],        \
                                                        const float (&c)[4]) {                                      \
            asm volatile("mma.sync.aligned." shape ".row.col.f32." kinds ".f32 "                                    \
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                               \
                : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                    \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),           \
                  "f"(c[2]), "f"(c[3]));                                                                            \
        }                                                                                                           \
    };
MMA_OF(float, "m16n8k8", "tf32.tf32")
MMA_OF(f16, "m16n8k16", "f16.f16")
MMA_OF(bf16, "m16n8k16", "bf16.bf16")
#undef MMA_OF

#endif

// Count (2 or 4) matrices of 8 x 8 halves out of shared memory, turned on the way: lane 8 q + i
// names line i of matrix q, of 16 aligned bytes, and every lane gets the elements of lines 2 *
// (lane % 4) and the next, column lane / 4, of each matrix.
#if defined(GNNACCEL_EMULATE)
template <int Count, typename Half> inline void load_turned(const Half* line, u32 (&to)[Count]) {
    static const Half* all[32][32];
    const int lane = threadIdx.x & 31, column = lane >> 2, i = 2 * (lane & 3);
    const Half* (&lines)[32] = all[threadIdx.x >> 5];
    if ((u64)line % 16) __trap();
    lines[lane] = line;
    __syncwarp();
    for (int q = 0; q < Count; ++q)
        to[q] = lines[8 * q + i][column].bits | (u32)lines[8 * q + i + 1][column].bits << 16;
    __syncwarp();
}
#elif TENSOR_CORES
template <typename Half> __device__ __forceinline__ void load_turned(const Half* line,
                                                                     u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((u32)__cvta_generic_to_shared(line)) : "memory");
}
template <typename Half> __device__ __forceinline__ void load_turned(const Half* line,
                                                                     u32 (&to)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"((u32)__cvta_generic_to_shared(line)) : "memory");
}
#endif

// d += a b for int8, m16n8k32, in fragments as above with P = 4 and whole numbers. It wraps round
// beyond 32 bits.
#if defined(GNNACCEL_EMULATE)
inline void multiply_int8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static u32 all[32][32][6];
    const int lane = threadIdx.x & 31;
    u32 (&words)[32][6] = all[threadIdx.x >> 5];
    for (int r = 0; r < 4; ++r) words[lane][r] = a[r];
    for (int r = 0; r < 2; ++r) words[lane][4 + r] = b[r];
    __syncwarp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e >> 1), column = 2 * (lane % 4) + (e & 1);
        for (int q = 0; q < 8; ++q)
            d[e] = __dp4a((int)words[(row & 7) * 4 + (q & 3)][(row >> 3) + 2 * (q >> 2)],
                          (int)words[column * 4 + (q & 3)][4 + (q >> 2)], d[e]);
    }
    __syncwarp();
}
#elif TENSOR_CORES
__device__ __forceinline__ void multiply_int8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
// sm_75: the same out of four products of 8 x 8 x 16, whose fragments are halves of these.
__device__ __forceinline__ void multiply_int8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int half = i & 1, step = i >> 1;
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(d[2 * half]), "+r"(d[2 * half + 1])
                     : "r"(a[half + 2 * step]), "r"(b[step]));
    }
}
#endif
