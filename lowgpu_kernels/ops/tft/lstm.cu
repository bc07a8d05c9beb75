// Kernel of lstm.py: a block owns SEQUENCES sequences through all steps, a warp eight units of all of them
// and further eights, and a lane the four gates of a unit in two sequences, so gates and cells never leave
// registers. Hidden states change hands through shared memory, of two steps in turn: one barrier a step.
// With LG_HELD a warp keeps the weights of its units in registers; else they come from the L2 cache. The
// gates' inputs of a step are fetched during the step before.
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int HIDDEN = LG_HIDDEN, THREADS = LG_THREADS, WARPS = THREADS / WARP_LANES, SEQUENCES = 8;
constexpr int A_WARP = 8, STRIPS = ((HIDDEN + A_WARP - 1) / A_WARP + WARPS - 1) / WARPS;
constexpr int STEPS = (HIDDEN + Fragment::STEP - 1) / Fragment::STEP, PADDED = STEPS * Fragment::STEP;
// So that eight sequences' 64 bytes lie in different banks; in bfloat16 two rows' of 64 bytes, which lanes read at
// once, and eight units of every second row, which they write at once.
constexpr int STRIDE = LG_FLOAT32 ? PADDED + 4 : PADDED % 64 == 32 ? PADDED : PADDED + 32;
constexpr int STATE = SEQUENCES * STRIDE + (LG_FLOAT32 ? 0 : 32);

__device__ inline int row_at(int sequence) { return sequence * STRIDE + (LG_FLOAT32 ? 0 : sequence / 2 * PIECE); }

#if LG_FLOAT32

using Gates = uint4;  // of a unit in a sequence, as stored
__device__ inline float gate_of(const Gates& gates, int n) {
    return __uint_as_float(n == 0 ? gates.x : n == 1 ? gates.y : n == 2 ? gates.z : gates.w);
}

// A lane's gates: rows of a fragment are sequences, columns of its four tiles a unit's gates.
struct Cells {
    float sums[4][Fragment::SUMS];

    struct Step {  // weights of a step of terms
        uint4 of_gate[4];
    };

    static __device__ int unit() { return lane_of_warp() % 8; }
    static __device__ int sequence(int s) { return Fragment::row(s); }
    static __device__ Step step_of(const uint4 (&rows)[4]) {
        return {{rows[0], rows[1], rows[2], rows[3]}};
    }
    __device__ float& at(int n, int s) { return sums[n][s]; }
    __device__ void multiply_add(const Real* state, int k, const Step& weights) {
        const auto left = load_left(state, STRIDE, k);
#pragma unroll
        for (int n = 0; n < 4; ++n) Fragment::multiply_add(sums[n], left, weights.of_gate[n]);
    }
};

#else

using Gates = uint2;
__device__ inline float gate_of(const Gates& gates, int n) {
    const unsigned pair = n < 2 ? gates.x : gates.y;
    return n % 2 ? high_bf16(pair) : low_bf16(pair);
}

// A lane's gates: rows of its two fragments are a unit's gates, two of them each, columns are sequences.
struct Cells {
    float sums[2][Fragment::SUMS];

    struct Step {
        Fragment::Left of_pair[2];
    };

    static __device__ int unit() { return lane_of_warp() / 4; }
    static __device__ int sequence(int s) { return lane_of_warp() % 4 * 2 + s; }
    static __device__ Step step_of(const uint4 (&rows)[4]) {
        return {{Fragment::left_of(rows[0], rows[1]), Fragment::left_of(rows[2], rows[3])}};
    }
    __device__ float& at(int n, int s) { return sums[n / 2][n % 2 * 2 + s]; }
    __device__ void multiply_add(const Real* state, int k, const Step& weights) {
        const uint4 right =
            *reinterpret_cast<const uint4*>(state + row_at(lane_of_warp() / 4) + k + Fragment::term());
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) Fragment::multiply_add(sums[pair], weights.of_pair[pair], right);
    }
};

#endif

// The weights of a lane's unit: rows of its four gates.
struct Weights {
#if LG_HELD
    Cells::Step held[STRIPS][STEPS];
#endif
    const Real* from;

    __device__ Cells::Step load(int strip, int step) const {
        const int unit = min((strip * WARPS + warp_index()) * A_WARP + Cells::unit(), HIDDEN - 1);
        const int at = step * Fragment::STEP + Fragment::term();
        uint4 rows[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const Real* const row = from + (4ll * unit + n) * HIDDEN + at;
            if (LG_HELD && LG_WHOLE && at < HIDDEN) {
                // Word by word: what came as 16 bytes would be moved to where a product takes it in every step.
                const volatile unsigned* const words = reinterpret_cast<const volatile unsigned*>(row);
                rows[n] = make_uint4(words[0], words[1], words[2], words[3]);
            } else {
                rows[n] = load_piece(row, HIDDEN - at, LG_WHOLE);
            }
        }
        return Cells::step_of(rows);
    }
    __device__ void hold() {
#if LG_HELD
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) held[strip][step] = load(strip, step);
#endif
    }
    __device__ void multiply_add(Cells& cells, const Real* state, int strip) const {
#if LG_HELD
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            cells.multiply_add(state, step * Fragment::STEP, held[strip][step]);
#else
#pragma unroll 4
        for (int step = 0; step < STEPS; ++step)
            cells.multiply_add(state, step * Fragment::STEP, load(strip, step));
#endif
    }
};

// What a lane knows of its unit in a sequence.
struct Memory {
    float hidden[2], cell[2];
    Gates next[2];
};

// A step's hidden states to global memory, zeros where a sequence has ended.
__device__ inline void store_states(Real* out, const Real* state, const int* lengths, int t, int first,
                                    int sequences) {
    constexpr int PIECES = (HIDDEN + PIECE - 1) / PIECE, STORED = (SEQUENCES * PIECES + THREADS - 1) / THREADS;
#pragma unroll
    for (int f = 0; f < STORED; ++f) {
        const int i = threadIdx.x + f * THREADS, s = i / PIECES, column = i % PIECES * PIECE;
        if (i >= SEQUENCES * PIECES || first + s >= sequences) continue;
        uint4 piece = *reinterpret_cast<const uint4*>(state + row_at(s) + column);
        if (t >= lengths[s]) piece = make_uint4(0u, 0u, 0u, 0u);
        Real* const to = out + ((long long)t * sequences + first + s) * HIDDEN + column;
        if constexpr (LG_WHOLE) {
            *reinterpret_cast<uint4*>(to) = piece;
        } else {
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
                if (column + j < HIDDEN) to[j] = reinterpret_cast<const Real*>(&piece)[j];
        }
    }
}

__device__ inline float float_of_real(float x) { return x; }
__device__ inline float float_of_real(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm(const Real* gates, const Real* recurrent, const Real* first_hidden, const Real* first_cell,
         const int* lengths, Real* out, int steps, int sequences, int history) {
    extern __shared__ uint4 memory[];
    __shared__ int length_of[SEQUENCES], endless[SEQUENCES];
    Real* const states = reinterpret_cast<Real*>(memory);  // of two steps
    const int first = blockIdx.x * SEQUENCES, warp = warp_index();
    for (int i = threadIdx.x; i < 2 * STATE; i += THREADS) states[i] = to_real(0.f);
    if (threadIdx.x < SEQUENCES) {
        const int sequence = min(first + int(threadIdx.x), sequences - 1);
        length_of[threadIdx.x] = lengths == nullptr ? history : lengths[sequence];
        endless[threadIdx.x] = steps;
    }
    __syncthreads();

    Memory lane[STRIPS];
    const auto unit_of = [&](int strip) { return (strip * WARPS + warp) * A_WARP + Cells::unit(); };
    const auto row_of = [&](int s) { return min(first + Cells::sequence(s), sequences - 1); };
    const auto fetch = [&](int strip, int t) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const long long row = (long long)t * sequences + row_of(s);
            const int unit = min(unit_of(strip), HIDDEN - 1);
            lane[strip].next[s] = *reinterpret_cast<const Gates*>(gates + (row * HIDDEN + unit) * 4);
        }
    };
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        const int unit = unit_of(strip);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const long long at = (long long)row_of(s) * HIDDEN + min(unit, HIDDEN - 1);
            lane[strip].cell[s] = float_of_real(first_cell[at]);
            lane[strip].hidden[s] = float_of_real(first_hidden[at]);
            if (unit < HIDDEN) states[row_at(Cells::sequence(s)) + unit] = first_hidden[at];
        }
        fetch(strip, 0);
    }
    __syncthreads();

    Weights weights;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        weights.from = recurrent + (long long)part * 4 * HIDDEN * HIDDEN;
        weights.hold();
        const int end = part == 0 ? min(history, steps) : steps;
#pragma unroll 1
        for (int t = part == 0 ? 0 : min(history, steps); t < end; ++t) {
            const Real* const before = states + t % 2 * STATE;
            Real* const after = states + (t + 1) % 2 * STATE;
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                Memory& of = lane[strip];
                Cells cells;
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int s = 0; s < 2; ++s) cells.at(n, s) = gate_of(of.next[s], n);
                fetch(strip, min(t + 1, steps - 1));
                weights.multiply_add(cells, before, strip);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const float kept = sigmoid(cells.at(1, s)) * of.cell[s];
                    const float cell =
                        fmaf(sigmoid(cells.at(0, s)), hyperbolic_tangent(cells.at(2, s)), kept);
                    const Real hidden = to_real(sigmoid(cells.at(3, s)) * hyperbolic_tangent(cell));
                    if (part == 1 || t < length_of[Cells::sequence(s)]) {
                        of.cell[s] = cell;
                        of.hidden[s] = float_of_real(hidden);
                    }
                    if (unit_of(strip) < HIDDEN)
                        after[row_at(Cells::sequence(s)) + unit_of(strip)] = to_real(of.hidden[s]);
                }
            }
            __syncthreads();
            store_states(out, after, part == 0 ? length_of : endless, t, first, sequences);
        }
    }
}
