// Adam on one element. Twin of the scalar steps of ops/optim/adam.py.
#pragma once

struct AdamRates {
    float step_size;   // the rate, with the correction of m
    float root_scale;  // the correction of the root of v
};

__device__ inline float bias_correction(float log_beta, int done) {
    return -expm1f((float(done) + 1.f) * log_beta);
}

__device__ inline AdamRates adam_rates(float lr, float log1, float log2, int done, int decay_updates,
                                       int decay_every) {
    float rate = lr;
    if (decay_updates > 0) {
        const int whole = int(unsigned(done) / unsigned(decay_every)) * decay_every;
        rate = lr * (float(max(decay_updates - whole, 0)) / float(decay_updates));
    }
    return {rate / bias_correction(log1, done), 1.f / sqrtf(bias_correction(log2, done))};
}

// What a gradient of that norm is multiplied by; no norm is too large where `max_norm` is 0.
__device__ inline float clip_factor(float norm, float max_norm) {
    return max_norm == 0.f ? 1.f : fminf(1.f, max_norm / (norm + 1e-6f));
}

__device__ inline void adam_element(float& parameter, float& m, float& v, float g, float take1,
                                    float beta2, float take2, float eps, const AdamRates& rates) {
    m = m + take1 * (g - m);
    v = beta2 * v + take2 * g * g;
    parameter -= rates.step_size * (m / (sqrtf(v) * rates.root_scale + eps));
}
