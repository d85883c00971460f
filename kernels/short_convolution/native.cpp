// Causal depthwise convolution over rows that continue states; see kernels/short_convolution/__init__.py.
#include <vector>

#include "state_rows.h"
#include "team.h"
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads
constexpr int64_t BLOCK = 16 * LANES;               // channels of a part

struct Call {
    StateRows rows;
    const void* x;
    int64_t stride;  // elements from one token of x to the next
    const float *taps, *bias;
    void *states, *y;
    int64_t channels, kernel;
    bool silu;
};

// Channels [first, first + width) of a row. The state that it starts with is copied: its slot may be written.
template <typename E>
void convolve(const Call& call, int64_t row, int64_t first, int64_t width) {
    const int64_t before = call.kernel - 1, channels = call.channels;
    const int64_t begin = call.rows.firsts[row], count = call.rows.firsts[row + 1] - begin;
    const E* x = (const E*)call.x + begin * call.stride + first;
    E* states = (E*)call.states + first;
    thread_local std::vector<E> history;
    history.resize(before * BLOCK);
    const E* source = states + call.rows.sources[row] * before * channels;
    for (int64_t i = 0; i < before; i++) std::memcpy(&history[i * BLOCK], source + i * channels, width * sizeof(E));
    const E* old = history.data() + before * BLOCK;
    const auto input = [&](int64_t i) { return i < 0 ? old + i * BLOCK : x + i * call.stride; };
    for (int64_t t = 0; t < count; t++) {
        E* y = (E*)call.y + (begin + t) * channels + first;
        for (int64_t c = 0; c < width; c += LANES) {
            Vec sum = call.bias ? load(call.bias + first + c, width - c) : zeros();
            for (int64_t j = 0; j <= before; j++)
                sum = multiply_add(load(input(t - before + j) + c, width - c),
                                   load(call.taps + j * channels + first + c, width - c), sum);
            store(y + c, call.silu ? sum / (1.0f + exponential(-sum)) : sum, width - c);
        }
    }
    for (int64_t w = call.rows.write_firsts[row]; w < call.rows.write_firsts[row + 1]; w++)
        for (int64_t i = 0; i < before; i++)
            std::memcpy(states + (call.rows.slots[w] * before + i) * channels,
                        input(call.rows.offsets[w] - before + i), width * sizeof(E));
}

template <typename E>
void run(const Call& call) {
    const int64_t blocks = (call.channels + BLOCK - 1) / BLOCK;
    const int team = team_for(call.rows.tokens() * call.channels >= MIN_PARALLEL_ELEMENTS);
    parallel(team, Phase{call.rows.count * blocks, [&](int64_t part) {
        const int64_t first = part % blocks * BLOCK;
        const int64_t width = call.channels - first < BLOCK ? call.channels - first : BLOCK;
        convolve<E>(call, part / blocks, first, width);
    }});
}

}  // namespace

// x [T, channels], rows `stride` apart; taps [kernel, channels], the oldest first; bias [channels] or null;
// states [S, kernel - 1, channels]; y [T, channels] contiguous.
extern "C" void outrider_short_convolution(const int64_t* table, int64_t rows, const void* x, int64_t stride,
                                           const float* taps, const float* bias, void* states, void* y,
                                           int64_t channels, int64_t kernel, int64_t silu, int64_t dtype) {
    const Call call{{table, rows}, x, stride, taps, bias, states, y, channels, kernel, silu != 0};
    dtype == FLOAT32 ? run<float>(call) : run<bf16>(call);
}
