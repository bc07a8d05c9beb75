// Kernel of tabulated_mixture.py: a thread makes the eight columns of a row that lie in 16 bytes of a table,
// and further eights of rows wider than a block, so neighbouring threads read a node's neighbouring pieces. The
// tables of all variables stay in the L2 cache. Row r is step r / sequences of sequence r mod sequences.
#define LG_FLOAT32 0
#include "tft_fragment.cuh"
#include "tft_maths.cuh"

constexpr int THREADS = 256;

// sums += share times the piece.
__device__ inline void add(float (&sums)[PIECE], float share, const uint4& piece) {
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sums[2 * i] = fmaf(share, low_bf16(words[i]), sums[2 * i]);
        sums[2 * i + 1] = fmaf(share, high_bf16(words[i]), sums[2 * i + 1]);
    }
}

// Where among `nodes` of a table a real lies: the node before it, and how far it is behind that.
struct Place {
    int node;
    float behind;

    __device__ Place(float x, float spread, int nodes) {
        const float at = fmaf(x * reciprocal(spread + fabsf(x)), 0.5f, 0.5f) * float(nodes - 1);
        // An infinite real is at the end of the table; NaN stays NaN in `behind`.
        const float bounded = fabsf(x) > 1e30f ? (x > 0.f ? float(nodes - 1) : 0.f) : at;
        node = min(max(int(bounded), 0), nodes - 2);
        behind = bounded - float(node);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    tabulated_mixture(const float* reals, const int* categories, const int* columns,
                      const int* category_columns, const int* bounds, const float* share, const float* spread,
                      const Real* nodes, const float* table, Real* out, int sequences, int steps,
                      int reals_count, int categories_count, int variables, int categoricals, int node_count,
                      int hidden) {
    constexpr bool whole = LG_WHOLE;
    const int threads = min((hidden + PIECE - 1) / PIECE, THREADS), at_once = THREADS / threads;
    const int row = blockIdx.x * at_once + threadIdx.x / threads;
    if (int(threadIdx.x) >= at_once * threads || row >= steps * sequences) return;  // no whole warp is needed
    const long long r = row, brought = (long long)(row % sequences) * steps + row / sequences;
    const float* const shares = share + r * (variables + categoricals);
#pragma unroll 1
    for (int column = threadIdx.x % threads * PIECE; column < hidden; column += threads * PIECE) {
        const int left = hidden - column;
        float sums[PIECE] = {};
        // A variable's real is fetched while the one before is looked up.
        const float* const of_row = reals + brought * reals_count;
        float next = variables > 0 ? of_row[columns[0]] : 0.f;
        const Real* of_variable = nodes + column;
#pragma unroll 1
        for (int v = 0; v < variables; ++v) {
            const Place place(next, spread[v], node_count);
            if (v + 1 < variables) next = of_row[columns[v + 1]];
            const Real* const from = of_variable + (long long)place.node * hidden;
            of_variable += (long long)node_count * hidden;
            const float of_next = shares[v] * place.behind;
            add(sums, shares[v] - of_next, load_piece(from, left, whole));
            add(sums, of_next, load_piece(from + hidden, left, whole));
        }
        for (int v = 0; v < categoricals; ++v) {
            const int category = categories[brought * categories_count + category_columns[v]];
            // A category without a row has no share either; NaN times any row is NaN.
            const long long at = min(max(bounds[v] + category, bounds[v]), bounds[v + 1] - 1);
            const float* const row = table + at * hidden + column;
#pragma unroll
            for (int i = 0; i < PIECE; ++i)
                if (i < left) sums[i] = fmaf(shares[variables + v], row[i], sums[i]);
        }
        Real* const to = out + r * hidden + column;
        if (whole) {
            *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]),
                                                       pack_bf16(sums[4], sums[5]), pack_bf16(sums[6], sums[7]));
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i)
                if (i < left) to[i] = to_real(sums[i]);
        }
    }
}
