// Attention of ragged rows over the paged cache, which is read in place: rotates queries and keys, writes keys and
// values to their slots, then softmax(q K^T / sqrt(D)) V with a running maximum (Milakov and Gimelshein 2018).
//
// Keys are read in tiles at fixed positions, each for all query heads of its KV head and for several queries at once.
// A query's sums run in the order of positions, one key after another; a key that it does not see adds an
// exact zero. So the result does not depend, bit for bit, on the other queries, rows, chunks, blocks or threads.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "float8.h"
#include "small_products.h"
#include "team.h"

using namespace outrider;

namespace {

constexpr int MAX_DIM = 576;        // largest head
constexpr int TILE_KEYS = 64;       // keys that are read at once
constexpr int TILE_ROWS = 32;       // query vectors for a tile of keys
constexpr float KEY_LIMIT = 1e30f;  // the number of torch.py
constexpr float LEAST = -3e38f;     // maximum before the first key: finite, so that a difference is never NaN
constexpr int64_t WHOLE_ROW = INT64_MIN;  // window of layers in which the queries of a row see each other
constexpr int64_t MIN_PARALLEL_WORK = 1 << 19;  // multiply-adds below which waking threads costs more than it saves

struct Step {                       // what all layers share
    int64_t num_tokens, num_rows, num_heads, num_kv_heads, head_dim, block_size, dtype, first_key;
    int64_t rotary_dim;             // elements of a head that are rotated, from the first on
    int64_t interleaved;            // adjacent elements are the pairs
    double scale, soft_cap;         // of the scores; 0: 1 / sqrt(D), and no cap
    const int64_t* slots;           // [T] slot of each token's KV
    const int64_t* query_lens;      // [B] in this and the next three
    const int64_t* starts;          // first position
    const int64_t* token_starts;    // first token
    const int64_t* table_starts;    // first of the row's blocks in `blocks`
    const int64_t* blocks;
};

struct Layer {                      // strides in elements; heads of a token side by side
    const void *q, *k, *v;          // k null: the caches have all keys and values
    int64_t token_stride;           // of q, k and v
    void *key_cache, *value_cache;  // [Hk, num_blocks, block_size, D]; the same if keys are the values too
    int64_t head_stride;            // of the caches
    int64_t window;                 // 0: none; WHOLE_ROW; below 0: chunks of -window positions
    const void *cos, *sin;          // of each token [D], the sines of the first half negated
    int64_t rope_stride;
    const int64_t* rope_rows;       // [T] each token's row of cos and sin; null: their rows are the tokens'
    const float* norm_scale;        // [H + Hk, D]: see kernels/rms_norm; null: no normalisation
    float norm_root;
    const float* sinks;             // [H]: score of a key without a value, for each head; null: none
    void* out;                      // [T, H, D]
};

struct Item {                       // up to TILE_ROWS query vectors of a row and KV head, numbered query * fold + head
    int64_t row, kv_head;
    int64_t begin, end;
    int64_t first, stop;            // positions that any of the queries sees
};

inline int64_t first_seen(const Step& step, const Layer& layer, int64_t position) {
    if (layer.window == WHOLE_ROW) return step.first_key;
    if (layer.window < 0) return std::max(step.first_key, position / -layer.window * -layer.window);
    return layer.window ? std::max(step.first_key, position - layer.window + 1) : step.first_key;
}

// Moves the even elements of x [size] before the odd ones.
inline void separate_pairs(float* x, int64_t size) {
    float odd[MAX_DIM / 2];
    for (int64_t i = 0; i < size / 2; i++) {
        odd[i] = x[2 * i + 1];
        x[i] = x[2 * i];
    }
    std::memcpy(x + size / 2, odd, size / 2 * sizeof(float));
}

// Undoes separate_pairs.
inline void join_pairs(float* x, int64_t size) {
    float first[MAX_DIM / 2];
    std::memcpy(first, x, size / 2 * sizeof(float));
    for (int64_t i = 0; i < size / 2; i++) {
        x[2 * i + 1] = x[size / 2 + i];
        x[2 * i] = first[i];
    }
}

// y = x, normalised and rotated; `head` counts query heads, then KV heads. y has room for whole vectors.
template <typename E>
void prepare_head(const Step& step, const Layer& layer, const E* x, int64_t token, int64_t head, float* y) {
    const int64_t dim = step.head_dim, half = step.rotary_dim / 2;
    alignas(64) float plain[MAX_DIM + LANES];
    Vec squares{};
    for (int64_t i = 0; i < dim; i += LANES) {
        Vec value = load(x + i, dim - i);
        store(plain + i, value);
        squares += value * value;
    }
    if (layer.norm_scale) {
        const float* scale = layer.norm_scale + head * dim;
        float inverse = 1.0f / std::sqrt(sum(squares) + layer.norm_root * layer.norm_root);
        for (int64_t i = 0; i < dim; i += LANES)
            store(plain + i, load(plain + i) * inverse * load(scale + i, dim - i));
    }
    if (step.interleaved) separate_pairs(plain, step.rotary_dim);
    const int64_t angle = (layer.rope_rows ? layer.rope_rows[token] : token) * layer.rope_stride;
    const E* cos = (const E*)layer.cos + angle;
    const E* sin = (const E*)layer.sin + angle;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        Vec first = load(plain + i, count), second = load(plain + half + i, count);
        store(y + i, first * load(cos + i, count) + second * load(sin + i, count), count);
        store(y + half + i, second * load(cos + half + i, count) + first * load(sin + half + i, count), count);
    }
    if (step.interleaved) join_pairs(y, 2 * half);
    for (int64_t i = 2 * half; i < dim; i += LANES) store(y + i, load(plain + i, dim - i), dim - i);
}

// Writes values that are not finite as 0, and limits keys: see `write_kv` in torch.py. C: the caches' type.
template <typename E, typename C>
void write_token(const Step& step, const Layer& layer, int64_t token) {
    const int64_t dim = step.head_dim;
    for (int64_t head = 0; head < step.num_kv_heads; head++) {
        const int64_t place = head * layer.head_stride + step.slots[token] * dim;
        const E* value = (const E*)layer.v + token * layer.token_stride + head * dim;
        alignas(64) float key[MAX_DIM + LANES];
        prepare_head(step, layer, (const E*)layer.k + token * layer.token_stride + head * dim, token,
                     step.num_heads + head, key);
        for (int64_t i = 0; i < dim; i += LANES) {
            Vec k = load(key + i, dim - i), v = load(value + i, dim - i);
            k = select(k - k == 0.0f, k, zeros());
            k = select(k > KEY_LIMIT, all(KEY_LIMIT), select(k < -KEY_LIMIT, all(-KEY_LIMIT), k));
            store((C*)layer.key_cache + place + i, k, dim - i);
            if (layer.value_cache == layer.key_cache) continue;
            store((C*)layer.value_cache + place + i, select(v - v == 0.0f, v, zeros()), dim - i);
        }
    }
}

// Finds the keys and values of an item's tile at position `base`; returns their number. The entries after them
// are those of the last one.
template <typename C>
int64_t places(const Step& step, const Layer& layer, const Item& item, int64_t base, const C** keys, const C** values) {
    const int64_t* table = step.blocks + step.table_starts[item.row];
    const int64_t offset = item.kv_head * layer.head_stride, size = step.block_size;
    const int64_t count = std::min<int64_t>(TILE_KEYS, item.stop - base);
    int64_t key = 0;
    for (int64_t block = base / size, within = base % size; key < count; block++, within = 0) {
        int64_t place = offset + (table[block] * size + within) * step.head_dim;
        for (const int64_t end = std::min(count, key + size - within); key < end; key++, place += step.head_dim) {
            keys[key] = (const C*)layer.key_cache + place;
            values[key] = (const C*)layer.value_cache + place;
        }
    }
    std::fill(keys + count, keys + TILE_KEYS, keys[count - 1]);
    std::fill(values + count, values + TILE_KEYS, values[count - 1]);
    return count;
}

// The state of one item. Keys and values of a cache of float8 are widened, tile by tile, to bfloat16.
template <typename E, typename C>
class Tile {
  public:
    Tile(const Step& step, const Layer& layer, const Item& item) : step_(step), layer_(layer), item_(item) {
        dim_ = step.head_dim;
        padded_ = (dim_ + LANES - 1) / LANES * LANES;
        fold_ = step.num_heads / step.num_kv_heads;
        num_rows_ = item.end - item.begin;
        const int64_t token = step.token_starts[item.row], head = item.kv_head * fold_;
        for (int64_t n = 0; n < num_rows_; n++) {
            const int64_t query = (item.begin + n) / fold_, member = (item.begin + n) % fold_;
            const E* x = (const E*)layer.q + (token + query) * layer.token_stride + (head + member) * dim_;
            prepare_head(step, layer, x, token + query, head + member, queries_ + n * padded_);
            const int64_t position = step.starts[item.row] + query;
            last_[n] = layer.window == WHOLE_ROW ? item.stop - 1 : position;
            first_[n] = first_seen(step, layer, position);
            maxima_[n] = layer.sinks ? std::max(layer.sinks[head + member], LEAST) : LEAST;
            totals_[n] = zeros();
            if (layer.sinks) totals_[n][0] = 1.0f;  // exp(sink - maximum)
        }
        std::memset(sums_, 0, num_rows_ * padded_ * sizeof(float));
    }

    // `next` is the item that will probably follow, or null.
    void run(const Item* next) {
        for (int64_t key = item_.first / TILE_KEYS * TILE_KEYS; key < item_.stop; key += TILE_KEYS)
            attend(key, std::min<int64_t>(TILE_KEYS, item_.stop - key), next);
        finish();
    }

  private:
    using W = std::conditional_t<std::is_same_v<C, fp8>, bf16, C>;
    static constexpr int WIDENED = std::is_same_v<C, fp8> ? TILE_KEYS * MAX_DIM : 1;

    // Attends to the keys at positions [base, base + count).
    void attend(int64_t base, int64_t count, const Item* next) {
        const W* values[TILE_KEYS];
        load_keys(base, count, next, values);
        const int64_t vecs = (count + LANES - 1) / LANES;
        const float* columns = columns_;
        product<false, float>(queries_, padded_, [columns](int64_t d) { return columns + d * TILE_KEYS; }, dim_,
                              vecs * LANES, scores_, TILE_KEYS, num_rows_);
        for (int64_t n = 0; n < num_rows_; n++) weigh(n, base, vecs);
        if (num_rows_ <= ROWS && dim_ == padded_) {
            product<true, W>(scores_, TILE_KEYS, [&values](int64_t key) { return values[key]; }, count, padded_, sums_,
                             padded_, num_rows_);
            return;
        }
        for (int64_t key = 0; key < count; key++)
            for (int64_t d = 0; d < dim_; d += LANES)
                store(columns_ + key * padded_ + d, load(values[key] + d, dim_ - d));
        const int64_t padded = padded_;
        product<true, float>(scores_, TILE_KEYS, [columns, padded](int64_t key) { return columns + key * padded; },
                             count, padded_, sums_, padded_, num_rows_);
    }

    // Transposes keys into columns_ and finds the values. Prefetches the next tile, of this item or of `next`.
    void load_keys(int64_t base, int64_t count, const Item* next, const W** values) {
        const W* keys[TILE_KEYS];
        const C *next_keys[TILE_KEYS], *next_values[TILE_KEYS];
        if constexpr (std::is_same_v<C, W>) {
            places(step_, layer_, item_, base, keys, values);
        } else {
            const C *short_keys[TILE_KEYS], *short_values[TILE_KEYS];
            places(step_, layer_, item_, base, short_keys, short_values);
            for (int64_t key = 0; key < TILE_KEYS; key++) {
                const int64_t place = std::min(key, count - 1) * MAX_DIM;
                keys[key] = wide_keys_ + place;
                values[key] = wide_values_ + place;
                if (key >= count) continue;
                widen(short_keys[key], dim_, wide_keys_ + place);
                widen(short_values[key], dim_, wide_values_ + place);
            }
        }
        int64_t ahead = 0;
        if (base + TILE_KEYS < item_.stop)
            ahead = places(step_, layer_, item_, base + TILE_KEYS, next_keys, next_values);
        else if (next)
            ahead = places(step_, layer_, *next, next->first / TILE_KEYS * TILE_KEYS, next_keys, next_values);
        int64_t fetched = 0;
        for (int64_t key = 0; key < count; key += LANES) {
            const int64_t until = key + LANES < count ? std::min<int64_t>(ahead, key + LANES) : ahead;
            for (; fetched < until; fetched++)
                for (int64_t d = 0; d < dim_; d += 64 / sizeof(C)) {
                    __builtin_prefetch(next_keys[fetched] + d);
                    __builtin_prefetch(next_values[fetched] + d);
                }
            put_columns(keys + key, dim_, columns_ + key, TILE_KEYS);
        }
    }

    // Turns row n's scores into weights exp(score - maximum), and rescales its sums to the new maximum.
    void weigh(int64_t n, int64_t base, int64_t vecs) {
        const float scale = step_.scale > 0 ? (float)step_.scale : 1.0f / std::sqrt((float)dim_);
        const float cap = (float)step_.soft_cap;
        // Within the tile; clamped, so that 32 bits hold them.
        const int32_t first = (int32_t)std::clamp<int64_t>(first_[n] - base, 0, TILE_KEYS);
        const int32_t last = (int32_t)std::clamp<int64_t>(last_[n] - base, -1, TILE_KEYS);
        float* scores = scores_ + n * TILE_KEYS;
        Vec most = all(maxima_[n]);
        for (int64_t v = 0; v < vecs; v++) {
            VecI32 key = lane_numbers() + (int32_t)(v * LANES);
            VecI32 seen = (key >= first) & (key <= last);
            Vec score = load(scores + v * LANES) * scale;
            if (cap > 0) score = cap - 2.0f * cap / (1.0f + exponential(score * (2.0f / cap)));  // cap tanh(score / cap)
            score = select(seen, score, all(-__builtin_inff()));
            store(scores + v * LANES, score);
            most = select(score > most, score, most);
        }
        const float maximum = largest(most);
        if (maximum > maxima_[n]) {
            Vec factor = exponential(all(maxima_[n] - maximum));
            totals_[n] *= factor;
            for (int64_t d = 0; d < padded_; d += LANES)
                store(sums_ + n * padded_ + d, load(sums_ + n * padded_ + d) * factor);
            maxima_[n] = maximum;
        }
        for (int64_t v = 0; v < vecs; v++) {
            Vec weight = exponential(load(scores + v * LANES) - maximum);
            store(scores + v * LANES, weight);
            totals_[n] += weight;
        }
    }

    void finish() {
        const int64_t token = step_.token_starts[item_.row], head = item_.kv_head * fold_;
        for (int64_t n = 0; n < num_rows_; n++) {
            const int64_t query = (item_.begin + n) / fold_, member = (item_.begin + n) % fold_;
            E* out = (E*)layer_.out + ((token + query) * step_.num_heads + head + member) * dim_;
            const float inverse = 1.0f / sum(totals_[n]);
            for (int64_t d = 0; d < dim_; d += LANES)
                store(out + d, load(sums_ + n * padded_ + d) * inverse, dim_ - d);
        }
    }

    const Step& step_;
    const Layer& layer_;
    const Item& item_;
    int64_t dim_, padded_, fold_, num_rows_;
    int64_t first_[TILE_ROWS], last_[TILE_ROWS];  // positions that each query sees
    float maxima_[TILE_ROWS];
    Vec totals_[TILE_ROWS];                       // of the weights, lane by lane
    alignas(64) float queries_[TILE_ROWS * MAX_DIM];
    alignas(64) float sums_[TILE_ROWS * MAX_DIM];
    alignas(64) float scores_[TILE_ROWS * TILE_KEYS];
    alignas(64) float columns_[MAX_DIM * TILE_KEYS];  // keys by dimension, then values by key
    alignas(64) W wide_keys_[WIDENED], wide_values_[WIDENED];
};

// Later queries see more keys and go first, so that threads end together.
std::vector<Item> items_of(const Step& step, const Layer& layer, int64_t* work) {
    const int64_t fold = step.num_heads / step.num_kv_heads;
    std::vector<Item> items;
    *work = 0;
    for (int64_t row = 0; row < step.num_rows; row++) {
        const int64_t count = step.query_lens[row] * fold, length = step.starts[row] + step.query_lens[row];
        const bool is_whole = layer.window == WHOLE_ROW;
        const int64_t seen = layer.window == 0 || is_whole
            ? length : std::min(length, std::abs(layer.window) + step.query_lens[row]);
        *work += (8 + count) * seen * step.num_kv_heads * step.head_dim;
        for (int64_t begin = (count - 1) / TILE_ROWS * TILE_ROWS; begin >= 0; begin -= TILE_ROWS) {
            const int64_t end = std::min(begin + TILE_ROWS, count);
            const int64_t first = first_seen(step, layer, step.starts[row] + begin / fold);
            const int64_t stop = is_whole ? length : step.starts[row] + (end - 1) / fold + 1;
            for (int64_t head = 0; head < step.num_kv_heads; head++)
                items.push_back({row, head, begin, end, first, stop});
        }
    }
    return items;
}

template <typename E, typename C>
void run(const Step& step, const Layer& layer) {
    int64_t work;
    const std::vector<Item> items = items_of(step, layer, &work);
    const int64_t count = (int64_t)items.size(), tokens = step.num_tokens;
    const int team = team_for(work >= MIN_PARALLEL_WORK);
    const auto write = [&](int64_t part) {
        if (!layer.k) return;
        for (int64_t i = tokens * part / team; i < tokens * (part + 1) / team; i++) write_token<E, C>(step, layer, i);
    };
    const auto attend = [&](int64_t i) {
        const int64_t next = i + team;
        Tile<E, C>(step, layer, items[i]).run(next < count ? &items[next] : nullptr);
    };
    parallel(team, Phase{team, write}, Phase{count, attend});
}

}  // namespace

// Writes the new keys and values and attends: `step` is a Step, the rest as in Layer. The caches are of the type of the
// queries, or FLOAT8.
extern "C" void outrider_attention(
    const void* step, const void* q, const void* k, const void* v, int64_t token_stride,
    void* key_cache, void* value_cache, int64_t head_stride, int64_t cache_dtype, int64_t window, const void* cos,
    const void* sin, int64_t rope_stride, const int64_t* rope_rows, const float* norm_scale, float norm_root,
    const float* sinks, void* out) {
    const Layer layer{q, k, v, token_stride, key_cache, value_cache, head_stride, window, cos, sin,
                      rope_stride, rope_rows, norm_scale, norm_root, sinks, out};
    const Step& shared = *(const Step*)step;
    const bool is_short = cache_dtype == FLOAT8;
    if (shared.dtype == FLOAT32)
        is_short ? run<float, fp8>(shared, layer) : run<float, float>(shared, layer);
    else
        is_short ? run<bf16, fp8>(shared, layer) : run<bf16, bf16>(shared, layer);
}
