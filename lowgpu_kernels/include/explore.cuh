// Whether a step explores, and what it then does. Twin of the scalar steps of ops/dqn/experience.py.
#pragma once

__device__ inline float epsilon_at(unsigned long long now, float start, float end,
                                   unsigned long long duration) {
    return now >= duration ? end : start + (end - start) * (float(now) / float(duration));
}

template <int ACTIONS>
__device__ inline int uniform_action(unsigned word) {
    return int((unsigned long long)word * ACTIONS >> 32);
}
