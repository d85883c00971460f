// Rows of a pass over recurrent states: kernels/state_plan.py, `StatePlan.table`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace outrider {

struct StateRows {
    int64_t count;
    const int64_t *firsts, *sources, *write_firsts, *offsets, *slots;

    StateRows(const int64_t* table, int64_t rows)
        : count(rows), firsts(table), sources(firsts + rows + 1), write_firsts(sources + rows),
          offsets(write_firsts + rows + 1), slots(offsets + write_firsts[rows]) {}

    int64_t tokens() const { return firsts[count]; }
};

// Elements of tokens, consecutive in each.
struct Strided {
    const void* data;
    int64_t stride;  // elements from one token to the next

    template <typename E>
    const E* row(int64_t token) const { return (const E*)data + token * stride; }
    template <typename E>
    float element(int64_t token, int64_t i) const { return to_float(row<E>(token)[i]); }
};

// Matrices of one head, of `size` elements, `stride` apart in the slots.
struct HeadStates {
    float* first;
    int64_t stride, size;
    bool can_stream;

    HeadStates(float* memory, int64_t heads, int64_t head, int64_t rows, int64_t columns)
        : first(memory + head * rows * columns), stride(heads * rows * columns), size(rows * columns),
          can_stream((uintptr_t)memory % sizeof(Vec) == 0 && columns % LANES == 0) {}

    float* slot(int64_t i) const { return first + i * stride; }
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Stores past the cache, if the machine can.
inline void stream(float* p, Vec value) {
#if OUTRIDER_LANES == 16
    _mm512_stream_ps(p, (__m512)value);
#elif OUTRIDER_LANES == 8
    _mm256_stream_ps(p, (__m256)value);
#else
    store(p, value);
#endif
}

// f(integral_constant<int, count>), 1 <= count <= MOST.
template <int MOST, typename F>
void with_constant(int64_t count, const F& f) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_constant<MOST - 1>(count, f);
    f(std::integral_constant<int, MOST>());
}

// Computes a row in blocks of at most MOST tokens between the states that it writes:
// block(N, token, state, after, streams) for the N tokens from `token` on reads `state` and writes `after`, which may
// be the same, or `spare`. `streams`: a later pass is the first to read what it writes.
template <int MOST, typename F>
void compute_blocks(const StateRows& rows, int64_t row, const HeadStates& states, float* spare, const F& block) {
    const float* state = states.slot(rows.sources[row]);
    const int64_t first = rows.firsts[row], count = rows.firsts[row + 1] - first;
    int64_t write = rows.write_firsts[row];
    const int64_t last_write = rows.write_firsts[row + 1];
    for (int64_t t = 0; t < count;) {
        const int64_t end = write < last_write ? rows.offsets[write] : count;
        const int64_t tokens = end - t < MOST ? end - t : MOST;
        const bool writes = write < last_write && t + tokens == end;
        float* after = writes ? states.slot(rows.slots[write]) : spare;
        const bool streams = states.can_stream && count == 1 && write + 1 == last_write && after != state;
        with_constant<MOST>(tokens, [&](auto n) { block(n, first + t, state, after, streams); });
        state = after;
        t += tokens;
        for (bool is_first = true; write < last_write && rows.offsets[write] == t; write++, is_first = false)
            if (!is_first) std::memcpy(states.slot(rows.slots[write]), state, states.size * sizeof(float));
    }
#ifdef __AVX2__
    if (states.can_stream) _mm_sfence();  // before other threads read what was streamed
#endif
}

}  // namespace outrider
