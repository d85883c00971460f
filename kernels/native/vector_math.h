// More operations on the vectors of simd.h: comparisons, shuffles, ends of rows, the exponential.
#pragma once

#include "simd.h"

namespace outrider {

typedef int32_t VecI32 __attribute__((vector_size(4 * OUTRIDER_LANES)));

// Interleaves the lower or the upper halves of two vectors: a0 b0 a1 b1...
#if OUTRIDER_LANES == 16
#define OUTRIDER_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define OUTRIDER_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define OUTRIDER_COUNT 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif OUTRIDER_LANES == 8
#define OUTRIDER_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define OUTRIDER_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define OUTRIDER_COUNT 0, 1, 2, 3, 4, 5, 6, 7
#else
#define OUTRIDER_LOW 0, 4, 1, 5
#define OUTRIDER_HIGH 2, 6, 3, 7
#define OUTRIDER_COUNT 0, 1, 2, 3
#endif

#ifdef __clang__
inline Vec zip_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, OUTRIDER_LOW); }
inline Vec zip_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, OUTRIDER_HIGH); }
#else
inline Vec zip_low(Vec a, Vec b) { return __builtin_shuffle(a, b, VecI32{OUTRIDER_LOW}); }
inline Vec zip_high(Vec a, Vec b) { return __builtin_shuffle(a, b, VecI32{OUTRIDER_HIGH}); }
#endif

// Halves the lanes of `a` and `b`: each result is the sum of two lanes half a vector apart, `a` and `b` interleaved.
inline Vec fold(Vec a, Vec b) { return zip_low(a, b) + zip_high(a, b); }

// Halves v[0], v[apart]... v[(N - 1) * apart] log2(N) times, interleaved.
template <int N>
inline Vec folded(const Vec* v, int apart = 1) {
    if constexpr (N == 1)
        return v[0];
    else
        return fold(folded<N / 2>(v, 2 * apart), folded<N / 2>(v + apart, 2 * apart));
}

// Lane i * (LANES / N) is the sum of v[i]. N, a power of two up to LANES, has no influence on the order of a sum.
template <int N>
inline Vec sums_of(const Vec* v) {
    Vec result = folded<N>(v);
    for (int left = LANES / N; left > 1; left /= 2) result = fold(result, result);
    return result;
}

inline VecI32 lane_numbers() { return VecI32{OUTRIDER_COUNT}; }

// `yes` in the lanes for which `condition`, a comparison's result, is true.
inline Vec select(VecI32 condition, Vec yes, Vec no) {
    return (Vec)((condition & (VecI32)yes) | (~condition & (VecI32)no));
}

// The largest lane. A NaN may be lost.
inline float largest(Vec value) {
    float lanes[LANES];
    for (int width = LANES; width > 2; width /= 2) {  // each zip brings together what is half a vector apart
        Vec low = zip_low(value, value), high = zip_high(value, value);
        value = select(low > high, low, high);
    }
    std::memcpy(lanes, &value, sizeof lanes);
    return lanes[0] > lanes[LANES - 1] ? lanes[0] : lanes[LANES - 1];
}

// Loads `count` elements followed by zeros, so that the end of a row is computed like its start.
template <typename E>
inline Vec load(const E* p, int64_t count) {
    if (count >= LANES) return load(p);
    E padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(E));
    return load(padded);
}

template <typename E>
inline void store(E* p, Vec value, int64_t count) {
    if (count >= LANES) return store(p, value);
    E padded[LANES];
    store(padded, value);
    std::memcpy(p, padded, count * sizeof(E));
}

// e^x to 2 units in the last place (Cephes' expf): 1 at 0, 0 below -87, infinity above 88, NaN for NaN.
inline Vec exponential(Vec x) {
    const Vec round = all(12582912.0f);  // 1.5 * 2^23: a number added to it becomes an integer
    VecI32 low = x < -87.0f, high = x > 88.0f;
    Vec bounded = select(low, all(-87.0f), select(high, all(88.0f), x));
    Vec shifted = bounded * 1.44269504f + round;
    Vec n = shifted - round;
    Vec r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y = y * (Vec)(((VecU32)shifted << 23) + 0x3f800000u);  // times 2^n
    return select(low, zeros(), select(high, all(__builtin_inff()), y));
}

}  // namespace outrider
