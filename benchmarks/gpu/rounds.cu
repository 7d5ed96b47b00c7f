// MSTopK as CommLib published it, each step a kernel of its own: the one to beat. 30 rounds read all magnitudes each.
// Tuned no less than the kernel that it is compared with: vectors, counts in shared memory, one atomic per block.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Search {
    double sum;
    u32 largest, count, done, above_count, above_taken, between_taken;
    float left, right, lower, upper;  // ratios; thresholds that more than k reach, and at most k
};

struct Arguments {
    const float *gradient;
    float *residual, *values;
    int *indices;
    Search *search;
    u64 elements, k;
};

__device__ float threshold_of(const Search &s, u64 n) {
    const float mean = (float) (s.sum / (double) n);
    return mean + (s.left + (s.right - s.left) / 2) * (__uint_as_float(s.largest) - mean);
}

__device__ u32 block_sum(u32 value) {
    __shared__ u32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (u32 d = 16; d; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
    if (threadIdx.x % 32 == 0 && value) atomicAdd(&total, value);
    __syncthreads();
    return total;
}

extern "C" __global__ void begin(const Arguments a) {
    Search s = {};
    s.right = 1.0f, s.upper = __uint_as_float(0x7f800000u);
    *a.search = s;
}

// residual += gradient; the largest magnitude and their sum.
extern "C" __global__ void accumulate(const Arguments a) {
    float sum = 0.0f;
    u32 largest = 0;
    const float4 *gradient = (const float4 *) a.gradient;
    float4 *residual = (float4 *) a.residual;
    for (u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x; i < a.elements / 4; i += (u64) gridDim.x * blockDim.x) {
        float4 r = residual[i];
        const float4 g = __ldcs(gradient + i);
        r.x += g.x, r.y += g.y, r.z += g.z, r.w += g.w;
        residual[i] = r;
        sum += fabsf(r.x) + fabsf(r.y) + fabsf(r.z) + fabsf(r.w);
        largest = max(max(max(largest, __float_as_uint(fabsf(r.x))), __float_as_uint(fabsf(r.y))),
                      max(__float_as_uint(fabsf(r.z)), __float_as_uint(fabsf(r.w))));
    }
    for (u32 d = 16; d; d /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    }
    if (threadIdx.x % 32) return;
    atomicAdd(&a.search->sum, (double) sum);
    atomicMax(&a.search->largest, largest);
}

// One round: counts what reaches the middle of the interval; the last block halves it.
extern "C" __global__ void count(const Arguments a) {
    __shared__ bool last;
    const float threshold = threshold_of(*a.search, a.elements);
    const float4 *residual = (const float4 *) a.residual;
    u32 own = 0;
    for (u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x; i < a.elements / 4; i += (u64) gridDim.x * blockDim.x) {
        const float4 r = residual[i];
        own += (fabsf(r.x) >= threshold) + (fabsf(r.y) >= threshold) + (fabsf(r.z) >= threshold) +
               (fabsf(r.w) >= threshold);
    }
    own = block_sum(own);
    if (threadIdx.x == 0) {
        if (own) atomicAdd(&a.search->count, own);
        __threadfence();
        last = atomicAdd(&a.search->done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x) return;
    Search &s = *a.search;
    const u32 found = atomicAdd(&s.count, 0u);
    const float middle = s.left + (s.right - s.left) / 2;
    if (found > a.k) {
        s.left = middle, s.lower = threshold;
    } else {
        s.right = middle;
        if (found >= s.above_count) s.above_count = found, s.upper = threshold;
    }
    s.count = 0, s.done = 0;
}

// Writes what reaches the upper threshold, then a run of what lies between: any order, as in the original.
extern "C" __global__ void emit(const Arguments a) {
    Search &s = *a.search;
    const float upper = s.upper, lower = s.lower;
    const u32 above = s.above_count;
    for (u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x; i < a.elements; i += (u64) gridDim.x * blockDim.x) {
        const float r = a.residual[i], size = fabsf(r);
        u64 at = a.k;
        if (size >= upper)
            at = atomicAdd(&s.above_taken, 1u);
        else if (size >= lower)
            at = above + (u64) atomicAdd(&s.between_taken, 1u);
        if (at >= a.k) continue;
        a.values[at] = r, a.indices[at] = (int) i, a.residual[i] = 0.0f;
    }
}
