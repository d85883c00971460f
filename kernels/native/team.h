// Threads that share the work of a kernel: `parallel(team, phase, ...)`.
//
// A phase has parts that any thread may compute, in any order; the next phase begins when all parts are done. The calling
// thread computes too, and takes every part that no other thread has begun: it waits only for a thread that runs. So a
// processor that is busy with something else costs its share of the work and no more. OpenMP's regions wait for
// every thread to arrive.
//
// The threads are those of a pool of our own if `outrider_use_pool` has chosen it, else OpenMP's: an engine whose
// products are oneDNN's must not have two sets of threads that wait for the same processors.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace outrider {

template <typename F>
struct Phase {
    int64_t count;
    F part;  // part(i) computes part i of `count`
};
template <typename F>
Phase(int64_t, F) -> Phase<F>;

// Threads that a kernel may use, the calling one included: torch.set_num_threads sets it for the calling thread.
inline int num_threads() {
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

// Size of the team for work that is worth more than one thread or not.
inline int team_for(bool pays) { return pays ? num_threads() : 1; }

template <typename... F>
void parallel(int team, const Phase<F>&... phases) {
    if (team > 1 && Pool::chosen().load(std::memory_order_relaxed)) {
        Pool::Use pool(team);
        if (pool) {
            (pool.run(phases.count, phases.part), ...);
            return;
        }
        team = 1;  // another thread has the pool, or this is within a part
    }
#ifdef _OPENMP
    if (team > 1) {
        std::atomic<int64_t> taken[sizeof...(F)] = {};
#pragma omp parallel num_threads(team)
        {
            int number = 0;
            const auto share = [&](const auto& phase) {
                std::atomic<int64_t>& next = taken[number++];
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < phase.count;) phase.part(i);
                if (number < (int)sizeof...(F)) {
#pragma omp barrier
                }
            };
            (share(phases), ...);
        }
        return;
    }
#endif
    const auto alone = [](const auto& phase) {
        for (int64_t i = 0; i < phase.count; i++) phase.part(i);
    };
    (alone(phases), ...);
}

// item(i) for each i < count, in equal runs.
template <typename F>
void parallel_for(int team, int64_t count, const F& item) {
    parallel(team, Phase{team, [&](int64_t part) {
        for (int64_t i = count * part / team; i < count * (part + 1) / team; i++) item(i);
    }});
}

}  // namespace outrider
