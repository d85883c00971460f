// Adapters' deltas for one projection: y[t] += sum_j (x[t] . A[row_j, s]) B[row_j, s] for each slice s, over the rank
// rows of token t's adapter. First `shrink`, then `expand`; threads share the work of both.
//
// A token's sums run over its adapter's rows in order, lane by lane: the result does not depend on other tokens, on the
// number of threads, or on the division of outputs. Sums are in float32; the shrunk values are rounded to the
// dtype, as in PEFT, so that bfloat16 is multiplied in pairs.
#pragma once

#include <iterator>
#include <vector>

#include "rank_products.h"
#include "team.h"

namespace outrider {
namespace {  // of each source its own

struct Site {                    // one projection's columns in the rows' arena; counts in elements
    int64_t in_features;
    int64_t out_features;        // outputs of all slices
    int64_t num_slices;
    int64_t row_stride;
    const void* a;               // row 0: [num_slices, in_features]
    const void* b;               // row 0: [out_features]
    const int64_t* slice_starts; // [num_slices + 1], within out_features
    const uint8_t* live;         // [slice, row]: 1 when the adapter has weights there
    int64_t live_stride;
    int64_t dtype;

    bool has(int32_t row, int64_t slice) const { return live[slice * live_stride + row]; }
    template <typename E>
    const E* a_of(int32_t row, int64_t slice) const { return (const E*)a + row * row_stride + slice * in_features; }
    template <typename E>
    const E* b_of(int32_t row, int64_t slice) const { return (const E*)b + row * row_stride + slice_starts[slice]; }
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

constexpr int TILE = 16;         // tokens that a thread shrinks at once
constexpr int SHARE = 8;         // rows of few tokens that a thread shrinks at once
constexpr int64_t OUTPUTS = 256; // outputs of a part of the rows that stays in the cache for many tokens
constexpr int64_t FEW = 64;      // tokens up to which loads of the rows take longer than the arithmetic

template <typename E>
struct Piece {                   // of a segment, in one slice: that has weights there
    int64_t slice;
    int32_t begin, end;          // in the list of tokens
    const int32_t* rows;
    int64_t live, padded;        // number of rows with weights, and the next even number
    E* h;                        // [end - begin, padded]: 0 after the live rows

    int64_t work() const { return (end - begin) * live; }
};

template <typename E>
struct Tile {                    // of many tokens
    const Piece<E>*first, *last; // pieces of a segment
    int32_t begin, end;
};

struct Span {                    // of memory
    const char *begin, *end;
};

template <typename E>
class Adapters {
  public:
    // Uses memory that the calling thread keeps until its next step.
    Adapters(const Site& site, const Step& step, const E* x, E* y) : site_(site), step_(step), x_(x), y_(y) {
        static thread_local std::vector<Piece<E>> pieces;
        static thread_local std::vector<std::vector<int32_t>> few(1);
        static thread_local std::vector<E> shrunk;
        pieces.clear();
        int64_t size = 0, num_few = 0;
        for (const Segment* s = step.segments; s < step.segments + step.num_segments; s++) {
            if (s->start == s->stop) continue;
            num_tokens_ += s->stop - s->start;
            for (int64_t slice = 0; slice < site.num_slices; slice++) {
                const int32_t *rows = step.rows + s->first, *end = rows + s->count;
                const auto is_live = [&](int32_t row) { return site.has(row, slice); };
                int64_t live = std::count_if(rows, end, is_live);
                if (!live) continue;
                if (live < s->count) {
                    if ((int64_t)few.size() == num_few) few.emplace_back();
                    std::vector<int32_t>& some = few[num_few++];
                    some.clear();
                    std::copy_if(rows, end, std::back_inserter(some), is_live);
                    rows = some.data();
                }
                pieces.push_back({slice, s->start, s->stop, rows, live, live + live % 2, nullptr});
                size += (s->stop - s->start) * (live + live % 2);
                work_ += pieces.back().work();
            }
        }
        if ((int64_t)shrunk.size() < size) shrunk.resize(size);
        E* h = shrunk.data();
        for (Piece<E>& piece : pieces) {
            piece.h = h;
            h += (piece.end - piece.begin) * piece.padded;
        }
        pieces_ = pieces.data();
        pieces_end_ = pieces_ + pieces.size();
        if (!are_few()) cut();
    }

    // Row j of a piece; after an odd number of rows the last one again.
    const E* a_of(const Piece<E>& piece, int64_t j) const { return site_.template a_of<E>(piece.rows[j], piece.slice); }
    const E* b_of(const Piece<E>& piece, int64_t j) const {
        return site_.template b_of<E>(piece.rows[std::min(j, piece.live - 1)], piece.slice);
    }

    // Approximate number of multiply-adds.
    int64_t work() const { return work_ * (site_.in_features + site_.out_features / site_.num_slices); }

    bool are_few() const { return num_tokens_ <= FEW; }

    // The deltas are added in two phases. The first has `team` parts, and may run alongside other work on x and y.
    void begin(int64_t part, int team) const {
        if (are_few()) shrink(int(part), team);
    }

    // Parts of the second phase: outputs, a multiple of `unit`, or, of many tokens, tokens.
    int64_t num_parts(int team) const { return are_few() ? team : num_tiles_; }
    void finish(int64_t part, int team, int64_t unit) const {
        if (are_few()) {
            const int64_t out = site_.out_features, units = (out + unit - 1) / unit;
            return expand(units * part / team * unit, std::min(units * (part + 1) / team * unit, out));
        }
        const Tile<E>& tile = tiles_[part];
        for (const Piece<E>* piece = tile.first; piece < tile.last; piece++) {
            const int64_t start = site_.slice_starts[piece->slice];
            shrink(*piece, tile.begin, tile.end, 0, piece->live);
            expand(*piece, tile.begin, tile.end, y_ + start, 0, site_.slice_starts[piece->slice + 1] - start);
        }
    }

    // The share of thread `number` in the team's shrink.
    void shrink(int number, int team) const {
        share(TILE, number, team, [&](const Piece<E>& piece, int32_t begin, int32_t end, int64_t first, int64_t last) {
            shrink(piece, begin, end, first, last);
        });
    }

    // Expands to outputs [first, last) of all tokens, after the shrink.
    void expand(int64_t first, int64_t last) const {
        for (const Piece<E>* piece = pieces_; piece < pieces_end_; piece++) {
            const int64_t start = site_.slice_starts[piece->slice], stop = site_.slice_starts[piece->slice + 1];
            const int64_t from = std::max(first, start) - start, to = std::min(last, stop) - start;
            if (from < to) expand(*piece, piece->begin, piece->end, y_ + start, from, to);
        }
    }

    // Rows that `shrink` and `expand` of these outputs read, in this order, up to `most` bytes.
    void spans(int number, int team, int64_t first, int64_t last, int64_t most, std::vector<Span>& found) const {
        found.clear();
        auto add = [&](const E* p, int64_t count) {
            if (most > 0) found.push_back({(const char*)p, (const char*)(p + count)});
            most -= count * sizeof(E);
        };
        share(TILE, number, team, [&](const Piece<E>& piece, int32_t begin, int32_t, int64_t from, int64_t to) {
            if (begin > piece.begin) return;  // rows of other threads
            for (int64_t j = from; j < to; j++) add(a_of(piece, j), site_.in_features);
        });
        for (const Piece<E>* piece = pieces_; piece < pieces_end_; piece++) {
            const int64_t start = site_.slice_starts[piece->slice], stop = site_.slice_starts[piece->slice + 1];
            const int64_t from = std::max(first, start) - start, to = std::min(last, stop) - start;
            for (int64_t j = 0; j < piece->live && from < to; j++) add(b_of(*piece, j) + from, to - from);
        }
    }

  private:
    // Calls f(piece, begin, end, first, last) for tokens [begin, end) of the list and rows [first, last). Each thread of
    // the team gets its own part of the work; with fewer than `most` tokens a part has only SHARE rows.
    template <typename F>
    void share(int most, int number, int team, F f) const {
        int64_t done = 0;
        for (const Piece<E>* piece = pieces_; piece < pieces_end_; piece++) {
            const int64_t rows = piece->end - piece->begin < most ? SHARE : piece->live;
            for (int32_t begin = piece->begin; begin < piece->end; begin += TILE) {
                const int32_t end = std::min(begin + TILE, piece->end);
                for (int64_t first = 0; first < piece->live; first += rows) {
                    const int64_t last = std::min(first + rows, piece->live), work = (end - begin) * (last - first);
                    if ((2 * done + work) * team / (2 * work_) == number) f(*piece, begin, end, first, last);
                    done += work;
                }
            }
        }
    }

    void cut() {
        static thread_local std::vector<Tile<E>> tiles;
        tiles.clear();
        for (const Piece<E>*first = pieces_, *last; first < pieces_end_; first = last) {
            for (last = first; last < pieces_end_ && last->begin == first->begin;) last++;
            for (int32_t begin = first->begin; begin < first->end; begin += TILE)
                tiles.push_back({first, last, begin, std::min(begin + TILE, first->end)});
        }
        tiles_ = tiles.data();
        num_tiles_ = tiles.size();
    }

    void shrink(const Piece<E>& piece, int32_t begin, int32_t end, int64_t first, int64_t last) const {
        const int64_t n = site_.in_features, stride = piece.padded;
        const E** const a = pointers(last - first);
        for (int64_t j = first; j < last; j++) a[j - first] = a_of(piece, j);
        const E* x[TOKENS];
        E* h = piece.h + (begin - piece.begin) * stride;
        if (last == piece.live && last < stride)
            for (int32_t i = begin; i < end; i++) put(h + (i - begin) * stride + last, 0.0f);
        h += first;
        int32_t i = begin;
        for (; i + TOKENS <= end; i += TOKENS, h += TOKENS * stride) {
            for (int t = 0; t < TOKENS; t++) x[t] = x_ + step_.tokens[i + t] * n;
            all_dots<TOKENS>(x, a, int(last - first), n, h, stride);
        }
        for (; i < end; i++, h += stride) {
            x[0] = x_ + step_.tokens[i] * n;
            all_dots<1>(x, a, int(last - first), n, h, stride);
        }
    }

    // Expands to outputs [first, last) of the slice, which begins at `out`.
    void expand(const Piece<E>& piece, int32_t begin, int32_t end, E* out, int64_t first, int64_t last) const {
        const int64_t stride = piece.padded;
        const E** const b = pointers(stride);
        for (int64_t j = 0; j < stride; j++) b[j] = b_of(piece, j);
        E* y[TOKENS];
        // One group of tokens reads whole rows; several groups read parts, which stay in the cache for the next group.
        const int64_t most = end - begin > TOKENS ? OUTPUTS : last - first;
        for (int64_t from = first; from < last; from += most) {
            const int64_t to = std::min(from + most, last);
            const E* h = piece.h + (begin - piece.begin) * stride;
            int32_t i = begin;
            for (; i + TOKENS <= end; i += TOKENS, h += TOKENS * stride) {
                for (int t = 0; t < TOKENS; t++) y[t] = out + step_.tokens[i + t] * site_.out_features;
                accumulate<TOKENS>(y, h, stride, b, int(stride), from, to);
            }
            for (; i < end; i++, h += stride) {
                y[0] = out + step_.tokens[i] * site_.out_features;
                accumulate<1>(y, h, stride, b, int(stride), from, to);
            }
        }
    }

    static const E** pointers(int64_t count) {
        static thread_local std::vector<const E*> memory;
        if ((int64_t)memory.size() < count) memory.resize(count);
        return memory.data();
    }

    const Site& site_;
    const Step& step_;
    const E* x_;
    E* y_;
    const Piece<E>*pieces_, *pieces_end_;
    const Tile<E>* tiles_ = nullptr;
    int64_t num_tiles_ = 0;
    int64_t num_tokens_ = 0;
    int64_t work_ = 0;  // tokens times rows
};

}  // namespace
}  // namespace outrider
