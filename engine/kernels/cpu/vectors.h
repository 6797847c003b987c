// Numbers and vectors of them.
//
// bfloat16, the vector types, reading and writing them, sums, exponentials.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 64;        // outputs of a panel
constexpr int LINE = 64;         // bytes of a line of the cache
constexpr int STRIP = 32;        // numbers of a row that always lie side by side
// Numbers of a vector: as many as a register has, since a compiler takes wider ones through memory.
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));

struct bf16 {
    uint16_t bits;
};

template <class V, class P> inline V load(const P* from) {
    V out;
    std::memcpy(&out, from, sizeof(V));
    return out;
}

template <class V, class P> inline void store(P* to, V v) { std::memcpy(to, &v, sizeof(V)); }

// One of `Rows`.
template <class T> struct Row {
    T* at;
    int64_t step;  // numbers from a strip to the next

    // Where number k is; the others of its strip are beside it.
    T* of(int64_t k) const { return at + uint64_t(k) / STRIP * step + k % STRIP; }
    // The rest of it from number k on, which is the first of a strip.
    Row from(int64_t k) const { return {of(k), step}; }
    operator Row<const T>() const { return {at, step}; }
};

// Rows of numbers [.., width]: one behind the other, or (`in_strips`) STRIP rows together, first the first strip of
// each, then the second of each. That is how tiles are loaded. And what a panel puts out for many rows lies together
// then: with a long row between two places, many of them would share the same few lines of a cache.
template <class T> struct Rows {
    T* at;
    int64_t width;
    bool in_strips = false;

    Row<T> operator[](int64_t row) const {
        if (!in_strips) return {at + row * width, STRIP};
        return {at + row / STRIP * STRIP * width + row % STRIP * STRIP, STRIP * STRIP};
    }
    operator Rows<const T>() const { return {at, width, in_strips}; }
};

inline float number(float x) { return x; }

inline float number(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    return load<float>(&bits);
}

inline void put(float* to, float x) { *to = x; }

inline void put(bf16* to, float x) {  // to the nearest, ties to even
    uint32_t bits = load<uint32_t>(&x);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to->bits = uint16_t(x == x ? rounded : (bits >> 16) | 0x40);
}

// To the nearest whole numbers, ties to even, of numbers up to 2^22.
inline Floats rounded(Floats x) {
    const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds
    return (x + magic) - magic;
}

inline Floats exponential(Floats x) {
    const Ints low = x < -87.0f, high = x > 88.0f;
    x = low ? Floats{} - 87.0f : x;
    x = high ? Floats{} + 88.0f : x;
    const Floats n = rounded(x * 1.44269504f);
    const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats p = Floats{} + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * load<Floats>(&bits);
}

// WIDE numbers from and to memory.
inline Floats read(const float* from) { return load<Floats>(from); }

inline Floats read(const bf16* from) {
    const Words bits = __builtin_convertvector(load<Halves>(from), Words) << 16;
    return load<Floats>(&bits);
}

inline Floats read(const int8_t* from) {  // in words of their own: compilers take these bytes one by one
#if defined(__AVX512F__)
    return Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))));
#elif defined(__AVX2__)
    return Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(from)))));
#else
    Floats out;
    for (int i = 0; i < WIDE; i++) out[i] = from[i];
    return out;
#endif
}

inline void write(float* to, Floats x) { store(to, x); }

inline void write(int16_t* to, Floats x) {  // which are whole
    typedef int16_t Narrow __attribute__((vector_size(2 * WIDE)));
    store(to, __builtin_convertvector(__builtin_convertvector(x, Ints), Narrow));
}

inline void write(bf16* to, Floats x) {  // to the nearest, ties to even
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh(__m512(x)));
#else
    const Words bits = load<Words>(&x);
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    store(to, __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, Halves));
#endif
}

inline float sum(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(__m512(v));
#else
    float parts[WIDE];
    store(parts, v);
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

// a * b + c, rounded once. Left to the compiler, a product is joined with its sum here and not there.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#else
    float left[WIDE], right[WIDE], sums[WIDE];
    store(left, a), store(right, b), store(sums, c);
    for (int i = 0; i < WIDE; i++) sums[i] = std::fma(left[i], right[i], sums[i]);
    return load<Floats>(sums);
#endif
}

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

inline float greatest(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(__m512(v));
#else
    float most = v[0];
    for (int i = 1; i < WIDE; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

inline bool any(Ints chosen) {
    uint64_t parts[WIDE / 2], all = 0;
    store(parts, chosen);
    for (uint64_t part : parts) all |= part;
    return all;
}

// The first `count` of WIDE numbers; behind them `rest`.
inline Floats read_some(const float* from, int64_t count, float rest) {
    Floats out = Floats{} + rest;
    for (int64_t i = 0; i < count; i++) out[i] = from[i];
    return out;
}

#if defined(__AVX512F__)
// Rows of words become columns.
inline void transpose(Words (&rows)[WIDE]) {
#pragma GCC unroll 4
    for (int span = WIDE / 2; span; span /= 2) {  // of two rows that are `span` apart, quarters change places
        Ints upper, lower;
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) {
            upper[i] = i & span ? WIDE + i - span : i;
            lower[i] = i & span ? WIDE + i : i + span;
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++)
            if (!(i & span)) {
                const __m512i first = __m512i(rows[i]), second = __m512i(rows[i + span]);
                rows[i] = Words(_mm512_permutex2var_epi32(first, __m512i(upper), second));
                rows[i + span] = Words(_mm512_permutex2var_epi32(first, __m512i(lower), second));
            }
    }
}
#endif

// Memory from a line of the cache on, because what crosses a line is read twice; and where there is enough of it in
// large pages, because rows are often some KiB apart.
template <class T> struct Lines {
    using value_type = T;
    static constexpr size_t LARGE = 2 << 20;

    Lines() = default;
    template <class U> Lines(const Lines<U>&) {}

    T* allocate(size_t count) {
        const size_t wanted = count * sizeof(T), unit = wanted < LARGE ? LINE : LARGE;
        const size_t bytes = (wanted + unit - 1) / unit * unit;
        void* memory = std::aligned_alloc(unit, bytes);
        if (!memory) std::abort();
        if (unit == LARGE) madvise(memory, bytes, MADV_HUGEPAGE);
        return static_cast<T*>(memory);
    }

    void deallocate(T* memory, size_t) { std::free(memory); }
    bool operator==(const Lines&) const { return true; }
    bool operator!=(const Lines&) const { return false; }
};

// Buffers that grow and stay, one set a thread.
template <class T> using Room = std::vector<T, Lines<T>>;
template <class T> inline T* room(Room<T>& held, size_t size) {
    if (held.size() < size) held.resize(size);
    return held.data();
}

}  // namespace
