// Rows times packed weights: every weight is read once for all rows, and a row's sum has one order, whatever its
// neighbours: block after block, within a block an exact integer sum, then two or three roundings.
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

// Rows as the kernels read them: int8 per 32 inputs with a scale (as llama.cpp has them), or the floats themselves.
// Within a group the rows of one block stand together; a group is no wider than needed, so that few rows stay in the
// nearest cache while the weights stream past.
struct RowsIn {
    int inputs = 0;
    int width = kGroup;          // rows of a group
    int8_t* codes = nullptr;     // [groups, blocks, width, 32]
    float* scales = nullptr;     // [groups, blocks, width]
    float* sums = nullptr;       // [groups, blocks, width]: scale times the sum of the codes
    int32_t* negated = nullptr;  // [groups, blocks, 3, width]: minus the sum of all, the first and the last 16 codes
    const float* values = nullptr;  // [rows, stride]
    size_t stride = 0;

    size_t block(int group, int index) const { return static_cast<size_t>(group) * blocks_of(inputs) + index; }
};

inline int groups_of(int rows) { return (rows + kGroup - 1) / kGroup; }

// Memory behind RowsIn, kept from call to call.
class RowBuffer {
public:
    RowsIn shaped(int rows, int inputs) {
        // one group more than needed, since tiles always read 16 rows
        const size_t blocks = static_cast<size_t>(groups_of(rows) + 1) * blocks_of(inputs);
        if (scales_.size() < blocks * kGroup) {
            codes_.resize(blocks * kGroup * kBlock);
            scales_.resize(blocks * kGroup);
            sums_.resize(blocks * kGroup);
            negated_.resize(blocks * kGroup * 3);
        }
        RowsIn in;
        in.inputs = inputs;
        in.width = rows <= 2 ? rows : rows < kGroup ? (rows + 3) / 4 * 4 : kGroup;
        in.codes = codes_.data();
        in.scales = scales_.data();
        in.sums = sums_.data();
        in.negated = negated_.data();
        return in;
    }

private:
    std::vector<int8_t> codes_;
    std::vector<float> scales_, sums_;
    std::vector<int32_t> negated_;
};

namespace SLIP_ISA {

// Thirty-two floats become codes of the block; NaN and infinity make the scale, hence the results, no number.
void quantise_block(const float* x, const RowsIn& in, int row, int index);
inline void quantise_row(const float* x, const RowsIn& in, int row) {
    for (int index = 0; index < in.inputs / kBlock; ++index) quantise_block(x + index * kBlock, in, row, index);
}

// One tile of one matrix for up to 16 rows of a group: out[row * 16 + column].
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out);

}  // namespace SLIP_ISA
}  // namespace slip
