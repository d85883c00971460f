// The choice of the threads of all kernels (team.h), and of their use of tiles (tiles.h).
#include <sys/syscall.h>
#include <unistd.h>

#include "team.h"
#include "tiles.h"

// From the next call on, kernels of this process share their work among the pool's threads, or OpenMP's.
extern "C" void outrider_use_pool(int64_t yes) { outrider::Pool::chosen().store(yes); }

// 1 when the kernels are compiled for a processor with tiles.
extern "C" int64_t outrider_has_tiles() {
#ifdef OUTRIDER_TILES
    return 1;
#else
    return 0;
#endif
}

// Asks Linux for tiles, for all threads of this process; 1 when it grants them.
extern "C" int64_t outrider_permit_tiles() {
#ifdef OUTRIDER_TILES
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return 0;
#endif
}

// From the next call on, products of bfloat16 use tiles or not, and those of integers from so many rows on.
extern "C" void outrider_use_tiles(int64_t pairs, int64_t byte_rows) {
    outrider::TileUse::pairs().store(pairs);
    outrider::TileUse::byte_rows().store(byte_rows);
}
