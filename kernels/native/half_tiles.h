// Products of bfloat16 inputs with codes of a panel that are no integers, if the processor multiplies bfloat16 in
// pairs: float8 is exact in bfloat16, levels are rounded to it.
#pragma once

#include "byte_tiles.h"

namespace outrider {
namespace {

#ifdef OUTRIDER_HALF_TILES

// The upper and the lower bytes of the bfloat16 of each code.
template <int64_t FORM>
struct HalfTable;

template <>
struct HalfTable<LEVELS> {
    __m512i upper, lower;

    explicit HalfTable(const Block& block) {
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(block.levels));
        upper = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(_mm256_srli_epi16(halves, 8)));
        lower = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(halves));
    }

    void look_up(__m512i codes, __m512i& high, __m512i& low) const {
        high = _mm512_shuffle_epi8(upper, codes);
        low = _mm512_shuffle_epi8(lower, codes);
    }
};

template <>
struct HalfTable<FLOAT8_CODES> {
    __m512i upper[2], lower[2];  // of the 128 sizes

    explicit HalfTable(const Block&) {
        alignas(64) uint8_t high[128], low[128];
        for (int code = 0; code < 128; code++) {
            const int exponent = code >> 3, fraction = code & 7;
            bf16 half;
            put(&half, (exponent ? (8 + fraction) * float(1 << exponent) : 2 * fraction) * 0x1p-10f);
            if (code == 127) half.bits = 0x7fc0;  // NaN
            high[code] = uint8_t(half.bits >> 8);
            low[code] = uint8_t(half.bits);
        }
        for (int i = 0; i < 2; i++) {
            upper[i] = _mm512_load_si512(high + 64 * i);
            lower[i] = _mm512_load_si512(low + 64 * i);
        }
    }

    void look_up(__m512i codes, __m512i& high, __m512i& low) const {
        const __m512i size = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);  // without the sign
        high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(-128), 0xf8);  // size | (codes & 128)
        low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
    }
};

// sum += weights * inputs, two for each lane.
inline __attribute__((always_inline)) void accumulate_pairs(__m512& sum, __m512i weights, __m512i inputs) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)inputs);
}

template <int64_t FORM, int R>
__attribute__((noinline)) void half_tile(const CodeTile& tile, const HalfTable<FORM>& shared) {
    const Block& block = *tile.block;
    const Rows& rows = *tile.rows;
    const HalfTable<FORM> table = shared;
    const int64_t stride = rows.padded;
    const __m512i mask = _mm512_set1_epi8(15);
    const char* next = tile.next;
    const uint8_t* header = tile.codes;
    for (int64_t c = tile.first_chunk; c < tile.last_chunk; c++) {
        const Chunk chunk(block, c, header);
        __m512 sums[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) sums[r][v] = _mm512_setzero_ps();
        const bf16* part = rows.halves(tile.row) + c * rows.padded_chunk;
        const uint8_t* codes = chunk.codes;
        for (int64_t q = 0; q < chunk.quads; q += STRIDE) {
            next = prefetch(tile, next);
            const int64_t stop = std::min(q + STRIDE, chunk.quads);
            for (int64_t i = q; i < stop; i++, codes += quad_bytes(FORM), part += QUAD) {
                __m512i first[R], second[R];
                for (int r = 0; r < R; r++) {
                    int32_t pairs[2];
                    std::memcpy(pairs, part + r * stride, sizeof pairs);
                    first[r] = _mm512_set1_epi32(pairs[0]);
                    second[r] = _mm512_set1_epi32(pairs[1]);
                }
                for (int v = 0; v < 4; v++) {
                    __m512i own = _mm512_loadu_si512(codes + (is_nibble(FORM) ? v % 2 : v) * LINE);
                    if (is_nibble(FORM)) own = _mm512_and_si512(v < 2 ? own : _mm512_srli_epi16(own, 4), mask);
                    __m512i high, low;
                    table.look_up(own, high, low);
                    const __m512i one = _mm512_unpacklo_epi8(low, high), two = _mm512_unpackhi_epi8(low, high);
                    for (int r = 0; r < R; r++) accumulate_pairs(sums[r][v], one, first[r]);
                    for (int r = 0; r < R; r++) accumulate_pairs(sums[r][v], two, second[r]);
                }
            }
        }
        Vec products[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) products[r][v] = (Vec)sums[r][v];
        finish<R>(tile, chunk, products);
        header = chunk.end(block);
    }
}

template <int64_t FORM, int R = FLOAT_ROWS>
inline void half_tiles(int rows, const CodeTile& tile, const HalfTable<FORM>& table) {
    if (rows == R) half_tile<FORM, R>(tile, table);
    else if constexpr (R > 1) half_tiles<FORM, R - 1>(rows, tile, table);
}

inline void half_tiles(int rows, const CodeTile& tile) {
    static const HalfTable<FLOAT8_CODES> float8(*tile.block);
    if (tile.block->form == LEVELS) half_tiles<LEVELS>(rows, tile, HalfTable<LEVELS>(*tile.block));
    else half_tiles<FLOAT8_CODES>(rows, tile, float8);
}

#else

inline void half_tiles(int, const CodeTile&) {}

#endif

// Rows that a tile of a block has at most.
inline int64_t most_rows(const Block& block, const Rows& rows) {
    const bool is_integer = HAS_INTEGER_TILES && block.form <= BYTES;
    return !is_integer ? FLOAT_ROWS : rows.num_planes == 2 ? 3 : 6;
}

// sums[row - begin] = products of rows [begin, end) with a panel. `is_last`: the thread reads no further weights.
inline void multiply_panel(const Block& block, const Rows& rows, int64_t panel, int64_t begin, int64_t end, bool is_last,
                           Fetch* fetch, float* sums) {
    std::fill(sums, sums + (end - begin) * PANEL, 0.0f);
    const bool is_integer = HAS_INTEGER_TILES && block.form <= BYTES;
    const int64_t most = most_rows(block, rows), num_tiles = (end - begin + most - 1) / most;
    const int64_t chunks = block.num_chunks();
    const int64_t step = std::max<int64_t>(BLOCK_INPUTS / block.chunk, 1), quad_lines = quad_bytes(block.form) / LINE;
    const int64_t stride_lines = quad_lines * STRIDE;
    const uint8_t* codes = block.panels + panel * panel_bytes(block);
#ifdef OUTRIDER_TILES
    if (is_integer && end - begin >= TileUse::byte_rows().load(std::memory_order_relaxed))
        return multiply_by_tiles(block, rows, codes, begin, end, sums);
#endif
    for (int64_t c = 0; c < chunks; c += step) {
        const int64_t last_chunk = std::min(c + step, chunks);
        const int64_t bytes = (last_chunk - c) * chunk_bytes(block, block.chunk);
        CodeTile tile{&block, &rows, begin, c, last_chunk, codes, sums, nullptr, 0, fetch && !fetch->ended() ? fetch : nullptr};
        if (!is_integer && !HAS_HALF_TILES && num_tiles > 1 && block.chunk <= MOST_NUMBERS) {  // native.py makes none larger
            multiply_wide(tile, end - begin);
            codes += bytes;
            continue;
        }
        // As in panels.h: the first tile waits for the memory, the others would let it idle, so they prefetch.
        tile.next = (const char*)codes + (num_tiles == 1 ? AHEAD : bytes);
        const bool is_end = is_last && last_chunk == chunks;
        const char* const end_of_next = tile.next + bytes;
        for (int64_t t = 0; t < num_tiles; t++) {
            const int64_t first = (end - begin) * t / num_tiles, last = (end - begin) * (t + 1) / num_tiles;
            tile.row = begin + first;
            tile.sums = sums + first * PANEL;
            tile.lines = is_end || tile.next >= end_of_next ? 0 : std::max<int64_t>(stride_lines / num_tiles, 1);
            const int height = int(last - first);
            if (is_integer) integer_tiles(height, tile);
            else if (HAS_HALF_TILES) half_tiles(height, tile);
            else float_tiles(height, tile);
            tile.next += tile.lines * (bytes / LINE / stride_lines) * LINE;
        }
        codes += bytes;
    }
}

}  // namespace
}  // namespace outrider
