// y = act(gate) * up, where gate and up are the halves of each row.
#include "vector_math.h"

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

template <typename E, typename Act>
void act_and_mul(const void* x, void* y, int64_t rows, int64_t half) {
#pragma omp parallel for if (rows * half >= MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const E* gate = (const E*)x + row * 2 * half;
        E* out = (E*)y + row * half;
        for (int64_t i = 0; i < half; i += LANES) {
            Vec g = load(gate + i, half - i), up = load(gate + half + i, half - i);
            store(out + i, Act::apply(g) * up, half - i);
        }
    }
}

template <typename Act>
void by_dtype(const void* x, void* y, int64_t rows, int64_t half, int64_t dtype) {
    if (dtype == FLOAT32)
        act_and_mul<float, Act>(x, y, rows, half);
    else
        act_and_mul<bf16, Act>(x, y, rows, half);
}

}  // namespace

// x [rows, 2 * half] and y [rows, half], contiguous; activation 0: SiLU, 1: GELU with tanh.
extern "C" void outrider_act_and_mul(const void* x, void* y, int64_t rows, int64_t half, int64_t dtype,
                                     int64_t activation) {
    if (activation == 0)
        by_dtype<Silu>(x, y, rows, half, dtype);
    else
        by_dtype<GeluTanh>(x, y, rows, half, dtype);
}
