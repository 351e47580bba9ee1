#include "amx.h"

#include "matmul.h"
#include "weights.h"

namespace slip {
namespace avx512 {
void quantise_block(const float* x, const RowsIn& in, int row, int index);
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out);
}  // namespace avx512

namespace amx {
namespace {

// Tile registers: rows and sums for a whole block, and for half of one where every 16 inputs have their own scale.
// Macros, because the compiler pastes the names into instructions.
#define ROWS 0
#define WEIGHTS 1
#define HALF_ROWS 2
#define HALF_WEIGHTS 3
#define SUMS 4
#define OTHER_SUMS 5

// The compiler does not know what tile instructions read from memory: everything must have been stored before them.
inline void settle(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int count, int bytes) {
        rows[tile] = static_cast<uint8_t>(count);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

constexpr int kAtOnce = 6;  // blocks: enough that neither tiles nor floats wait for each other's memory
constexpr int kQuadBytes = 8 * 64;

// Integer sums of one block for 16 rows: [half][row][output].
using Sums = int32_t[2][kGroup * kTile];

template <int K>
inline void tile_sums(const uint8_t* quads, const int8_t* codes, Sums& sums) {
    _tile_zero(SUMS);
    if (WeightTraits<K>::kHalves == 1) {
        _tile_loadd(ROWS, codes, kBlock);
        _tile_loadd(WEIGHTS, quads, 64);
        _tile_dpbsud(SUMS, ROWS, WEIGHTS);
        _tile_stored(SUMS, sums[0], 64);
        return;
    }
    _tile_zero(OTHER_SUMS);
    _tile_loadd(HALF_ROWS, codes, kBlock);
    _tile_loadd(HALF_WEIGHTS, quads, 64);
    _tile_dpbsud(SUMS, HALF_ROWS, HALF_WEIGHTS);
    _tile_stored(SUMS, sums[0], 64);
    _tile_loadd(HALF_ROWS, codes + 16, kBlock);
    _tile_loadd(HALF_WEIGHTS, quads + kQuadBytes / 2, 64);
    _tile_dpbsud(OTHER_SUMS, HALF_ROWS, HALF_WEIGHTS);
    _tile_stored(OTHER_SUMS, sums[1], 64);
}

// Where a block's codes lie as whole bytes: 8-bit ones in the tile itself, others after unpacking.
template <int K>
inline const uint8_t* whole_codes(const uint8_t* tile, int index, uint8_t* room) {
    if (K == kQ8_0) return tile + BlockPlace(K, index).codes;
    const WeightCodes<K> codes(tile, index);
    for (int i = 0; i < 8; ++i) _mm512_store_si512(room + i * 64, codes.quads[i]);
    return room;
}

// What a block adds to the rows' results: the same roundings in the same order as without tiles.
template <int K>
inline void add_tile_sums(const uint8_t* tile, int index, const Sums& found, const RowsIn& in, size_t at, Floats* total) {
    const WeightFactors<K> factors(tile, index);
    const BlockRows rows(in.main, at, in.width, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) {
        Ints sums[2];
        start_sums<K>(sums, rows, r);
        for (int half = 0; half < WeightTraits<K>::kHalves; ++half) sums[half] = sums[half] + load(found[half] + r * kTile);
        total[r] = add_sums<K>(total[r], factors, sums, rows, r);
    }
    const uint8_t* spiky = in.spiky + at * in.width;
    if (!any_of<kGroup>(spiky)) return;
    const WeightCodes<K> codes(tile, index);
    const BlockRows rest(in.rest, at, in.width, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r)
        if (r < in.width && spiky[r]) total[r] = add_block<K>(total[r], codes, factors, rest, r);
}

template <int K>
void sixteen_rows(const SlipMatrix& matrix, const uint8_t* tile, const RowsIn& in, int group, float* out) {
    const int blocks = blocks_of(matrix.inputs);
    alignas(64) uint8_t unpacked[kAtOnce][kQuadBytes];
    alignas(64) Sums sums[kAtOnce];
    const uint8_t* quads[kAtOnce];
    Floats total[kGroup];
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) total[r] = set1(0.0f);
    const size_t first = in.block(group, 0);
    for (int start = 0; start < blocks; start += kAtOnce) {
        const int count = std::min(kAtOnce, blocks - start);
        for (int i = 0; i < count; ++i) quads[i] = whole_codes<K>(tile, start + i, unpacked[i]);
        settle(unpacked);
        for (int i = 0; i < count; ++i)
            tile_sums<K>(quads[i], in.main.codes + (first + start + i) * in.width * kBlock, sums[i]);
        settle(sums);
        for (int i = 0; i < count; ++i) add_tile_sums<K>(tile, start + i, sums[i], in, first + start + i, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) store(out + r * kTile, total[r]);
}

}  // namespace

void enter() {
    TileConfig config;
    config.shape(ROWS, kGroup, kBlock);
    config.shape(WEIGHTS, 8, 64);
    config.shape(HALF_ROWS, kGroup, kBlock / 2);
    config.shape(HALF_WEIGHTS, 4, 64);
    config.shape(SUMS, kGroup, 64);
    config.shape(OTHER_SUMS, kGroup, 64);
    settle(&config);
    _tile_loadconfig(&config);
}

void leave() { _tile_release(); }

int64_t products(int rounds) {
    enter();
    for (int i = 0; i < rounds; ++i) {
        _tile_dpbsud(SUMS, ROWS, WEIGHTS);
        _tile_dpbsud(OTHER_SUMS, ROWS, WEIGHTS);
    }
    leave();
    return int64_t{rounds} * 2 * kGroup * kTile * kBlock;
}

void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, float* out) {
    const uint8_t* data = matrix.data + tile * tile_bytes(matrix.kind, matrix.inputs);
    switch (matrix.kind) {
        case kQ4_0: return sixteen_rows<kQ4_0>(matrix, data, in, group, out);
        case kQ4_1: return sixteen_rows<kQ4_1>(matrix, data, in, group, out);
        case kQ8_0: return sixteen_rows<kQ8_0>(matrix, data, in, group, out);
        case kQ4_K: return sixteen_rows<kQ4_K>(matrix, data, in, group, out);
        default: return sixteen_rows<kQ6_K>(matrix, data, in, group, out);
    }
}

}  // namespace amx
}  // namespace slip

// Whether tiles really multiply here: one small product against the same without tiles. May die where they do not.
SLIP_VISIBLE int slip_probe_amx() {
    using namespace slip;
    constexpr int inputs = 64, bytes = static_cast<int>(tile_bytes(kQ8_0, inputs));
    alignas(64) uint8_t data[bytes];
    alignas(64) float with[kGroup * kTile], without[kGroup * kTile];
    for (int i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(0x2c + i * 7 % 4);  // sound halves, odd codes
    const SlipMatrix matrix{kQ8_0, kTile, inputs, data};
    RowBuffer buffer;
    const RowsIn in = buffer.shaped(kGroup, inputs);
    float row[inputs];
    for (int r = 0; r < kGroup; ++r) {
        for (int i = 0; i < inputs; ++i) row[i] = static_cast<float>((r * 31 + i * 17) % 101 - 50);
        for (int index = 0; index < blocks_of(inputs); ++index) avx512::quantise_block(row + index * kBlock, in, r, index);
    }
    amx::enter();
    amx::multiply_tile(matrix, 0, in, 0, with);
    amx::leave();
    avx512::multiply_tile(matrix, 0, in, 0, kGroup, without);
    return std::memcmp(with, without, sizeof with) == 0;
}
