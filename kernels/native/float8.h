// float8 e4m3 without infinities (Micikevicius et al. 2022): a sign, 4 bits of exponent, 3 of fraction; at most 448.
#pragma once

#include "vector_math.h"

namespace outrider {

struct fp8 {
    uint8_t bits;
};

typedef uint8_t VecU8 __attribute__((vector_size(OUTRIDER_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(2 * OUTRIDER_LANES)));
typedef uint16_t Words __attribute__((vector_size(4 * OUTRIDER_LANES)));  // a register of bfloat16
constexpr int WORDS = 2 * LANES;

// Rounds to the nearest, ties to even; too large numbers become the largest. x must not be NaN.
inline void store(fp8* p, Vec value) {
    const VecU32 sign = ((VecU32)value >> 24) & 0x80, all_bits = (VecU32)value & 0x7fffffffu;
    const VecU32 most = (VecU32)all(448.0f), is_large = (VecU32)(all_bits > most);
    const VecU32 bits = (all_bits & ~is_large) | (most & is_large);
    const VecU32 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    const VecU32 subnormal = (VecU32)((Vec)bits + 16384.0f) & 0xf;  // 2^14, whose last bit is 2^-9
    const VecU32 is_small = (VecU32)(bits < (121u << 23));
    const VecU8 bytes = __builtin_convertvector(sign | (subnormal & is_small) | (normal & ~is_small), VecU8);
    std::memcpy(p, &bytes, sizeof bytes);
}

// WORDS numbers as bfloat16, which holds each exactly; none may be NaN.
inline Words widened(const fp8* p) {
    // A fraction below 2^-6 has no leading one: each power of two among these seven eighths has an exponent of its own.
#if OUTRIDER_LANES == 16 && defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t FEW[32] = {
        0, 118 << 7, 119 << 7, 239 << 6, 120 << 7, (120 << 7) + 32, (120 << 7) + 64, (120 << 7) + 96};
    const __m512i raw = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i size = _mm512_and_si512(raw, _mm512_set1_epi16(0x7f));
    const __m512i usual = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    const __m512i all = _mm512_mask_permutexvar_epi16(usual, is_small, size, _mm512_load_si512(FEW));
    const __m512i sign = _mm512_slli_epi16(raw, 8);
    return (Words)_mm512_ternarylogic_epi32(all, sign, _mm512_set1_epi16(-0x8000), 0xf8);  // all | (sign & 0x8000)
#else
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const Words raw = __builtin_convertvector(bytes, Words);
    const Words size = raw & 0x7f, sign = (raw & 0x80) << 8;
    const Words has4 = (Words)(size >= 4), has2 = (Words)(size >= 2), has1 = (Words)(size >= 1);
    const Words few = (has2 & ((119 << 7) + ((size - 2) << 6))) | (~has2 & has1 & (118 << 7));
    const Words small = (has4 & ((120 << 7) + ((size - 4) << 5))) | (~has4 & few);
    const Words is_small = (Words)(size < 8);
    return sign | (is_small & small) | (~is_small & ((120 << 7) + (size << 4)));
#endif
}

inline void widen(const fp8* from, int64_t count, bf16* to) {
    int64_t i = 0;
    for (; i + WORDS <= count; i += WORDS) {
        const Words words = widened(from + i);
        std::memcpy(to + i, &words, sizeof words);
    }
    if (i < count) {
        fp8 padded[WORDS] = {};
        std::memcpy(padded, from + i, count - i);
        const Words words = widened(padded);
        std::memcpy(to + i, &words, (count - i) * sizeof(bf16));
    }
}

}  // namespace outrider
