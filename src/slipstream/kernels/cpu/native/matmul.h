// Rows times packed weights. Every weight is read once for all rows. A row's sum has one order, whatever rows are
// beside it: block after block, within a block an exact integer sum, then two or three roundings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "matrix.h"
#include "simd.h"
#include "team.h"

namespace slip {

constexpr int kGroup = 16;  // rows that are multiplied together

// Rows as int8 codes with a scale per 32 inputs. Within a group the rows of one block are neighbours.
struct CodeRows {
    int8_t* codes = nullptr;     // [groups, blocks, width, 32]
    float* scales = nullptr;     // [groups, blocks, width]
    float* sums = nullptr;       // [groups, blocks, width]: scale times the sum of the codes
    int32_t* negated = nullptr;  // [groups, blocks, 3, width]: minus the sum of all, the first and the last 16 codes
};

// Rows as the kernels read them: codes, or the floats themselves. A group is no wider than needed, so that few rows
// stay in the first cache while the weights stream past.
//
// If one value of a block is far larger than the others, 8 bits leave nothing of the others. Such a block is marked,
// and its rounding error is coded once more in `rest`. These are a few per cent of all blocks, and cause most of the
// rounding error.
struct RowsIn {
    int inputs = 0;
    int width = kGroup;  // rows per group
    CodeRows main, rest;
    uint8_t* spiky = nullptr;       // [groups, blocks, width]
    const float* values = nullptr;  // [rows, stride]
    size_t stride = 0;

    size_t block(int group, int index) const { return static_cast<size_t>(group) * blocks_of(inputs) + index; }
};

template <int Count>
inline bool any_of(const uint8_t* marks) {
    uint8_t found = 0;
    for (int i = 0; i < Count; ++i) found |= marks[i];
    return found != 0;
}

inline int groups_of(int rows) { return (rows + kGroup - 1) / kGroup; }

// The memory behind RowsIn, which is kept from call to call.
class RowBuffer {
public:
    RowsIn shaped(int rows, int inputs) {
        // one group more than needed, because tiles always read 16 rows
        const size_t blocks = static_cast<size_t>(groups_of(rows) + 1) * blocks_of(inputs);
        RowsIn in;
        in.inputs = inputs;
        in.width = rows <= 2 ? rows : rows < kGroup ? (rows + 3) / 4 * 4 : kGroup;
        in.main = main_.shaped(blocks);
        in.rest = rest_.shaped(blocks);
        // rows that only fill up a group are never written, so their marks must be cleared here
        spiky_.assign(blocks * kGroup, 0);
        in.spiky = spiky_.data();
        return in;
    }

private:
    struct Memory {
        std::vector<int8_t> codes;
        std::vector<float> scales, sums;
        std::vector<int32_t> negated;

        CodeRows shaped(size_t blocks) {
            if (scales.size() < blocks * kGroup) {
                codes.resize(blocks * kGroup * kBlock);
                scales.resize(blocks * kGroup);
                sums.resize(blocks * kGroup);
                negated.resize(blocks * kGroup * 3);
            }
            return {codes.data(), scales.data(), sums.data(), negated.data()};
        }
    };
    Memory main_, rest_;
    std::vector<uint8_t> spiky_;
};

namespace SLIP_ISA {

// Converts 32 floats to codes of a block. NaN or infinity makes the scale, and so the row's results, not finite.
void quantise_block(const float* x, const RowsIn& in, int row, int index);
inline void quantise_row(const float* x, const RowsIn& in, int row) {
    for (int index = 0; index < in.inputs / kBlock; ++index) quantise_block(x + index * kBlock, in, row, index);
}

// Multiplies one tile of one matrix with up to 16 rows of a group: out[row * 16 + column].
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out);

}  // namespace SLIP_ISA
}  // namespace slip
