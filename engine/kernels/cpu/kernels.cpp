// The forward of a native decoder on a CPU, in one call.
//
// Norms and rotation are here, and the order of a layer, which is that of models/layers.py.
//
// Plain C++17 with the vector extensions of GCC and Clang, built for the machine that runs it; instructions are named
// only where those extensions have no word for them. Nothing is thrown, and no memory is taken but for scratch, which
// every thread keeps; where the system refuses that, the process ends.

#include <ctime>

#include "attention.h"
#include "draws.h"

extern "C" {

// Norms [hidden]; qk_norm [heads + kv_heads, head_dim], or null; the number of its group.
struct Layer {
    const void *attention_norm, *qk_norm, *mlp_norm;
    Map qkv, o, gate_up, down;
    Cache cache;
    int64_t group;
};

// A model in bfloat16 or float. `embedding` [ids, hidden], or the head's panels where `embedding` is null. `cosines`
// and `sines` [positions, head_dim / 2].
struct Decoder {
    const Layer* layers;
    const void* embedding;
    const void* final_norm;
    const float *cosines, *sines;
    Map head;
    int64_t num_layers, hidden, middle, heads, most_ranks, is_bf16;
    Scoring scoring;
    float eps;
};

// `embedded` [tokens, hidden], or null: those of `token_ids` are looked up. `logits` [wanted, outputs] in float, of the
// tokens `logits_at`, each of which is there once; `progress`: when a layer was last done, in seconds of the monotonic
// clock. `adapters` [tokens], from 1 (0: none), or null. alone: each query attends apart, so that its numbers depend on
// its keys alone.
struct Step {
    const Group* groups;
    const int64_t* token_ids;
    const void* embedded;
    const int64_t* logits_at;
    int64_t wanted;
    void* logits;
    double* progress;
    const int64_t* adapters;
    int64_t alone;
};

// One layer's attention, of a model that is computed elsewhere: `queries` [tokens, heads, head_dim], and the tokens'
// own `keys` and `values` [tokens, kv_heads, head_dim], which are kept; `out` [tokens, heads * head_dim]. alone: see
// `Step`.
struct Attention {
    const void *queries, *keys, *values;
    void* out;
    int64_t heads, is_bf16, alone;
    Scoring scoring;
};

}  // extern "C"

namespace {

constexpr int64_t FEW_NORMED = 1 << 16;  // numbers that one thread norms before another has woken

// A head's q or k, turned by its position; `weight`, if any, is of the norm before.
template <class T>
inline void rotate(const Row<T>& x, const T* weight, float eps, const float* cosines, const float* sines, int64_t dim,
                   T* out) {
    float own[MOST_DIM];
    Floats squares{};
    for (int64_t d = 0; d < dim; d += WIDE) {
        const Floats part = read(x.of(d));
        store(own + d, part);
        squares += part * part;
    }
    if (weight) {
        const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
        for (int64_t d = 0; d < dim; d += WIDE) store(own + d, read(own + d) * scale * read(weight + d));
    }
    for (int64_t d = 0; d < dim / 2; d += WIDE) {
        const Floats first = read(own + d), second = read(own + d + dim / 2);
        const Floats cosine = read(cosines + d), sine = read(sines + d);
        write(out + d, first * cosine - second * sine);
        write(out + d + dim / 2, second * cosine + first * sine);
    }
}

template <class T, class U, class W>
inline void normalise(const Row<U>& x, const W* weight, float eps, int64_t size, const Row<T>& out) {
    Floats squares{};
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) squares += read(x.of(i)) * read(x.of(i));
    float total = sum(squares);
    for (int64_t j = i; j < size; j++) total += number(*x.of(j)) * number(*x.of(j));
    const float scale = 1.0f / std::sqrt(total / float(size) + eps);
    for (i = 0; i + WIDE <= size; i += WIDE) write(out.of(i), read(x.of(i)) * scale * read(weight + i));
    for (; i < size; i++) put(out.of(i), number(*x.of(i)) * scale * number(weight[i]));
}

// Numbers of a row from one place to another, where rows may lie otherwise.
template <class T> inline void copy_row(const Row<const T>& from, int64_t size, const Row<T>& to) {
    for (int64_t k = 0; k < size; k += STRIP) std::copy_n(from.of(k), std::min<int64_t>(STRIP, size - k), to.of(k));
}

// `product`, after what it needs to know beside.
template <class T, class O>
void multiply(const Map& map, const Rows<const T>& x, bool tiled, const Beside& beside, Member& member, int64_t count,
              const Rows<const T>& residual, const Rows<O>& out) {
    const int64_t inputs = map.inputs, groups = inputs / GROUP;
    if (map.kind == INT4) {
        member.share(count * groups, [&](int64_t i) {
            const T* own = x[i / groups].of(i % groups * GROUP);
            Floats total{};
            for (int k = 0; k < GROUP; k += WIDE) total += read(own + k);
            beside.sums[i] = sum(total);
        });
    }
    if (map.adapters && beside.adapters) {
        const int64_t rank = map.adapters->rank;
        member.share(count * rank, [&](int64_t i) {
            const int64_t adapter = beside.adapters[i / rank];
            if (!adapter) return;
            const T* down = static_cast<const T*>(map.adapters->down) + ((adapter - 1) * rank + i % rank) * inputs;
            const Row<const T> own = x[i / rank];
            Floats total{};
            int64_t k = 0;
            for (; k + 2 * WIDE <= inputs; k += 2 * WIDE) total = along(total, own.of(k), down + k);
            float rest = sum(total);
            for (; k < inputs; k++) rest += number(*own.of(k)) * number(down[k]);
            beside.ranks[i] = rest;
        });
    }
    product(map, x, tiled, beside, member, count, residual, out);
}

// A row of a map's matrix, which is not one of gates, in no fewer than eight bits.
template <class T> void read_row(const Map& map, int64_t row, const Row<T>& out) {
    const auto copy = [&](const auto* weights, int pair, auto write) {
        weights += (row / PANEL * map.inputs * PANEL) + row % PANEL * pair;
        for (int64_t k = 0; k < map.inputs; k++) write(out.of(k), weights[k / pair * PANEL * pair + k % pair], k);
    };
    if (map.kind == INT8)
        copy(static_cast<const int8_t*>(map.weight), 2,
             [&](T* to, int8_t weight, int64_t) { put(to, float(weight) * map.scale[row]); });
    else if (map.kind == INT16)
        copy(static_cast<const int16_t*>(map.weight), 2,
             [&](T* to, int16_t weight, int64_t k) {
                 const int64_t block = row / PANEL * blocks_of(map.inputs) + k / TOGETHER;
                 put(to, float(weight) * map.scale[block * PANEL + row % PANEL]);
             });
    else
        copy(static_cast<const T*>(map.weight), Pairs<T>::SIZE, [](T* to, T weight, int64_t) { *to = weight; });
}

// What a forward keeps between its operations.
template <class T> struct Buffers {
    Room<T> residual, normed, heads, queries, mixed, middle, last;
    Room<float> sums, ranks, found;
};

template <class T> void forward(const Decoder& decoder, const Batch& batch, const Step& step, int threads) {
    static thread_local Buffers<T> buffers;
    const Cache& shape = decoder.layers[0].cache;
    const int64_t tokens = batch.tokens, hidden = decoder.hidden, dim = shape.head_dim, num_q = decoder.heads;
    const int64_t turned = num_q + shape.kv_heads, all = turned + shape.kv_heads;
    const int64_t widest = std::max({hidden, num_q * dim, decoder.middle});
    const bool tiled = fits_tiles<T>(hidden) && fits_tiles<T>(num_q * dim) && fits_tiles<T>(decoder.middle);
    const auto rows = [&](Room<T>& held, int64_t count, int64_t width) {
        const bool in_strips = tiled && count > TILE;
        return Rows<T>{room(held, (in_strips ? (count + STRIP - 1) / STRIP * STRIP : count) * width), width, in_strips};
    };
    const Rows<T> residual = rows(buffers.residual, tokens, hidden), normed = rows(buffers.normed, tokens, hidden);
    const Rows<T> heads = rows(buffers.heads, tokens, all * dim), mixed = rows(buffers.mixed, tokens, num_q * dim);
    const Rows<T> middle = rows(buffers.middle, tokens, decoder.middle);
    const Rows<T> last = rows(buffers.last, step.wanted, hidden);
    const int64_t together = heads.in_strips ? STRIP : 1;  // rows that are read one after the other
    const Rows<const T> none{};
    T* queries = room(buffers.queries, tokens * num_q * dim);
    const Beside beside{room(buffers.sums, tokens * widest / GROUP), room(buffers.ranks, tokens * decoder.most_ranks),
                        step.adapters};
    const std::vector<Piece> pieces = cut(batch, step.alone, shape.kv_heads, threads);
    std::vector<CommonKeys> common;  // of each group
    int64_t most = 0;
    for (int64_t i = 0; i < decoder.num_layers; i++)
        for (int64_t g = common.size(); g <= decoder.layers[i].group; g++) {
            common.emplace_back(batch, step.groups[g], step.alone, shape, threads);
            most = std::max(most, common[g].most);
        }
    Found found{nullptr, num_q, dim, most};
    found.at = room(buffers.found, batch.sequences * most * num_q * found.width());
    Team team;
#pragma omp parallel num_threads(threads)
    {
        Member member(team);
        const auto norm = [&](const void* weight, const int64_t* which, int64_t count, const Rows<T>& out) {
            member.share(count, [&](int64_t r) {
                normalise(residual[which ? which[r] : r], static_cast<const T*>(weight), decoder.eps, hidden, out[r]);
            });
        };
        const auto by = [&](const Map& map, const Rows<T>& x, const Rows<const T>& added, const Rows<T>& out) {
            multiply<T>(map, x, tiled, beside, member, tokens, added, out);
        };
        const Rows<const T> embedded{static_cast<const T*>(step.embedded), hidden};
        const Rows<const T> embedding{static_cast<const T*>(decoder.embedding), hidden};
        member.share(tokens, [&](int64_t t) {
            if (step.embedded)
                copy_row(embedded[t], hidden, residual[t]);
            else if (decoder.embedding)
                copy_row(embedding[step.token_ids[t]], hidden, residual[t]);
            else
                read_row(decoder.head, step.token_ids[t], residual[t]);
        });
        for (int64_t i = 0; i < decoder.num_layers; i++) {
            const Layer& layer = decoder.layers[i];
            const Cache& cache = layer.cache;
            const Group& group = step.groups[layer.group];
            norm(layer.attention_norm, nullptr, tokens, normed);
            by(layer.qkv, normed, none, heads);
            member.share((tokens + together - 1) / together * all, [&](int64_t each) {
                const int64_t h = each % all, begin = each / all * together;
                for (int64_t t = begin; t < std::min(begin + together, tokens); t++) {
                    const Row<T> head = heads[t].from(h * dim);
                    T own[MOST_DIM];
                    if (h >= turned) {
                        copy_row<T>(head, dim, {own, STRIP});
                        keep(own, cache.values, cache, batch, group, t, h - turned);
                        continue;
                    }
                    const T* weight = layer.qk_norm ? static_cast<const T*>(layer.qk_norm) + h * dim : nullptr;
                    const int64_t angles = batch.positions[t] * (dim / 2);
                    rotate(head, weight, decoder.eps, decoder.cosines + angles, decoder.sines + angles, dim,
                           h < num_q ? queries + (t * num_q + h) * dim : own);
                    if (h >= num_q) keep(own, cache.keys, cache, batch, group, t, h - num_q);
                }
            });
            attend(queries, cache, batch, group, pieces, common[layer.group], found, num_q, decoder.scoring, member,
                   mixed);
            by(layer.o, mixed, residual, residual);
            norm(layer.mlp_norm, nullptr, tokens, normed);
            by(layer.gate_up, normed, none, middle);
            by(layer.down, middle, residual, residual);
            if (member.own == 0) {
                timespec now;
                clock_gettime(CLOCK_MONOTONIC, &now);
                *step.progress = double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
            }
        }
        norm(decoder.final_norm, step.logits_at, step.wanted, last);
        const Rows<float> logits{static_cast<float*>(step.logits), decoder.head.outputs};
        multiply<T>(decoder.head, last, tiled, beside, member, step.wanted, none, logits);
    }
}

// Keeps the tokens' keys and values, and attends.
template <class T>
void attend_alone(const Attention& attention, const Cache& cache, const Batch& batch, const Group& group, int threads) {
    static thread_local Room<float> held;
    const int64_t dim = cache.head_dim, heads = attention.heads;
    const std::vector<Piece> pieces = cut(batch, attention.alone, cache.kv_heads, threads);
    const CommonKeys common(batch, group, attention.alone, cache, threads);
    Found found{nullptr, heads, dim, common.most};
    found.at = room(held, batch.sequences * common.most * heads * found.width());
    const T *keys = static_cast<const T*>(attention.keys), *values = static_cast<const T*>(attention.values);
    Team team;
#pragma omp parallel num_threads(threads)
    {
        Member member(team);
        member.share(batch.tokens * cache.kv_heads, [&](int64_t i) {
            keep(keys + i * dim, cache.keys, cache, batch, group, i / cache.kv_heads, i % cache.kv_heads);
            keep(values + i * dim, cache.values, cache, batch, group, i / cache.kv_heads, i % cache.kv_heads);
        });
        attend(static_cast<const T*>(attention.queries), cache, batch, group, pieces, common, found, heads,
               attention.scoring, member, Rows<T>{static_cast<T*>(attention.out), heads * dim});
    }
}

}  // namespace

extern "C" {

void antiphon_forward(const Decoder* decoder, const Batch* batch, const Step* step, int threads) {
    if (decoder->is_bf16)
        forward<bf16>(*decoder, *batch, *step, threads);
    else
        forward<float>(*decoder, *batch, *step, threads);
}

void antiphon_attend(const Attention* attention, const Cache* cache, const Batch* batch, const Group* group,
                     int threads) {
    if (attention->is_bf16)
        attend_alone<bf16>(*attention, *cache, *batch, *group, threads);
    else
        attend_alone<float>(*attention, *cache, *batch, *group, threads);
}

// x [rows, inputs], of which rows `begins[i]..begins[i + 1]` by map i of `count`, which are of one shape, plus
// `residual` [rows, outputs] unless it is null -> out.
void antiphon_product(const Map* maps, const int64_t* begins, int64_t count, int is_bf16, const void* x,
                      const void* residual, void* out, int threads) {
    const int64_t inputs = maps->inputs, outputs = maps->outputs;
    int64_t most = 0;  // rows of a map
    for (int64_t i = 0; i < count; i++) most = std::max(most, begins[i + 1] - begins[i]);
    static thread_local Room<float> sums;
    const Beside beside{room(sums, most * inputs / GROUP), nullptr, nullptr};
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        static thread_local Room<T> laid;
        const bool tiled = fits_tiles<T>(inputs);
        T* strips = tiled && most > TILE ? room(laid, (most + STRIP - 1) / STRIP * STRIP * inputs) : nullptr;
        Team team;
#pragma omp parallel num_threads(threads)
        {
            Member member(team);
            for (int64_t i = 0; i < count; i++) {
                const int64_t begin = begins[i], rows = begins[i + 1] - begin;
                if (!rows) continue;
                Rows<const T> own{static_cast<const T*>(x) + begin * inputs, inputs};
                if (tiled && rows > TILE) {
                    const Rows<T> in_strips{strips, inputs, true};
                    member.share(rows, [&](int64_t r) { copy_row(own[r], inputs, in_strips[r]); });
                    own = in_strips;
                }
                const T* added = residual ? static_cast<const T*>(residual) + begin * outputs : nullptr;
                multiply<T>(maps[i], own, tiled, beside, member, rows, Rows<const T>{added, outputs},
                            Rows<T>{static_cast<T*>(out) + begin * outputs, outputs});
            }
        }
    };
    if (is_bf16)
        run(bf16{});
    else
        run(0.0f);
}

// x [rows, size] -> out, each row normed by its root mean square and multiplied by `weight` [size].
void antiphon_norm(const void* x, const float* weight, float eps, int is_bf16, int64_t rows, int64_t size, void* out,
                   int threads) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        const Rows<const T> from{static_cast<const T*>(x), size};
        const Rows<T> to{static_cast<T*>(out), size};
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > FEW_NORMED)
        for (int64_t r = 0; r < rows; r++) normalise(from[r], weight, eps, size, to[r]);
    };
    if (is_bf16)
        run(bf16{});
    else
        run(0.0f);
}

void antiphon_draw(const Draw* draws, Drawn* out, int threads) {
    const Biased biased(*draws);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t r = 0; r < draws->rows; r++) {
        out[r] = draw(*draws, r);
        for (int64_t i = 0; i < out[r].count; i++) out[r].scores[i] = draws->scores[r * draws->stride + out[r].ids[i]];
    }
    biased.raise_peaks(out);
}

// Reads `bytes`, which are whole windows, once; returns what its words sum to, so that it is not left out.
uint32_t antiphon_read(const char* from, int64_t bytes, int threads) {
    uint32_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total)
    for (int64_t window = 0; window < bytes / WINDOW; window++) {
        Words sums[PAGES]{};
        for (int64_t at = 0; at < PAGE; at += sizeof(Words))
            for (int page = 0; page < PAGES; page++)
                sums[page] += load<Words>(from + window * WINDOW + page * PAGE + at);
        for (const Words& sum : sums)
            for (int i = 0; i < WIDE; i++) total += sum[i];
    }
    return total;
}

// weight [outputs, inputs] of `bytes` each -> panels [inputs / pair, PANEL, pair]; `order` [panels * PANEL]: which
// output is where (negative: zeros).
void antiphon_pack(const char* weight, const int64_t* order, int64_t panels, int64_t inputs, int64_t bytes,
                   int64_t pair, char* out, int threads) {
    const auto run = [&](auto unit) {  // what is kept together: `pair` inputs of an output
        using Unit = decltype(unit);
        const int64_t steps = inputs / pair;
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t p = 0; p < panels; p++) {
            char* to = out + p * steps * PANEL * sizeof(Unit);
            for (int64_t k = 0; k < steps; k++)
                for (int64_t c = 0; c < PANEL; c++, to += sizeof(Unit)) {
                    const int64_t from = order[p * PANEL + c];
                    store(to, from < 0 ? Unit{} : load<Unit>(weight + (from * inputs + k * pair) * bytes));
                }
        }
    };
    if (bytes * pair == 4)
        run(uint32_t{});
    else
        run(uint16_t{});
}

// How many inputs of bfloat16 weights have a scale together as whole numbers; 0: weights are multiplied as they are.
int64_t antiphon_together() { return BF16_IN_WHOLE_NUMBERS ? TOGETHER : 0; }

// weight [outputs, inputs] of bfloat16 -> panels [inputs / 2, PANEL, 2] of whole numbers and their `scale` [panels,
// blocks_of(inputs), PANEL]; `order` as above. A share of the largest weight that has its scale is lost by rounding, of
// which bfloat16 itself loses 16 times as much.
void antiphon_pack_whole(const bf16* weight, const int64_t* order, int64_t panels, int64_t inputs, int16_t* out,
                         float* scale, int threads) {
    const int64_t blocks = blocks_of(inputs);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t c = 0; c < PANEL; c++)
            for (int64_t block = 0, from = order[p * PANEL + c]; block < blocks; block++) {
                const int64_t first = block * TOGETHER, count = std::min<int64_t>(TOGETHER, inputs - first);
                int16_t own[TOGETHER] = {};
                float& of_block = scale[(p * blocks + block) * PANEL + c] = 0.0f;
                if (from >= 0) of_block = as_whole_numbers(weight + from * inputs + first, count, SHARES, own);
                for (int64_t k = 0; k < count; k += 2)
                    std::copy_n(own + k, 2, out + ((p * inputs + first + k) / 2 * PANEL + c) * 2);
            }
}

}  // extern "C"
