// Vectors of LANES floats for all kernels, and loads and stores of float32 and bfloat16.
//
// GCC's vector extensions compile to AVX-512, AVX2 or NEON, whatever the machine has. All arithmetic is in float32. A
// vector is a register of the machine: GCC keeps wider ones in memory, at a tenth of the speed.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace outrider {

#if defined(__AVX512F__)
#define OUTRIDER_LANES 16
#elif defined(__AVX2__)
#define OUTRIDER_LANES 8
#else
#define OUTRIDER_LANES 4
#endif

constexpr int LANES = OUTRIDER_LANES;
typedef float Vec __attribute__((vector_size(4 * OUTRIDER_LANES)));
typedef uint32_t VecU32 __attribute__((vector_size(4 * OUTRIDER_LANES)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * OUTRIDER_LANES)));

struct bf16 {
    uint16_t bits;
};

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT8 = 2 };

inline Vec zeros() { return Vec{} ; }
inline Vec all(float value) { return value - Vec{}; }

// a * b + sum, rounded once if the processor can: elsewhere GCC may fuse nothing (compiler.py).
inline Vec multiply_add(Vec a, Vec b, Vec sum) {
#if OUTRIDER_LANES == 16
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif OUTRIDER_LANES == 8 && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to the nearest, ties to even, as torch does; a NaN stays a NaN.
inline uint16_t round_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void put(float* p, float value) { *p = value; }
inline void put(bf16* p, float value) { p->bits = round_bits(value); }

inline Vec load(const float* p) {
    Vec result;
    std::memcpy(&result, p, sizeof result);
    return result;
}
inline Vec load(const bf16* p) {
#if OUTRIDER_LANES == 16  // GCC makes six instructions of the other form
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    VecU16 half;
    std::memcpy(&half, p, sizeof half);
    return (Vec)(__builtin_convertvector(half, VecU32) << 16);
#endif
}

inline void store(float* p, Vec value) { std::memcpy(p, &value, sizeof value); }
inline void store(bf16* p, Vec value) {
#ifdef __AVX512BF16__
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(p, &rounded, sizeof rounded);
#else
    VecU32 bits = (VecU32)value;
    VecU32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    VecU32 is_nan = (VecU32)(value != value);
    rounded = (rounded & ~is_nan) | (0x7fc0 & is_nan);
    VecU16 half = __builtin_convertvector(rounded, VecU16);
    std::memcpy(p, &half, sizeof half);
#endif
}

// Sums the lanes in a fixed order, by halves.
inline float sum(Vec value) {
#if OUTRIDER_LANES == 16
    return _mm512_reduce_add_ps((__m512)value);
#elif OUTRIDER_LANES == 8
    const float* x = (const float*)&value;
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#else
    const float* x = (const float*)&value;
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

}  // namespace outrider
