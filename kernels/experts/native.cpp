// Experts of a layer: y[t] = sum over j of w[t][j] * down(silu(gate(x)) * up(x)) of expert e[t][j], in one call; or with
// the activation of gpt-oss. The products add the weights' biases.
//
// The pairs of a token and its j-th expert are sorted by expert. The panels of all experts that have pairs form one
// list, of which each thread reads an equal part from front to back; each weight is read once. The bits of a token's
// result depend on its own row alone, as those of the products do. Weights are of bfloat16, or quantised.
#include "clamped_swiglu.h"
#include "pair_tiles.h"
#include "quantized_call.h"

using namespace outrider;

namespace {

struct Experts {
    int64_t num_experts, hidden, inner;
    int64_t clamped;             // 0: SiLU; 1: the activation of gpt-oss
    int64_t is_quantized;        // the weights are QuantizedWeight, whose inputs are taken in one way; else Weight
    const void* const* gate_up;  // [E], each [2 * inner, hidden]
    const void* const* down;     // [E], each [hidden, inner]
};

struct Routing {
    const int64_t* experts;  // [T, k]; E: another process computes the pair, which adds nothing here
    const float* weights;    // [T, k]
    int64_t num_tokens, top_k;
};

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads

// y[t] = residual[t] + sum over j of weights[t][j] * outputs[place[t][j]], in the order of j, for indices below
// `pairs`; without `place` the outputs are in the order of the pairs.
template <typename E>
void combine(const E* outputs, const int64_t* place, const Routing& routing, const E* residual, E* y, int64_t hidden,
             int64_t pairs, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < hidden; i += LANES) {
            Vec total = residual ? load(residual + t * hidden + i, hidden - i) : zeros();
            for (int64_t pair = t * routing.top_k; pair < (t + 1) * routing.top_k; pair++) {
                const int64_t from = place ? place[pair] : pair;
                if (from < pairs) total += routing.weights[pair] * load(outputs + from * hidden + i, hidden - i);
            }
            store(y + t * hidden + i, total, hidden - i);
        }
}

template <typename E>
void combine(const void* outputs, const Routing& routing, const void* residual, void* y, int64_t hidden) {
    const int64_t tokens = routing.num_tokens;
    const int team = team_for(tokens * routing.top_k * hidden >= MIN_PARALLEL_ELEMENTS);
    parallel(team, Phase{team, [&](int64_t part) {
        combine((const E*)outputs, nullptr, routing, (const E*)residual, (E*)y, hidden, tokens * routing.top_k,
                tokens * part / team, tokens * (part + 1) / team);
    }});
}

// Weights of the k largest logits of a row: their softmax over all, maybe divided by their sum and rounded to E.
template <typename E>
void route(const E* logits, int64_t num_experts, int64_t top_k, bool renormalised, bool rounded, float* values,
           int64_t* experts, float* weights) {
    float most = to_float(logits[0]), total = 0, chosen = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        values[e] = to_float(logits[e]);
        most = std::max(most, values[e]);
    }
    for (int64_t e = 0; e < num_experts; e += LANES) {
        const int64_t count = std::min<int64_t>(LANES, num_experts - e);
        store(values + e, exponential(load(values + e, count) - most), count);
    }
    for (int64_t e = 0; e < num_experts; e++) total += values[e];
    for (int64_t j = 0; j < top_k; j++) {
        int64_t best = 0;
        for (int64_t e = 1; e < num_experts; e++)
            if (values[e] > values[best]) best = e;
        experts[j] = best;
        weights[j] = values[best] / total;
        chosen += weights[j];
        values[best] = -1;
    }
    for (int64_t j = 0; j < top_k; j++) {
        if (renormalised) weights[j] /= chosen;
        E value;
        put(&value, weights[j]);
        if (rounded) weights[j] = to_float(value);
    }
}

template <typename E>
void route(const void* logits, int64_t rows, int64_t num_experts, int64_t top_k, bool renormalised, bool rounded,
           int64_t* experts, float* weights) {
    const int team = team_for(rows * num_experts * top_k >= MIN_PARALLEL_ELEMENTS);
    parallel(team, Phase{team, [&](int64_t part) {
        std::vector<float> values(num_experts);
        for (int64_t r = rows * part / team; r < rows * (part + 1) / team; r++)
            route((const E*)logits + r * num_experts, num_experts, top_k, renormalised, rounded, values.data(),
                  experts + r * top_k, weights + r * top_k);
    }});
}

// Pairs sorted by expert.
struct Sorted {
    std::vector<int64_t> begin;   // [E + 2]: first pair of each expert; begin[E] is their number
    std::vector<int64_t> place;   // [T * k]: index of each pair
    std::vector<int64_t> active;  // experts that have pairs

    void sort(const Routing& routing, int64_t num_experts) {
        const int64_t num_pairs = routing.num_tokens * routing.top_k;
        begin.assign(num_experts + 2, 0);
        place.resize(num_pairs);
        active.clear();
        for (int64_t pair = 0; pair < num_pairs; pair++) begin[routing.experts[pair] + 1]++;
        for (int64_t e = 0; e <= num_experts; e++) {
            if (begin[e + 1] && e < num_experts) active.push_back(e);
            begin[e + 1] += begin[e];
        }
        std::vector<int64_t> next(begin.begin(), begin.end() - 1);
        for (int64_t pair = 0; pair < num_pairs; pair++) place[pair] = next[routing.experts[pair]]++;
    }
};

// Prefetch the first weights of the next expert: the memory would idle until they are requested.
void prefetch(const void* weights) {
    for (int64_t byte = 0; byte < AHEAD; byte += LINE) __builtin_prefetch((const char*)weights + byte, 0, 2);
}

#ifdef OUTRIDER_PANELS

// Weights [E] of bfloat16, and inputs of sorted pairs.
struct Plain {
    const Weight* const* weights;
    bf16* inputs;  // [pairs, in]
    static constexpr int64_t tile_rows = ROWS;

    int64_t in() const { return weights[0]->in_features; }
    int64_t out() const { return weights[0]->out_features; }
    int64_t panels() const { return (out() + PANEL - 1) / PANEL; }
    const void* start(int64_t e) const { return weights[e]->panels; }

    void put(int64_t pair, const bf16* x) const {
        if (x != inputs + pair * in()) std::memcpy(inputs + pair * in(), x, in() * sizeof(bf16));
    }

    // Panels [first, last) of an expert for `rows` pairs from `pair` on; afterwards `next` is read, if there is such.
    void multiply(int64_t e, int64_t pair, int64_t rows, int64_t first, int64_t last, bf16* y, const void* next) const {
        const Call call{weights[e], inputs + pair * in(), nullptr, y + pair * out()};
        for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS)
            for (int64_t panel = first; panel < last; panel++) {
                if (next && panel + 1 == last) prefetch(next);
                compute_panel(call, panel, begin, std::min(begin + BLOCK_ROWS, rows), panel + 1 == last, nullptr);
            }
    }
};

#endif

// Quantised weights [E], and inputs of sorted pairs as their products take them.
struct Quantized {
    const QuantizedWeight* const* weights;
    Rows* inputs;
    int64_t tile_rows;

    Quantized(const void* const* stored, Rows* inputs, int64_t pairs)
        : weights((const QuantizedWeight* const*)stored), inputs(inputs) {
        inputs->prepare(weights[0]->inputs[0], *weights[0], pairs);
        tile_rows = most_rows(weights[0]->blocks[0], *inputs);
    }

    int64_t out() const { return weights[0]->out_features; }
    int64_t panels() const { return num_panels(*weights[0]); }
    const void* start(int64_t e) const { return weights[e]->blocks[0].panels; }
    void put(int64_t pair, const bf16* x) const { inputs->fill(pair, x); }

    void multiply(int64_t e, int64_t pair, int64_t rows, int64_t first, int64_t last, bf16* y, const void* next) const {
        if (next) prefetch(next);
        outrider::multiply({*weights[e], nullptr, nullptr, y + pair * out(), rows, inputs, pair}, first, last, nullptr);
    }
};

// A part of the products of all experts, to y [pairs, out], which is sorted.
template <typename Side>
void multiply(const Side& side, const Sorted& sorted, bf16* y, int64_t part, int team) {
    const auto tiles = [&](int64_t e) {
        return (sorted.begin[e + 1] - sorted.begin[e] + side.tile_rows - 1) / side.tile_rows;
    };
    const int64_t num_panels = side.panels();
    int64_t total = 0, before = 0;
    for (int64_t e : sorted.active) total += tiles(e);
    // A panel is the work of its tiles; a part has those that begin in its share of all work.
    const int64_t low = total * num_panels * part / team, high = total * num_panels * (part + 1) / team;
    for (size_t i = 0; i < sorted.active.size(); i++) {
        const int64_t e = sorted.active[i];
        const int64_t first = std::clamp((low - before + tiles(e) - 1) / tiles(e), int64_t(0), num_panels);
        const int64_t last = std::clamp((high - before + tiles(e) - 1) / tiles(e), int64_t(0), num_panels);
        before += tiles(e) * num_panels;
        const bool goes_on = i + 1 < sorted.active.size() && before < high;
        if (first < last)
            side.multiply(e, sorted.begin[e], sorted.begin[e + 1] - sorted.begin[e], first, last, y,
                          goes_on ? side.start(sorted.active[i + 1]) : nullptr);
    }
}

// inner [pairs, I] = silu(gate) * up, the halves of gate_up [pairs, 2I]; rounded as the kernel of the dense MLP does.
void activate(const bf16* gate_up, bf16* inner, int64_t size, bool is_clamped, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        if (is_clamped) {
            clamped_swiglu(gate_up + row * 2 * size, inner + row * size, size);
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            const bf16* gate = gate_up + row * 2 * size + i;
            const Vec g = load(gate, size - i), up = load(gate + size, size - i);
            store(inner + row * size + i, g / (1.0f + exponential(-g)) * up, size - i);
        }
    }
}

template <typename Side>
void apply(const Experts& experts, const Sorted& sorted, const Side& open, const Side& close, const Routing& routing,
           const bf16* x, const bf16* residual, bf16* y, bf16* scratch) {
    const int64_t hidden = experts.hidden, inner = experts.inner, pairs = routing.num_tokens * routing.top_k;
    bf16 *outputs = scratch, *merged = outputs + pairs * hidden, *activated = merged + pairs * 2 * inner;
    const int64_t here = sorted.begin[experts.num_experts];
    const int team = team_for(here * hidden * inner >= MIN_PARALLEL_WORK);
    const auto gather = [&](int64_t part) {
        for (int64_t pair = pairs * part / team; pair < pairs * (part + 1) / team; pair++)
            if (sorted.place[pair] < here) open.put(sorted.place[pair], x + pair / routing.top_k * hidden);
    };
    const auto first = [&](int64_t part) { multiply(open, sorted, merged, part, team); };
    const auto act = [&](int64_t part) {
        const int64_t begin = here * part / team, end = here * (part + 1) / team;
        activate(merged, activated, inner, experts.clamped, begin, end);
        for (int64_t pair = begin; pair < end; pair++) close.put(pair, activated + pair * inner);
    };
    const auto second = [&](int64_t part) { multiply(close, sorted, outputs, part, team); };
    const auto add = [&](int64_t part) {
        const int64_t begin = routing.num_tokens * part / team, end = routing.num_tokens * (part + 1) / team;
        combine(outputs, sorted.place.data(), routing, residual, y, hidden, here, begin, end);
    };
    parallel(team, Phase{team, gather}, Phase{team, first}, Phase{team, act}, Phase{team, second}, Phase{team, add});
}

void apply(const Experts& experts, const Routing& routing, const bf16* x, const bf16* residual, bf16* y, bf16* scratch) {
    static thread_local Sorted sorted;
    sorted.sort(routing, experts.num_experts);
    const int64_t pairs = routing.num_tokens * routing.top_k;
    if (experts.is_quantized) {
        static thread_local Rows inputs[2];
        const Quantized open(experts.gate_up, &inputs[0], pairs), close(experts.down, &inputs[1], pairs);
        return apply(experts, sorted, open, close, routing, x, residual, y, scratch);
    }
#ifdef OUTRIDER_PANELS
    // The outputs replace the inputs, which are no longer needed then.
    const Plain open{(const Weight* const*)experts.gate_up, scratch};
    const Plain close{(const Weight* const*)experts.down, scratch + pairs * (experts.hidden + 2 * experts.inner)};
    apply(experts, sorted, open, close, routing, x, residual, y, scratch);
#endif
}

}  // namespace

// All of bfloat16. x, residual (or null) and y [T, H]; scratch [T * k, H + 3 * I].
extern "C" void outrider_experts(const Experts* experts, const Routing* routing, const void* x, const void* residual,
                                 void* y, void* scratch) {
    apply(*experts, *routing, (const bf16*)x, (const bf16*)residual, (bf16*)y, (bf16*)scratch);
}

// outputs [T, k, H], residual (or null) and y [T, H].
extern "C" void outrider_experts_combine(const Routing* routing, const void* outputs, const void* residual, void* y,
                                         int64_t hidden, int64_t dtype) {
    if (dtype == FLOAT32)
        combine<float>(outputs, *routing, residual, y, hidden);
    else
        combine<bf16>(outputs, *routing, residual, y, hidden);
}

// logits [rows, E]; experts and weights [rows, k].
extern "C" void outrider_experts_route(const void* logits, int64_t rows, int64_t num_experts, int64_t top_k,
                                       int64_t renormalised, int64_t rounded, int64_t dtype, int64_t* experts,
                                       float* weights) {
    if (dtype == FLOAT32)
        route<float>(logits, rows, num_experts, top_k, renormalised, rounded, experts, weights);
    else
        route<bf16>(logits, rows, num_experts, top_k, renormalised, rounded, experts, weights);
}
