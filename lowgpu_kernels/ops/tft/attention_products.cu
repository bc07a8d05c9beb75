// Kernel of interpretable_attention.py in bfloat16: a warp has 16 predicted steps of a sequence, and goes
// over all steps twice, CHUNK at a time: for the largest score and the sum of every head, and for the mean
// attention and what it finds. Keys, queries and values go from global memory into registers 16 bytes at a
// time, just as tensor cores take them (tft_fragment.cuh); a value's column is its step's row, turned.
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int WARPS = LG_WARPS, CHUNK = 32, TILES = CHUNK / 8, MOST_HEADS = 16;
constexpr int WIDTH = LG_WIDTH;  // columns of a head and of the value
constexpr int STEP = Fragment::STEP, AT_ONCE = WIDTH > STEP ? 2 : 1;  // blocks of columns that are summed at once
constexpr bool WHOLE = WIDTH % PIECE == 0;
constexpr float LOG2_E = 1.4426950408889634f, HIDDEN = -1e9f * LOG2_E, ABSENT = -2e38f;
static_assert(Fragment::ROWS == 16 && STEP == 32, "bfloat16");

struct Sequence {
    const Real *query, *sources;  // of the sequence's first step
    int query_stride, source_stride, future, steps, history, length;

    __device__ const Real* asked(int query, int head) const {
        return this->query + (long long)min(query, future - 1) * query_stride + head * WIDTH;
    }
    // STEP columns' piece of the lane of a step, from a column of its sources on.
    __device__ uint4 piece(int step, int column, int left) const {
        const Real* const from = sources + (long long)step * source_stride + column;
        return load_piece(from, step < steps ? left : 0, WHOLE);
    }
};

// The lane's two rows: predicted steps, and where what these see of the future ends.
struct Rows {
    int query[2], end[2];
};

// Scores of a head in units of log 2, of the lane's two rows and four pairs of steps from `first` on.
__device__ inline void make_scores(float (&scores)[TILES][Fragment::SUMS], const Sequence& of, const Rows& rows,
                                   int head, int first) {
    const float scale = LOG2_E * reciprocal_root(float(WIDTH > 0 ? WIDTH : 1));
    const int lane_step = lane_of_warp() / 4, pair = lane_of_warp() % 4 * 2;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < Fragment::SUMS; ++i) scores[t][i] = 0.f;
#pragma unroll 1
    for (int from = 0; from < WIDTH; from += STEP) {
        const int k = from + Fragment::term(), left = WIDTH - k;
        const Fragment::Left asked =
            Fragment::left_of(load_piece(of.asked(rows.query[0], head) + k, left, WHOLE),
                              load_piece(of.asked(rows.query[1], head) + k, left, WHOLE));
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            Fragment::multiply_add(scores[t], asked,
                                   of.piece(first + t * 8 + lane_step, head * WIDTH + k, left));
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < Fragment::SUMS; ++i) {
            const int step = first + t * 8 + pair + i % 2;
            float& score = scores[t][i];
            const bool seen = step < of.length || (step >= of.history && step < rows.end[i / 2]);
            score = seen ? score * scale : HIDDEN;
            if (step >= of.steps) score = ABSENT;
        }
}

// A row's softmax so far: its largest score and the sum of the powers of two of what scores lack to it.
struct Spread {
    float most = -3e38f, sum = 0.f;

    __device__ void add(const Spread& other) {
        const float largest = fmaxf(most, other.most);
        sum = sum * power_of_two(most - largest) + other.sum * power_of_two(other.most - largest);
        most = largest;
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * WARP_LANES)
    attention_products(const Real* query, const Real* sources, const int* lengths,
                       const int* future_lengths, Real* mixed, float* attention, int future,
                       int sequences, int steps, int heads, int ahead) {
    __shared__ Spread spreads[WARPS][MOST_HEADS][Fragment::ROWS];
    const int parts = (future - 1) / (WARPS * Fragment::ROWS) + 1;
    const int sequence = blockIdx.x / parts, history = steps - future, columns = heads * WIDTH;
    const int warp = warp_index(), quarter = lane_of_warp() % 4;
    const int first_query = (blockIdx.x % parts * WARPS + warp) * Fragment::ROWS;
    if (first_query >= future) return;  // a whole warp leaves, and nothing of the block follows
    const Sequence of{query + (long long)sequence * columns,
                      sources + (long long)sequence * (columns + WIDTH),
                      sequences * columns,
                      sequences * (columns + WIDTH),
                      future,
                      steps,
                      history,
                      lengths == nullptr ? history : min(lengths[sequence], history)};
    const int all = future_lengths == nullptr ? future : future_lengths[sequence];
    Rows mine;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        mine.query[half] = first_query + Fragment::row(half);
        mine.end[half] = history + min(mine.query[half] + ahead, all);
    }
    float scores[TILES][Fragment::SUMS];

#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
        Spread rows[2];
#pragma unroll 1
        for (int first = 0; first < steps; first += CHUNK) {
            make_scores(scores, of, mine, h, first);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Spread chunk;
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    chunk.most = fmaxf(chunk.most, fmaxf(scores[t][2 * half], scores[t][2 * half + 1]));
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    chunk.sum += power_of_two(scores[t][2 * half] - chunk.most) +
                                 power_of_two(scores[t][2 * half + 1] - chunk.most);
                rows[half].add(chunk);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Spread& row = rows[half];
#pragma unroll
            for (int gap = 1; gap < 4; gap *= 2)
                row.add({__shfl_xor_sync(ALL_LANES, row.most, gap), __shfl_xor_sync(ALL_LANES, row.sum, gap)});
            // From here on `sum` is what a power is multiplied by.
            if (quarter == 0)
                spreads[warp][h][Fragment::row(half)] = {row.most, reciprocal(row.sum * float(heads))};
        }
    }
    __syncwarp();

#pragma unroll 1
    for (int column = 0; column == 0 || column < WIDTH; column += AT_ONCE * STEP) {
        float found[AT_ONCE][4][Fragment::SUMS] = {};
#pragma unroll 1
        for (int first = 0; first < steps; first += CHUNK) {
            float mean[TILES][Fragment::SUMS] = {};
#pragma unroll 1
            for (int h = 0; h < heads; ++h) {
                make_scores(scores, of, mine, h, first);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Spread row = spreads[warp][h][Fragment::row(half)];
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; ++i)
                            mean[t][i] = fmaf(power_of_two(scores[t][i] - row.most), row.sum, mean[t][i]);
                }
            }
            if (column == 0)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int query = mine.query[half];
                    if (query >= future) continue;
                    float* const to = attention + ((long long)query * sequences + sequence) * steps;
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        const int step = first + t * 8 + quarter * 2;
                        const float low = mean[t][2 * half], high = mean[t][2 * half + 1];
                        if (steps % 2 == 0 && step < steps)
                            *reinterpret_cast<float2*>(to + step) = make_float2(low, high);
                        else if (steps % 2 != 0) {
                            if (step < steps) to[step] = low;
                            if (step + 1 < steps) to[step + 1] = high;
                        }
                    }
                }
#pragma unroll
            for (int t = 0; t < TILES; t += 2) {
                const unsigned weights[4] = {
                    pack_bf16(mean[t][0], mean[t][1]), pack_bf16(mean[t][2], mean[t][3]),
                    pack_bf16(mean[t + 1][0], mean[t + 1][1]), pack_bf16(mean[t + 1][2], mean[t + 1][3])};
#pragma unroll
                for (int block = 0; block < AT_ONCE; ++block) {
                    const int k = column + block * STEP + Fragment::term();
                    const int step = first + t * 8 + lane_of_warp() / 4;
                    const uint4 low = of.piece(step, columns + k, WIDTH - k);
                    const uint4 high = of.piece(step + 8, columns + k, WIDTH - k);
                    multiply_add_bf16(found[block][0], weights, turned(low.x), turned(high.x));
                    multiply_add_bf16(found[block][1], weights, turned(low.y), turned(high.y));
                    multiply_add_bf16(found[block][2], weights, turned(low.z), turned(high.z));
                    multiply_add_bf16(found[block][3], weights, turned(low.w), turned(high.w));
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = mine.query[half];
            if (query >= future) continue;
            Real* const to = mixed + ((long long)query * sequences + sequence) * WIDTH;
#pragma unroll
            for (int block = 0; block < AT_ONCE; ++block) {
                const int k = column + block * STEP + Fragment::term();
                const auto& sums = found[block];
                const int low = 2 * half, high = low + 1;
                uint4 piece = make_uint4(pack_bf16(sums[0][low], sums[0][high]),
                                         pack_bf16(sums[1][low], sums[1][high]),
                                         pack_bf16(sums[2][low], sums[2][high]),
                                         pack_bf16(sums[3][low], sums[3][high]));
                if (WHOLE && k < WIDTH) *reinterpret_cast<uint4*>(to + k) = piece;
                if (!WHOLE)
#pragma unroll
                    for (int i = 0; i < PIECE; ++i)
                        if (k + i < WIDTH) to[k + i] = reinterpret_cast<const Real*>(&piece)[i];
            }
        }
    }
}
