// Rows of floats into formats of fewer bytes, in one pass over memory.
//
//   rows:    int8 [rows, STRIDE] and one fp32 scale per row: x[r, c] ~ scale[r] * data[r, c], scale
//   = (largest |x|) / 127
//   narrow:  fp32 -> bf16, rounded stochastically
//
// W channels of a row are read as packs of VEC by LANES lanes, PACKS each; KEEP of those stay in
// registers between the search for the largest and the rounding, wider rows are read twice. A slot
// takes ROWS rows at a time, to have their loads in flight together. What lies between W and STRIDE
// becomes zero.
//
// A row of zeros has scale 0, as has one whose scale would be denormal. A row with an infinity or a
// NaN has scale NaN and data 0: it is NaN to whoever reads it, as its sums would have been; `flag`
// becomes 1.
//
// STOCHASTIC rounds t to floor(t + u), u uniform in steps of 2^-16 (Gupta et al., "Deep learning
// with limited numerical precision"): the mean over draws is t, and whole numbers stay what they
// are. Otherwise to nearest, ties to even.
#include "int8_rows.cuh"

#define WARPS 4
#define SLOTS (32 / LANES)
#define PER_DRAW 8  // 16-bit numbers in one draw

struct Random {
    u64 seed, offset, counter;
    u32 word[4];

    __device__ __forceinline__ void refill() {
        const uint4 r = philox<7>(seed, offset, counter++);
        word[0] = r.x;
        word[1] = r.y;
        word[2] = r.z;
        word[3] = r.w;
    }
    // 16 random bits; `n` is known when compiling.
    __device__ __forceinline__ u32 bits(int n) const { return n & 1 ? word[n / 2] >> 16
                                                       : word[n / 2] & 0xffffu; }
};

// The low byte is the rounded number, in two's complement.
__device__ __forceinline__ u32 round_to_byte(float x, float inverse, u32 bits) {
#if STOCHASTIC
    const float u = ((float)bits - 32767.5f) * 1.52587890625e-5f;  // u - 1/2
    const float t = fminf(fmaxf(fmaf(x, inverse, u), -127.f), 127.f);
    return __float_as_uint(__fadd_rn(t, MAGIC));
#else
    return nearest_byte(x, inverse);
#endif
}

__device__ __forceinline__ void store_bytes(signed char* p, const u32 (&q)[VEC]) {
#if VEC == 4
    *reinterpret_cast<u32*>(p) = __byte_perm(__byte_perm(q[0], q[1], 0x0040),
                                             __byte_perm(q[2], q[3], 0x0040), 0x5410);
#elif VEC == 2
    *reinterpret_cast<u16*>(p) = (u16)__byte_perm(q[0], q[1], 0x0040);
#else
    *p = (signed char)q[0];
#endif
}

struct Rows {
    const IN_T* x;
    signed char* data;
    int rows, lane;  // of LANES

    __device__ __forceinline__ int channel(int k) const { return (k * LANES + lane) * VEC; }

    __device__ __forceinline__ void load(i64 row, int k, float (&v)[VEC]) const {
        if (row < rows && channel(k) < W) {
            load_pack<IN_T, VEC>(x + row * W + channel(k), v);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = 0.f;
        }
    }
    __device__ __forceinline__ void store(i64 row, int k, const float (&v)[VEC], float inverse,
                                          const Random& random, int first) const {
        if (row >= rows || channel(k) >= STRIDE) return;
        u32 q[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            q[i] = inverse != 0.f
                ? round_to_byte(v[i], inverse, STOCHASTIC ? random.bits(first + i) : 0u) : 0u;
        store_bytes(data + row * STRIDE + channel(k), q);
    }
};

__device__ __forceinline__ u32 larger(u32 top, const float (&v)[VEC]) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) top = max(top, magnitude(v[i]));
    return top;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rows(int count, const IN_T* __restrict__ x, signed char* __restrict__ data,
     float* __restrict__ scale, int* __restrict__ flag, u64 seed, u64 offset) {
    const i64 warp = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int slot = (threadIdx.x & 31) / LANES;
    const Rows all = {x, data, count, (int)(threadIdx.x & 31) % LANES};
    const u64 thread = (u64)blockIdx.x * (32 * WARPS) + threadIdx.x;
    read_key(seed, offset);
    Random random = {seed, offset, thread * (ROWS * PACKS)};
    float v[ROWS][KEEP][VEC];
    u32 top[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < KEEP; ++k) all.load((warp * ROWS + r) * SLOTS + slot, k, v[r][k]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = (warp * ROWS + r) * SLOTS + slot;
        top[r] = 0u;
#pragma unroll
        for (int k = 0; k < KEEP; ++k) top[r] = larger(top[r], v[r][k]);
        for (int k = KEEP; k < PACKS; ++k) {
            float again[VEC];
            all.load(row, k, again);
            top[r] = larger(top[r], again);
        }
#pragma unroll
        for (int w = LANES / 2; w > 0; w /= 2)
            top[r] = max(top[r], __shfl_xor_sync(FULL_WARP, top[r], w));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = (warp * ROWS + r) * SLOTS + slot;
        const float inverse = settle(row, count, all.lane, top[r], scale, flag);
#pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            const int n = (r * KEEP + k) * VEC % PER_DRAW;
            if (STOCHASTIC && n == 0) random.refill();
            all.store(row, k, v[r][k], inverse, random, n);
        }
        for (int k = KEEP; k < PACKS; ++k) {
            float again[VEC];
            all.load(row, k, again);
            // beyond the counters of what was kept
            Random other = {seed, offset, (thread * ROWS + r) * PACKS + k};
            if (STOCHASTIC) other.refill();
            all.store(row, k, again, inverse, other, 0);
        }
    }
}

// What is above the upper 16 bits is the chance of the next number away from zero. Infinities and
// NaN stay.
__device__ __forceinline__ u16 bf16_stochastic(float x, u32 bits) {
    const u32 b = __float_as_uint(x);
    return (b & 0x7f800000u) == 0x7f800000u ? bf16_from_float(x).bits : (u16)((b + bits) >> 16);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
narrow(i64 count, const float* __restrict__ x, u16* __restrict__ out, u64 seed, u64 offset) {
    const i64 thread = (i64)blockIdx.x * (32 * WARPS) + threadIdx.x, first = thread * PER_DRAW;
    if (first >= count) return;
    read_key(seed, offset);
    Random random = {seed, offset, (u64)thread};
    random.refill();
    if (first + PER_DRAW <= count) {
        float low[4], high[4];
        load_pack<float, 4>(x + first, low);
        load_pack<float, 4>(x + first + 4, high);
        PackWord<bf16, 8> u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u.pack.v[i].bits = bf16_stochastic(low[i], random.bits(i));
            u.pack.v[i + 4].bits = bf16_stochastic(high[i], random.bits(i + 4));
        }
        *reinterpret_cast<uint4*>(out + first) = u.word;
        return;
    }
#pragma unroll
    for (int i = 0; i < PER_DRAW; ++i)
        if (first + i < count) out[first + i] = bf16_stochastic(x[first + i], random.bits(i));
}
