// Which keys several sequences of a step have in common.
//
// Chats that begin with the same instructions, branches of one conversation and choices of one prompt have the blocks
// of their common beginning once in the cache. A step that reads these blocks once for all of them reads less: eight
// chats behind the same 4,000 tokens read 4,000 in place of 32,000. (Hydragen and cascade inference are the names that
// this has in the literature.)

#pragma once

#include "vectors.h"

extern "C" {

// A paged cache of one layer: block b's head h begins at b * block_stride + h * head_stride, and has
// [block_size, head_dim] numbers of the model's type. Or (`in_bytes`) these are bytes, signed, and [block_size] floats
// stand behind them, by which a token's are multiplied.
struct Cache {
    void *keys, *values;
    int64_t block_stride, head_stride, block_size, kv_heads, head_dim, in_bytes;
};

// A step's sequences: `query_start` [sequences + 1], `positions` and `slot_offsets` of each token. The tokens of a
// sequence follow each other, and are its last.
struct Batch {
    const int64_t *query_start, *positions, *slot_offsets;
    int64_t sequences, tokens;
};

// What layers with one window share: `tables` [sequences, width], the block of each token, and the
// window, a token itself counted (0: all is seen).
struct Group {
    const int32_t* tables;
    const int64_t* slot_blocks;
    int64_t width, window;
};

}  // extern "C"

namespace {

constexpr int64_t LEAST_COMMON = 128;  // keys; of fewer it costs as much to put the parts together
constexpr int64_t MOST_COMMON = 4096;  // keys of a stretch
constexpr int64_t FEW_COMMON = 256;    // keys of a stretch, where longer ones would be too few for the threads

// Keys `low..high`, which members `first..first + count` of `CommonKeys::order` have in common; each of them has
// `number` stretches before it.
struct Stretch {
    int64_t low, high, first, count, number;
};

// The stretches of a step, in which sequences with one query take part.
struct CommonKeys {
    std::vector<Stretch> stretches;
    std::vector<int64_t> order;   // sequences, those that begin alike beside each other
    std::vector<int64_t> counts;  // [sequences]: the stretches of each,
    std::vector<int64_t> ends;    // [sequences]: and the first key behind them
    int64_t most = 0;             // stretches of one sequence

    // alone: nobody's numbers may depend on who has keys in common with whom.
    CommonKeys(const Batch& batch, const Group& group, bool alone, const Cache& cache, int threads)
        : counts(batch.sequences), ends(batch.sequences) {
        if (alone || group.window) return;  // of a window, what is seen begins elsewhere in each sequence
        const int64_t block_size = cache.block_size;
        for (int64_t b = 0; b < batch.sequences; b++)
            if (batch.query_start[b + 1] - batch.query_start[b] == 1) order.push_back(b);
        if (order.size() < 2) return;
        const auto table = [&](int64_t b) { return group.tables + b * group.width; };
        // blocks that are full before the query's own key
        const auto full = [&](int64_t b) { return batch.positions[batch.query_start[b]] / block_size; };
        const auto alike = [&](int64_t a, int64_t b) {
            const int64_t most = std::min(full(a), full(b));
            return std::mismatch(table(a), table(a) + most, table(b)).first - table(a);
        };
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return std::lexicographical_compare(table(a), table(a) + full(a), table(b), table(b) + full(b));
        });
        // Of members `first..end`, all of whose blocks before `from` are in stretches, and before `to` alike.
        const auto find = [&](const auto& find, int64_t first, int64_t end, int64_t from) -> void {
            const int64_t to = alike(order[first], order[end - 1]);
            if ((to - from) * block_size >= LEAST_COMMON) {
                add(first, end - first, from * block_size, to * block_size, cache.kv_heads, threads);
                from = to;
            }
            for (int64_t next, at = first; at < end; at = next) {
                for (next = at + 1; next < end && alike(order[at], order[next]) > to;) next++;
                if (next - at > 1) find(find, at, next, from);
            }
        };
        find(find, 0, int64_t(order.size()), 0);
    }

private:
    void add(int64_t first, int64_t count, int64_t low, int64_t high, int64_t kv_heads, int threads) {
        int64_t keys = MOST_COMMON;
        while (keys > FEW_COMMON && (high - low) / keys * kv_heads < 4 * threads) keys /= 2;
        for (; low < high; low += keys) {
            const int64_t end = std::min(high, low + keys);
            stretches.push_back({low, end, first, count, counts[order[first]]});
            for (int64_t i = first; i < first + count; i++) {
                ends[order[i]] = end;
                most = std::max(most, ++counts[order[i]]);
            }
        }
    }
};

}  // namespace
