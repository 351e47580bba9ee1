// Packs the blocks of a model file into tiles, and decodes single rows of a file, such as embeddings, to floats.
#include <cstring>

#include "matrix.h"

namespace slip {
namespace {

constexpr int kRawBlock[kKinds] = {32, 32, 32, 256, 256, 1, 1, 1};     // inputs per block in the file
constexpr int kRawBytes[kKinds] = {18, 20, 34, 144, 210, 2, 2, 4};     // bytes per block in the file

float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ffu;
    uint32_t bits;
    if (exponent == 31) bits = sign | 0x7f800000u | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -small : small;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t read16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

float read_half(const uint8_t* p) { return half_to_float(read16(p)); }

// Thirty-two inputs of one output as the file has them.
struct Block {
    uint8_t codes[kBlock];
    uint16_t scale = 0, minimum = 0;             // half precision, as stored
    uint16_t super_scale = 0, super_minimum = 0;  // those of the super-block, for K types only
    uint8_t sub[2] = {0, 0};                     // for K types: the block's own scale and minimum, or two scales
};

void read_nibbles(const uint8_t* packed, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = packed[i] & 15;
        codes[i + 16] = packed[i] >> 4;
    }
}

// The eight scales and minima of a Q4_K super-block are 6-bit numbers in 12 bytes.
void read_q4_k(const uint8_t* raw, int index, Block& block) {
    block.super_scale = read16(raw);
    block.super_minimum = read16(raw + 2);
    const uint8_t* six = raw + 4;
    if (index < 4) {
        block.sub[0] = six[index] & 63;
        block.sub[1] = six[index + 4] & 63;
    } else {
        block.sub[0] = (six[index + 4] & 15) | (six[index - 4] >> 6) << 4;
        block.sub[1] = (six[index + 4] >> 4) | (six[index] >> 6) << 4;
    }
    const uint8_t* packed = raw + 16 + index / 2 * 32;
    for (int i = 0; i < kBlock; ++i) block.codes[i] = index % 2 ? packed[i] >> 4 : packed[i] & 15;
}

// Q6_K has 4 low bits, 2 high bits and a signed scale per 16 inputs; codes are stored plus 32.
void read_q6_k(const uint8_t* raw, int index, Block& block) {
    const int half = index / 4, quarter = index % 4;
    const uint8_t* low = raw + half * 64 + quarter % 2 * 32;
    const uint8_t* high = raw + 128 + half * 32;
    for (int i = 0; i < kBlock; ++i) {
        const int bits = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        block.codes[i] = static_cast<uint8_t>(bits | (high[i] >> (2 * quarter) & 3) << 4);
    }
    block.sub[0] = raw[192 + index * 2];
    block.sub[1] = raw[192 + index * 2 + 1];
    block.super_scale = read16(raw + 208);
}

Block read_block(int kind, const uint8_t* row, int index) {
    Block block;
    if (kind == kQ4_K || kind == kQ6_K) {
        const uint8_t* raw = row + index / 8 * kRawBytes[kind];
        kind == kQ4_K ? read_q4_k(raw, index % 8, block) : read_q6_k(raw, index % 8, block);
        return block;
    }
    const uint8_t* raw = row + static_cast<size_t>(index) * kRawBytes[kind];
    block.scale = read16(raw);
    if (kind == kQ8_0) {
        for (int i = 0; i < kBlock; ++i) block.codes[i] = raw[2 + i] ^ 0x80;  // maps -128..127 to 0..255
    } else {
        if (kind == kQ4_1) block.minimum = read16(raw + 2);
        read_nibbles(raw + (kind == kQ4_1 ? 4 : 2), block.codes);
    }
    return block;
}

void put_codes(int kind, const Block& block, int column, uint8_t* codes) {
    for (int i = 0; i < kBlock; ++i) {
        const int quad = i / 4, place = column * 4 + i % 4;
        const uint8_t code = block.codes[i];
        if (kind == kQ8_0) codes[quad * 64 + place] = code;
        else codes[quad % 4 * 64 + place] |= static_cast<uint8_t>((code & 15) << (quad < 4 ? 0 : 4));
        if (kind == kQ6_K) codes[256 + quad / 4 * 64 + place] |= static_cast<uint8_t>((code >> 4) << (2 * (quad % 4)));
    }
}

void put_scales(int kind, const Block& block, int index, int column, uint8_t* tile) {
    const BlockPlace place(kind, index);
    uint8_t* scales = tile + place.scales;
    if (kind == kQ4_K || kind == kQ6_K) {
        scales[column] = block.sub[0];
        scales[kTile + column] = block.sub[1];
        std::memcpy(tile + place.shared + column * 2, &block.super_scale, 2);
        if (kind == kQ4_K) std::memcpy(tile + place.shared + 32 + column * 2, &block.super_minimum, 2);
        return;
    }
    std::memcpy(scales + column * 2, &block.scale, 2);
    if (kind == kQ4_1) std::memcpy(scales + 32 + column * 2, &block.minimum, 2);
}

void pack_row(int kind, const uint8_t* row, int inputs, int column, uint8_t* tile) {
    if (is_float(kind)) {
        const size_t size = kRawBytes[kind];
        for (int k = 0; k < inputs; ++k) std::memcpy(tile + (static_cast<size_t>(k) * kTile + column) * size, row + k * size, size);
        return;
    }
    for (int index = 0; index < blocks_of(inputs); ++index) {
        const Block block = read_block(kind, row, index);
        put_codes(kind, block, column, tile + BlockPlace(kind, index).codes);
        put_scales(kind, block, index, column, tile);
    }
}

void decode_block(int kind, const Block& block, float* out) {
    for (int i = 0; i < kBlock; ++i) {
        const float code = block.codes[i];
        if (kind == kQ4_0) out[i] = half_to_float(block.scale) * (code - 8.0f);
        else if (kind == kQ8_0) out[i] = half_to_float(block.scale) * (code - 128.0f);
        else if (kind == kQ4_1) out[i] = half_to_float(block.scale) * code + half_to_float(block.minimum);
        else if (kind == kQ6_K)
            out[i] = half_to_float(block.super_scale) * static_cast<int8_t>(block.sub[i / 16]) * (code - 32.0f);
        else
            out[i] = half_to_float(block.super_scale) * block.sub[0] * code -
                     half_to_float(block.super_minimum) * block.sub[1];
    }
}

}  // namespace
}  // namespace slip

// Returns the bytes of a row in the file.
SLIP_VISIBLE int64_t slip_row_bytes(int kind, int inputs) {
    return static_cast<int64_t>(inputs / slip::kRawBlock[kind]) * slip::kRawBytes[kind];
}

// Returns the bytes of a packed matrix; its memory must be aligned to 64 bytes.
SLIP_VISIBLE int64_t slip_packed_bytes(int kind, int outputs, int inputs) {
    return static_cast<int64_t>(slip::tile_bytes(kind, inputs)) * slip::tiles_of(outputs);
}

// Packs file rows [outputs, row bytes] into zeroed memory.
SLIP_VISIBLE void slip_pack(int kind, int outputs, int inputs, const uint8_t* rows, uint8_t* packed) {
    const size_t row_bytes = slip_row_bytes(kind, inputs);
    for (int output = 0; output < outputs; ++output)
        slip::pack_row(kind, rows + output * row_bytes, inputs, output % slip::kTile,
                       packed + output / slip::kTile * slip::tile_bytes(kind, inputs));
}

// Decodes rows of a table as the file stores it, one per id, to floats; returns 0 if an id is not in the table.
SLIP_VISIBLE int slip_decode_rows(int kind, int rows, int inputs, const uint8_t* table, const int64_t* ids, int count,
                                  float* out) {
    using namespace slip;
    const size_t row_bytes = slip_row_bytes(kind, inputs);
    for (int i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= rows) return 0;
        const uint8_t* row = table + ids[i] * row_bytes;
        float* to = out + static_cast<size_t>(i) * inputs;
        if (kind == kF32) std::memcpy(to, row, row_bytes);
        else if (kind == kF16)
            for (int k = 0; k < inputs; ++k) to[k] = read_half(row + 2 * k);
        else if (kind == kBF16)
            for (int k = 0; k < inputs; ++k) {
                const uint32_t bits = static_cast<uint32_t>(read16(row + 2 * k)) << 16;
                std::memcpy(to + k, &bits, 4);
            }
        else
            for (int index = 0; index < blocks_of(inputs); ++index)
                decode_block(kind, read_block(kind, row, index), to + index * kBlock);
    }
    return 1;
}
