#include "amx.h"

#include <algorithm>
#include <initializer_list>

#include "matmul.h"
#include "weights.h"

namespace slip {
namespace avx512 {
void quantise_block(const float* x, const RowsIn& in, int row, int index);
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out);
}  // namespace avx512

namespace amx {
namespace {

// There are two sets of tile registers: the processor does not rename them, so with one set a product would have to
// wait for the registers of the product before. They are macros because the compiler pastes their names into
// instructions.
#define ROWS 0
#define WEIGHTS 1
#define SUMS 2
#define OTHER_ROWS 3
#define OTHER_WEIGHTS 4
#define OTHER_SUMS 5

// The compiler does not know that tile instructions read memory, so all stores must be complete before them.
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

constexpr int kAtOnce = 6;  // blocks per round: enough that neither tiles nor floats wait for the other's memory
constexpr int kQuadBytes = 8 * 64;

// The integer sums of one block for 16 rows: [row][output].
using Sums = int32_t[kGroup * kTile];

// One product of 16 rows with 16 outputs over 32 inputs.
struct TileProduct {
    const uint8_t* quads;
    const int8_t* codes;
    int32_t* sums;
};

inline void multiply_pair(const TileProduct& one, const TileProduct& other) {
    _tile_loadd(ROWS, one.codes, kBlock);
    _tile_loadd(WEIGHTS, one.quads, 64);
    _tile_loadd(OTHER_ROWS, other.codes, kBlock);
    _tile_loadd(OTHER_WEIGHTS, other.quads, 64);
    _tile_zero(SUMS);
    _tile_zero(OTHER_SUMS);
    _tile_dpbsud(SUMS, ROWS, WEIGHTS);
    _tile_dpbsud(OTHER_SUMS, OTHER_ROWS, OTHER_WEIGHTS);
    _tile_stored(SUMS, one.sums, 64);
    _tile_stored(OTHER_SUMS, other.sums, 64);
}

// Provides a block's codes as whole bytes: 8-bit codes lie in the tile itself, others are unpacked. If every 16 inputs
// have their own scale, the two halves become two products, each with zeros in place of the other half's codes.
template <int K>
inline void unpack(const uint8_t* tile, int index, uint8_t (*room)[kQuadBytes], const uint8_t** quads) {
    if (K == kQ8_0) {
        quads[0] = tile + BlockPlace(K, index).codes;
        return;
    }
    const WeightCodes<K> codes(tile, index);
    for (int half = 0; half < WeightTraits<K>::kHalves; ++half) {
        quads[half] = room[half];
        for (int i = 0; i < 8; ++i) {
            const bool own = WeightTraits<K>::kHalves == 1 || i / 4 == half;
            _mm512_store_si512(room[half] + i * 64, own ? codes.quads[i] : _mm512_setzero_si512());
        }
    }
}

// Adds a block's contribution to the rows' results, with the same roundings in the same order as without tiles.
template <int K>
inline void add_tile_sums(const uint8_t* tile, int index, const Sums* found, const RowsIn& in, size_t at, Floats* total) {
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
        if (r < in.width && spiky[r]) add_block<K, 1>(total, codes, factors, rest, r);
}

template <int K>
void sixteen_rows(const SlipMatrix& matrix, const uint8_t* tile, const RowsIn& in, int group, float* out) {
    constexpr int halves = WeightTraits<K>::kHalves;
    const int blocks = blocks_of(matrix.inputs);
    alignas(64) uint8_t unpacked[kAtOnce][halves][kQuadBytes];
    alignas(64) Sums sums[kAtOnce][halves];
    TileProduct products[kAtOnce * halves];
    Floats total[kGroup];
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) total[r] = set1(0.0f);
    const size_t first = in.block(group, 0);
    for (int start = 0; start < blocks; start += kAtOnce) {
        const int count = std::min(kAtOnce, blocks - start);
        for (int i = 0; i < count; ++i) {
            prefetch_block<K>(tile + tile_bytes(K, matrix.inputs), start + i);
            const uint8_t* quads[halves];
            unpack<K>(tile, start + i, unpacked[i], quads);
            const int8_t* codes = in.main.codes + (first + start + i) * in.width * kBlock;
            for (int half = 0; half < halves; ++half) products[i * halves + half] = {quads[half], codes, sums[i][half]};
        }
        settle(unpacked);
        // if the number of products is odd, the last one is computed twice into the same place
        for (int i = 0; i < count * halves; i += 2)
            multiply_pair(products[i], products[std::min(i + 1, count * halves - 1)]);
        settle(sums);
        for (int i = 0; i < count; ++i) add_tile_sums<K>(tile, start + i, sums[i], in, first + start + i, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) store(out + r * kTile, total[r]);
}

}  // namespace

void enter() {
    TileConfig config;
    for (int tile : {ROWS, OTHER_ROWS}) config.shape(tile, kGroup, kBlock);
    for (int tile : {WEIGHTS, OTHER_WEIGHTS}) config.shape(tile, 8, 64);
    for (int tile : {SUMS, OTHER_SUMS}) config.shape(tile, kGroup, 64);
    settle(&config);
    _tile_loadconfig(&config);
}

void leave() { _tile_release(); }

int64_t products(int rounds) {
    enter();
    for (int i = 0; i < rounds; ++i) {
        _tile_dpbsud(SUMS, ROWS, WEIGHTS);
        _tile_dpbsud(OTHER_SUMS, OTHER_ROWS, OTHER_WEIGHTS);
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

// Whether tiles really multiply here: compares one small product with the same product without tiles. The process may
// die where tiles do not work.
SLIP_VISIBLE int slip_probe_amx() {
    using namespace slip;
    constexpr int inputs = 64, bytes = static_cast<int>(tile_bytes(kQ8_0, inputs));
    alignas(64) uint8_t data[bytes];
    alignas(64) float with[kGroup * kTile], without[kGroup * kTile];
    for (int i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(0x2c + i * 7 % 4);  // finite halves, varied codes
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
