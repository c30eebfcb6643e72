// Shared by all kernel files: storage types, vector memory access, warp reductions, random numbers.
//
// Names of template parameters are CamelCase, so that no -D definition (ALL_CAPS) can replace them.
//
// It has no #include, so that NVRTC can compile it without any CUDA header on the machine. Three
// compilers read it: NVRTC, nvcc, and g++ for the tests' CPU emulation (GNNACCEL_EMULATE).
#ifndef GNNACCEL_COMMON_CUH
#define GNNACCEL_COMMON_CUH

// Short names of our own: uint32_t and friends are not there under NVRTC, and glibc owns uint,
// ushort, ulong.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// All shared memory is dynamic: its size depends on run-time shapes, and the emulation can then
// guard its end. 16 bytes of alignment are enough for the widest vector access.
#ifdef GNNACCEL_EMULATE
#define DYNAMIC_SHARED(name) unsigned char* const name = emulated_shared_memory()
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// A mask of all lanes: blocks have a multiple of 32 threads, and no lane leaves before the last
// collective.
#define FULL_WARP 0xffffffffu

// INFINITY and NAN are macros of <math.h>, which NVRTC does not have.
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fc00000); }

// ---- storage types
// -------------------------------------------------------------------------------------------------
// Own structs instead of __half and __nv_bfloat16: those need headers. They only store; arithmetic
// is in fp32.

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
// a whole number; what it is to be multiplied with stands elsewhere
struct q8 { signed char bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(q8 x) { return (float)x.bits; }

#ifdef GNNACCEL_EMULATE
__device__ __forceinline__ float to_float(f16 x) {
    const u32 sign = (u32)(x.bits & 0x8000u) << 16;
    const u32 magnitude = x.bits & 0x7fffu;
    // inf or NaN: the exponent becomes all ones again, the payload keeps its top bits
    if (magnitude >= 0x7c00u)
        return __uint_as_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude < 0x0400u)   // zero or denormal: an exact multiple of 2^-24
        return __uint_as_float(sign | __float_as_uint((float)magnitude * 5.9604644775390625e-8f));
    return __uint_as_float(sign | ((magnitude << 13) + 0x38000000u));  // exponent bias 15 -> 127
}

__device__ __forceinline__ f16 f16_from_float(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 magnitude = bits & 0x7fffffffu;
    u32 half;
    if (magnitude > 0x7f800000u) {
        half = 0x7fffu;                                   // any NaN; the GPU makes this one too
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;                                   // 65520 and above round to infinity
    } else if (magnitude >= 0x38800000u) {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    } else if (magnitude < 0x33000000u) {
        half = 0u;                                        // below half of the smallest denormal
    } else {
        // 14 .. 24: brings the value to units of 2^-24
        const u32 shift = 126u - (magnitude >> 23);
        const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const u32 rest = mantissa & ((1u << shift) - 1u);
        const u32 tie = 1u << (shift - 1u);
        half = mantissa >> shift;
        half += (rest > tie || (rest == tie && (half & 1u))) ? 1u : 0u;
    }
    f16 result = {(u16)(half | ((bits >> 16) & 0x8000u))};
    return result;
}
#else
__device__ __forceinline__ float to_float(f16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}

__device__ __forceinline__ f16 f16_from_float(float x) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
}
#endif

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ bf16 bf16_from_float(float x) {
    bf16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
    const u32 bits = __float_as_uint(x);
    // A NaN must not reach the addition: its carry could turn it into an infinity or a zero.
    result.bits = (bits & 0x7fffffffu) > 0x7f800000u ? (u16)0x7fffu
                                                     : (u16)((bits + 0x7fffu
                                                              + ((bits >> 16) & 1u)) >> 16);
#endif
    return result;
}

// from_float<Type>(x): round to nearest, ties to even.
template <typename Type> struct Rounding;
#define ROUND_TO(Type, function) \
    template <> struct Rounding<Type> { static __device__ __forceinline__ Type from(float x) { return function; } };
ROUND_TO(float, x)
ROUND_TO(f16, f16_from_float(x))
ROUND_TO(bf16, bf16_from_float(x))
#undef ROUND_TO
template <typename Type> __device__ __forceinline__ Type from_float(float x) { return Rounding<Type>::from(x); }

// ---- vector memory access
// The compiler splits a struct copy into element accesses where it cannot prove the alignment, hence
// the built-in vector types: one instruction per pack. The pointer must be aligned to
// sizeof(Type) * Count.

template <int Bytes> struct Word;
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <typename Type, int Count> struct alignas(sizeof(Type) * Count) Pack {
    static_assert(Count == 1 || Count == 2 || Count == 4 || Count == 8 || Count == 16,
                  "a pack holds 1 to 16 elements");
    static_assert(sizeof(Type) * Count <= 16, "one memory instruction moves at most 16 bytes");
    Type v[Count];
};

template <typename Type, int Count> union PackWord {
    typename Word<sizeof(Type) * Count>::type word;
    Pack<Type, Count> pack;
};

template <typename Type, int Count> struct Unpack {
    static __device__ __forceinline__ void into(const PackWord<Type, Count>& u,
                                                float (&out)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i) out[i] = to_float(u.pack.v[i]);
    }
};

// Four bytes by four permutations: a byte plus 128 becomes the low bits of the float 2^23 + byte +
// 128, and one subtraction, which is exact, leaves the byte. Conversion instructions take several
// times as long.
__device__ __forceinline__ void unpack_bytes(u32 word, float* out) {
    const u32 shifted = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = __fsub_rn(__uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7650u | i)),
                           8388736.f);
}
template <> struct Unpack<q8, 4> {
    static __device__ __forceinline__ void into(const PackWord<q8, 4>& u,
                                                float (&out)[4]) { unpack_bytes(u.word, out); }
};
template <> struct Unpack<q8, 8> {
    static __device__ __forceinline__ void into(const PackWord<q8, 8>& u, float (&out)[8]) {
        unpack_bytes(u.word.x, out);
        unpack_bytes(u.word.y, out + 4);
    }
};
template <> struct Unpack<q8, 16> {
    static __device__ __forceinline__ void into(const PackWord<q8, 16>& u, float (&out)[16]) {
        unpack_bytes(u.word.x, out);
        unpack_bytes(u.word.y, out + 4);
        unpack_bytes(u.word.z, out + 8);
        unpack_bytes(u.word.w, out + 12);
    }
};

// Through the read-only path: p must not be written by the same kernel.
template <typename Type,
    int Count> __device__ __forceinline__ void load_pack(const Type* p, float (&out)[Count]) {
    PackWord<Type, Count> u;
    u.word = __ldg(reinterpret_cast<const typename Word<sizeof(Type) * Count>::type*>(p));
    Unpack<Type, Count>::into(u, out);
}

template <typename Type,
    int Count> __device__ __forceinline__ void store_pack(Type* p, const float (&in)[Count]) {
    PackWord<Type, Count> u;
#pragma unroll
    for (int i = 0; i < Count; ++i) u.pack.v[i] = from_float<Type>(in[i]);
    *reinterpret_cast<typename Word<sizeof(Type) * Count>::type*>(p) = u.word;
}

// As many packs as it takes: of int8 a lane has up to 16 channels, of which results are four times
// as long.
template <typename Type,
    int Count> __device__ __forceinline__ void load_packs(const Type* p, float (&out)[Count]) {
    constexpr int Step = sizeof(Type) * Count > 16 ? 16 / (int)sizeof(Type) : Count;
    if constexpr (Step == Count) load_pack<Type, Count>(p, out);
    else
#pragma unroll
        for (int i = 0; i < Count; i += Step)
            load_pack<Type, Step>(p + i, reinterpret_cast<float(&)[Step]>(out[i]));
}

template <typename Type,
    int Count> __device__ __forceinline__ void store_packs(Type* p, const float (&in)[Count]) {
    constexpr int Step = sizeof(Type) * Count > 16 ? 16 / (int)sizeof(Type) : Count;
    if constexpr (Step == Count) store_pack<Type, Count>(p, in);
    else
#pragma unroll
        for (int i = 0; i < Count; i += Step)
            store_pack<Type, Step>(p + i, reinterpret_cast<const float(&)[Step]>(in[i]));
}

// ---- warp reductions
// Over aligned groups of Width lanes; every lane of the group gets the same bits (the xor pattern
// adds the same pairs in every lane). All 32 lanes of the warp must call, also with Width below 32.

template <int Width> __device__ __forceinline__ float lane_sum(float x) {
    static_assert(Width >= 1 && Width <= 32 && (Width & (Width - 1)) == 0,
                  "Width is a power of two up to 32");
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// `lane_sum` of each of Count numbers, with the same bits. Each step first hands half of the numbers
// to one half of the lanes and half to the other, so that four sums over 32 lanes take 22
// instructions, 10 of them shuffles, and not 40 and 20.
template <int Width, int Count> __device__ __forceinline__ void lane_sums(float (&x)[Count]) {
    static_assert((Count & (Count - 1)) == 0, "Count is a power of two");
    if constexpr (Width < 8 || Width < Count) {
#pragma unroll
        for (int i = 0; i < Count; ++i) x[i] = lane_sum<Width>(x[i]);
    } else {
        constexpr int Each = Width / Count;  // lanes that end up with one number
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = Count / 2; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const bool upper = lane & (half * Each);
                const float given = upper ? x[i] : x[i + half];
                x[i] = (upper ? x[i + half] : x[i])
                    + __shfl_xor_sync(FULL_WARP, given, half * Each);
            }
        const float sum = lane_sum<Each>(x[0]);
#pragma unroll
        for (int i = 0; i < Count; ++i)
            x[i] = __shfl_sync(FULL_WARP, sum, (lane & ~(Width - 1)) + i * Each);
    }
}

// A NaN loses against a number, as in fmaxf.
template <int Width> __device__ __forceinline__ float lane_max(float x) {
    static_assert(Width >= 1 && Width <= 32 && (Width & (Width - 1)) == 0,
                  "Width is a power of two up to 32");
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// ---- sums kept twofold
// For inner products, once per node, whose difference from another number is what counts: lo
// collects what the roundings of hi lost (Ogita, Rump and Oishi, "Accurate sum and dot product"), so
// hi + lo is as if summed with twice the digits.

struct Twofold {
    float hi, lo;
};

__device__ __forceinline__ void add_to(Twofold& s, float x) {
    const float sum = s.hi + x, part = sum - s.hi;
    s.lo += (s.hi - (sum - part)) + (x - part);
    s.hi = sum;
}

__device__ __forceinline__ void add_product(Twofold& s, float a, float b) {
    const float product = __fmul_rn(a, b);  // never fused with the addition below
    s.lo += fmaf(a, b, -product);
    add_to(s, product);
}

// As for a float, with the same bits in every lane: an addition's error does not depend on the
// order of the two.
template <int Width> __device__ __forceinline__ Twofold lane_sum(Twofold s) {
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2) {
        const float hi = __shfl_xor_sync(FULL_WARP, s.hi, step);
        s.lo += __shfl_xor_sync(FULL_WARP, s.lo, step);
        add_to(s, hi);
    }
    return s;
}

// ---- random numbers
// Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): four words that depend
// only on the three inputs, so that forward and backward draw the same numbers without storing
// them. Counter words, low to high: counter, counter >> 32, offset, offset >> 32; key words: seed,
// seed >> 32.

template <int Rounds> __device__ __forceinline__ uint4 philox(u64 seed, u64 offset, u64 counter) {
    uint4 c = make_uint4((u32)counter, (u32)(counter >> 32), (u32)offset, (u32)(offset >> 32));
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < Rounds; ++round) {
        const u32 high0 = __umulhi(0xd2511f53u, c.x), low0 = 0xd2511f53u * c.x;
        const u32 high1 = __umulhi(0xcd9e8d57u, c.z), low1 = 0xcd9e8d57u * c.z;
        c = make_uint4(high1 ^ c.y ^ key0, low1, high0 ^ c.w ^ key1, low0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return c;
}

// A key of all ones in `offset` means that seed and offset lie in memory, at the address `seed`. So
// each replay of a CUDA graph reads new ones.
__device__ __forceinline__ void read_key(u64& seed, u64& offset) {
    if (offset == ~0ull) {
        const u64* key = (const u64*)seed;
        seed = key[0];
        offset = key[1];
    }
}

// The top 24 bits: all 32 would round up to 1.0f at the upper end.
__device__ __forceinline__ float uniform01(u32 x) { return (float)(x >> 8) * 5.9604644775390625e-8f;
                                                    }

#endif
