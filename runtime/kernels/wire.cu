// All elements in fewer bytes, and back: the source is keys.cu and this, one after the other.
//
// What is computed, to the bit, is what `WireCompressor` (runtime/sparse/compressors/wire.py) computes on a CPU, but for
// the codes of a block that is not finite, which are 0 here: its scale is NaN. Each block, elements with one scale, is one
// warp's, which reads it once, holds it in registers and writes once. What is encoded is residual + gradient, or the sum of
// what all ranks' rows hold.

const u32 MOST = 512, RUNS = MOST / (4 * WARP);  // elements of a block; runs of four neighbours of each lane

enum WireSource { FLOAT32, BFLOAT16, ROWS };  // gradients, or rows of bytes

struct WireArguments {        // words of 64 bits
    const char *source;       // gradients, or the first row
    char *residual, *following;  // (elements,), float; null: what is lost is lost
    const u32 *swapped;       // where it is not 0, they change places; may be null
    char *rows;               // filled
    char *sums;               // (elements,), float; filled where nothing is encoded
    u64 source_stride, row_stride;  // in bytes, from row to row
    u64 ranks;                // whose rows are added up
    u64 elements, share, width, scales_at;  // share: of a row; width: of a block; where a row's scales begin
    u64 no_minus_zero;        // −0 becomes 0 in sums
    u64 largest;              // bits of a float, as scales: what the largest code stands for, or the largest one sent does
    u64 least_scale, largest_scale, dropped;  // the last: bits that are 0 in scales, which are rounded up
};

// Codes of one or two bytes: a float rounded (to nearest, ties to even) to a few bits, none of them infinite.
template <u32 SIZE, u32 MANTISSA, u32 BIAS, bool SCALED>
struct Minifloat {
    static const u32 BYTES = SIZE, DROPPED = 23 - MANTISSA, SIGN = 1u << (8 * SIZE - 1);
    static const bool HAS_SCALES = SCALED;

    static __device__ __forceinline__ u32 code(u32 word) {
        const u32 normal = (128 - BIAS) << 23, magnitude = word & 0x7fffffffu, sign = word >> 31 ? SIGN : 0u;
        if (magnitude < normal) {  // a sum with this has the places of the smallest codes
            const u32 high = normal + (DROPPED << 23);
            return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(high))) - high);
        }
        const u32 rounded = magnitude + (1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1u);
        return sign | (rounded - ((127 - BIAS) << 23)) >> DROPPED;
    }

    static __device__ __forceinline__ float value(u32 code) {
        const float magnitude = __uint_as_float((code & (SIGN - 1)) << DROPPED);
        const float found = __fmul_rn(magnitude, __uint_as_float((254 - BIAS) << 23));
        return code & SIGN ? -found : found;
    }

    static __device__ __forceinline__ float round(float given, u32 &found) {
        found = code(__float_as_uint(given));
        return value(found);
    }
};

struct Int8 {
    static const u32 BYTES = 1;
    static const bool HAS_SCALES = true;

    static __device__ __forceinline__ float value(u32 code) { return (float) (signed char) code; }

    static __device__ __forceinline__ float round(float given, u32 &found) {
        const float rounded = rintf(given);  // −0 stays, so that −0 of a sum and what is left of it add up to 0
        found = (u32) (int) rounded & 255u;
        return rounded;
    }
};

typedef Minifloat<1, 3, 7, true> Float8;
typedef Minifloat<2, 10, 15, true> Float16;
typedef Minifloat<2, 7, 127, false> Bfloat16;

template <u32 BYTES>
__device__ __forceinline__ void load_codes(const char *base, u32 index, u32 mask, bool vectors, u32 *codes) {
    if (vectors && mask == 15u) {
        if (BYTES == 1) {
            const u32 four = __ldcs(reinterpret_cast<const u32 *>(base + index));
            for (u32 j = 0; j < 4; j++) codes[j] = four >> (8 * j) & 255u;
        } else {
            const uint2 four = __ldcs(reinterpret_cast<const uint2 *>(base + 2ull * index));
            codes[0] = four.x & 0xffffu, codes[1] = four.x >> 16, codes[2] = four.y & 0xffffu, codes[3] = four.y >> 16;
        }
        return;
    }
    for (u32 j = 0; j < 4; j++) {
        codes[j] = 0;
        if (!(mask >> j & 1u)) continue;
        codes[j] = BYTES == 1 ? (u32) (unsigned char) base[index + j] : (u32) reinterpret_cast<const u16 *>(base)[index + j];
    }
}

template <u32 BYTES>
__device__ __forceinline__ void store_codes(char *base, u32 index, u32 mask, bool vectors, const u32 *codes) {
    if (vectors && mask == 15u) {
        if (BYTES == 1) {
            *reinterpret_cast<u32 *>(base + index) = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        } else {
            uint2 four;
            four.x = codes[0] | codes[1] << 16, four.y = codes[2] | codes[3] << 16;
            *reinterpret_cast<uint2 *>(base + 2ull * index) = four;
        }
        return;
    }
    for (u32 j = 0; j < 4; j++) {
        if (!(mask >> j & 1u)) continue;
        if (BYTES == 1)
            base[index + j] = (char) codes[j];
        else
            reinterpret_cast<u16 *>(base)[index + j] = (u16) codes[j];
    }
}

__device__ __forceinline__ void store_floats(char *base, u32 index, u32 mask, bool vectors, const u32 *words) {
    if (vectors && mask == 15u) {
        store_vector<false>(base, index, words);
        return;
    }
    for (u32 j = 0; j < 4; j++)
        if (mask >> j & 1u) store<false>(base, index + j, words[j]);
}

struct WireBlock {
    u32 row, inside, first, count;  // of a row; of its elements, and of all, the first; how many
};

template <class F, int SOURCE, bool ENCODES>
struct Wire {
    const WireArguments &a;
    const u32 lane = threadIdx.x % WARP;
    const char *residual;
    char *following;
    bool vectors;

    __device__ Wire(const WireArguments &a) : a(a) {
        const bool swapped = a.swapped && __ldcg(a.swapped);
        residual = swapped ? a.following : a.residual;
        following = swapped ? a.residual : a.following;
        const u64 of_floats = (u64) residual | (u64) following | (u64) a.sums | (SOURCE == FLOAT32 ? (u64) a.source : 0);
        const u64 of_codes = (u64) a.rows | a.row_stride | (SOURCE == ROWS ? (u64) a.source | a.source_stride : 0);
        const bool halves = SOURCE != BFLOAT16 || (u64) a.source % 8 == 0;
        vectors = of_floats % 16 == 0 && of_codes % (4 * F::BYTES) == 0 && halves && (a.width | a.share) % 4 == 0;
    }

    __device__ __forceinline__ u32 place(u32 run) const { return 4 * (run * WARP + lane); }

    __device__ __forceinline__ u32 mask(u32 run, u32 count) const {
        const u32 at = place(run);
        return at >= count ? 0u : count - at >= 4 ? 15u : (1u << (count - at)) - 1;
    }

    __device__ void add_up(const WireBlock &b, float *total) {
        for (u32 rank = 0; rank < a.ranks; rank++) {
            const char *row = a.source + (b.row + rank) * a.source_stride;
            float scale = 1.0f;
            if (F::HAS_SCALES) scale = reinterpret_cast<const float *>(row + a.scales_at)[b.inside / (u32) a.width];
#pragma unroll
            for (u32 run = 0; run < RUNS; run++) {
                u32 codes[4];
                load_codes<F::BYTES>(row, b.inside + place(run), mask(run, b.count), vectors, codes);
                for (u32 j = 0; j < 4; j++) {
                    const float value = F::HAS_SCALES ? __fmul_rn(F::value(codes[j]), scale) : F::value(codes[j]);
                    float &sum = total[4 * run + j];
                    sum = rank ? __fadd_rn(sum, value) : value;
                }
            }
        }
    }

    __device__ void accumulate(const WireBlock &b, float *total) {
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 exist = mask(run, b.count);
            u32 words[4], kept[4] = {};
            gather<SOURCE == BFLOAT16>(a.source, b.first + place(run), 0, exist, vectors, words);
            if (residual) gather<false>(residual, b.first + place(run), 0, exist, vectors, kept);
            for (u32 j = 0; j < 4; j++) {
                const float gradient = __uint_as_float(words[j]);
                total[4 * run + j] = residual ? __fadd_rn(__uint_as_float(kept[j]), gradient) : gradient;
            }
        }
    }

    // Of a block, in all lanes; NaN where an element is not finite.
    __device__ float scale_of(const float *total) {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < 4 * RUNS; i++) largest = max(largest, __float_as_uint(total[i]) & 0x7fffffffu);
        for (u32 d = WARP / 2; d; d /= 2) largest = max(largest, __shfl_xor_sync(FULL, largest, d));
        if (largest >= INFINITE) return __uint_as_float(0x7fc00000u);
        u32 word = __float_as_uint(__fdiv_rn(__uint_as_float(largest), __uint_as_float((u32) a.largest)));
        word = min(max(word, (u32) a.least_scale), (u32) a.largest_scale);
        return __uint_as_float((word + (u32) a.dropped) & ~(u32) a.dropped);
    }

    // A code, and what it loses of an element.
    __device__ __forceinline__ float encode(float total, float scale, float inverse, bool odd, u32 &code) {
        const u32 word = __float_as_uint(total);
        float limit = __uint_as_float((u32) a.largest), value = total;
        if (F::HAS_SCALES) {
            value = odd ? 0.0f : __fmul_rn(total, inverse);
        } else {
            odd = (word & 0x7fffffffu) >= INFINITE;
            if (odd) limit = __uint_as_float(INFINITE), value = __uint_as_float(canonical(word));
        }
        value = value > limit ? limit : value < -limit ? -limit : value;
        const float sent = F::round(value, code);
        return odd ? 0.0f : __fadd_rn(total, -(F::HAS_SCALES ? __fmul_rn(sent, scale) : sent));
    }

    __device__ void send(const WireBlock &b, const float *total) {
        char *row = a.rows + b.row * a.row_stride;
        float scale = 1.0f, inverse = 1.0f;
        if (F::HAS_SCALES) {
            scale = scale_of(total), inverse = __fdiv_rn(1.0f, scale);
            if (lane == 0) reinterpret_cast<float *>(row + a.scales_at)[b.inside / (u32) a.width] = scale;
        }
        const bool odd = scale != scale;
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 exist = mask(run, b.count), at = b.first + place(run);
            u32 codes[4], lost[4], before[4] = {};
            if (SOURCE == ROWS && following) gather<false>(following, at, 0, exist, vectors, before);
            for (u32 j = 0; j < 4; j++) {
                const float rest = encode(total[4 * run + j], scale, inverse, odd, codes[j]);
                lost[j] = __float_as_uint(SOURCE == ROWS && following ? __fadd_rn(__uint_as_float(before[j]), rest) : rest);
            }
            store_codes<F::BYTES>(row, b.inside + place(run), exist, vectors, codes);
            if (following) store_floats(following, at, exist, vectors, lost);
        }
    }

    __device__ void keep(const WireBlock &b, const float *total) {
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            u32 words[4];
            for (u32 j = 0; j < 4; j++) {
                const float sum = total[4 * run + j];
                words[j] = canonical(__float_as_uint(a.no_minus_zero ? __fadd_rn(sum, 0.0f) : sum));
            }
            store_floats(a.sums, b.first + place(run), mask(run, b.count), vectors, words);
        }
    }

    __device__ void run() {
        const u32 elements = (u32) a.elements, share = (u32) a.share, width = (u32) a.width;
        const u32 of_row = (share + width - 1) / width, blocks = (elements + share - 1) / share * of_row;
        for (u32 i = blockIdx.x * WARPS + threadIdx.x / WARP; i < blocks; i += gridDim.x * WARPS) {
            WireBlock b;
            b.row = i / of_row, b.inside = i % of_row * width;
            const u64 first = (u64) b.row * share + b.inside;
            if (first >= elements) continue;
            b.first = (u32) first, b.count = min(min(width, share - b.inside), elements - b.first);
            float total[4 * RUNS];
            if (SOURCE == ROWS)
                add_up(b, total);
            else
                accumulate(b, total);
            if (ENCODES)
                send(b, total);
            else
                keep(b, total);
        }
    }
};

#define WIRE(name, format, source, encodes)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) name(const WireArguments a) {                    \
        Wire<format, source, encodes>(a).run();                                                                        \
    }

WIRE(wire_int8_float32, Int8, FLOAT32, true)
WIRE(wire_int8_bfloat16, Int8, BFLOAT16, true)
WIRE(wire_int8_combine, Int8, ROWS, true)
WIRE(wire_int8_decode, Int8, ROWS, false)
WIRE(wire_float8_e4m3fn_float32, Float8, FLOAT32, true)
WIRE(wire_float8_e4m3fn_bfloat16, Float8, BFLOAT16, true)
WIRE(wire_float8_e4m3fn_combine, Float8, ROWS, true)
WIRE(wire_float8_e4m3fn_decode, Float8, ROWS, false)
WIRE(wire_float16_float32, Float16, FLOAT32, true)
WIRE(wire_float16_bfloat16, Float16, BFLOAT16, true)
WIRE(wire_float16_combine, Float16, ROWS, true)
WIRE(wire_float16_decode, Float16, ROWS, false)
WIRE(wire_bfloat16_float32, Bfloat16, FLOAT32, true)
WIRE(wire_bfloat16_bfloat16, Bfloat16, BFLOAT16, true)
WIRE(wire_bfloat16_combine, Bfloat16, ROWS, true)
WIRE(wire_bfloat16_decode, Bfloat16, ROWS, false)
