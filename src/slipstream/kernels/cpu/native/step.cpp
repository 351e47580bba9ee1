#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "linear.h"

namespace slip {
namespace SLIP_ISA {
namespace {

// Returns 1 / rms(x); a row's squares are added in sixteen lanes, and then the lanes.
float norm_factor(const float* x, int size, float eps) {
    Floats squares = set1(0.0f);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

// Computes out = x * factor * weight.
void scale_row(const float* x, float factor, const float* weight, int size, float* out) {
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * set1(factor) * load(weight + i));
    for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

void norm_row(const float* x, const float* weight, int size, float eps, float* out) {
    scale_row(x, norm_factor(x, size, eps), weight, size, out);
}

// Applies the rotary embedding in place, with paired halves.
void rotate_head(float* x, const float* cosines, const float* sines, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half];
        x[i] = std::fma(high, sines[i], low * cosines[i]);
        x[i + half] = std::fma(low, sines[i + half], high * cosines[i + half]);
    }
}

inline Floats swish(Floats gate, Floats up) { return gate * up / (set1(1.0f) + exp(set1(0.0f) - gate)); }

constexpr int kPatterns = 4;  // attention patterns of a stack, the same as MAX_PATTERNS of native_pass.py

struct Scratch {
    Operand normed, mixed, inner, wanted;
    RowPlan plans[kPatterns];
    std::vector<float> qkv, attended;

    // Makes room for a pass. Layers of a stack differ only in their weights' types, so the same rows serve all of them.
    void prepare(const SlipForward& job, int rows) {
        const SlipStack& stack = *job.stack;
        for (Operand* operand : {&normed, &mixed, &inner, &wanted}) operand->forget();
        for (int i = 0; i < stack.layers; ++i) {
            const SlipLayer& layer = stack.layer[i];
            normed.serve(layer.qkv);
            normed.serve(layer.gate_up);
            mixed.serve(layer.output);
            inner.serve(layer.down);
        }
        normed.shape(stack.layer[0].qkv, rows);
        mixed.shape(stack.layer[0].output, rows);
        inner.shape(stack.layer[0].down, rows);
        if (job.wanted) {
            wanted.serve(*job.head);
            wanted.shape(*job.head, job.wanted);
        }
        for (int i = 0; i < job.patterns; ++i) plans[i].build(job.batches[i], stack.heads, stack.kv_heads, job.threads);
        room(qkv, static_cast<size_t>(rows) * stack.layer[0].qkv.outputs);
        room(attended, static_cast<size_t>(rows) * stack.heads * stack.head_dim);
    }

    static float* room(std::vector<float>& memory, size_t size) {
        if (memory.size() < size) memory.resize(size);
        return memory.data();
    }
};

// Computes gate and up for 32 outputs at a time, which become one block of what `down` reads.
void gated(Team& team, const SlipLinear& linear, const RowsIn& in, int rows, Operand& inner) {
    const SlipMatrix &gate = linear.part[0], &up = linear.part[1];
    const int size = gate.outputs, units = blocks_of(size);
    team.share(units, [&](int unit) {
        alignas(64) float gates[2][kGroup * kTile], ups[2][kGroup * kTile], mixed[kBlock];
        const int halves = unit * 2 + 1 < tiles_of(size) ? 2 : 1;
        for (int group = 0; group < groups_of(rows); ++group) {
            const int own = std::min(kGroup, rows - group * kGroup);
            for (int half = 0; half < halves; ++half) {
                const int tile = unit * 2 + half, count = std::min(kTile, size - tile * kTile);
                one_tile(gate, tile, in, group, own, gates[half]);
                one_tile(up, tile, in, group, own, ups[half]);
                if (!linear.bias) continue;
                add_bias(linear.bias + tile * kTile, count, own, gates[half]);
                add_bias(linear.bias + size + tile * kTile, count, own, ups[half]);
            }
            for (int r = 0; r < own; ++r) {
                for (int half = 0; half < halves; ++half) {
                    const Floats g = load(gates[half] + r * kTile), u = load(ups[half] + r * kTile);
                    store(mixed + half * kTile, swish(g, u));
                }
                inner.put_block(mixed, group * kGroup + r, unit, std::min(kBlock, size - unit * kBlock));
            }
        }
    });
}

struct Pass {
    Team& team;
    const SlipForward& job;
    const SlipStack& stack;
    Scratch& scratch;
    int rows;

    // Calls each(row, first block, last block + 1) for all blocks of all rows. The scales of a group's rows are
    // neighbours in a block. Threads that write different rows would compete for cache lines, so they take different
    // blocks instead.
    template <class Each>
    void share_blocks(int size, const Each& each) const {
        const int blocks = blocks_of(size), groups = groups_of(rows);
        const int cuts = groups < 4 * team.threads() ? std::min(team.threads(), blocks) : 1;
        team.share(groups * cuts, [&](int piece) {
            const int group = piece / cuts, cut = piece % cuts;
            for (int row = group * kGroup; row < std::min(rows, (group + 1) * kGroup); ++row)
                each(row, blocks * cut / cuts, blocks * (cut + 1) / cuts);
        });
    }

    void norm(const float* weight, Operand& to) const {
        share_blocks(stack.hidden, [&](int row, int from, int end) {
            alignas(64) float normed[kBlock];
            const float* x = job.x + static_cast<size_t>(row) * stack.hidden;
            const float factor = norm_factor(x, stack.hidden, stack.eps);
            for (int block = from; block < end; ++block) {
                const int first = block * kBlock, count = std::min(kBlock, stack.hidden - first);
                scale_row(x + first, factor, weight + first, count, normed);
                to.put_block(normed, row, block, count);
            }
        });
    }

    void put_all(const float* x, int size, Operand& to) const {
        share_blocks(size, [&](int row, int from, int end) {
            for (int block = from; block < end; ++block) {
                const int first = block * kBlock;
                to.put_block(x + static_cast<size_t>(row) * size + first, row, block, std::min(kBlock, size - first));
            }
        });
    }

    // Norms, rotates and stores the keys and values of one row; its queries stay in `qkv`.
    void turn(int index, int row, float* qkv) const {
        const SlipLayer& layer = stack.layer[index];
        const SlipBatch& batch = job.batches[0];
        const int dim = stack.head_dim, turning = stack.heads + stack.kv_heads;
        const size_t position = batch.positions[row];
        for (int head = 0; head < turning; ++head) {
            float* x = qkv + head * dim;
            if (layer.q_norm) norm_row(x, head < stack.heads ? layer.q_norm : layer.k_norm, dim, stack.eps, x);
            rotate_head(x, job.cosines + position * dim, job.sines + position * dim, dim);
        }
        for (int head = 0; head < stack.kv_heads; ++head) {
            const size_t line = static_cast<size_t>(batch.pages[row]) * stack.kv_heads + head;
            const size_t place = (line * batch.page_tokens + batch.offsets[row]) * dim;
            std::memcpy(job.keys[index] + place, qkv + (stack.heads + head) * dim, dim * sizeof(float));
            std::memcpy(job.values[index] + place, qkv + (turning + head) * dim, dim * sizeof(float));
        }
    }

    void run_layer(int index) const {
        const SlipLayer& layer = stack.layer[index];
        const int width = layer.qkv.outputs, mixed = stack.heads * stack.head_dim;
        float* qkv = scratch.qkv.data();
        float* attended = scratch.attended.data();
        norm(layer.input_norm, scratch.normed);
        multiply_into<false>(team, layer.qkv, scratch.normed.in, rows, qkv, width);
        team.share(rows, [&](int row) { turn(index, row, qkv + static_cast<size_t>(row) * width); });
        const float scale = 1.0f / std::sqrt(static_cast<float>(stack.head_dim));
        attend(team, scratch.plans[layer.pattern], qkv, width, job.keys[index], job.values[index], stack.heads, stack.kv_heads,
               stack.head_dim, scale, attended, mixed);
        put_all(attended, mixed, scratch.mixed);
        multiply_into<true>(team, layer.output, scratch.mixed.in, rows, job.x, stack.hidden);
        norm(layer.post_norm, scratch.normed);
        gated(team, layer.gate_up, scratch.normed.in, rows, scratch.inner);
        multiply_into<true>(team, layer.down, scratch.inner.in, rows, job.x, stack.hidden);
    }

    void tap(int index) const {
        for (int t = 0; t < job.taps; ++t) {
            if (job.tap_layers[t] != index) continue;
            team.share(rows, [&](int row) {
                std::memcpy(job.tapped + (static_cast<size_t>(row) * job.taps + t) * stack.hidden,
                            job.x + static_cast<size_t>(row) * stack.hidden, stack.hidden * sizeof(float));
            });
        }
    }

    void finish() const {
        team.share(rows, [&](int row) {
            const size_t at = static_cast<size_t>(row) * stack.hidden;
            norm_row(job.x + at, stack.norm, stack.hidden, stack.eps, job.hidden + at);
        });
        if (job.wanted == 0) return;
        team.share(job.wanted, [&](int row) {
            scratch.wanted.put(job.hidden + static_cast<size_t>(job.wanted_rows[row]) * stack.hidden, row);
        });
        multiply_into<false>(team, *job.head, scratch.wanted.in, job.wanted, job.logits, job.head->outputs);
    }

    void run() const {
        if (amx_enter) amx_enter();
        tap(-1);
        for (int index = 0; index < stack.layers; ++index) {
            run_layer(index);
            tap(index);
        }
        finish();
        if (amx_leave) amx_leave();
    }
};

// Norms and rotates one row's projected keys and stores its keys and values in the pools of the draft layers.
void store_context(const SlipContext& job, int row, float* projected, size_t width) {
    const int dim = job.head_dim, heads = job.kv_heads;
    const size_t position = job.positions[row];
    for (int layer = 0; layer < job.layers; ++layer) {
        float* keys = projected + row * width + static_cast<size_t>(layer) * 2 * heads * dim;
        const float* values = keys + heads * dim;
        for (int head = 0; head < heads; ++head) {
            float* key = keys + head * dim;
            if (job.k_norms) norm_row(key, job.k_norms + layer * dim, dim, job.eps, key);
            rotate_head(key, job.cosines + position * dim, job.sines + position * dim, dim);
            const size_t line = static_cast<size_t>(job.pages[row]) * heads + head;
            const size_t place = layer * job.layer_stride + (line * job.page_tokens + job.offsets[row]) * dim;
            std::memcpy(job.keys + place, key, dim * sizeof(float));
            std::memcpy(job.values + place, values + head * dim, dim * sizeof(float));
        }
    }
}

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip

SLIP_EXPORT(void, slip_forward)(const SlipForward* job) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    thread_local Scratch scratch;
    const int rows = job->batches[0].rows;
    scratch.prepare(*job, rows);
    Team& team = Team::shared();
    const Pass pass{team, *job, *job->stack, scratch, rows};
    team.run(job->threads, [&] { pass.run(); });
}

SLIP_EXPORT(void, slip_context)(const SlipContext* job) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    thread_local Operand taps, context;
    thread_local std::vector<float> mixed, projected;
    const int hidden = job->fc->outputs, inputs = job->fc->part[0].inputs;
    const size_t width = job->projection->outputs;
    taps.forget();
    taps.serve(*job->fc);
    taps.shape(*job->fc, job->rows);
    context.forget();
    context.serve(*job->projection);
    context.shape(*job->projection, job->rows);
    float* from_fc = Scratch::room(mixed, static_cast<size_t>(job->rows) * hidden);
    float* out = Scratch::room(projected, job->rows * width);
    Team& team = Team::shared();
    Operand &first = taps, &second = context;  // references, because thread_local names another object on each thread
    team.run(job->threads, [&] {
        if (amx_enter) amx_enter();
        team.share(job->rows, [&](int row) { first.put(job->taps + static_cast<size_t>(row) * inputs, row); });
        multiply_into<false>(team, *job->fc, first.in, job->rows, from_fc, hidden);
        team.share(job->rows, [&](int row) {
            float* x = from_fc + static_cast<size_t>(row) * hidden;
            norm_row(x, job->norm, hidden, job->eps, x);
            second.put(x, row);
        });
        multiply_into<false>(team, *job->projection, second.in, job->rows, out, width);
        team.share(job->rows, [&](int row) { store_context(*job, row, out, width); });
        if (amx_leave) amx_leave();
    }, job->rows <= kGroup);
}

// Computes out [rows, outputs] = rows [rows, inputs] times the linear layer.
SLIP_EXPORT(void, slip_matmul)(const SlipLinear* linear, const float* rows, int count, float* out, int threads) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    thread_local Operand memory;
    Operand& operand = memory;
    operand.forget();
    operand.serve(*linear);
    operand.shape(*linear, count);
    const size_t inputs = linear->part[0].inputs;
    Team& team = Team::shared();
    team.run(threads, [&] {
        if (amx_enter) amx_enter();
        team.share(count, [&](int row) { operand.put(rows + row * inputs, row); });
        multiply_into<false>(team, *linear, operand.in, count, out, linear->outputs);
        if (amx_leave) amx_leave();
    });
}

// Multiplies rows, sorted by linear layer with `counts` of each, with their layer; all layers have one shape. The rows
// of a layer begin a new group, so that no tile mixes rows of two layers.
SLIP_EXPORT(void, slip_grouped_matmul)(
    const SlipLinear* const* linears, const int32_t* counts, int layers, const float* rows, float* out, int threads) {
    using namespace slip;
    using namespace slip::SLIP_ISA;
    struct Own {
        int row, group;  // the layer's first row, and the group in which it begins in the operand
    };
    thread_local Operand memory;
    Operand& operand = memory;
    std::vector<Own> own(layers);
    operand.forget();
    int row = 0, group = 0;
    for (int i = 0; i < layers; ++i) {
        own[i] = {row, group};
        operand.serve(*linears[i]);
        row += counts[i];
        group += groups_of(counts[i]);
    }
    operand.shape(*linears[0], group * kGroup);
    const size_t inputs = linears[0]->part[0].inputs, outputs = linears[0]->outputs;
    Team& team = Team::shared();
    int tiles = 0;
    for (int i = 0; i < linears[0]->parts; ++i) tiles += tiles_of(linears[0]->part[i].outputs);
    const int step = std::clamp(tiles * layers / (threads * 8), 1, tiles), stretches = (tiles + step - 1) / step;
    team.run(threads, [&] {
        if (amx_enter) amx_enter();
        team.share(layers, [&](int i) {
            for (int r = 0; r < counts[i]; ++r) operand.put(rows + (own[i].row + r) * inputs, own[i].group * kGroup + r);
        });
        team.share(layers * stretches, [&](int piece) {
            const int i = piece / stretches, first = piece % stretches * step;
            float* to = out + own[i].row * outputs;
            multiply_tiles(*linears[i], first, std::min(tiles, first + step), operand.in, own[i].group, counts[i],
                           [&](int at, int many, int output, int count, const float* products) {
                               for (int r = 0; r < many; ++r)
                                   std::memcpy(to + (at + r) * outputs + output, products + r * kTile, count * sizeof(float));
                           });
        });
        if (amx_leave) amx_leave();
    });
}
