// Products of rows with a panel of quantised weights, chunk by chunk.
//
// On processors with AVX512-VNNI integer codes are multiplied with fixed-point inputs, exactly. Elsewhere, and for codes
// that are no integers, all is float32, one input after the other. Then sums += scale * product (+ offset * total), in
// the order of the chunks: the bits of a result depend on its own row and column alone.
#pragma once

#include "codes.h"

namespace outrider {
namespace {

constexpr int64_t BLOCK_INPUTS = 1024;  // inputs of a panel that stay in the cache for all rows
constexpr int VECS_OF_PANEL = PANEL / LANES;

struct CodeTile {               // part of a product: some rows, some chunks of a panel
    const Block* block;
    const Rows* rows;
    int64_t row, first_chunk, last_chunk;
    const uint8_t* codes;   // of the first chunk
    float* sums;            // [rows, PANEL]
    const char* next;       // lines that are prefetched, `lines` with STRIDE quads of inputs
    int lines;
    Fetch* fetch;           // FETCHED lines of it with every quad, or null
};

// A chunk of a panel.
struct Chunk {
    int64_t number, quads;      // of inputs
    const uint8_t *header, *codes;

    Chunk(const Block& block, int64_t number, const uint8_t* header)
        : number(number),
          quads(num_quads(std::min(block.chunk, block.in_features - number * block.chunk))),
          header(header),
          codes(header + header_bytes(block)) {}

    const uint8_t* end(const Block& block) const { return codes + quads * quad_bytes(block.form); }
};

// Adds a chunk's products of R rows to their sums.
template <int64_t OFFSETS, int R>
inline void add_products(const CodeTile& tile, const Chunk& chunk, const Vec (&products)[R][VECS_OF_PANEL]) {
    const Block& block = *tile.block;
    const Vec scale_unit = all(float(block.scale_unit)), offset_unit = all(float(block.offset_unit));
    const uint16_t *scales = (const uint16_t*)chunk.header, *offsets = scales + PANEL;
    Vec units[R], totals[R];
    for (int r = 0; r < R; r++) {
        const float unit = tile.rows->units(tile.row + r)[chunk.number];
        units[r] = all(unit);
        totals[r] = all(tile.rows->totals(tile.row + r)[chunk.number] * (OFFSETS == HALF_OFFSETS ? unit : 1));
    }
    for (int v = 0; v < VECS_OF_PANEL; v++) {
        const Vec scale = load_half(scales + v * LANES) * scale_unit;
        Vec other = zeros();
        if (OFFSETS == ZERO_POINTS) other = load_bytes((const uint8_t*)offsets + v * LANES);
        if (OFFSETS == HALF_OFFSETS) other = load_half(offsets + v * LANES) * offset_unit;
        for (int r = 0; r < R; r++) {
            float* to = tile.sums + r * PANEL + v * LANES;
            Vec sum = load(to), product = products[r][v];
            if (OFFSETS == ZERO_POINTS) product -= other * totals[r];
            sum += product * (scale * units[r]);
            if (OFFSETS == HALF_OFFSETS) sum += other * totals[r];
            store(to, sum);
        }
    }
}

template <int R>
inline void finish(const CodeTile& tile, const Chunk& chunk, const Vec (&products)[R][VECS_OF_PANEL]) {
    if (tile.block->offsets == NO_OFFSETS) add_products<NO_OFFSETS>(tile, chunk, products);
    else if (tile.block->offsets == ZERO_POINTS) add_products<ZERO_POINTS>(tile, chunk, products);
    else add_products<HALF_OFFSETS>(tile, chunk, products);
}

constexpr int64_t STRIDE = 8;  // quads between two prefetches

inline const char* prefetch(const CodeTile& tile, const char* next) {
    for (int line = 0; line < tile.lines; line++, next += LINE) __builtin_prefetch(next);
    if (tile.fetch)
        for (int line = 0; line < FETCHED * STRIDE; line++) tile.fetch->line();
    return next;
}

#ifdef OUTRIDER_INTEGER_TILES

// The codes of a quad of inputs for 64 outputs, as bytes.
template <int64_t FORM>
inline void load_quad(const uint8_t* p, __m512i table, __m512i* codes) {
    if constexpr (FORM == BYTES) {
        for (int v = 0; v < 4; v++) codes[v] = _mm512_loadu_si512(p + v * LINE);
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        for (int v = 0; v < 2; v++) {
            const __m512i both = _mm512_loadu_si512(p + v * LINE);
            codes[v] = _mm512_and_si512(both, low);
            codes[v + 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        if constexpr (FORM == SMALL_LEVELS)
            for (int v = 0; v < 4; v++) codes[v] = _mm512_shuffle_epi8(table, codes[v]);
    }
}

// sum += codes * inputs, four for each lane. GCC copies the sums around its own form of this instruction.
inline __attribute__((always_inline)) void accumulate(__m512i& sum, __m512i codes, __m512i inputs) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(inputs));
}

// Inlined, GCC would keep the sums in memory.
template <int64_t FORM, int PLANES, int R>
__attribute__((noinline)) void integer_tile(const CodeTile& tile) {
    const Block& block = *tile.block;
    const Rows& rows = *tile.rows;
    const int8_t* x = rows.bytes(tile.row);
    const int64_t stride = rows.padded;
    const __m512i table =
        FORM == SMALL_LEVELS ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block.levels)) : __m512i{};
    const char* next = tile.next;
    const uint8_t* header = tile.codes;
    for (int64_t c = tile.first_chunk; c < tile.last_chunk; c++) {
        const Chunk chunk(block, c, header);
        __m512i sums[R * PLANES][4];
        for (int r = 0; r < R; r++) {
            const __m512i zero = _mm512_set1_epi32(-uint32_t(block.zero) * rows.integer_totals(tile.row + r)[c]);
            for (int p = 0; p < PLANES; p++)
                for (int v = 0; v < 4; v++) sums[r * PLANES + p][v] = p + 1 == PLANES ? zero : _mm512_setzero_si512();
        }
        const int8_t* part = x + c * rows.padded_chunk;
        const uint8_t* codes = chunk.codes;
        for (int64_t q = 0; q < chunk.quads; q += STRIDE) {
            next = prefetch(tile, next);
            const int64_t stop = std::min(q + STRIDE, chunk.quads);
            for (int64_t i = q; i < stop; i++, codes += quad_bytes(FORM), part += QUAD) {
                __m512i weights[4];
                load_quad<FORM>(codes, table, weights);
                for (int r = 0; r < R * PLANES; r++) {
                    int32_t four;
                    std::memcpy(&four, part + r * stride, sizeof four);
                    const __m512i inputs = _mm512_set1_epi32(four);
                    for (int v = 0; v < 4; v++) accumulate(sums[r][v], weights[v], inputs);
                }
            }
        }
        Vec products[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) {
                __m512i total = sums[r * PLANES + PLANES - 1][v];
                if (PLANES == 2) total = _mm512_add_epi32(total, _mm512_slli_epi32(sums[r * PLANES][v], 8));
                products[r][v] = (Vec)_mm512_cvtepi32_ps(total);
            }
        finish<R>(tile, chunk, products);
        header = chunk.end(block);
    }
}

template <int64_t FORM, int PLANES, int R = 6 / PLANES>
inline void integer_tiles(int rows, const CodeTile& tile) {
    if (rows == R) integer_tile<FORM, PLANES, R>(tile);
    else if constexpr (R > 1) integer_tiles<FORM, PLANES, R - 1>(rows, tile);
}

template <int64_t FORM>
void integer_tiles(int rows, const CodeTile& tile) {
    if (tile.rows->num_planes == 2) integer_tiles<FORM, 2>(rows, tile);
    else integer_tiles<FORM, 1>(rows, tile);
}

inline void integer_tiles(int rows, const CodeTile& tile) {
    if (tile.block->form == BYTES) integer_tiles<BYTES>(rows, tile);
    else if (tile.block->form == NIBBLES) integer_tiles<NIBBLES>(rows, tile);
    else integer_tiles<SMALL_LEVELS>(rows, tile);
}

#else

inline void integer_tiles(int, const CodeTile&) {}

#endif

constexpr int FLOAT_ROWS = 4;

// The numbers of LANES outputs for input k of a quad. `quad`: their codes, 8 bits for each of the 4 inputs.
template <int64_t FORM>
inline Vec numbers(VecU32 quad, int k, const float* levels) {
    const VecU32 code = (quad >> (8 * k)) & (FORM == BYTES || FORM == FLOAT8_CODES ? 255u : 15u);
    if constexpr (FORM == FLOAT8_CODES) {
        // Without an exponent there is no leading one: 2^-6 is taken off again.
        const VecU32 size = (code & 127) << 20, is_small = (VecU32)(size < (8u << 20));
        const Vec value = (Vec)(size + (is_small & (121u << 23)) + (~is_small & (120u << 23)));
        return (Vec)((VecU32)(value - (Vec)(is_small & (121u << 23))) | ((code & 128) << 24));
    } else if constexpr (FORM == LEVELS) {
#if OUTRIDER_LANES == 16
        return (Vec)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(levels));
#elif OUTRIDER_LANES == 8
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)code);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)code);
        return (Vec)_mm256_blendv_ps(low, high, (__m256)(code << 28));  // by the code's highest bit
#else
        uint32_t lanes[LANES];
        float found[LANES];
        std::memcpy(lanes, &code, sizeof lanes);
        for (int i = 0; i < LANES; i++) found[i] = levels[lanes[i]];
        return load(found);
#endif
    } else {
        return __builtin_convertvector((VecI32)code, Vec);
    }
}

template <int64_t FORM, int R>
__attribute__((noinline)) void float_tile(const CodeTile& tile) {
    constexpr bool IS_HALF = FORM == NIBBLES || FORM == LEVELS;
    constexpr int GROUP = std::min(R == 1 ? 4 : 2, IS_HALF ? VECS_OF_PANEL / 2 : VECS_OF_PANEL);  // vectors at once
    const Rows& rows = *tile.rows;
    const float *levels = (const float*)tile.block->levels, *x = rows.floats(tile.row);
    const int64_t stride = rows.padded, padded = rows.padded_chunk;
    const char* next = tile.next;
    const uint8_t* header = tile.codes;
    for (int64_t c = tile.first_chunk; c < tile.last_chunk; c++) {
        const Chunk chunk(*tile.block, c, header);
        Vec products[R][VECS_OF_PANEL];
        for (int group = 0; group < VECS_OF_PANEL; group += GROUP) {
            Vec sums[R][GROUP];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < GROUP; v++) sums[r][v] = all(-float(tile.block->zero) * rows.totals(tile.row + r)[c]);
            // Of codes in 4 bits the second half of the outputs has the upper bits.
            const int shift = IS_HALF && group >= VECS_OF_PANEL / 2 ? 4 : 0;
            const uint8_t* codes = chunk.codes + (shift ? group - VECS_OF_PANEL / 2 : group) * 4 * LANES;
            for (int64_t q = 0; q < chunk.quads; q++, codes += quad_bytes(FORM)) {
                if (group == 0 && q % STRIDE == 0) next = prefetch(tile, next);
                for (int v = 0; v < GROUP; v++) {
                    VecU32 quad;
                    std::memcpy(&quad, codes + v * sizeof quad, sizeof quad);
                    quad >>= shift;
                    for (int k = 0; k < 4; k++) {
                        const Vec weight = numbers<FORM>(quad, k, levels);
                        for (int r = 0; r < R; r++) {
                            const Vec factor = all((x + r * stride)[c * padded + q * QUAD + k]);
                            sums[r][v] = multiply_add(weight, factor, sums[r][v]);
                        }
                    }
                }
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < GROUP; v++) products[r][group + v] = sums[r][v];
        }
        finish<R>(tile, chunk, products);
        header = chunk.end(*tile.block);
    }
}

template <int64_t FORM, int R = FLOAT_ROWS>
inline void float_tiles(int rows, const CodeTile& tile) {
    if (rows == R) float_tile<FORM, R>(tile);
    else if constexpr (R > 1) float_tiles<FORM, R - 1>(rows, tile);
}

inline void float_tiles(int rows, const CodeTile& tile) {
    switch (tile.block->form) {
        case NIBBLES: return float_tiles<NIBBLES>(rows, tile);
        case BYTES: return float_tiles<BYTES>(rows, tile);
        case LEVELS: return float_tiles<LEVELS>(rows, tile);
        default: return float_tiles<FLOAT8_CODES>(rows, tile);
    }
}

// For more rows the numbers of a chunk are made once. A sum has the terms and the order that it has in a float_tile.
constexpr int64_t MOST_NUMBERS = 256;  // inputs of a chunk whose numbers are made at once: 64 KB for a panel
constexpr int WIDE_ROWS = 6, WIDE_VECS = 2;  // WIDE_ROWS * WIDE_VECS sums fit into 16 registers

// numbers[input * PANEL + output]
template <int64_t FORM>
void put_numbers(const CodeTile& tile, const Chunk& chunk, float* numbers_of) {
    constexpr int HALF = FORM == NIBBLES || FORM == LEVELS ? VECS_OF_PANEL / 2 : VECS_OF_PANEL;
    const uint8_t* codes = chunk.codes;
    for (int64_t q = 0; q < chunk.quads; q++, codes += quad_bytes(FORM), numbers_of += QUAD * PANEL) {
        if (tile.fetch)
            for (int line = 0; line < FETCHED; line++) tile.fetch->line();
        for (int v = 0; v < VECS_OF_PANEL; v++) {
            VecU32 quad;
            std::memcpy(&quad, codes + v % HALF * sizeof quad, sizeof quad);
            quad >>= v >= HALF ? 4 : 0;
            for (int k = 0; k < QUAD; k++)
                store(numbers_of + k * PANEL + v * LANES, numbers<FORM>(quad, k, (const float*)tile.block->levels));
        }
    }
}

inline void put_numbers(const CodeTile& tile, const Chunk& chunk, float* to) {
    switch (tile.block->form) {
        case NIBBLES: return put_numbers<NIBBLES>(tile, chunk, to);
        case BYTES: return put_numbers<BYTES>(tile, chunk, to);
        case LEVELS: return put_numbers<LEVELS>(tile, chunk, to);
        default: return put_numbers<FLOAT8_CODES>(tile, chunk, to);
    }
}

// Keeps a vector in a register: GCC reads it again for every row.
inline Vec in_register(Vec value) {
#ifdef __AVX2__
    asm("" : "+x"(value));
#endif
    return value;
}

template <int R>
__attribute__((noinline)) void wide_tile(const CodeTile& tile, const Chunk& chunk, const float* numbers_of) {
    const Rows& rows = *tile.rows;
    const float* x = rows.floats(tile.row) + chunk.number * rows.padded_chunk;
    Vec products[R][VECS_OF_PANEL];
    for (int first = 0; first < VECS_OF_PANEL; first += WIDE_VECS) {
        asm volatile("" ::: "memory");  // else GCC keeps what the sums begin with in registers, and the weights in memory
        Vec sums[R][WIDE_VECS];
        for (int r = 0; r < R; r++)
            for (Vec& sum : sums[r]) sum = all(-float(tile.block->zero) * rows.totals(tile.row + r)[chunk.number]);
        const float* from = numbers_of + first * LANES;
        for (int64_t k = 0; k < chunk.quads * QUAD; k++, from += PANEL) {
            const Vec left = in_register(load(from)), right = in_register(load(from + LANES));
            for (int r = 0; r < R; r++) {
                const Vec factor = all(x[r * rows.padded + k]);
                sums[r][0] = multiply_add(left, factor, sums[r][0]);
                sums[r][1] = multiply_add(right, factor, sums[r][1]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < WIDE_VECS; v++) products[r][first + v] = sums[r][v];
    }
    finish<R>(tile, chunk, products);
}

template <int R = WIDE_ROWS>
inline void wide_tiles(int rows, const CodeTile& tile, const Chunk& chunk, const float* numbers_of) {
    if (rows == R) wide_tile<R>(tile, chunk, numbers_of);
    else if constexpr (R > 1) wide_tiles<R - 1>(rows, tile, chunk, numbers_of);
}

// Adds the tile's chunks for `count` rows from its row on.
inline void multiply_wide(CodeTile tile, int64_t count) {
    static thread_local float numbers_of[MOST_NUMBERS * PANEL];
    const int64_t begin = tile.row, num_tiles = (count + WIDE_ROWS - 1) / WIDE_ROWS;
    float* const sums = tile.sums;
    const uint8_t* header = tile.codes;
    for (int64_t c = tile.first_chunk; c < tile.last_chunk; c++) {
        const Chunk chunk(*tile.block, c, header);
        put_numbers(tile, chunk, numbers_of);
        for (int64_t t = 0; t < num_tiles; t++) {
            const int64_t first = count * t / num_tiles;
            tile.row = begin + first;
            tile.sums = sums + first * PANEL;
            wide_tiles(int(count * (t + 1) / num_tiles - first), tile, chunk, numbers_of);
        }
        header = chunk.end(*tile.block);
    }
}

}  // namespace
}  // namespace outrider
