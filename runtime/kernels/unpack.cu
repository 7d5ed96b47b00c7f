// All ranks' messages added up, times a factor, as a dense vector: the source is keys.cu and this, one after the other.
//
// Each warp owns a run of the result, which it makes part by part in shared memory: it takes from every rank's message, in
// order of ranks, what falls into the part. Indices of a message ascend, so that is the message's next piece, and no two
// lanes meet at one place. Sums have one order whatever the grid, and the result is written once, zeros included.

const u32 PART = 512, MOST_RANKS = 512;

struct UnpackArguments {  // words of 64 bits
    const char *values;
    const int *indices;
    char *sums;
    u64 ranks, k, value_stride, index_stride, elements;  // strides in elements, from rank to rank
    u64 factor;                                          // bits of a float
};

struct UnpackShared {
    float part[WARPS][PART];
    u32 position[WARPS][MOST_RANKS];
};

template <bool V16, bool S16>
struct Unpack {
    const UnpackArguments &a;
    float *part;
    u32 *position;
    const u32 lane = threadIdx.x % WARP;

    __device__ Unpack(const UnpackArguments &a, UnpackShared &shared)
        : a(a), part(shared.part[threadIdx.x / WARP]), position(shared.position[threadIdx.x / WARP]) {}

    __device__ int index(u32 rank, u32 i) const { return i < a.k ? a.indices[rank * a.index_stride + i] : 0x7fffffff; }

    __device__ float value(u32 rank, u32 i) const {
        const char *base = a.values + (rank * a.value_stride << (V16 ? 1 : 2));
        return i < a.k ? __uint_as_float(load<V16>(base, i)) : 0.0f;
    }

    // The first of a rank's elements at or behind a place.
    __device__ u32 first_from(u32 rank, u32 place) const {
        u32 low = 0, high = (u32) a.k;
        while (low < high) {
            const u32 middle = low + (high - low) / 2;
            if (index(rank, middle) < (int) place)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    __device__ void add_rank(u32 rank, u32 begin, u32 end, int found, float added) {
        u32 at = position[rank];
        for (;;) {
            const bool inside = found >= (int) begin && (u32) found < end;
            if (inside) part[found - begin] = __fadd_rn(part[found - begin], added);
            const u32 taken = __popc(__ballot_sync(FULL, inside));
            at += taken;
            if (taken < WARP) break;
            found = index(rank, at + lane), added = value(rank, at + lane);
        }
        if (lane == 0) position[rank] = at;
        __syncwarp();
    }

    __device__ void run() {
        const u64 parts = (a.elements + PART - 1) / PART, warps = (u64) gridDim.x * WARPS;
        const u64 warp = (u64) blockIdx.x * WARPS + threadIdx.x / WARP;
        const u64 first = parts * warp / warps, last = parts * (warp + 1) / warps;
        const u32 ranks = (u32) a.ranks;
        const float factor = __uint_as_float((u32) a.factor);
        if (first == last) return;
        for (u32 rank = lane; rank < ranks; rank += WARP) position[rank] = first_from(rank, (u32) first * PART);
        __syncwarp();
        for (u64 p = first; p < last; p++) {
            const u32 begin = (u32) p * PART, end = (u32) min((u64) begin + PART, a.elements);
            for (u32 i = lane; i < PART; i += WARP) part[i] = 0.0f;
            __syncwarp();
            int found = index(0, position[0] + lane);  // of the next rank, asked for while the one before is added
            float added = value(0, position[0] + lane);
            for (u32 rank = 0; rank < ranks; rank++) {
                const int here = found;
                const float now = added;
                if (rank + 1 < ranks) {
                    found = index(rank + 1, position[rank + 1] + lane);
                    added = value(rank + 1, position[rank + 1] + lane);
                }
                add_rank(rank, begin, end, here, now);
            }
            for (u32 i = lane; begin + i < end; i += WARP) {
                const u32 sum = canonical(__float_as_uint(__fmul_rn(part[i], factor)));
                store<S16>(a.sums, begin + i, S16 ? rounded_to_bf16(sum) : sum);
            }
            __syncwarp();
        }
    }
};

#define UNPACK(name, values_are_bf16, sums_are_bf16)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const UnpackArguments a) {                              \
        BLOCK_SHARED(UnpackShared, shared);                                                                            \
        Unpack<values_are_bf16, sums_are_bf16>(a, shared).run();                                                       \
    }

UNPACK(unpack_float32_float32, false, false)
UNPACK(unpack_float32_bfloat16, false, true)
UNPACK(unpack_bfloat16_float32, true, false)
UNPACK(unpack_bfloat16_bfloat16, true, true)
