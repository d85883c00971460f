// Recurrence of Mamba-2 over rows that continue states, with its gated norm; see kernels/mamba2/__init__.py.
//
// A part is one head of a row. Its tokens are computed in blocks of N between the states that are written. With the
// state S before a block, v[i] = dt[i] x[i], decays c[i] = exp(g[1] + ... + g[i]) and c[i, j] = c[i] / c[j]:
//
//     y[i] = c[i] S^T C[i] + sum over j <= i of c[i, j] (C[i] . B[j]) v[j] + D x[i]
//     S'   = c[N] S + sum over i of c[N, i] B[i] v[i]^T
//
// So a block reads its state once, whatever N is. One token is the case N = 1.
#include <algorithm>
#include <cmath>
#include <vector>

#include "state_rows.h"
#include "team.h"
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // of states read; fewer do not pay for waking threads
constexpr int MOST = LANES / 2;                     // tokens of a block: their B and C fill a vector

enum Norm : int64_t { NONE, AFTER_GATE, BEFORE_GATE };

struct Call {
    Strided mixed, gate, step;
    const float *rate, *step_bias, *skip, *scale;
    float *memory, *results;
    void* out;
    int64_t heads, head_dim, groups, state_dim, norm, dtype;
    float least, most, eps;

    int64_t size() const { return heads * head_dim; }
};

// Memory of a thread for the head that it computes. Rows of `value` end with zeros.
struct Scratch {
    std::vector<float> all;
    int64_t state_dim = 0, head_dim = 0, width = 0;  // dimensions, and the width of those rows
    float *state, *pairs, *value;

    void resize(int64_t elements, int64_t columns) {
        if (elements == state_dim && columns == head_dim) return;
        state_dim = elements, head_dim = columns, width = (columns + LANES - 1) / LANES * LANES;
        all.assign(elements * (columns + LANES) + MOST * width, 0.0f);
        state = all.data();
        pairs = state + elements * columns;  // [state_dim][LANES]: B[i][n], and C[i][n] from MOST on
        value = pairs + elements * LANES;
    }
};

// Factors of a block's tokens.
struct Factors {
    float total[MOST], rest[MOST];  // total: c[i], rest: c[N, i]
    float products[MOST][MOST];     // c[i, j] (C[i] . B[j])
    bool streams;                   // the state after the block is read by a later pass only
};

// W vectors of columns of a state, or with TAIL one of `left` columns.
template <int N, int W, bool TAIL>
void columns(const Scratch& s, const Factors& f, const float* state, float* after, float* out, int64_t out_stride,
             float skip, const float* steps, int64_t first, int64_t left) {
    Vec value[N][W], added[N][W], read[N][W] = {};
    for (int i = 0; i < N; i++)
        for (int w = 0; w < W; w++) {
            value[i][w] = load(s.value + i * s.width + first + w * LANES);
            added[i][w] = value[i][w] * (f.rest[i] * steps[i]);
        }
    for (int64_t n = 0; n < s.state_dim; n++) {
        const float *row = state + n * s.head_dim + first, *pairs = s.pairs + n * LANES;
        float* target = after + n * s.head_dim + first;
        for (int w = 0; w < W; w++) {
            const Vec old = TAIL ? load(row, left) : load(row + w * LANES);
            Vec next = f.total[N - 1] * old;
            for (int i = 0; i < N; i++) {
                read[i][w] = multiply_add(all(pairs[MOST + i]), old, read[i][w]);
                next = multiply_add(all(pairs[i]), added[i][w], next);
            }
            if constexpr (TAIL)
                store(target, next, left);
            else if (N == 1 && f.streams)
                stream(target + w * LANES, next);
            else
                store(target + w * LANES, next);
        }
    }
    for (int i = 0; i < N; i++)
        for (int w = 0; w < W; w++) {
            Vec y = f.total[i] * read[i][w] + skip * value[i][w];
            for (int j = 0; j <= i; j++) y = multiply_add(all(f.products[i][j] * steps[j]), value[j][w], y);
            float* p = out + i * out_stride + first + w * LANES;
            TAIL ? store(p, y, left) : store(p, y);
        }
}

// N tokens from `token` on: reads `state` and writes `after`, which may be the same.
template <typename E, int N>
void block(const Call& call, Scratch& s, int64_t token, int64_t head, const float* state, float* after,
           bool streams) {
    const int64_t head_dim = call.head_dim, state_dim = call.state_dim;
    const int64_t group = head / (call.heads / call.groups);
    Factors f;
    f.streams = streams;
    float decay[N], steps[N];
    for (int i = 0; i < N; i++) {
        const E *x = call.mixed.row<E>(token + i), *b = x + call.size() + group * state_dim;
        const E* c = b + call.groups * state_dim;
        for (int64_t n = 0; n < state_dim; n++) {
            s.pairs[n * LANES + i] = to_float(b[n]);
            s.pairs[n * LANES + MOST + i] = to_float(c[n]);
        }
        for (int64_t p = 0; p < head_dim; p += LANES)
            store(s.value + i * s.width + p, load(x + head * head_dim + p, head_dim - p));
        const float step = softplus(call.step.element<E>(token + i, head) + call.step_bias[head]);
        steps[i] = std::min(std::max(step, call.least), call.most);
        decay[i] = std::exp(call.rate[head] * steps[i]);
        f.total[i] = (i ? f.total[i - 1] : 1.0f) * decay[i];
    }
    Vec products[N] = {};  // of B of i with all B and C
    for (int64_t n = 0; n < state_dim; n++) {
        const float* pairs = s.pairs + n * LANES;
        const Vec others = load(pairs);
        for (int i = 0; i < N; i++) products[i] = multiply_add(all(pairs[i]), others, products[i]);
    }
    float rest = 1.0f;
    for (int i = N - 1; i >= 0; i--) {
        f.rest[i] = rest;
        rest *= decay[i];
        float between = 1.0f;
        for (int j = i; j >= 0; j--) {
            f.products[i][j] = between * products[j][MOST + i];
            between *= decay[j];
        }
    }
    float* out = call.results + token * call.size() + head * head_dim;
    const float skip = call.skip[head];
    constexpr int W = N == 1 ? MOST / 2 : N <= MOST / 2 ? 2 : 1;
    int64_t first = 0;
    for (; first + W * LANES <= head_dim; first += W * LANES)
        columns<N, W, false>(s, f, state, after, out, call.size(), skip, steps, first, 0);
    for (; first < head_dim; first += LANES)
        columns<N, 1, true>(s, f, state, after, out, call.size(), skip, steps, first, head_dim - first);
}

template <typename E>
void head_of_row(const Call& call, const StateRows& rows, int64_t row, int64_t head) {
    thread_local Scratch s;
    s.resize(call.state_dim, call.head_dim);
    const HeadStates states(call.memory, call.heads, head, call.state_dim, call.head_dim);
    const auto compute = [&](auto n, int64_t token, const float* state, float* after, bool streams) {
        block<E, decltype(n)::value>(call, s, token, head, state, after, streams);
    };
    compute_blocks<MOST>(rows, row, states, s.state, compute);
}

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// Gates and norms the results of a token's group.
template <typename E>
void finish(const Call& call, int64_t token, int64_t group) {
    const int64_t width = call.size() / call.groups, first = group * width;
    const E* gate = call.gate.row<E>(token) + first;
    float* y = call.results + token * call.size() + first;
    E* out = (E*)call.out + token * call.size() + first;
    const auto gated = [&](int64_t i) { return load(y + i, width - i) * silu(load(gate + i, width - i)); };
    float inverse = 1.0f;
    if (call.norm != NONE) {
        Vec squares = zeros();
        for (int64_t i = 0; i < width; i += LANES) {
            const Vec value = call.norm == AFTER_GATE ? gated(i) : load(y + i, width - i);
            if (call.norm == AFTER_GATE) store(y + i, value, width - i);
            squares = multiply_add(value, value, squares);
        }
        inverse = 1.0f / std::sqrt(sum(squares) / (float)width + call.eps);
    }
    for (int64_t i = 0; i < width; i += LANES) {
        Vec value = call.norm == AFTER_GATE ? load(y + i, width - i) : gated(i);
        if (call.norm != NONE) value = value * inverse * load(call.scale + first + i, width - i);
        store(out + i, value, width - i);
    }
}

template <typename E>
void run(const Call& call, const StateRows& rows) {
    const int64_t work = rows.tokens() * call.size() * call.state_dim;
    const Phase recurrence{rows.count * call.heads, [&](int64_t part) {
        head_of_row<E>(call, rows, part / call.heads, part % call.heads);
    }};
    const Phase gates{rows.tokens() * call.groups, [&](int64_t part) {
        finish<E>(call, part / call.groups, part % call.groups);
    }};
    parallel(team_for(work >= MIN_PARALLEL_ELEMENTS), recurrence, gates);
}

}  // namespace

// mixed [T, heads * head_dim + 2 * groups * state_dim], gate [T, heads * head_dim], step [T, heads], rate, step_bias
// and skip [heads], scale [heads * head_dim] or null, memory [S, heads, state_dim, head_dim], results and out
// [T, heads * head_dim] contiguous; `results` is memory for sums.
extern "C" void outrider_mamba2(const Call* call, const int64_t* table, int64_t rows) {
    call->dtype == FLOAT32 ? run<float>(*call, {table, rows}) : run<bf16>(*call, {table, rows});
}
