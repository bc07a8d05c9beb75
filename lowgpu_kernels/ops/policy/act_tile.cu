// Kernel of act.py where the weights are read from the float32 parameters: in float32, and in bfloat16
// on GPUs without warpgroup products or for networks too wide for them. A team (team.cuh) takes tiles of
// LG_ROWS rows by turns; all of its threads together copy input rows as 16-byte pieces of adjacent lanes
// and run the network, and a thread of the team's first LG_ROWS owns a row of its outputs. Where the
// weights fit, a block stages them once (tile_layers.cuh); else every tile reads them from L2
// (mlp_tile.cuh), and a block is one team.
#include "async_copy.cuh"
#include "draws.cuh"
#include "mlp_rows.cuh"
#include "team.cuh"
#if LG_RESIDENT
#include "rollout_tile.cuh"
#else
#include "mlp_tile.cuh"
#endif

constexpr int ACTIONS = LG_ACTIONS;
static_assert(LG_HEADS == ACTIONS || LG_HEADS == ACTIONS + 1, "logits, and perhaps a value");

#if LG_RESIDENT
struct Policy : Tile {
    using Tile::Tile;

    // Barriers before and after: rows written and y read by any thread of the team need none.
    __device__ void operator()(const float* __restrict__ parameters) const {
        team.sync();
        forward_from<0>(*this, parameters);
    }
};
#else
constexpr int ROWS = LG_ROWS;
static_assert(THREADS == MLP_THREADS && TEAMS == 1, "mlp_tile.cuh is for a block");

struct Policy {
    static constexpr int NBYTES = MlpTile<ROWS>::NBYTES;
    const Team team;
    const MlpTile<ROWS> rows;
    float* const y;

    __device__ explicit Policy(uint4* memory) : rows(memory), y(rows.y) {}
    __device__ void operator()(const float* __restrict__ parameters) const {
        mlp_tile_forward(rows, parameters, nullptr, ROWS);
    }
};
#endif
static_assert(Policy::NBYTES == LG_BLOCK_NBYTES, "act_tile.py counts the same shared memory");
static_assert(ROWS <= THREADS, "a thread a row");

// A tile's rows on their way; zeros past the batch and behind the columns.
__device__ inline void fetch_inputs(const Policy& policy, const Real* __restrict__ observation,
                                    long long first, int batch) {
    constexpr int PIECES = round_up(LG_INPUTS, 16) / PIECE;
    for (int i = Team::thread(); i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        const bool valid = first + row < batch && column < LG_INPUTS;
        start_copy_16(policy.rows.input + row * policy.rows.INPUT + column,
                      valid ? observation + (first + row) * LG_INPUTS + column : observation, valid);
    }
    end_copy_group();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, LG_BLOCKS_A_SM)
    act_tile_kernel(const Real* __restrict__ observation, const float* __restrict__ parameters,
                    const unsigned long long* clock, unsigned long long seed, int batch, int* action,
                    float* log_probability, float* value) {
    extern __shared__ uint4 memory[];
    const Policy policy(memory);
    const Team& team = policy.team;
#if LG_RESIDENT
    stage<0, LAYER_COUNT>(policy, parameters);
    __syncthreads();
#endif
    const unsigned long long now = *clock;
    const float* const y = policy.y + Team::thread() * LG_OUTPUTS;
    const long long step = (long long)gridDim.x * TEAMS * ROWS;
    long long first = ((long long)team.index * gridDim.x + blockIdx.x) * ROWS;
    for (; first < batch; first += step) {
        fetch_inputs(policy, observation, first, batch);
        wait_for_copies_but<0>();
        policy(parameters);
        const long long row = first + Team::thread();
        if (Team::thread() < ROWS && row < batch) {
#if LG_GREEDY
            const Action chosen = greedy(y, ACTIONS);
#else
            const Action chosen = categorical(y, ACTIONS, unit(draw(seed, ACTION, unsigned(row), now).x));
#endif
            action[row] = chosen.action;
            log_probability[row] = chosen.log_probability;
            // Without a column of its own the value is that of the action.
            const int column = LG_HEADS > ACTIONS ? ACTIONS : chosen.action;
            value[row] = column < 0 ? nan_f32() : y[column];
        }
    }
}
