// Products of a few float32 rows with float32 or bfloat16 rows at any addresses; transposition of rows to columns.
//
// Each element is summed term by term in a fixed order: its bits depend on its operands alone.
#pragma once

#include <algorithm>

#include "vector_math.h"

namespace outrider {

// ROWS * VECS vectors of results are kept in registers.
#ifdef __AVX512F__
constexpr int ROWS = 6, VECS = 4;  // of 32 registers
#else
constexpr int ROWS = 4, VECS = 2;  // of 16 registers
#endif

// LANES vectors as columns: zipping those that are half of all apart moves each element by one bit of its index.
inline void transpose(Vec (&x)[LANES]) {
    Vec y[LANES];
    for (int stage = LANES; stage > 1; stage /= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = zip_low(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

// columns[d, i] = rows[i][d] for LANES rows.
inline void put_columns(const float* const* rows, int64_t dim, float* columns, int64_t stride) {
    for (int64_t d = 0; d < dim; d += LANES) {
        Vec x[LANES];
        for (int i = 0; i < LANES; i++) x[i] = load(rows[i] + d, dim - d);
        transpose(x);
        for (int64_t i = 0; i < std::min<int64_t>(LANES, dim - d); i++) store(columns + (d + i) * stride, x[i]);
    }
}

// Transposes pairs, with half as many shuffles.
inline void put_columns(const bf16* const* rows, int64_t dim, float* columns, int64_t stride) {
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        Vec x[LANES];
        int64_t count = std::min<int64_t>(2 * LANES, dim - d);
        for (int i = 0; i < LANES; i++) {
            if (count == 2 * LANES) {
                std::memcpy(&x[i], rows[i] + d, sizeof(Vec));
            } else {
                x[i] = zeros();
                std::memcpy(&x[i], rows[i] + d, count * sizeof(bf16));
            }
        }
        transpose(x);
        for (int64_t i = 0; i < count; i += 2) {
            VecU32 pair = (VecU32)x[i / 2];
            store(columns + (d + i) * stride, (Vec)(pair << 16));
            if (i + 1 < count) store(columns + (d + i + 1) * stride, (Vec)(pair & 0xffff0000u));
        }
    }
}

// out[row, j] (+)= sum over i of left[row, i] * right[i][j] for N rows and V vectors of j, in the order of i.
template <int N, int V, bool ADD, typename E, typename Rows>
inline void product_part(const float* left, int64_t left_stride, Rows right, int64_t count, int64_t j, float* out,
                         int64_t out_stride) {
    Vec sums[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v] = ADD ? load(out + n * out_stride + j + v * LANES) : zeros();
    for (int64_t i = 0; i < count; i++) {
        const E* row = right(i) + j;
        Vec values[V];
        for (int v = 0; v < V; v++) values[v] = load(row + v * LANES);
        for (int n = 0; n < N; n++) {
            Vec factor = all(left[n * left_stride + i]);
            for (int v = 0; v < V; v++) sums[n][v] = multiply_add(factor, values[v], sums[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(out + n * out_stride + j + v * LANES, sums[n][v]);
}

template <int N, bool ADD, typename E, typename Rows>
inline void product_rows(const float* left, int64_t left_stride, Rows right, int64_t count, int64_t width, float* out,
                         int64_t out_stride) {
    int64_t j = 0;
    for (; j + VECS * LANES <= width; j += VECS * LANES)
        product_part<N, VECS, ADD, E>(left, left_stride, right, count, j, out, out_stride);
    for (; j < width; j += LANES) product_part<N, 1, ADD, E>(left, left_stride, right, count, j, out, out_stride);
}

// Multiplies all `num_rows` rows, in parts of about equal size; `width` is a multiple of LANES.
template <bool ADD, typename E, typename Rows>
void product(const float* left, int64_t left_stride, Rows right, int64_t count, int64_t width, float* out,
             int64_t out_stride, int64_t num_rows) {
    for (int64_t n = 0, parts = (num_rows + ROWS - 1) / ROWS; parts; parts--) {
        const int64_t size = (num_rows - n + parts - 1) / parts;
        const float* first = left + n * left_stride;
        float* result = out + n * out_stride;
        switch (size) {
            case 1: product_rows<1, ADD, E>(first, left_stride, right, count, width, result, out_stride); break;
            case 2: product_rows<2, ADD, E>(first, left_stride, right, count, width, result, out_stride); break;
            case 3: product_rows<3, ADD, E>(first, left_stride, right, count, width, result, out_stride); break;
#if OUTRIDER_LANES == 16
            case 4: product_rows<4, ADD, E>(first, left_stride, right, count, width, result, out_stride); break;
            case 5: product_rows<5, ADD, E>(first, left_stride, right, count, width, result, out_stride); break;
#endif
            default: product_rows<ROWS, ADD, E>(first, left_stride, right, count, width, result, out_stride);
        }
        n += size;
    }
}

}  // namespace outrider
