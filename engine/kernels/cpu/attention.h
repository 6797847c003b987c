// Attention over a paged cache.
//
// One query reads the cache in place. Many queries of a sequence pack its keys and values in panels first, block by
// block, and are two products with those. So are single queries of several sequences with the keys that these have in
// common: each query puts what it found there together with what it finds among its own keys.

#pragma once

#include "common_keys.h"
#include "products.h"

extern "C" {

// How scores become weights: raw ones are multiplied by `scale`, and then bounded by `softcap` (0: by nothing) through
// its tanh. `sinks` [heads], if any, are scores that take part among the weights and have no value.
struct Scoring {
    const float* sinks;
    float scale, softcap;
};

}  // extern "C"

namespace {

constexpr int MOST_DIM = 256;    // of a head
constexpr int64_t MOST_HEADS = 64;  // of a query at once, unless more of them share keys
constexpr int QUERIES = 512;     // of one piece of attention, each of which packs all keys
constexpr int LEAST_QUERIES = 64;   // of one piece, where larger ones would be too few for the threads
constexpr int FETCHED = 64;      // keys before those that are packed

// Queries `first..first + count` of a sequence.
struct Piece {
    int64_t sequence, first, count;
};

inline std::vector<Piece> cut(const Batch& batch, bool alone, int64_t kv_heads, int threads) {
    int64_t most = QUERIES;
    while (most > LEAST_QUERIES && batch.tokens / most * kv_heads < 4 * threads) most /= 2;
    std::vector<Piece> pieces;
    for (int64_t b = 0; b < batch.sequences; b++) {
        const int64_t count = batch.query_start[b + 1] - batch.query_start[b];
        const int64_t size = alone || count <= 2 ? 1 : most;
        for (int64_t at = 0; at < count; at += size) pieces.push_back({b, at, std::min(size, count - at)});
    }
    return pieces;
}

// Raw scores [count] of one row, of which `from..to` are seen -> weights, unscaled, and zeros elsewhere. They are
// relative to the highest score, or to `before` if that is higher.
inline Sum weigh(float* scores, int64_t from, int64_t to, int64_t count, float scale, float before = -INFINITY) {
    Floats peaks = Floats{} + before, totals{};
    int64_t i = from;
    for (; i + WIDE <= to; i += WIDE) peaks = greater(read(scores + i), peaks);
    const Floats rest = read_some(scores + i, to - i, -INFINITY);
    const float peak = greatest(greater(rest, peaks));
    for (i = from; i + WIDE <= to; i += WIDE) {
        const Floats weight = exponential((read(scores + i) - peak) * scale);
        write(scores + i, weight);
        totals += weight;
    }
    const Floats weight = exponential((rest - peak) * scale);
    for (int64_t j = i; j < to; j++) scores[j] = weight[j - i], totals[j - i] += weight[j - i];
    std::fill(scores, scores + from, 0.0f);
    std::fill(scores + to, scores + count, 0.0f);
    return {peak, sum(totals)};
}

// Raw scores [count] -> raw scores that are bounded once they are multiplied by the scale.
inline void bound(float* scores, int64_t count, const Scoring& by) {
    if (!by.softcap) return;
    const float steep = by.scale / by.softcap, back = by.softcap / by.scale;
    const auto bounded = [&](Floats score) {
        const Floats x = score * steep, part = exponential(x < 0.0f ? x + x : -x - x);
        const Floats tanh = (1.0f - part) / (1.0f + part);
        return (x < 0.0f ? -tanh : tanh) * back;
    };
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) write(scores + i, bounded(read(scores + i)));
    const Floats rest = bounded(read_some(scores + i, count - i, 0.0f));
    for (int64_t j = i; j < count; j++) scores[j] = rest[j - i];
}

// All weights of a head, its sink's included.
inline float whole(const Sum& sum, const Scoring& by, int64_t head) {
    return by.sinks ? sum.total + std::exp(by.sinks[head] - sum.peak * by.scale) : sum.total;
}

// What queries found among common keys: of each a row of `width` numbers for each head, [dim] weighed values and their
// `Sum`.
struct Found {
    float* at;
    int64_t heads, dim, most;  // stretches of a sequence

    int64_t width() const { return dim + WIDE; }
    float* of(int64_t sequence, int64_t number, int64_t head) const {
        return at + ((sequence * most + number) * heads + head) * width();
    }
};

// The product of 2 * WIDE inputs with as many, on top of `total`.
inline Floats along(Floats total, const bf16* a, const bf16* b) {
#if defined(__AVX512BF16__)
    return Floats(_mm512_dpbf16_ps(__m512(total), __m512bh(load<__m512i>(a)), __m512bh(load<__m512i>(b))));
#else
    const Words left = load<Words>(a), right = load<Words>(b);
    const Words even[2] = {left << 16, right << 16}, odd[2] = {left & 0xFFFF0000u, right & 0xFFFF0000u};
    total += load<Floats>(&even[0]) * load<Floats>(&even[1]);
    return total + load<Floats>(&odd[0]) * load<Floats>(&odd[1]);
#endif
}

template <class K> inline Floats along(Floats total, const K* a, const float* b) {
    total += read(a) * read(b);
    return total + read(a + WIDE) * read(b + WIDE);
}

// Between the numbers of a vector, as `widen` has them.
template <class K> constexpr int APART = 1;
template <> constexpr int APART<bf16> = 2;

// 2 * WIDE numbers as two vectors; of bfloat16 the even and the odd ones.
inline void widen(const bf16* from, Floats& first, Floats& second) {
    const Words pair = load<Words>(from), even = pair << 16, odd = pair & 0xFFFF0000u;
    first = load<Floats>(&even), second = load<Floats>(&odd);
}

template <class K> inline void widen(const K* from, Floats& first, Floats& second) {
    first = read(from), second = read(from + WIDE);
}

// Two vectors, as `widen` has them of K, back to numbers side by side.
template <class K, class T> inline void narrow(T* to, Floats first, Floats second) {
    if constexpr (APART<K> == 1)
        write(to, first), write(to + WIDE, second);
    else
        for (int i = 0; i < WIDE; i++) put(to + 2 * i, first[i]), put(to + 2 * i + 1, second[i]);
}

// Adds weighed values of `found` to those that are `mixed` [dim] as `widen` has them of K, of which `sum` is known.
template <class K> inline void join(float* mixed, Sum& sum, const float* found, int64_t dim, float scale) {
    const float peak = std::max(sum.peak, found[dim]);
    const float own = std::exp((sum.peak - peak) * scale), other = std::exp((found[dim] - peak) * scale);
    sum = {peak, sum.total * own + found[dim + 1] * other};
    for (int64_t d = 0; d < dim; d += 2 * WIDE)
        for (int half = 0; half < 2; half++) {
            const float* from = found + d + half * (APART<K> > 1 ? 1 : WIDE);
            Floats more;
            for (int i = 0; i < WIDE; i++) more[i] = from[i * APART<K>];
            float* to = mixed + d + half * WIDE;
            write(to, read(to) * own + more * other);
        }
}

// What is fetched while a block's head of keys or of values is read: a part of each of those that come SOON, a line of
// each in turn, since they are about a page each, see `Ahead`. [measured] Bytes, of which it takes more computing to
// read as many, are read more slowly so, and have one at a time.
constexpr int SOON = PAGES;
template <class K> struct Coming {
    static constexpr int64_t SIDE_BY_SIDE = sizeof(K) > 1 ? SOON : 1;
    const char* at[SIDE_BY_SIDE];

    // The n-th BYTES of what is read: a line, or some, or what others have with it.
    template <uint64_t BYTES> void fetch(uint64_t n) const {
        if (n * BYTES % LINE) return;
        for (uint64_t line = n * BYTES / LINE, end = line + (BYTES + LINE - 1) / LINE; line < end; line++)
            __builtin_prefetch(at[line % SIDE_BY_SIDE] + line / SIDE_BY_SIDE * LINE, 0, 2);
    }
};

// Scores of N queries q [N, D] with one block's keys `begin..end`, `coming` being fetched meanwhile.
template <int N, class Q, class K>
inline void score(const Q* q, const K* keys, const Coming<K>& coming, int64_t dim, int64_t begin, int64_t end,
                  float* scores, int64_t stride) {
    for (int64_t j = begin; j < end; j++) {
        Floats total[N]{};
        for (int64_t d = j * dim; d < (j + 1) * dim; d += 2 * WIDE)
            coming.template fetch<2 * WIDE * sizeof(K)>(d / (2 * WIDE));
        for (int64_t d = 0; d < dim; d += 2 * WIDE)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) total[n] = along(total[n], keys + j * dim + d, q + n * dim + d);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) scores[n * stride + j - begin] = sum(total[n]);
    }
}

// mixed [N, D] += a block's values `begin..end`, weighed.
template <int N, class K>
inline void mix(const float* weights, int64_t stride, const K* values, const Coming<K>& coming, int64_t size,
                int64_t dim, int64_t begin, int64_t end, float* mixed) {
    for (int64_t d = 0; d < dim; d += 2 * WIDE) {
        Floats parts[N][2];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            parts[n][0] = read(mixed + n * dim + d), parts[n][1] = read(mixed + n * dim + d + WIDE);
        for (int64_t j = begin; j < end; j++) {
            Floats first, second;
            coming.template fetch<2 * WIDE * sizeof(K)>(d / (2 * WIDE) * size + j);
            widen(values + j * dim + d, first, second);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const float weight = weights[n * stride + j - begin];
                parts[n][0] += first * weight, parts[n][1] += second * weight;
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            write(mixed + n * dim + d, parts[n][0]), write(mixed + n * dim + d + WIDE, parts[n][1]);
    }
}

// Multiplies scores or weights of a block's keys by the factors of these, behind its numbers.
inline void scale_by(const int8_t* at, int64_t numbers, int64_t begin, int64_t end, float* of_keys) {
    const float* factors = reinterpret_cast<const float*>(at + numbers);
    for (int64_t j = begin; j < end; j++) of_keys[j - begin] *= factors[j];
}

// One query of `count` heads of keys from `kv_head` on, each with `shared` of its own, against the keys `low..high` of
// its sequence, which are kept as K: q [count * shared, D] -> out [heads * D], together with what it found `before`,
// which are `stretches` of its sequence. A block's heads lie side by side, and are read so.
template <class K, class T>
void attend_one(const T* q, const Cache& cache, const int32_t* table, int64_t kv_head, int64_t count, int64_t shared,
                int64_t low, int64_t high, const Scoring& by, const Found& before, int64_t sequence, int64_t stretches,
                const Row<T>& out) {
    const int64_t size = cache.block_size, dim = cache.head_dim, num = high - low, heads = count * shared;
    const int64_t first = low / size, pieces = ((high - 1) / size + 1 - first) * count;
    Scratch& own = scratch();
    float* scores = room(own.scores, heads * num);
    float* mixed = room(own.sums, heads * dim);
    std::fill_n(mixed, heads * dim, 0.0f);
    constexpr bool IN_BYTES = std::is_same<K, int8_t>::value;
    const std::conditional_t<IN_BYTES, float, T>* asked;  // what keys are multiplied with
    if constexpr (std::is_same<decltype(asked), const T*>::value) {
        asked = q;
    } else {
        float* wide = room(own.inputs, heads * dim);
        for (int64_t d = 0; d < heads * dim; d += WIDE) write(wide + d, read(q + d));
        asked = wide;
    }
    // the keys, block after block and in it head after head; then the values
    const auto piece = [&](int64_t i) {
        const K* all = static_cast<const K*>(i < pieces ? cache.keys : cache.values);
        const int64_t at = i < pieces ? i : i - pieces;
        return all + table[first + at / count] * cache.block_stride + (kv_head + at % count) * cache.head_stride;
    };
    const auto each = [&](int64_t begin, auto body) {
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t start = (first + i / count) * size;
            constexpr int64_t SIDE_BY_SIDE = Coming<K>::SIDE_BY_SIDE;
            const int64_t at = begin + i, part = at % SIDE_BY_SIDE, next = at - part + SOON;
            Coming<K> coming;
            for (int64_t n = 0; n < SIDE_BY_SIDE; n++)
                coming.at[n] = reinterpret_cast<const char*>(piece(std::min(next + n, 2 * pieces - 1))) +
                               part * (size * dim * int64_t(sizeof(K)) / SIDE_BY_SIDE);
            if constexpr (IN_BYTES) __builtin_prefetch(coming.at[0] + size * dim, 0, 2);
            body(piece(at), coming, i % count * shared, std::max<int64_t>(0, low - start),
                 std::min(size, high - start), std::max<int64_t>(0, start - low));
        }
    };
    each(0, [&](const K* at, const Coming<K>& coming, int64_t head, int64_t from, int64_t to, int64_t key) {
        for (int64_t g = head; g < head + shared; g += 2)
            if (g + 1 < head + shared)
                score<2>(asked + g * dim, at, coming, dim, from, to, scores + g * num + key, num);
            else
                score<1>(asked + g * dim, at, coming, dim, from, to, scores + g * num + key, num);
        if constexpr (IN_BYTES)
            for (int64_t g = head; g < head + shared; g++)
                scale_by(at, size * dim, from, to, scores + g * num + key);
    });
    Sum* sums = room(own.totals, heads);
    bound(scores, heads * num, by);
    for (int64_t g = 0; g < heads; g++) sums[g] = weigh(scores + g * num, 0, num, num, by.scale);
    each(pieces, [&](const K* at, const Coming<K>& coming, int64_t head, int64_t from, int64_t to, int64_t key) {
        if constexpr (IN_BYTES)
            for (int64_t g = head; g < head + shared; g++)
                scale_by(at, size * dim, from, to, scores + g * num + key);
        for (int64_t g = head; g < head + shared; g += 2)
            if (g + 1 < head + shared)
                mix<2>(scores + g * num + key, num, at, coming, size, dim, from, to, mixed + g * dim);
            else
                mix<1>(scores + g * num + key, num, at, coming, size, dim, from, to, mixed + g * dim);
    });
    for (int64_t g = 0; g < heads; g++) {
        for (int64_t i = 0; i < stretches; i++)
            join<K>(mixed + g * dim, sums[g], before.of(sequence, i, kv_head * shared + g), dim, by.scale);
        const float total = whole(sums[g], by, kv_head * shared + g);
        for (int64_t d = g * dim; d < (g + 1) * dim; d += 2 * WIDE)
            narrow<K>(out.of(kv_head * shared * dim + d), read(mixed + d) / total, read(mixed + d + WIDE) / total);
    }
}

// Numbers of one key, in pairs, each pair to its place of a panel: `to` is the first's, of PANEL keys a step.
template <class T> inline void scatter(const T* key, int64_t dim, T* to) {
    constexpr int PAIR = Pairs<T>::SIZE;
    for (int64_t d = 0; d < dim; d += PAIR, to += PANEL * PAIR) std::memcpy(to, key + d, sizeof(T) * PAIR);
}

// The same of WIDE keys that follow each other.
template <class T> inline void scatter_many(const T* keys, int64_t dim, T* to) {
    constexpr int PAIR = Pairs<T>::SIZE;
#if defined(__AVX512F__)
    for (int64_t d = 0; d < dim; d += WIDE * PAIR) {
        Words rows[WIDE];
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) rows[i] = load<Words>(keys + i * dim + d);
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) store(to + (d / PAIR + i) * PANEL * PAIR, rows[i]);
    }
#else
    for (int i = 0; i < WIDE; i++) scatter(keys + i * dim, dim, to + i * PAIR);
#endif
}

// `count` numbers of a value, and of the next key's, into a panel: side by side, where they are multiplied in pairs.
inline void interleave(const float* from, const float*, float* to, int64_t count) {
    std::memcpy(to, from, count * sizeof(float));
}

inline void interleave(const bf16* from, const bf16* next, bf16* to, int64_t count) {
#if defined(__AVX512BW__)
    typedef uint16_t Lanes __attribute__((vector_size(4 * WIDE)));
    Lanes lower, upper;
    for (int i = 0; i < 2 * WIDE; i++) lower[i] = i / 2 + i % 2 * 2 * WIDE, upper[i] = lower[i] + WIDE;
    for (int64_t d = 0; d < count; d += 2 * WIDE) {
        const __m512i first = load<__m512i>(from + d), second = load<__m512i>(next + d);
        store(to + 2 * d, _mm512_permutex2var_epi16(first, __m512i(lower), second));
        store(to + 2 * d + 2 * WIDE, _mm512_permutex2var_epi16(first, __m512i(upper), second));
    }
#else
    for (int64_t d = 0; d < count; d += WIDE) {
        const Words low = __builtin_convertvector(load<Halves>(from + d), Words);
        const Words high = __builtin_convertvector(load<Halves>(next + d), Words);
        store(to + 2 * d, low | high << 16);
    }
#endif
}

// Keys `low..high` of a sequence, which are kept as K, in panels of PANEL keys, and values in panels of PANEL of their
// dimensions. Behind the last, it is repeated. What comes soon is fetched meanwhile, up to `end`.
template <class K, class T>
void pack_kept(const Cache& cache, const int32_t* table, int64_t kv_head, int64_t low, int64_t high, int64_t end,
               T* keys, T* values) {
    constexpr int PAIR = Pairs<T>::SIZE;
    const int64_t size = cache.block_size, dim = cache.head_dim;
    const int64_t padded = (high - low + PANEL - 1) / PANEL * PANEL;
    const auto block = [&](const void* all, int64_t at) {
        return static_cast<const K*>(all) + table[at / size] * cache.block_stride + kv_head * cache.head_stride;
    };
    const auto place = [&](const void* all, int64_t at) { return block(all, at) + at % size * dim; };
    // Calls `many` or `each` for the next WIDE keys, as they lie one after the other or not.
    const auto walk = [&](const void* all, auto many, auto each) {
        for (int64_t i = 0; i < padded; i += WIDE) {
            const int64_t at = low + i, last = at + WIDE - 1;
            if (at + FETCHED < end) {
                const K* coming = place(all, at + FETCHED);
                for (int64_t d = 0; d < WIDE * dim; d += LINE / int64_t(sizeof(K))) __builtin_prefetch(coming + d, 0, 2);
            }
            if constexpr (std::is_same<K, int8_t>::value) {
                T whole[WIDE * MOST_DIM];
                for (int64_t j = 0; j < WIDE; j++) {
                    const int64_t key = std::min(at + j, high - 1);
                    const int8_t* head = block(all, key);
                    const float factor = reinterpret_cast<const float*>(head + size * dim)[key % size];
                    for (int64_t d = 0; d < dim; d += WIDE)
                        write(whole + j * dim + d, read(head + key % size * dim + d) * factor);
                }
                many(i, whole);
            } else if (last < high && at / size == last / size) {
                many(i, place(all, at));
            } else {
                each(i, [&](int64_t j) { return place(all, std::min(at + j, high - 1)); });
            }
        }
    };
    const auto panel = [&](int64_t i) { return keys + i / PANEL * dim * PANEL + i % PANEL * PAIR; };
    walk(
        cache.keys, [&](int64_t i, const T* from) { scatter_many(from, dim, panel(i)); },
        [&](int64_t i, auto key) {
            for (int64_t j = 0; j < WIDE; j++) scatter(key(j), dim, panel(i) + j * PAIR);
        });
    const auto put_values = [&](int64_t i, const T* value, const T* next) {
        for (int64_t first = 0; first < dim; first += PANEL)
            interleave(value + first, next + first, values + first * padded + i * PANEL,
                       std::min<int64_t>(PANEL, dim - first));
    };
    walk(
        cache.values,
        [&](int64_t i, const T* from) {
            for (int64_t j = 0; j < WIDE; j += PAIR) put_values(i + j, from + j * dim, from + (j + PAIR - 1) * dim);
        },
        [&](int64_t i, auto value) {
            for (int64_t j = 0; j < WIDE; j += PAIR) put_values(i + j, value(j), value(j + PAIR - 1));
        });
}

template <class T>
void pack_cache(const Cache& cache, const int32_t* table, int64_t kv_head, int64_t low, int64_t high, int64_t end,
                T* keys, T* values) {
    const auto pack = cache.in_bytes ? pack_kept<int8_t, T> : pack_kept<T, T>;
    pack(cache, table, kv_head, low, high, end, keys, values);
}

// Queries q [tokens, heads, D] of a piece, which are tokens `token` and on; the first has this position. Each sees the
// keys up to itself, of which `window` (0: all).
template <class T> struct OfPiece {
    const T* q;
    int64_t token, position, count, window, heads, dim;
    const Scoring& by;
    const Rows<T>& out;

    int64_t low() const { return std::max<int64_t>(0, from(0)); }
    int64_t high() const { return to(count - 1); }
    int64_t from(int64_t i) const { return window ? position + i - window + 1 : 0; }
    int64_t to(int64_t i) const { return position + i + 1; }
    const T* query(int64_t i, int64_t head) const { return q + ((token + i) * heads + head) * dim; }

    // What query i's head mixed, from dimension d on.
    void take(int64_t i, int64_t head, int64_t d, Floats mixed, const Sum& sum) const {
        write(out[token + i].of(head * dim + d), mixed / whole(sum, by, head));
    }
};

// The queries of a stretch's sequences, each of which sees all of its keys.
template <class T> struct OfStretch {
    const T* q;
    const Stretch& stretch;
    const int64_t *order, *query_start;
    int64_t count, heads, dim;
    const Found& found;

    int64_t low() const { return stretch.low; }
    int64_t high() const { return stretch.high; }
    int64_t from(int64_t) const { return stretch.low; }
    int64_t to(int64_t) const { return stretch.high; }
    int64_t sequence(int64_t i) const { return order[stretch.first + i]; }
    const T* query(int64_t i, int64_t head) const { return q + (query_start[sequence(i)] * heads + head) * dim; }

    void take(int64_t i, int64_t head, int64_t d, Floats mixed, const Sum& sum) const {
        float* to = found.of(sequence(i), stretch.number, head);
        write(to + d, mixed);
        to[dim] = sum.peak, to[dim + 1] = sum.total;
    }
};

#if defined(HAS_TILES)

// 2 to the power of each number, to about 8e-5: weights are rounded to 8 bits anyway.
inline Floats power_of_two(Floats x) {
    const Floats rest = Floats(_mm512_reduce_ps(__m512(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    Floats p = Floats{} + 7.8024521e-2f;
    p = fused(p, rest, Floats{} + 2.2606716e-1f);
    p = fused(p, rest, Floats{} + 6.9583354e-1f);
    p = fused(p, rest, Floats{} + 9.9992522e-1f);
    return Floats(_mm512_scalef_ps(__m512(p), __m512(x)));
}

// A row's scores of a block of keys, of which `from..to` are seen and which lie in panels, `stride` apart.
struct Scores {
    const float* at;
    int64_t stride, from, to, count;

    bool whole() const { return from <= 0 && to >= count; }
    Floats of(int64_t j) const { return read(at + j / PANEL * stride + j % PANEL); }

    __mmask16 seen(int64_t j) const {
        const int64_t hidden = std::min<int64_t>(WIDE, std::max<int64_t>(0, from - j));
        const int64_t upto = std::min<int64_t>(WIDE, std::max<int64_t>(0, to - j));
        return __mmask16(((1u << upto) - 1) & ~((1u << hidden) - 1));
    }

    float peak() const {
        __m512 peaks = _mm512_set1_ps(-INFINITY);
        for (int64_t j = 0; j < count; j += WIDE) peaks = _mm512_mask_max_ps(peaks, seen(j), __m512(of(j)), peaks);
        return greatest(Floats(peaks));
    }
};

// Weights [count]: 2 to the power of `steep` times a score, less `base`, and 0 of a key that is not seen. Returns what
// they sum to.
template <bool WHOLE> inline float weigh_by(const Scores& scores, float steep, float base, bf16* weights) {
    Floats totals{}, more{};
    for (int64_t j = 0; j < scores.count; j += 2 * WIDE) {
        Floats first = power_of_two(fused(scores.of(j), Floats{} + steep, Floats{} - base));
        Floats second = power_of_two(fused(scores.of(j + WIDE), Floats{} + steep, Floats{} - base));
        if (!WHOLE) {
            first = Floats(_mm512_maskz_mov_ps(scores.seen(j), __m512(first)));
            second = Floats(_mm512_maskz_mov_ps(scores.seen(j + WIDE), __m512(second)));
        }
        store(weights + j, _mm512_cvtne2ps_pbh(__m512(second), __m512(first)));
        totals += first, more += second;
    }
    return sum(totals + more);
}

// A row's weights [count] of a block of keys, relative to the score `peak`. That is the highest one of an earlier
// block, since a search of every block costs half as much as its weights. It becomes this block's own where its weights
// sum to FAR or more. Changes `sum`, which is of all weights; returns the factor for what was summed before.
inline float weigh_block(const Scores& scores, float scale, Sum& sum, bf16* weights) {
    constexpr float FAR = 1e12f;  // times a value, it is still far from the largest number
    const float before = sum.peak, steep = scale * 1.44269504f;
    float& peak = sum.peak;
    const auto weigh = [&] {
        return scores.whole() ? weigh_by<true>(scores, steep, peak * steep, weights)
                              : weigh_by<false>(scores, steep, peak * steep, weights);
    };
    float added = INFINITY;
    if (peak > -INFINITY) added = weigh();
    if (!(added < FAR)) {
        peak = std::max(before, scores.peak());
        if (peak == -INFINITY) {  // nothing is seen yet
            std::memset(weights, 0, scores.count * sizeof(bf16));
            return 1;
        }
        added = weigh();
    }
    const float factor = peak == before ? 1 : std::exp2((before - peak) * steep);
    sum.total = sum.total * factor + added;
    return factor;
}

// `attend_many` of bfloat16 in tiles: block by block of keys, which all queries pass while it is near.
template <class Queries>
void attend_in_tiles(const Queries& queries, const Cache& cache, const int32_t* table, int64_t kv_head,
                     const Scoring& by) {
    constexpr int64_t KEYS = 256;
    const int64_t dim = cache.head_dim, group = queries.heads / cache.kv_heads, all = queries.count * group;
    const int64_t wide = (dim + PANEL - 1) / PANEL * PANEL, whole = (all + HEIGHT - 1) / HEIGHT * HEIGHT;
    Scratch& own = scratch();
    bf16* keys = reinterpret_cast<bf16*>(room(own.packed, (KEYS * (dim + wide + HEIGHT) + all * dim) * sizeof(bf16)));
    bf16* values = keys + KEYS * dim;
    bf16* weights = values + KEYS * wide;
    bf16* asked = weights + KEYS * HEIGHT;
    float* scores = room(own.scores, HEIGHT * KEYS);
    Sum* sums = room(own.totals, whole);
    float* mixed = room(own.sums, whole * wide);  // of HEIGHT queries after the other, by panels of dimensions
    for (int64_t i = 0; i < queries.count; i++)
        std::memcpy(asked + i * group * dim, queries.query(i, kv_head * group), group * dim * sizeof(bf16));
    std::fill(sums, sums + whole, Sum{-INFINITY, 0});
    std::fill(mixed, mixed + whole * wide, 0.0f);
    Tiles tiles;
    const auto nothing = [] {};
    for (int64_t first = queries.low(); first < queries.high(); first += KEYS) {
        const int64_t held = std::min(KEYS, queries.high() - first), padded = (held + PANEL - 1) / PANEL * PANEL;
        pack_cache(cache, table, kv_head, first, first + held, queries.high(), keys, values);
        for (int64_t begin = 0; begin < all; begin += HEIGHT) {
            const int64_t rows = std::min(HEIGHT, all - begin);
            // what of the block any of these queries sees
            const int64_t to = std::min(held, queries.to((begin + rows - 1) / group) - first);
            if (to <= 0 || queries.from(begin / group) - first >= held) continue;
            const int64_t num = (to + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
            for (int64_t key = 0; key < num; key += PANEL)
                tiles.multiply(apart(asked + begin * dim, dim), rows, keys + key * dim, dim, scores + key * HEIGHT,
                               true, nothing);
            for (int64_t key = 0; key < num; key += PANEL) bound(scores + key * HEIGHT, rows * PANEL, by);
            float* so_far = mixed + begin * wide;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t i = (begin + r) / group;
                const Scores row{scores + r * PANEL, HEIGHT * PANEL, queries.from(i) - first, queries.to(i) - first,
                                 num};
                const float factor = weigh_block(row, by.scale, sums[begin + r], weights + r * KEYS);
                if (factor != 1)
                    for (int64_t d = 0; d < wide; d += WIDE) {
                        float* sum = so_far + d / PANEL * HEIGHT * PANEL + r * PANEL + d % PANEL;
                        write(sum, read(sum) * factor);
                    }
            }
            for (int64_t d = 0; d < dim; d += PANEL)
                tiles.multiply(apart(weights, KEYS), rows, values + d * padded, num, so_far + d * HEIGHT, false,
                               nothing);
        }
    }
    for (int64_t r = 0; r < all; r++) {
        const float* from = mixed + r / HEIGHT * HEIGHT * wide + r % HEIGHT * PANEL;
        for (int64_t d = 0; d < dim; d += WIDE)
            queries.take(r / group, kv_head * group + r % group, d,
                         read(from + d / PANEL * HEIGHT * PANEL + d % PANEL), sums[r]);
    }
}

#endif

// Up to so large may whole numbers be, of which `count` products are summed in 32 bits.
inline float most_of(int64_t count) { return std::floor(std::sqrt(float(INT32_MAX) / float(count))); }

// The largest whole numbers of weights and of values, of which a STRETCH of keys has a scale together: their products
// fit 32 bits. Weights have more, since many small ones count as much as a large one.
constexpr int STRETCH = 2 * PANEL, MOST_STRETCHES = 2, WEIGHT_SHARES = 8191, VALUE_SHARES = 2047;

// Keys `low..high` of a sequence, which are kept as K, and their values as whole numbers in panels, as `pack_kept` puts
// them; behind the last, zeros. Also what these are to be multiplied by: `of_keys` of each, `of_values` [stretches,
// wide] in each of `wide` dimensions.
template <class K>
void pack_whole(const Cache& cache, const int32_t* table, int64_t kv_head, int64_t low, int64_t high, int16_t* keys,
                int16_t* values, float* of_keys, float* of_values) {
    const int64_t size = cache.block_size, dim = cache.head_dim, wide = (dim + PANEL - 1) / PANEL * PANEL;
    const int64_t padded = (high - low + PANEL - 1) / PANEL * PANEL;
    const float most = most_of(dim);
    float own[STRETCH * MOST_DIM];
    int16_t whole[WIDE * MOST_DIM];
    // `count` keys or values from number `first` on [count, dim]
    const auto read_rows = [&](const void* all, int64_t first, int64_t count) {
        for (int64_t at = first; at < first + count; at++) {
            float* to = own + (at - first) * dim;
            if (at >= high) {
                std::fill_n(to, dim, 0.0f);
                continue;
            }
            const K* block = static_cast<const K*>(all) + table[at / size] * cache.block_stride;
            const K* head = block + kv_head * cache.head_stride;
            float factor = 1.0f;
            if constexpr (std::is_same<K, int8_t>::value)
                factor = reinterpret_cast<const float*>(head + size * dim)[at % size];
            for (int64_t d = 0; d < dim; d += WIDE) write(to + d, read(head + at % size * dim + d) * factor);
        }
    };
    for (int64_t i = 0; i < padded; i += STRETCH) {
        const int64_t count = std::min<int64_t>(STRETCH, padded - i);
        read_rows(cache.keys, low + i, count);
        for (int64_t j = 0; j < count; j++) {
            of_keys[i + j] = as_whole_numbers(own + j * dim, dim, most, whole + j % WIDE * dim);
            const int64_t first = i + j - WIDE + 1;
            if (j % WIDE == WIDE - 1) scatter_many(whole, dim, keys + first / PANEL * PANEL * dim + first % PANEL * 2);
        }
        read_rows(cache.values, low + i, count);
        for (int64_t d = 0; d < dim; d += WIDE) {
            Floats peak = Floats{} + 1e-30f, nothing{};
            for (int64_t j = 0; j < count; j++) {
                const Floats value = read(own + j * dim + d);
                peak = greater(peak, greater(value, -value));
                nothing += value * 0.0f;
            }
            const Floats share = float(VALUE_SHARES) / peak;
            write(of_values + i / STRETCH * wide + d, peak * (1.0f / VALUE_SHARES) + nothing);
            const auto shares = [&](int64_t j) {
                return Words(__builtin_convertvector(rounded(read(own + j * dim + d) * share), Ints));
            };
            int16_t* to = values + (d / PANEL * padded + i) * PANEL + d % PANEL * 2;
            for (int64_t j = 0; j < count; j += 2, to += 2 * PANEL)
                store(to, (shares(j) & 0xFFFFu) | shares(j + 1) << 16);
        }
    }
}

// Raw scores [count] of one row, of which `from..to` are seen -> weights as whole numbers, and what those of a stretch
// are to be multiplied by. They are relative to the highest score, or to `before` if that is higher. The sum is of what
// they are rounded to, so that together they weigh as much as they should.
inline Sum weigh_whole(float* scores, int64_t from, int64_t to, int64_t count, float scale, float before,
                       int16_t* weights, float* of_weights) {
    std::fill(scores, scores + std::min(from, count), -INFINITY);
    std::fill(scores + std::max<int64_t>(to, 0), scores + count, -INFINITY);
    Sum found{before, 0};
    float peaks[MOST_STRETCHES];
    for (int64_t j = 0; j < count; j += STRETCH) {
        Floats highest = Floats{} - INFINITY;
        for (int64_t k = j; k < std::min(j + STRETCH, count); k += WIDE) highest = greater(read(scores + k), highest);
        peaks[j / STRETCH] = greatest(highest);
        found.peak = std::max(found.peak, peaks[j / STRETCH]);
    }
    for (int64_t j = 0; j < count; j += STRETCH) {
        const float peak = peaks[j / STRETCH];
        float& factor = of_weights[j / STRETCH] = 0;
        if (peak > -INFINITY) factor = exponential(Floats{} + (peak - found.peak) * scale)[0] / WEIGHT_SHARES;
        const float base = peak > -INFINITY ? peak : 0;
        Floats total{};
        for (int64_t k = j; k < std::min(j + STRETCH, count); k += WIDE) {
            const Floats weight = rounded(exponential((read(scores + k) - base) * scale) * float(WEIGHT_SHARES));
            total += weight;
            write(weights + k, weight);
        }
        found.total += sum(total) * factor;
    }
    return found;
}

// Weights [count] as they are multiplied with values: where they lie, or rounded.
inline const float* in_rows(const float* weights, int64_t, float*) { return weights; }

inline const bf16* in_rows(const float* weights, int64_t count, bf16* to) {
    for (int64_t j = 0; j < count; j += WIDE) write(to + j, read(weights + j));
    return to;
}

// All of these queries against one head of keys, which lie in the blocks of `table`: block by block of keys, which all
// queries pass while it is near.
template <class T, template <class> class Queries>
void attend_many(const Queries<T>& queries, const Cache& cache, const int32_t* table, int64_t kv_head,
                 const Scoring& by) {
#if defined(HAS_TILES)
    if constexpr (std::is_same<T, bf16>::value)
        if (has_tiles()) return attend_in_tiles(queries, cache, table, kv_head, by);
#endif
    constexpr bool WHOLE = std::is_same<T, bf16>::value && BF16_IN_WHOLE_NUMBERS;
    using W = std::conditional_t<WHOLE, int16_t, T>;  // as what keys and values are multiplied
    constexpr int PAIR = Pairs<W>::SIZE;
    constexpr int64_t KEYS = MOST_STRETCHES * STRETCH;
    const int64_t dim = cache.head_dim, group = queries.heads / cache.kv_heads, all = queries.count * group;
    const int64_t wide = (dim + PANEL - 1) / PANEL * PANEL, cuts = (all + MOST - 1) / MOST;
    Scratch& own = scratch();
    W* keys = reinterpret_cast<W*>(room(own.packed, KEYS * (dim + wide) * sizeof(W)));
    W* values = keys + KEYS * dim;
    Input<W>* asked = reinterpret_cast<Input<W>*>(room(own.inputs, (all * dim + MOST * KEYS) * sizeof(Input<W>) / 4));
    [[maybe_unused]] Input<W>* weights = asked + all * dim;
    float* of_asked = room(own.factors, all + KEYS + MOST_STRETCHES * wide);
    float *of_keys = of_asked + all, *of_values = of_keys + KEYS;
    float* scores = room(own.scores, MOST * KEYS);
    Sum* sums = room(own.totals, all);
    float* mixed = room(own.sums, all * wide);
    for (int64_t r = 0; r < all; r++) {
        const T* query = queries.query(r / group, kv_head * group + r % group);
        if constexpr (WHOLE)
            of_asked[r] = as_whole_numbers(query, dim, most_of(dim), asked + r * dim);
        else
            for (int64_t d = 0; d < dim; d += WIDE) write(asked + r * dim + d, read(query + d));
    }
    std::fill(sums, sums + all, Sum{-INFINITY, 0});
    std::fill(mixed, mixed + all * wide, 0.0f);
    Ahead ahead{};
    for (int64_t first = queries.low(); first < queries.high(); first += KEYS) {
        const int64_t held = std::min(KEYS, queries.high() - first), padded = (held + PANEL - 1) / PANEL * PANEL;
        if constexpr (WHOLE) {
            const auto pack = cache.in_bytes ? pack_whole<int8_t> : pack_whole<bf16>;
            pack(cache, table, kv_head, first, first + held, keys, values, of_keys, of_values);
        } else {
            pack_cache(cache, table, kv_head, first, first + held, queries.high(), keys, values);
        }
        for (int64_t cut = 0; cut < cuts; cut++) {
            const int64_t begin = cut * all / cuts, rows = (cut + 1) * all / cuts - begin;
            // what of the block any of these queries sees
            const int64_t to = std::min(held, queries.to((begin + rows - 1) / group) - first);
            if (to <= 0 || queries.from(begin / group) - first >= held) continue;
            const int64_t count = (to + PANEL - 1) / PANEL * PANEL;
            const Input<W>* own_rows[MOST];
            float of_weights[MOST][MOST_STRETCHES];
            Scales scales{};
            for (int64_t r = 0; r < rows; r++) {
                own_rows[r] = asked + (begin + r) * dim;
                if (WHOLE) scales.of_x[r] = of_asked[begin + r];
            }
            for (int64_t j = 0; j < count; j += PANEL) {
                scales.scale = of_keys + j;
                const W* panel = keys + j * dim;
                dot(rows, own_rows, panel, dim / PAIR, scores + j, KEYS, true, ahead, WHOLE ? &scales : nullptr);
            }
            for (int64_t r = 0; r < rows; r++) {
                const int64_t i = (begin + r) / group, from = std::max<int64_t>(0, queries.from(i) - first);
                const int64_t upto = std::min(count, queries.to(i) - first);
                float* row = scores + r * KEYS;
                bound(row, count, by);
                Sum &sum = sums[begin + r], added{sum.peak, 0};
                if constexpr (WHOLE) {
                    own_rows[r] = weights + r * KEYS;
                    added = weigh_whole(row, from, upto, count, by.scale, sum.peak, weights + r * KEYS, of_weights[r]);
                } else {
                    if (from < upto)
                        added = weigh(row, from, upto, count, by.scale, sum.peak);
                    else
                        std::fill_n(row, count, 0.0f);
                    own_rows[r] = in_rows(row, count, weights + r * KEYS);
                }
                if (sum.peak != added.peak) {
                    const float factor = std::exp((sum.peak - added.peak) * by.scale);
                    float* so_far = mixed + (begin + r) * wide;
                    for (int64_t d = 0; d < wide; d += WIDE) write(so_far + d, read(so_far + d) * factor);
                    sum = {added.peak, sum.total * factor};
                }
                sum.total += added.total;
            }
            for (int64_t d = 0; d < dim; d += PANEL) {
                float* so_far = mixed + begin * wide + d;
                if constexpr (!WHOLE) {
                    dot(rows, own_rows, values + d * padded, (to + PAIR - 1) / PAIR, so_far, wide, false, ahead);
                    continue;
                }
                for (int64_t j = 0; j < count; j += STRETCH) {
                    const int64_t steps = std::min<int64_t>(STRETCH, count - j) / PAIR;
                    const Input<W>* part[MOST];
                    for (int64_t r = 0; r < rows; r++)
                        part[r] = own_rows[r] + j, scales.of_x[r] = of_weights[r][j / STRETCH];
                    scales.scale = of_values + j / STRETCH * wide + d;
                    dot(rows, part, values + d * padded + j * PANEL, steps, so_far, wide, false, ahead, &scales);
                }
            }
        }
    }
    for (int64_t r = 0; r < all; r++)
        for (int64_t d = 0; d < dim; d += WIDE)
            queries.take(r / group, kv_head * group + r % group, d, read(mixed + r * wide + d), sums[r]);
}

// A group's queries q [tokens, heads, D] against the cache -> out [tokens, heads * D]. Called by every thread of a
// team; `found` has room for what is found among `common` keys.
template <class T>
void attend(const T* q, const Cache& cache, const Batch& batch, const Group& group, const std::vector<Piece>& pieces,
            const CommonKeys& common, const Found& found, int64_t num_heads, const Scoring& by, Member& member,
            const Rows<T>& out) {
    const int64_t shared = num_heads / cache.kv_heads, dim = cache.head_dim;
    if (!common.stretches.empty())
        member.deal(int64_t(common.stretches.size()) * cache.kv_heads, [&](int64_t task) {
            const Stretch& stretch = common.stretches[task / cache.kv_heads];
            const int32_t* table = group.tables + common.order[stretch.first] * group.width;
            const OfStretch<T> queries{q,         stretch, common.order.data(), batch.query_start, stretch.count,
                                       num_heads, dim,     found};
            attend_many(queries, cache, table, task % cache.kv_heads, by);
        });
    // as many heads together as leave every thread some tasks
    int64_t together = std::max<int64_t>(1, std::min(cache.kv_heads, MOST_HEADS / shared));
    while (together > 1 && int64_t(pieces.size()) * (cache.kv_heads / together) < 4 * member.threads) together /= 2;
    const int64_t parts = (cache.kv_heads + together - 1) / together;
    member.deal(int64_t(pieces.size()) * parts, [&](int64_t task) {
        const Piece& piece = pieces[task / parts];
        const int64_t first = task % parts * together, count = std::min(together, cache.kv_heads - first);
        const int64_t token = batch.query_start[piece.sequence] + piece.first, position = batch.positions[token];
        const int32_t* table = group.tables + piece.sequence * group.width;
        const OfPiece<T> queries{q, token, position, piece.count, group.window, num_heads, dim, by, out};
        if (piece.count == 1) {
            const int64_t low = std::max(queries.low(), common.ends[piece.sequence]);
            const auto one = cache.in_bytes ? attend_one<int8_t, T> : attend_one<T, T>;
            one(queries.query(0, first * shared), cache, table, first, count, shared, low, position + 1, by, found,
                piece.sequence, common.counts[piece.sequence], out[token]);
            return;
        }
        for (int64_t head = first; head < first + count; head++) attend_many(queries, cache, table, head, by);
    });
}

// Keep a token's key or value [D] of one head.
template <class T>
inline void keep(const T* from, void* kept, const Cache& cache, const Batch& batch, const Group& group, int64_t token,
                 int64_t kv_head) {
    const int64_t head = group.slot_blocks[token] * cache.block_stride + kv_head * cache.head_stride;
    const int64_t slot = batch.slot_offsets[token], dim = cache.head_dim;
    if (!cache.in_bytes) {
        std::memcpy(static_cast<T*>(kept) + head + slot * dim, from, dim * sizeof(T));
        return;
    }
    int8_t* to = static_cast<int8_t*>(kept) + head;
    Floats highest{};
    for (int64_t d = 0; d < dim; d += WIDE) highest = greater(highest, greater(read(from + d), -read(from + d)));
    // where all are next to nothing, all are nothing
    const float most = greatest(highest), factor = most > 1e-30f ? most / 127 : 0, share = factor ? 1 / factor : 0;
    for (int64_t d = 0; d < dim; d += WIDE) {
        const Ints shares = __builtin_convertvector(rounded(read(from + d) * share), Ints);
        for (int i = 0; i < WIDE; i++) to[slot * dim + d + i] = int8_t(shares[i]);
    }
    reinterpret_cast<float*>(to + cache.block_size * dim)[slot] = factor;
}

}  // namespace
