// Products of fixed-point inputs with integer codes by the tiles of AMX. All integers are exact: the results have the bits
// of those by AVX512-VNNI (code_tiles.h).
#pragma once

#include "code_tiles.h"
#include "tiles.h"

namespace outrider {
namespace {

#if defined(OUTRIDER_INTEGER_TILES) && defined(OUTRIDER_TILES)

constexpr int64_t MOST_QUADS = 16;  // in a tile

// The codes of some quads of a chunk as bytes, with zeros up to a multiple of `depth` quads.
struct CodeBytes {
    alignas(64) uint8_t bytes[256 / QUAD * PANEL_STRIDE + MOST_QUADS * PANEL_STRIDE];

    template <int64_t FORM>
    void widen(const Block& block, const uint8_t* codes, int64_t first, int64_t last) {
        const __m512i table = FORM == SMALL_LEVELS
                                  ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)block.levels))
                                  : __m512i{};
        for (int64_t q = first; q < last; q++) {
            __m512i quad[4];
            load_quad<FORM>(codes + q * quad_bytes(FORM), table, quad);
            for (int v = 0; v < 4; v++) _mm512_store_si512(bytes + q * PANEL_STRIDE + v * LINE, quad[v]);
        }
    }

    // Of BYTES only the quads that do not fill a tile.
    void fill(const Block& block, const Chunk& chunk, int64_t depth) {
        const int64_t quads = chunk.quads, end = (quads + depth - 1) / depth * depth;
        if (block.form == BYTES) widen<BYTES>(block, chunk.codes, quads / depth * depth, quads);
        else if (block.form == NIBBLES) widen<NIBBLES>(block, chunk.codes, 0, quads);
        else widen<SMALL_LEVELS>(block, chunk.codes, 0, quads);
        std::memset(bytes + quads * PANEL_STRIDE, 0, (end - quads) * PANEL_STRIDE);
    }

    const uint8_t* at(const Block& block, const Chunk& chunk, int64_t quad, int64_t depth) const {
        const bool is_whole = block.form == BYTES && quad + depth <= chunk.quads;
        return is_whole ? chunk.codes + quad * PANEL_STRIDE : bytes + quad * PANEL_STRIDE;
    }
};

typedef int32_t Totals[2][TILE_ROWS][PANEL];  // of each plane

// totals = integer products of a chunk with the rows of a tile, of which `x` is the first one's chunk.
inline void multiply_chunk(const CodeTile& tile, const Chunk& chunk, const CodeBytes& codes, int64_t depth,
                           Totals& totals) {
    const Block& block = *tile.block;
    const Rows& rows = *tile.rows;
    const int8_t* const x = rows.bytes(tile.row) + chunk.number * rows.padded_chunk;
    const int64_t stride = rows.num_planes * rows.padded;
    constexpr int64_t STRIDE = PANEL * sizeof(int32_t);
    if (rows.num_planes == 1) {
        zero_results();
        for (int64_t q = 0; q < chunk.quads; q += depth)
            add_wide<ByteProduct>(x + q * QUAD, stride, codes.at(block, chunk, q, depth));
        Tiles::store<0>(totals[0][0], STRIDE);
        Tiles::store<1>(totals[0][0] + LANES, STRIDE);
        Tiles::store<2>(totals[0][0] + 2 * LANES, STRIDE);
        Tiles::store<3>(totals[0][0] + 3 * LANES, STRIDE);
        return;
    }
    for (int64_t column = 0; column < PANEL; column += PANEL / 2) {
        zero_results();
        for (int64_t q = 0; q < chunk.quads; q += depth)
            add_double<ByteProduct>(x + q * QUAD, x + q * QUAD + rows.padded, stride,
                                    codes.at(block, chunk, q, depth) + column * QUAD);
        Tiles::store<0>(totals[0][0] + column, STRIDE);
        Tiles::store<1>(totals[0][0] + column + LANES, STRIDE);
        Tiles::store<2>(totals[1][0] + column, STRIDE);
        Tiles::store<3>(totals[1][0] + column + LANES, STRIDE);
    }
}

// Adds the totals of R rows, from row `first` of the tile on, to the sums.
template <int R>
inline void add_totals(CodeTile tile, const Chunk& chunk, const Totals& totals, int64_t first) {
    const int last = tile.rows->num_planes - 1;
    tile.row += first;
    tile.sums += first * PANEL;
    Vec products[R][VECS_OF_PANEL];
    for (int r = 0; r < R; r++) {
        const uint32_t number = tile.rows->integer_totals(tile.row + r)[chunk.number];
        const __m512i zero = _mm512_set1_epi32(-uint32_t(tile.block->zero) * number);
        for (int v = 0; v < VECS_OF_PANEL; v++) {
            __m512i total = _mm512_add_epi32(zero, _mm512_loadu_si512(totals[last][first + r] + v * LANES));
            if (last) {
                const __m512i upper = _mm512_loadu_si512(totals[0][first + r] + v * LANES);
                total = _mm512_add_epi32(total, _mm512_slli_epi32(upper, 8));
            }
            products[r][v] = (Vec)_mm512_cvtepi32_ps(total);
        }
    }
    finish<R>(tile, chunk, products);
}

// sums[row - begin] += products of rows [begin, end) with a panel, whose codes begin at `header`.
inline void multiply_by_tiles(const Block& block, const Rows& rows, const uint8_t* header, int64_t begin, int64_t end,
                              float* sums) {
    static thread_local CodeBytes codes;
    alignas(64) static thread_local Totals totals;
    const RowTiles tiles(end - begin);
    const int64_t depth = std::min(MOST_QUADS, num_quads(std::min(block.chunk, block.in_features)));
    const Tiles registers(tiles.height, depth);
    for (int64_t c = 0; c < block.num_chunks(); c++) {
        const Chunk chunk(block, c, header);
        const char* const next = (const char*)chunk.end(block);
        for (int64_t line = 0; line * LINE < next - (const char*)header; line++) __builtin_prefetch(next + line * LINE);
        codes.fill(block, chunk, depth);
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.first(t);
            const CodeTile tile{&block, &rows, begin + first, c, c + 1, header, sums + first * PANEL, nullptr, 0, nullptr};
            multiply_chunk(tile, chunk, codes, depth, totals);
            int64_t row = t * tiles.height - first;  // rows before it are those of the tile before
            for (; row + 4 <= tiles.height; row += 4) add_totals<4>(tile, chunk, totals, row);
            for (; row < tiles.height; row++) add_totals<1>(tile, chunk, totals, row);
        }
        header = chunk.end(block);
    }
}

#endif

}  // namespace
}  // namespace outrider
