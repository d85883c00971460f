// The choice of the threads of all kernels: see team.h.
#include "team.h"

// From the next call on, kernels of this process share their work among the pool's threads, or OpenMP's.
extern "C" void outrider_use_pool(int64_t yes) { outrider::Pool::chosen().store(yes); }
