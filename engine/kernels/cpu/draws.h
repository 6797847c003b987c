// The draw of a token: which of a vocabulary's scores is the highest once each has got its noise.
//
// The noise is `sampler.py`'s, to about 1e-5: logarithms here are quicker ones. So all come out whose sum is the
// highest to within more than that, which is nearly always one, and whoever wants the exact one looks at those.

#pragma once

#include <limits>

#include "vectors.h"

extern "C" {

// Rows of scores, `stride` apart, of which `vocabulary` count each. A row's token is drawn at its temperature with the
// noise of `noise` at `draw_index`, from what min-p leaves (0: all), of that top-k (0: all), of that top-p (1: all);
// at temperature 0 it is the one of the highest score. `mask_of` [rows]: which of `masks` [.., mask_width] allows the
// row's ids, by a bit each; negative: all are allowed. `bias_values` [biases] are added to the scores of `bias_ids` in
// `bias_rows` during the call, and taken away again.
struct Draw {
    float* scores;
    int64_t stride, rows, vocabulary;
    const float *temperatures, *top_p, *min_p;
    const int64_t *top_k, *noise, *draw_index, *mask_of;
    const uint32_t* masks;
    int64_t mask_width;
    const int64_t *bias_rows, *bias_ids;
    const float* bias_values;
    int64_t biases;
};

// Of a row: a `peak` that is at least its highest biased score, and finite unless a score is not; of the scores that
// are allowed the highest, and the first id that has it; and where it is drawn, how many ids may be the one, which, and
// what their scores are. `count` 0: there may be more than those that have been kept.
constexpr int64_t MOST_CONTENDERS = 8;
struct Drawn {
    float peak, best;
    int64_t best_id, count, ids[MOST_CONTENDERS];
    float scores[MOST_CONTENDERS];
};

}  // extern "C"

namespace {

constexpr float CERTAIN = 1e-3f;        // what the highest sum has to be above another to be so in exact numbers
constexpr float ROUNDED = 1e-6f;        // and for each unit of the sum, which is rounded, too

// The natural logarithm of positive normal numbers (the polynomial is that of S. Moshier's Cephes).
inline Floats logarithm(Floats x) {
    const Ints bits = load<Ints>(&x);
    Ints exponent = (bits >> 23) - 127;
    const Ints fraction = (bits & 0x7FFFFF) | 0x3F800000;
    Floats m = load<Floats>(&fraction);
    const Ints upper = m > 1.41421356f;
    m = upper ? m * 0.5f : m;
    exponent = upper ? exponent + 1 : exponent;
    const Floats r = m - 1.0f;
    Floats p = Floats{} + 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    return r + r * r * (p * r - 0.5f) + __builtin_convertvector(exponent, Floats) * 0.69314718056f;
}

inline Words mixed_bits(Words x) {  // `_mix_`
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    return x ^ (x >> 15);
}

// Standard Gumbel noise of 32 random bits.
inline Floats gumbel(Words bits) {
    const Ints positive = Ints(bits & 0x7FFFFFFFu);
    Floats u = (__builtin_convertvector(positive, Floats) + 0.5f) * 4.656612873077393e-10f;
    const Floats most = Floats{} + 0.99999994f;
    u = u > most ? most : u;
    // -log1p(-u), which loses its digits in 1 - u where u is small: that is where noise is high
    const Floats series = u * (1.0f + u * (0.5f + u * (0.33333333f + u * 0.25f)));
    const Floats small = Floats{} + 0.015625f;
    const Floats t = u < small ? series : -logarithm(1.0f - u);
    return -logarithm(t);
}

// The key of a row's draw (`draw_keys`).
inline uint64_t draw_key(int64_t noise, int64_t draw_index) {
    uint64_t x = uint64_t(noise) + (uint64_t(draw_index) + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

inline Floats noise_of(Words ids, uint64_t key) {
    return gumbel(mixed_bits(mixed_bits(ids ^ uint32_t(key)) ^ uint32_t(key >> 32)));
}

// Every WIDE ids of a row: body(ids, scores, those that are allowed). Others, and those behind the last, are nothing.
const Floats NOTHING = Floats{} - std::numeric_limits<float>::infinity();
template <class Body> inline void scan(const Draw& all, int64_t row, Body body) {
    const float* scores = all.scores + row * all.stride;
    const uint32_t* mask = all.mask_of[row] < 0 ? nullptr : all.masks + all.mask_of[row] * all.mask_width;
    Words ids, bit_of;
    for (int i = 0; i < WIDE; i++) ids[i] = i, bit_of[i] = 1u << i;
    for (int64_t at = 0; at < all.vocabulary; at += WIDE, ids += WIDE) {
        const bool whole = at + WIDE <= all.vocabulary;
        const Floats own = whole ? read(scores + at) : read_some(scores + at, all.vocabulary - at, NOTHING[0]);
        if (!mask) {
            body(ids, own, own);
            continue;
        }
        const Words bits = Words{} + (mask[at / 32] >> at % 32);
        body(ids, own, (bits & bit_of) != 0 ? own : NOTHING);
    }
}

// What may be drawn, of sums that are within their error of the highest: ids, and none where they are too many.
inline void settle(Drawn& found, const float* sums, const int32_t* ids, int64_t count) {
    float highest = NOTHING[0];
    for (int64_t i = 0; i < count; i++) highest = std::max(highest, sums[i]);
    const float least = highest - CERTAIN - ROUNDED * std::fabs(highest);
    for (int64_t i = 0; i < count; i++)
        if (sums[i] >= least && found.count < MOST_CONTENDERS) found.ids[found.count++] = ids[i];
    if (found.count == MOST_CONTENDERS) found.count = 0;
    std::sort(found.ids, found.ids + found.count);
}

struct Candidate {
    float score, mass;
    int32_t id;
    bool operator<(const Candidate& other) const {  // the better one comes first, of equal ones the lower id
        return score > other.score || (score == other.score && id < other.id);
    }
};

// Puts the best to the front, up to the one with which they have so much mass; returns how many that are, one at least.
inline size_t nucleus(std::vector<Candidate>& all, double mass) {
    double before = 0;
    size_t low = 0, high = all.size();  // it is one of these
    while (high - low > 32) {
        const size_t middle = low + (high - low) / 2;
        std::nth_element(all.begin() + low, all.begin() + middle, all.begin() + high);
        double upper = 0;
        for (size_t i = low; i < middle; i++) upper += all[i].mass;
        if (before + upper >= mass)
            high = middle;
        else
            low = middle, before += upper;
    }
    std::sort(all.begin() + low, all.begin() + high);
    for (; low < high && (!low || before < mass); low++) before += all[low].mass;
    return low;
}

// A row's draw from what its filters leave; `best` is its highest score that is allowed.
inline void draw_filtered(const Draw& all, int64_t row, uint64_t key, float best, Drawn& found) {
    static thread_local std::vector<Candidate> kept;
    static thread_local Room<float> sums;
    static thread_local Room<int32_t> ids;
    const float temperature = all.temperatures[row], p = all.top_p[row], top = best / temperature;
    const size_t k = all.top_k[row] > 0 ? std::min(all.top_k[row], all.vocabulary) : all.vocabulary;
    const bool ranked = k < size_t(all.vocabulary);
    float least = all.min_p[row] > 0 ? top + std::log(all.min_p[row]) : NOTHING[0];
    double mass = 0;  // of what top-k leaves, where the best has 1
    if (p < 1 && !ranked) {
        scan(all, row, [&](Words, Floats, Floats own) {
            const Floats scaled = own / temperature;
            mass += sum(scaled >= least && own > NOTHING ? exponential(scaled - top) : Floats{});
        });
        // what all who have less have together is not needed
        const float needed = top + float(std::log((1 - double(p)) * mass / double(all.vocabulary)));
        least = std::max(least, std::min(top, needed));
    }
    kept.clear();
    scan(all, row, [&](Words at, Floats, Floats own) {
        const Floats scaled = own / temperature;
        const Ints enough = scaled >= least && own > NOTHING;
        if (!any(enough)) return;
        const Floats masses = p < 1 ? exponential(scaled - top) : Floats{};
        for (int i = 0; i < WIDE; i++)
            if (enough[i]) kept.push_back({scaled[i], masses[i], int32_t(at[i])});
        if (ranked && kept.size() >= 2 * k + 64) {
            std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end());
            kept.resize(k);
            least = kept[k - 1].score;
        }
    });
    if (ranked && kept.size() > k) {
        std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end());
        kept.resize(k);
    }
    if (p < 1) {
        if (ranked)
            for (const Candidate& each : kept) mass += each.mass;
        kept.resize(nucleus(kept, p * mass));
    }
    const int64_t count = kept.size(), whole = (count + WIDE - 1) / WIDE * WIDE;
    room(sums, whole), room(ids, whole);
    std::fill(ids.begin(), ids.begin() + whole, 0);
    for (int64_t i = 0; i < count; i++) ids[i] = kept[i].id;
    for (int64_t i = 0; i < whole; i += WIDE) write(sums.data() + i, noise_of(load<Words>(ids.data() + i), key));
    for (int64_t i = 0; i < count; i++) sums[i] += kept[i].score;
    settle(found, sums.data(), ids.data(), count);
}

inline Drawn draw(const Draw& all, int64_t row) {
    const float temperature = all.temperatures[row];
    const bool drawn = temperature > 0, filtered = all.top_k[row] > 0 || all.top_p[row] < 1 || all.min_p[row] > 0;
    const uint64_t key = draw_key(all.noise[row], all.draw_index[row]);
    Floats peak = NOTHING, best = NOTHING;
    Ints best_id{}, odd{};
    // of each place in a vector the best two sums, and how high a third one may be
    Floats sums[2] = {NOTHING, NOTHING}, third = NOTHING;
    Ints ids[2]{};
    scan(all, row, [&](Words at, Floats raw, Floats own) {
        odd |= raw != raw;
        peak = greater(raw, peak);
        const Ints higher = own > best;
        best = higher ? own : best;
        best_id = higher ? Ints(at) : best_id;
        if (!drawn || filtered) return;
        const Floats total = own / temperature + noise_of(at, key);
        const Ints most = total > sums[0], more = total > sums[1];
        third = more ? sums[1] : greater(total, third);
        ids[1] = most ? ids[0] : more ? Ints(at) : ids[1];
        sums[1] = most ? sums[0] : more ? total : sums[1];
        ids[0] = most ? Ints(at) : ids[0];
        sums[0] = most ? total : sums[0];
    });
    Drawn found{};
    found.peak = greatest(peak), found.best = best[0], found.best_id = best_id[0];
    for (int i = 0; i < WIDE; i++) {
        if (odd[i]) found.peak = std::numeric_limits<float>::quiet_NaN();
        if (best[i] > found.best || (best[i] == found.best && best_id[i] < found.best_id))
            found.best = best[i], found.best_id = best_id[i];
    }
    if (!drawn || !std::isfinite(found.peak) || found.best == NOTHING[0]) return found;
    if (filtered) {
        draw_filtered(all, row, key, found.best, found);
        return found;
    }
    const float highest = greatest(sums[0]);
    if (greatest(third) < highest - CERTAIN - ROUNDED * std::fabs(highest))
        settle(found, reinterpret_cast<const float*>(sums), reinterpret_cast<const int32_t*>(ids), 2 * WIDE);
    return found;
}

// Adds biases to scores for as long as it lives. An id beyond the vocabulary is never drawn, and has no score.
class Biased {
public:
    explicit Biased(const Draw& all) : all(all), before(all.biases) {
        for (int64_t i = 0; i < all.biases; i++)
            if (is_drawn(i)) before[i] = at(i), at(i) += all.bias_values[i];
    }
    ~Biased() {  // backwards, since one score may have several
        for (int64_t i = all.biases; i-- > 0;)
            if (is_drawn(i)) at(i) = before[i];
    }
    // A row whose scores are all banned still has the highest that the model computed.
    void raise_peaks(Drawn* out) const {
        for (int64_t i = 0; i < all.biases; i++)
            if (is_drawn(i) && before[i] > out[all.bias_rows[i]].peak) out[all.bias_rows[i]].peak = before[i];
    }

private:
    bool is_drawn(int64_t i) const { return uint64_t(all.bias_ids[i]) < uint64_t(all.vocabulary); }
    float& at(int64_t i) const { return all.scores[all.bias_rows[i] * all.stride + all.bias_ids[i]]; }
    const Draw& all;
    std::vector<float> before;
};

}  // namespace
