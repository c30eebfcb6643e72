// Entries of each row of a graph's index arrays, in ascending order of their places.
//
// `place` and `place_src` (structure.cu) take places within a row with atomics, in an order that varies from run to run. The same
// edges then give sums whose last bits vary. Here each entry finds its rank: how many entries of its row have a lower place. Places
// are distinct, so ranks are too, and the result is the same in every run, and the same as that of a stable sort.
//
//   short rows, up to chunk_edges <= 8 * 32 entries: a warp compares all with all
//   middle rows, up to 8 * THREADS entries: a block does
//   long rows: a block marks the places of one WINDOW in a bitmap; an entry's rank is the number of marks before it. The windows of
//   a row belong to several blocks.
#ifndef GNNACCEL_ROW_ORDER_CUH
#define GNNACCEL_ROW_ORDER_CUH

#define EACH 8                      // entries that a thread holds
#define MIDDLE (EACH * THREADS)
#define WINDOW (1 << 17)            // places that a bitmap covers
#define WORDS (WINDOW / 32)
#define RUN (WORDS / THREADS)       // words of the bitmap that a thread adds up

struct Entries {
    const int* other_in;
    const OFF_T* place_in;
    int* other_out;
    OFF_T* place_out;

    __device__ __forceinline__ void move(i64 from, i64 to) const {
        other_out[to] = other_in[from];
        place_out[to] = place_in[from];
    }
};

template <int Threads> __device__ __forceinline__ void wait_for_group() {
    if (Threads == 32) __syncwarp();
    else __syncthreads();
}

// A row of up to EACH * Threads entries, by a warp or a block. `keys`: shared memory for that many.
template <int Threads>
__device__ __forceinline__ void order_by_comparing(const Entries& entries, i64 begin, int length, OFF_T* keys, int thread) {
    OFF_T mine[EACH];
    int rank[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * Threads + thread;
        rank[i] = 0;
        mine[i] = at < length ? entries.place_in[begin + at] : 0;
        if (at < length) keys[at] = mine[i];
    }
    wait_for_group<Threads>();
    const int used = (length + Threads - 1) / Threads;
    for (int j = 0; j < length; ++j) {
        const OFF_T key = keys[j];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i < used) rank[i] += key < mine[i];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * Threads + thread;
        if (at < length) entries.move(begin + at, begin + rank[i]);
    }
    wait_for_group<Threads>();  // `keys` may be written again
}

// Adds up one number of each thread of the block: the sum of all, and `before`, of the threads in front. `parts` [THREADS].
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

// The entries of one row whose places lie in one window, by a block. `bits` [WORDS], `parts` [THREADS]: shared memory.
__device__ __forceinline__ void order_by_marks(const Entries& entries, i64 begin, i64 length, int window, u32* bits, int* parts) {
    const int thread = threadIdx.x;
    for (int i = thread; i < WORDS; i += THREADS) bits[i] = 0;
    __syncthreads();
    const i64 first = (i64)window * WINDOW;
    int lower = 0;
    for (i64 i = thread; i < length; i += THREADS) {
        const i64 at = (i64)entries.place_in[begin + i] - first;
        if (at < 0) ++lower;
        else if (at < WINDOW) atomicOr(&bits[at >> 5], 1u << (at & 31));
    }
    int before;
    const i64 base = begin + block_sums(lower, parts, before);
    int marks = 0;
    for (int i = 0; i < RUN; ++i) marks += __popc(bits[thread * RUN + i]);
    block_sums(marks, parts, before);
    parts[thread] = before;
    __syncthreads();
    for (i64 i = thread; i < length; i += THREADS) {
        const i64 at = (i64)entries.place_in[begin + i] - first;
        if (at < 0 || at >= WINDOW) continue;
        const int word = (int)(at >> 5);
        int rank = parts[word / RUN] + __popc(bits[word] & ((1u << (at & 31)) - 1));
        for (int k = word / RUN * RUN; k < word; ++k) rank += __popc(bits[k]);
        entries.move(begin + i, base + rank);
    }
    __syncthreads();
}

// Rows of more than chunk_edges entries. Block `block` of `blocks` has those rows of the list `heavy` whose numbers are
// block + k * blocks, and of the rows longer than MIDDLE the window `window`.
__device__ __forceinline__ void order_heavy(const Entries& entries, const OFF_T* indptr, const int4* heavy, int count, int block,
                                            int blocks, int window, unsigned char* shared) {
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
            if (length > MIDDLE) order_by_marks(entries, begin, length, window, (u32*)shared, parts);
            else order_by_comparing<THREADS>(entries, begin, (int)length, (OFF_T*)shared, threadIdx.x);
        }
        __syncthreads();
    }
}

#endif
