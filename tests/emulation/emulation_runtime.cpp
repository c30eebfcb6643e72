// Runs the blocks of one launch, one after another, each thread of a block on its own stack (a
// fiber).
//
// A fiber runs until it waits at a collective or a barrier, or returns; then the scheduler picks
// the next by the chosen order. Nothing is preempted, so a thread is always as far ahead of the
// others as synchronisation lets it, which is what makes missing synchronisation show. When no
// fiber can go on, the block is reported as stuck.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct Dim { unsigned x, y, z; };
extern "C" { Dim emu_thread, emu_block, emu_block_dim, emu_grid_dim; }

namespace {
constexpr int kMaxThreads = 1024, kStackBytes = 64 << 10, kGuardBytes = 256;
constexpr uint64_t kStackCanary = 0x5afec0de5afec0deull;
constexpr unsigned char kPoison = 0xff, kGuard = 0xa5;
enum Op { SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR, BALLOT, ANY, ALL, SYNCWARP, BARRIER };
const char* const kOpNames[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                "__shfl_xor_sync",
                                "__ballot_sync", "__any_sync", "__all_sync", "__syncwarp",
                                    "__syncthreads"};
enum State { READY, WAITING, DONE };
enum Order { NORMAL, REVERSED, UNEVEN };

struct Thread {
    State state;
    Op op;
    unsigned mask;
    uint64_t value, result;
    int operand, width, line;
    const char* file;
};

Thread threads[kMaxThreads];
uint32_t ready[kMaxThreads / 32];  // per warp: the lanes that can run
int count, warps, current, current_warp, favourite, live;
int order;
uint64_t random_state;
unsigned char* stacks;
unsigned char* shared;             // guard, the kernel's bytes, guard
bool failed;
char* error;
size_t error_size;
void (*body)(void**);
void** arguments;

uint64_t next_random() {           // splitmix64
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

unsigned char* stack_of(int thread) { return stacks + (size_t)thread * kStackBytes; }

// ---- fibers ----
#if defined(__x86_64__) && !defined(EMU_USE_UCONTEXT)
extern "C" void emu_switch(void** save, void* load);
asm(".text\n.hidden emu_switch\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size emu_switch,.-emu_switch\n");
void* fiber_stack[kMaxThreads];
void* scheduler_stack;
void make_fiber(int thread, void (*entry)()) {
    void** top = (void**)(stack_of(thread) + kStackBytes);
    top[-1] = nullptr;             // entry's return address; entry never returns
    // emu_switch's ret goes here, with the stack aligned as after a call
    top[-2] = (void*)entry;
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    fiber_stack[thread] = top - 8;
}
void to_fiber(int thread) { emu_switch(&scheduler_stack, fiber_stack[thread]); }
void to_scheduler() { emu_switch(&fiber_stack[current], scheduler_stack); }
#else
#include <ucontext.h>
ucontext_t fiber_context[kMaxThreads], scheduler_context;
void make_fiber(int thread, void (*entry)()) {
    ucontext_t& c = fiber_context[thread];
    getcontext(&c);
    c.uc_stack.ss_sp = stack_of(thread) + 16;
    c.uc_stack.ss_size = kStackBytes - 16;
    c.uc_link = nullptr;
    makecontext(&c, entry, 0);
}
void to_fiber(int thread) { swapcontext(&scheduler_context, &fiber_context[thread]); }
void to_scheduler() { swapcontext(&fiber_context[current], &scheduler_context); }
#endif

// ---- errors ----
void report(const char* format, ...) {
    if (failed) return;            // the first error is the cause
    failed = true;
    int used = snprintf(error, error_size, "block (%u,%u): ", emu_block.x, emu_block.y);
    va_list list;
    va_start(list, format);
    vsnprintf(error + used, error_size - used, format, list);
    va_end(list);
}

// Leaves the running fiber for good: the block is abandoned.
[[noreturn]] void abandon() {
    to_scheduler();
    abort();
}

bool same_stop(const Thread& a, const Thread& b) {
    if (a.state != b.state) return false;
    return a.state == DONE
        || (a.op == b.op && a.mask == b.mask && a.line == b.line && !strcmp(a.file, b.file));
}

void describe_stop(char* out, size_t size, const Thread& t) {
    if (t.state == DONE) snprintf(out, size, "exited");
    else if (t.op == BARRIER) snprintf(out, size, "at __syncthreads() [%s:%d]", t.file, t.line);
    else snprintf(out, size, "at %s(mask %08x) [%s:%d]", kOpNames[t.op], t.mask, t.file, t.line);
}

void report_stuck() {
    char text[3000];
    size_t used = 0;
    for (int first = 0; first < count && used + 300 < sizeof text;) {
        int last = first;
        while (last + 1 < count && same_stop(threads[first], threads[last + 1])) ++last;
        char stop[256];
        describe_stop(stop, sizeof stop, threads[first]);
        used += snprintf(text + used, sizeof text - used, "\n  threads %d-%d: %s", first, last,
                         stop);
        first = last + 1;
    }
    report("divergence: the block cannot go on; a collective needs every lane of its mask, and __syncthreads() every "
           "thread, at the same place%s", text);
}

// ---- collectives ----
// The lane that `lane` reads from, by the PTX rules for shfl; its own where the source is outside
// its segment.
int source_lane(const Thread& t, int lane) {
    const int segment = ~(t.width - 1) & 31, last = lane | (t.width - 1);
    int from = lane;
    switch (t.op) {
        case SHFL: return (lane & segment) | (t.operand & (t.width - 1));
        case SHFL_UP: from = lane - t.operand; return from >= (lane & segment) ? from : lane;
        case SHFL_DOWN: from = lane + t.operand; return from <= last ? from : lane;
        case SHFL_XOR: from = lane ^ (t.operand & 31); return from <= last ? from : lane;
        default: return lane;
    }
}

// Computes all results before any lane goes on, since a lane may reach its next collective first.
void release(int warp, unsigned mask) {
    Thread* lanes = threads + warp * 32;
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i)
        if (((mask >> i) & 1) && lanes[i].value) votes |= 1u << i;
    for (int i = 0; i < 32; ++i) {
        if (!((mask >> i) & 1)) continue;
        Thread& t = lanes[i];
        switch (t.op) {
            case BALLOT: t.result = votes; break;
            case ANY: t.result = votes != 0; break;
            case ALL: t.result = votes == mask; break;
            case SYNCWARP: break;
            default: {
                const int from = source_lane(t, i);
                if (!((mask >> from) & 1)) {
                    report("%s: lane %d reads lane %d, which its mask %08x does not name [%s:%d]",
                           kOpNames[t.op], i, from, mask, t.file, t.line);
                    return;
                }
                t.result = lanes[from].value;
            }
        }
        t.state = READY;
    }
    ready[warp] |= mask;
}

void wait_at(Op op, unsigned mask, const char* file, int line) {
    Thread& t = threads[current];
    t.state = WAITING; t.op = op; t.mask = mask; t.file = file; t.line = line;
    ready[current / 32] &= ~(1u << (current % 32));
}

bool release_barrier() {
    for (int i = 0; i < count; ++i)
        if (threads[i].state != WAITING || threads[i].op != BARRIER
            || !same_stop(threads[0], threads[i])) return false;
    for (int i = 0; i < count; ++i) {
        threads[i].state = READY;
        ready[i / 32] |= 1u << (i % 32);
    }
    return true;
}

// ---- scheduling ----
int nth_lane(uint32_t lanes, int n) {
    while (n-- > 0) lanes &= lanes - 1;
    return __builtin_ctz(lanes);
}

// normal: the current warp first, its lowest lane first; then the next warps. reversed: mirrored.
// uneven: one warp of the block runs as far as it can, the others by chance.
int pick() {
    if (order == UNEVEN) {
        if (!ready[favourite] || next_random() % 16 == 0) {
            int candidates[kMaxThreads / 32], n = 0;
            for (int w = 0; w < warps; ++w)
                if (ready[w]) candidates[n++] = w;
            if (n == 0) return -1;
            current_warp = candidates[next_random() % n];
        } else {
            current_warp = favourite;
        }
        const uint32_t lanes = ready[current_warp];
        return current_warp * 32 + nth_lane(lanes,
                                            (int)(next_random() % __builtin_popcount(lanes)));
    }
    for (int i = 0; i < warps; ++i) {
        const int w = order == NORMAL ? (current_warp + i) % warps
            : (current_warp + warps - i) % warps;
        if (!ready[w]) continue;
        current_warp = w;
        return w * 32 + (order == NORMAL ? __builtin_ctz(ready[w]) : 31 - __builtin_clz(ready[w]));
    }
    return -1;
}

void fiber_entry() {
    body(arguments);
    threads[current].state = DONE;
    ready[current / 32] &= ~(1u << (current % 32));
    --live;
    to_scheduler();
    abort();
}

void check_guards(size_t shared_bytes) {
    for (int i = 0; i < kGuardBytes; ++i) {
        if (shared[kGuardBytes + shared_bytes + i] != kGuard)
            return report("write past the end of shared memory: byte %zu of %zu", shared_bytes + i,
                          shared_bytes);
        if (shared[i] != kGuard)
            return report("write before the start of shared memory: byte %d", i - kGuardBytes);
    }
    for (int i = 0; i < count; ++i)
        if (*(uint64_t*)stack_of(i) != kStackCanary)
            return report("thread %d used more than %d KiB of local memory", i, kStackBytes >> 10);
}

void run_block(size_t shared_bytes) {
    memset(shared, kGuard, kGuardBytes);
    memset(shared + kGuardBytes, kPoison, shared_bytes);
    memset(shared + kGuardBytes + shared_bytes, kGuard, kGuardBytes);
    memset(ready, 0, sizeof ready);
    for (int i = 0; i < count; ++i) {
        threads[i].state = READY;
        ready[i / 32] |= 1u << (i % 32);
        *(uint64_t*)stack_of(i) = kStackCanary;
        make_fiber(i, fiber_entry);
    }
    live = count;
    current_warp = order == REVERSED ? warps - 1 : 0;
    favourite = (int)(next_random() % warps);
    while (live > 0 && !failed) {
        const int next = pick();
        if (next < 0) {
            if (!release_barrier()) report_stuck();
            current_warp = order == REVERSED ? warps - 1 : 0;
            favourite = (int)(next_random() % warps);
            continue;
        }
        current = next;
        emu_thread = {(unsigned)next, 0, 0};
        to_fiber(next);
    }
    check_guards(shared_bytes);
}

void order_blocks(unsigned* blocks, unsigned n) {
    for (unsigned i = 0; i < n; ++i) blocks[i] = order == REVERSED ? n - 1 - i : i;
    if (order != UNEVEN) return;
    for (unsigned i = n; i > 1; --i) {
        const unsigned j = (unsigned)(next_random() % i), t = blocks[i - 1];
        blocks[i - 1] = blocks[j];
        blocks[j] = t;
    }
}
}  // namespace

// ---- called by kernels ----
extern "C" {
unsigned char* emulated_shared_memory() { return shared + kGuardBytes; }

unsigned emu_activemask() {
    // Which lanes are converged is up to the hardware; only the caller itself is certain.
    unsigned lanes = 1u << (current % 32);
    if (order == NORMAL)
        for (int i = 0; i < 32 && current / 32 * 32 + i < count; ++i)
            if (threads[current / 32 * 32 + i].state != DONE) lanes |= 1u << i;
    return lanes;
}

void emu_fail_at(const char* what, const char* file, int line) {
    report("thread %d: %s [%s:%d]", current, what, file, line);
    abandon();
}

unsigned long long emu_collective(int op, unsigned mask, unsigned long long bits, int operand,
                                  int width, const char* file, int line) {
    const int warp = current / 32, lane = current % 32;
    const unsigned present = count - warp * 32 >= 32 ? 0xffffffffu
        : (1u << (count - warp * 32)) - 1;
    if (!((mask >> lane) & 1))
        emu_fail_at("a lane is not in the mask of its own collective", file, line);
    if (mask & ~present)
        emu_fail_at("the mask of a collective names lanes beyond the end of the block", file, line);
    if (width < 1 || width > 32 || (width & (width - 1)))
        emu_fail_at("shuffle width is not a power of two up to 32", file, line);
    Thread& self = threads[current];
    self.value = bits; self.operand = operand; self.width = width;
    wait_at((Op)op, mask, file, line);
    bool complete = true;
    for (int i = 0; i < 32 && complete; ++i) {
        const Thread& t = threads[warp * 32 + i];
        if ((mask >> i) & 1) complete = t.state == WAITING && same_stop(t, self);
    }
    if (complete) release(warp, mask);
    to_scheduler();
    return self.result;
}

void emu_barrier(const char* file, int line) {
    wait_at(BARRIER, 0, file, line);
    to_scheduler();
}

void emu_yield() { to_scheduler(); }

// g++ calls this before an access whose address is not a multiple of the type's alignment
// (-fsanitize=alignment); a GPU would stop with "misaligned address".
struct UbsanType { uint16_t kind, info; char name[1]; };
struct UbsanMismatch { const char* file; uint32_t line, column; UbsanType* type; };
void __ubsan_handle_type_mismatch_v1(UbsanMismatch* where, uintptr_t address) {
    char text[256];
    snprintf(text, sizeof text, "misaligned access to %s at address ...%03x", where->type->name,
             (unsigned)(address & 0xfff));
    emu_fail_at(text, where->file ? where->file : "?", (int)where->line);
}

// ---- called by Python ----
struct EmuLaunch {
    unsigned grid_x, grid_y, threads, shared_bytes;
    int order;
    uint64_t seed;
    void** arguments;
    char* error;
    uint64_t error_size;
};

__attribute__((visibility("default"))) int emu_launch(void (*kernel)(void**),
                                                      const EmuLaunch* launch) {
    // one more in front: the first thread may overflow too, which must end in a report and not in a
    // crash
    const size_t all = (size_t)(kMaxThreads + 1) * kStackBytes;
    if (!stacks) {
        void* memory = mmap(nullptr, all, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) { snprintf(launch->error, launch->error_size,
                                             "no memory for stacks"); return 1; }
        stacks = (unsigned char*)memory + kStackBytes;
    }
    body = kernel; arguments = launch->arguments;
    error = launch->error; error_size = launch->error_size;
    order = launch->order; random_state = launch->seed; failed = false;
    count = (int)launch->threads; warps = (count + 31) / 32;
    emu_block_dim = {launch->threads, 1, 1};
    emu_grid_dim = {launch->grid_x, launch->grid_y, 1};
    const unsigned n = launch->grid_x * launch->grid_y;
    unsigned* blocks = (unsigned*)malloc(n * sizeof(unsigned));
    shared =
        (unsigned char*)aligned_alloc(256, (2 * kGuardBytes + launch->shared_bytes + 255) / 256
                                      * 256);
    order_blocks(blocks, n);
    for (unsigned i = 0; i < n && !failed; ++i) {
        emu_block = {blocks[i] % launch->grid_x, blocks[i] / launch->grid_x, 0};
        run_block(launch->shared_bytes);
    }
    free(blocks);
    free(shared);
    return failed;
}
}
