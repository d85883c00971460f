// A draw from softmax(scores) of each row: the argmax of scores + G, mostly decided by an approximate G.
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"
#include "vector_math.h"

using namespace outrider;

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;  // fewer do not pay for waking threads
constexpr int TILE = 8;                             // vectors of a row between two looks at the best sum so far
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LARGEST_NOISE = 22.9f;  // G's upper bound: v is at least 2^-33, and 33 ln 2 = 22.874
constexpr float FAST_ERROR = 1e-4f;     // error of the approximate G, with a margin of ten
constexpr double NUDGE = 1.0 - 0x6p-52;  // `noise.NUDGE`

struct Key {
    uint32_t low, high;
};

template <typename T>
inline T first_round(T x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    return x ^ (x >> 15);
}
template <typename T>
inline T second_round(T x) {
    x = x * 0x846CA68Bu;
    return x ^ (x >> 16);
}
// Hash h of one token, or of a vector of tokens.
template <typename T>
inline T hash(T tokens, Key key) {
    return second_round(first_round(second_round(first_round(tokens)) ^ key.low) ^ key.high);
}

// log(1 + z) for z between sqrt(1/2) - 1 and sqrt(2) - 1, to 2 units in the last place (Cephes' logf).
inline Vec log_near_one(Vec z) {
    Vec y = z * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * z + 1.1676998740e-1f;
    y = y * z - 1.2420140846e-1f;
    y = y * z + 1.4249322787e-1f;
    y = y * z - 1.6668057665e-1f;
    y = y * z + 2.0000714765e-1f;
    y = y * z - 2.4999993993e-1f;
    y = y * z + 3.3333331174e-1f;
    Vec square = z * z;
    return y * (square * z) - 0.5f * square + z;
}

struct Parts {
    Vec mantissa, exponent;  // x = mantissa * 2^exponent, mantissa between sqrt(1/2) and sqrt(2)
};
inline Parts split(Vec x) {
    VecI32 exponent = ((VecI32)x - 0x3f3504f3) >> 23;
    return {(Vec)((VecI32)x - (exponent << 23)), __builtin_convertvector(exponent, Vec)};
}

constexpr float LN2 = 0.693147181f;

// -G within FAST_ERROR.
inline Vec fast_log_exponential(VecU32 h) {
    Vec v = (__builtin_convertvector(h, Vec) + 0.5f) * 0x1p-32f;
    v = select(v < 1.0f, v, all(1.0f - 0x1p-24f));
    VecI32 small = v < 0.25f;  // there 1 - v loses too many bits
    Parts rest = split(1.0f - v);
    Vec log_rest = log_near_one(select(small, -v, rest.mantissa - 1.0f)) + select(small, zeros(), rest.exponent * LN2);
    Parts exponential = split(-log_rest);
    return log_near_one(exponential.mantissa - 1.0f) + exponential.exponent * LN2;
}

// -G, as the package defines it.
inline float log_exponential(uint32_t h) {
    float fraction = ((float)h + 0.5f) * 0x1p-32f;
    double v = fraction < 1.0f ? fraction : 1.0f - 0x1p-24f;
    double exponential = v < 0x1p-28 ? v + v * v * 0.5 : -std::log(1.0 - v);
    float rounded = (float)(exponential * NUDGE);
    return (float)(std::log((double)rounded) * NUDGE);
}

// Index of the first NaN, or else of the first infinity, which no noise changes; -1 without either.
int64_t first_not_finite(const float* row, int64_t size) {
    int64_t infinity = -1;
    for (int64_t i = 0; i < size; i++) {
        if (row[i] != row[i]) return i;
        if (infinity < 0 && row[i] == INF) infinity = i;
    }
    return infinity;
}

struct Best {
    float sum = -INF;
    int64_t token = 0;

    // A token may win when its approximate sum is at most so much below the best. The rounding of large sums exceeds the
    // error of the approximate G.
    static float margin(float sum) { return FAST_ERROR + std::fabs(sum) * 0x1p-21f; }

    // scores [count] of the tokens from `first` on; false if a score is NaN or +infinity.
    bool look(const float* scores, int64_t first, int64_t count, Key key) {
        Vec tile[TILE], top = all(-INF);
        VecI32 finite = (VecI32)VecU32{} == 0;
        int vectors = (int)((count + LANES - 1) / LANES);
        for (int i = 0; i < vectors; i++) {
            tile[i] = read(scores + i * LANES, count - i * LANES);
            finite &= tile[i] < INF;
            top = select(tile[i] > top, tile[i], top);
        }
        if (largest((Vec)(~finite & (VecI32)all(1.0f))) > 0) return false;
        float highest = largest(top);
        if (highest == -INF || highest + LARGEST_NOISE + margin(sum) < sum) return true;
        const VecU32 lanes = (VecU32)lane_numbers();
        top = all(-INF);
        for (int i = 0; i < vectors; i++) {
            tile[i] -= fast_log_exponential(hash(lanes + (uint32_t)(first + i * LANES), key));
            top = select(tile[i] > top, tile[i], top);
        }
        highest = largest(top);
        if (highest + margin(sum) < sum) return true;
        choose(scores, (const float*)tile, first, count, key, highest > sum ? highest : sum);
        return true;
    }

   private:
    static Vec read(const float* p, int64_t count) {
        if (count >= LANES) return load(p);
        float padded[LANES];
        for (int lane = 0; lane < LANES; lane++) padded[lane] = lane < count ? p[lane] : -INF;
        return load(padded);
    }

    // `fast` sums [count]; `highest`: the largest known sum.
    void choose(const float* scores, const float* fast, int64_t first, int64_t count, Key key, float highest) {
        float needed = highest - margin(highest);
        for (int64_t i = 0; i < count; i++) {
            if (fast[i] < needed) continue;
            float exact = scores[i] - log_exponential(hash((uint32_t)(first + i), key));
            if (exact > sum) {
                sum = exact;
                token = first + i;
            }
        }
    }
};

int64_t draw(const float* row, int64_t size, Key key) {
    Best best;
    for (int64_t first = 0; first < size; first += TILE * LANES) {
        int64_t left = size - first;
        if (!best.look(row + first, first, left < TILE * LANES ? left : TILE * LANES, key))
            return first_not_finite(row, size);
    }
    return best.token;
}

}  // namespace

// scores [rows, size] with `stride` elements between rows; keys and tokens [rows].
extern "C" void outrider_gumbel_argmax(const float* scores, const int64_t* keys, int64_t rows, int64_t size,
                                       int64_t stride, int64_t* tokens) {
    parallel_for(team_for(rows > 1 && rows * size >= MIN_PARALLEL_ELEMENTS), rows, [&](int64_t r) {
        uint64_t key = (uint64_t)keys[r];
        tokens[r] = draw(scores + r * stride, size, {(uint32_t)key, (uint32_t)(key >> 32)});
    });
}
