// Kernel of act.py where a GPU's warpgroups multiply. A block copies the image of all weights
// (act_image.cuh) once, a block of 64 columns at a time, and starts on each as it comes. Its teams, a
// warpgroup each, take tiles of 64 rows by turns, so that one team's products run beside another's
// activations. A tile goes up in registers: a layer's sums, rounded, are the next layer's factor where
// they are. Each thread fetches the parts of input rows that it will multiply, ahead of their use by
// most of a tile. A thread of a team's first 64 owns a row of the outputs, and chooses its action while
// the next tile's products run.
#include "act_block.cuh"
#include "act_product.cuh"
#include "async_copy.cuh"
#include "fragment.cuh"
#include "grid_order.cuh"
#include "team.cuh"

constexpr int ROWS = 64;
static_assert(THREADS == 128 && !LG_FLOAT32, "a team is a warpgroup, in bfloat16");

constexpr int QUARTERS = round_up(LG_INPUTS, 32) / 32;  // pieces of a row that a thread fetches
constexpr int PIECES = 2 * QUARTERS;                    // of its two rows

// The layer with the most weights, whose products take the longest.
__host__ __device__ constexpr int widest() {
    int found = 0;
    for (int l = 1; l < LAYER_COUNT; ++l)
        if (image_elements(l) > image_elements(found)) found = l;
    return found;
}

// The last layer that reads the input.
__host__ __device__ constexpr int last_reader() {
    int last = 0;
    for (int l = 0; l < LAYER_COUNT; ++l)
        if (LAYERS[l].depth == 0) last = l;
    return last;
}

struct Tile {
    static constexpr int INPUT_NBYTES = PIECES * THREADS * 16;
    static constexpr int Y_NBYTES = round_up(ROWS * Y_STRIDE * int(sizeof(float)), 16);
    static constexpr int TEAM_NBYTES = INPUT_NBYTES + 2 * Y_NBYTES;
    static constexpr int NBYTES =
        IMAGE_NBYTES + TEAMS * TEAM_NBYTES + round_up(COPIES * int(sizeof(CopyBarrier)), 16);

    const Team team;
    Bf16* const weights;
    const float* const biases;
    uint4* const inputs;        // [PIECES][THREADS]
    float* y;                   // [ROWS][Y_STRIDE]; the tile before has another
    CopyBarrier* const copies;  // of every block of weights, and of the biases
    bool waits = true;          // whether weights may still be on their way

    __device__ explicit Tile(unsigned char* memory)
        : weights(reinterpret_cast<Bf16*>(memory)),
          biases(reinterpret_cast<const float*>(weights + IMAGE_WEIGHTS)),
          inputs(reinterpret_cast<uint4*>(memory + IMAGE_NBYTES + team.index * TEAM_NBYTES)),
          y(reinterpret_cast<float*>(inputs + INPUT_NBYTES / 16)),
          copies(reinterpret_cast<CopyBarrier*>(memory + IMAGE_NBYTES + TEAMS * TEAM_NBYTES)) {}

    // Where a block of weights is first used.
    __device__ void await(int copy) const {
        if constexpr (TEAMS == 1)
            if (waits) wait_for_bytes(copies + copy, 0);
    }
};
static_assert(Tile::NBYTES == LG_BLOCK_NBYTES, "act_tile.py counts the same shared memory");

// The thread's part of a tile's input rows on its way, zeros past the batch and past the columns.
__device__ inline void fetch_inputs(const Tile& tile, const Bf16* __restrict__ observation,
                                    long long first, int batch) {
    const int lane = threadIdx.x % WARP_LANES;
    const long long row = first + tile.team.warp * 16 + lane / 4;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const long long from = row + piece / QUARTERS * 8;
        const int column = piece % QUARTERS * 32 + lane % 4 * 8;
        const bool valid = from < batch && column < LG_INPUTS;
        start_copy_16(tile.inputs + piece * THREADS + Team::thread(),
                      valid ? observation + from * LG_INPUTS + column : observation, valid);
    }
    end_copy_group();
}

// The factor that the fetched inputs are.
__device__ inline void read_inputs(const Tile& tile, unsigned (&to)[PIECES * 4]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const uint4 four = tile.inputs[piece * THREADS + Team::thread()];
        unsigned* const at = to + piece % QUARTERS * 8 + piece / QUARTERS;
        at[0] = four.x;
        at[2] = four.y;
        at[4] = four.z;
        at[6] = four.w;
    }
}

// Columns of a product that are summed at once, where so many are left.
__host__ __device__ constexpr int at_once(int columns) {
    int n = 16;
    while (n < 128 && 2 * n <= columns) n *= 2;
    return n;
}

// Sums of 64 rows by N columns of layer L, rounded: four words of `out` for sixteen columns.
template <int L, int N>
__device__ inline void finish_hidden(const Tile& tile, int first, const float (&sums)[N / 2],
                                     unsigned* out) {
    constexpr Layer layer = LAYERS[L];
    const float* const biases = tile.biases + layer.gradient + threadIdx.x % 4 * 2;
#pragma unroll
    for (int g = 0; g < N / 8; ++g) {
        const int column = first + g * 8;
        // Only the last eight of sixteen columns may be past the layer's.
        const bool within = g % 2 == 0 || column < layer.fan_out;
        float2 bias = make_float2(0.f, 0.f);
        if (within) bias = *reinterpret_cast<const float2*>(biases + column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x = sums[g * 4 + h * 2] + bias.x, z = sums[g * 4 + h * 2 + 1] + bias.y;
#if LG_TANH
            const unsigned word = pack_bf16(activation(x), activation(z));
#else
            const unsigned word = pack_positive_bf16(x, z);
#endif
            out[g * 2 + h] = within ? word : 0u;
        }
    }
}

template <int L, int N>
__device__ inline void finish_head(const Tile& tile, int first, const float (&sums)[N / 2]) {
    constexpr Layer layer = LAYERS[L];
    const int lane = threadIdx.x % WARP_LANES;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const int column = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = tile.team.warp * 16 + lane / 4 + i / 2 % 2 * 8;
        if (column < layer.fan_out)
            tile.y[row * Y_STRIDE + layer.column + column] =
                sums[i] + tile.biases[layer.gradient + column];
    }
}

// Columns FIRST and on of layer L, from the factor `in`, into `out`.
template <int L, int FIRST, int STEPS, int WORDS, class Meanwhile>
__device__ inline void columns_from(const Tile& tile, const unsigned (&in)[STEPS * 4],
                                    unsigned (&out)[WORDS], Meanwhile meanwhile) {
    if constexpr (FIRST < image_rows(L)) {
        constexpr int N = at_once(image_rows(L) - FIRST), BLOCK = image_rows(L) * ROW_NBYTES;
        const Factor weights =
            factor(shared_address(tile.weights + image_offset(L)) + FIRST * ROW_NBYTES, 0);
        float sums[N / 2];
        start_products();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (FIRST == 0 && k % 4 == 0) tile.await(copy_index(L) + k / 4);
            RowsProduct<N>::start(sums, in + k * 4, further(weights, k / 4 * BLOCK + k % 4 * 32), k > 0);
        }
        end_product_group();
        if constexpr (L == widest() && FIRST == 0) meanwhile();
        wait_for_products_but<0>();
        take_sums(sums);
        if constexpr (LAYERS[L].head)
            finish_head<L, N>(tile, FIRST, sums);
        else
            finish_hidden<L, N>(tile, FIRST, sums, out + FIRST / 4);
        columns_from<L, FIRST + N, STEPS>(tile, in, out, meanwhile);
    }
}

// Layers L and on; `meanwhile` is called while the widest layer's products run, and `fetch` when the
// inputs have been read for the last time.
template <int L, int WORDS, class Meanwhile, class Fetch>
__device__ inline void forward_from(const Tile& tile, const unsigned (&in)[WORDS], Meanwhile meanwhile,
                                    Fetch fetch) {
    if constexpr (L < LAYER_COUNT) {
        constexpr Layer layer = LAYERS[L];
        constexpr bool FIRST = layer.depth == 0;
        // A head's sums go to y: one word stands for none.
        unsigned out[layer.head ? 1 : image_rows(L) / 4];
        if constexpr (FIRST) {
            unsigned inputs[PIECES * 4];
            read_inputs(tile, inputs);
            columns_from<L, 0, 2 * QUARTERS>(tile, inputs, out, meanwhile);
        } else {
            columns_from<L, 0, WORDS / 4>(tile, in, out, meanwhile);
        }
        if constexpr (L == last_reader()) fetch();
        forward_from<L + 1>(tile, out, meanwhile, fetch);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    act_kernel(const Bf16* __restrict__ observation, const unsigned char* __restrict__ image,
               const unsigned long long* clock, unsigned long long seed, int batch, int* action,
               float* log_probability, float* value) {
    extern __shared__ __align__(1024) uint4 memory[];
    Tile tile(reinterpret_cast<unsigned char*>(memory));
    const Team& team = tile.team;
    if (threadIdx.x == 0) start_weights(memory, image, tile.copies);
    // The image is the one array read before: overlap.py.
    wait_for_grid_in_front();
    let_next_grid_begin();
    const long long step = (long long)gridDim.x * TEAMS * ROWS;
    long long first = ((long long)team.index * gridDim.x + blockIdx.x) * ROWS;
    fetch_inputs(tile, observation, first, batch);
    const unsigned long long now = *clock;
    __syncthreads();  // the barriers are made
    for (int i = TEAMS == 1 ? COPIES - 1 : 0; i < COPIES; ++i) wait_for_bytes(tile.copies + i, 0);
    const float* y = tile.y;   // of the tile before
    long long before = batch;  // its first row; none yet
    const auto choose = [&] {
        const long long row = before + Team::thread();
        if (Team::thread() >= ROWS || row >= batch) return;
        act_on(y + Team::thread() * Y_STRIDE, row, seed, now, action, log_probability, value);
    };
    int other_y = Tile::Y_NBYTES / int(sizeof(float));
    for (; first < batch; first += step) {
        wait_for_copies_but<0>();
        constexpr unsigned NONE[1] = {};
        forward_from<0>(tile, NONE, choose,
                        [&] { fetch_inputs(tile, observation, first + step, batch); });
        team.sync();
        tile.waits = false;
        before = first;
        y = tile.y;
        // Whoever writes there has passed this barrier, behind all that read it.
        tile.y += other_y;
        other_y = -other_y;
    }
    wait_for_copies_but<0>();
    choose();
}
