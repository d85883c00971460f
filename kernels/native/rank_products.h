// The two products of adapters' rank rows: shrink reduces each token to a few numbers, and expand turns these into
// outputs. The order of a sum does not depend on other tokens and rows.
#pragma once

#include <algorithm>

#include "vector_math.h"

namespace outrider {
namespace {  // of each source its own

constexpr int TOKENS = 4;        // tokens that share a load of the weights

// h[t * h_stride + j] = sum of the lanes of sums[t * J + j].
template <int T, int J, typename E>
inline void put_sums(const Vec* sums, E* h, int64_t h_stride) {
    constexpr int N = T * J < LANES ? T * J : LANES;
    for (int first = 0; first < T * J; first += N) {
        E lanes[LANES];
        store(lanes, sums_of<N>(sums + first));
        for (int i = 0; i < N; i++) h[(first + i) / J * h_stride + (first + i) % J] = lanes[i * (LANES / N)];
    }
}

// h[t * h_stride + j] = x[t] . a[j] over n elements, for T tokens and J rows; the order of a sum does not
// depend on T and J.
template <int T, int J, typename E>
inline void dots(const E* const* x, const E* const* a, int64_t n, E* h, int64_t h_stride) {
    Vec sums[T * J];
    for (Vec& value : sums) value = zeros();
    auto step = [&](int64_t i, int64_t count) {
        Vec rows[J];
        for (int j = 0; j < J; j++) rows[j] = load(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            Vec token = load(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t * J + j] = multiply_add(token, rows[j], sums[t * J + j]);
        }
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, LANES);
    if (i < n) step(i, n - i);
    put_sums<T, J>(sums, h, h_stride);
}

// y[t][i..] += sum over j of h[t * h_stride + j] * b[j][i..], one j after the other, for BLOCKS vectors of LANES, or for
// the first `lanes` of one; `count` is even and not 0.
template <int T, int BLOCKS, typename E>
inline void accumulate_at(E* const* y, const E* h, int64_t h_stride, const E* const* b, int count, int64_t i,
                          int64_t lanes = LANES) {
    Vec sums[T][BLOCKS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) sums[t][v] = zeros();
    int j = 0;
    do {  // with a test before the first turn GCC keeps the sums in memory
        Vec weights[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) weights[v] = load(b[j] + i + v * LANES, lanes);
        for (int t = 0; t < T; t++) {
            Vec factor = all(to_float(h[t * h_stride + j]));
            for (int v = 0; v < BLOCKS; v++) sums[t][v] = multiply_add(factor, weights[v], sums[t][v]);
        }
    } while (++j < count);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) {
            E* out = y[t] + i + v * LANES;
            store(out, load(out, lanes) + sums[t][v], lanes);
        }
}

template <typename E>
constexpr int WIDTH = LANES;     // outputs of a block

#ifdef __AVX512BF16__
inline __m512i load_pairs(const bf16* p, int64_t count) {
    __m512i result = _mm512_setzero_si512();
    std::memcpy(&result, p, std::min<int64_t>(count, 2 * LANES) * sizeof(bf16));
    return result;
}

// 32 products of bfloat16 at once, added in pairs.
template <int T, int J>
inline void dots(const bf16* const* x, const bf16* const* a, int64_t n, bf16* h, int64_t h_stride) {
    __m512 sums[T * J];
    for (__m512& value : sums) value = _mm512_setzero_ps();
    auto step = [&](int64_t i, int64_t count) {
        __m512bh rows[J];
        for (int j = 0; j < J; j++) rows[j] = (__m512bh)load_pairs(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            __m512bh token = (__m512bh)load_pairs(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t * J + j] = _mm512_dpbf16_ps(sums[t * J + j], rows[j], token);
        }
    };
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) step(i, 2 * LANES);
    if (i < n) step(i, n - i);
    put_sums<T, J>((const Vec*)sums, h, h_stride);
}

template <>
constexpr int WIDTH<bf16> = 2 * LANES;

// Expands two rows at once, with their outputs interleaved: 4 of each row from the lower and 4 from the upper half of
// every 16 bytes.
template <int T, int BLOCKS>
inline void accumulate_at(bf16* const* y, const bf16* h, int64_t h_stride, const bf16* const* b, int count, int64_t i,
                          int64_t lanes = 2 * LANES) {
    __m512 low[T][BLOCKS], high[T][BLOCKS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) low[t][v] = high[t][v] = _mm512_setzero_ps();
    int j = 0;
    do {
        __m512bh lows[BLOCKS], highs[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) {
            const __m512i first = load_pairs(b[j] + i + v * 2 * LANES, lanes);
            const __m512i second = load_pairs(b[j + 1] + i + v * 2 * LANES, lanes);
            lows[v] = (__m512bh)_mm512_unpacklo_epi16(first, second);
            highs[v] = (__m512bh)_mm512_unpackhi_epi16(first, second);
        }
        for (int t = 0; t < T; t++) {
            int32_t both;
            std::memcpy(&both, h + t * h_stride + j, sizeof both);
            const __m512bh factors = (__m512bh)_mm512_set1_epi32(both);
            for (int v = 0; v < BLOCKS; v++) {
                low[t][v] = _mm512_dpbf16_ps(low[t][v], lows[v], factors);
                high[t][v] = _mm512_dpbf16_ps(high[t][v], highs[v], factors);
            }
        }
        j += 2;
    } while (j < count);
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) {
            bf16* out = y[t] + i + v * 2 * LANES;
            const Vec first = (Vec)_mm512_permutex2var_ps(low[t][v], front, high[t][v]);
            store(out, load(out, lanes) + first, lanes);
            if (lanes <= LANES) continue;
            const Vec second = (Vec)_mm512_permutex2var_ps(low[t][v], back, high[t][v]);
            store(out + LANES, load(out + LANES, lanes - LANES) + second, lanes - LANES);
        }
}
#else
template <>
constexpr int WIDTH<bf16> = LANES;
#endif

template <int T, typename E>
inline void all_dots(const E* const* x, const E* const* a, int count, int64_t n, E* h, int64_t h_stride) {
    constexpr int J = T == 1 ? 8 : 4;
    int j = 0;
    for (; j + J <= count; j += J) dots<T, J>(x, a + j, n, h + j, h_stride);
    for (; j < count; j++) dots<T, 1>(x, a + j, n, h + j, h_stride);
}

// Expands to outputs [first, last).
template <int T, typename E>
inline void accumulate(E* const* y, const E* h, int64_t h_stride, const E* const* b, int count, int64_t first,
                       int64_t last) {
    constexpr int W = WIDTH<E>, BLOCKS = (T == 1 ? 8 : 4) * LANES / W;
    int64_t i = first;
    for (; i + BLOCKS * W <= last; i += BLOCKS * W) accumulate_at<T, BLOCKS>(y, h, h_stride, b, count, i);
    for (; i + W <= last; i += W) accumulate_at<T, 1>(y, h, h_stride, b, count, i);
    if (i < last) accumulate_at<T, 1>(y, h, h_stride, b, count, i, last - i);
}

}  // namespace
}  // namespace outrider
