// The most likely token of each row and its logit; each row is read once.
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 17;  // fewer do not pay for waking threads

typedef int32_t VecI32 __attribute__((vector_size(4 * OUTRIDER_LANES)));

// Index of the first of the largest, as torch.argmax; `top` is NaN when any logit of the row is.
void largest(const float* row, int64_t size, int64_t* token, float* top) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    Vec best = all(1.0f) * LOWEST;
    VecI32 place = {}, is_nan = {};  // number of the vector that holds each lane's best
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec x = load(row + i);
        VecI32 better = x > best;
        best = better ? x : best;
        place = better ? VecI32{} + (int32_t)(i / LANES) : place;
        is_nan |= x != x;
    }
    float value = LOWEST;
    int64_t found = 0;
    bool any_nan = false;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t at = (int64_t)place[lane] * LANES + lane;
        any_nan |= is_nan[lane] != 0;
        if (best[lane] > value || (best[lane] == value && at < found)) {
            value = best[lane];
            found = at;
        }
    }
    for (; i < size; i++) {
        any_nan |= row[i] != row[i];
        if (row[i] > value) {
            value = row[i];
            found = i;
        }
    }
    *token = found;
    *top = any_nan ? std::numeric_limits<float>::quiet_NaN() : value;
}

}  // namespace

// logits [rows, size] with `stride` elements between rows; tokens and tops [rows].
extern "C" void outrider_largest(const float* logits, int64_t rows, int64_t size, int64_t stride, int64_t* tokens,
                                 float* tops) {
    parallel_for(team_for(rows * size >= MIN_PARALLEL_ELEMENTS), rows,
                 [&](int64_t r) { largest(logits + r * stride, size, tokens + r, tops + r); });
}
