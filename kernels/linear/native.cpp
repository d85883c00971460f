// y = x Wᵀ + b (+ residual) in bfloat16, with the adapters of a step in the same call.
#include "pair_tiles.h"

using namespace outrider;

namespace {

#ifdef OUTRIDER_PANELS

// Computes panels [first, last); `fetch` prefetches during the last ones.
void multiply(const Call& call, int64_t rows, int64_t first, int64_t last, Fetch* fetch) {
    const int64_t pairs = call.weight->in_features / 2 * ((rows + ROWS - 1) / ROWS);  // of a panel
    for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS)
        for (int64_t panel = first; panel < last; panel++) {
            const bool is_soon = fetch && (last - panel) * pairs * FETCHED <= fetch->num_lines * 9 / 8;
            compute_panel(call, panel, begin, std::min(begin + BLOCK_ROWS, rows), panel + 1 == last,
                          is_soon ? fetch : nullptr);
        }
}

// A part of the outputs, and of the adapters' first phase.
void multiply(const Call& call, int64_t rows, const Adapters<bf16>* adapters, int64_t part, int team) {
    static thread_local std::vector<Span> spans;
    const int64_t out = call.weight->out_features, num_panels = (out + PANEL - 1) / PANEL;
    const int64_t first = num_panels * part / team, last = num_panels * (part + 1) / team;
    if (!adapters) return multiply(call, rows, first, last, nullptr);
    spans.clear();
    // A single tile leaves the memory no time for more.
    if (rows > ROWS && adapters->are_few())
        adapters->spans(int(part), team, first * PANEL, std::min(last * PANEL, out), MOST_FETCHED, spans);
    Fetch fetch(spans);
    multiply(call, rows, first, last, &fetch);
    adapters->begin(part, team);
}

void multiply(const Call& call, int64_t rows, const Adapters<bf16>* adapters) {
    const int64_t work = rows * call.weight->in_features * call.weight->out_features + (adapters ? adapters->work() : 0);
    const int team = team_for(work >= MIN_PARALLEL_WORK);
    parallel(team, Phase{team, [&](int64_t part) { multiply(call, rows, adapters, part, team); }},
             Phase{adapters ? adapters->num_parts(team) : 0,
                   [&](int64_t part) { adapters->finish(part, team, PANEL); }});
}

// Packs `weight` [rows, in] as the outputs from `first`, the start of a panel, on.
void pack(const Weight& to, const bf16* weight, int64_t first, int64_t rows) {
    const int64_t in = to.in_features, num_pairs = in / 2;
    const int64_t num_panels = (rows + PANEL - 1) / PANEL;
    parallel_for(num_threads(), num_panels, [&](int64_t panel) {
        for (int64_t k = 0; k < num_pairs; k += LANES)
            for (int64_t i = 0; i < PANEL; i++) {
                const int64_t row = panel * PANEL + i;
                bf16* out = (bf16*)to.panels + ((first / PANEL + panel) * num_pairs * PANEL + i) * 2;
                for (int64_t pair = k; pair < std::min(k + LANES, num_pairs); pair++) {
                    uint32_t bits = 0;
                    if (row < rows) std::memcpy(&bits, weight + row * in + 2 * pair, sizeof bits);
                    std::memcpy(out + pair * PANEL * 2, &bits, sizeof bits);
                }
            }
    });
}

constexpr bool SERVED = true;

#else

constexpr bool SERVED = false;

void multiply(const Call&, int64_t, const Adapters<bf16>*) {}
void pack(const Weight&, const bf16*, int64_t, int64_t) {}

#endif

// out[r] = sum over i of weight[r][i]^2; for every processor.
template <typename E>
void row_squares(const E* weight, int64_t rows, int64_t in, float* out) {
    parallel_for(team_for(rows * in >= MIN_PARALLEL_WORK), rows, [&](int64_t r) {
        Vec squares = zeros();
        for (int64_t i = 0; i < in; i += LANES) {
            const Vec value = load(weight + r * in + i, in - i);
            squares += value * value;
        }
        out[r] = sum(squares);
    });
}

}  // namespace

extern "C" void outrider_row_squares(const void* weight, int64_t rows, int64_t in, int64_t dtype, float* out) {
    if (dtype == BFLOAT16)
        row_squares((const bf16*)weight, rows, in, out);
    else
        row_squares((const float*)weight, rows, in, out);
}

// Outputs of a panel; 0 when the processor does not support this kernel.
extern "C" int64_t outrider_linear_panel() { return SERVED ? PANEL : 0; }

extern "C" void outrider_linear_pack(const Weight* to, const void* weight, int64_t first, int64_t rows) {
    pack(*to, (const bf16*)weight, first, rows);
}

// `site`: rank rows of the adapters whose deltas are added afterwards, or null.
extern "C" void outrider_linear(const Weight* weight, const void* x, const void* residual, void* y, int64_t rows,
                                const Site* site, const Step* step) {
    const Call call{weight, (const bf16*)x, (const bf16*)residual, (bf16*)y};
    if (!site) return multiply(call, rows, nullptr);
    const Adapters<bf16> adapters(*site, *step, call.x, call.y);
    multiply(call, rows, &adapters);
}
