// The draw of a token: which of a vocabulary's scores is the highest once each has got its noise.
//
// The noise is `sampler.py`'s, to about 1e-5: logarithms here are quicker ones. So all come out whose sum is the
// highest to within more than that, which is nearly always one, and whoever wants the exact one looks at those.

#pragma once

#include <limits>

#include "vectors.h"

extern "C" {

// Rows of scores, `stride` apart, of which `vocabulary` count each. A row's token is drawn at its temperature with the
// noise of `noise` at `draw_index`; at temperature 0 it is the one of the highest score. `mask_of` [rows]: which of
// `masks` [.., mask_width] allows the row's ids, by a bit each; negative: all are allowed.
struct Draw {
    const float* scores;
    int64_t stride, rows, vocabulary;
    const float* temperatures;
    const int64_t *noise, *draw_index, *mask_of;
    const uint32_t* masks;
    int64_t mask_width;
};

// Of a row: its highest score, which is no number where one of them is none; of those that are allowed the highest and
// the first id that has it; and where it is drawn, how many ids may be the one, and which. `count` 0: there may be more
// than those that have been kept.
constexpr int64_t MOST_CONTENDERS = 8;
struct Drawn {
    float peak, best;
    int64_t best_id, count, ids[MOST_CONTENDERS];
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

inline Drawn draw(const Draw& all, int64_t row) {
    const float* scores = all.scores + row * all.stride;
    const float temperature = all.temperatures[row];
    const uint32_t* mask = all.mask_of[row] < 0 ? nullptr : all.masks + all.mask_of[row] * all.mask_width;
    const uint64_t key = draw_key(all.noise[row], all.draw_index[row]);
    const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    const Floats nothing = Floats{} - std::numeric_limits<float>::infinity();
    Words ids, bit_of;
    for (int i = 0; i < WIDE; i++) ids[i] = i, bit_of[i] = 1u << i;
    Floats peak = nothing, best = nothing;
    Ints best_id{}, odd{};
    // of each place in a vector the best two sums, and how high a third one may be
    Floats first = nothing, second = nothing, third = nothing;
    Ints first_id{}, second_id{};
    for (int64_t at = 0; at < all.vocabulary; at += WIDE, ids += WIDE) {
        const bool whole = at + WIDE <= all.vocabulary;
        Floats own = whole ? read(scores + at) : read_some(scores + at, all.vocabulary - at, nothing[0]);
        odd |= own != own;
        peak = greater(own, peak);
        if (mask) {
            const Words bits = Words{} + (mask[at / 32] >> at % 32);
            own = (bits & bit_of) != 0 ? own : nothing;
        }
        const Ints higher = own > best;
        best = higher ? own : best;
        best_id = higher ? Ints(ids) : best_id;
        if (temperature <= 0) continue;
        const Floats sum = own / temperature + gumbel(mixed_bits(mixed_bits(ids ^ low) ^ high));
        const Ints most = sum > first, more = sum > second;
        third = more ? second : greater(sum, third);
        second_id = most ? first_id : more ? Ints(ids) : second_id;
        second = most ? first : more ? sum : second;
        first_id = most ? Ints(ids) : first_id;
        first = most ? sum : first;
    }
    Drawn found{};
    found.peak = greatest(peak), found.best = best[0], found.best_id = best_id[0];
    for (int i = 0; i < WIDE; i++) {
        if (odd[i]) found.peak = std::numeric_limits<float>::quiet_NaN();
        if (best[i] > found.best || (best[i] == found.best && best_id[i] < found.best_id))
            found.best = best[i], found.best_id = best_id[i];
    }
    const float highest = greatest(first), least = highest - CERTAIN - ROUNDED * std::fabs(highest);
    if (!(greatest(third) < least)) return found;  // also where a number is none, and where nothing is drawn
    for (int i = 0; i < WIDE; i++) {
        if (first[i] >= least && found.count < MOST_CONTENDERS) found.ids[found.count++] = first_id[i];
        if (second[i] >= least && found.count < MOST_CONTENDERS) found.ids[found.count++] = second_id[i];
    }
    if (found.count == MOST_CONTENDERS) found.count = 0;
    std::sort(found.ids, found.ids + found.count);
    return found;
}

}  // namespace
