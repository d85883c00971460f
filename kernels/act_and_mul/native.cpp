// y = act(gate) * up, where gate and up are the halves of each row; or y = act(x).
#include "clamped_swiglu.h"
#include "team.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads

struct Silu {
    static Vec apply(Vec x) { return x / (1.0f + exponential(-x)); }
};

// GELU with tanh (Hendrycks and Gimpel 2016): x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)).
struct GeluTanh {
    static Vec apply(Vec x) {
        return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
    }
};

// GELU, x Phi(x), with the error function of Abramowitz and Stegun 7.1.26, whose error is below 2e-7.
struct Gelu {
    static Vec apply(Vec x) {
        const Vec size = select(x > 0.0f, x, -x), t = 1.0f / (1.0f + 0.2316418882f * size);
        const Vec sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
        const Vec tail = 0.5f * sum * exponential(-0.5f * x * x);
        return x * select(x > 0.0f, 1.0f - tail, tail);
    }
};

template <typename E, typename Act>
void act(const void* x, void* y, int64_t rows, int64_t size) {
    parallel_for(team_for(rows * size >= MIN_PARALLEL_ELEMENTS), rows, [&](int64_t row) {
        const E* in = (const E*)x + row * size;
        E* out = (E*)y + row * size;
        for (int64_t i = 0; i < size; i += LANES) store(out + i, Act::apply(load(in + i, size - i)), size - i);
    });
}

template <typename Act>
void act_by_dtype(const void* x, void* y, int64_t rows, int64_t size, int64_t dtype) {
    if (dtype == FLOAT32)
        act<float, Act>(x, y, rows, size);
    else
        act<bf16, Act>(x, y, rows, size);
}

template <typename E, typename Act>
void act_and_mul(const void* x, void* y, int64_t rows, int64_t half) {
    parallel_for(team_for(rows * half >= MIN_PARALLEL_ELEMENTS), rows, [&](int64_t row) {
        const E* gate = (const E*)x + row * 2 * half;
        E* out = (E*)y + row * half;
        for (int64_t i = 0; i < half; i += LANES) {
            Vec g = load(gate + i, half - i), up = load(gate + half + i, half - i);
            store(out + i, Act::apply(g) * up, half - i);
        }
    });
}

template <typename E>
void clamped(const void* x, void* y, int64_t rows, int64_t half) {
    parallel_for(team_for(rows * half >= MIN_PARALLEL_ELEMENTS), rows,
                 [&](int64_t row) { clamped_swiglu((const E*)x + row * 2 * half, (E*)y + row * half, half); });
}

template <typename Act>
void by_dtype(const void* x, void* y, int64_t rows, int64_t half, int64_t dtype) {
    if (dtype == FLOAT32)
        act_and_mul<float, Act>(x, y, rows, half);
    else
        act_and_mul<bf16, Act>(x, y, rows, half);
}

}  // namespace

// x [rows, 2 * half] and y [rows, half], contiguous; activation 0: SiLU, 1: GELU with tanh, 2: that of gpt-oss.
extern "C" void outrider_act_and_mul(const void* x, void* y, int64_t rows, int64_t half, int64_t dtype,
                                     int64_t activation) {
    if (activation == 0)
        by_dtype<Silu>(x, y, rows, half, dtype);
    else if (activation == 2)
        dtype == FLOAT32 ? clamped<float>(x, y, rows, half) : clamped<bf16>(x, y, rows, half);
    else
        by_dtype<GeluTanh>(x, y, rows, half, dtype);
}

// x and y [rows, size], contiguous; activation 0: GELU, 1: GELU with tanh.
extern "C" void outrider_gelu(const void* x, void* y, int64_t rows, int64_t size, int64_t dtype, int64_t activation) {
    if (activation == 0)
        act_by_dtype<Gelu>(x, y, rows, size, dtype);
    else
        act_by_dtype<GeluTanh>(x, y, rows, size, dtype);
}
