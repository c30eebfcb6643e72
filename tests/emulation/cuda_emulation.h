// The part of CUDA C++ that gnnaccel's kernels use, for g++. Force-included in front of a .cu file
// by emulator.py.
//
// It has no #include: kernels may use only what NVRTC offers without headers, and a lean prologue
// compiles fast. Everything that waits or schedules lives in emulation_runtime.cpp, compiled once.
#pragma once

#define __global__ __attribute__((used, noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __constant__ static
#define __align__(n) alignas(n)
// An attribute that g++ does not know and ignores; emulator.py finds it in the preprocessed text.
#define __launch_bounds__(...) __attribute__((emulated_launch_bounds(__VA_ARGS__)))
// Static shared memory would be invisible to the poison and the canary.
#define __shared__ ERROR_all_shared_memory_is_dynamic__use_DYNAMIC_SHARED

// ---- built-in types and variables
// ----------------------------------------------------------------------------------
#define EMU_VECTOR(T, name, align2, align4)                                                                     \
    struct name##1 { T x; };                                                                                    \
    struct alignas(align2) name##2 { T x, y; };                                                                 \
    struct name##3 { T x, y, z; };                                                                              \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                           \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                  \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                          \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char, 2, 4)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned, uint, 8, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(long long, longlong, 16, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

struct dim3 { unsigned x, y, z; };
extern "C" {
extern uint3 emu_thread, emu_block;
extern dim3 emu_block_dim, emu_grid_dim;
unsigned char* emulated_shared_memory();
unsigned long long emu_collective(int op, unsigned mask, unsigned long long bits, int operand,
                                  int width, const char* file, int line);
unsigned emu_activemask();
void emu_barrier(const char* file, int line);
void emu_yield();
void emu_fail_at(const char* what, const char* file, int line);
}
// const views: a kernel that assigns to threadIdx must not compile
#define threadIdx (static_cast<const uint3&>(emu_thread))
#define blockIdx (static_cast<const uint3&>(emu_block))
#define blockDim (static_cast<const dim3&>(emu_block_dim))
#define gridDim (static_cast<const dim3&>(emu_grid_dim))
constexpr int warpSize = 32;

// ---- synchronisation
// -----------------------------------------------------------------------------------------------
// Keep in step with the table of names in emulation_runtime.cpp.
enum { EMU_SHFL, EMU_SHFL_UP, EMU_SHFL_DOWN, EMU_SHFL_XOR, EMU_BALLOT, EMU_ANY, EMU_ALL,
       EMU_SYNCWARP, EMU_BARRIER };

// The source position of the caller, taken as default arguments: lanes that meet must stand at the
// same one.
#define EMU_WHERE const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()

#define EMU_SHUFFLES(T)                                                                                         \
    inline T emu_shuffle(int op, unsigned mask, T v, int operand, int width, const char* file, int line) {      \
        unsigned long long bits = 0;                                                                            \
        __builtin_memcpy(&bits, &v, sizeof v);                                                                  \
        bits = emu_collective(op, mask, bits, operand, width, file, line);                                      \
        __builtin_memcpy(&v, &bits, sizeof v);                                                                  \
        return v;                                                                                               \
    }                                                                                                           \
    inline T __shfl_sync(unsigned m, T v, int lane, int width = 32, EMU_WHERE) {                                \
        return emu_shuffle(EMU_SHFL, m, v, lane, width, emu_file, emu_line); }                                  \
    inline T __shfl_up_sync(unsigned m, T v, unsigned delta, int width = 32, EMU_WHERE) {                       \
        return emu_shuffle(EMU_SHFL_UP, m, v, (int)delta, width, emu_file, emu_line); }                         \
    inline T __shfl_down_sync(unsigned m, T v, unsigned delta, int width = 32, EMU_WHERE) {                     \
        return emu_shuffle(EMU_SHFL_DOWN, m, v, (int)delta, width, emu_file, emu_line); }                       \
    inline T __shfl_xor_sync(unsigned m, T v, int lanes, int width = 32, EMU_WHERE) {                           \
        return emu_shuffle(EMU_SHFL_XOR, m, v, lanes, width, emu_file, emu_line); }
EMU_SHUFFLES(int)
EMU_SHUFFLES(unsigned)
EMU_SHUFFLES(long)
EMU_SHUFFLES(unsigned long)
EMU_SHUFFLES(long long)
EMU_SHUFFLES(unsigned long long)
EMU_SHUFFLES(float)
EMU_SHUFFLES(double)
#undef EMU_SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int p, EMU_WHERE) {
    return (unsigned)emu_collective(EMU_BALLOT, mask, p != 0, 0, 32, emu_file, emu_line); }
inline int __any_sync(unsigned mask, int p, EMU_WHERE) {
    return (int)emu_collective(EMU_ANY, mask, p != 0, 0, 32, emu_file, emu_line); }
inline int __all_sync(unsigned mask, int p, EMU_WHERE) {
    return (int)emu_collective(EMU_ALL, mask, p != 0, 0, 32, emu_file, emu_line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_WHERE) {
    emu_collective(EMU_SYNCWARP, mask, 0, 0, 32, emu_file, emu_line); }
inline void __syncthreads(EMU_WHERE) { emu_barrier(emu_file, emu_line); }
inline unsigned __activemask() { return emu_activemask(); }
inline void __nanosleep(unsigned) { emu_yield(); }
// One host thread runs everything, so memory is in order; only the compiler must not move accesses.
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { asm volatile("" ::: "memory"); }
inline void __threadfence_system() { asm volatile("" ::: "memory"); }
inline void __trap(EMU_WHERE) { emu_fail_at("__trap()", emu_file, emu_line); }

// ---- memory and atomics
// --------------------------------------------------------------------------------------------
template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, T v) { *p = v; }
template <typename T> inline void __stcs(T* p, T v) { *p = v; }

#define EMU_ATOMIC(name, T, expression)                                                                         \
    inline T name(T* p, T v) { const T old = *p; *p = (expression); __threadfence(); return old; }
#define EMU_ATOMICS(T)                                                                                          \
    EMU_ATOMIC(atomicMax, T, old > v ? old : v) EMU_ATOMIC(atomicMin, T, old < v ? old : v)                     \
    EMU_ATOMIC(atomicOr, T, old | v) EMU_ATOMIC(atomicAnd, T, old & v) EMU_ATOMIC(atomicXor, T, old ^ v)        \
    EMU_ATOMIC(atomicAdd, T, old + v) EMU_ATOMIC(atomicExch, T, v)                                              \
    inline T atomicCAS(T* p, T expected, T v) {                                                                 \
        const T old = *p; if (old == expected) *p = v; __threadfence(); return old; }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
EMU_ATOMIC(atomicAdd, float, old + v)
EMU_ATOMIC(atomicAdd, double, old + v)
EMU_ATOMIC(atomicExch, float, v)
EMU_ATOMIC(atomicSub, int, old - v)
EMU_ATOMIC(atomicSub, unsigned, old - v)
EMU_ATOMIC(atomicInc, unsigned, old >= v ? 0u : old + 1u)
EMU_ATOMIC(atomicDec, unsigned, old == 0u || old > v ? v : old - 1u)
#undef EMU_ATOMICS
#undef EMU_ATOMIC

// ---- arithmetic
// ----------------------------------------------------------------------------------------------------
extern "C" {
float sqrtf(float) noexcept, expf(float) noexcept, exp2f(float) noexcept, logf(float) noexcept,
    log2f(float) noexcept;
float log1pf(float) noexcept, expm1f(float) noexcept, tanhf(float) noexcept, fabsf(float) noexcept;
float floorf(float) noexcept, ceilf(float) noexcept, rintf(float) noexcept, truncf(float) noexcept;
float erff(float) noexcept, sinf(float) noexcept, cosf(float) noexcept, powf(float, float) noexcept;
float fmaf(float, float, float) noexcept, fmaxf(float, float) noexcept,
    fminf(float, float) noexcept;
float copysignf(float, float) noexcept, ldexpf(float, int) noexcept;
double sqrt(double) noexcept, exp(double) noexcept, log(double) noexcept, fabs(double) noexcept;
double fma(double, double, double) noexcept, fmax(double, double) noexcept,
    fmin(double, double) noexcept;
int abs(int) noexcept;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf_sign(x) != 0; }
inline bool isinf(double x) { return __builtin_isinf_sign(x) != 0; }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

#define EMU_MINMAX(T)                                                                                           \
    inline T min(T a, T b) { return b < a ? b : a; }                                                            \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= ((x >> i) & 1u) << (31 - i);
    return r;
}
// Each nibble of the selector picks one of the eight bytes of (high, low); its top bit, which
// repeats a byte's sign, is not used.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = ((unsigned long long)high << 32) | low;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i)
        r |= (unsigned)((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
    return r;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += (signed char)(a >> (8 * i)) * (signed char)(b >> (8 * i));
    return sum;
}
inline unsigned __umulhi(unsigned a,
                         unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64); }

#define EMU_BITS(name, To, From)                                                                                \
    inline To name(From x) { To r; __builtin_memcpy(&r, &x, sizeof r); return r; }
EMU_BITS(__float_as_int, int, float)
EMU_BITS(__int_as_float, float, int)
EMU_BITS(__float_as_uint, unsigned, float)
EMU_BITS(__uint_as_float, float, unsigned)
EMU_BITS(__double_as_longlong, long long, double)
EMU_BITS(__longlong_as_double, double, long long)
#undef EMU_BITS
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

// ---- from void** to a kernel's parameters
// --------------------------------------------------------------------------
namespace emu {
// One letter per parameter for the argument check: p pointer, f floating, i integer or bool, ?
// anything else.
template <typename T> struct Kind {
    static constexpr char value =
        __is_same(T, float) || __is_same(T, double) ? 'f' : __is_class(T)
            || __is_union(T) ? '?' : 'i';
};
template <typename T> struct Kind<T*> { static constexpr char value = 'p'; };

template <typename... A> struct Signature {
    static int describe(char* kinds, int* sizes) {
        const char k[] = {Kind<A>::value..., 0};
        const int s[] = {(int)sizeof(A)..., 0};
        for (unsigned i = 0; i < sizeof...(A); ++i) { kinds[i] = k[i]; sizes[i] = s[i]; }
        return (int)sizeof...(A);
    }
};
template <int... I> struct Indices {};
template <typename... A> Signature<A...> signature(void (*)(A...)) { return {}; }
template <typename... A, int... I> void unpack(void (*kernel)(A...), void** a, Indices<I...>) {
    kernel(*static_cast<A*>(a[I])...); }
template <typename... A> void call(void (*kernel)(A...), void** a) {
    unpack(kernel, a, Indices<__integer_pack(sizeof...(A))...>{}); }
constexpr int first(int n, ...) { return n; }
}  // namespace emu
