// Warp-wide matrix instructions on 16-bit elements. One PTX instruction a wrapper; every lane of the
// warp must take part. Lane l holds, with g = l / 4 and t = l % 4:
//   an 8 x 8 matrix   row g, columns 2t and 2t + 1, in one register
//   a, 16 x 16        rows g | g + 8 | g | g + 8, columns 2t.. | 2t.. | 2t + 8.. | 2t + 8..
//   b, 16 x 8         rows 2t and 2t + 1 | 2t + 8 and 2t + 9, column g
//   sums, 16 x 8      row g: columns 2t, 2t + 1; row g + 8: columns 2t, 2t + 1
#pragma once

// Four 8 x 8 matrices: lanes 8i..8i+7 give the addresses of the eight 16 B rows of matrix i.
__device__ inline void load_matrices(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}

// The same matrices, each transposed on the way.
__device__ inline void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}

// An 8 x 8 matrix, turned: its rows are the columns of what the lanes hold.
__device__ inline unsigned turned(unsigned of) {
    unsigned to;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(of));
    return to;
}

// sums += a b, bf16 factors and float32 sums.
__device__ inline void multiply_add_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b_low,
                                         unsigned b_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
