// Sums of products in the tiles of a processor that has them (AMX).
//
// A tile of weights is 32 inputs of 16 outputs, and lies in a panel as it is multiplied by. Up to 16 rows pass a panel
// once, four tiles of it at a time. Up to 32 are two tiles, which pass one half of the panel and then the other. A
// row's numbers do not depend on how many there are.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE = 16;         // rows, and outputs
constexpr int TILE_INPUTS = 32;  // of bfloat16

constexpr int64_t HEIGHT = 2 * TILE;  // rows of two tiles
static_assert(HEIGHT == STRIP && TILE_INPUTS == STRIP, "rows in strips are two tiles after the other");

// Up to HEIGHT rows of bfloat16 as two tiles are loaded of them: how many numbers there are from a row to the next,
// from the first tile to the second one, and from TILE_INPUTS to the next ones.
struct TileRows {
    const bf16* at;
    int64_t row, below, step;
};

// Rows that are `stride` numbers apart.
inline TileRows apart(const bf16* x, int64_t stride) { return {x, stride, TILE * stride, TILE_INPUTS}; }

// Rows from `first` on, a multiple of HEIGHT where rows are in strips, and from `input` on, a multiple of TILE_INPUTS.
inline TileRows two_tiles(const Rows<const bf16>& x, int64_t first, int64_t input) {
    const Row<const bf16> row = x[first];
    if (!x.in_strips) return apart(row.of(input), x.width);
    return {row.of(input), STRIP, TILE * STRIP, row.step};
}

// Pages that are fetched at the same time, a line of each in turn. [measured] A processor's own prefetcher follows a
// stream within a page: two threads of a Xeon read 23 GB/s when each fetches one page after the other, and 30 when it
// fetches four.
constexpr int64_t PAGES = 4, PAGE = 4096, WINDOW = PAGES * PAGE;

// What is fetched meanwhile: from `at` on to `end`. With an `edge` it is fetched by several pages at a time, and what
// lies there or behind is fetched from `jump` bytes further.
struct Ahead {
    const char *at, *end, *edge = nullptr;
    int64_t jump = 0;
    uint32_t passed = 0;  // lines
    uint32_t share = 0;   // lines of a turn, in 2^16ths
    uint32_t due = 0;     // what of them is left over

    // All of it in so many turns, a share in each.
    void spread(int64_t turns) {
        int64_t lines = (end - at + LINE - 1) / LINE;
        if (edge) lines = (lines * LINE + WINDOW - 1) / WINDOW * (WINDOW / LINE);
        share = at < end ? uint32_t((lines << 16) / turns + 1) : 0;
    }

    void turn() {
        for (due += share; due >= 1 << 16; due -= 1 << 16) {
            if (edge) {
                if (at < end) __builtin_prefetch(at < edge ? at : at + jump, 0, 2);
                at += PAGE;
                if (++passed % PAGES == 0) at += passed % (WINDOW / LINE) ? LINE - WINDOW : LINE - PAGE;
            } else if (at < end) {
                __builtin_prefetch(at, 0, 2);
                at += LINE;
            }
        }
    }
};

#if defined(HAS_TILES)

// Whether the system lets this process have tiles, which it must ask for once.
inline bool has_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

// Instructions by their names: GCC's functions for them do not say which memory they read.
template <int AT> inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(AT) : "memory");
}

template <int AT> inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(AT) : "memory");
}

template <int AT> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(AT)); }

template <int SUMS, int X, int W> inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(W));
}

// A thread's tiles. Sums are in the first four; with up to TILE rows x is in the fifth, else in the fifth and the
// sixth; weights are in the others.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    ~Tiles() {
        if (rows) asm volatile("tilerelease");
    }

    static int64_t turns(int64_t count, int64_t inputs) { return inputs / TILE_INPUTS * (count > TILE ? 2 : 1); }

    // sums [count, PANEL], rows PANEL apart, += x [count, inputs] times w [inputs / 2, PANEL, 2], of up to HEIGHT rows,
    // inputs being whole tiles. fresh: there are no sums yet. `meanwhile` is called in each of `turns`: other parts of
    // the processor have time while tiles are multiplied.
    template <class F>
    void multiply(const TileRows& x, int64_t count, const bf16* w, int64_t inputs, float* sums, bool fresh,
                  F&& meanwhile) {
        shape(count);
        if (count <= TILE) return one_by_four(x, w, inputs / TILE_INPUTS, sums, fresh, meanwhile);
        for (int half = 0; half < 2; half++)
            two_by_two(x, w + half * PANEL, inputs / TILE_INPUTS, sums + half * PANEL / 2, fresh, meanwhile);
    }

private:
    static constexpr int64_t W_ROW = 2 * PANEL * sizeof(bf16), SUMS_ROW = PANEL * sizeof(float);
    static constexpr int64_t W_STEP = TILE_INPUTS * PANEL, STORED_EVERY = 4;
    int64_t rows = 0;

    void shape(int64_t count) {
        if (count == rows) return;
        rows = count;
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } wanted;
        for (int i = 0; i < 8; i++) wanted.bytes[i] = LINE, wanted.rows[i] = TILE;
        const int64_t low = std::min<int64_t>(count, TILE), high = count - low;
        for (int i = 0; i < 5; i++) wanted.rows[i] = uint8_t(low);
        if (high) wanted.rows[2] = wanted.rows[3] = wanted.rows[5] = uint8_t(high);
        asm volatile("ldtilecfg %0" : : "m"(wanted) : "memory");
    }

    template <class F>
    static void one_by_four(const TileRows& rows, const bf16* w, int64_t steps, float* sums, bool fresh, F& meanwhile) {
        const bf16* x = rows.at;
        const int64_t stride = rows.row * sizeof(bf16);
        if (fresh) {
            tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        } else {
            tile_load<0>(sums, SUMS_ROW), tile_load<1>(sums + TILE, SUMS_ROW);
            tile_load<2>(sums + 2 * TILE, SUMS_ROW), tile_load<3>(sums + 3 * TILE, SUMS_ROW);
        }
        for (int64_t k = 0; k < steps; k++, x += rows.step, w += W_STEP) {
            meanwhile();
            tile_load<4>(x, stride);
            tile_load<5>(w, W_ROW);
            tile_multiply<0, 4, 5>();
            tile_load<6>(w + 2 * TILE, W_ROW);
            tile_multiply<1, 4, 6>();
            tile_load<7>(w + 4 * TILE, W_ROW);
            tile_multiply<2, 4, 7>();
            tile_load<5>(w + 6 * TILE, W_ROW);
            tile_multiply<3, 4, 5>();
        }
        tile_store<0>(sums, SUMS_ROW), tile_store<1>(sums + TILE, SUMS_ROW);
        tile_store<2>(sums + 2 * TILE, SUMS_ROW), tile_store<3>(sums + 3 * TILE, SUMS_ROW);
    }

    template <class F>
    static void two_by_two(const TileRows& rows, const bf16* w, int64_t steps, float* sums, bool fresh, F& meanwhile) {
        const bf16* x = rows.at;
        const int64_t stride = rows.row * sizeof(bf16), below_x = rows.below;
        float* below = sums + TILE * PANEL;
        if (fresh) {
            tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        } else {
            tile_load<0>(sums, SUMS_ROW), tile_load<1>(sums + TILE, SUMS_ROW);
            tile_load<2>(below, SUMS_ROW), tile_load<3>(below + TILE, SUMS_ROW);
        }
        for (int64_t k = 0; k < steps; k++, x += rows.step, w += W_STEP) {
            meanwhile();
            tile_load<6>(w, W_ROW);
            tile_load<4>(x, stride);
            tile_multiply<0, 4, 6>();
            tile_load<7>(w + 2 * TILE, W_ROW);
            tile_multiply<1, 4, 7>();
            tile_load<5>(x + below_x, stride);
            tile_multiply<2, 5, 6>();
            tile_multiply<3, 5, 7>();
            // [measured] A store now and then, of sums that are not ready, makes the loads from the second cache a
            // third faster on a Xeon, and costs nothing where they come from the first.
            if (k % STORED_EVERY == STORED_EVERY - 1) tile_store<0>(sums, SUMS_ROW);
        }
        tile_store<0>(sums, SUMS_ROW), tile_store<1>(sums + TILE, SUMS_ROW);
        tile_store<2>(below, SUMS_ROW), tile_store<3>(below + TILE, SUMS_ROW);
    }
};

#else

inline bool has_tiles() { return false; }

class Tiles {
public:
    static int64_t turns(int64_t, int64_t) { return 1; }
    template <class F> void multiply(const TileRows&, int64_t, const bf16*, int64_t, float*, bool, F&&) {}
};

#endif

}  // namespace
