// Quantised weights in panels of PANEL outputs, and the inputs as their products take them.
//
// The inputs are cut into chunks that share a scale. A panel is, for each chunk, PANEL scales, PANEL offsets if there
// are any (or zero points), and the codes: for every 4 inputs those of PANEL outputs side by side, 4 to an output. It is read once, from
// front to back.
#pragma once

#include "panels.h"

namespace outrider {
namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define OUTRIDER_INTEGER_TILES
constexpr bool HAS_INTEGER_TILES = true;
#else
constexpr bool HAS_INTEGER_TILES = false;
#endif
#if defined(OUTRIDER_INTEGER_TILES) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define OUTRIDER_HALF_TILES
constexpr bool HAS_HALF_TILES = true;
#else
constexpr bool HAS_HALF_TILES = false;
#endif

enum Form : int64_t {
    NIBBLES = 0,       // codes 0 to 15 in 4 bits: the lower half of a panel's outputs in the lower half of the bytes
    SMALL_LEVELS = 1,  // as NIBBLES; a table has the number of each code, 0 to 255
    BYTES = 2,         // codes 0 to 255
    LEVELS = 3,        // as NIBBLES; a table has the float32 of each code
    FLOAT8_CODES = 4,        // float8 e4m3
};

enum Offsets : int64_t {
    NO_OFFSETS = 0,
    HALF_OFFSETS = 1,  // float16
    ZERO_POINTS = 2,   // 0 to 255, subtracted from the codes
};

struct Inputs {             // how a block takes its inputs
    int64_t chunk;          // inputs that share a scale; the last chunk may be shorter
    const int32_t* order;   // [in]: input of each column of the codes, or null
    int64_t num_planes;     // bytes of the fixed-point numbers that they become; 0: they stay as they are
};

struct Block {              // outputs of a weight that share a form
    int64_t form, in_features, out_features;
    int64_t chunk, group;   // a group is one chunk or some
    int64_t zero;           // subtracted from all codes
    int64_t offsets;        // an Offsets
    int64_t inputs;         // number of its Inputs
    double scale_unit, offset_unit;  // of the stored scales and offsets, times 2^112
    const uint8_t* panels;
    const void* levels;     // uint8 [16] or float32 [16]

    int64_t num_chunks() const { return (in_features + chunk - 1) / chunk; }
};

struct QuantizedWeight {
    int64_t in_features, out_features;
    int64_t num_blocks, num_inputs;
    int64_t input_bits;     // 8: of inputs that are rounded to int8 with one scale a row, else 16
    const Block* blocks;
    const Inputs* inputs;
    const bf16* bias;       // [out], or null
};

constexpr int64_t QUAD = 4;  // inputs whose codes are side by side

inline bool is_nibble(int64_t form) { return form != BYTES && form != FLOAT8_CODES; }
inline int64_t quad_bytes(int64_t form) { return (is_nibble(form) ? 2 : 4) * PANEL; }
inline int64_t header_bytes(const Block& block) {
    return (block.offsets == HALF_OFFSETS ? 4 : block.offsets == ZERO_POINTS ? 3 : 2) * PANEL;
}
inline int64_t num_quads(int64_t inputs) { return (inputs + QUAD - 1) / QUAD; }
inline int64_t chunk_bytes(const Block& block, int64_t inputs) {
    return header_bytes(block) + num_quads(inputs) * quad_bytes(block.form);
}
inline int64_t panel_bytes(const Block& block) {
    const int64_t whole = block.in_features / block.chunk, rest = block.in_features % block.chunk;
    return whole * chunk_bytes(block, block.chunk) + (rest ? chunk_bytes(block, rest) : 0);
}

inline Vec load_bytes(const uint8_t* p) {
    typedef uint8_t VecU8 __attribute__((vector_size(OUTRIDER_LANES)));
    VecU8 bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, VecI32), Vec);
}

// Place of the code for input k of a quad among those of 16, 32 or 64 outputs. The bytes of what becomes bfloat16 are so
// that those of a pair of inputs stay together when they are widened.
inline int64_t place_of(int64_t form, int64_t output, int64_t k) {
    if (HAS_HALF_TILES && (form == LEVELS || form == FLOAT8_CODES)) return output / 4 * 16 + k / 2 * 8 + output % 4 * 2 + k % 2;
    return output * QUAD + k;
}

// float16 as float32, times 2^-112.
inline Vec load_half(const uint16_t* p) {
#if OUTRIDER_LANES == 16  // GCC makes more instructions of the other form
    const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (Vec)_mm512_and_si512(_mm512_slli_epi32(wide, 13), _mm512_set1_epi32(0x8fffe000));
#else
    VecU16 half;
    std::memcpy(&half, p, sizeof half);
    const VecU32 wide = __builtin_convertvector(half, VecU32);
    return (Vec)(((wide & 0x7fff) << 13) | ((wide & 0x8000) << 16));
#endif
}

// Inputs of some rows for one form of blocks, which the calling thread keeps until its next call.
//
// x ~ units * numbers. With two planes a chunk's numbers are fixed-point ones of 16 bits, the upper and the lower byte,
// both with a sign: those within 2^-7 of the chunk's largest are exact, others are off by up to 2^-15 of it. With one
// plane they are of 8 bits, off by up to 2^-8 of the chunk's largest; with input_bits 8 all chunks of a row have one
// unit. Without planes they stay as they are.
class Rows {
  public:
    // With room for `rows` rows.
    void prepare(const Inputs& inputs, const QuantizedWeight& weight, int64_t rows) {
        inputs_ = &inputs;
        in_ = weight.in_features;
        is_rounded_ = weight.input_bits == 8;
        num_chunks = (in_ + inputs.chunk - 1) / inputs.chunk;
        padded_chunk = num_quads(inputs.chunk) * QUAD;
        num_planes = int(inputs.num_planes);
        padded = num_chunks * padded_chunk;
        if (num_planes) grow(bytes_, rows * num_planes * padded + LINE);  // a tile may read so far
        else if (HAS_HALF_TILES) grow(halves_, rows * padded + LANES);
        else grow(floats_, rows * padded + LANES);
        grow(units_, rows * num_chunks);
        grow(totals_, rows * num_chunks);
        grow(integer_totals_, rows * num_chunks);
    }

    void fill(int64_t row, const bf16* x) {
        if (inputs_->order) {
            static thread_local std::vector<bf16> ordered;
            grow(ordered, in_);
            for (int64_t i = 0; i < in_; i++) ordered[i] = x[inputs_->order[i]];
            x = ordered.data();
        }
        const float row_unit = is_rounded_ ? to_float(largest_bits(x, in_)) / 127.0f : 0;
        for (int64_t c = 0; c < num_chunks; c++) {
            const bf16* part = x + c * inputs_->chunk;
            const int64_t count = std::min(inputs_->chunk, in_ - c * inputs_->chunk);
            float unit = 1;
            if (is_rounded_ || num_planes == 1) {
                const float largest = is_rounded_ ? row_unit : to_float(largest_bits(part, count)) / 127.0f;
                unit = largest - largest == 0 ? largest : __builtin_nanf("");
                const float divisor = largest > 0 ? largest : 1;
                convert(row, c, part, count, unit, [&](Vec value) { return value / divisor; });
            } else if (num_planes == 2) {
                const int32_t exponent = std::max<int32_t>(largest_bits(part, count).bits >> 7, 15);
                unit = exponent == 255 ? __builtin_nanf("") : power(exponent - 14);
                const float factor = power(268 - exponent);
                convert(row, c, part, count, unit, [&](Vec value) { return value * factor; });
            } else {
                convert(row, c, part, count, unit, [&](Vec value) { return value; });
            }
        }
    }

    const int8_t* bytes(int64_t row) const { return bytes_.data() + row * num_planes * padded; }
    const float* floats(int64_t row) const { return floats_.data() + row * padded; }
    const bf16* halves(int64_t row) const { return halves_.data() + row * padded; }
    const float* units(int64_t row) const { return units_.data() + row * num_chunks; }
    // Sums of a chunk's numbers.
    const uint32_t* integer_totals(int64_t row) const { return integer_totals_.data() + row * num_chunks; }
    const float* totals(int64_t row) const { return totals_.data() + row * num_chunks; }

    int64_t num_chunks, padded_chunk, padded;
    int num_planes;

  private:
    template <typename E>
    static void grow(std::vector<E>& memory, int64_t size) {
        if ((int64_t)memory.size() < size) memory.resize(size);
    }

    static float power(int32_t exponent) {  // with the bias of 127
        const uint32_t bits = uint32_t(exponent) << 23;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }

    // The largest absolute value: a NaN if there is one.
    static bf16 largest_bits(const bf16* x, int64_t count) {
        VecU32 most = VecU32{};
        const auto add = [&](Vec value) {
            const VecU32 bits = (VecU32)value & 0x7fffffffu, is_more = (VecU32)(bits > most);
            most = (bits & is_more) | (most & ~is_more);
        };
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) add(load(x + i));
        if (i < count) add(load(x + i, count - i));
#if OUTRIDER_LANES == 16
        return {uint16_t(_mm512_reduce_max_epu32((__m512i)most) >> 16)};
#else
        uint32_t lanes[LANES];
        std::memcpy(lanes, &most, sizeof lanes);
        return {uint16_t(*std::max_element(lanes, lanes + LANES) >> 16)};
#endif
    }

    // Calls f(value, i, number of lanes) for the inputs of a chunk and the zeros behind them.
    template <typename F>
    void each_vector(const bf16* x, int64_t count, F f) const {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) f(load(x + i), i, std::integral_constant<int64_t, LANES>());
        for (; i < padded_chunk; i += LANES)
            f(i < count ? load(x + i, count - i) : zeros(), i, std::min<int64_t>(LANES, padded_chunk - i));
    }

    template <typename F>
    void convert(int64_t row, int64_t c, const bf16* x, int64_t count, float unit, F scaled) {
        const int64_t at = c * padded_chunk, place = row * num_chunks + c;
        units_[place] = unit;
        if (!num_planes && !is_rounded_) {
            Vec total = zeros();
            const int64_t from = row * padded + at;
            each_vector(x, count, [&](Vec value, int64_t i, auto lanes) {
                total += value;
                if (HAS_HALF_TILES) store(halves_.data() + from + i, value, lanes);
                else store(floats_.data() + from + i, value, lanes);
            });
            totals_[place] = sum(total);
            return;
        }
        const float round = 12582912.0f;  // 1.5 * 2^23: a number added to it becomes an integer
        VecU32 total = VecU32{};
        if (!num_planes) {
            float* to = floats_.data() + row * padded + at;
            each_vector(x, count, [&](Vec value, int64_t i, auto lanes) {
                value = scaled(value) + round;
                total += (VecU32)value - 0x4b400000u;
                store(to + i, value - round, lanes);
            });
        } else {
            int8_t* const upper = bytes_.data() + row * num_planes * padded + at;
            int8_t* const lower = upper + (num_planes - 1) * padded;
            each_vector(x, count, [&](Vec value, int64_t i, auto lanes) {
                VecI32 number = (VecI32)(scaled(value) + round) - 0x4b400000;
                const VecI32 is_beyond = number > 32639;  // by one: the upper byte would overflow
                number = (number & ~is_beyond) | (32639 & is_beyond);
                total += (VecU32)number;
                if (num_planes == 2) put_bytes(upper + i, (number + 128) >> 8, lanes);
                put_bytes(lower + i, number, lanes);
            });
        }
        integer_totals_[place] = sum_of(total);
        totals_[place] = float(int32_t(integer_totals_[place]));
    }

    static uint32_t sum_of(VecU32 value) {
#if OUTRIDER_LANES == 16
        return _mm512_reduce_add_epi32((__m512i)value);
#else
        uint32_t lanes[LANES], all = 0;
        std::memcpy(lanes, &value, sizeof lanes);
        for (uint32_t lane : lanes) all += lane;
        return all;
#endif
    }

    template <typename N>
    static void put_bytes(int8_t* to, VecI32 numbers, N count) {
#if OUTRIDER_LANES == 16
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)numbers);
#else
        typedef int8_t VecI8 __attribute__((vector_size(OUTRIDER_LANES)));
        const VecI8 bytes = __builtin_convertvector(numbers, VecI8);
#endif
        std::memcpy(to, &bytes, count);
    }

    const Inputs* inputs_;
    int64_t in_;
    bool is_rounded_;
    std::vector<int8_t> bytes_;
    std::vector<bf16> halves_;
    std::vector<float> floats_, units_, totals_;
    std::vector<uint32_t> integer_totals_;
};

}  // namespace
}  // namespace outrider
