// Products with weights in panels.
//
// Weights are unpacked as they are read. Scale, bias, adapter, gate and residual follow a product of some rows when that
// of the next ones has been computed, or in tiles meanwhile.
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
constexpr int64_t SOON_BYTES = 16 << 10;  // of a stream of weights, fetched before their turn
constexpr int TURNS = 8;         // of a thread in one product of few rows
constexpr int DEEP = 2048;       // inputs of a block of a panel, so that it stays in the second cache,
constexpr int WHOLE = 4096;      // but in tiles up to so many are one block, whose sums stay in the first one
constexpr int NEAR = 128;        // the same where a block is read but once: in the first
// Vectors of outputs of each of `rows` that are in registers at a time. Where there are only 16 registers, few rows get
// as many as there is room for: a panel is then read in fewer goes, and one that leaves lines out is slow from memory.
constexpr int columns(int rows) { return WIDE == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// Inputs that are multiplied together: two of bfloat16, one of float. Without instructions for bfloat16 they are
// widened once a product, not again for each panel; weights, which are read once, are widened as they come.
template <class T> struct Pairs;
template <> struct Pairs<bf16> {
    static constexpr int SIZE = 2;
#if defined(__AVX512BF16__)
    using Input = bf16;
#else
    using Input = float;
#endif
};
template <> struct Pairs<float> {
    static constexpr int SIZE = 1;
    using Input = float;
};
template <class T> using Input = typename Pairs<T>::Input;

#if defined(__AVX512BF16__)
inline Floats multiply(Floats total, const bf16* w, const bf16* x) {
    return Floats(_mm512_dpbf16_ps(__m512(total), __m512bh(load<__m512i>(w)),
                                   __m512bh(_mm512_set1_epi32(load<int32_t>(x)))));
}
#else
inline Floats multiply(Floats total, const bf16* w, const float* x) {
    const Words pair = load<Words>(w);
    const Words even = pair << 16, odd = pair & 0xFFFF0000u;
    total += load<Floats>(&odd) * x[1];
    return total + load<Floats>(&even) * x[0];
}
#endif

inline Floats multiply(Floats total, const float* w, const float* x) { return total + load<Floats>(w) * *x; }

// A group of four bits: a weight is (bits - 8) * scale + middle, of PANEL outputs each; `x_sums` [rows].
struct Scales {
    const float *scale, *middle;
    float x_sums[MOST];
};

// sums [R, PANEL], rows `stride` apart, += x [R][steps] times a panel's block w [steps, PANEL], scaled if at all.
// fresh: there are no sums yet.
template <class T, int R>
void dot(const Input<T>* const* x, const T* w, int64_t steps, float* sums, int64_t stride, bool fresh, Ahead& ahead,
         const Scales* scales) {
    constexpr int PAIR = Pairs<T>::SIZE, COLUMNS = columns(R);
    for (int first = 0; first < PANEL; first += COLUMNS * WIDE) {
        Floats total[R][COLUMNS];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < COLUMNS; c++)
                total[r][c] = scales || fresh ? Floats{} : read(sums + r * stride + first + c * WIDE);
        const T* block = w + first * PAIR;
        for (int64_t k = 0; k < steps; k++, block += PANEL * PAIR) {
            ahead.turn();
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++)
                    total[r][c] = multiply(total[r][c], block + c * WIDE * PAIR, x[r] + k * PAIR);
        }
        for (int c = 0; c < COLUMNS; c++)
            for (int r = 0; r < R; r++) {
                const int at = first + c * WIDE;
                float* own = sums + r * stride + at;
                if (scales) {
                    const Floats so_far = fused(total[r][c], read(scales->scale + at), fresh ? Floats{} : read(own));
                    total[r][c] = fused(read(scales->middle + at), Floats{} + scales->x_sums[r], so_far);
                }
                write(own, total[r][c]);
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

enum Kind : int64_t { AS_COMPUTED = 0, INT8 = 1, INT4 = 2 };

// What adapters add to a map, or null: `down` [adapters, rank, inputs] of the type that is computed in, `up` [adapters,
// panels, rank, PANEL], and of each panel the ranks `used` [panels, 2] (from, to) that reach it.
struct LowRank {
    const void* down;
    const float* up;
    const int64_t* used;
    int64_t rank;
};

// A linear map. `weight` in panels of PANEL outputs: as computed [inputs / pair, PANEL, pair], int8 likewise with
// pair 2, four bits [inputs / 2, 32] words of which the n-th four bits are of outputs 16 n and on. `scale`
// [outputs in panels]; in four bits [panels, inputs / GROUP, 2, PANEL]: a weight is (bits - 8) * scale + middle.
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
    return map.kind == AS_COMPUTED ? all * sizeof(T) : map.kind == INT8 ? all : all / 2;
}

// Inputs `from..from + count` of a panel of eight bits, as bfloat16.
inline void unpack_int8(const int8_t* packed, int64_t from, int64_t count, bf16* to) {
    packed += from * PANEL;
    for (int64_t i = 0; i < count * PANEL; i += 2 * WIDE) {
#if defined(__AVX512BF16__)
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(packed + i)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(packed + i + WIDE)));
        store(to + i, _mm512_cvtne2ps_pbh(high, low));
#elif defined(__AVX512F__)
        for (int64_t j = i; j < i + 2 * WIDE; j += WIDE) {
            const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(packed + j)));
            store(to + j, _mm512_cvtepi32_epi16(_mm512_srli_epi32(__m512i(numbers), 16)));
        }
#else
        for (int j = 0; j < 2 * WIDE; j++) to[i + j] = whole(packed[i + j]);
#endif
    }
}

#if defined(__AVX512BW__)
// bits - 8 as bfloat16, twice: an index of five bits may say anything in its highest.
alignas(64) constexpr uint16_t FOUR_BITS[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
#endif

// The same of four bits.
inline void unpack_int4(const uint16_t* packed, int64_t from, int64_t count, bf16* to) {
    packed += from / 2 * (PANEL / 2);
    for (int64_t i = 0; i < count / 2; i++, packed += PANEL / 2, to += 2 * PANEL) {
#if defined(__AVX512BW__)
        const __m512i values = load<__m512i>(FOUR_BITS), words = load<__m512i>(packed);
        store(to, _mm512_permutexvar_epi16(words, values));
        store(to + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values));
        store(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values));
        store(to + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values));
#else
        for (int n = 0; n < 4; n++)
            for (int j = 0; j < 32; j++) to[32 * n + j] = whole((packed[j] >> (4 * n) & 15) - 8);
#endif
    }
}

// sums [rows, PANEL] (of what is before `from`) += x [rows][inputs] times inputs `from..from + count` of panel p.
// `unpacked`: the same inputs as bfloat16, where the weights are kept in fewer bits. x_sums [rows][inputs / GROUP].
template <class T>
void multiply_block(const Map& map, int64_t p, int64_t from, int64_t count, int64_t rows, const Input<T>* const* x,
                    const T* unpacked, const float* const* x_sums, float* sums, Ahead& ahead) {
    constexpr int PAIR = Pairs<T>::SIZE;
    const Input<T>* own[MOST];
    for (int64_t r = 0; r < rows; r++) own[r] = x[r] + from;
    if (map.kind == AS_COMPUTED) {
        const T* w = static_cast<const T*>(map.weight) + (p * map.inputs + from) * PANEL;
        dot(rows, own, w, count / PAIR, sums, PANEL, from == 0, ahead);
        return;
    }
    if (map.kind == INT8) {
        dot(rows, own, unpacked, count / PAIR, sums, PANEL, from == 0, ahead);
        return;
    }
    for (int64_t at = 0; at < count; at += GROUP) {
        const int64_t group = (from + at) / GROUP;
        Scales scales;
        scales.scale = map.scale + (p * (map.inputs / GROUP) + group) * 2 * PANEL;
        scales.middle = scales.scale + PANEL;
        for (int64_t r = 0; r < rows; r++) scales.x_sums[r] = x_sums[r][group];
        dot(rows, own, unpacked + at * PANEL, GROUP / PAIR, sums, PANEL, from + at == 0, ahead, &scales);
        for (int64_t r = 0; r < rows; r++) own[r] += GROUP;
    }
}

// What the weights of attention are relative to, which is a raw score, and what they sum to.
struct Sum {
    float peak, total;
};

struct Scratch {
    Room<bf16> unpacked;
    Room<float> sums, part, scores, inputs;
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

// x [rows, inputs] W^T, gated or plus residual (if that is anywhere) -> out [rows, outputs]. `tiled`: by tiles, of rows
// in strips if they are more than TILE; else rows lie one behind the other. Called by every thread of a team; all are
// done when it returns.
template <class T, class O>
void product(const Map& map, const Rows<const T>& x, bool tiled, const Beside& beside, Member& member, int64_t num_rows,
             const Rows<const T>& residual, const Rows<O>& out) {
    const int64_t inputs = map.inputs, groups = inputs / GROUP, bytes = panel_bytes<T>(map);
    const bool once = num_rows <= (tiled ? TILE : MOST);
    const bool is_unpacked = map.kind != AS_COMPUTED;
    const int64_t deep = is_unpacked && once ? NEAR : !is_unpacked && tiled && inputs <= WHOLE ? inputs : DEEP;
    // as many rows at a time as stay near while panels pass, each of which is read again for the next
    const int64_t row_bytes = inputs * sizeof(Input<T>);
    const int64_t most = std::max<int64_t>(LEAST_ROWS, NEAR_BYTES / row_bytes / LEAST_ROWS * LEAST_ROWS);
    Scratch& own = scratch();
    const bool whole = inputs <= deep;
    // Two buffers in turn, since rows of one may be due: of a cut where a panel is one block, else of all rows.
    const int64_t buffer = (whole ? HEIGHT : std::min(most, num_rows)) * PANEL;
    float* sums = room(own.sums, 2 * buffer);
    bf16* unpacked = is_unpacked ? room(own.unpacked, deep * PANEL) : nullptr;
    // What is fetched meanwhile is the thread's next panel. Of a single pass it is what comes soon, and nothing where
    // rows are multiplied in registers and the processor foresees that stream.
    const int64_t soon = tiled || !foresees_streams() ? std::min(SOON_BYTES, bytes) : map.panels * bytes;
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
    // `rows` from `top` on past one panel, while what is at `later` is fetched.
    const auto pass = [&](int64_t p, const char* later, const Input<T>* in, int64_t top, int64_t rows) {
        const char* panel = first + p * bytes;
        const int64_t height = tiled ? HEIGHT : MOST, cuts = (rows + height - 1) / height;
        // tiles are as full as can be, and registers as evenly
        const auto begin = [&](int64_t cut) { return tiled ? std::min(cut * HEIGHT, rows) : cut * rows / cuts; };
        int64_t turns = 0;
        for (int64_t cut = 0; cut < cuts; cut++) {
            const int64_t count = begin(cut + 1) - begin(cut);
            turns += tiled ? Tiles::turns(count, inputs)
                           : inputs / Pairs<T>::SIZE * (PANEL / WIDE) / columns(int(count));
        }
        Ahead ahead{later, std::min(later + bytes, all_end)};
        ahead.spread(turns);
        for (int64_t from = 0; from < inputs; from += deep) {
            const int64_t count = std::min(deep, inputs - from);
            const bool last = from + count == inputs;
            if (map.kind == INT8)
                unpack_int8(reinterpret_cast<const int8_t*>(panel), from, count, unpacked);
            else if (map.kind == INT4)
                unpack_int4(reinterpret_cast<const uint16_t*>(panel), from, count, unpacked);
            for (int64_t cut = 0; cut < cuts; cut++) {
                const int64_t low = begin(cut), high = begin(cut + 1);
                float* own_sums = sums + turn_of % 2 * buffer + (whole ? 0 : low * PANEL);
                turn_of += whole;
                if (tiled) {
                    const Rows<const bf16> all{reinterpret_cast<const bf16*>(x.at), inputs, x.in_strips};
                    const int64_t each = ((due.end - due.row) << 16) / Tiles::turns(high - low, count) + 1;
                    int64_t passed = 0;
                    tiled_block(tiles, map, p, from, count, high - low, two_tiles(all, top + low, from), unpacked,
                                beside.sums + (top + low) * groups, own_sums, [&] {
                                    ahead.turn();
                                    for (passed += each; passed >= 1 << 16; passed -= 1 << 16)
                                        if (due.row < due.end) finish_row();
                                });
                } else {
                    const Input<T>* own_x[MOST];
                    const float* x_sums[MOST];
                    for (int64_t r = low; r < high; r++) {
                        if (last && !once) expect_writes(out[top + r].of(p * panel_width(map)), panel_width(map));
                        own_x[r - low] = in + r * inputs;
                        x_sums[r - low] = beside.sums + (top + r) * groups;
                    }
                    multiply_block(map, p, from, count, high - low, own_x, reinterpret_cast<const T*>(unpacked), x_sums,
                                   own_sums, ahead);
                }
                finish_rows();
                if (last) due = {p, top + low, top + high, own_sums};
            }
        }
        turn_of += !whole;
    };
    for (int64_t top = 0; top < num_rows; top += most) {
        const int64_t rows = std::min(most, num_rows - top);
        const Input<T>* in = nullptr;
        if (!tiled) in = as_input(x.at + top * inputs, rows * inputs, room(own.inputs, rows * inputs));
        for (int64_t turn = member.take(), next = 0; turn < num_turns; turn = next) {
            next = member.take();
            for (int64_t p = turn * share; p < std::min((turn + 1) * share, map.panels); p++) {
                const char* other = next < num_turns ? first + next * bytes : all_end;
                pass(p, once ? first + p * bytes + soon : other, in, top, rows);
            }
        }
        finish_rows();
        member.end(num_turns);
    }
}

}  // namespace
