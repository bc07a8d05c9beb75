// Kernel of selection_weights.py: a thread owns a row, step r / sequences of sequence r mod sequences. What
// it works on is a column of shared memory, so any number of variables fits; neighbouring threads read the
// same parameters at once and write neighbouring words. Reals are read once each, from other lines a thread.
#define LG_FLOAT32 1
#include "tft_maths.cuh"

constexpr int THREADS = LG_THREADS;

// Values of this thread, one under the other in shared memory.
struct Column {
    float* first;

    __device__ float& operator[](int i) const { return first[i * THREADS]; }
};

__device__ inline void norm(const Column& x, int count, const float* weight, const float* bias, float epsilon) {
    float sum = 0.f, squares = 0.f;
    for (int v = 0; v < count; ++v) sum += x[v];
    const float mean = sum * reciprocal(float(count));
    for (int v = 0; v < count; ++v) squares = fmaf(x[v] - mean, x[v] - mean, squares);
    const float scale = reciprocal_root(fmaf(squares, reciprocal(float(count)), epsilon));
    for (int v = 0; v < count; ++v) x[v] = fmaf((x[v] - mean) * scale, weight[v], bias[v]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    selection_weights(const float* reals, const int* categories, const int* columns,
                      const int* category_columns, const int* bounds, const float* context, const float* slope,
                      const float* shift, const float* table, const float* gate, const float* gate_bias,
                      const float* residual_weight, const float* residual_bias, const float* norm_weight,
                      const float* norm_bias, float* out, int sequences, int steps, int reals_count,
                      int categories_count, int real_variables, int categoricals, int units, float epsilon) {
    extern __shared__ uint4 memory[];
    const int r = blockIdx.x * THREADS + threadIdx.x, variables = real_variables + categoricals;
    if (r >= steps * sequences) return;  // nothing below needs a whole warp
    const int sequence = r % sequences, mapped = units + variables;
    const long long brought = (long long)sequence * steps + r / sequences;
    const Column x{reinterpret_cast<float*>(memory) + threadIdx.x};
    const Column hidden{&x[real_variables]}, residual{&hidden[units]};
    for (int v = 0; v < real_variables; ++v) x[v] = reals[brought * reals_count + columns[v]];
    for (int m = 0; m < mapped; ++m) {
        float sum = shift[m];
        for (int v = 0; v < real_variables; ++v) sum = fmaf(x[v], slope[v * mapped + m], sum);
        hidden[m] = sum;
    }
    bool known = true;
    for (int v = 0; v < categoricals; ++v) {
        const int category = categories[brought * categories_count + category_columns[v]];
        const bool there = category >= 0 && category < bounds[v + 1] - bounds[v];
        known = known && there;
        const float* const row = table + (long long)(bounds[v] + (there ? category : 0)) * mapped;
        for (int m = 0; m < mapped; ++m) hidden[m] += row[m];
    }
    for (int u = 0; u < units; ++u) {
        float total = hidden[u];
        if (context != nullptr) total += context[(long long)sequence * units + u];
        hidden[u] = elu(total);
    }
    if (residual_weight != nullptr) norm(residual, variables, residual_weight, residual_bias, epsilon);
    for (int v = 0; v < variables; ++v) {
        float value = gate_bias[v], of_gate = gate_bias[variables + v];
        for (int u = 0; u < units; ++u) {
            value = fmaf(hidden[u], gate[v * units + u], value);
            of_gate = fmaf(hidden[u], gate[(variables + v) * units + u], of_gate);
        }
        residual[v] += value * sigmoid(of_gate);
    }
    norm(residual, variables, norm_weight, norm_bias, epsilon);
    float most = residual[0], sum = 0.f;
    for (int v = 1; v < variables; ++v) most = fmaxf(most, residual[v]);
    for (int v = 0; v < variables; ++v) {
        residual[v] = exponential(residual[v] - most);
        sum += residual[v];
    }
    const float share = known ? reciprocal(sum) : __uint_as_float(0x7FC00000u);
    for (int v = 0; v < variables; ++v) out[(long long)r * variables + v] = residual[v] * share;
}
