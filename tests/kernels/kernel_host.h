// Enough of CUDA to run the kernels' own source on a host: every thread is a fiber, and one runs at a time.
//
// Which of the fibers that could go on does so is drawn by lot, so that what lacks a barrier comes out wrong. Only some of
// a grid's blocks run at once, the others begin as these end: a block that waits for one that has yet to begin waits for
// ever, which is noticed. Shared memory begins as garbage. What this cannot show: the order in which a device's memory sees
// stores (fences), and time.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__ inline
#define __device__ inline
#define __forceinline__
#define __launch_bounds__(...)
#define __restrict__

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };

namespace host {

typedef unsigned u32;

struct Fiber;
struct Block;

// ------------------------------------------------------------ switching
#if defined(__x86_64__)
extern "C" void host_switch(void **save, void *load);
__asm__(".text\n.globl host_switch\nhost_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
struct Context {
    void *stack = nullptr;
    void start(char *low, size_t size, void (*entry)()) {
        void **top = (void **) (low + size);
        *--top = nullptr;  // alignment, as after a call
        *--top = (void *) entry;
        for (int i = 0; i < 6; i++) *--top = nullptr;
        stack = top;
    }
    void go(Context &from) { host_switch(&from.stack, stack); }
};
#else
struct Context {
    ucontext_t context;
    void start(char *low, size_t size, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = low, context.uc_stack.ss_size = size, context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void go(Context &from) { swapcontext(&from.context, &context); }
};
#endif

struct Meeting {  // of the lanes of a warp, or of a block's threads
    u32 arrived = 0;
    const char *what = nullptr;
    std::vector<Fiber *> waiting;
    unsigned long long given[32], got[32];  // by lanes; what they get stays until all have come to the next meeting
};

struct Fiber {
    Context context;
    Block *block;
    u32 thread;
};

struct Block {
    u32 index, left;
    Meeting all;
    std::vector<Meeting> warps;
    std::vector<Fiber> fibers;
    std::vector<char> shared;
};

const size_t STACK = 48 << 10;
const unsigned long long MOST_SWITCHES = 100000000;  // of any sound run by far
Context scheduler;
std::vector<Fiber *> ready;
Fiber *current;
u32 threads, blocks;
unsigned long long lot, switches;
void (*body)();
char failure[160];

inline u32 draw(u32 count) {  // xorshift
    lot ^= lot << 13, lot ^= lot >> 7, lot ^= lot << 17;
    return (u32) ((lot >> 11) % count);
}

inline void fail(const char *what) {
    if (!failure[0]) snprintf(failure, sizeof failure, "%s", what);
    ready.clear();
    Context dropped;
    scheduler.go(dropped);
    abort();
}

inline void rest() { scheduler.go(current->context); }  // until somebody makes it ready

inline void let_others() { ready.push_back(current), rest(); }

inline void release(Meeting &meeting) {
    for (Fiber *fiber : meeting.waiting) ready.push_back(fiber);
    meeting.waiting.clear(), meeting.arrived = 0, meeting.what = nullptr;
}

inline bool arrive(Meeting &meeting, u32 expected, const char *what) {  // whether it is the last one
    if (meeting.what && meeting.what != what) fail("threads of one warp or block meet at different barriers");
    meeting.what = what, meeting.arrived++;
    if (meeting.arrived == expected) return true;
    meeting.waiting.push_back(current), rest();
    return false;
}

// Every lane gives a number and gets all lanes'.
inline const unsigned long long *exchange(unsigned long long given, u32 mask, const char *what) {
    if (mask != 0xffffffffu) fail("only whole warps may meet");
    Meeting &meeting = current->block->warps[current->thread / 32];
    meeting.given[current->thread % 32] = given;
    if (arrive(meeting, 32, what)) {
        memcpy(meeting.got, meeting.given, sizeof meeting.got);
        release(meeting);
        let_others();
    }
    return meeting.got;
}

inline void sync_block() {
    if (arrive(current->block->all, threads, "block")) release(current->block->all), let_others();
}

inline void enter() {
    body();
    current->block->left--;
    Context dropped;
    scheduler.go(dropped);
}

// Runs a kernel; returns what went wrong, or null.
inline const char *run(void (*kernel)(), u32 grid, u32 size, u32 resident, unsigned long long seed) {
    body = kernel, threads = size, blocks = grid, failure[0] = 0, switches = 0, lot = seed * 2654435769u + 88172645463325252ull;
    const size_t bytes = STACK * size * resident;
    char *stacks = (char *) mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::vector<Block> running(resident);
    u32 begun = 0;
    auto begin = [&](u32 slot) {
        Block &block = running[slot];
        block.index = begun++, block.left = size;
        block.all = Meeting(), block.warps.assign(size / 32, Meeting());
        block.fibers = std::vector<Fiber>(size);
        block.shared.assign(64 << 10, (char) 0xa5);
        for (u32 t = 0; t < size; t++) {
            Fiber &fiber = block.fibers[t];
            fiber.block = &block, fiber.thread = t;
            fiber.context.start(stacks + STACK * ((size_t) slot * size + t), STACK, enter);
            ready.push_back(&fiber);
        }
    };
    ready.clear();
    for (u32 slot = 0; slot < resident && begun < grid; slot++) begin(slot);
    while (!ready.empty()) {
        const u32 drawn = draw((u32) ready.size());
        current = ready[drawn], ready[drawn] = ready.back(), ready.pop_back();
        Block &block = *current->block;
        if (++switches > MOST_SWITCHES) snprintf(failure, sizeof failure, "blocks wait for ever");
        current->context.go(scheduler);
        if (failure[0]) break;
        if (block.left == 0 && begun < grid) begin((u32) (&block - running.data()));
    }
    u32 left = grid - begun;
    for (u32 slot = 0; slot < resident && slot < begun; slot++) left += running[slot].left != 0;
    if (!failure[0] && left) snprintf(failure, sizeof failure, "threads wait at a barrier that others never reach");
    munmap(stacks, bytes);
    return failure[0] ? failure : nullptr;
}

}  // namespace host

#define threadIdx (Index{host::current->thread})
#define blockIdx (Index{host::current->block->index})
#define gridDim (Index{host::blocks})
#define BLOCK_SHARED(type, name) type &name = *reinterpret_cast<type *>(host::current->block->shared.data())

inline void __syncthreads() { host::sync_block(); }
inline void __syncwarp() { host::exchange(0, ~0u, "syncwarp"); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { host::let_others(); }
inline unsigned __ballot_sync(unsigned mask, bool given) {
    const unsigned long long *got = host::exchange(given, mask, "ballot");
    unsigned found = 0;
    for (unsigned i = 0; i < 32; i++) found |= (unsigned) got[i] << i;
    return found;
}
template <class T> inline T __shfl_up_sync(unsigned mask, T given, unsigned by) {
    const unsigned lane = host::current->thread % 32;
    return (T) host::exchange(given, mask, "shfl_up")[lane < by ? lane : lane - by];
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T given, unsigned with) {
    return (T) host::exchange(given, mask, "shfl_xor")[host::current->thread % 32 ^ with];
}
template <class T> inline T __shfl_sync(unsigned mask, T given, unsigned from) {
    return (T) host::exchange(given, mask, "shfl")[from];
}
inline unsigned atomicAdd(unsigned *at, unsigned more) { const unsigned was = *at; *at += more; return was; }
inline unsigned atomicMax(unsigned *at, unsigned other) { const unsigned was = *at; if (other > was) *at = other; return was; }
template <class T> inline T __ldcg(const T *at) { return *at; }
template <class T> inline T __ldcs(const T *at) {
    if ((uintptr_t) at % sizeof(T)) host::fail("a vector is read from an address that it may not have");
    return *at;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
