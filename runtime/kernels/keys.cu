// The first part of one source (keys.cu, plan.cu, topk.cu, one after the other): what it does, keys, and tiles.
//
// Error feedback, selection of the k largest magnitudes, packing and the new residual, for many segments, in one launch.
//
// A segment is a run of elements with a k of its own. What is computed, to the bit, is `ef_topk_torch` in reference.py;
// how:
//
//   accumulate   reads gradient and residual once, writes the new residual, keeps what reaches a floor (last step's) as
//                candidates, and counts keys by bins of a window around it
//   narrow (×3)  each pass finds up to 12 more bits of the k-th key among the candidates. Where these are too
//                few or too many, the new residual is read again instead. Mostly one pass over few keys is enough
//   count, emit  in order of index, so that neither the size of the grid nor the order of atomics shows in the result
//
// Phases are work items behind tickets: a block that waits for a phase waits for items that running blocks have taken,
// never for a block that has yet to start, so no cooperative launch is needed. The host may launch phases apart as well.
//
// No header is needed, so NVRTC alone compiles this; bfloat16 are 16-bit integers here. A host compiler takes it, too,
// with tests/kernels/kernel_host.h, which runs threads as fibers.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef THREADS
#define THREADS 512
#endif
#ifndef VECTORS
#define VECTORS 4  // runs of four neighbouring elements per thread and tile
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // per multiprocessor: bounds the registers
#endif
#ifndef BLOCK_SHARED
#define BLOCK_SHARED(type, name) __shared__ type name
#endif

const u32 WARP = 32, WARPS = THREADS / WARP, FULL = 0xffffffffu;
const u32 ITEMS = 4 * VECTORS, TILE = ITEMS * THREADS;
static_assert(VECTORS >= 1 && VECTORS <= 4, "VECTORS: expected 1 to 4");

const u32 BIN_BITS = 12, BINS = 1u << BIN_BITS, KEY_BITS = 31;
const u32 COARSE = KEY_BITS - BIN_BITS;  // bins so wide that they cover all keys
const u32 FINE = 12;                     // bins of a warm window: 2048 to an octave
const u32 INFINITE = 0x7f800000u;        // the largest key: of NaN, too, so that a step with any is seen everywhere
const u32 NEVER = 0xffffffffu;           // a floor that nothing reaches

enum Phase { ACCUMULATE, NARROW_1, NARROW_2, NARROW_3, COUNT, EMIT, PHASES };
enum Source { LIST, DIRECT, FILTER };  // candidates; the new residual; that, making candidates on the way
enum { MULTIPLE = 8, LEAST_MULTIPLE = 6, MOST_MULTIPLE = 16 };  // rank of the next floor in quarters of k

struct Segment {  // 16 words of 64 bits; never written by kernels
    u64 gradient, residual, following;  // elements from the three bases
    u64 elements, k, output, first_index;
    u64 first_tile, tiles, first_chunk, chunks, tiles_per_chunk;
    u64 first_candidate, capacity, unused_1, unused_2;
};

struct Warm {  // 16 words of 32 bits; what a step leaves to the next; zeros are a cold start, and anything is allowed
    u32 floor, base, shift, multiple;
    u32 flags;      // 1: something was not finite
    u32 threshold;  // the k-th key
    u32 candidates; // how many reached the floor
    u32 calls, cold, hits, misses, overflows, filtered, restarted, direct, passes;
};

struct Progress {  // 16 words of 32 bits; zero between calls
    u32 stored, finished, largest, source;
    u32 low, bits, above, ties;  // the k-th key lies in [low, low + 2^bits), which has `ties` keys, `above` are higher
    u32 floor, unused[7];
};

struct Control {  // 32 words of 32 bits; zero between calls
    u32 ticket[8], done[8], needed[8], left, unused[7];
};

struct Arguments {  // words of 64 bits
    const char *gradient;
    char *residual, *following;
    char *values;
    int *indices;
    const u32 *swapped;  // where it is not 0, residual and following change places; may be null
    const Segment *segments;
    const u32 *tile_segments, *chunk_segments;
    Warm *warm;
    Progress *progress;
    Control *control;
    u32 *histograms;
    uint2 *candidates;  // (index in the segment, bits of the value as float)
    uint2 *tiles;       // (first candidate, candidates)
    uint2 *tile_counts, *chunk_counts;  // (above the bracket, in it)
    u64 segment_count, tile_count, chunk_count;
    u64 first_phase, last_phase;
    u64 random_ties, seed;  // MSTopK: whether the bracket stays 2^12 keys wide, with a run of it from a random place on
};

struct Shared {
    u32 histogram[BINS];
    uint2 prefix[THREADS];
    u64 warp_u64[WARPS];
    u32 warp_u32[WARPS];
    u32 ticket, planner, offset, needed;
    u32 bin[2], above[2], inside[2], total;  // see `rank`
    u32 count[2];
};

__device__ __forceinline__ u32 key_of(u32 word) { return min(word & 0x7fffffffu, INFINITE); }

__device__ __forceinline__ u32 canonical(u32 word) { return (word & 0x7fffffffu) > INFINITE ? 0x7fc00000u : word; }

__device__ __forceinline__ u32 rounded_to_bf16(u32 word) {  // to nearest, ties to even
    return (word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u;
}

template <bool HALF>
__device__ __forceinline__ u32 load(const char *base, u32 index) {
    return HALF ? (u32) reinterpret_cast<const u16 *>(base)[index] << 16 : reinterpret_cast<const u32 *>(base)[index];
}

template <bool HALF>
__device__ __forceinline__ void store(char *base, u32 index, u32 word) {
    if (HALF)
        reinterpret_cast<u16 *>(base)[index] = (u16) (word >> 16);
    else
        reinterpret_cast<u32 *>(base)[index] = word;
}

template <bool HALF>
__device__ __forceinline__ void load_vector(const char *base, u32 index, u32 *words) {
    if (HALF) {
        uint2 two = __ldcs(reinterpret_cast<const uint2 *>(base + 2ull * index));
        words[0] = two.x << 16, words[1] = two.x & 0xffff0000u;
        words[2] = two.y << 16, words[3] = two.y & 0xffff0000u;
    } else {
        uint4 four = __ldcs(reinterpret_cast<const uint4 *>(base + 4ull * index));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

template <bool HALF>
__device__ __forceinline__ void store_vector(char *base, u32 index, const u32 *words) {
    if (HALF) {
        uint2 two;
        two.x = (words[0] >> 16) | (words[1] & 0xffff0000u), two.y = (words[2] >> 16) | (words[3] & 0xffff0000u);
        *reinterpret_cast<uint2 *>(base + 2ull * index) = two;
    } else {
        uint4 four;
        four.x = words[0], four.y = words[1], four.z = words[2], four.w = words[3];
        *reinterpret_cast<uint4 *>(base + 4ull * index) = four;
    }
}

// Where a segment's elements lie. Tiles begin up to three places before it, so that vectors are aligned in memory.
template <bool G16, bool R16>
struct Place {
    const char *gradient, *residual;
    char *following;
    u32 elements, lead;
    bool vectors;

    __device__ void look_up(const Arguments &a, const Segment &s) {
        bool swapped = a.swapped && __ldcg(a.swapped);
        const u32 g = G16 ? 1 : 2, r = R16 ? 1 : 2;  // logarithms of sizes in bytes
        char *first = a.residual + (s.residual << r), *second = a.following + (s.following << r);
        gradient = a.gradient + (s.gradient << g);
        residual = swapped ? second : first;
        following = swapped ? first : second;
        elements = (u32) s.elements;
        lead = (u32) ((u64) following >> r) & 3u;
        vectors = (((u64) gradient >> g) & 3u) == lead && (((u64) residual >> r) & 3u) == lead;
        if (!vectors) lead = 0;
    }

    // Of the vector at a position: which of its elements exist, as bits. Positions count from `lead` before the first.
    __device__ __forceinline__ u32 mask(u32 position) const {
        if (position >= lead && position + 3 - lead < elements) return 15u;
        u32 found = 0;
        for (u32 j = 0; j < 4; j++)
            if (position + j - lead < elements) found |= 1u << j;  // a place before the first is a very high one
        return found;
    }
};

__device__ __forceinline__ u32 position_of(u32 tile, u32 vector) {
    return tile * TILE + vector * (4 * THREADS) + 4 * threadIdx.x;
}

template <bool HALF>
__device__ __forceinline__ void gather(const char *base, u32 position, u32 lead, u32 mask, bool vectors, u32 *words) {
    if (vectors && mask == 15u) {
        load_vector<HALF>(base, position - lead, words);
        return;
    }
    for (u32 j = 0; j < 4; j++) words[j] = mask >> j & 1u ? load<HALF>(base, position + j - lead) : 0u;
}

// residual + gradient of a tile, stored; returns which elements exist, four bits to a vector.
template <bool G16, bool R16>
__device__ __forceinline__ u32 accumulate(const Place<G16, R16> &p, u32 tile, u32 *words) {
    u32 gradients[ITEMS], exist = 0;
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
        u32 position = position_of(tile, v), mask = p.mask(position);
        gather<G16>(p.gradient, position, p.lead, mask, p.vectors, gradients + 4 * v);
        gather<R16>(p.residual, position, p.lead, mask, p.vectors, words + 4 * v);
        exist |= mask << (4 * v);
    }
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
        u32 position = position_of(tile, v), mask = exist >> (4 * v) & 15u;
        for (u32 j = 0; j < 4; j++) {
            u32 i = 4 * v + j;
            words[i] = canonical(__float_as_uint(__fadd_rn(__uint_as_float(words[i]), __uint_as_float(gradients[i]))));
            if (R16) words[i] = rounded_to_bf16(words[i]);
        }
        if (p.vectors && mask == 15u)
            store_vector<R16>(p.following, position - p.lead, words + 4 * v);
        else
            for (u32 j = 0; j < 4; j++)
                if (mask >> j & 1u) store<R16>(p.following, position + j - p.lead, words[4 * v + j]);
    }
    return exist;
}
