// A running sum over all blocks of a launch in one pass, by "decoupled look-back": each block makes
// the sum of its own part known, then adds up what the blocks before it have made known, 32 at a
// time, until it meets one that knows all that lies before. (Merrill and Garland, "Single-pass
// Parallel Prefix Scan with Decoupled Look-back", 2016.)
//
// A block's word of `state`: its sum below two bits that say what the sum is of; 0 before.
#ifndef GNNACCEL_SCAN_CUH
#define GNNACCEL_SCAN_CUH

#define EACH_SCANNED 4
#define SCANNED (THREADS * EACH_SCANNED)
#define OF_BLOCK ((u64)1 << 62)  // of the block's own part
#define OF_ALL ((u64)2 << 62)    // of it and of all before it
#define SUM_BITS (OF_BLOCK - 1)

// The number of this block, in the order in which blocks begin: those before it run already, or are
// done. `parts`: shared memory for one word.
__device__ __forceinline__ i64 begin_block(u64* state, u64* parts) {
    if (threadIdx.x == 0) parts[0] = atomicAdd(&state[gridDim.x], (u64)1);
    __syncthreads();
    const i64 number = (i64)parts[0];
    __syncthreads();
    return number;
}

// By the first warp: the sum of all blocks before `number`.
__device__ __forceinline__ u64 look_back(i64 number, u64* state) {
    const int lane = threadIdx.x % 32;
    u64 sum = 0;
    for (i64 last = number - 1; last >= 0; last -= 32) {
        const i64 of = last - lane;
        u64 word = OF_ALL;
        do {
            if (of >= 0) word = ((volatile u64*)state)[of];
        } while (__any_sync(FULL_WARP, word == 0));
        const u32 all = __ballot_sync(FULL_WARP, (word & OF_ALL) != 0);
        const int nearest = all ? __ffs(all) - 1 : 31;
        u64 part = lane <= nearest ? word & SUM_BITS : 0;
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(FULL_WARP, part, step);
        sum += part;
        if (all) break;
    }
    return sum;
}

// What all threads before this one have, in blocks before and in this one. `own`: this thread's
// part; `parts` [THREADS / 32 + 1]: shared memory.
__device__ __forceinline__ u64 sum_before(u64 own, i64 number, u64* state, u64* parts) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 added = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += added;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    u64 in_block = 0, before = sum - own;
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += parts[w];
        in_block += parts[w];
    }
    if (warp == 0) {
        if (lane == 0 && number) atomicExch(&state[number], OF_BLOCK | in_block);
        const u64 blocks = look_back(number, state);
        if (lane == 0) {
            atomicExch(&state[number], OF_ALL | (blocks + in_block));
            parts[THREADS / 32] = blocks;
        }
    }
    __syncthreads();
    return parts[THREADS / 32] + before;
}

#endif
