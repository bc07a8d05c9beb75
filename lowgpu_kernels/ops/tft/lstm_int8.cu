// Kernel of lstm_int8.py: a block owns SEQUENCES sequences through all steps, a warp eight units of all of
// them and further eights, and a lane the four gates of a unit in two sequences, so gates and cells never
// leave registers. What the inputs give the gates of a step is worked out during the step before, beside what
// nobody waits for. Levels of inputs and hidden states pass through shared memory, of two steps in turn: one
// barrier a step. With LG_HELD a warp keeps the weights of its units in registers; else they come from the L2
// cache.
#define LG_FLOAT32 0
#define LG_INT8 1
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

#if LG_LEVELS
using Given = Term;  // inputs, as levels where LG_LEVELS says so
#else
using Given = Real;
#endif

constexpr int HIDDEN = LG_HIDDEN, THREADS = LG_THREADS, WARPS = THREADS / WARP_LANES, SEQUENCES = 8, GATES = 4;
constexpr int A_WARP = 8, STRIPS = ((HIDDEN + A_WARP - 1) / A_WARP + WARPS - 1) / WARPS;
constexpr int STEPS = (HIDDEN + Fragment::STEP - 1) / Fragment::STEP, PADDED = STEPS * Fragment::STEP;
// Two rows of 64 bytes that lanes read at once lie in different banks, and so do the units of four rows, every
// second, that lanes write at once.
constexpr int STRIDE = PADDED % 128 == 64 ? PADDED : PADDED + 64, STATE = SEQUENCES * STRIDE + 64;
constexpr int AT_ONCE = 16 / sizeof(Given), PIECES = PADDED / AT_ONCE;  // inputs in 16 bytes, and those of a row
constexpr int FETCHED = (SEQUENCES * PIECES + THREADS - 1) / THREADS;   // of a thread in a step
constexpr float ONE = 127.f;  // levels of hidden states that are a 1

__device__ inline int row_at(int sequence) { return sequence * STRIDE + sequence / 2 * 16; }

// A lane's sums: rows of its two fragments are a unit's gates, two of them each, columns are sequences.
struct Cells {
    Sum sums[2][Fragment::SUMS];

    static __device__ int unit() { return lane_of_warp() / 4; }
    static __device__ int sequence(int s) { return lane_of_warp() % 4 * 2 + s; }
    __device__ Sum at(int n, int s) const { return sums[n / 2][n % 2 * 2 + s]; }
};

// The weights of a lane's unit, of a step of terms: rows of its four gates.
struct Step {
    Fragment::Left of_pair[2];
};

struct Weights {
#if LG_HELD
    Step held[STRIPS][STEPS];
#endif
    const Term* from;

    __device__ Step load(int unit, int step) const {
        const int at = step * Fragment::STEP + Fragment::term();
        uint4 rows[GATES];
#pragma unroll
        for (int n = 0; n < GATES; ++n) {
            const Term* const row = from + ((long long)GATES * unit + n) * HIDDEN + at;
            if (LG_HELD && LG_WHOLE && at < HIDDEN) {
                // Word by word: what came as 16 bytes would be moved to where a product takes it in every step.
                const volatile unsigned* const words = reinterpret_cast<const volatile unsigned*>(row);
                rows[n] = make_uint4(words[0], words[1], words[2], words[3]);
            } else {
                rows[n] = load_piece(row, HIDDEN - at, LG_WHOLE);
            }
        }
        return {{Fragment::left_of(rows[0], rows[1]), Fragment::left_of(rows[2], rows[3])}};
    }
    __device__ void hold(int strip, int unit) {
#if LG_HELD
#pragma unroll
        for (int step = 0; step < STEPS; ++step) held[strip][step] = load(unit, step);
#endif
    }
    __device__ Cells times(const Term* levels, int strip, int unit) const {
        Cells cells = {};
        const Term* const row = levels + row_at(lane_of_warp() / 4) + Fragment::term();
#if LG_HELD
#pragma unroll
#else
#pragma unroll 2
#endif
        for (int step = 0; step < STEPS; ++step) {
            const uint4 right = *reinterpret_cast<const uint4*>(row + step * Fragment::STEP);
#if LG_HELD
            const Step& weights = held[strip][step];
#else
            const Step weights = load(unit, step);
#endif
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
                Fragment::multiply_add(cells.sums[pair], weights.of_pair[pair], right);
        }
        return cells;
    }
};

// What a lane knows of a unit in two sequences.
struct Memory {
    float cell[2], next[GATES][2];  // `next`: what the inputs give the gates of the next step
    int hidden[2];                  // levels
};

// The inputs of a step, on their way from global memory to levels in shared memory.
struct Inputs {
    const Given* x;
    int first, steps, sequences;
    float levels;
    uint4 fetched[FETCHED];

    __device__ void fetch(int t) {
#pragma unroll
        for (int f = 0; f < FETCHED; ++f) {
            const int i = threadIdx.x + f * THREADS, column = i % PIECES * AT_ONCE;
            const int sequence = min(first + i / PIECES, sequences - 1);
            const long long row = (long long)min(t, steps - 1) * sequences + sequence;
            if (i < SEQUENCES * PIECES) fetched[f] = load_piece(x + row * HIDDEN + column, HIDDEN - column, LG_WHOLE);
        }
    }
    __device__ void store(Term* to) const {
#pragma unroll
        for (int f = 0; f < FETCHED; ++f) {
            const int i = threadIdx.x + f * THREADS;
            Term* const at = to + row_at(i / PIECES) + i % PIECES * AT_ONCE;
#if LG_LEVELS
            if (i < SEQUENCES * PIECES) *reinterpret_cast<uint4*>(at) = fetched[f];
#else
            if (i < SEQUENCES * PIECES) *reinterpret_cast<uint2*>(at) = levels_of(fetched[f], levels);
#endif
        }
    }
};

// A step's hidden states to global memory, zeros where a sequence has ended.
__device__ inline void store_states(Term* out, const Term* state, const int* lengths, int t, int first,
                                    int sequences) {
    constexpr int OF_ROW = (HIDDEN + TERMS - 1) / TERMS, STORED = (SEQUENCES * OF_ROW + THREADS - 1) / THREADS;
#pragma unroll
    for (int f = 0; f < STORED; ++f) {
        const int i = threadIdx.x + f * THREADS, s = i / OF_ROW, column = i % OF_ROW * TERMS;
        if (i >= SEQUENCES * OF_ROW || first + s >= sequences) continue;
        uint4 piece = *reinterpret_cast<const uint4*>(state + row_at(s) + column);
        if (t >= lengths[s]) piece = make_uint4(0u, 0u, 0u, 0u);
        Term* const to = out + ((long long)t * sequences + first + s) * HIDDEN + column;
        if constexpr (LG_WHOLE) {
            *reinterpret_cast<uint4*>(to) = piece;
        } else {
#pragma unroll
            for (int j = 0; j < TERMS; ++j)
                if (column + j < HIDDEN) to[j] = reinterpret_cast<const Term*>(&piece)[j];
        }
    }
}

__device__ inline float float_of(Bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ inline int one_level(float x, float levels) { return min(max(level_of(x, levels), -128), 127); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm_int8(const Given* x, const Term* input, const float* input_scale, const float* bias,
              const Term* recurrent, const float* recurrent_scale, const Real* first_hidden,
              const Real* first_cell, const int* lengths, Term* out, int steps, int sequences, int history,
              float levels, float first_levels) {
    extern __shared__ uint4 memory[];
    __shared__ int length_of[SEQUENCES], endless[SEQUENCES];
    Term* const states = reinterpret_cast<Term*>(memory);  // of two steps
    Term* const inputs = states + 2 * STATE;               // likewise
    // Of each unit's gates: what sums of inputs are worth, biases, what sums of hidden states are worth.
    float4* const of_gates = reinterpret_cast<float4*>(inputs + 2 * STATE);
    const int first = blockIdx.x * SEQUENCES, warp = warp_index();
    for (int i = threadIdx.x; i < 2 * STATE / 4; i += THREADS) reinterpret_cast<unsigned*>(states)[i] = 0u;
    if (threadIdx.x < SEQUENCES) {
        const int sequence = min(first + int(threadIdx.x), sequences - 1);
        length_of[threadIdx.x] = lengths == nullptr ? history : lengths[sequence];
        endless[threadIdx.x] = steps;
    }
    __syncthreads();

    Memory lane[STRIPS];
    // What a level of a sequence's state is worth beside those that steps make: the first one's are others.
    float worth[2] = {ONE * reciprocal(first_levels), ONE * reciprocal(first_levels)};
    const auto unit_of = [&](int strip) { return (strip * WARPS + warp) * A_WARP + Cells::unit(); };
    const auto known = [&](int strip) { return min(unit_of(strip), HIDDEN - 1); };
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int row = min(first + Cells::sequence(s), sequences - 1);
            const long long at = (long long)row * HIDDEN + known(strip);
            lane[strip].cell[s] = float_of(first_cell[at]);
            lane[strip].hidden[s] = one_level(float_of(first_hidden[at]), first_levels);
            if (unit_of(strip) < HIDDEN)
                states[row_at(Cells::sequence(s)) + unit_of(strip)] = Term(lane[strip].hidden[s]);
        }
    Inputs coming{x, first, steps, sequences, levels, {}};
    for (int t = 0; t < 2; ++t) {
        coming.fetch(t);
        coming.store(inputs + t * STATE);
    }
    coming.fetch(2);
    __syncthreads();

    Weights of_input, of_hidden;
    const auto ahead = [&](int strip, int t) {
        const Cells cells = of_input.times(inputs + t % 2 * STATE, strip, known(strip));
        const float4 scales = of_gates[known(strip)], biases = of_gates[HIDDEN + known(strip)];
        const float scale[GATES] = {scales.x, scales.y, scales.z, scales.w};
        const float added[GATES] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
        for (int n = 0; n < GATES; ++n)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                lane[strip].next[n][s] = fmaf(float(cells.at(n, s)), scale[n], added[n]);
    };
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        const int start = part == 0 ? 0 : min(history, steps), end = part == 0 ? min(history, steps) : steps;
        if (start == end) continue;
        for (int i = threadIdx.x; i < GATES * HIDDEN; i += THREADS) {
            const float* const from[3] = {input_scale, bias, recurrent_scale};
#pragma unroll
            for (int kind = 0; kind < 3; ++kind)
                reinterpret_cast<float*>(of_gates)[kind * GATES * HIDDEN + i] = from[kind][part * GATES * HIDDEN + i];
        }
        __syncthreads();
        of_input.from = input + (long long)part * GATES * HIDDEN * HIDDEN;
        of_hidden.from = recurrent + (long long)part * GATES * HIDDEN * HIDDEN;
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            of_input.hold(strip, known(strip));
            of_hidden.hold(strip, known(strip));
            ahead(strip, start);
        }
        __syncthreads();  // before the first step puts other inputs there
#pragma unroll 1
        for (int t = start; t < end; ++t) {
            const Term* const before = states + t % 2 * STATE;
            Term* const after = states + (t + 1) % 2 * STATE;
            bool taken[2];
#pragma unroll
            for (int s = 0; s < 2; ++s) taken[s] = part == 1 || t < length_of[Cells::sequence(s)];
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                Memory& of = lane[strip];
                const Cells cells = of_hidden.times(before, strip, known(strip));
                const float4 scales = of_gates[2 * HIDDEN + known(strip)];
                const float scale[GATES] = {scales.x, scales.y, scales.z, scales.w};
                float gate[GATES][2];
#pragma unroll
                for (int n = 0; n < GATES; ++n)
#pragma unroll
                    for (int s = 0; s < 2; ++s)
                        gate[n][s] = fmaf(float(cells.at(n, s)) * worth[s], scale[n], of.next[n][s]);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const float kept = sigmoid(gate[1][s]) * of.cell[s];
                    const float cell = fmaf(sigmoid(gate[0][s]), hyperbolic_tangent(gate[2][s]), kept);
                    const float hidden = sigmoid(gate[3][s]) * hyperbolic_tangent(cell);
                    if (taken[s]) {
                        of.cell[s] = cell;
                        of.hidden[s] = level_of(hidden, ONE);
                    }
                    if (unit_of(strip) < HIDDEN)
                        after[row_at(Cells::sequence(s)) + unit_of(strip)] = Term(of.hidden[s]);
                }
                if (t + 1 < end) ahead(strip, t + 1);
            }
#pragma unroll
            for (int s = 0; s < 2; ++s)
                if (taken[s]) worth[s] = 1.f;
            // What lay there was multiplied during the step before.
            coming.store(inputs + t % 2 * STATE);
            coming.fetch(t + 3);
            __syncthreads();
            store_states(out, after, part == 0 ? length_of : endless, t, first, sequences);
        }
    }
}
