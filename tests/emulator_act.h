// Stands in for act_product.cuh and grid_order.cuh; emulator.h includes it last.
#pragma once

// What a lane holds of a row: words of a warp's four lanes, gathered as the products start.
template <int N>
struct RowsProduct {
    static void start(float (&sums)[N / 2], const unsigned* a, const Factor& b, bool adds) {
        Exchange& warp = block->exchanges[threadIdx.x / 32];
        const int lane = threadIdx.x % 32;
        memcpy(warp.a[lane], a, sizeof warp.a[lane]);
        sync_warp();
        float rows[2][16];
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 16; ++k) {
                const unsigned word = warp.a[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2];
                rows[h][k] = k % 2 ? high_bf16(word) : low_bf16(word);
            }
        sync_warp();
        float* const to = sums;
        const auto product = [=] {
            for (int s = 0; s < N / 2; ++s) {
                const int column = s / 4 * 8 + lane % 4 * 2 + s % 2;
                float sum = adds ? to[s] : 0.f;
                for (int k = 0; k < 16; ++k)
                    sum = fmaf(rows[s / 2 % 2][k], element_of(b, false, column, k), sum);
                to[s] = sum;
            }
        };
        if (copies_arrive_at_once)
            product();
        else
            running->products.back().push_back(product);
    }
};

inline unsigned pack_positive_bf16(float low, float high) {
    return pack_bf16(low < 0.f ? 0.f : low, high < 0.f ? 0.f : high);
}

// Here a launch begins when the one in front has ended.
inline void wait_for_grid_in_front() {}
inline void let_next_grid_begin() {}
