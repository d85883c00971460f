// Deltas of a step's adapters for one projection, for all tokens in one call: see rank_rows.h.
#include "rank_rows.h"

using namespace outrider;

namespace {

constexpr int64_t UNIT = 64;   // outputs; a thread computes a multiple of them
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it saves

template <typename E>
void add(const Site& site, const Step& step, const E* x, E* y) {
    const Adapters<E> adapters(site, step, x, y);
    const int team = team_for(adapters.work() >= MIN_PARALLEL_WORK);
    parallel(team, Phase{team, [&](int64_t part) { adapters.begin(part, team); }},
             Phase{adapters.num_parts(team), [&](int64_t part) { adapters.finish(part, team, UNIT); }});
}

}  // namespace

extern "C" void outrider_lora_add(const Site* site, void* y, const void* x, const Step* step) {
    if (site->dtype == BFLOAT16)
        add(*site, *step, (const bf16*)x, (bf16*)y);
    else
        add(*site, *step, (const float*)x, (float*)y);
}
