// Entries of each row of a graph's index arrays, in ascending order of their places.
//
// `place` and `place_src` (structure.cu) take places within a row with atomics, in an order that
// varies from run to run. The same edges would then give sums whose last bits vary. Here each entry
// finds its rank: how many entries of its row have a lower place. Places are distinct, so ranks are
// too, and the result is the same in every run: that of a stable sort.
//
//   short rows, up to FEW entries: a warp compares all with all, of several rows at once if it can
//   middle rows, up to MIDDLE entries: a block compares all with all, or sorts them
//   long rows: a block marks the places of one WINDOW in a bitmap; an entry's rank is the number of
//     marks before it. The windows of a row belong to several blocks.
#ifndef GNNACCEL_ROW_ORDER_CUH
#define GNNACCEL_ROW_ORDER_CUH

#define GROUP 4                     // rows that a warp has
#define FEW 64
#define COMPARED THREADS            // entries of a row that a block compares
#define LAST ((OFF_T)(~(u64)0 >> (65 - 8 * sizeof(OFF_T))))  // no place is higher
#define MIDDLE 2048
#define WINDOW (1 << 17)            // places that a bitmap covers
#define WORDS (WINDOW / 32)
#define RUN (WORDS / THREADS)       // words of the bitmap that a thread adds up
#define LOADS 8                     // of a thread that are under way together

struct Entries {
    const Entry* in;
    int* other_out;
    OFF_T* place_out;

    // The place of a row's i-th entry; beyond its end one that lies in no window.
    __device__ __forceinline__ i64 place_at(i64 begin, i64 i, i64 length) const {
        return i < length ? (i64)in[begin + i].place : (i64)1 << 62;
    }

    __device__ __forceinline__ void put(const Entry& entry, i64 to) const {
        other_out[to] = (int)entry.other;
        place_out[to] = entry.place;
    }
};

// Rows of up to FEW entries in all, by a warp. `ends`: where all rows but the last end, counted
// from `begin`. `keys`: shared memory for FEW places.
__device__ __forceinline__ void order_group(const Entries& entries, i64 begin, int length,
                                            const int (&ends)[GROUP - 1], OFF_T* keys, int lane) {
    Entry mine[FEW / 32];
#pragma unroll
    for (int i = 0; i < FEW / 32; ++i) {
        const int at = i * 32 + lane;
        if (at < length) {
            mine[i] = entries.in[begin + at];
            keys[at] = mine[i].place;
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < FEW / 32; ++i) {
        const int at = i * 32 + lane;
        if (at >= length) continue;
        int first = 0, last = length;  // of the entry's row
#pragma unroll
        for (int r = 0; r < GROUP - 1; ++r) {
            if (ends[r] <= at) first = ends[r];
            else last = ends[r] < last ? ends[r] : last;
        }
        int rank = first;
        for (int j = first; j < last; ++j) rank += keys[j] < mine[i].place;
        entries.put(mine[i], begin + rank);
    }
    __syncwarp();  // `keys` may be written again
}

// A row of up to COMPARED entries, by a block. `keys`: shared memory for so many places.
__device__ __forceinline__ void order_by_comparing(const Entries& entries, i64 begin, int length,
                                                   OFF_T* keys) {
    struct __align__(4 * sizeof(OFF_T)) Four {
        OFF_T of[4];
    };
    const int at = threadIdx.x;
    const Entry mine = at < length ? entries.in[begin + at] : Entry{LAST, 0};
    keys[at] = mine.place;
    __syncthreads();
    if (at < length) {
        int rank = 0;
        for (int j = 0; j < length; j += 4) {
            const Four four = *(const Four*)(keys + j);
#pragma unroll
            for (int k = 0; k < 4; ++k) rank += four.of[k] < mine.place;
        }
        entries.put(mine, begin + rank);
    }
    __syncthreads();  // `keys` may be written again
}

// A row of up to MIDDLE entries, by a block: a bitonic sort of (place, position of the entry in the
// row). `keys` [MIDDLE]: shared memory.
__device__ __forceinline__ void order_by_exchanging(const Entries& entries, i64 begin, int length,
                                                    u64* keys) {
    int size = 32;
    while (size < length) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS)
        keys[i] = i < length ? (u64)entries.in[begin + i].place * MIDDLE + i : ~(u64)0;
    __syncthreads();
    sort_keys(keys, size, THREADS);
    for (int i = threadIdx.x; i < length; i += THREADS)
        entries.put(entries.in[begin + (i64)(keys[i] % MIDDLE)], begin + i);
    __syncthreads();  // `keys` may be written again
}

// The rows that a block finds too long for a warp. Shared memory.
struct Longer {
    int count;
    int row[GROUP * THREADS / 32];
};

// Rows first .. first + GROUP - 1 by a warp. Those of more than FEW entries it adds to `longer`,
// but for those of more than chunk_edges. `keys`: shared memory for FEW places.
__device__ __forceinline__ void order_rows(const Entries& entries, const OFF_T* indptr, i64 first,
                                           int rows, int chunk_edges, OFF_T* keys, int lane,
                                           Longer* longer) {
    const OFF_T bound = lane <= GROUP ? indptr[first + lane < rows ? first + lane : rows] : 0;
    const i64 begin = __shfl_sync(FULL_WARP, bound, 0);
    const i64 length = __shfl_sync(FULL_WARP, bound, GROUP) - begin;
    int ends[GROUP - 1];
    if (length <= FEW) {
#pragma unroll
        for (int r = 1; r < GROUP; ++r)
            ends[r - 1] = (int)(__shfl_sync(FULL_WARP, bound, r) - begin);
        order_group(entries, begin, (int)length, ends, keys, lane);
        return;
    }
    for (int r = 0; r < GROUP; ++r) {  // each by itself
        const i64 from = __shfl_sync(FULL_WARP, bound, r);
        const i64 own = __shfl_sync(FULL_WARP, bound, r + 1) - from;
#pragma unroll
        for (int k = 1; k < GROUP; ++k) ends[k - 1] = (int)own;
        if (own <= FEW)
            order_group(entries, from, (int)own, ends, keys, lane);
        else if (own <= chunk_edges && lane == 0)
            longer->row[atomicAdd(&longer->count, 1)] = (int)first + r;
    }
}

// The rows of a block, but for those of more than chunk_edges <= COMPARED entries.
__device__ __forceinline__ void order_block(const Entries& entries, const OFF_T* indptr, i64 first,
                                            int rows, int chunk_edges, unsigned char* shared) {
    OFF_T* keys = (OFF_T*)shared;  // [THREADS / 32 * FEW], and [COMPARED]
    Longer* longer = (Longer*)(keys + THREADS / 32 * FEW);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) longer->count = 0;
    __syncthreads();
    const i64 own = first + warp * GROUP;
    if (own < rows)
        order_rows(entries, indptr, own, rows, chunk_edges, keys + warp * FEW, threadIdx.x % 32,
                   longer);
    __syncthreads();
    for (int i = 0; i < longer->count; ++i) {
        const i64 begin = indptr[longer->row[i]];
        order_by_comparing(entries, begin, (int)(indptr[longer->row[i] + 1] - begin), keys);
    }
}

// Adds up one number of each thread of the block. Returns the sum of all; `before` gets the sum of
// the threads in front. `parts` [THREADS]: shared memory.
__device__ __forceinline__ int block_sums(int value, int* parts, int& before) {
    const int thread = threadIdx.x;
    parts[thread] = value;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        const int added = thread >= step ? parts[thread - step] : 0;
        __syncthreads();
        parts[thread] += added;
        __syncthreads();
    }
    before = parts[thread] - value;
    const int total = parts[THREADS - 1];
    __syncthreads();
    return total;
}

// The marks in front of one place. `parts`: those in front of each RUN words.
__device__ __forceinline__ int rank_of(int at, const u32* bits, const int* parts) {
    const int word = at >> 5;
    int rank = parts[word / RUN] + __popc(bits[word] & ((1u << (at & 31)) - 1));
    for (int k = word / RUN * RUN; k < word; ++k) rank += __popc(bits[k]);
    return rank;
}

// The entries of one row whose places lie in one window, by a block. `bits` [WORDS], `parts`
// [THREADS]: shared memory.
__device__ __forceinline__ void order_by_marks(const Entries& entries, i64 begin, i64 length,
                                               int window, u32* bits, int* parts) {
    const int thread = threadIdx.x;
    for (int i = thread; i < WORDS; i += THREADS) bits[i] = 0;
    __syncthreads();
    const i64 first = (i64)window * WINDOW;
    int lower = 0;
    for (i64 i = thread; i < length; i += THREADS * LOADS) {
        i64 at[LOADS];  // loads that are under way together
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            at[k] = entries.place_at(begin, i + k * THREADS, length) - first;
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (at[k] < 0) ++lower;
            else if (at[k] < WINDOW) atomicOr(&bits[at[k] >> 5], 1u << (at[k] & 31));
        }
    }
    int before;
    const i64 base = begin + block_sums(lower, parts, before);
    int marks = 0;
    for (int i = 0; i < RUN; ++i) marks += __popc(bits[thread * RUN + i]);
    block_sums(marks, parts, before);
    parts[thread] = before;
    __syncthreads();
    for (i64 i = thread; i < length; i += THREADS * LOADS) {
        i64 at[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            at[k] = entries.place_at(begin, i + k * THREADS, length) - first;
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            if (at[k] >= 0 && at[k] < WINDOW)
                entries.put(entries.in[begin + i + k * THREADS],
                            base + rank_of((int)at[k], bits, parts));
    }
    __syncthreads();
}

// Rows of more than chunk_edges entries, which `heavy` lists. Block `block` of `blocks` has the
// rows whose numbers in the list are block + k * blocks; of rows longer than MIDDLE only one
// window, `window`.
__device__ __forceinline__ void order_heavy(const Entries& entries, const OFF_T* indptr,
                                            const int4* heavy, int count, int block, int blocks,
                                            int window, unsigned char* shared) {
    int* rows = (int*)(shared + WORDS * 4);  // [THREADS]
    int* found = rows + THREADS;             // [1]
    int* parts = found + 1;                  // [THREADS]
    for (int first = block; first < count; first += blocks * THREADS) {
        if (threadIdx.x == 0) *found = 0;
        __syncthreads();
        const i64 number = first + (i64)threadIdx.x * blocks;
        if (number < count) {
            const int row = heavy[number].x;
            const i64 length = (i64)indptr[row + 1] - indptr[row];
            if (window == 0 || length > MIDDLE) rows[atomicAdd(found, 1)] = row;
        }
        __syncthreads();
        for (int i = 0; i < *found; ++i) {
            const i64 begin = indptr[rows[i]], length = (i64)indptr[rows[i] + 1] - begin;
            if (length > MIDDLE)
                order_by_marks(entries, begin, length, window, (u32*)shared, parts);
            else if (length > COMPARED)
                order_by_exchanging(entries, begin, (int)length, (u64*)shared);
            else
                order_by_comparing(entries, begin, (int)length, (OFF_T*)shared);
        }
        __syncthreads();
    }
}

#endif
