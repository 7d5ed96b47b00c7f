// The phases of `ef_topk`: the last part of one source, see keys.cu.

template <bool G16, bool R16>
struct Kernel {
    static const u32 LEAST = R16 ? 16 : FINE;  // bfloat16 have no lower bits

    const Arguments &a;
    Shared &shared;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 stop;  // how wide the bracket of the k-th key may stay

    __device__ Kernel(const Arguments &a, Shared &shared)
        : a(a), shared(shared), stop(a.random_ties ? LEAST : R16 ? LEAST : 0) {}

    __device__ void count_key(u32 key, u32 base, u32 shift) {
        if (key >= base) atomicAdd(&shared.histogram[min((key - base) >> shift, BINS - 1)], 1u);
    }

    // Takes the next item of a phase. All threads.
    __device__ u32 take(u32 phase) {
        __syncthreads();
        if (threadIdx.x == 0) shared.ticket = atomicAdd(&a.control->ticket[phase], 1u);
        __syncthreads();
        return shared.ticket;
    }

    __device__ void raise_largest(u32 segment, u32 largest) {
        for (u32 d = WARP / 2; d; d /= 2) largest = max(largest, __shfl_xor_sync(FULL, largest, d));
        if (lane == 0 && largest) atomicMax(&a.progress[segment].largest, largest);
    }

    __device__ void end_run(u32 segment, u32 tiles, u32 largest) {
        raise_largest(segment, largest);
        flush(shared, a.histograms + (u64) segment * BINS);
        finish(a, shared, segment, ACCUMULATE, tiles, LEAST, stop);
    }

    __device__ void accumulate_all() {
        u32 current = NEVER, tiles = 0, largest = 0, next = 0;
        Place<G16, R16> place;
        Window window;
        for (u32 tile = take(ACCUMULATE); tile < a.tile_count; tile = shared.ticket) {
            if (threadIdx.x == 0) next = atomicAdd(&a.control->ticket[ACCUMULATE], 1u);  // answered meanwhile
            const u32 segment = a.segment_count == 1 ? 0 : a.tile_segments[tile];
            const Segment &s = a.segments[segment];
            if (segment != current) {
                if (tiles) end_run(current, tiles, largest);
                current = segment, tiles = 0, largest = 0;
                place.look_up(a, s);
                window.look_up(a.warm[segment], s, LEAST);
            }
            largest = max(largest, accumulate_one(s, segment, place, window, tile - (u32) s.first_tile));
            tiles++;
            __syncthreads();
            if (threadIdx.x == 0) shared.ticket = next;
            __syncthreads();
        }
        if (tiles) end_run(current, tiles, largest);
    }

    __device__ u32 accumulate_one(const Segment &s, u32 segment, const Place<G16, R16> &place, const Window &window,
                                  u32 tile) {
        u32 words[ITEMS], marked = 0, largest = 0;
        const u32 exist = accumulate(place, tile, words);
#pragma unroll
        for (u32 i = 0; i < ITEMS; i++) {
            if (!(exist >> i & 1u)) continue;
            const u32 key = key_of(words[i]);
            largest = max(largest, key);
            if (key >= window.floor) marked |= 1u << i;
            count_key(key, window.base, window.shift);
        }
        if (window.floor != NEVER) append(a, shared, s, a.progress[segment], tile, place.lead, marked, words);
        return largest;
    }

    // The candidates of a tile, or all its elements, in order, 32 at a time: visitor(exists, index, word). A warp.
    template <class Visitor>
    __device__ void visit(const Segment &s, const Place<G16, R16> &place, u32 tile, u32 source, Visitor visitor) {
        if (source == LIST) {
            const uint2 entry = __ldcg(&a.tiles[s.first_tile + tile]);
            const uint2 *candidates = a.candidates + s.first_candidate + entry.x;
            for (u32 i = lane; i - lane < entry.y; i += WARP) {
                uint2 found;
                found.x = found.y = 0;
                if (i < entry.y) found = __ldcg(&candidates[i]);
                visitor(i < entry.y, found.x, found.y);
            }
            return;
        }
        for (u32 i = lane; i < TILE; i += WARP) {
            const u32 position = tile * TILE + i;
            const bool exists = position - place.lead < place.elements;
            visitor(exists, position - place.lead, exists ? load<R16>(place.following, position - place.lead) : 0u);
        }
    }

    __device__ void filter_tile(const Segment &s, Progress &p, const Place<G16, R16> &place, u32 tile, u32 shift) {
        u32 words[ITEMS], marked = 0;
        for (u32 v = 0; v < VECTORS; v++) {
            const u32 position = position_of(tile, v), mask = place.mask(position);
            gather<R16>(place.following, position, place.lead, mask, place.vectors, words + 4 * v);
            for (u32 j = 0; j < 4; j++) {
                const u32 key = key_of(words[4 * v + j]);
                if (!(mask >> j & 1u) || key < p.low) continue;
                marked |= 1u << (4 * v + j);
                if (key - p.low < 1u << p.bits) count_key(key, p.low, shift);
            }
        }
        append(a, shared, s, p, tile, place.lead, marked, words);
    }

    __device__ void narrow_all(u32 phase) {
        for (u32 chunk; (chunk = take(phase)) < a.chunk_count;) {
            const u32 segment = a.chunk_segments[chunk];
            const Segment &s = a.segments[segment];
            Progress &p = a.progress[segment];
            const u32 low = __ldcg(&p.low), bits = __ldcg(&p.bits), source = __ldcg(&p.source);
            if (bits <= stop && source != FILTER) {
                if (threadIdx.x == 0) atomicAdd(&a.control->done[phase], 1u);
                continue;
            }
            Place<G16, R16> place;
            place.look_up(a, s);
            const u32 shift = narrower(bits, stop);
            const u32 first = (chunk - (u32) s.first_chunk) * (u32) s.tiles_per_chunk;
            const u32 end = min(first + (u32) s.tiles_per_chunk, (u32) s.tiles);
            if (source == FILTER)
                for (u32 tile = first; tile < end; tile++) filter_tile(s, p, place, tile, shift);
            else
                for (u32 tile = first + warp; tile < end; tile += WARPS)
                    visit(s, place, tile, source, [&](bool exists, u32, u32 word) {
                        const u32 key = key_of(word);
                        if (exists && key >= low && key - low < 1u << bits) count_key(key, low, shift);
                    });
            flush(shared, a.histograms + (u64) segment * BINS);
            finish(a, shared, segment, phase, 1, LEAST, stop);
        }
    }

    // How many keys of each tile and chunk are above the bracket, and in it.
    __device__ void count_all() {
        for (u32 chunk; (chunk = take(COUNT)) < a.chunk_count;) {
            const Segment &s = a.segments[a.chunk_segments[chunk]];
            const Progress &p = a.progress[a.chunk_segments[chunk]];
            const u32 low = __ldcg(&p.low), width = 1u << __ldcg(&p.bits), source = __ldcg(&p.source);
            Place<G16, R16> place;
            place.look_up(a, s);
            const u32 first = (chunk - (u32) s.first_chunk) * (u32) s.tiles_per_chunk;
            const u32 end = min(first + (u32) s.tiles_per_chunk, (u32) s.tiles);
            if (threadIdx.x < 2) shared.count[threadIdx.x] = 0;
            __syncthreads();
            for (u32 tile = first + warp; tile < end; tile += WARPS) {
                uint2 counts;
                counts.x = counts.y = 0;
                visit(s, place, tile, source, [&](bool exists, u32, u32 word) {
                    const u32 key = key_of(word);
                    const bool reaches = exists && key >= low;
                    counts.x += __popc(__ballot_sync(FULL, reaches && key - low >= width));
                    counts.y += __popc(__ballot_sync(FULL, reaches && key - low < width));
                });
                if (lane) continue;
                a.tile_counts[s.first_tile + tile] = counts;
                atomicAdd(&shared.count[0], counts.x), atomicAdd(&shared.count[1], counts.y);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                uint2 counts;
                counts.x = shared.count[0], counts.y = shared.count[1];
                a.chunk_counts[chunk] = counts;
                __threadfence();
                atomicAdd(&a.control->done[COUNT], 1u);
            }
        }
    }

    // Fills shared.prefix: for each tile of a chunk, what lies before it in the segment. All threads.
    __device__ void add_up(const Segment &s, u32 chunk, u32 first, u32 end) {
        u32 above = 0, inside = 0;
        for (u32 c = (u32) s.first_chunk + threadIdx.x; c < chunk; c += THREADS) {
            const uint2 counts = __ldcg(&a.chunk_counts[c]);
            above += counts.x, inside += counts.y;
        }
        if (threadIdx.x < 2) shared.count[threadIdx.x] = 0;
        __syncthreads();
        if (above) atomicAdd(&shared.count[0], above);
        if (inside) atomicAdd(&shared.count[1], inside);
        u64 own = 0;
        if (first + threadIdx.x < end) {
            const uint2 counts = __ldcg(&a.tile_counts[s.first_tile + first + threadIdx.x]);
            own = (u64) counts.y << 32 | counts.x;
        }
        const u64 through = inclusive_sum(own);
        if (lane == WARP - 1) shared.warp_u64[warp] = through;
        __syncthreads();
        u64 before = through - own + shared.count[0] + ((u64) shared.count[1] << 32);
        for (u32 w = 0; w < warp; w++) before += shared.warp_u64[w];
        shared.prefix[threadIdx.x].x = (u32) before, shared.prefix[threadIdx.x].y = (u32) (before >> 32);
        __syncthreads();
    }

    // From which place on keys of the bracket are taken: the first one, or any that leaves enough.
    __device__ u32 first_tie(u32 segment, u32 ties, u32 missing) const {
        if (!a.random_ties) return 0;
        u64 x = a.seed + 0x9e3779b97f4a7c15ull * (segment + 1);  // splitmix64
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return (u32) ((x ^ x >> 31) % ((u64) ties - missing + 1));
    }

    __device__ void emit_all() {
        for (u32 chunk; (chunk = take(EMIT)) < a.chunk_count;) {
            const u32 segment = a.chunk_segments[chunk];
            const Segment &s = a.segments[segment];
            const Progress &p = a.progress[segment];
            const u32 low = __ldcg(&p.low), width = 1u << __ldcg(&p.bits), source = __ldcg(&p.source);
            const u32 missing = (u32) s.k - __ldcg(&p.above);
            const u32 start = first_tie(segment, __ldcg(&p.ties), missing);
            Place<G16, R16> place;
            place.look_up(a, s);
            const u32 first = (chunk - (u32) s.first_chunk) * (u32) s.tiles_per_chunk;
            const u32 end = min(first + (u32) s.tiles_per_chunk, (u32) s.tiles);
            add_up(s, chunk, first, end);
            for (u32 tile = first + warp; tile < end; tile += WARPS) {
                u32 above = shared.prefix[tile - first].x, inside = shared.prefix[tile - first].y;
                const u32 below = (1u << lane) - 1;
                visit(s, place, tile, source, [&](bool exists, u32 index, u32 word) {
                    const u32 key = key_of(word);
                    const bool reaches = exists && key >= low, higher = reaches && key - low >= width;
                    const u32 highers = __ballot_sync(FULL, higher), ties = __ballot_sync(FULL, reaches && !higher);
                    const u32 tie = inside + __popc(ties & below);
                    const u32 taken = tie > start ? min(tie - start, missing) : 0;
                    if (higher || (reaches && tie >= start && tie - start < missing)) {
                        const u64 at = s.output + above + __popc(highers & below) + taken;
                        store<R16>(a.values, (u32) at, word);
                        a.indices[at] = (int) (s.first_index + index);
                        store<R16>(place.following, index, 0);
                    }
                    above += __popc(highers), inside += __popc(ties);
                });
            }
        }
    }

    // Returns when all blocks are done with the items of a phase. All threads.
    __device__ void wait_for(u32 phase) {
        const u32 items = (u32) (phase == ACCUMULATE ? a.tile_count : a.chunk_count);
        if (threadIdx.x == 0) {
            while (*(volatile const u32 *) &a.control->done[phase] != items) __nanosleep(64);
            __threadfence();
        }
        __syncthreads();
    }

    // The last block to leave makes everything ready for the next call. All threads.
    __device__ void leave() {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            shared.planner = atomicAdd(&a.control->left, 1u) == gridDim.x - 1;
            __threadfence();
        }
        __syncthreads();
        if (!shared.planner) return;
        u32 *control = reinterpret_cast<u32 *>(a.control), *progress = reinterpret_cast<u32 *>(a.progress);
        for (u32 i = threadIdx.x; i < sizeof(Control) / 4; i += THREADS) control[i] = 0;
        for (u32 i = threadIdx.x; i < a.segment_count * (sizeof(Progress) / 4); i += THREADS) progress[i] = 0;
    }

    __device__ void run() {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
        u32 before = PHASES;
        for (u32 phase = (u32) a.first_phase; phase <= a.last_phase; phase++) {
            if (before != PHASES) wait_for(before);
            if (phase >= NARROW_1 && phase <= NARROW_3) {
                if (threadIdx.x == 0) shared.needed = __ldcg(&a.control->needed[phase]);
                __syncthreads();
                const bool needed = shared.needed;
                __syncthreads();
                if (!needed) continue;
                narrow_all(phase);
            } else if (phase == ACCUMULATE) {
                accumulate_all();
            } else if (phase == COUNT) {
                count_all();
            } else {
                emit_all();
            }
            before = phase;
        }
        if (a.last_phase == EMIT) leave();
    }
};

#define EF_TOPK(name, gradient_is_bf16, residual_is_bf16)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) name(const Arguments a) {                        \
        BLOCK_SHARED(Shared, shared);                                                                                  \
        Kernel<gradient_is_bf16, residual_is_bf16>(a, shared).run();                                                   \
    }

EF_TOPK(ef_topk_float32_float32, false, false)
EF_TOPK(ef_topk_bfloat16_float32, true, false)
EF_TOPK(ef_topk_float32_bfloat16, false, true)
EF_TOPK(ef_topk_bfloat16_bfloat16, true, true)
