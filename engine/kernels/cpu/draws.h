// The draw of a token: which of a vocabulary's scores is the highest once each has got its noise.
//
// The noise is `sampler.py`'s, to about 1e-5: logarithms here are quicker ones. So all come out whose sum is the
// highest to within more than that, which is nearly always one, and whoever wants the exact one looks at those.

#pragma once

#include <limits>

#include "vectors.h"

extern "C" {

// Of a row: how many ids may be the one, and which. `count` 0: there may be more than those that have been kept.
constexpr int64_t MOST_CONTENDERS = 8;
struct Contenders {
    int64_t count, ids[MOST_CONTENDERS];
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

inline Contenders contend(const float* scores, int64_t vocabulary, int64_t key) {
    const uint32_t low = uint32_t(key), high = uint32_t(uint64_t(key) >> 32);
    Words ids;
    for (int i = 0; i < WIDE; i++) ids[i] = i;
    // of each place in a vector the best two, and how high a third one may be
    const Floats nothing = Floats{} - std::numeric_limits<float>::infinity();
    Floats first = nothing, second = nothing, third = nothing;
    Ints first_id{}, second_id{};
    for (int64_t at = 0; at < vocabulary; at += WIDE, ids += WIDE) {
        const bool whole = at + WIDE <= vocabulary;
        const Floats own = whole ? read(scores + at) : read_some(scores + at, vocabulary - at, nothing[0]);
        const Floats sum = own + gumbel(mixed_bits(mixed_bits(ids ^ low) ^ high));
        const Ints best = sum > first, better = sum > second;
        third = better ? second : greater(sum, third);
        second_id = best ? first_id : better ? Ints(ids) : second_id;
        second = best ? first : better ? sum : second;
        first_id = best ? Ints(ids) : first_id;
        first = best ? sum : first;
    }
    const float highest = greatest(first), least = highest - CERTAIN - ROUNDED * std::fabs(highest);
    Contenders found{};
    if (!(greatest(third) < least)) return found;  // also where a number is none
    for (int i = 0; i < WIDE; i++) {
        if (first[i] >= least && found.count < MOST_CONTENDERS) found.ids[found.count++] = first_id[i];
        if (second[i] >= least && found.count < MOST_CONTENDERS) found.ids[found.count++] = second_id[i];
    }
    if (found.count == MOST_CONTENDERS) found.count = 0;
    std::sort(found.ids, found.ids + found.count);
    return found;
}

}  // namespace
