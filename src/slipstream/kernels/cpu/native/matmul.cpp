#include "matmul.h"

#include "weights.h"

#include <cstring>

namespace slip {
namespace SLIP_ISA {
namespace {

constexpr float kCodes = 127.0f;  // the largest int8 code
// A block is spiky if its largest value is this many times its mean magnitude; the largest of 32 normally distributed
// numbers is about 3 times their mean.
constexpr float kSpike = 12.0f;
#if defined(__AVX512F__)
constexpr int kMostFloatRows = 8;  // two sums per row must fit into the registers
#else
constexpr int kMostFloatRows = 4;
#endif

// Multiplies R rows of a group, from `first` on, with one tile.
template <int K, int R>
void tile_rows(const SlipMatrix& matrix, const uint8_t* tile, const RowsIn& in, int group, int first, float* out) {
    const int blocks = blocks_of(matrix.inputs);
    constexpr int abreast = R % 2 == 0 ? 2 : 1;
    const size_t width = in.width;
    Floats total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r] = set1(0.0f);
    size_t at = in.block(group, 0);
    for (int index = 0; index < blocks; ++index, ++at) {
        // memory would be idle during the sums, so the next tile is fetched; without this a step of one row takes a
        // fifth longer (docs/log.md)
        prefetch_block<K>(tile + tile_bytes(K, matrix.inputs), index);
        const WeightCodes<K> codes(tile, index);
        const WeightFactors<K> factors(tile, index);
        const BlockRows rows(in.main, at, width, first);
#pragma GCC unroll 16
        for (int r = 0; r < R; r += abreast) add_block<K, abreast>(total, codes, factors, rows, r);
        const uint8_t* spiky = in.spiky + at * width + first;
        if (!any_of<R>(spiky)) continue;
        const BlockRows rest(in.rest, at, width, first);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            if (spiky[r]) add_block<K, 1>(total, codes, factors, rest, r);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out + (first + r) * kTile, total[r]);
}

template <int K>
inline Floats load_weights(const uint8_t* p) {
    if (K == kF32) return load(reinterpret_cast<const float*>(p));
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
    return K == kF16 ? load_half(halves) : load_brain(halves);
}

// Multiplies with float weights: two running sums per row, over even and odd inputs, so that additions overlap.
template <int K, int R>
void float_tile_rows(const SlipMatrix& matrix, const uint8_t* tile, const RowsIn& in, int group, int first, float* out) {
    constexpr size_t line = kTile * (K == kF32 ? 4 : 2);
    const float* rows = in.values + (static_cast<size_t>(group) * kGroup + first) * in.stride;
    Floats even[R], odd[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r] = odd[r] = set1(0.0f);
    int k = 0;
    for (; k + 1 < matrix.inputs; k += 2) {
        const Floats a = load_weights<K>(tile + k * line), b = load_weights<K>(tile + (k + 1) * line);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            even[r] = fma(a, set1(rows[r * in.stride + k]), even[r]);
            odd[r] = fma(b, set1(rows[r * in.stride + k + 1]), odd[r]);
        }
    }
    if (k < matrix.inputs) {
        const Floats a = load_weights<K>(tile + k * line);
        for (int r = 0; r < R; ++r) even[r] = fma(a, set1(rows[r * in.stride + k]), even[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(out + (first + r) * kTile, even[r] + odd[r]);
}

struct Kernel {
    void (*run)(const SlipMatrix&, const uint8_t*, const RowsIn&, int group, int first, float* out);
    int rows;
};

// Returns the widest kernel that does not exceed the remaining rows, or the next wider one if a few spare rows cost
// less than another pass over the weights. Spare rows are computed from whatever the buffers hold, and their results
// are not used.
template <int K>
Kernel quantised_kernel(int rows) {
#if defined(__AVX512F__)
    if (rows > 12) return {tile_rows<K, 16>, 16};
    if (rows > 8) return {tile_rows<K, 12>, 12};
    if (rows > 6) return {tile_rows<K, 8>, 8};
    if (rows > 4) return {tile_rows<K, 6>, 6};
#endif
    if (rows > 2) return {tile_rows<K, 4>, 4};
    if (rows > 1) return {tile_rows<K, 2>, 2};
    return {tile_rows<K, 1>, 1};
}

template <int K>
Kernel float_kernel(int rows) {
    // these kernels read the float rows, after which there is no memory, so spare rows are not possible
    if (kMostFloatRows == 8 && rows >= 8) return {float_tile_rows<K, 8>, 8};
    if (rows >= 4) return {float_tile_rows<K, 4>, 4};
    return {float_tile_rows<K, 1>, 1};
}

Kernel kernel_for(int kind, int rows) {
    switch (kind) {
        case kQ4_0: return quantised_kernel<kQ4_0>(rows);
        case kQ4_1: return quantised_kernel<kQ4_1>(rows);
        case kQ8_0: return quantised_kernel<kQ8_0>(rows);
        case kQ4_K: return quantised_kernel<kQ4_K>(rows);
        case kQ6_K: return quantised_kernel<kQ6_K>(rows);
        case kF16: return float_kernel<kF16>(rows);
        case kBF16: return float_kernel<kBF16>(rows);
        default: return float_kernel<kF32>(rows);
    }
}

// Stores codes, scale and sums of one row's block; `row` is its index in the group.
inline void put_codes(const CodeRows& rows, size_t width, size_t place, size_t row, Floats low, Floats high, float top) {
    const float scale = top / kCodes;
    const Floats steps = set1(top > 0.0f ? kCodes / top : 0.0f);
    int8_t* codes = rows.codes + place * kBlock;
    const Ints low_codes = to_ints(low * steps), high_codes = to_ints(high * steps);
    store_bytes(codes, low_codes);
    store_bytes(codes + kLanes, high_codes);
    // Codes of a row that is not finite may add up to the least integer, whose negation only unsigned numbers define.
    const uint32_t first = static_cast<uint32_t>(sum(low_codes)), last = static_cast<uint32_t>(sum(high_codes));
    const uint32_t whole = first + last;
    rows.scales[place] = scale;
    rows.sums[place] = scale * static_cast<float>(static_cast<int32_t>(whole));
    int32_t* negated = rows.negated + (place - row) * 3 + row;
    negated[0] = static_cast<int32_t>(0u - whole);
    negated[width] = static_cast<int32_t>(0u - first);
    negated[2 * width] = static_cast<int32_t>(0u - last);
}

}  // namespace

void quantise_block(const float* x, const RowsIn& in, int row, int index) {
    const size_t within = row % kGroup, place = in.block(row / kGroup, index) * in.width + within;
    const Floats low = load(x), high = load(x + kLanes);
    const float top = magnitude(low, high);
    const float scale = top / kCodes;
    put_codes(in.main, in.width, place, within, low, high, top);
    const bool spiky = top * kBlock > kSpike * sum(abs(low) + abs(high));
    in.spiky[place] = spiky;
    if (!spiky) return;
    const int8_t* codes = in.main.codes + place * kBlock;
    const Floats down = set1(-scale);
    const Floats low_rest = fma(load_signed(codes), down, low), high_rest = fma(load_signed(codes + kLanes), down, high);
    put_codes(in.rest, in.width, place, within, low_rest, high_rest, magnitude(low_rest, high_rest));
}

void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, int rows, float* out) {
    const uint8_t* data = matrix.data + tile * tile_bytes(matrix.kind, matrix.inputs);
    int first = 0;
    while (first < rows) {
        const Kernel kernel = kernel_for(matrix.kind, rows - first);
        kernel.run(matrix, data, in, group, first, out);
        first += kernel.rows;
    }
}

}  // namespace SLIP_ISA
}  // namespace slip
