// Sixteen floats or ints at a time, in one AVX-512 register or two AVX2 registers.
//
// Both versions do the same operation on the same lane in the same order, so a kernel written with them gives the same
// bits on every machine. The compiler must not contract operations into others: build with -ffp-contract=off.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace slip {
namespace SLIP_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Ints {
    __m512i v;
};
struct Floats {
    __m512 v;
};

inline Floats set1(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }  // max(NaN, b) is b
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats round_even(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }  // rounds to nearest even
inline Floats bits_to_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
inline Ints bits_to_ints(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline Ints set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N>
inline Ints shift_left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
inline void store_bytes(int8_t* p, Ints a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v)); }
inline uint32_t greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }  // one bit per lane

#else

struct Ints {
    __m256i lo, hi;
};
struct Floats {
    __m256 lo, hi;
};

inline Floats set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Floats load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Floats abs(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Floats round_even(Floats a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Floats bits_to_floats(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Ints bits_to_ints(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Ints set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load(const int32_t* p) {
    const __m256i* from = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline void store(int32_t* p, Ints a) {
    __m256i* to = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(to, a.lo);
    _mm256_storeu_si256(to + 1, a.hi);
}
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <int N>
inline Ints shift_left(Ints a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
inline void store_bytes(int8_t* p, Ints a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline uint32_t greater(Floats a, Floats b) {
    const uint32_t lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
    return lo | static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) << 8;
}

#endif

// Returns the sum of all lanes, added at distance 8, 4, 2 and 1 on every machine.
inline float sum(Floats a) {
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline int32_t sum(Ints a) {
#if defined(__AVX512F__)
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
#else
    const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
#endif
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

inline float largest(Floats a) {
    float lanes[kLanes];
    store(lanes, a);
    float best = lanes[0];
    for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
    return best;
}

// Returns e^x to about one unit in the last place; it is 0 below -87, at most e^88.7, and NaN for NaN.
inline Floats exp(Floats x) {
    // max and min return their second argument if one is NaN, so x is the second
    const Floats bounded = max(set1(-87.3f), min(set1(88.7f), x));
    const Floats n = round_even(bounded * set1(1.44269504f));
    Floats r = fma(n, set1(-0.693145752f), bounded);  // ln 2 is split in two parts, of which the first has few digits
    r = fma(n, set1(-1.42860677e-6f), r);
    Floats p = set1(1.0f / 5040.0f);
    p = fma(p, r, set1(1.0f / 720.0f));
    p = fma(p, r, set1(1.0f / 120.0f));
    p = fma(p, r, set1(1.0f / 24.0f));
    p = fma(p, r, set1(1.0f / 6.0f));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r * r, r) + set1(1.0f);
    // multiplies by 2^(n-1) and by 2, because 2^n may overflow where p * 2^n does not
    return p * bits_to_floats(shift_left<23>(to_ints(n) + set1(int32_t{126}))) * set1(2.0f);
}

}  // namespace SLIP_ISA
}  // namespace slip
