// Candidates of a segment, counts of its keys, and what they say: which pass is next, what the next step begins with.
// The second part of one source: see keys.cu.

template <class T>
__device__ __forceinline__ T inclusive_sum(T value) {  // over the lanes of a warp
    const u32 lane = threadIdx.x % WARP;
    for (u32 d = 1; d < WARP; d *= 2) {
        T other = __shfl_up_sync(FULL, value, d);
        if (lane >= d) value += other;
    }
    return value;
}

__device__ __forceinline__ u64 spread(u32 bytes) {  // four counts of 8 bits → of 16 bits
    return (u64) (bytes & 255u) | (u64) (bytes >> 8 & 255u) << 16 | (u64) (bytes >> 16 & 255u) << 32 |
           (u64) (bytes >> 24) << 48;
}

// Appends what is marked in a tile to the segment's candidates, ascending, in one piece. All threads of the block.
__device__ void append(const Arguments &a, Shared &shared, const Segment &s, Progress &progress, u32 tile, u32 lead,
                       u32 marked, const u32 *words) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 counts = 0;
    for (u32 v = 0; v < VECTORS; v++) counts |= (u32) __popc(marked >> (4 * v) & 15u) << (8 * v);
    const u32 through = inclusive_sum(counts);
    if (lane == WARP - 1) shared.warp_u32[warp] = through;
    __syncthreads();
    if (warp == 0) {
        const u64 own = lane < WARPS ? spread(shared.warp_u32[lane]) : 0;
        const u64 sums = inclusive_sum(own);
        const u64 all = __shfl_sync(FULL, sums, WARP - 1);
        const u64 one = all & 0xffffu, two = one + (all >> 16 & 0xffffu), three = two + (all >> 32 & 0xffffu);
        const u64 first = one << 16 | two << 32 | three << 48;  // elements of the tile's earlier vectors
        if (lane < WARPS) shared.warp_u64[lane] = sums - own + first;
        if (lane == 0) {
            const u32 total = (u32) (three + (all >> 48));
            const u32 offset = total ? atomicAdd(&progress.stored, total) : 0;
            uint2 entry;
            entry.x = offset, entry.y = total;
            a.tiles[s.first_tile + tile] = entry;
            shared.offset = (u64) offset + total <= s.capacity ? offset : NEVER;
        }
    }
    __syncthreads();
    const u32 offset = shared.offset;
    if (!marked || offset == NEVER) return;
    uint2 *out = a.candidates + s.first_candidate + offset;
    const u64 before = shared.warp_u64[warp] + spread(through) - spread(counts);
    for (u32 v = 0; v < VECTORS; v++) {
        u32 at = (u32) (before >> (16 * v) & 0xffffu);
        for (u32 j = 0; j < 4; j++) {
            if (!(marked >> (4 * v + j) & 1u)) continue;
            uint2 entry;
            entry.x = position_of(tile, v) + j - lead, entry.y = words[4 * v + j];
            out[at++] = entry;
        }
    }
}

// What a warm start says, made sound: any bits may lie there. `least` is how wide bins are at least, as a power of two.
struct Window {
    u32 floor, base, shift, multiple;
    bool cold;

    __device__ void look_up(const Warm &w, const Segment &s, u32 least) {
        const u32 aligned = ~((1u << least) - 1);
        cold = w.shift == 0;
        shift = w.shift < least || w.shift > COARSE ? COARSE : w.shift;
        floor = cold ? (s.elements <= s.capacity ? 0u : NEVER) : s.capacity ? w.floor & aligned : NEVER;
        base = cold ? 0u : min(w.base, floor) & aligned;
        multiple = cold ? (u32) MULTIPLE : min(max(w.multiple, (u32) LEAST_MULTIPLE), (u32) MOST_MULTIPLE);
    }
};

// Moves the block's counts to the segment's. All threads.
__device__ void flush(Shared &shared, u32 *histogram) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += THREADS) {
        const u32 count = shared.histogram[i];
        if (!count) continue;
        atomicAdd(&histogram[i], count);
        shared.histogram[i] = 0;
    }
}

static_assert(BINS % THREADS == 0 && THREADS % WARP == 0, "THREADS: expected a power of two from 32 to 1024");

// In which bin, from the highest down, two ranks lie, how many are above it and in it (0: the rank is in none), and how
// many there are in all. Leaves zeros. All threads.
__device__ void rank(Shared &shared, u32 *histogram, const u32 *wanted) {
    const u32 each = BINS / THREADS, first = BINS - (threadIdx.x + 1) * each;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 own = 0;
    for (u32 i = 0; i < each; i++) own += __ldcg(&histogram[first + i]);
    u32 through = inclusive_sum(own);
    if (threadIdx.x == 0) shared.inside[0] = shared.inside[1] = 0;
    if (lane == WARP - 1) shared.warp_u32[warp] = through;
    __syncthreads();
    for (u32 w = 0; w < warp; w++) through += shared.warp_u32[w];
    if (threadIdx.x == THREADS - 1) shared.total = through;
    for (u32 which = 0; which < 2; which++) {
        u32 above = through - own;
        if (above >= wanted[which] || wanted[which] > through) continue;
        u32 bin = first + each - 1;
        for (u32 count; above + (count = __ldcg(&histogram[bin])) < wanted[which]; bin--) above += count;
        shared.bin[which] = bin, shared.above[which] = above, shared.inside[which] = __ldcg(&histogram[bin]);
    }
    __syncthreads();
    for (u32 i = 0; i < each; i++) histogram[first + i] = 0;
}

__device__ __forceinline__ u32 narrower(u32 bits, u32 stop) {  // how wide the bins of the next pass are
    const u32 shift = bits > BIN_BITS ? bits - BIN_BITS : 0;
    return max(shift, min(stop, bits));
}

// After the last pass over a segment: what the next step starts with. One thread.
__device__ void warm_up(Warm &w, const Segment &s, const Progress &p, u32 least) {
    w.calls++;
    w.threshold = p.low;
    if (p.source == DIRECT) w.direct++;
    if (w.flags & 1u) return;  // the step will be undone: what it looked like says nothing about the next one
    const u32 floor = min(s.capacity ? p.floor : p.low, p.low);
    u32 shift = least;  // the window goes half an octave above the k-th key, at least
    while (shift < COARSE && (u64) p.low + (1u << 22) >= (u64) floor + ((u64) (BINS / 2) << shift)) shift++;
    const u32 below = (BINS / 2) << shift;
    w.floor = floor, w.shift = shift;
    w.base = floor > below ? (floor - below) & ~((1u << least) - 1) : 0;
}

// What the counts of the first phase say. One thread.
__device__ void plan_first(Warm &w, const Segment &s, Progress &p, const Shared &found, const Window &window) {
    const u32 k = (u32) s.k, stored = p.stored;
    w.flags = p.largest >= INFINITE;
    w.candidates = stored;
    w.multiple = window.multiple;
    if (window.cold) {
        w.cold++;
    } else if (window.floor != NEVER && stored < k) {
        w.misses++;
        w.multiple = min(window.multiple + 2, (u32) MOST_MULTIPLE);
    } else if (stored > s.capacity) {
        w.overflows++;
        w.multiple = max(window.multiple - 1, (u32) LEAST_MULTIPLE);
    } else if (window.floor != NEVER) {
        w.hits++;
    }
    u64 counted = ~0ull;  // how many reach `low`
    p.floor = found.inside[1] ? window.base + (found.bin[1] << window.shift) : window.base;
    if (found.inside[0]) {
        p.low = window.base + (found.bin[0] << window.shift), p.bits = window.shift;
        p.above = found.above[0], p.ties = found.inside[0];
        counted = (u64) p.above + p.ties;
        if (found.bin[0] == BINS - 1)  // all higher keys are counted there, too
            while (p.bits < KEY_BITS && (u64) p.low + (1u << p.bits) <= INFINITE) p.bits++;
    } else {
        p.low = 0, p.bits = KEY_BITS, p.above = 0, p.floor = 0;
        w.restarted++;
    }
    p.source = k <= stored && stored <= s.capacity ? LIST : counted <= s.capacity ? FILTER : DIRECT;
}

// What one more pass says. One thread.
__device__ void plan_next(const Segment &s, Progress &p, const Shared &found, u32 phase, u32 stop) {
    const u32 shift = narrower(p.bits, stop);
    if (found.inside[1]) p.floor = p.low + (found.bin[1] << shift);
    p.low += found.bin[0] << shift, p.bits = shift;
    p.above += found.above[0], p.ties = found.inside[0];
    if (p.source == FILTER)
        p.source = LIST;
    else if (p.source == DIRECT && (u64) p.above + p.ties <= s.capacity && phase < NARROW_3)
        p.source = FILTER;
}

// The block that has finished a segment's last item reads what all blocks have counted. All threads.
__device__ void plan(const Arguments &a, Shared &shared, u32 segment, u32 phase, u32 least, u32 stop) {
    const Segment &s = a.segments[segment];
    Warm &w = a.warm[segment];
    Progress &p = a.progress[segment];
    Window window;
    window.look_up(w, s, least);
    const u32 above = phase == ACCUMULATE ? 0 : p.above;
    const u32 multiple = phase == ACCUMULATE ? window.multiple : w.multiple;
    const u64 rank_of_floor = max(s.k, s.k * multiple / 4);
    const u32 wanted[2] = {(u32) s.k - above, (u32) min(rank_of_floor - above, (u64) NEVER)};
    rank(shared, a.histograms + (u64) segment * BINS, wanted);
    if (threadIdx.x != 0) return;
    if (phase == ACCUMULATE)
        plan_first(w, s, p, shared, window);
    else
        plan_next(s, p, shared, phase, stop);
    if (p.source == FILTER) w.filtered++, p.stored = 0;
    p.finished = 0;
    if (p.bits > stop || p.source == FILTER) {
        w.passes++;
        atomicAdd(&a.control->needed[phase + 1], 1u);
    } else {
        warm_up(w, s, p, least);
    }
}

// Some items of a segment are done; after its last one the block plans on. All threads.
__device__ void finish(const Arguments &a, Shared &shared, u32 segment, u32 phase, u32 items, u32 least, u32 stop) {
    const Segment &s = a.segments[segment];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u32 all = (u32) (phase == ACCUMULATE ? s.tiles : s.chunks);
        shared.planner = atomicAdd(&a.progress[segment].finished, items) + items == all;
        __threadfence();
    }
    __syncthreads();
    if (shared.planner) plan(a, shared, segment, phase, least, stop);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&a.control->done[phase], items);
    }
}
