// Gated delta rule over rows that continue states, with its norms and gates; see kernels/delta_net/__init__.py.
//
// A part is one head of a row. Its tokens are computed in blocks of N between the states that are written. With the
// state S before a block, decays c[i] = exp(g[1] + ... + g[i]) and c[i, j] = c[i] / c[j]:
//
//     d[i] = beta[i] (v[i] - c[i] S^T k[i] - sum over j < i of c[i, j] (k[i] . k[j]) d[j])
//     o[i] = c[i] S^T q[i] + sum over j <= i of c[i, j] (q[i] . k[j]) d[j]
//     S'   = c[N] S + sum over i of c[N, i] k[i] d[i]^T
//
// So a block reads its state twice, whatever N is: from memory, and then from the cache. One token is the case N = 1.
// If each element of a key has a decay of its own, c is a vector, by which keys and queries are multiplied first.
#include <algorithm>
#include <cmath>
#include <vector>

#include "state_rows.h"
#include "team.h"
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // of states read; fewer do not pay for waking threads
constexpr int MOST = LANES / 2;                     // tokens of a block: their keys and queries fill a vector
constexpr float EPS = 1e-6f;                        // of the norms of queries and keys

struct Call {
    Strided mixed, gate, beta, decay;
    const float *rate, *rate_bias, *scale;
    float* memory;
    void* out;
    int64_t key_heads, value_heads, key_dim, value_dim, dtype, by_element, sigmoid_gate;
    float root, beta_scale;
};

// Memory of a thread for the head that it computes. Rows of `query`, `key`, `delta` and `result` end with zeros.
struct Scratch {
    std::vector<float> all;
    int64_t key_dim = 0, value_dim = 0, width = 0, value_width = 0;  // dimensions, and widths of those rows
    float *state, *query, *key, *pairs, *delta, *result, *decay, *weights, *kept;

    void resize(int64_t keys, int64_t values) {
        if (keys == key_dim && values == value_dim) return;
        key_dim = keys, value_dim = values;
        width = (keys + LANES - 1) / LANES * LANES, value_width = (values + LANES - 1) / LANES * LANES;
        all.assign(keys * (values + 2 * LANES) + MOST * (3 * width + 2 * value_width) + width, 0.0f);
        state = all.data();
        query = state + keys * values;
        key = query + MOST * width;
        pairs = key + MOST * width;  // [D][LANES]: k[i][d], and q[i][d] from MOST on
        delta = pairs + keys * LANES;
        result = delta + MOST * value_width;
        decay = result + MOST * value_width;  // by element: g, then
        weights = decay + MOST * width;       // c[i, j] k[j] of one pair of tokens
        kept = weights + width;               // [D][LANES]: c[N, i] k[i], and c[N] at MOST
    }
};

// Factors of a block's tokens.
struct Factors {
    float beta[MOST], total[MOST], rest[MOST];  // total: c[i], rest: c[N, i]; by element all are 1
    float keys[MOST][MOST];                     // beta[i] c[i, j] (k[i] . k[j])
    float queries[MOST][MOST];                  // c[i, j] (q[i] . k[j])
    bool streams;     // the state after the block is read by a later pass only
    bool by_element;  // decays are in Scratch
};

inline float dot(const float* a, const float* b, int64_t width) {
    Vec result = zeros();
    for (int64_t i = 0; i < width; i += LANES) result = multiply_add(load(a + i), load(b + i), result);
    return sum(result);
}

template <typename E>
void unit(const E* x, float* y, int64_t size, float scale) {
    Vec squares = zeros();
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec value = load(x + i, size - i);
        squares = multiply_add(value, value, squares);
    }
    scale /= std::sqrt(sum(squares) + EPS);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i, size - i) * scale);
}

using outrider::softplus;

// log(1 + e^x) to a few units in the last place: with 1 + e^x = 2^n (1 + f), log(1 + f) = 2 atanh(f / (2 + f)).
inline Vec softplus(Vec x) {
    const Vec power = exponential(x);
    const VecU32 bits = (VecU32)(1.0f + power) + (0x3f800000u - 0x3f3504f3u);  // 1 + f from sqrt(1/2) on
    const Vec n = __builtin_convertvector((VecI32)(bits >> 23) - 127, Vec);
    const Vec f = select(n == 0.0f, power, (Vec)((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f);
    const Vec s = f / (2.0f + f), z = s * s;
    const Vec series = (((z * (1.0f / 9.0f) + 1.0f / 7.0f) * z + 1.0f / 5.0f) * z + 1.0f / 3.0f) * z + 1.0f;
    return select(x <= 20.0f, n * 0.693147181f + 2.0f * s * series, x);  // NaN stays
}

inline float decay_of(const Call& call, int64_t head, float logit, float bias) {
    return std::exp(-call.rate[head] * softplus(logit + bias));
}

// W vectors of columns of a state, or with TAIL one of `left` columns.
template <int N, int W, bool TAIL>
void columns(const Scratch& s, const Factors& f, const float* state, float* after, int64_t key_dim, int64_t value_dim,
             int64_t first, int64_t left) {
    const auto get = [&](const float* p, int w) { return TAIL ? load(p, left) : load(p + w * LANES); };
    const float *pairs_after = f.by_element ? s.kept : s.pairs, *kept = f.by_element ? s.kept + MOST : &f.total[N - 1];
    const int64_t stride = f.by_element ? LANES : 0;
    Vec known[N][W] = {}, read[N][W] = {};
    for (int64_t d = 0; d < key_dim; d++) {
        const float *row = state + d * value_dim + first, *pairs = s.pairs + d * LANES;
        for (int w = 0; w < W; w++) {
            const Vec value = get(row, w);
            for (int i = 0; i < N; i++) {
                known[i][w] = multiply_add(all(pairs[i]), value, known[i][w]);
                read[i][w] = multiply_add(all(pairs[MOST + i]), value, read[i][w]);
            }
        }
    }
    Vec delta[N][W];
    for (int i = 0; i < N; i++)
        for (int w = 0; w < W; w++) {
            const int64_t at = i * s.value_width + first + w * LANES;
            Vec d = f.beta[i] * (load(s.delta + at) - f.total[i] * known[i][w]), o = f.total[i] * read[i][w];
            for (int j = 0; j < i; j++) {
                d = multiply_add(all(-f.keys[i][j]), delta[j][w], d);
                o = multiply_add(all(f.queries[i][j]), delta[j][w], o);
            }
            delta[i][w] = d;
            store(s.result + at, multiply_add(all(f.queries[i][i]), d, o));
        }
    for (int i = 0; i < N; i++)
        for (int w = 0; w < W; w++) delta[i][w] *= f.rest[i];
    for (int64_t d = 0; d < key_dim; d++) {
        const float *row = state + d * value_dim + first, *pairs = pairs_after + d * LANES;
        float* target = after + d * value_dim + first;
        for (int w = 0; w < W; w++) {
            Vec value = kept[d * stride] * get(row, w);
            for (int i = 0; i < N; i++) value = multiply_add(all(pairs[i]), delta[i][w], value);
            if constexpr (TAIL)
                store(target, value, left);
            else if (N == 1 && f.streams)
                stream(target + w * LANES, value);
            else
                store(target + w * LANES, value);
        }
    }
}

// Decays of N tokens, and products of their keys and queries.
template <typename E, int N>
void factors_by_head(const Call& call, Scratch& s, Factors& f, int64_t token, int64_t head) {
    const int64_t key_dim = call.key_dim;
    float decay[N];
    for (int i = 0; i < N; i++) {
        decay[i] = decay_of(call, head, call.decay.element<E>(token + i, head), call.rate_bias[head]);
        f.total[i] = (i ? f.total[i - 1] : 1.0f) * decay[i];
        for (int64_t d = 0; d < key_dim; d++) {
            s.pairs[d * LANES + i] = s.key[i * s.width + d];
            s.pairs[d * LANES + MOST + i] = s.query[i * s.width + d];
        }
    }
    Vec products[N] = {};  // of key i with all keys and queries
    if (N == 1)
        f.queries[0][0] = dot(s.query, s.key, s.width);
    else
        for (int64_t d = 0; d < key_dim; d++) {
            const float* pairs = s.pairs + d * LANES;
            const Vec others = load(pairs);
            for (int i = 0; i < N; i++) products[i] = multiply_add(all(pairs[i]), others, products[i]);
        }
    float rest = 1.0f;
    for (int i = N - 1; i >= 0; i--) {
        f.rest[i] = rest;
        rest *= decay[i];
        float between = 1.0f;
        for (int j = i; N > 1 && j >= 0; j--) {
            f.keys[i][j] = f.beta[i] * between * products[j][i];
            f.queries[i][j] = between * products[j][MOST + i];
            between *= decay[j];
        }
    }
}

// The same with a decay for each element of a key.
template <typename E, int N>
void factors_by_element(const Call& call, Scratch& s, Factors& f, int64_t token, int64_t head) {
    const int64_t key_dim = call.key_dim;
    for (int i = 0; i < N; i++) {
        f.total[i] = f.rest[i] = 1.0f;
        const E* logits = call.decay.row<E>(token + i) + head * key_dim;
        const float* bias = call.rate_bias + head * key_dim;
        for (int64_t d = 0; d < key_dim; d += LANES) {
            const Vec x = load(logits + d, key_dim - d) + load(bias + d, key_dim - d);
            store(s.decay + i * s.width + d, exponential(-call.rate[head] * softplus(x)));
        }
    }
    for (int64_t d = 0; d < key_dim; d++) {
        float total = 1.0f, rest = 1.0f;
        for (int i = 0; i < N; i++) {
            total *= s.decay[i * s.width + d];
            s.pairs[d * LANES + i] = total * s.key[i * s.width + d];
            s.pairs[d * LANES + MOST + i] = total * s.query[i * s.width + d];
        }
        s.kept[d * LANES + MOST] = total;
        for (int i = N - 1; i >= 0; i--) {
            s.kept[d * LANES + i] = rest * s.key[i * s.width + d];
            rest *= s.decay[i * s.width + d];
        }
    }
    for (int j = 0; j < N; j++) {
        std::copy_n(s.key + j * s.width, s.width, s.weights);
        for (int i = j; i < N; i++) {
            for (int64_t d = 0; i > j && d < s.width; d += LANES)
                store(s.weights + d, load(s.weights + d) * load(s.decay + i * s.width + d));
            f.keys[i][j] = f.beta[i] * dot(s.weights, s.key + i * s.width, s.width);
            f.queries[i][j] = dot(s.weights, s.query + i * s.width, s.width);
        }
    }
}

// N tokens from `token` on: reads `state` and writes `after`, which may be the same.
template <typename E, int N>
void block(const Call& call, Scratch& s, int64_t token, int64_t head, const float* state, float* after,
           bool streams) {
    const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
    const int64_t key_head = head / (call.value_heads / call.key_heads), keys = call.key_heads * key_dim;
    Factors f;
    f.streams = streams;
    f.by_element = call.by_element;
    for (int i = 0; i < N; i++) {
        const E* row = call.mixed.row<E>(token + i);
        unit(row + key_head * key_dim, s.query + i * s.width, key_dim, 1.0f / std::sqrt((float)key_dim));
        unit(row + keys + key_head * key_dim, s.key + i * s.width, key_dim, 1.0f);
        const E* value = row + 2 * keys + head * value_dim;
        for (int64_t v = 0; v < value_dim; v += LANES)
            store(s.delta + i * s.value_width + v, load(value + v, value_dim - v));
        const float b = call.beta.element<E>(token + i, head);
        f.beta[i] = call.beta_scale / (1.0f + std::exp(-b));
    }
    if (f.by_element)
        factors_by_element<E, N>(call, s, f, token, head);
    else
        factors_by_head<E, N>(call, s, f, token, head);
    constexpr int W = N == 1 ? MOST / 2 : N <= MOST / 2 ? 2 : 1;
    int64_t first = 0;
    for (; first + W * LANES <= value_dim; first += W * LANES)
        columns<N, W, false>(s, f, state, after, key_dim, value_dim, first, 0);
    for (; first < value_dim; first += LANES)
        columns<N, 1, true>(s, f, state, after, key_dim, value_dim, first, value_dim - first);
    for (int i = 0; i < N; i++) {  // the gated norm
        const float* result = s.result + i * s.value_width;
        Vec squares = zeros();
        for (int64_t v = 0; v < value_dim; v += LANES) {
            const Vec value = load(result + v, value_dim - v);
            squares = multiply_add(value, value, squares);
        }
        const float inverse = 1.0f / std::sqrt(sum(squares) + call.root * call.root);
        const E* gate = call.gate.row<E>(token + i) + head * value_dim;
        E* out = (E*)call.out + ((token + i) * call.value_heads + head) * value_dim;
        for (int64_t v = 0; v < value_dim; v += LANES) {
            const Vec g = load(gate + v, value_dim - v);
            const Vec normed = load(result + v) * inverse * load(call.scale + v, value_dim - v);
            store(out + v, (call.sigmoid_gate ? normed : normed * g) / (1.0f + exponential(-g)), value_dim - v);
        }
    }
}

template <typename E>
void head_of_row(const Call& call, const StateRows& rows, int64_t row, int64_t head) {
    thread_local Scratch s;
    s.resize(call.key_dim, call.value_dim);
    const HeadStates states(call.memory, call.value_heads, head, call.key_dim, call.value_dim);
    const auto compute = [&](auto n, int64_t token, const float* state, float* after, bool streams) {
        block<E, decltype(n)::value>(call, s, token, head, state, after, streams);
    };
    compute_blocks<MOST>(rows, row, states, s.state, compute);
}

template <typename E>
void run(const Call& call, const StateRows& rows) {
    const int64_t work = rows.tokens() * call.value_heads * call.key_dim * call.value_dim;
    parallel(team_for(work >= MIN_PARALLEL_ELEMENTS), Phase{rows.count * call.value_heads, [&](int64_t part) {
        head_of_row<E>(call, rows, part / call.value_heads, part % call.value_heads);
    }});
}

}  // namespace

// mixed [T, 2 * key_heads * key_dim + value_heads * value_dim], gate [T, value_heads * value_dim], beta and decay
// [T, value_heads], rate and rate_bias [value_heads], scale [value_dim], memory [S, value_heads, key_dim, value_dim],
// out [T, value_heads * value_dim] contiguous. By element decay and rate_bias have value_heads * key_dim elements.
extern "C" void outrider_delta_net(const Call* call, const int64_t* table, int64_t rows) {
    call->dtype == FLOAT32 ? run<float>(*call, {table, rows}) : run<bf16>(*call, {table, rows});
}
