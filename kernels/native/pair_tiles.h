// y = x Wᵀ in bfloat16 by the tiles of AMX, from the panels of panels.h.
//
// A result is a sum over blocks of 32 inputs in their order, whatever else is computed: its bits depend on its own row
// and column alone. They are not those of AVX512-BF16, which adds pair by pair: so all numbers of rows use tiles.
#pragma once

#include "panels.h"
#include "tiles.h"

namespace outrider {
namespace {

#if defined(OUTRIDER_PANELS) && defined(OUTRIDER_TILES)

constexpr int64_t DEPTH = 16;                                  // pairs of inputs in a tile
constexpr int64_t DEPTH_LINES = DEPTH * PANEL_STRIDE / LINE;   // lines of a panel's weights for them
constexpr int64_t TILES_AHEAD = 2 * DEPTH_LINES * LINE;        // bytes of the weight that are prefetched

// A block of a panel's inputs. The last ones, fewer than DEPTH pairs, are copied with zeros behind them.
struct PairBlock {
    const bf16 *x, *weights;       // of the first row and the first pair
    int64_t stride;                // bytes between two rows
    int64_t whole;                 // number of full tiles
    const bf16 *last_x, *last_weights;  // [rows, 2 * DEPTH], [DEPTH, PANEL, 2]; null if there is no rest
    bool is_first;
    const char* next;              // `lines` of it are prefetched with every tile
    int64_t lines;
    Fetch* fetch;

    void prefetch() {
        for (int64_t line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next);
        if (fetch)
            for (int64_t line = 0; line < FETCHED * DEPTH; line++) fetch->line();
    }
};

// sums [rows, PANEL] (+)= products of a tile of rows with all outputs of a panel.
inline void wide_tile(PairBlock& block, int64_t row, float* sums) {
    constexpr int64_t STRIDE = PANEL * sizeof(float);
    if (block.is_first) {
        zero_results();
    } else {
        Tiles::load<0>(sums, STRIDE);
        Tiles::load<1>(sums + LANES, STRIDE);
        Tiles::load<2>(sums + 2 * LANES, STRIDE);
        Tiles::load<3>(sums + 3 * LANES, STRIDE);
    }
    const char* x = (const char*)block.x + row * block.stride;
    const bf16* weights = block.weights;
    for (int64_t i = 0; i < block.whole; i++, x += TILE_BYTES, weights += 2 * DEPTH * PANEL) {
        block.prefetch();
        add_wide<PairProduct>(x, block.stride, weights);
    }
    if (block.last_x) add_wide<PairProduct>(block.last_x + row * 2 * DEPTH, TILE_BYTES, block.last_weights);
    Tiles::store<0>(sums, STRIDE);
    Tiles::store<1>(sums + LANES, STRIDE);
    Tiles::store<2>(sums + 2 * LANES, STRIDE);
    Tiles::store<3>(sums + 3 * LANES, STRIDE);
}

// The same for two tiles of rows and half of the outputs, from `column` on: each load serves two products.
inline void double_tile(PairBlock& block, int64_t row, int64_t other, int64_t column, float* sums, float* other_sums) {
    constexpr int64_t STRIDE = PANEL * sizeof(float);
    sums += column;
    other_sums += column;
    if (block.is_first) {
        zero_results();
    } else {
        Tiles::load<0>(sums, STRIDE);
        Tiles::load<1>(sums + LANES, STRIDE);
        Tiles::load<2>(other_sums, STRIDE);
        Tiles::load<3>(other_sums + LANES, STRIDE);
    }
    const char* x = (const char*)block.x;
    const bf16* weights = block.weights + 2 * column;
    for (int64_t i = 0; i < block.whole; i++, x += TILE_BYTES, weights += 2 * DEPTH * PANEL) {
        block.prefetch();
        add_double<PairProduct>(x + row * block.stride, x + other * block.stride, block.stride, weights);
    }
    if (block.last_x)
        add_double<PairProduct>(block.last_x + row * 2 * DEPTH, block.last_x + other * 2 * DEPTH, TILE_BYTES,
                                block.last_weights + 2 * column);
    Tiles::store<0>(sums, STRIDE);
    Tiles::store<1>(sums + LANES, STRIDE);
    Tiles::store<2>(other_sums, STRIDE);
    Tiles::store<3>(other_sums + LANES, STRIDE);
}

// Computes rows [begin, end) of a panel's outputs, as `compute` does.
inline void compute_by_tiles(const Call& call, int64_t panel, int64_t begin, int64_t end, bool is_last, Fetch* fetch) {
    alignas(64) static thread_local float sums[BLOCK_ROWS * PANEL];
    alignas(64) static thread_local bf16 last_x[BLOCK_ROWS * 2 * DEPTH], last_weights[DEPTH * PANEL * 2];
    const RowTiles tiles(end - begin);
    const int64_t in = call.weight->in_features, num_pairs = in / 2, rest = num_pairs % DEPTH;
    const int64_t passes = tiles.count / 2 * 2 + tiles.count % 2;  // over the weights, or halves of them
    if (rest) {
        const bf16* weights = call.weight->panels + ((panel + 1) * num_pairs - rest) * 2 * PANEL;
        std::memset(last_weights, 0, sizeof last_weights);
        std::memcpy(last_weights, weights, rest * 2 * PANEL * sizeof(bf16));
        std::memset(last_x, 0, tiles.rows * TILE_BYTES);
        for (int64_t row = 0; row < tiles.rows; row++)
            std::memcpy(last_x + row * 2 * DEPTH, call.x + (begin + row + 1) * in - 2 * rest, 2 * rest * sizeof(bf16));
    }
    const Tiles registers(tiles.height, DEPTH);
    for (int64_t k = 0; k < num_pairs; k += BLOCK_PAIRS) {
        const int64_t pairs = std::min(BLOCK_PAIRS, num_pairs - k);
        const bool is_end = k + pairs == num_pairs;
        PairBlock block{call.x + begin * in + 2 * k,
                        call.weight->panels + (panel * num_pairs + k) * 2 * PANEL,
                        in * int64_t(sizeof(bf16)),
                        pairs / DEPTH,
                        is_end && rest ? last_x : nullptr,
                        last_weights,
                        k == 0,
                        nullptr,
                        is_last && is_end ? 0 : (DEPTH_LINES + passes - 1) / passes,
                        fetch && !fetch->ended() ? fetch : nullptr};
        // As in `compute`: a single pass prefetches its own next weights, several ones the next block.
        block.next = (const char*)block.weights + (passes == 1 ? TILES_AHEAD : pairs * PANEL_STRIDE);
        for (int64_t t = 0; t < tiles.count; t += 2) {
            float *const to = sums + t * TILE_ROWS * PANEL, *const other = to + TILE_ROWS * PANEL;
            if (t + 1 == tiles.count) {
                wide_tile(block, tiles.first(t), to);
                break;
            }
            for (int64_t column = 0; column < PANEL; column += PANEL / 2)
                double_tile(block, tiles.first(t), tiles.first(t + 1), column, to, other);
        }
    }
    put_outputs(call, panel, begin, end, [&](int64_t row) { return sums + tiles.place(row - begin) * PANEL; });
}

#endif

#ifdef OUTRIDER_PANELS

// Computes rows [begin, end) of a panel's outputs, by tiles if the process uses them.
inline void compute_panel(const Call& call, int64_t panel, int64_t begin, int64_t end, bool is_last, Fetch* fetch) {
#ifdef OUTRIDER_TILES
    if (TileUse::pairs().load(std::memory_order_relaxed))
        return compute_by_tiles(call, panel, begin, end, is_last, fetch);
#endif
    compute(call, panel, begin, end, is_last, fetch);
}

#endif

}  // namespace
}  // namespace outrider
