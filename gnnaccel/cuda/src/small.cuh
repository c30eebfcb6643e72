// Index arrays of a small graph by one block: its edges are sorted as keys in shared memory, the row
// above, the place below. Places are distinct, so the order is that of `order`; edges that are
// dropped come last. Launching takes the host longer than all of this takes the device.
#ifndef GNNACCEL_SMALL_CUH
#define GNNACCEL_SMALL_CUH

#define SMALL_THREADS 1024
#define PLACE_BITS 13  // as in structure.py
#define PLACES ((1u << PLACE_BITS) - 1)
#define DROPPED (~0u)

struct Small {
    u32* keys;  // [size] shared memory, then BINS + 1 ints for the report and one more
    int size;   // a power of two, no fewer than there are edges and loops
    Report report;

    __device__ __forceinline__ int* bins() const { return (int*)(keys + size); }

    __device__ __forceinline__ void begin(int* flags) const {
        if (threadIdx.x < COUNTERS) report.counters[threadIdx.x] = 0;
        if (threadIdx.x <= FLAG_INVALID) flags[threadIdx.x] = 0;
        if (threadIdx.x == 0) bins()[BINS + 1] = 0;
        report.begin(bins());
    }

    __device__ __forceinline__ u32 key(i64 row, int place) const {
        return (u32)row << PLACE_BITS | (u32)place;
    }

    // How many of the sorted keys are lower than that of a row's first place.
    __device__ __forceinline__ int before(int row) const {
        const u32 bound = key(row, 0);
        int low = 0, high = size;
        while (low < high) {
            const int mid = (low + high) / 2;
            if (keys[mid] < bound) low = mid + 1;
            else high = mid;
        }
        return low;
    }

    // Sorts the keys unless they are sorted, as those of batches of graphs are; makes `indptr`, and
    // adds its rows to the report.
    __device__ __forceinline__ void arrange(OFF_T* indptr, int rows, int chunk_edges) const {
        int* unsorted = bins() + BINS + 1;
        __syncthreads();
        bool found = false;
        for (int i = threadIdx.x; i + 1 < size; i += blockDim.x) found |= keys[i] > keys[i + 1];
        if (found) atomicMax(unsorted, 1);
        __syncthreads();
        if (*unsorted) sort_keys(keys, size, blockDim.x);
        for (int row = threadIdx.x; row <= rows; row += blockDim.x) indptr[row] = before(row);
        __syncthreads();
        for (int row = threadIdx.x; row < rows; row += blockDim.x)
            report.add(bins(), row, indptr[row + 1] - indptr[row], chunk_edges);
    }

    // The CSC of a list of edges.
    template <typename T>
    __device__ __forceinline__ void by_dst(const T* src, const T* dst, i64 edges, i64 num_src,
                                           i64 num_dst, i64 loops, int chunk_edges, int* flags,
                                           OFF_T* indptr, int* other, OFF_T* place) const {
        begin(flags);
        for (int e = threadIdx.x; e < size; e += blockDim.x) {
            u32 found = DROPPED;
            if (e < edges) {
                i64 s, d;
                bool valid;
                if (read_edge(src, dst, e, num_src, num_dst, loops, s, d, valid)) found = key(d, e);
                if (!valid) raise_flag(flags + FLAG_INVALID);
            } else if (e < edges + loops) {
                found = key(e - edges, e);
            }
            keys[e] = found;
        }
        arrange(indptr, (int)num_dst, chunk_edges);
        const int total = (int)indptr[num_dst];
        for (int p = threadIdx.x; p < total; p += blockDim.x) {
            const int e = keys[p] & PLACES;
            place[p] = e;
            other[p] = (int)(e < edges ? (i64)src[e] : e - edges);
        }
        report.end(bins(), indptr, (int)num_dst);
    }

    // The transposed graph of a CSC.
    __device__ __forceinline__ void by_src(const OFF_T* by_dst, const int* col, int num_dst,
                                           int num_src, int chunk_edges, int* flags,
                                           OFF_T* indptr, int* other, OFF_T* place) const {
        begin(flags);
        const int total = (int)by_dst[num_dst];
        for (int p = threadIdx.x; p < size; p += blockDim.x)
            keys[p] = p < total ? key(col[p], p) : DROPPED;
        arrange(indptr, num_src, chunk_edges);
        for (int at = threadIdx.x; at < total; at += blockDim.x) {
            const int p = keys[at] & PLACES;
            place[at] = p;
            other[at] = row_of(by_dst, num_dst, p);
        }
        report.end(bins(), indptr, num_src);
    }
};

#endif
