// y = x Wᵀ + b (+ residual) for quantised weights and bfloat16 inputs, with the adapters of a step in the same call.
#include <cmath>

#include "quantized_call.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_SHARED_INPUTS = 1 << 13;  // fewer are prepared by one thread: waiting for others costs more

// Prepares rows [first, last) of the inputs.
void prepare(const QuantizedCall& call, Rows* rows, int64_t first, int64_t last) {
    for (int64_t i = 0; i < call.weight.num_inputs; i++)
        for (int64_t row = first; row < last; row++) rows[i].fill(row, call.x + row * call.weight.in_features);
}

// A part of the outputs, and of the adapters' first phase.
void multiply(const QuantizedCall& call, const Adapters<bf16>* adapters, int64_t part, int team) {
    static thread_local std::vector<Span> spans;
    int64_t num_panels = 0;
    bool is_even = true;  // all panels but the last are full
    for (int64_t b = 0; b < call.weight.num_blocks; b++) {
        num_panels += (call.weight.blocks[b].out_features + PANEL - 1) / PANEL;
        if (b + 1 < call.weight.num_blocks) is_even = is_even && call.weight.blocks[b].out_features % PANEL == 0;
    }
    const int64_t first = num_panels * part / team, last = num_panels * (part + 1) / team;
    if (!adapters) return multiply(call, first, last, nullptr);
    spans.clear();
    if (call.num_rows > 3 && is_even && adapters->are_few())  // a single tile leaves the memory no time for more
        adapters->spans(int(part), team, first * PANEL, std::min(last * PANEL, call.weight.out_features), MOST_FETCHED, spans);
    Fetch fetch(spans);
    multiply(call, first, last, &fetch);
    adapters->begin(part, team);
}

void multiply(const QuantizedWeight& weight, const bf16* x, const bf16* residual, bf16* y, int64_t num_rows,
              const Adapters<bf16>* adapters) {
    static thread_local std::vector<Rows> kept;
    if ((int64_t)kept.size() < weight.num_inputs) kept.resize(weight.num_inputs);
    Rows* const rows = kept.data();
    for (int64_t i = 0; i < weight.num_inputs; i++) rows[i].prepare(weight.inputs[i], weight, num_rows);
    const QuantizedCall call{weight, x, residual, y, num_rows, rows, 0};
    const int64_t work = num_rows * weight.in_features * weight.out_features + (adapters ? adapters->work() : 0);
    const bool is_shared = num_rows * weight.in_features >= MIN_SHARED_INPUTS;
    if (!is_shared) prepare(call, rows, 0, num_rows);
    const int team = team_for(work >= MIN_PARALLEL_WORK);
    const auto share = [&](int64_t part) { prepare(call, rows, num_rows * part / team, num_rows * (part + 1) / team); };
    const auto compute = [&](int64_t part) { multiply(call, adapters, part, team); };
    const auto finish = [&](int64_t part) { adapters->finish(part, team, PANEL); };
    parallel(team, Phase{is_shared ? team : 0, share}, Phase{team, compute},
             Phase{adapters ? adapters->num_parts(team) : 0, finish});
}

// Packs a block's codes [out, in], each of a byte and combined with `flip`; scales [out, groups] float16, and offsets
// float16 or zero points uint8 if there are any.
void pack(const Block& block, const uint8_t* codes, uint8_t flip, const uint16_t* scales, const void* offsets) {
    const int64_t num_panels = (block.out_features + PANEL - 1) / PANEL, in = block.in_features;
    const int64_t groups = (in + block.group - 1) / block.group, bytes = quad_bytes(block.form);
    const bool is_half = is_nibble(block.form);
    parallel_for(num_threads(), num_panels, [&](int64_t panel) {
        uint8_t* to = (uint8_t*)block.panels + panel * panel_bytes(block);
        std::memset(to, 0, panel_bytes(block));
        const int64_t start = panel * PANEL, width = std::min(PANEL, block.out_features - start);
        for (int64_t first = 0; first < in; first += block.chunk) {
            const int64_t last = std::min(first + block.chunk, in);
            for (int64_t i = 0; i < width; i++) {
                const int64_t place = (start + i) * groups + first / block.group;
                ((uint16_t*)to)[i] = scales[place];
                if (block.offsets == HALF_OFFSETS) ((uint16_t*)to)[PANEL + i] = ((const uint16_t*)offsets)[place];
                if (block.offsets == ZERO_POINTS) to[2 * PANEL + i] = ((const uint8_t*)offsets)[place];
            }
            to += header_bytes(block);
            for (int64_t i = 0; i < width; i++) {
                const uint8_t* from = codes + (start + i) * in;
                const int64_t shift = is_half && i >= PANEL / 2 ? 4 : 0, lane = shift ? i - PANEL / 2 : i;
                for (int64_t k = first; k < last; k++)
                    to[(k - first) / QUAD * bytes + place_of(block.form, lane, (k - first) % QUAD)] |= (from[k] ^ flip) << shift;
            }
            to += num_quads(last - first) * bytes;
        }
    });
}

float half_value(uint16_t bits) {
    const uint32_t wide = uint32_t(bits & 0x8000) << 16 | uint32_t(bits & 0x7fff) << 13;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}

// The number of one code.
float number(const Block& block, uint8_t code) {
    if (block.form == SMALL_LEVELS) return float(((const uint8_t*)block.levels)[code] - block.zero);
    if (block.form == LEVELS) return ((const float*)block.levels)[code];
    if (block.form != FLOAT8_CODES) return float(code - block.zero);
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return code & 128 ? -size : size;
}

// y [in] = row `output` of a block, dequantised.
void dequantize(const Block& block, const int32_t* order, int64_t output, bf16* y) {
    const uint8_t* from = block.panels + output / PANEL * panel_bytes(block);
    const int64_t bytes = quad_bytes(block.form), i = output % PANEL;
    const bool is_upper = is_nibble(block.form) && i >= PANEL / 2;
    const int64_t lane = is_upper ? i - PANEL / 2 : i;
    for (int64_t first = 0; first < block.in_features; first += block.chunk) {
        const int64_t last = std::min(first + block.chunk, block.in_features);
        const uint16_t* header = (const uint16_t*)from;
        const float scale = half_value(header[i]) * float(block.scale_unit);
        float offset = 0;
        if (block.offsets == HALF_OFFSETS) offset = half_value(header[PANEL + i]) * float(block.offset_unit);
        const int zero = block.offsets == ZERO_POINTS ? from[2 * PANEL + i] : 0;
        from += header_bytes(block);
        for (int64_t k = first; k < last; k++) {
            uint8_t code = from[(k - first) / QUAD * bytes + place_of(block.form, lane, (k - first) % QUAD)];
            if (is_nibble(block.form)) code = is_upper ? code >> 4 : code & 15;
            put(y + (order ? order[k] : k), (number(block, code) - zero) * scale + offset);
        }
        from += num_quads(last - first) * bytes;
    }
}

}  // namespace

// y [count, in] bfloat16 = rows `ids` of the weight, which has them.
extern "C" void outrider_quantized_rows(const QuantizedWeight* weight, const int64_t* ids, int64_t count, void* y) {
    parallel_for(team_for(count * weight->in_features >= MIN_SHARED_INPUTS), count, [&](int64_t r) {
        const Block* block = weight->blocks;
        int64_t output = ids[r];
        for (; output >= block->out_features; block++) output -= block->out_features;
        dequantize(*block, weight->inputs[block->inputs].order, output, (bf16*)y + r * weight->in_features);
    });
}

// 1 if the processor multiplies integers; else SMALL_LEVELS is not served.
extern "C" int64_t outrider_quantized_integers() { return HAS_INTEGER_TILES; }

// Bytes of a block's panels.
extern "C" int64_t outrider_quantized_bytes(const Block* block) {
    return (block->out_features + PANEL - 1) / PANEL * panel_bytes(*block);
}

extern "C" void outrider_quantized_pack(const Block* block, const void* codes, int64_t flip, const void* scales,
                                        const void* offsets) {
    pack(*block, (const uint8_t*)codes, uint8_t(flip), (const uint16_t*)scales, offsets);
}

// `site`: rank rows of the adapters whose deltas are added afterwards, or null.
extern "C" void outrider_quantized_linear(const QuantizedWeight* weight, const void* x, const void* residual, void* y,
                                          int64_t rows, const Site* site, const Step* step) {
    const bf16 *input = (const bf16*)x, *added = (const bf16*)residual;
    bf16* output = (bf16*)y;
    if (!site) return multiply(*weight, input, added, output, rows, nullptr);
    const Adapters<bf16> adapters(*site, *step, input, output);
    multiply(*weight, input, added, output, rows, &adapters);
}
