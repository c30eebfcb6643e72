// How a warp lies over the features of one node: heads x width floats ("row"), read as packs of VEC
// values.
//
// From Python (cuda/runtime/launch.py) come H, D, VEC and four powers of two:
//   LH  lanes that share one head          KV  packs of that head per lane
//   HL  heads side by side in the lanes    KH  heads per lane, one after the other
// A row needs LH*HL lanes, so a warp holds SLOTS rows side by side. HT = HL*KH heads make a tile;
// blockIdx.y walks the tiles when a layer has more heads than fit.
#pragma once
#include "common.cuh"

#define HT (HL * KH)
#define NVEC (D / VEC)
#define ROW_LANES (LH * HL)
#define SLOTS (32 / ROW_LANES)
#define PACKS (KH * KV)
#define WARPS 4
#define LOG2E 1.4426950408889634f
#define NEG_INF (-infinity())
#define ULP 1.1920929e-7f  // the distance from 1 to the next float

// Of kernels that gather. Told how many blocks a multiprocessor is to hold, the compiler puts a
// step's loads together; untold (0), it spreads them over the step to save registers that nothing
// needs.
#define BOUNDS(blocks) __launch_bounds__(32 * WARPS, blocks)

// What scores are taken relative to: the maximum, or 0 while there is none. A score of -inf (an
// edge masked out) then weighs 0 also where only such edges have been seen; subtracting -inf from
// itself would give NaN.
__device__ __forceinline__ float reference(float top) { return top == NEG_INF ? 0.f : top; }

// 1 / sum of a softmax. No edges: 0, so that the row is zero. Edges, but all of them masked out:
// NaN, as the hosts have it.
__device__ __forceinline__ float reciprocal(float sum, bool edges) {
    return sum > 0.f ? 1.f / sum : sum == 0.f && !edges ? 0.f : quiet_nan();
}

// The last tile may be wider than what is left of the heads. Where all are full, the test folds away.
__device__ __forceinline__ bool is_head(int head) { return H % HT == 0 || head < H; }

struct Lanes {
    int lane, slot, hl, lh, tile;

    __device__ __forceinline__ Lanes() {
        lane = threadIdx.x & 31;
        slot = lane / ROW_LANES;
        hl = (lane % ROW_LANES) / LH;
        lh = lane % LH;
        tile = blockIdx.y * HT;
    }
    __device__ __forceinline__ int head(int kh) const { return tile + kh * HL + hl; }
    __device__ __forceinline__ bool has(int kh) const { return is_head(head(kh)); }
    __device__ __forceinline__ int vec(int kv) const { return kv * LH + lh; }
    // Padding lanes exist when H or D is not a power of two; the test folds away when both are.
    __device__ __forceinline__ bool owns(int kh, int kv) const {
        return has(kh) && (NVEC % LH == 0 || vec(kv) < NVEC);
    }
    __device__ __forceinline__ int offset(int kh,
                                          int kv) const { return head(kh) * D + vec(kv) * VEC; }
};

typedef float Row[PACKS][VEC];

__device__ __forceinline__ void clear_row(Row& r) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) r[k][v] = 0.f;
}

__device__ __forceinline__ void add_row(Row& a, const Row& b) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int x = 0; x < VEC; ++x) a[k][x] += b[k][x];
}

struct AllThere { static constexpr bool whole = true; };
struct SomeThere { static constexpr bool whole = false; };

// Calls `step(kind, first)` for each step over n edges, in which every slot takes UNROLL of them,
// the first at `first`. With Apart, a step that has all of its edges is compiled by itself, of kind
// AllThere: it asks nothing about them, and a third of its instructions are gone. All loads are then
// in flight together, which is not everywhere for the better: docs/notes/attention.md.
template <bool Apart, class Step>
__device__ __forceinline__ void each_step(int n, const Step& step) {
    int first = 0;
    if constexpr (Apart) {
#pragma unroll 1
        for (; first + SLOTS * UNROLL <= n; first += SLOTS * UNROLL) step(AllThere(), first);
        if (first < n) step(SomeThere(), first);
    } else {
        for (; first < n; first += SLOTS * UNROLL) step(SomeThere(), first);
    }
}

// The lane's share of one row of a [rows, Stride] array; zeros where `on` is false or the lane owns
// nothing.
template <typename T, int Stride = H * D>
__device__ __forceinline__ void load_row(const Lanes& at, const T* base, u64 row, bool on, Row& r) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int kh = k / KV, kv = k % KV;
        if (on && at.owns(kh, kv)) {
            load_packs<T, VEC>(base + at.offset(kh, kv) + row * (u64)Stride, r[k]);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) r[k][v] = 0.f;
        }
    }
}

// Where there is nothing to load, these zeros are: a load under a condition is followed by moves
// that wait for it, and then few loads are in flight.
__device__ const uint4 NOTHING[4] = {};

// `load_row` of rows that are gathered several at a time.
template <typename T, int Stride = H * D>
__device__ __forceinline__ void load_row_or_nothing(const Lanes& at, const T* base, u64 row,
                                                    bool on, Row& r) {
    static_assert(sizeof(T) * VEC <= sizeof(NOTHING), "as long as a pack");
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int kh = k / KV, kv = k % KV;
        const T* p = base + at.offset(kh, kv) + row * (u64)Stride;
        load_packs<T, VEC>(on && at.owns(kh, kv) ? p : (const T*)NOTHING, r[k]);
    }
}

// The lane's share of a row as loads leave it: int8 wait four to a register, and become floats when
// their turn comes.
template <typename T> struct Loaded {
    Row row;

    __device__ __forceinline__ void load(const Lanes& at, const T* base, u64 row_of, bool on) {
        load_row(at, base, row_of, on, row);
    }
    __device__ __forceinline__ void load_or_nothing(const Lanes& at, const T* base, u64 row_of,
                                                    bool on) {
        load_row_or_nothing(at, base, row_of, on, row);
    }
    __device__ __forceinline__ void pack(int k, float (&v)[VEC]) const {
#pragma unroll
        for (int x = 0; x < VEC; ++x) v[x] = row[k][x];
    }
};

#ifdef STRIDE
// Int8 are never infinite, so what should not count is loaded all the same, from row 0 or pack 0,
// and weighted 0 or not stored: a load under a condition is followed by moves that wait for it, and
// then few loads are in flight. UNROLL is a power of two, so that the edges that a slot asks for
// are those of this turn.
template <> struct Loaded<q8> {
    PackWord<q8, VEC> word[PACKS];

    __device__ __forceinline__ void load(const Lanes& at, const q8* base, u64 row_of, bool) {
        typedef typename Word<VEC>::type Whole;
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const q8* mine = base + (at.owns(k / KV, k % KV) ? at.offset(k / KV, k % KV) : 0);
            word[k].word = __ldg(reinterpret_cast<const Whole*>(mine + row_of * (u64)STRIDE));
        }
    }
    __device__ __forceinline__ void load_or_nothing(const Lanes& at, const q8* base, u64 row_of,
                                                    bool on) {
        load(at, base, row_of, on);
    }
    __device__ __forceinline__ void pack(int k,
                                         float (&v)[VEC]) const { Unpack<q8, VEC>::into(word[k], v);
                                                                  }
};
#endif

template <typename T>
__device__ __forceinline__ void store_row(const Lanes& at, T* base, u64 row, const Row& r) {
    T* p = base + row * (u64)(H * D);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const int kh = k / KV, kv = k % KV;
        if (at.owns(kh, kv)) store_packs<T, VEC>(p + at.offset(kh, kv), r[k]);
    }
}

__device__ __forceinline__ void add_bias(const Lanes& at, const float* bias, Row& r) {
    if (!bias) return;
    Row b;
    load_row(at, bias, 0, true, b);
    add_row(r, b);
}

// Adds up the SLOTS partial rows that a warp holds side by side; every lane gets the sum.
__device__ __forceinline__ void sum_slots(Row& r) {
#pragma unroll
    for (int w = ROW_LANES; w < 32; w <<= 1)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) r[k][v] += __shfl_xor_sync(FULL_WARP, r[k][v], w);
}
