// y[t] += sum_j (x[t] . A[row_j, s]) B[row_j, s] for each slice s, over the rank rows of token t's adapter: shrink, then
// expand, for all adapters of a step in one call.
//
// A token's sums run over its own adapter's rows in their order, always in the same blocks: the result does not depend
// on the tokens beside it, nor on the number of threads.
#include <algorithm>
#include <vector>

#include "vector_math.h"

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

struct Segment {                 // the tokens of one adapter
    int32_t start, stop;         // in the list of tokens
    int32_t first, count;        // its rows, in the list of rows
};

struct Step {                    // which tokens use which rows
    const Segment* segments;
    int64_t num_segments;
    const int32_t* tokens;
    const int32_t* rows;
};

constexpr int TOKENS = 4;        // that share a load of the weights
constexpr int TILE = 16;         // tokens that a thread takes at once
constexpr int64_t PIECE = 512;   // outputs that a thread takes at once where there are few tokens
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it saves

// h[t * h_stride + j] = x[t] . a[j] over n elements, for T tokens and J rows: each sum by itself, in the same order
// whatever T and J are.
template <int T, int J, typename E>
inline void dots(const E* const* x, const E* const* a, int64_t n, float* h, int64_t h_stride) {
    Vec sums[T][J];
    for (int t = 0; t < T; t++)
        for (int j = 0; j < J; j++) sums[t][j] = zeros();
    auto step = [&](int64_t i, int64_t count) {
        Vec rows[J];
        for (int j = 0; j < J; j++) rows[j] = load(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            Vec token = load(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t][j] += token * rows[j];
        }
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, LANES);
    if (i < n) step(i, n - i);
    for (int t = 0; t < T; t++)
        for (int j = 0; j < J; j++) h[t * h_stride + j] = sum(sums[t][j]);
}

#ifdef __AVX512BF16__
inline __m512bh load_pairs(const bf16* p, int64_t count) {
    __m512bh result;
    if (count >= 2 * LANES) {
        std::memcpy(&result, p, sizeof result);
    } else {
        std::memset(&result, 0, sizeof result);
        std::memcpy(&result, p, count * sizeof(bf16));
    }
    return result;
}

// 32 products of bfloat16 at once, in pairs.
template <int T, int J>
inline void dots(const bf16* const* x, const bf16* const* a, int64_t n, float* h, int64_t h_stride) {
    __m512 sums[T][J];
    for (int t = 0; t < T; t++)
        for (int j = 0; j < J; j++) sums[t][j] = _mm512_setzero_ps();
    auto step = [&](int64_t i, int64_t count) {
        __m512bh rows[J];
        for (int j = 0; j < J; j++) rows[j] = load_pairs(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            __m512bh token = load_pairs(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t][j] = _mm512_dpbf16_ps(sums[t][j], rows[j], token);
        }
    };
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) step(i, 2 * LANES);
    if (i < n) step(i, n - i);
    for (int t = 0; t < T; t++)
        for (int j = 0; j < J; j++) h[t * h_stride + j] = sum((Vec)sums[t][j]);
}
#endif

template <int T, typename E>
inline void all_dots(const E* const* x, const E* const* a, int count, int64_t n, float* h, int64_t h_stride) {
    constexpr int J = T == 1 ? 8 : 4;
    int j = 0;
    for (; j + J <= count; j += J) dots<T, J>(x, a + j, n, h + j, h_stride);
    for (; j < count; j++) dots<T, 1>(x, a + j, n, h + j, h_stride);
}

// y[t][i..] += sum over j of h[t * h_stride + j] * b[j][i..], one j after the other, for BLOCKS vectors of LANES, or for
// the first `lanes` of one; count > 0.
template <int T, int BLOCKS, typename E>
inline void accumulate_at(E* const* y, const float* h, int64_t h_stride, const E* const* b, int count, int64_t i,
                          int64_t lanes = LANES) {
    Vec sums[T][BLOCKS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) sums[t][v] = zeros();
    int j = 0;
    do {  // with a test before the first turn GCC keeps the sums in memory
        Vec weights[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) weights[v] = load(b[j] + i + v * LANES, lanes);
        for (int t = 0; t < T; t++) {
            Vec factor = all(h[t * h_stride + j]);
            for (int v = 0; v < BLOCKS; v++) sums[t][v] += factor * weights[v];
        }
    } while (++j < count);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) {
            E* out = y[t] + i + v * LANES;
            store(out, load(out, lanes) + sums[t][v], lanes);
        }
}

// Outputs [first, last).
template <int T, typename E>
inline void accumulate(E* const* y, const float* h, int64_t h_stride, const E* const* b, int count, int64_t first,
                       int64_t last) {
    constexpr int BLOCKS = T == 1 ? 8 : 4;
    int64_t i = first;
    for (; i + BLOCKS * LANES <= last; i += BLOCKS * LANES) accumulate_at<T, BLOCKS>(y, h, h_stride, b, count, i);
    for (; i + LANES <= last; i += LANES) accumulate_at<T, 1>(y, h, h_stride, b, count, i);
    if (i < last) accumulate_at<T, 1>(y, h, h_stride, b, count, i, last - i);
}

struct Item {                    // tokens of one segment that are computed together
    const Segment* segment;
    int32_t begin, end;          // in the list of tokens
};

struct Part {                    // of an item: live rows, or outputs, [first, last) of a slice
    const Item* item;
    int64_t slice, first, last;
    float* h;                    // of the item and slice
};

template <typename E>
struct Live {                    // the rows of a segment that have weights in a slice
    std::vector<const E*> a, b;
};

template <typename E>
class Add {
  public:
    Add(const Site& site, const int32_t* tokens, const int32_t* rows, const E* x, E* y)
        : site_(site), tokens_(tokens), rows_(rows), x_(x), y_(y) {}

    void run(const Segment* segments, int64_t num_segments) const {
        static thread_local std::vector<Item> items;
        items.clear();
        int64_t work = 0, most = 0;
        for (const Segment* segment = segments; segment < segments + num_segments; segment++) {
            for (int32_t token = segment->start; token < segment->stop; token += TILE)
                items.push_back({segment, token, std::min(token + TILE, segment->stop)});
            work += int64_t(segment->stop - segment->start) * segment->count;
            most = std::max<int64_t>(most, segment->count);
        }
        work *= site_.num_slices * site_.in_features + site_.out_features;
        const int team = work < MIN_PARALLEL_WORK ? 1 : num_threads();
        if ((int64_t)items.size() < team)
            run_parts(items, most);
        else
            run_items(items, most, team);
    }

  private:
    // Each item by one thread.
    void run_items(const std::vector<Item>& items, int64_t most_rows, int team) const {
        const int64_t count = (int64_t)items.size();
#pragma omp parallel if (team > 1)
        {
            float* h = scratch(TILE * most_rows);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; i++)
                for (int64_t slice = 0; slice < site_.num_slices; slice++) {
                    const Live<E>& live = rows_of(*items[i].segment, slice);
                    shrink(items[i], live, 0, live.a.size(), h);
                    expand(items[i], slice, live, 0, size_of(slice), h);
                }
        }
    }

    // Fewer items than threads: these share out the rows, then the outputs of each.
    void run_parts(const std::vector<Item>& items, int64_t most_rows) const {
        constexpr int64_t ROWS = 8;
        std::vector<Part> rows, outputs;
        float* h = scratch(items.size() * site_.num_slices * TILE * most_rows);
        for (const Item& item : items)
            for (int64_t slice = 0; slice < site_.num_slices; slice++, h += TILE * most_rows) {
                const int64_t count = rows_of(*item.segment, slice).a.size(), size = size_of(slice);
                for (int64_t first = 0; first < count; first += ROWS)
                    rows.push_back({&item, slice, first, std::min(first + ROWS, count), h});
                for (int64_t first = 0; first < size; first += PIECE)
                    outputs.push_back({&item, slice, first, std::min(first + PIECE, size), h});
            }
        const int64_t num_rows = (int64_t)rows.size(), num_outputs = (int64_t)outputs.size();
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_rows; i++) {
                const Part& part = rows[i];
                shrink(*part.item, rows_of(*part.item->segment, part.slice), part.first, part.last, part.h);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_outputs; i++) {
                const Part& part = outputs[i];
                const Live<E>& live = rows_of(*part.item->segment, part.slice);
                expand(*part.item, part.slice, live, part.first, part.last, part.h);
            }
        }
    }

    static float* scratch(size_t size) {
        static thread_local std::vector<float> memory;
        if (memory.size() < size) memory.resize(size);
        return memory.data();
    }

    int64_t size_of(int64_t slice) const { return site_.slice_starts[slice + 1] - site_.slice_starts[slice]; }

    // Until the thread asks again.
    const Live<E>& rows_of(const Segment& segment, int64_t slice) const {
        static thread_local Live<E> live;
        live.a.clear();
        live.b.clear();
        for (const int32_t* row = rows_ + segment.first; row < rows_ + segment.first + segment.count; row++) {
            if (!site_.live[*row * site_.live_stride + slice]) continue;
            live.a.push_back((const E*)site_.a + *row * site_.row_stride + slice * site_.in_features);
            live.b.push_back((const E*)site_.b + *row * site_.row_stride + site_.slice_starts[slice]);
        }
        return live;
    }

    // h[token, j] for the live rows [first, last).
    void shrink(const Item& item, const Live<E>& live, int64_t first, int64_t last, float* h) const {
        const int64_t n = site_.in_features, stride = (int64_t)live.a.size();
        const E* x[TOKENS];
        h += first;
        int32_t i = item.begin;
        for (; i + TOKENS <= item.end; i += TOKENS, h += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) x[t] = x_ + tokens_[i + t] * n;
            all_dots<TOKENS>(x, live.a.data() + first, int(last - first), n, h, stride);
        }
        for (; i < item.end; i++, h += stride) {
            x[0] = x_ + tokens_[i] * n;
            all_dots<1>(x, live.a.data() + first, int(last - first), n, h, stride);
        }
    }

    // Outputs [first, last) of the slice.
    void expand(const Item& item, int64_t slice, const Live<E>& live, int64_t first, int64_t last,
                const float* h) const {
        const int64_t stride = (int64_t)live.b.size();
        if (!stride) return;
        E* y[TOKENS];
        E* out = y_ + site_.slice_starts[slice];
        int32_t i = item.begin;
        for (; i + TOKENS <= item.end; i += TOKENS, h += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) y[t] = out + tokens_[i + t] * site_.out_features;
            accumulate<TOKENS>(y, h, stride, live.b.data(), int(stride), first, last);
        }
        for (; i < item.end; i++, h += stride) {
            y[0] = out + tokens_[i] * site_.out_features;
            accumulate<1>(y, h, stride, live.b.data(), int(stride), first, last);
        }
    }

    const Site& site_;
    const int32_t* tokens_;
    const int32_t* rows_;
    const E* x_;
    E* y_;
};

}  // namespace

extern "C" void outrider_lora_add(const Site* site, void* y, const void* x, const Step* step) {
    if (site->dtype == BFLOAT16)
        Add<bf16>(*site, step->tokens, step->rows, (const bf16*)x, (bf16*)y).run(step->segments, step->num_segments);
    else
        Add<float>(*site, step->tokens, step->rows, (const float*)x, (float*)y).run(step->segments, step->num_segments);
}
