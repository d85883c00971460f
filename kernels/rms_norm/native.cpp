// y = x / sqrt(|x|^2 + root^2) * scale for each row; see kernels/rms_norm/torch.py.
#include <cmath>

#include "team.h"
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 16;  // fewer do not pay for waking threads

template <typename E>
void norm_row(const E* x, const float* scale, float root, E* y, int64_t size) {
    Vec sums[4] = {};
    for (int64_t i = 0; i < size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            int64_t start = i + part * LANES;
            if (start >= size) break;
            Vec value = load(x + start, size - start);
            sums[part] += value * value;
        }
    float inverse = 1.0f / std::sqrt(sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + root * root);
    for (int64_t i = 0; i < size; i += LANES)
        store(y + i, load(x + i, size - i) * inverse * load(scale + i, size - i), size - i);
}

template <typename E>
void norm(
    const void* x, const float* scale, float root, void* y, int64_t rows, int64_t size, int64_t repeats) {
    parallel_for(team_for(rows * size >= MIN_PARALLEL_ELEMENTS), rows, [&](int64_t row) {
        norm_row((const E*)x + row * size, scale + row % repeats * size, root, (E*)y + row * size, size);
    });
}

}  // namespace

// x and y [rows, size] contiguous; scale [repeats, size], row r using scale[r % repeats].
extern "C" void outrider_rms_norm(
    const void* x, const float* scale, float root, void* y, int64_t rows, int64_t size, int64_t repeats,
    int64_t dtype) {
    if (dtype == FLOAT32)
        norm<float>(x, scale, root, y, rows, size, repeats);
    else
        norm<bf16>(x, scale, root, y, rows, size, repeats);
}
