// Experts of a layer: y[t] = sum over j of w[t][j] * down(silu(gate(x)) * up(x)) of expert e[t][j], in one call; or with
// the activation of gpt-oss. The products add the weights' biases.
//
// The pairs of a token and its j-th expert are sorted by expert. The panels of all experts that have pairs form one
// list, of which each thread reads an equal part from front to back; each weight is read once. The bits of a token's
// result depend on its own row alone, as those of the products do.
#include "clamped_swiglu.h"
#include "panels.h"

using namespace outrider;

namespace {

struct Experts {
    int64_t num_experts, hidden, inner;
    int64_t clamped;               // 0: SiLU; 1: the activation of gpt-oss
    const Weight* const* gate_up;  // [E], each [2 * inner, hidden]
    const Weight* const* down;     // [E], each [hidden, inner]
};

struct Routing {
    const int64_t* experts;  // [T, k]
    const float* weights;    // [T, k]
    int64_t num_tokens, top_k;
};

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads

// y[t] = residual[t] + sum over j of weights[t][j] * outputs[place[t][j]], in the order of j; without `place` the
// outputs are in the order of the pairs.
template <typename E>
void combine(const E* outputs, const int64_t* place, const Routing& routing, const E* residual, E* y, int64_t hidden,
             int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < hidden; i += LANES) {
            Vec total = residual ? load(residual + t * hidden + i, hidden - i) : zeros();
            for (int64_t pair = t * routing.top_k; pair < (t + 1) * routing.top_k; pair++)
                total += routing.weights[pair] * load(outputs + (place ? place[pair] : pair) * hidden + i, hidden - i);
            store(y + t * hidden + i, total, hidden - i);
        }
}

template <typename E>
void combine(const void* outputs, const Routing& routing, const void* residual, void* y, int64_t hidden) {
    const int64_t tokens = routing.num_tokens;
    const int team = team_for(tokens * routing.top_k * hidden >= MIN_PARALLEL_ELEMENTS);
    parallel(team, Phase{team, [&](int64_t part) {
        combine((const E*)outputs, nullptr, routing, (const E*)residual, (E*)y, hidden, tokens * part / team,
                tokens * (part + 1) / team);
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

#ifdef OUTRIDER_PANELS

// Pairs sorted by expert.
struct Sorted {
    std::vector<int64_t> begin;   // [E + 1]: first pair of each expert
    std::vector<int64_t> place;   // [T * k]: place of each pair
    std::vector<int64_t> active;  // experts that have pairs

    void sort(const Routing& routing, int64_t num_experts) {
        const int64_t num_pairs = routing.num_tokens * routing.top_k;
        begin.assign(num_experts + 1, 0);
        place.resize(num_pairs);
        active.clear();
        for (int64_t pair = 0; pair < num_pairs; pair++) begin[routing.experts[pair] + 1]++;
        for (int64_t e = 0; e < num_experts; e++) {
            if (begin[e + 1]) active.push_back(e);
            begin[e + 1] += begin[e];
        }
        std::vector<int64_t> next(begin.begin(), begin.end() - 1);
        for (int64_t pair = 0; pair < num_pairs; pair++) place[pair] = next[routing.experts[pair]]++;
    }
};

// The first weights of the next expert: the memory would idle until they are asked for.
void prefetch(const bf16* weights) {
    for (int64_t byte = 0; byte < AHEAD; byte += LINE) __builtin_prefetch((const char*)weights + byte, 0, 2);
}

// A part of the products of all experts with x [pairs, in] to y [pairs, out], which are sorted.
void multiply(const Weight* const* weights, const Sorted& sorted, const bf16* x, bf16* y, int64_t part, int team) {
    const auto tiles = [&](int64_t e) { return (sorted.begin[e + 1] - sorted.begin[e] + ROWS - 1) / ROWS; };
    const Weight& shape = *weights[sorted.active[0]];
    const int64_t in = shape.in_features, out = shape.out_features, num_panels = (out + PANEL - 1) / PANEL;
    int64_t total = 0, before = 0;
    for (int64_t e : sorted.active) total += tiles(e);
    // A panel is the work of its tiles; a part has those that begin in its share of all work.
    const int64_t low = total * num_panels * part / team, high = total * num_panels * (part + 1) / team;
    for (size_t i = 0; i < sorted.active.size(); i++) {
        const int64_t e = sorted.active[i];
        const int64_t first = std::clamp((low - before + tiles(e) - 1) / tiles(e), int64_t(0), num_panels);
        const int64_t last = std::clamp((high - before + tiles(e) - 1) / tiles(e), int64_t(0), num_panels);
        before += tiles(e) * num_panels;
        const Call call{weights[e], x + sorted.begin[e] * in, nullptr, y + sorted.begin[e] * out};
        const int64_t rows = sorted.begin[e + 1] - sorted.begin[e];
        const bool goes_on = i + 1 < sorted.active.size() && before < high;
        for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS)
            for (int64_t panel = first; panel < last; panel++) {
                if (goes_on && panel + 1 == last) prefetch(weights[sorted.active[i + 1]]->panels);
                compute(call, panel, begin, std::min(begin + BLOCK_ROWS, rows), panel + 1 == last, nullptr);
            }
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

void apply(const Experts& experts, const Routing& routing, const bf16* x, const bf16* residual, bf16* y, bf16* scratch) {
    static thread_local Sorted kept;
    Sorted& sorted = kept;
    sorted.sort(routing, experts.num_experts);
    const int64_t hidden = experts.hidden, inner = experts.inner, pairs = routing.num_tokens * routing.top_k;
    bf16 *inputs = scratch, *merged = inputs + pairs * hidden, *activated = merged + pairs * 2 * inner;
    bf16* outputs = inputs;  // the inputs are no longer needed then
    const int team = team_for(pairs * hidden * inner >= MIN_PARALLEL_WORK);
    const auto gather = [&](int64_t part) {
        for (int64_t pair = pairs * part / team; pair < pairs * (part + 1) / team; pair++)
            std::memcpy(inputs + sorted.place[pair] * hidden, x + pair / routing.top_k * hidden, hidden * sizeof(bf16));
    };
    const auto open = [&](int64_t part) { multiply(experts.gate_up, sorted, inputs, merged, part, team); };
    const auto act = [&](int64_t part) {
        activate(merged, activated, inner, experts.clamped, pairs * part / team, pairs * (part + 1) / team);
    };
    const auto close = [&](int64_t part) { multiply(experts.down, sorted, activated, outputs, part, team); };
    const auto add = [&](int64_t part) {
        const int64_t first = routing.num_tokens * part / team, last = routing.num_tokens * (part + 1) / team;
        combine(outputs, sorted.place.data(), routing, residual, y, hidden, first, last);
    };
    parallel(team, Phase{team, gather}, Phase{team, open}, Phase{team, act}, Phase{team, close}, Phase{team, add});
}

#else

void apply(const Experts&, const Routing&, const bf16*, const bf16*, bf16*, bf16*) {}

#endif

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
