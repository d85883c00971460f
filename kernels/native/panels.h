// Tiles of y = x Wᵀ in bfloat16 on processors that multiply it in pairs (AVX512-BF16), or with AVX2 and FMA alone.
//
// The weight is kept in panels of PANEL outputs, within each in pairs of inputs: it is read once, from front to back, at
// the memory's speed. A result is the sum over the inputs in their order, on AVX512-BF16 two at a time, whatever else is
// computed: its bits depend on its own row and column alone, not on the number of rows or of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "rank_rows.h"

namespace outrider {
namespace {

struct Weight {
    int64_t in_features, out_features;
    const bf16* panels;  // [ceil(out / PANEL), in / 2, PANEL, 2], zeros behind the last output
    const bf16* bias;    // [out], or null
};

struct Call {
    const Weight* weight;
    const bf16* x;         // [rows, in]
    const bf16* residual;  // [rows, out], or null
    bf16* y;               // [rows, out]
};

constexpr int64_t PANEL = 64;
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it saves

constexpr int64_t LINE = 64;                    // bytes
constexpr int64_t AHEAD = 4096;                 // bytes of the weight that are prefetched
constexpr int64_t BLOCK_ROWS = 192;             // rows that use a panel before the next one; their inputs stay in the cache
constexpr int64_t MOST_FETCHED = 512 << 10;     // most bytes of adapters' rows prefetched during a product
constexpr int FETCHED = 2;                      // lines of them with each pair of inputs

// Prefetches memory line by line.
class Fetch {
  public:
    explicit Fetch(const std::vector<Span>& spans) : span_(spans.data()), end_(span_ + spans.size()) {
        for (const Span& span : spans) num_lines += (span.end - span.begin + LINE - 1) / LINE;
        enter();
    }

    int64_t num_lines = 0;

    bool ended() const { return span_ == end_; }
    void line() {
        __builtin_prefetch(at_, 0, 2);
        at_ += LINE;
        if (at_ >= stop_ && !ended()) {
            span_++;
            enter();
        }
    }

  private:
    void enter() {
        if (!ended()) at_ = span_->begin, stop_ = span_->end;
    }

    const Span *span_, *end_;
    const char *at_ = nullptr, *stop_ = nullptr;
};

// With several threads oneDNN is faster if the compiler has no OpenMP. On AVX512 without BF16 oneDNN has products.
#if defined(_OPENMP) && (defined(__AVX512BF16__) || defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__))
#define OUTRIDER_PANELS

constexpr int64_t PAIR_LINE = 2 * LANES;
constexpr int64_t BLOCK_PAIRS = 512;    // pairs of a panel that stay in the cache
constexpr int64_t PAIR_LINES = 2 * PANEL * int64_t(sizeof(bf16)) / LINE;  // lines of a panel's pair

#ifdef __AVX512BF16__

constexpr int ROWS = 6, VECS = PANEL / LANES;  // ROWS * VECS sums fit into the registers with a step's operands

// sums[r * PANEL + i] (+)= x[r] . panel[i] over `pairs` pairs of inputs, for R rows. With each pair LINES lines from
// `next` on are prefetched, and with FETCH also FETCHED lines of `fetch`.
template <int R, bool FIRST, int LINES, bool FETCH>
inline void tile(const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs, float* sums, const char* next,
                 Fetch* fetch) {
    __m512 c[R][VECS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECS; v++)
            c[r][v] = FIRST ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * PANEL + v * LANES);
    for (int64_t k = 0; k < pairs; k++, panel += 2 * PANEL) {
        __m512bh weights[VECS];
        for (int v = 0; v < VECS; v++) std::memcpy(&weights[v], panel + v * PAIR_LINE, sizeof weights[v]);
        for (int line = 0; line < LINES; line++) __builtin_prefetch(next + line * LINE);
        next += LINES * LINE;
        if (FETCH)
            for (int line = 0; line < FETCHED; line++) fetch->line();
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < VECS; v++) c[r][v] = _mm512_dpbf16_ps(c[r][v], weights[v], both);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECS; v++) _mm512_storeu_ps(sums + r * PANEL + v * LANES, c[r][v]);
}

#else

constexpr int ROWS = 6, VECS = 2;  // ROWS * VECS sums fit into the 16 registers with a step's operands

// A thread's inputs of a tile as float32: [ROWS, 2 * BLOCK_PAIRS]. One for all templates: each thread has a copy.
inline float* widened_inputs() {
    alignas(64) static thread_local float inputs[ROWS * 2 * BLOCK_PAIRS];
    return inputs;
}

// As above, for VECS * LANES outputs at a time, of inputs that become float32 first.
template <int R, bool FIRST, int LINES, bool FETCH>
inline void tile(const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs, float* sums, const char* next,
                 Fetch* fetch) {
    constexpr int64_t WIDTH = 2 * BLOCK_PAIRS;
    float* const inputs = widened_inputs();
    for (int r = 0; r < R; r++)
        for (int64_t k = 0; k < 2 * pairs; k += LANES)
            store(inputs + r * WIDTH + k, load(x + r * x_stride + k, 2 * pairs - k));
    for (int64_t column = 0; column < PANEL; column += VECS * LANES) {
        Vec c[R][VECS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECS; v++)
                c[r][v] = FIRST ? zeros() : load(sums + r * PANEL + column + v * LANES);
        const bf16* weights = panel + 2 * column;
        for (int64_t k = 0; k < pairs; k++, weights += 2 * PANEL) {
            if (!column) {
                for (int line = 0; line < LINES; line++) __builtin_prefetch(next + line * LINE);
                next += LINES * LINE;
                if (FETCH)
                    for (int line = 0; line < FETCHED; line++) fetch->line();
            }
            const auto add = [&](int input, auto weight_of) {
                Vec w[VECS];
                for (int v = 0; v < VECS; v++) {
                    VecU32 both;
                    std::memcpy(&both, weights + v * PAIR_LINE, sizeof both);
                    w[v] = (Vec)weight_of(both);
                }
                for (int r = 0; r < R; r++) {
                    const Vec factor = all(inputs[r * WIDTH + 2 * k + input]);
                    for (int v = 0; v < VECS; v++) c[r][v] = multiply_add(w[v], factor, c[r][v]);
                }
            };
            add(0, [](VecU32 both) { return both << 16; });
            add(1, [](VecU32 both) { return both & 0xffff0000u; });
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECS; v++) store(sums + r * PANEL + column + v * LANES, c[r][v]);
    }
}

#endif

template <int R, int LINES, bool FETCH>
inline void tiles(int rows, const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs, float* sums, bool first,
                  const char* next, Fetch* fetch) {
    if (rows == R)
        first ? tile<R, true, LINES, FETCH>(x, x_stride, panel, pairs, sums, next, fetch)
              : tile<R, false, LINES, FETCH>(x, x_stride, panel, pairs, sums, next, fetch);
    else if constexpr (R > 1)
        tiles<R - 1, LINES, FETCH>(rows, x, x_stride, panel, pairs, sums, first, next, fetch);
}

template <int LINES>
inline void tiles(int rows, const bf16* x, int64_t x_stride, const bf16* panel, int64_t pairs, float* sums, bool first,
                  const char* next, Fetch* fetch) {
    if (fetch && !fetch->ended())
        tiles<ROWS, LINES, true>(rows, x, x_stride, panel, pairs, sums, first, next, fetch);
    else
        tiles<ROWS, LINES, false>(rows, x, x_stride, panel, pairs, sums, first, next, nullptr);
}

// y = sums + b (+ residual) for rows [begin, end) of a panel's outputs. sums_of(row): the sums of its PANEL outputs.
template <typename F>
inline void put_outputs(const Call& call, int64_t panel, int64_t begin, int64_t end, F sums_of) {
    const int64_t out = call.weight->out_features, column = panel * PANEL, width = std::min(PANEL, out - column);
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            Vec value = load(sums_of(row) + i);
            if (call.weight->bias) value += load(call.weight->bias + column + i, width - i);
            if (call.residual) value += load(call.residual + row * out + column + i, width - i);
            store(call.y + row * out + column + i, value, width - i);
        }
}

// Computes rows [begin, end) of a panel's outputs. `is_last`: the thread reads no further weights.
inline void compute(const Call& call, int64_t panel, int64_t begin, int64_t end, bool is_last, Fetch* fetch) {
    static thread_local float sums[BLOCK_ROWS * PANEL];
    const int64_t in = call.weight->in_features, num_pairs = in / 2;
    // Tiles of equal heights: a last one of one row would read all of the weights again for it.
    const int64_t num_tiles = (end - begin + ROWS - 1) / ROWS;
    for (int64_t k = 0; k < num_pairs; k += BLOCK_PAIRS) {
        const bf16* weights = call.weight->panels + (panel * num_pairs + k) * 2 * PANEL;
        const int64_t pairs = std::min(BLOCK_PAIRS, num_pairs - k);
        // The first tile waits for the memory; the others find the weights in the cache, and the memory would idle.
        // So they prefetch the next block. A single tile prefetches its own next weights.
        const char* next = (const char*)weights + (num_tiles == 1 ? AHEAD : pairs * PAIR_LINES * LINE);
        const int lines = is_last && k + pairs == num_pairs ? 0 : num_tiles == 1 ? PAIR_LINES : num_tiles < 4 ? 2 : 1;
        for (int64_t t = 0; t < num_tiles; t++) {
            const int64_t first = (end - begin) * t / num_tiles, last = (end - begin) * (t + 1) / num_tiles;
            const int height = int(last - first);
            const bf16* x = call.x + (begin + first) * in + 2 * k;
            float* to = sums + first * PANEL;
            const bool asks = t < PAIR_LINES / std::max(lines, 1);  // else all of the block is prefetched
            if (!asks || !lines) tiles<0>(height, x, in, weights, pairs, to, k == 0, next, fetch);
            else if (lines == 1) tiles<1>(height, x, in, weights, pairs, to, k == 0, next, fetch);
            else if (lines == 2) tiles<2>(height, x, in, weights, pairs, to, k == 0, next, fetch);
            else tiles<PAIR_LINES>(height, x, in, weights, pairs, to, k == 0, next, fetch);
            next += lines * pairs * LINE;
        }
    }
    put_outputs(call, panel, begin, end, [&](int64_t row) { return sums + (row - begin) * PANEL; });
}

#endif

}  // namespace
}  // namespace outrider
