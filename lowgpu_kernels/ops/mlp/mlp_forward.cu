// Kernel of mlp_forward.py. A block owns LG_ROWS rows of the batch and runs every layer over them in
// shared memory, as mlp_tile.cuh describes. Rows come and go in 16-byte pieces, neighbouring threads
// on neighbouring pieces; each weight is read from L2 once a block.
#include "mlp_tile.cuh"

static_assert(MlpTile<LG_ROWS>::NBYTES == LG_TILE_NBYTES, "tile.py counts the same shared memory");

extern "C" __global__ void __launch_bounds__(MLP_THREADS, 2)
    mlp_forward(const Real* __restrict__ x, const float* __restrict__ parameters,
                float* __restrict__ y, Real* __restrict__ hidden, int batch) {
    extern __shared__ uint4 memory[];
    const MlpTile<LG_ROWS> tile(memory);
    const long long first = (long long)blockIdx.x * LG_ROWS;
    const int rows = int(min((long long)LG_ROWS, batch - first));
    load_tile_rows<LG_ROWS, LG_INPUTS>(tile.input, tile.INPUT, x + first * LG_INPUTS, LG_INPUTS, rows);
    wait_for_copies_but<0>();
    mlp_tile_forward(tile, parameters, hidden + first * LG_HIDDEN, rows);
    y += first * LG_OUTPUTS;
    for (int i = threadIdx.x; i < rows * LG_OUTPUTS / 4; i += MLP_THREADS)
        reinterpret_cast<float4*>(y)[i] = reinterpret_cast<const float4*>(tile.y)[i];
    if constexpr (LG_LAYERS_HIDDEN == 0) {
        // Nothing is stored of a network of heads alone; the row's columns are padding.
        hidden += first * LG_HIDDEN;
        for (int i = threadIdx.x; i < rows * LG_HIDDEN; i += MLP_THREADS) hidden[i] = to_real(0.f);
    }
}
