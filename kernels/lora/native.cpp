// y[t] += sum_j (x[t] . A[row_j, s]) B[row_j, s] for each slice s, over the rank rows of token t's adapter: shrink, then
// expand, for all adapters of a step in one call.
//
// A token's sums run over its own adapter's rows in their order, always in the same blocks: the result does not depend
// on the tokens beside it, nor on the number of threads. Sums are in float32; what is shrunk is rounded to the dtype, as
// PEFT's is, so that bfloat16 is multiplied in pairs.
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

    int64_t size_of(int64_t slice) const { return slice_starts[slice + 1] - slice_starts[slice]; }
    bool has(int32_t row, int64_t slice) const { return live[row * live_stride + slice]; }
    template <typename E>
    const E* a_of(int32_t row, int64_t slice) const { return (const E*)a + row * row_stride + slice * in_features; }
    template <typename E>
    const E* b_of(int32_t row, int64_t slice) const { return (const E*)b + row * row_stride + slice_starts[slice]; }
};

struct Segment {                 // the tokens of one adapter
    int32_t start, stop;         // in the list of tokens
    int32_t first, count;        // its rows, in the list of rows

    int64_t work() const { return int64_t(stop - start) * count; }
};

struct Step {                    // which tokens use which rows
    const Segment* segments;
    int64_t num_segments;
    const int32_t* tokens;
    const int32_t* rows;

    int64_t work() const {
        int64_t sum = 0;
        for (const Segment* segment = segments; segment < segments + num_segments; segment++) sum += segment->work();
        return sum;
    }
};

constexpr int TOKENS = 4;        // that share a load of the weights
constexpr int TILE = 16;         // tokens that a thread takes at once
constexpr int64_t PIECE = 512;   // outputs that a thread takes at once where there are few tokens
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it saves

// h[t * h_stride + j] = the sum of sums[t * J + j].
template <int T, int J, typename E>
inline void put_sums(const Vec* sums, E* h, int64_t h_stride) {
    constexpr int N = T * J < LANES ? T * J : LANES;
    for (int first = 0; first < T * J; first += N) {
        float lanes[LANES];
        store(lanes, sums_of<N>(sums + first));
        for (int i = 0; i < N; i++) put(h + (first + i) / J * h_stride + (first + i) % J, lanes[i * (LANES / N)]);
    }
}

// h[t * h_stride + j] = x[t] . a[j] over n elements, for T tokens and J rows: each sum by itself, in the same order
// whatever T and J are.
template <int T, int J, typename E>
inline void dots(const E* const* x, const E* const* a, int64_t n, E* h, int64_t h_stride) {
    Vec sums[T * J];
    for (Vec& value : sums) value = zeros();
    auto step = [&](int64_t i, int64_t count) {
        Vec rows[J];
        for (int j = 0; j < J; j++) rows[j] = load(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            Vec token = load(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t * J + j] += token * rows[j];
        }
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, LANES);
    if (i < n) step(i, n - i);
    put_sums<T, J>(sums, h, h_stride);
}

// y[t][i..] += sum over j of h[t * h_stride + j] * b[j][i..], one j after the other, for BLOCKS vectors of LANES, or for
// the first `lanes` of one; `count` is even and not 0.
template <int T, int BLOCKS, typename E>
inline void accumulate_at(E* const* y, const E* h, int64_t h_stride, const E* const* b, int count, int64_t i,
                          int64_t lanes = LANES) {
    Vec sums[T][BLOCKS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) sums[t][v] = zeros();
    int j = 0;
    do {  // with a test before the first turn GCC keeps the sums in memory
        Vec weights[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) weights[v] = load(b[j] + i + v * LANES, lanes);
        for (int t = 0; t < T; t++) {
            Vec factor = all(to_float(h[t * h_stride + j]));
            for (int v = 0; v < BLOCKS; v++) sums[t][v] += factor * weights[v];
        }
    } while (++j < count);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) {
            E* out = y[t] + i + v * LANES;
            store(out, load(out, lanes) + sums[t][v], lanes);
        }
}

template <typename E>
constexpr int WIDTH = LANES;     // outputs of a block

#ifdef __AVX512BF16__
inline __m512i load_pairs(const bf16* p, int64_t count) {
    __m512i result = _mm512_setzero_si512();
    std::memcpy(&result, p, std::min<int64_t>(count, 2 * LANES) * sizeof(bf16));
    return result;
}

// 32 products of bfloat16 at once, in pairs.
template <int T, int J>
inline void dots(const bf16* const* x, const bf16* const* a, int64_t n, bf16* h, int64_t h_stride) {
    __m512 sums[T * J];
    for (__m512& value : sums) value = _mm512_setzero_ps();
    auto step = [&](int64_t i, int64_t count) {
        __m512bh rows[J];
        for (int j = 0; j < J; j++) rows[j] = (__m512bh)load_pairs(a[j] + i, count);
        for (int t = 0; t < T; t++) {
            __m512bh token = (__m512bh)load_pairs(x[t] + i, count);
            for (int j = 0; j < J; j++) sums[t * J + j] = _mm512_dpbf16_ps(sums[t * J + j], rows[j], token);
        }
    };
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) step(i, 2 * LANES);
    if (i < n) step(i, n - i);
    put_sums<T, J>((const Vec*)sums, h, h_stride);
}

template <>
constexpr int WIDTH<bf16> = 2 * LANES;

// Of two rows at once, their outputs brought together in pairs: 4 of each row from the lower and 4 from the upper half of
// every 16 bytes.
template <int T, int BLOCKS>
inline void accumulate_at(bf16* const* y, const bf16* h, int64_t h_stride, const bf16* const* b, int count, int64_t i,
                          int64_t lanes = 2 * LANES) {
    __m512 low[T][BLOCKS], high[T][BLOCKS];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) low[t][v] = high[t][v] = _mm512_setzero_ps();
    int j = 0;
    do {
        __m512bh lows[BLOCKS], highs[BLOCKS];
        for (int v = 0; v < BLOCKS; v++) {
            const __m512i first = load_pairs(b[j] + i + v * 2 * LANES, lanes);
            const __m512i second = load_pairs(b[j + 1] + i + v * 2 * LANES, lanes);
            lows[v] = (__m512bh)_mm512_unpacklo_epi16(first, second);
            highs[v] = (__m512bh)_mm512_unpackhi_epi16(first, second);
        }
        for (int t = 0; t < T; t++) {
            int32_t both;
            std::memcpy(&both, h + t * h_stride + j, sizeof both);
            const __m512bh factors = (__m512bh)_mm512_set1_epi32(both);
            for (int v = 0; v < BLOCKS; v++) {
                low[t][v] = _mm512_dpbf16_ps(low[t][v], lows[v], factors);
                high[t][v] = _mm512_dpbf16_ps(high[t][v], highs[v], factors);
            }
        }
        j += 2;
    } while (j < count);
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < BLOCKS; v++) {
            bf16* out = y[t] + i + v * 2 * LANES;
            const Vec first = (Vec)_mm512_permutex2var_ps(low[t][v], front, high[t][v]);
            store(out, load(out, lanes) + first, lanes);
            if (lanes <= LANES) continue;
            const Vec second = (Vec)_mm512_permutex2var_ps(low[t][v], back, high[t][v]);
            store(out + LANES, load(out + LANES, lanes - LANES) + second, lanes - LANES);
        }
}
#else
template <>
constexpr int WIDTH<bf16> = LANES;
#endif

template <int T, typename E>
inline void all_dots(const E* const* x, const E* const* a, int count, int64_t n, E* h, int64_t h_stride) {
    constexpr int J = T == 1 ? 8 : 4;
    int j = 0;
    for (; j + J <= count; j += J) dots<T, J>(x, a + j, n, h + j, h_stride);
    for (; j < count; j++) dots<T, 1>(x, a + j, n, h + j, h_stride);
}

// Outputs [first, last).
template <int T, typename E>
inline void accumulate(E* const* y, const E* h, int64_t h_stride, const E* const* b, int count, int64_t first,
                       int64_t last) {
    constexpr int W = WIDTH<E>, BLOCKS = (T == 1 ? 8 : 4) * LANES / W;
    int64_t i = first;
    for (; i + BLOCKS * W <= last; i += BLOCKS * W) accumulate_at<T, BLOCKS>(y, h, h_stride, b, count, i);
    for (; i + W <= last; i += W) accumulate_at<T, 1>(y, h, h_stride, b, count, i);
    if (i < last) accumulate_at<T, 1>(y, h, h_stride, b, count, i, last - i);
}

struct Item {                    // tokens of one segment that are computed together
    const Segment* segment;
    int32_t begin, end;          // in the list of tokens
};

template <typename E>
struct Part {                    // of an item: live rows, or outputs, [first, last) of a slice
    const Item* item;
    int64_t slice, first, last;
    E* h;                    // of the item and slice
};

template <typename E>
struct Live {                    // the rows of a segment that have weights in a slice...
    std::vector<const E*> a, b;  // ...and in b the last one twice if they are odd: its second factor is 0
};

template <typename E>
class Add {
  public:
    Add(const Site& site, const Step& step, const E* x, E* y) : site_(site), step_(step), x_(x), y_(y) {}

    void run() const {
        static thread_local std::vector<Item> items;
        items.clear();
        int64_t most = 0;
        for (const Segment* segment = step_.segments; segment < step_.segments + step_.num_segments; segment++) {
            for (int32_t token = segment->start; token < segment->stop; token += TILE)
                items.push_back({segment, token, std::min(token + TILE, segment->stop)});
            most = std::max<int64_t>(most, segment->count);
        }
        const int64_t work = step_.work() * (site_.num_slices * site_.in_features + site_.out_features);
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
            E* h = scratch(TILE * (most_rows + 1));
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; i++) run_item(items[i], h);
        }
    }

    void run_item(const Item& item, E* h) const {
        for (int64_t slice = 0; slice < site_.num_slices; slice++) {
            const Live<E>& live = rows_of(*item.segment, slice);
            shrink(item, live, 0, live.a.size(), h);
            expand(item, slice, live, 0, site_.size_of(slice), h);
        }
    }

    // Fewer items than threads: these share out the rows, then the outputs of each.
    void run_parts(const std::vector<Item>& items, int64_t most_rows) const {
        constexpr int64_t ROWS = 8;
        std::vector<Part<E>> rows, outputs;
        const int64_t size_of_h = TILE * (most_rows + 1);
        E* h = scratch(items.size() * site_.num_slices * size_of_h);
        for (const Item& item : items)
            for (int64_t slice = 0; slice < site_.num_slices; slice++, h += size_of_h) {
                const int64_t count = rows_of(*item.segment, slice).a.size(), size = site_.size_of(slice);
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
                const Part<E>& part = rows[i];
                shrink(*part.item, rows_of(*part.item->segment, part.slice), part.first, part.last, part.h);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_outputs; i++) {
                const Part<E>& part = outputs[i];
                const Live<E>& live = rows_of(*part.item->segment, part.slice);
                expand(*part.item, part.slice, live, part.first, part.last, part.h);
            }
        }
    }

    static E* scratch(size_t size) {
        static thread_local std::vector<E> memory;
        if (memory.size() < size) memory.resize(size);
        return memory.data();
    }

    // Until the thread asks again.
    const Live<E>& rows_of(const Segment& segment, int64_t slice) const {
        static thread_local Live<E> live;
        live.a.clear();
        live.b.clear();
        for (const int32_t* row = step_.rows + segment.first; row < step_.rows + segment.first + segment.count; row++) {
            if (!site_.has(*row, slice)) continue;
            live.a.push_back(site_.a_of<E>(*row, slice));
            live.b.push_back(site_.b_of<E>(*row, slice));
        }
        if (live.b.size() % 2) live.b.push_back(live.b.back());
        return live;
    }

    // h[token, j] for the live rows [first, last), and 0 behind the last of all.
    void shrink(const Item& item, const Live<E>& live, int64_t first, int64_t last, E* h) const {
        const int64_t n = site_.in_features, stride = (int64_t)live.b.size();
        const E* x[TOKENS];
        if (last < stride && last == (int64_t)live.a.size())
            for (int64_t t = 0; t < item.end - item.begin; t++) put(h + t * stride + last, 0.0f);
        h += first;
        int32_t i = item.begin;
        for (; i + TOKENS <= item.end; i += TOKENS, h += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) x[t] = x_ + step_.tokens[i + t] * n;
            all_dots<TOKENS>(x, live.a.data() + first, int(last - first), n, h, stride);
        }
        for (; i < item.end; i++, h += stride) {
            x[0] = x_ + step_.tokens[i] * n;
            all_dots<1>(x, live.a.data() + first, int(last - first), n, h, stride);
        }
    }

    // Outputs [first, last) of the slice.
    void expand(const Item& item, int64_t slice, const Live<E>& live, int64_t first, int64_t last,
                const E* h) const {
        const int64_t stride = (int64_t)live.b.size();
        if (!stride) return;
        E* y[TOKENS];
        E* out = y_ + site_.slice_starts[slice];
        int32_t i = item.begin;
        for (; i + TOKENS <= item.end; i += TOKENS, h += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) y[t] = out + step_.tokens[i + t] * site_.out_features;
            accumulate<TOKENS>(y, h, stride, live.b.data(), int(stride), first, last);
        }
        for (; i < item.end; i++, h += stride) {
            y[0] = out + step_.tokens[i] * site_.out_features;
            accumulate<1>(y, h, stride, live.b.data(), int(stride), first, last);
        }
    }

    const Site& site_;
    const Step& step_;
    const E* x_;
    E* y_;
};

}  // namespace

extern "C" void outrider_lora_add(const Site* site, void* y, const void* x, const Step* step) {
    if (site->dtype == BFLOAT16)
        Add<bf16>(*site, *step, (const bf16*)x, (bf16*)y).run();
    else
        Add<float>(*site, *step, (const float*)x, (float*)y).run();
}
