// y = x Wᵀ + b (+ residual) for quantised weights, some panels of some rows.
#pragma once

#include "half_tiles.h"

namespace outrider {
namespace {

struct QuantizedCall {
    const QuantizedWeight& weight;
    const bf16 *x, *residual;  // [rows, in]; [rows, out], or null
    bf16* y;                   // [rows, out]
    int64_t num_rows;
    const Rows* rows;          // of each of the weight's Inputs
    int64_t first_row;         // of them that is x's first one
};

// y = sums + b (+ residual) for rows [begin, end) and `width` outputs from `column` on.
inline void put_outputs(const QuantizedCall& call, const float* sums, int64_t begin, int64_t end, int64_t column, int64_t width) {
    const int64_t out = call.weight.out_features;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            Vec value = load(sums + (row - begin) * PANEL + i);
            if (call.weight.bias) value += load(call.weight.bias + column + i, width - i);
            if (call.residual) value += load(call.residual + row * out + column + i, width - i);
            store(call.y + row * out + column + i, value, width - i);
        }
}

// Computes panels [first, last), counted over all blocks; `fetch` prefetches during the last ones.
inline void multiply(const QuantizedCall& call, int64_t first, int64_t last, Fetch* fetch) {
    static thread_local float sums[BLOCK_ROWS * PANEL];
    const int64_t tiles = (call.num_rows + 2) / 3, quads = num_quads(call.weight.in_features) * tiles;  // of a panel
    for (int64_t begin = 0; begin < call.num_rows; begin += BLOCK_ROWS) {
        const int64_t end = std::min(begin + BLOCK_ROWS, call.num_rows);
        int64_t before = 0, column = 0;  // panels and outputs of the blocks before
        for (int64_t b = 0; b < call.weight.num_blocks; b++) {
            const Block& block = call.weight.blocks[b];
            const int64_t num_panels = (block.out_features + PANEL - 1) / PANEL;
            for (int64_t p = std::max(first, before); p < std::min(last, before + num_panels); p++) {
                const int64_t panel = p - before, start = panel * PANEL;
                const bool is_soon = fetch && (last - p) * quads * FETCHED <= fetch->num_lines * 9 / 8;
                multiply_panel(block, call.rows[block.inputs], panel, call.first_row + begin, call.first_row + end,
                               p + 1 == last, is_soon ? fetch : nullptr, sums);
                put_outputs(call, sums, begin, end, column + start, std::min(PANEL, block.out_features - start));
            }
            before += num_panels;
            column += block.out_features;
        }
    }
}

inline int64_t num_panels(const QuantizedWeight& weight) {
    int64_t total = 0;
    for (int64_t b = 0; b < weight.num_blocks; b++) total += (weight.blocks[b].out_features + PANEL - 1) / PANEL;
    return total;
}

}  // namespace
}  // namespace outrider
