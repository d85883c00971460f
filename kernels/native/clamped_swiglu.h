// Activation of gpt-oss, whose gates and ups alternate: min(g, 7) sigmoid(1.702 min(g, 7)) (1 + clamp(u, -7, 7)).
#pragma once

#include <algorithm>

#include "vector_math.h"

namespace outrider {

// out [size] of in [2 * size]; the bits of an element depend on its own gate and up alone.
template <typename E>
void clamped_swiglu(const E* in, E* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = 2 * (size - i);
        float both[2 * LANES];
        store(both, load(in + 2 * i, left));
        store(both + LANES, left > LANES ? load(in + 2 * i + LANES, left - LANES) : zeros());
        Vec gate, up;
        for (int lane = 0; lane < LANES; lane++) {
            gate[lane] = both[2 * lane];
            up[lane] = both[2 * lane + 1];
        }
        gate = select(gate > 7.0f, all(7.0f), gate);
        up = select(up > 7.0f, all(7.0f), select(up < -7.0f, all(-7.0f), up));
        store(out + i, gate / (1.0f + exponential(-1.702f * gate)) * (1.0f + up), size - i);
    }
}

}  // namespace outrider
