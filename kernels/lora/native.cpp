// y[t] += sum_j (x[t] . A[row_j, s]) B[row_j, s] for each slice s, over the rank rows of token t's adapter: shrink, then
// expand, for all adapters of a step in one call.
//
// A token's sums run over its own adapter's rows in their order, always in the same blocks: the result does not depend
// on the tokens beside it, nor on the number of threads.
#include <vector>

#include "simd.h"

using namespace outrider;

namespace {

struct Site {                    // one projection's place in the rows' arena; counts in elements
    int64_t in_features;
    int64_t out_features;        // of all slices
    int64_t num_slices;
    int64_t row_stride;
    const void* a;               // row 0: [num_slices, in_features]
    const void* b;               // row 0: [out_features]
    const int64_t* slice_starts; // [num_slices + 1], within out_features
    const uint8_t* live;         // [row, slice]: whether the adapter has weights there
    int64_t live_stride;
    int64_t dtype;
};

struct Segment {                 // neighbouring tokens of one adapter
    int32_t start, stop;         // tokens
    int32_t first, count;        // its rows, in the list of rows
};

constexpr int TOKENS = 4;        // that share a load of the weights
constexpr int CHUNK = 4 * LANES; // outputs, or inputs, in flight
constexpr int64_t MIN_PARALLEL_WORK = 1 << 18;  // multiply-adds below which waking threads costs more than it saves

#ifdef __AVX512BF16__
// 32 products of bfloat16 a lane pair at once.
inline __m512bh load_pairs(const bf16* p) {
    __m512bh result;
    std::memcpy(&result, p, sizeof result);
    return result;
}

template <int T>
void dots(const bf16* const* x, const bf16* a, int64_t n, float* h, int64_t h_stride) {
    constexpr int WIDE = 2 * LANES;
    __m512 sums[T][2];
    for (int t = 0; t < T; t++) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * WIDE <= n; i += 2 * WIDE) {
        __m512bh a0 = load_pairs(a + i), a1 = load_pairs(a + i + WIDE);
        for (int t = 0; t < T; t++) {
            sums[t][0] = _mm512_dpbf16_ps(sums[t][0], a0, load_pairs(x[t] + i));
            sums[t][1] = _mm512_dpbf16_ps(sums[t][1], a1, load_pairs(x[t] + i + WIDE));
        }
    }
    for (int t = 0; t < T; t++) {
        __m512 both = sums[t][0] + sums[t][1];
        float total = sum(reinterpret_cast<Vec&>(both));
        for (int64_t k = i; k < n; k++) total += to_float(x[t][k]) * to_float(a[k]);
        h[t * h_stride] = total;
    }
}
#endif

template <int T, typename E>
void dots(const E* const* x, const E* a, int64_t n, float* h, int64_t h_stride) {
    constexpr int BLOCKS = CHUNK / LANES;
    Vec sums[T][BLOCKS] = {};
    int64_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK)
        for (int block = 0; block < BLOCKS; block++) {
            Vec weights = load(a + i + block * LANES);
            for (int t = 0; t < T; t++) sums[t][block] += weights * load(x[t] + i + block * LANES);
        }
    for (int t = 0; t < T; t++) {
        float total = sum((sums[t][0] + sums[t][1]) + (sums[t][2] + sums[t][3]));
        for (int64_t k = i; k < n; k++) total += to_float(x[t][k]) * to_float(a[k]);
        h[t * h_stride] = total;
    }
}

// y[t][0..n) += sum over j of h[t][j] * b[j][0..n), for the rows that are live.
template <int T, typename E>
void accumulate(E* const* y, const float* const* h, const E* const* b, int count, int64_t n) {
    constexpr int BLOCKS = CHUNK / LANES;
    int64_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        Vec sums[T][BLOCKS] = {};
        for (int j = 0; j < count; j++)
            for (int block = 0; block < BLOCKS; block++) {
                Vec weights = load(b[j] + i + block * LANES);
                for (int t = 0; t < T; t++) sums[t][block] += all(h[t][j]) * weights;
            }
        for (int t = 0; t < T; t++)
            for (int block = 0; block < BLOCKS; block++) {
                E* out = y[t] + i + block * LANES;
                store(out, load(out) + sums[t][block]);
            }
    }
    for (; i < n; i++)
        for (int t = 0; t < T; t++) {
            float total = 0;
            for (int j = 0; j < count; j++) total += h[t][j] * to_float(b[j][i]);
            put(y[t] + i, to_float(y[t][i]) + total);
        }
}

template <typename E>
struct Add {
    const Site& site;
    const int32_t* rows;
    const E* x;
    E* y;

    bool live(int32_t row, int64_t slice) const { return site.live[row * site.live_stride + slice]; }

    // One rank row of one slice, for all tokens of the segment. h: [tokens, slices, rows of the segment]
    void shrink(const Segment& segment, int64_t slice, int j, float* h) const {
        int32_t row = rows[segment.first + j];
        if (!live(row, slice)) return;
        const E* a = static_cast<const E*>(site.a) + row * site.row_stride + slice * site.in_features;
        int64_t stride = site.num_slices * segment.count;
        float* out = h + slice * segment.count + j;
        int32_t token = segment.start;
        const E* inputs[TOKENS];
        for (; token + TOKENS <= segment.stop; token += TOKENS, out += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) inputs[t] = x + (token + t) * site.in_features;
            dots<TOKENS>(inputs, a, site.in_features, out, stride);
        }
        for (; token < segment.stop; token++, out += stride) {
            inputs[0] = x + token * site.in_features;
            dots<1>(inputs, a, site.in_features, out, stride);
        }
    }

    // Outputs [begin, end) of one slice, for all tokens of the segment.
    void expand(const Segment& segment, int64_t slice, int64_t begin, int64_t end, const float* h) const {
        std::vector<const E*> b;
        std::vector<int> kept;
        for (int j = 0; j < segment.count; j++) {
            int32_t row = rows[segment.first + j];
            if (!live(row, slice)) continue;
            b.push_back(static_cast<const E*>(site.b) + row * site.row_stride + begin);
            kept.push_back(j);
        }
        int count = static_cast<int>(kept.size());
        if (!count) return;
        std::vector<float> factors(static_cast<size_t>(TOKENS) * count);
        E* outputs[TOKENS];
        const float* parts[TOKENS];
        for (int32_t token = segment.start; token < segment.stop; token += TOKENS) {
            int tile = segment.stop - token < TOKENS ? segment.stop - token : TOKENS;
            for (int t = 0; t < tile; t++) {
                const float* from = h + ((token - segment.start + t) * site.num_slices + slice) * segment.count;
                for (int j = 0; j < count; j++) factors[t * count + j] = from[kept[j]];
                parts[t] = factors.data() + t * count;
                outputs[t] = y + (token + t) * site.out_features + begin;
            }
            if (tile == TOKENS) {
                accumulate<TOKENS>(outputs, parts, b.data(), count, end - begin);
            } else {
                for (int t = 0; t < tile; t++) accumulate<1>(outputs + t, parts + t, b.data(), count, end - begin);
            }
        }
    }

    void run(const Segment* segments, int64_t num_segments) const {
        constexpr int64_t PIECE = 16 * CHUNK;  // outputs that one thread takes at a time
        std::vector<size_t> place(num_segments);
        size_t size = 0;
        int64_t work = 0;
        for (int64_t g = 0; g < num_segments; g++) {
            int64_t tokens = segments[g].stop - segments[g].start;
            place[g] = size;
            size += static_cast<size_t>(tokens * site.num_slices * segments[g].count);
            work += tokens * segments[g].count * (site.num_slices * site.in_features + site.out_features);
        }
        static thread_local std::vector<float> scratch;
        if (scratch.size() < size) scratch.resize(size);
        float* h = scratch.data();
        int threads = work < MIN_PARALLEL_WORK ? 1 : num_threads();
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            for (int64_t g = 0; g < num_segments; g++) {
                int64_t count = segments[g].count;
#pragma omp for schedule(static) nowait
                for (int64_t unit = 0; unit < site.num_slices * count; unit++)
                    shrink(segments[g], unit / count, static_cast<int>(unit % count), h + place[g]);
            }
#pragma omp barrier
            for (int64_t g = 0; g < num_segments; g++)
                for (int64_t slice = 0; slice < site.num_slices; slice++) {
                    int64_t first = site.slice_starts[slice], last = site.slice_starts[slice + 1];
                    int64_t pieces = (last - first + PIECE - 1) / PIECE;
#pragma omp for schedule(static) nowait
                    for (int64_t piece = 0; piece < pieces; piece++) {
                        int64_t begin = first + piece * PIECE;
                        expand(segments[g], slice, begin, begin + PIECE < last ? begin + PIECE : last, h + place[g]);
                    }
                }
        }
    }
};

}  // namespace

extern "C" void outrider_lora_add(
    const Site* site, void* y, const void* x, const Segment* segments, int64_t num_segments, const int32_t* rows) {
    if (site->dtype == BFLOAT16)
        Add<bf16>{*site, rows, static_cast<const bf16*>(x), static_cast<bf16*>(y)}.run(segments, num_segments);
    else
        Add<float>{*site, rows, static_cast<const float*>(x), static_cast<float*>(y)}.run(segments, num_segments);
}
