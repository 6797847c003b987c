// Products with weights in panels.
//
// Weights of few bits are unpacked as they are read. Scale, bias, adapter, gate and residual follow a product of some
// rows when that of the next ones has been computed, or in tiles meanwhile.
//
// A panel of 64 outputs is one stream from memory, read once a step: up to six rows at a time stay in registers, or 32
// in tiles, and while more rows pass the next panel is fetched. Every output adds its terms in the same order, whatever
// is computed beside it, so a row's numbers do not depend on its batch.

#pragma once

#include <type_traits>

#include "team.h"
#include "tiles.h"

namespace {

constexpr int GROUP = 32;        // inputs that share a scale in four bits
constexpr int MOST = 6;          // rows that are multiplied together in registers
constexpr int LEAST_ROWS = 64;   // rows that pass a panel together, if there are so many
constexpr int64_t NEAR_BYTES = 1 << 20;   // of their numbers, which stay in the second cache while panels pass
constexpr int64_t SOON_BYTES = 2 * WINDOW;  // of a stream of weights, fetched before their turn
constexpr int TURNS = 8;         // of a thread in one product of few rows
constexpr int DEEP = 2048;       // inputs of a block of a panel, so that it stays in the second cache,
constexpr int WHOLE = 4096;      // but in tiles up to so many are one block, whose sums stay in the first one
constexpr int NEAR = 128;        // the same where a block is read but once: in the first
// Vectors of outputs of each of `rows` that are in registers at a time. Where there are only 16 registers, few rows get
// as many as there is room for: a panel is then read in fewer goes, and one that leaves lines out is slow from memory.
constexpr int columns(int rows) { return WIDE == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// Weights in four bits: of two inputs and PANEL outputs, of which a word's n-th four bits are of outputs 16 n and on.
struct Four {
    uint16_t bits;
};

// What weights of eight and of four bits are unpacked to: bfloat16 where there are instructions for that, else whole
// numbers, of which a pair is multiplied by one instruction, too.
#if defined(__AVX512BF16__)
using Unpacked = bf16;
#else
using Unpacked = int16_t;
#endif
constexpr bool IN_WHOLE_NUMBERS = std::is_same<Unpacked, int16_t>::value;
// And weights of bfloat16 themselves: whole numbers up to SHARES, of so many inputs TOGETHER with a scale. Sums of
// their products fit 32 bits, as do those of eight bits and 16. [measured] On a Xeon many rows take half as long as
// when both are widened, three quarters by AVX2 alone, and by AVX-512 without VNNI as long.
constexpr int TOGETHER = 128;
constexpr int SHARES = 4095;
#if defined(__AVX512VNNI__) || !defined(__AVX512F__)
constexpr bool BF16_IN_WHOLE_NUMBERS = IN_WHOLE_NUMBERS;
#else
constexpr bool BF16_IN_WHOLE_NUMBERS = false;
#endif

// Inputs that are multiplied together, two or one of float; what they are taken as; how many weights, or words of
// them, a panel has for them; and what sums are. Without instructions for bfloat16 inputs are widened once a product,
// not again for each panel; weights, which are read once, are widened as they come.
template <int PAIR, class I, int WORDS = PANEL * PAIR> struct Multiplied {
    static constexpr int SIZE = PAIR, STEP = WORDS;
    using Input = I;
    static constexpr bool WHOLE = std::is_same<I, int16_t>::value;
    using Total = std::conditional_t<WHOLE, Ints, Floats>;
};
template <class T> struct Pairs;
#if defined(__AVX512BF16__)
template <> struct Pairs<bf16> : Multiplied<2, bf16> {};
#else
template <> struct Pairs<bf16> : Multiplied<2, float> {};
#endif
template <> struct Pairs<float> : Multiplied<1, float> {};
template <> struct Pairs<int16_t> : Multiplied<2, int16_t> {};
template <> struct Pairs<int8_t> : Multiplied<2, int16_t> {};
template <> struct Pairs<Four> : Multiplied<2, int16_t, PANEL / 2> {};
template <class T> using Input = typename Pairs<T>::Input;

// total += a step's weights w of a panel, the c-th WIDE outputs of them, times x.
inline Floats multiply(Floats total, const float* w, int c, const float* x) {
    return total + load<Floats>(w + c * WIDE) * *x;
}

#if defined(__AVX512BF16__)
inline Floats multiply(Floats total, const bf16* w, int c, const bf16* x) {
    return Floats(_mm512_dpbf16_ps(__m512(total), __m512bh(load<__m512i>(w + c * 2 * WIDE)),
                                   __m512bh(_mm512_set1_epi32(load<int32_t>(x)))));
}
#else
inline Floats multiply(Floats total, const bf16* w, int c, const float* x) {
    const Words pair = load<Words>(w + c * 2 * WIDE);
    const Words even = pair << 16, odd = pair & 0xFFFF0000u;
    total += load<Floats>(&odd) * x[1];
    return total + load<Floats>(&even) * x[0];
}
#endif

// The same of whole numbers: WIDE pairs of weights.
typedef int16_t Shorts __attribute__((vector_size(4 * WIDE)));

inline Ints multiply_pairs(Ints total, Shorts w, const int16_t* x) {
#if defined(__AVX512VNNI__)
    return Ints(_mm512_dpwssd_epi32(__m512i(total), __m512i(w), _mm512_set1_epi32(load<int32_t>(x))));
#elif defined(__AVX512BW__)
    return total + Ints(_mm512_madd_epi16(__m512i(w), _mm512_set1_epi32(load<int32_t>(x))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return total + Ints(_mm256_madd_epi16(__m256i(w), _mm256_set1_epi32(load<int32_t>(x))));
#else
    for (int i = 0; i < WIDE; i++) total[i] += int32_t(w[2 * i]) * x[0] + int32_t(w[2 * i + 1]) * x[1];
    return total;
#endif
}

inline Ints multiply(Ints total, const int16_t* w, int c, const int16_t* x) {
    return multiply_pairs(total, load<Shorts>(w + c * 2 * WIDE), x);
}

inline Ints multiply(Ints total, const int8_t* w, int c, const int16_t* x) {
    typedef int8_t Bytes __attribute__((vector_size(2 * WIDE)));
    return multiply_pairs(total, __builtin_convertvector(load<Bytes>(w + c * 2 * WIDE), Shorts), x);
}

inline Ints multiply(Ints total, const Four* w, int c, const int16_t* x) {
    const int first = c * 2 * WIDE;  // of them as weights in a row
    const Shorts words = load<Shorts>(w + first % (PANEL / 2));
    return multiply_pairs(total, (words >> (first / (PANEL / 2) * 4) & 15) - 8, x);
}

inline Floats as_floats(Floats x) { return x; }
inline Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// What the sums of a stretch of inputs are multiplied by before they are added: `scale` of PANEL outputs, or null, and
// of each row `of_x` where they are of whole numbers. In a group of four bits a weight is (bits - 8) * scale + middle,
// and `x_sums` [rows] are the group's; elsewhere `middle` is null.
struct Scales {
    const float *scale, *middle;
    float of_x[MOST], x_sums[MOST];
};

// sums [R, PANEL], rows `stride` apart, += x [R][steps] times a panel's block w [steps, PANEL], scaled if at all.
// fresh: there are no sums yet.
template <class T, int R>
void dot(const Input<T>* const* x, const T* w, int64_t steps, float* sums, int64_t stride, bool fresh, Ahead& ahead,
         const Scales* scales) {
    using Total = typename Pairs<T>::Total;
    constexpr bool WHOLE = Pairs<T>::WHOLE;
    constexpr int COLUMNS = columns(R);
    for (int first = 0; first < PANEL; first += COLUMNS * WIDE) {
        Total total[R][COLUMNS];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++) {
                total[r][c] = Total{};
                if constexpr (!WHOLE)
                    if (!scales && !fresh) total[r][c] = read(sums + r * stride + first + c * WIDE);
            }
        const T* step = w;
        for (int64_t k = 0; k < steps; k++, step += Pairs<T>::STEP) {
            ahead.turn();
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++)
                    total[r][c] = multiply(total[r][c], step, first / WIDE + c, x[r] + k * Pairs<T>::SIZE);
        }
        for (int c = 0; c < COLUMNS; c++)
            for (int r = 0; r < R; r++) {
                const int at = first + c * WIDE;
                float* own = sums + r * stride + at;
                Floats sum = as_floats(total[r][c]);
                if (scales) {
                    Floats scale = Floats{} + 1.0f;
                    if (scales->scale) scale = read(scales->scale + at);
                    if (WHOLE) scale *= scales->of_x[r];
                    sum = fused(sum, scale, fresh ? Floats{} : read(own));
                    if (scales->middle) sum = fused(read(scales->middle + at), Floats{} + scales->x_sums[r], sum);
                }
                write(own, sum);
            }
    }
}

template <class T>
void dot(int64_t rows, const Input<T>* const* x, const T* w, int64_t steps, float* sums, int64_t stride, bool fresh,
         Ahead& ahead, const Scales* scales = nullptr) {
    switch (rows) {
        case 1: return dot<T, 1>(x, w, steps, sums, stride, fresh, ahead, scales);
        case 2: return dot<T, 2>(x, w, steps, sums, stride, fresh, ahead, scales);
        case 3: return dot<T, 3>(x, w, steps, sums, stride, fresh, ahead, scales);
        case 4: return dot<T, 4>(x, w, steps, sums, stride, fresh, ahead, scales);
        case 5: return dot<T, 5>(x, w, steps, sums, stride, fresh, ahead, scales);
        default: return dot<T, 6>(x, w, steps, sums, stride, fresh, ahead, scales);
    }
}

}  // namespace

extern "C" {

enum Kind : int64_t { AS_COMPUTED = 0, INT8 = 1, INT4 = 2, INT16 = 3 };

// What adapters add to a map, or null: `down` [adapters, rank, inputs] of the type that is computed in, `up` [adapters,
// panels, rank, PANEL], and of each panel the ranks `used` [panels, 2] (from, to) that reach it.
struct LowRank {
    const void* down;
    const float* up;
    const int64_t* used;
    int64_t rank;
};

// A linear map. `weight` in panels of PANEL outputs: as computed [inputs / pair, PANEL, pair], int8 likewise with
// pair 2, four bits [inputs / 2, 32] words of which the n-th four bits are of outputs 16 n and on; int16 are weights of
// bfloat16 as whole numbers, likewise with pair 2. `scale` [outputs in panels]; of int16 [panels, blocks_of(inputs),
// PANEL]; in four bits [panels, inputs / GROUP, 2, PANEL]: a weight is (bits - 8) * scale + middle.
// `bias` [outputs in panels]. gated: a panel's first half are gates, its second half what they gate; `outputs` are
// then what comes of both.
struct Map {
    const void* weight;
    const float* scale;
    const float* bias;
    int64_t kind, inputs, outputs, panels, gated;
    const LowRank* adapters;
};

}  // extern "C"

namespace {

// Results of a panel.
inline int64_t panel_width(const Map& map) { return map.gated ? PANEL / 2 : PANEL; }

template <class T> int64_t panel_bytes(const Map& map) {
    const int64_t all = map.inputs * PANEL;
    return map.kind == AS_COMPUTED ? all * sizeof(T) : map.kind == INT16 ? 2 * all : map.kind == INT8 ? all : all / 2;
}

#if defined(__AVX512BF16__)

// Inputs `from..from + count` of a panel of eight bits.
inline void unpack_int8(const int8_t* packed, int64_t from, int64_t count, bf16* to) {
    packed += from * PANEL;
    for (int64_t i = 0; i < count * PANEL; i += 2 * WIDE) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(packed + i)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(packed + i + WIDE)));
        store(to + i, _mm512_cvtne2ps_pbh(high, low));
    }
}

// bits - 8 as bfloat16, twice: an index of five bits may say anything in its highest.
alignas(64) constexpr uint16_t FOUR_BITS[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};

// The same of four bits.
inline void unpack_int4(const uint16_t* packed, int64_t from, int64_t count, bf16* to) {
    packed += from / 2 * (PANEL / 2);
    for (int64_t i = 0; i < count / 2; i++, packed += PANEL / 2, to += 2 * PANEL) {
        const __m512i values = load<__m512i>(FOUR_BITS), words = load<__m512i>(packed);
        store(to, _mm512_permutexvar_epi16(words, values));
        store(to + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values));
        store(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values));
        store(to + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values));
    }
}

#else

inline void unpack_int8(const int8_t* packed, int64_t from, int64_t count, int16_t* to) {
    std::copy_n(packed + from * PANEL, count * PANEL, to);
}

inline void unpack_int4(const uint16_t* packed, int64_t from, int64_t count, int16_t* to) {
    packed += from / 2 * (PANEL / 2);
    for (int64_t i = 0; i < count / 2; i++, packed += PANEL / 2)
        for (int n = 0; n < 4; n++, to += 32)
            for (int j = 0; j < 32; j++) to[j] = int16_t((packed[j] >> (4 * n) & 15) - 8);
}

#endif

// Rows as products by weights of type W take them: [rows, inputs], and where they are whole numbers what these are to
// be multiplied by, `factors` [rows, blocks_of(inputs)].
template <class W> struct Taken {
    const Input<W>* at;
    const float* factors;
};

inline int64_t blocks_of(int64_t inputs) { return (inputs + TOGETHER - 1) / TOGETHER; }

// sums [rows, PANEL] (of what is before `from`) += x [rows][inputs] times inputs `from..from + count` of panel p, whose
// weights w [count / pair, PANEL, pair] are. x_sums [rows][inputs / GROUP].
template <class W>
void multiply_block(const Map& map, int64_t p, int64_t from, int64_t count, int64_t rows, const Taken<W>& x, const W* w,
                    const float* x_sums, float* sums, Ahead& ahead) {
    constexpr int PAIR = Pairs<W>::SIZE;
    const bool grouped = map.kind == INT4;
    const Input<W>* own[MOST];
    for (int64_t r = 0; r < rows; r++) own[r] = x.at + r * map.inputs + from;
    if (!grouped && !Pairs<W>::WHOLE) return dot(rows, own, w, count / PAIR, sums, PANEL, from == 0, ahead);
    const int64_t groups = map.inputs / GROUP, blocks = blocks_of(map.inputs);
    for (int64_t at = 0, step = grouped ? GROUP : TOGETHER; at < count; at += step) {
        const int64_t group = (from + at) / GROUP, block = (from + at) / TOGETHER;
        Scales scales{};
        if (map.kind == INT16) scales.scale = map.scale + (p * blocks + block) * PANEL;
        if (grouped) {
            scales.scale = map.scale + (p * groups + group) * 2 * PANEL;
            scales.middle = scales.scale + PANEL;
            for (int64_t r = 0; r < rows; r++) scales.x_sums[r] = x_sums[r * groups + group];
        }
        if (Pairs<W>::WHOLE)
            for (int64_t r = 0; r < rows; r++) scales.of_x[r] = x.factors[r * blocks + block];
        dot(rows, own, w + at / PAIR * Pairs<W>::STEP, std::min(step, count - at) / PAIR, sums, PANEL, from + at == 0,
            ahead, &scales);
        for (int64_t r = 0; r < rows; r++) own[r] += step;
    }
}

// What the weights of attention are relative to, which is a raw score, and what they sum to.
struct Sum {
    float peak, total;
};

struct Scratch {
    Room<Unpacked> unpacked;
    Room<int16_t> whole;
    Room<float> sums, part, scores, inputs, factors;
    Room<Sum> totals;
    Room<char> packed;
};

inline Scratch& scratch() {
    static thread_local Scratch own;
    return own;
}

// x [count] as products take it: where it lies, or in `wide` [count].
template <class T> const Input<T>* as_input(const T* x, int64_t count, float* wide) {
    if constexpr (std::is_same<T, Input<T>>::value) {
        return x;
    } else {
        int64_t i = 0;
        for (; i + WIDE <= count; i += WIDE) write(wide + i, read(x + i));
        for (; i < count; i++) wide[i] = number(x[i]);
        return wide;
    }
}

// x [count], of one block, as whole numbers up to `most` -> what they are to be multiplied by, which is no number where
// one of x is none.
template <class T> float as_whole_numbers(const T* x, int64_t count, float most, int16_t* to) {
    Floats peaks{}, nothing{};
    float peak = 0.0f, none = 0.0f;
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) {
        const Floats own = read(x + i);
        peaks = greater(peaks, greater(own, -own));
        nothing += own * 0.0f;
    }
    for (int64_t j = i; j < count; j++) {
        peak = std::max(peak, std::abs(number(x[j])));
        none += number(x[j]) * 0.0f;
    }
    peak = std::max(peak, greatest(peaks));
    const float share = peak > 1e-30f ? most / peak : 0.0f;
    for (i = 0; i + WIDE <= count; i += WIDE) write(to + i, rounded(read(x + i) * share));
    for (; i < count; i++) to[i] = int16_t(std::lrint(number(x[i]) * share));
    return peak / most + (none + sum(nothing));
}

// x [rows, inputs] as products by a map's weights W take it: where it lies, or in the thread's scratch.
template <class W, class T> Taken<W> taken(const Map& map, const T* x, int64_t rows) {
    Scratch& own = scratch();
    const int64_t inputs = map.inputs;
    if constexpr (Pairs<W>::WHOLE) {
        const float most = map.kind == INT16 ? SHARES : INT16_MAX;
        int16_t* to = room(own.whole, rows * inputs);
        float* factor = room(own.factors, rows * blocks_of(inputs));
        for (int64_t at = 0; at < rows * inputs; at += inputs)
            for (int64_t k = at; k < at + inputs; k += TOGETHER)
                *factor++ = as_whole_numbers(x + k, std::min<int64_t>(TOGETHER, at + inputs - k), most, to + k);
        return {to, own.factors.data()};
    } else {
        return {as_input(x, rows * inputs, room(own.inputs, rows * inputs)), nullptr};
    }
}

// Whether tiles can multiply rows of such a width.
template <class T> bool fits_tiles(int64_t width) {
    return std::is_same<T, bf16>::value && width % TILE_INPUTS == 0 && has_tiles();
}

// The same as `multiply_block`, of x [rows, count] and x_sums [rows, inputs / GROUP], in tiles; `meanwhile` is that of
// `Tiles::multiply`.
template <class F>
void tiled_block(Tiles& tiles, const Map& map, int64_t p, int64_t from, int64_t count, int64_t rows, const TileRows& x,
                 const bf16* unpacked, const float* x_sums, float* sums, F&& meanwhile) {
    static_assert(GROUP == TILE_INPUTS, "a group is a step");
    const bf16* w = unpacked;
    if (map.kind == AS_COMPUTED) w = static_cast<const bf16*>(map.weight) + (p * map.inputs + from) * PANEL;
    if (map.kind != INT4) return tiles.multiply(x, rows, w, count, sums, from == 0, meanwhile);
    const int64_t groups = map.inputs / GROUP;
    float* part = room(scratch().part, HEIGHT * PANEL);
    TileRows own = x;
    for (int64_t at = 0; at < count; at += GROUP, own.at += x.step) {
        const int64_t group = (from + at) / GROUP;
        const float* scale = map.scale + (p * groups + group) * 2 * PANEL;
        tiles.multiply(own, rows, w + at * PANEL, GROUP, part, true, meanwhile);
        for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < PANEL; c += WIDE) {
                float* sum = sums + r * PANEL + c;
                const Floats so_far = from + at == 0 ? Floats{} : read(sum);
                const Floats scaled = fused(read(part + r * PANEL + c), read(scale + c), so_far);
                write(sum, fused(read(scale + PANEL + c), Floats{} + x_sums[r * groups + group], scaled));
            }
    }
}

// What a product needs to know of its inputs beside: where weights have four bits the sums of every GROUP [rows,
// inputs / GROUP]; with adapters the one of each row (0: none), and the inputs on their ranks [rows, rank].
struct Beside {
    float *sums, *ranks;
    const int64_t* adapters;
};

// One row's sums of panel p into out [outputs], with scale, bias, adapter, gate and, if there is one, residual. There
// is one copy of it wherever it is called, which a compiler might else make of other instructions: a row's numbers
// must not depend on when it is finished.
template <class T, class O>
__attribute__((noinline)) void finish(const Map& map, int64_t p, int64_t adapter, const float* ranks, float* sums,
                                      const Row<const T>& residual, const Row<O>& out) {
    if (map.kind == INT8)
        for (int c = 0; c < PANEL; c++) sums[c] *= map.scale[p * PANEL + c];
    if (map.bias)
        for (int c = 0; c < PANEL; c++) sums[c] += map.bias[p * PANEL + c];
    if (adapter) {
        const LowRank& own = *map.adapters;
        const float* up = own.up + ((adapter - 1) * map.panels + p) * own.rank * PANEL;
        Floats total[PANEL / WIDE];
        for (int c = 0; c < PANEL / WIDE; c++) total[c] = read(sums + c * WIDE);
        for (int64_t j = own.used[2 * p]; j < own.used[2 * p + 1]; j++)
#pragma GCC unroll 4
            for (int c = 0; c < PANEL / WIDE; c++) total[c] += read(up + j * PANEL + c * WIDE) * ranks[j];
        for (int c = 0; c < PANEL / WIDE; c++) write(sums + c * WIDE, total[c]);
    }
    const int64_t width = panel_width(map), first = p * width;
    if (map.gated)
        for (int c = 0; c < width; c += WIDE) {
            const Floats gate = read(sums + c);
            write(sums + c, gate / (1.0f + exponential(-gate)) * read(sums + width + c));
        }
    const int64_t count = std::min(width, map.outputs - first);
    int64_t c = 0;
    for (; c + WIDE <= count; c += WIDE)
        write(out.of(first + c), residual.at ? read(sums + c) + read(residual.of(first + c)) : read(sums + c));
    for (; c < count; c++) put(out.of(first + c), residual.at ? sums[c] + number(*residual.of(first + c)) : sums[c]);
}

// Fetches what is about to be written.
template <class O> inline void expect_writes(O* out, int64_t count) {
    char* end = reinterpret_cast<char*>(out + count);
    for (char* line = reinterpret_cast<char*>(out); line < end; line += LINE) __builtin_prefetch(line, 1, 3);
}

// Whether the processor itself fetches a stream early enough. [measured] An AMD EPYC's does; with an Intel Xeon's alone
// a single row's product takes a fifth longer, that of six rows half as long again.
inline bool foresees_streams() { return !__builtin_cpu_is("intel"); }

// `product`, by weights that are multiplied as W.
template <class W, class T, class O>
void product_by(const Map& map, const Rows<const T>& x, bool tiled, const Beside& beside, Member& member,
                int64_t num_rows, const Rows<const T>& residual, const Rows<O>& out) {
    const int64_t inputs = map.inputs, groups = inputs / GROUP, bytes = panel_bytes<T>(map);
    const bool once = num_rows <= (tiled ? TILE : MOST);
    const bool is_unpacked = (map.kind == INT8 || map.kind == INT4) && std::is_same<W, Unpacked>::value;
    const int64_t deep = is_unpacked && once ? NEAR : !is_unpacked && tiled && inputs <= WHOLE ? inputs : DEEP;
    // as many rows at a time as stay near while panels pass, each of which is read again for the next
    const int64_t row_bytes = inputs * sizeof(Input<W>);
    const int64_t most = std::max<int64_t>(LEAST_ROWS, NEAR_BYTES / row_bytes / LEAST_ROWS * LEAST_ROWS);
    Scratch& own = scratch();
    const bool whole = inputs <= deep;
    // Two buffers in turn, since rows of one may be due: of a cut where a panel is one block, else of all rows.
    const int64_t buffer = (whole ? HEIGHT : std::min(most, num_rows)) * PANEL;
    float* sums = room(own.sums, 2 * buffer);
    Unpacked* unpacked = is_unpacked ? room(own.unpacked, deep * PANEL) : nullptr;
    // What is fetched meanwhile is the thread's next panel. Of a single pass it is what comes soon, and nothing where
    // rows are multiplied in registers and the processor foresees that stream.
    const bool fetches = !once || tiled || !foresees_streams();
    const int64_t soon = std::min(SOON_BYTES, bytes);
    const char* first = static_cast<const char*>(map.weight);
    const char* all_end = first + map.panels * bytes;
    const int64_t share = once ? std::max<int64_t>(1, map.panels / (TURNS * member.threads)) : 1;
    const int64_t num_turns = (map.panels + share - 1) / share;
    Tiles tiles;
    // Rows past a panel whose sums are there, and which are still to be finished.
    struct {
        int64_t panel, row, end;
        float* sums;
    } due{};
    const auto finish_row = [&] {
        const int64_t row = due.row++, adapter = map.adapters && beside.adapters ? beside.adapters[row] : 0;
        const float* ranks = adapter ? beside.ranks + row * map.adapters->rank : nullptr;
        finish(map, due.panel, adapter, ranks, due.sums, residual.at ? residual[row] : Row<const T>{}, out[row]);
        due.sums += PANEL;
    };
    const auto finish_rows = [&] {
        while (due.row < due.end) finish_row();
    };
    int64_t turn_of = 0;  // the buffers
    // `rows` from `top` on past one panel, while what is `ahead` is fetched.
    const auto pass = [&](int64_t p, Ahead ahead, const Taken<W>& in, int64_t top, int64_t rows) {
        const char* panel = first + p * bytes;
        const int64_t height = tiled ? HEIGHT : MOST, cuts = (rows + height - 1) / height;
        // tiles are as full as can be, and registers as evenly
        const auto begin = [&](int64_t cut) { return tiled ? std::min(cut * HEIGHT, rows) : cut * rows / cuts; };
        int64_t turns = 0;
        for (int64_t cut = 0; cut < cuts; cut++) {
            const int64_t count = begin(cut + 1) - begin(cut);
            turns += tiled ? Tiles::turns(count, inputs)
                           : inputs / Pairs<W>::SIZE * (PANEL / WIDE) / columns(int(count));
        }
        ahead.spread(turns);
        for (int64_t from = 0; from < inputs; from += deep) {
            const int64_t count = std::min(deep, inputs - from);
            const bool last = from + count == inputs;
            if (is_unpacked && map.kind == INT8)
                unpack_int8(reinterpret_cast<const int8_t*>(panel), from, count, unpacked);
            else if (is_unpacked)
                unpack_int4(reinterpret_cast<const uint16_t*>(panel), from, count, unpacked);
            for (int64_t cut = 0; cut < cuts; cut++) {
                const int64_t low = begin(cut), high = begin(cut + 1);
                float* own_sums = sums + turn_of % 2 * buffer + (whole ? 0 : low * PANEL);
                turn_of += whole;
                if (tiled) {
                    if constexpr (!IN_WHOLE_NUMBERS && std::is_same<W, bf16>::value) {
                        const Rows<const bf16> all{x.at, inputs, x.in_strips};
                        const int64_t each = ((due.end - due.row) << 16) / Tiles::turns(high - low, count) + 1;
                        int64_t passed = 0;
                        tiled_block(tiles, map, p, from, count, high - low, two_tiles(all, top + low, from), unpacked,
                                    beside.sums + (top + low) * groups, own_sums, [&] {
                                        ahead.turn();
                                        for (passed += each; passed >= 1 << 16; passed -= 1 << 16)
                                            if (due.row < due.end) finish_row();
                                    });
                    }
                } else {
                    if (last && !once)
                        for (int64_t r = low; r < high; r++)
                            expect_writes(out[top + r].of(p * panel_width(map)), panel_width(map));
                    const W* w = reinterpret_cast<const W*>(unpacked);
                    if (!is_unpacked)
                        w = static_cast<const W*>(map.weight) + (p * inputs + from) / Pairs<W>::SIZE * Pairs<W>::STEP;
                    Taken<W> own_in{in.at + low * inputs, in.factors};
                    if (Pairs<W>::WHOLE) own_in.factors += low * blocks_of(inputs);
                    const float* x_sums = beside.sums + (top + low) * groups;
                    multiply_block(map, p, from, count, high - low, own_in, w, x_sums, own_sums, ahead);
                }
                finish_rows();
                if (last) due = {p, top + low, top + high, own_sums};
            }
        }
        turn_of += !whole;
    };
    for (int64_t top = 0; top < num_rows; top += most) {
        const int64_t rows = std::min(most, num_rows - top);
        Taken<W> in{};
        if (!tiled) in = taken<W>(map, x.at + top * inputs, rows);
        for (int64_t turn = member.take(), next = 0; turn < num_turns; turn = next) {
            next = member.take();
            const int64_t end = std::min((turn + 1) * share, map.panels);
            const char *other = next < num_turns ? first + next * share * bytes : all_end, *edge = first + end * bytes;
            for (int64_t p = turn * share; p < end; p++) {
                const char* later = once ? first + p * bytes + soon : other;
                Ahead ahead{later, fetches ? std::min(later + bytes, all_end) : later};
                if (once || num_rows <= 2 * MOST) ahead.edge = once ? edge : all_end;
                // behind a turn's last panel comes the next turn's first
                if (fetches && once && other < all_end) ahead.jump = other - edge, ahead.end = later + bytes;
                pass(p, ahead, in, top, rows);
            }
        }
        finish_rows();
        member.end(num_turns);
    }
}

// x [rows, inputs] W^T, gated or plus residual (if that is anywhere) -> out [rows, outputs]. `tiled`: by tiles, of rows
// in strips if they are more than TILE; else rows lie one behind the other. Called by every thread of a team; all are
// done when it returns.
template <class T, class O>
void product(const Map& map, const Rows<const T>& x, bool tiled, const Beside& beside, Member& member, int64_t num_rows,
             const Rows<const T>& residual, const Rows<O>& out) {
    const auto by = [&](auto kind) {
        product_by<decltype(kind)>(map, x, tiled, beside, member, num_rows, residual, out);
    };
    if constexpr (IN_WHOLE_NUMBERS && std::is_same<T, bf16>::value) {
        if (map.kind == INT8 && num_rows <= MOST) return by(int8_t{});
        if (map.kind == INT4 && num_rows <= MOST) return by(Four{});
        if (map.kind != AS_COMPUTED) return by(int16_t{});
    }
    by(T{});
}

}  // namespace
