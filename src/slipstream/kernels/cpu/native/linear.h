// Linear layers of one or several matrices: the rows they read, in the forms the matrices need, and where results go.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "matmul.h"

namespace slip {
namespace SLIP_ISA {
namespace {

bool wants_values(const SlipLinear& linear) {
    for (int i = 0; i < linear.parts; ++i)
        if (is_float(linear.part[i].kind)) return true;
    return false;
}
bool wants_codes(const SlipLinear& linear) {
    for (int i = 0; i < linear.parts; ++i)
        if (!is_float(linear.part[i].kind)) return true;
    return false;
}

// The rows that a linear layer reads, in the forms that its parts need: int8 codes, floats, or both.
struct Operand {
    RowBuffer buffer;
    std::vector<float> values;
    RowsIn in;
    bool codes = false, floats = false;

    void forget() { codes = floats = false; }
    void serve(const SlipLinear& linear) {
        codes = codes || wants_codes(linear);
        floats = floats || wants_values(linear);
    }
    void shape(const SlipLinear& linear, int rows) {
        const int inputs = linear.part[0].inputs;
        if (codes) in = buffer.shaped(rows, inputs);
        const size_t size = static_cast<size_t>(rows) * inputs;
        if (floats && values.size() < size) values.resize(size);
        in.inputs = inputs;
        in.values = values.data();
        in.stride = inputs;
    }
    void put(const float* x, int row) {
        if (codes) quantise_row(x, in, row);
        if (floats) std::memcpy(values.data() + static_cast<size_t>(row) * in.stride, x, in.stride * sizeof(float));
    }
    // Stores up to 32 inputs from the start of a block on.
    void put_block(const float* x, int row, int index, int count) {
        if (codes) quantise_block(x, in, row, index);
        if (floats)
            std::memcpy(values.data() + static_cast<size_t>(row) * in.stride + index * kBlock, x, count * sizeof(float));
    }
};

void one_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out) {
    if (amx_tile != nullptr && rows >= kAmxRows && !is_float(matrix.kind)) amx_tile(matrix, tile, in, group, out);
    else multiply_tile(matrix, tile, in, group, rows, out);
}

// Multiplies some tiles of a linear layer with the rows from group `base` of the operand on, and calls
// done(first row, rows, first output, outputs, products [16, 16]) for each.
template <class Done>
void multiply_tiles(
    const SlipLinear& linear, int from, int to, const RowsIn& in, int base, int rows, const Done& done) {
    alignas(64) float out[kGroup * kTile];
    for (int tile = from; tile < to; ++tile) {
        int part = 0, local = tile, first = 0;
        while (local >= tiles_of(linear.part[part].outputs)) {
            local -= tiles_of(linear.part[part].outputs);
            first += linear.part[part++].outputs;
        }
        const SlipMatrix& matrix = linear.part[part];
        const int count = std::min(kTile, matrix.outputs - local * kTile);
        for (int group = 0; group < groups_of(rows); ++group) {
            const int own = std::min(kGroup, rows - group * kGroup);
            one_tile(matrix, local, in, base + group, own, out);
            done(group * kGroup, own, first + local * kTile, count, out);
        }
    }
}

// Multiplies all tiles of a linear layer.
template <class Done>
void multiply(Team& team, const SlipLinear& linear, const RowsIn& in, int rows, Done done) {
    int total = 0;
    for (int i = 0; i < linear.parts; ++i) total += tiles_of(linear.part[i].outputs);
    const int step = std::max(1, total / (team.threads() * 8));
    team.share((total + step - 1) / step, [&](int taken) {
        multiply_tiles(linear, taken * step, std::min(total, (taken + 1) * step), in, 0, rows, done);
    });
}

void add_bias(const float* bias, int count, int rows, float* products) {
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < count; ++c) products[r * kTile + c] += bias[c];
}

// Computes to[row, output] = products (+ bias); with Add they are added to what is there.
template <bool Add>
void multiply_into(Team& team, const SlipLinear& linear, const RowsIn& in, int rows, float* to, size_t stride) {
    multiply(team, linear, in, rows, [&](int row, int own, int first, int count, float* products) {
        if (linear.bias) add_bias(linear.bias + first, count, own, products);
        for (int r = 0; r < own; ++r) {
            float* at = to + (row + r) * stride + first;
            const float* from = products + r * kTile;
            if (count == kTile) store(at, Add ? load(at) + load(from) : load(from));
            else for (int c = 0; c < count; ++c) at[c] = Add ? at[c] + from[c] : from[c];
        }
    });
}

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip
