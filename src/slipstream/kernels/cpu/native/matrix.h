// Weights repacked for the register tile: sixteen outputs side by side, thirty-two inputs at a time.
//
// A tile (16 outputs x all inputs) is a sequence of chunks; each has the codes of a few blocks and then their scales. A
// matrix is thus read from front to back, because memory delivers at full speed only to a single unbroken stream.
// Within a block of 32 inputs the codes of four inputs are neighbours per output (a "quad"), as the dot-product
// instructions need them. A byte of 4-bit codes holds quad i in its low half and quad i + 4 in its high half. The
// values are exactly those of the file; only their places change.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native.h"

namespace slip {

constexpr int kTile = 16;   // outputs of a tile
constexpr int kBlock = 32;  // inputs that share a scale

enum Kind : int32_t { kQ4_0, kQ4_1, kQ8_0, kQ4_K, kQ6_K, kF16, kBF16, kF32, kKinds };

inline bool is_float(int kind) { return kind >= kF16; }

// Bytes of codes and of scales per block of a tile, and of the scales that the blocks of a chunk share.
constexpr size_t code_bytes(int kind) {
    constexpr size_t bytes[kKinds] = {256, 256, 512, 256, 384, 1024, 1024, 2048};
    return bytes[kind];
}
constexpr size_t scale_bytes(int kind) {
    constexpr size_t bytes[kKinds] = {32, 64, 32, 32, 32, 0, 0, 0};
    return bytes[kind];
}
constexpr size_t shared_bytes(int kind) { return kind == kQ4_K ? 64 : kind == kQ6_K ? 64 : 0; }
constexpr int chunk_blocks(int kind) { return kind == kQ4_K || kind == kQ6_K ? 8 : 2; }
constexpr size_t chunk_bytes(int kind) {
    return chunk_blocks(kind) * (code_bytes(kind) + scale_bytes(kind)) + shared_bytes(kind);
}

constexpr int blocks_of(int inputs) { return (inputs + kBlock - 1) / kBlock; }
constexpr int tiles_of(int outputs) { return (outputs + kTile - 1) / kTile; }
constexpr size_t tile_bytes(int kind, int inputs) {
    return (blocks_of(inputs) + chunk_blocks(kind) - 1) / chunk_blocks(kind) * chunk_bytes(kind);
}

// The offsets of a block's parts from the start of its tile.
struct BlockPlace {
    size_t codes, scales, shared;

    constexpr BlockPlace(int kind, int index) : codes(0), scales(0), shared(0) {
        const size_t chunk = index / chunk_blocks(kind) * chunk_bytes(kind), within = index % chunk_blocks(kind);
        codes = chunk + within * code_bytes(kind);
        scales = chunk + chunk_blocks(kind) * code_bytes(kind) + within * scale_bytes(kind);
        shared = chunk + chunk_blocks(kind) * (code_bytes(kind) + scale_bytes(kind));
    }
};

}  // namespace slip

extern "C" {

// One packed weight [outputs, inputs].
struct SlipMatrix {
    int32_t kind, outputs, inputs;
    const uint8_t* data;
};

// Matrices that read the same rows; their outputs are one after the other.
struct SlipLinear {
    int32_t parts, outputs;
    const SlipMatrix* part;
    const float* bias;  // one per output, or null
};

}  // extern "C"
