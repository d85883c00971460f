// y = silu(gate) * up, where gate and up are the halves of each row.
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads

template <typename E>
void act_and_mul(const void* x, void* y, int64_t rows, int64_t half) {
#pragma omp parallel for if (rows * half >= MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const E* gate = (const E*)x + row * 2 * half;
        E* out = (E*)y + row * half;
        for (int64_t i = 0; i < half; i += LANES) {
            Vec g = load(gate + i, half - i), up = load(gate + half + i, half - i);
            store(out + i, g / (1.0f + exponential(-g)) * up, half - i);
        }
    }
}

}  // namespace

// x [rows, 2 * half] and y [rows, half], contiguous.
extern "C" void outrider_act_and_mul(const void* x, void* y, int64_t rows, int64_t half, int64_t dtype) {
    if (dtype == FLOAT32)
        act_and_mul<float>(x, y, rows, half);
    else
        act_and_mul<bf16>(x, y, rows, half);
}
