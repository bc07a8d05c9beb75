// Kernel of interpretable_attention.py in float32: a block owns a sequence, a warp QUERIES of its predicted steps, and
// a lane every steps 2l and 2l + 1 of CHUNK for all of them. Keys of a head, and at last the values, pass
// through shared memory CHUNK steps at a time, keys with steps along their rows. A warp's scores and mean
// attention lie beside each other for its queries, so that a lane reads or writes them 16 bytes at once.
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int QUERIES = 4, CHUNK = 2 * WARP_LANES, KEY_STRIDE = CHUNK + 2;

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

struct Seen {
    int length, future_length, history, ahead;

    __device__ bool operator()(int query, int step) const {
        const int of_future = step - history;
        return step < history ? step < length : of_future < query + ahead && of_future < future_length;
    }
};

// Columns `from` on of CHUNK steps: keys [width][KEY_STRIDE], or values [CHUNK][width].
template <bool KEYS>
__device__ inline void load_chunk(float* chunk, const Real* from, long long step_stride, int first, int steps,
                                  int width) {
    for (int i = threadIdx.x; i < CHUNK * width; i += blockDim.x) {
        const int s = i / width, k = i % width;
        const float x = first + s < steps ? widened(from[(first + s) * step_stride + k]) : 0.f;
        chunk[KEYS ? k * KEY_STRIDE + s : i] = x;
    }
}

__device__ inline float four_at(const float4& x, int q) { return q == 0 ? x.x : q == 1 ? x.y : q == 2 ? x.z : x.w; }

// scores of all steps for the warp's queries, a chunk of keys after the other.
__device__ inline void make_scores(float4* score, float* chunk, const float4* asked, const Real* keys,
                                   long long step_stride, int steps, int width, int first_query,
                                   const Seen& seen) {
    const int lane = lane_of_warp();
#pragma unroll 1
    for (int first = 0; first < steps; first += CHUNK) {
        __syncthreads();
        load_chunk<true>(chunk, keys, step_stride, first, steps, width);
        __syncthreads();
        float sums[2][QUERIES] = {};
#pragma unroll 4
        for (int k = 0; k < width; ++k) {
            const float2 key = *reinterpret_cast<const float2*>(chunk + k * KEY_STRIDE + 2 * lane);
            const float4 query = asked[k];
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
                sums[0][q] = fmaf(key.x, four_at(query, q), sums[0][q]);
                sums[1][q] = fmaf(key.y, four_at(query, q), sums[1][q]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int step = first + 2 * lane + i;
#pragma unroll
            for (int q = 0; q < QUERIES; ++q)
                if (!seen(first_query + q, step)) sums[i][q] = -1e9f;
            if (step < steps) score[step] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        }
    }
}

// Adds share * softmax of a head's scores to the mean. A lane reads what it wrote.
__device__ inline void add_softmax(float* mean, float* score, int steps, float share) {
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
        const auto each_step = [&](auto act) {
            for (int first = 2 * lane_of_warp(); first < steps; first += CHUNK)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (first + i < steps) act((first + i) * QUERIES + q);
        };
        float most = -3e38f, sum = 0.f;
        each_step([&](int at) { most = score[at] > most || score[at] != score[at] ? score[at] : most; });
        most = warp_max(most);
        each_step([&](int at) {
            score[at] = exponential(score[at] - most);
            sum += score[at];
        });
        const float scale = share * reciprocal(warp_sum(sum));
        each_step([&](int at) { mean[at] = fmaf(score[at], scale, mean[at]); });
    }
}

extern "C" __global__ void interpretable_attention(const Real* query, const Real* sources, const int* lengths,
                                                   const int* future_lengths, Real* mixed, float* attention,
                                                   int future, int sequences, int steps, int heads, int width,
                                                   int ahead) {
    extern __shared__ uint4 memory[];
    const int warps = blockDim.x / WARP_LANES, warp = warp_index(), lane = lane_of_warp();
    const int sequence = blockIdx.x, history = steps - future, columns = heads * width;
    float4* const score = reinterpret_cast<float4*>(memory) + warp * steps;
    float4* const mean = reinterpret_cast<float4*>(memory) + (warps + warp) * steps;
    float4* const asked = reinterpret_cast<float4*>(memory) + 2 * warps * steps + warp * width;
    float* const chunk = reinterpret_cast<float*>(reinterpret_cast<float4*>(memory) + warps * (2 * steps + width));
    const long long step_stride = (long long)sequences * (columns + width);
    const Real* const of_sequence = sources + (long long)sequence * (columns + width);
    const Seen seen{lengths == nullptr ? history : lengths[sequence],
                    future_lengths == nullptr ? future : future_lengths[sequence], history, ahead};
    const float scale = reciprocal_root(float(max(width, 1)));

#pragma unroll 1
    for (int base = 0; base < future; base += warps * QUERIES) {
        const int first_query = base + warp * QUERIES;
        // Lanes may still read the mean of the queries before.
        __syncwarp();
        for (int s = lane; s < steps; s += WARP_LANES) mean[s] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int h = 0; h < heads; ++h) {
            __syncwarp();
            for (int i = lane; i < width * QUERIES; i += WARP_LANES) {
                const int k = i / QUERIES, q = first_query + i % QUERIES;
                const long long at = ((long long)min(q, future - 1) * sequences + sequence) * columns;
                reinterpret_cast<float*>(asked)[i] = widened(query[at + h * width + k]) * scale;
            }
            make_scores(score, chunk, asked, of_sequence + h * width, step_stride, steps, width,
                        first_query, seen);
            add_softmax(reinterpret_cast<float*>(mean), reinterpret_cast<float*>(score), steps,
                        reciprocal(float(heads)));
        }
        __syncwarp();
        for (int q = 0; q < QUERIES && first_query + q < future; ++q)
            for (int s = lane; s < steps; s += WARP_LANES)
                attention[((long long)(first_query + q) * sequences + sequence) * steps + s] =
                    reinterpret_cast<const float*>(mean)[s * QUERIES + q];
        // What has been asked is done with: its place holds what is found, a column a lane.
        for (int k = lane; k < width; k += WARP_LANES) asked[k] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int first = 0; first < steps; first += CHUNK) {
            __syncthreads();
            load_chunk<false>(chunk, of_sequence + columns, step_stride, first, steps, width);
            __syncthreads();
            for (int k = lane; k < width; k += WARP_LANES) {
                float4 sum = asked[k];
#pragma unroll 4
                for (int s = 0; s < min(CHUNK, steps - first); ++s) {
                    const float value = chunk[s * width + k];
                    const float4 weight = mean[first + s];
                    sum.x = fmaf(weight.x, value, sum.x);
                    sum.y = fmaf(weight.y, value, sum.y);
                    sum.z = fmaf(weight.z, value, sum.z);
                    sum.w = fmaf(weight.w, value, sum.w);
                }
                asked[k] = sum;
            }
        }
        for (int k = lane; k < width; k += WARP_LANES)
            for (int q = 0; q < QUERIES && first_query + q < future; ++q)
                mixed[((long long)(first_query + q) * sequences + sequence) * width + k] =
                    to_real(four_at(asked[k], q));
    }
}
