// Tile registers of processors with AMX: 8 matrices of up to 16 rows of 64 bytes, and their products.
//
// Assembly, for GCC's intrinsics do not say which memory they read: a store before them could be moved behind them. A
// thread has tiles while a `Tiles` lives. The system must have granted them to the process before: outrider_permit_tiles.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OUTRIDER_TILES
#endif

namespace outrider {

// The use of tiles by the kernels of this process, which outrider_use_tiles sets.
struct __attribute__((visibility("hidden"))) TileUse {
    // Whether products of bfloat16 use them: for all numbers of rows, since the bits are not those of other products.
    static std::atomic<bool>& pairs() {
        static std::atomic<bool> yes{false};
        return yes;
    }
    // Rows from which products of integers use them. Their sums are exact.
    static std::atomic<int64_t>& byte_rows() {
        static std::atomic<int64_t> rows{INT64_MAX};
        return rows;
    }
};

#ifdef OUTRIDER_TILES

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

// Registers 0 to 3 are results [rows, 16] of float32 or int32; 4 and 5 inputs [rows, 4 * depth bytes]; 6 and 7 weights
// [depth, 64 bytes], 4 bytes for each of 16 outputs.
class Tiles {
  public:
    Tiles(int64_t rows, int64_t depth) {
        alignas(64) Shapes shapes{1, 0, {}, {}, {}};  // palette 1
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = uint16_t(i == 4 || i == 5 ? 4 * depth : TILE_BYTES);
            shapes.rows[i] = uint8_t(i < 6 ? rows : depth);
        }
        asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
    Tiles(const Tiles&) = delete;

    // Rows of 64 bytes or less, `stride` bytes apart.
    template <int T>
    static void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    static void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(T));
    }

  private:
    struct Shapes {
        uint8_t palette, start;
        uint8_t reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Shapes) == 64);
};

// result += inputs * weights, in float32: the sums of a tile's first and of its second numbers of bfloat16 pairs.
struct PairProduct {
    template <int RESULT, int INPUTS, int WEIGHTS>
    static void add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(RESULT), "i"(INPUTS), "i"(WEIGHTS));
    }
};

// result += inputs * weights, of int8 and uint8, exact modulo 2^32.
struct ByteProduct {
    template <int RESULT, int INPUTS, int WEIGHTS>
    static void add() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(RESULT), "i"(INPUTS), "i"(WEIGHTS));
    }
};

constexpr int64_t PANEL_STRIDE = 4 * TILE_BYTES;  // between the weights of a depth: 64 outputs side by side

// Adds the products of inputs with the weights of 64 outputs to results 0 to 3.
template <typename Product>
inline void add_wide(const void* x, int64_t stride, const void* weights) {
    const char* from = (const char*)weights;
    Tiles::load<4>(x, stride);
    Tiles::load<6>(from, PANEL_STRIDE);
    Product::template add<0, 4, 6>();
    Tiles::load<7>(from + TILE_BYTES, PANEL_STRIDE);
    Product::template add<1, 4, 7>();
    Tiles::load<6>(from + 2 * TILE_BYTES, PANEL_STRIDE);
    Product::template add<2, 4, 6>();
    Tiles::load<7>(from + 3 * TILE_BYTES, PANEL_STRIDE);
    Product::template add<3, 4, 7>();
}

// Adds the products of inputs with the weights of 32 outputs to results 0 and 1, and of other inputs to 2 and 3.
template <typename Product>
inline void add_double(const void* x, const void* other, int64_t stride, const void* weights) {
    const char* from = (const char*)weights;
    Tiles::load<4>(x, stride);
    Tiles::load<6>(from, PANEL_STRIDE);
    Product::template add<0, 4, 6>();
    Tiles::load<7>(from + TILE_BYTES, PANEL_STRIDE);
    Product::template add<1, 4, 7>();
    Tiles::load<5>(other, stride);
    Product::template add<2, 5, 6>();
    Product::template add<3, 5, 7>();
}

inline void zero_results() {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
}

// Rows of a call in tiles of one height. The last tile may share rows with the one before, which get the same bits twice.
struct RowTiles {
    int64_t rows, count, height;

    explicit RowTiles(int64_t rows)
        : rows(rows), count((rows + TILE_ROWS - 1) / TILE_ROWS), height((rows + count - 1) / count) {}

    int64_t first(int64_t tile) const { return std::min(tile * height, rows - height); }
    // The index of a row in memory that has TILE_ROWS rows for each tile.
    int64_t place(int64_t row) const {
        const int64_t tile = std::min(row / height, count - 1);
        return tile * TILE_ROWS + row - first(tile);
    }
};

#endif

}  // namespace outrider
