// Rows of a pass over recurrent states: kernels/state_plan.py, `StatePlan.table`.
#pragma once

#include <cstdint>

namespace outrider {

struct StateRows {
    int64_t count;
    const int64_t *firsts, *sources, *write_firsts, *offsets, *slots;

    StateRows(const int64_t* table, int64_t rows)
        : count(rows), firsts(table), sources(firsts + rows + 1), write_firsts(sources + rows),
          offsets(write_firsts + rows + 1), slots(offsets + write_firsts[rows]) {}

    int64_t tokens() const { return firsts[count]; }
};

}  // namespace outrider
