// Copies from global to shared memory that run while the threads compute: each thread starts
// copies, closes them as a group, and later waits until at most some number of its latest groups
// are under way. Before sm_80 they are plain.
#pragma once
#include "common.cuh"

#if defined(GNNACCEL_EMULATE)

// The hardware may do a copy at once or as late as the wait for it. Odd threads do the one and even
// threads the other, so that both a missing wait and memory overwritten too early show.
struct PendingCopies {
    static constexpr int LIMIT = 2048;
    struct { unsigned char* to; const unsigned char* from; int bytes, size, group; } list[LIMIT];
    int begin, end, group;
};
inline PendingCopies& pending_copies() {
    static PendingCopies all[1024];
    return all[threadIdx.x];
}
inline void do_copy(unsigned char* to, const unsigned char* from, int bytes, int size) {
    for (int i = 0; i < size; ++i) to[i] = i < bytes ? from[i] : 0;
}
inline void copies_begin() { pending_copies().begin = pending_copies().end = pending_copies().group = 0; }
template <int Bytes> inline void copy_async(void* to, const void* from, bool valid) {
    if ((u64)to % Bytes || (valid && (u64)from % Bytes)) __trap();
    PendingCopies& p = pending_copies();
    if (threadIdx.x & 1)
        return do_copy((unsigned char*)to, (const unsigned char*)from, valid ? Bytes : 0, Bytes);
    if (p.end - p.begin >= PendingCopies::LIMIT) __trap();
    auto& entry = p.list[p.end++ % PendingCopies::LIMIT];
    entry.to = (unsigned char*)to, entry.from = (const unsigned char*)from;
    entry.bytes = valid ? Bytes : 0, entry.size = Bytes, entry.group = p.group;
}
inline void copies_commit() { ++pending_copies().group; }
template <int Groups> inline void copies_wait() {
    PendingCopies& p = pending_copies();
    for (; p.begin < p.end && p.list[p.begin % PendingCopies::LIMIT].group < p.group - Groups;
         ++p.begin) {
        auto& entry = p.list[p.begin % PendingCopies::LIMIT];
        do_copy(entry.to, entry.from, entry.bytes, entry.size);
    }
}

#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

__device__ __forceinline__ void copies_begin() {}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Groups> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// Bytes from `from` to shared memory, or as many zeros where it is not valid. Both are aligned to
// Bytes.
template <int Bytes> __device__ __forceinline__ void copy_async(void* to, const void* from,
                                                                bool valid) {
    const u32 shared = (u32)__cvta_generic_to_shared(to);
    const int read = valid ? Bytes : 0;
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                     "r"(read) : "memory");
    } else if constexpr (Bytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from),
                     "n"(Bytes), "r"(read)
                     : "memory");
    } else {
        *(u16*)to = valid ? __ldg((const u16*)from) : (u16)0;
    }
}

#else

__device__ __forceinline__ void copies_begin() {}
__device__ __forceinline__ void copies_commit() {}
template <int Groups> __device__ __forceinline__ void copies_wait() {}
template <int Bytes> __device__ __forceinline__ void copy_async(void* to, const void* from,
                                                                bool valid) {
    typedef typename Word<Bytes>::type Word;
    Word word = {};
    if (valid) word = __ldg((const Word*)from);
    *(Word*)to = word;
}

#endif
