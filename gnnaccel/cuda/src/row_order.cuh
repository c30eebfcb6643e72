// Entries of each row of a graph's index arrays, in ascending order of their places.
//
// `place` and `place_src` (structure.cu) take places within a row with atomics, in an order that
// varies from run to run. The same edges would then give sums whose last bits vary. Here each entry
// finds its rank: how many entries of its row have a lower place. Places are distinct, so ranks are
// too, and the result is the same in every run: that of a stable sort.
//
//   short rows, up to chunk_edges <= 8 * 32 entries: a warp compares all with all
//   middle rows, up to MIDDLE entries: a block sorts them
//   long rows: a block marks the places of one WINDOW in a bitmap; an entry's rank is the number of
//     marks before it. The windows of a row belong to several blocks.
#ifndef GNNACCEL_ROW_ORDER_CUH
#define GNNACCEL_ROW_ORDER_CUH

#define EACH 8                      // entries of a short row that a lane holds
#define MIDDLE 2048
#define WINDOW (1 << 17)            // places that a bitmap covers
#define WORDS (WINDOW / 32)
#define RUN (WORDS / THREADS)       // words of the bitmap that a thread adds up

struct Entries {
    const int* other_in;
    const OFF_T* place_in;
    int* other_out;
    OFF_T* place_out;

    // The place of a row's i-th entry; beyond its end one that lies in no window.
    __device__ __forceinline__ i64 place_at(i64 begin, i64 i, i64 length) const {
        return i < length ? (i64)place_in[begin + i] : (i64)1 << 62;
    }

    __device__ __forceinline__ void move(i64 from, i64 to) const {
        other_out[to] = other_in[from];
        place_out[to] = place_in[from];
    }
};

// A row of up to EACH * 32 entries, by a warp. `keys`: shared memory for that many.
__device__ __forceinline__ void order_by_comparing(const Entries& entries, i64 begin,
                                                   int length, OFF_T* keys, int lane) {
    OFF_T mine[EACH];
    int rank[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * 32 + lane;
        rank[i] = 0;
        mine[i] = at < length ? entries.place_in[begin + at] : 0;
        if (at < length) keys[at] = mine[i];
    }
    __syncwarp();
    const int used = (length + 31) / 32;
    for (int j = 0; j < length; ++j) {
        const OFF_T key = keys[j];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i < used) rank[i] += key < mine[i];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * 32 + lane;
        if (at < length) entries.move(begin + at, begin + rank[i]);
    }
}

// A row of up to MIDDLE entries, by a block: a bitonic sort of (place, position of the entry in the
// row). `keys` [MIDDLE]: shared memory.
__device__ __forceinline__ void order_by_exchanging(const Entries& entries, i64 begin, int length,
                                                    u64* keys) {
    int size = 32;
    while (size < length) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS)
        keys[i] = i < length ? (u64)entries.place_in[begin + i] * MIDDLE + i : ~(u64)0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2)
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const u64 a = keys[low], b = keys[high];
                if ((a > b) == ((low & run) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < length; i += THREADS)
        entries.move(begin + (i64)(keys[i] % MIDDLE), begin + i);
    __syncthreads();  // `keys` may be written again
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
    for (i64 i = thread; i < length; i += THREADS * EACH) {
        i64 at[EACH];  // loads that are under way together
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            at[k] = entries.place_at(begin, i + k * THREADS, length) - first;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
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
    for (i64 i = thread; i < length; i += THREADS * EACH) {
        i64 at[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            at[k] = entries.place_at(begin, i + k * THREADS, length) - first;
#pragma unroll
        for (int k = 0; k < EACH; ++k)
            if (at[k] >= 0 && at[k] < WINDOW)
                entries.move(begin + i + k * THREADS, base + rank_of((int)at[k], bits, parts));
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
            else
                order_by_exchanging(entries, begin, (int)length, (u64*)shared);
        }
        __syncthreads();
    }
}

#endif
