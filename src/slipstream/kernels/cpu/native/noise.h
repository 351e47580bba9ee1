// Sampling noise for sixteen tokens at a time: Philox4x32-10 words of (seed, position, token), then Gumbel.
//
// The words are the same as those of kernels/noise.py; the numbers may differ in the last bits of the logarithms.
#pragma once

#include <cstdint>

#include "simd.h"

#define SLIP_UNROLL _Pragma("GCC unroll 8")  // keeps the vectors of a tile in registers

namespace slip {
namespace SLIP_ISA {
namespace {

constexpr float kMostNoise = 22.88f;  // the largest noise, which the word 0 gives: 33 ln 2, rounded up
constexpr int kVectors = 8;
constexpr int kTile = kVectors * kLanes;  // tokens whose words are drawn together

#if defined(__AVX512F__)

// independent computations that hide each other's latency; as many as fit into the registers
constexpr int kStrands = 4;

// Eight unsigned words, each in the low half of a 64-bit lane; the contents of the high halves do not matter.
struct Longs {
    __m512i v;
};
inline Longs longs(uint64_t x) { return {_mm512_set1_epi64(static_cast<long long>(x))}; }
// Returns blocks first .. first + 7 in an order that `tokens` undoes.
inline Longs blocks(uint32_t first) {
    return {_mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7))};
}
inline Longs product(Longs a, uint32_t b) { return {_mm512_mul_epu32(a.v, _mm512_set1_epi64(b))}; }
inline Longs high(Longs a) { return {_mm512_srli_epi64(a.v, 32)}; }
inline Longs xor_all(Longs a, Longs b, Longs c) { return {_mm512_ternarylogic_epi64(a.v, b.v, c.v, 0x96)}; }
// Reorders four words of each of eight blocks to the words of 32 consecutive tokens.
inline void tokens(const Longs c[4], Ints out[2]) {
    const __m512i front = _mm512_mask_blend_epi32(0xAAAA, c[0].v, _mm512_slli_epi64(c[1].v, 32));
    const __m512i back = _mm512_mask_blend_epi32(0xAAAA, c[2].v, _mm512_slli_epi64(c[3].v, 32));
    out[0] = {_mm512_unpacklo_epi64(front, back)};
    out[1] = {_mm512_unpackhi_epi64(front, back)};
}
inline Floats unsigned_to_floats(Ints a) { return {_mm512_cvtepu32_ps(a.v)}; }
template <int N>
inline Ints shift_right(Ints a) { return {_mm512_srai_epi32(a.v, N)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline uint32_t not_numbers(Floats a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline Floats choose(Floats smaller, Floats larger, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(smaller.v, larger.v, _CMP_LT_OQ), no.v, yes.v)};
}

#else

constexpr int kStrands = 1;

struct Longs {
    __m256i a, b;
};
inline Longs longs(uint64_t x) {
    const __m256i all = _mm256_set1_epi64x(static_cast<long long>(x));
    return {all, all};
}
inline Longs blocks(uint32_t first) {
    const __m256i base = _mm256_set1_epi64x(first);
    return {_mm256_add_epi64(base, _mm256_setr_epi64x(0, 2, 1, 3)),
            _mm256_add_epi64(base, _mm256_setr_epi64x(4, 6, 5, 7))};
}
inline Longs product(Longs a, uint32_t b) {
    const __m256i factor = _mm256_set1_epi64x(b);
    return {_mm256_mul_epu32(a.a, factor), _mm256_mul_epu32(a.b, factor)};
}
inline Longs high(Longs a) { return {_mm256_srli_epi64(a.a, 32), _mm256_srli_epi64(a.b, 32)}; }
inline Longs xor_all(Longs a, Longs b, Longs c) {
    return {_mm256_xor_si256(_mm256_xor_si256(a.a, b.a), c.a), _mm256_xor_si256(_mm256_xor_si256(a.b, b.b), c.b)};
}
inline Ints sixteen_tokens(__m256i c0, __m256i c1, __m256i c2, __m256i c3) {
    const __m256i front = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
    const __m256i back = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
    return {_mm256_unpacklo_epi64(front, back), _mm256_unpackhi_epi64(front, back)};
}
inline void tokens(const Longs c[4], Ints out[2]) {
    out[0] = sixteen_tokens(c[0].a, c[1].a, c[2].a, c[3].a);
    out[1] = sixteen_tokens(c[0].b, c[1].b, c[2].b, c[3].b);
}
// The high and low halves are exact as floats, and so is the product of the high half: the sum is rounded once.
inline __m256 unsigned_to_floats(__m256i a) {
    const __m256 top = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
    const __m256 bottom = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xFFFF)));
    return _mm256_add_ps(_mm256_mul_ps(top, _mm256_set1_ps(65536.0f)), bottom);
}
inline Floats unsigned_to_floats(Ints a) { return {unsigned_to_floats(a.lo), unsigned_to_floats(a.hi)}; }
template <int N>
inline Ints shift_right(Ints a) { return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline uint32_t not_numbers(Floats a) {
    const uint32_t lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q));
    return lo | static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) << 8;
}
inline Floats choose(Floats smaller, Floats larger, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(smaller.lo, larger.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(smaller.hi, larger.hi, _CMP_LT_OQ))};
}

#endif

// The key schedule and the part of the counter that all tokens of one position share.
struct NoiseSource {
    uint64_t keys[10][2];  // as wide as a lane, so that they can be broadcast straight from memory
    uint32_t position[2];

    NoiseSource(uint64_t seed, int64_t at) {
        uint32_t first = static_cast<uint32_t>(seed), second = static_cast<uint32_t>(seed >> 32);
        for (auto& key : keys) {
            key[0] = first;
            key[1] = second;
            first += 0x9E3779B9u;
            second += 0xBB67AE85u;
        }
        position[0] = static_cast<uint32_t>(at);
        position[1] = static_cast<uint32_t>(static_cast<uint64_t>(at) >> 32);
    }

    // Draws the words of kTile tokens from `token` on, which is a multiple of four.
    void draw(int32_t token, Ints words[kVectors]) const {
        const uint32_t block = static_cast<uint32_t>(token) / 4;
        for (int vector = 0; vector < kVectors; vector += 2 * kStrands) draw_some(block + 4 * vector, words + vector);
    }

private:
    void draw_some(uint32_t block, Ints* words) const {
        Longs c[kStrands][4];
        for (int strand = 0; strand < kStrands; ++strand) {
            c[strand][0] = blocks(block + 8 * strand);
            c[strand][1] = longs(position[0]);
            c[strand][2] = longs(position[1]);
            c[strand][3] = longs(0);
        }
        for (const auto& key : keys) {
            const Longs first = longs(key[0]), second = longs(key[1]);
            SLIP_UNROLL for (auto& counter : c) {
                const Longs product0 = product(counter[0], 0xD2511F53u), product1 = product(counter[2], 0xCD9E8D57u);
                counter[0] = xor_all(high(product1), counter[1], first);
                counter[2] = xor_all(high(product0), counter[3], second);
                counter[1] = product1;
                counter[3] = product0;
            }
        }
        for (int strand = 0; strand < kStrands; ++strand) tokens(c[strand], words + 2 * strand);
    }
};

// Returns ln x of positive normal numbers to about one unit in the last place, also close to 1.
inline Floats log(Floats x) {
    const Ints bits = bits_to_ints(x);
    const Ints exponent = shift_right<23>(bits - set1(int32_t{0x3F3504F3}));  // leaves a mantissa of √½ to √2
    const Floats n = to_floats(exponent);
    const Floats f = bits_to_floats(bits - shift_left<23>(exponent)) - set1(1.0f);
    // the polynomial is (ln(1 + f) - f + f²/2) / f³, fitted for the least relative error of the logarithm
    Floats p = set1(-0.076344948905f);
    p = fma(p, f, set1(0.12761575187f));
    p = fma(p, f, set1(-0.13160182112f));
    p = fma(p, f, set1(0.14201758278f));
    p = fma(p, f, set1(-0.16623357412f));
    p = fma(p, f, set1(0.20001226864f));
    p = fma(p, f, set1(-0.25000821032f));
    p = fma(p, f, set1(0.33333331708f));
    const Floats square = f * f;
    Floats tail = fma(n, set1(1.42860677e-6f), p * f * square);
    tail = fma(square, set1(-0.5f), tail);
    return fma(n, set1(0.693145751953125f), f + tail);
}

inline Floats halves_above(Ints words) { return unsigned_to_floats(words) + set1(0.5f); }

// Returns -ln(1 - u) of the words' uniform numbers u, small ones included: an exponentially distributed number.
inline Floats exponential(Ints words) {
    const Floats one = set1(1.0f);
    const Floats u = min(halves_above(words) * set1(0x1p-32f), set1(1.0f - 0x1p-24f));
    const Floats rest = one - u;
    const Floats lost = (one - rest) - u;  // the exact rounding error of 1 - u
    return set1(0.0f) - (log(rest) + fma(lost, u, lost));
}

inline Floats gumbel(Floats exponentials) { return set1(0.0f) - log(exponentials); }

// Returns an upper bound of gumbel(exponential(words)) without a logarithm: -ln(1 - u) >= u, and the bits of a float
// read as an integer are a chord of its binary logarithm.
inline Floats noise_bound(Ints words) {
    const Floats chord = to_floats(bits_to_ints(halves_above(words)));
    return fma(chord, set1(-0.69314718f * 0x1p-23f), set1(159.0f * 0.69314718f + 1e-3f));
}

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip
