// One block of packed weights times one row: codes as unsigned bytes in registers, integer sums, and their scaling.
#pragma once

#include <cstring>

#include "matmul.h"

namespace slip {
namespace SLIP_ISA {

#if defined(__AVX512F__)

using Codes = __m512i;  // one quad of every output
inline Codes load_codes(const uint8_t* p) { return _mm512_load_si512(p); }
inline Codes low_nibbles(Codes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Codes high_nibbles(Codes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
template <int Shift>
inline Codes with_high_bits(Codes low, Codes high) {
    const Codes bits = _mm512_and_si512(_mm512_srli_epi16(high, Shift), _mm512_set1_epi8(3));
    return _mm512_or_si512(low, _mm512_slli_epi16(bits, 4));
}
inline Ints zero_ints() { return {_mm512_setzero_si512()}; }
// Adds the products of four unsigned codes and four signed ones to every output. If rows are processed in pairs
// (Abreast) the instruction itself broadcasts the four: GCC does not know that form, and would use a register and a
// load for it.
template <bool Wide, bool Abreast = false>
inline Ints dot(Ints sum, Codes codes, const int8_t* four) {
    if (Abreast) {
        const auto& word = *reinterpret_cast<const int8_t(*)[4]>(four);
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(codes), "m"(word));
        return sum;
    }
    int32_t word;
    std::memcpy(&word, four, 4);
    return {_mm512_dpbusd_epi32(sum.v, codes, _mm512_set1_epi32(word))};
}
inline Floats bytes_to_floats(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats load_signed(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats load_brain(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Returns the largest magnitude of 32 floats; NaN counts as larger than every number.
inline float magnitude(Floats a, Floats b) {
    const __m512i bits = _mm512_max_epi32(_mm512_castps_si512(abs(a).v), _mm512_castps_si512(abs(b).v));
    const int32_t top = _mm512_reduce_max_epi32(bits);
    float value;
    std::memcpy(&value, &top, 4);
    return value;
}

#else

struct Codes {
    __m256i lo, hi;
};
inline Codes load_codes(const uint8_t* p) {
    const __m256i* from = reinterpret_cast<const __m256i*>(p);
    return {_mm256_load_si256(from), _mm256_load_si256(from + 1)};
}
inline Codes low_nibbles(Codes a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Codes high_nibbles(Codes a) {
    return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
template <int Shift>
inline Codes with_high_bits(Codes low, Codes high) {
    const __m256i mask = _mm256_set1_epi8(3);
    const __m256i lo = _mm256_and_si256(_mm256_srli_epi16(high.lo, Shift), mask);
    const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(high.hi, Shift), mask);
    return {_mm256_or_si256(low.lo, _mm256_slli_epi16(lo, 4)), _mm256_or_si256(low.hi, _mm256_slli_epi16(hi, 4))};
}
inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Without a dot-product instruction pairs are summed in 16 bits, in which products with 8-bit codes (Wide) would
// overflow. Those codes are taken as signed numbers, with the sign moved to the other factor; `start_sum` then adds no
// offset.
template <bool Wide>
inline __m256i pairs(__m256i codes, __m256i four) {
    if (!Wide) return _mm256_maddubs_epi16(codes, four);
    const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(four, centred));
}
template <bool Wide, bool Abreast = false>
inline Ints dot(Ints sum, Codes codes, const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    const __m256i spread = _mm256_set1_epi32(word), ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(pairs<Wide>(codes.lo, spread), ones)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(pairs<Wide>(codes.hi, spread), ones))};
}
inline Floats bytes_to_floats(const uint8_t* p) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline Floats load_signed(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline Floats load_brain(const uint16_t* p) {
    const __m128i* from = reinterpret_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1)), 16))};
}
inline float magnitude(Floats a, Floats b) {
    const Floats x = abs(a), y = abs(b);
    const __m256i top = _mm256_max_epi32(_mm256_max_epi32(_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)),
                                   _mm256_max_epi32(_mm256_castps_si256(y.lo), _mm256_castps_si256(y.hi)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    const int32_t best = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
    float value;
    std::memcpy(&value, &best, 4);
    return value;
}

#endif

template <int K>
struct WeightTraits {
    static constexpr bool kWide = K == kQ8_0;  // whether codes use all 8 bits
    static constexpr bool kMinimum = K == kQ4_1 || K == kQ4_K;
    static constexpr int kOffsetBits = K == kQ4_0 ? 3 : K == kQ8_0 ? 7 : K == kQ6_K ? 5 : 0;  // codes are 2^n too high
    static constexpr int kHalves = K == kQ6_K ? 2 : 1;  // parts of a block that have their own scale
};

// The codes of one block, unsigned, in one register per quad.
template <int K>
struct WeightCodes {
    Codes quads[8];

    WeightCodes(const uint8_t* tile, int index) {
        const uint8_t* codes = tile + BlockPlace(K, index).codes;
        if (K == kQ8_0) {
            for (int i = 0; i < 8; ++i) quads[i] = load_codes(codes + i * 64);
            return;
        }
        for (int i = 0; i < 4; ++i) {
            const Codes both = load_codes(codes + i * 64);
            quads[i] = low_nibbles(both);
            quads[i + 4] = high_nibbles(both);
        }
        if (K == kQ6_K) add_high_bits(load_codes(codes + 256), load_codes(codes + 320));
    }

private:
    void add_high_bits(Codes first, Codes second) {
        quads[0] = with_high_bits<0>(quads[0], first);
        quads[1] = with_high_bits<2>(quads[1], first);
        quads[2] = with_high_bits<4>(quads[2], first);
        quads[3] = with_high_bits<6>(quads[3], first);
        quads[4] = with_high_bits<0>(quads[4], second);
        quads[5] = with_high_bits<2>(quads[5], second);
        quads[6] = with_high_bits<4>(quads[6], second);
        quads[7] = with_high_bits<6>(quads[7], second);
    }
};

// Prefetches a block's part of its chunk, including scales.
template <int K>
inline void prefetch_block(const uint8_t* tile, int index) {
    constexpr size_t share = chunk_bytes(K) / chunk_blocks(K);
    for (size_t line = 0; line < share; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(tile + index * share + line), _MM_HINT_T1);
}

// The factors that turn the integer sums of one block into floats.
template <int K>
struct WeightFactors {
    Floats scale[2], minimum;

    WeightFactors(const uint8_t* tile, int index) {
        const BlockPlace place(K, index);
        const uint8_t* scales = tile + place.scales;
        const int8_t* signed_scales = reinterpret_cast<const int8_t*>(scales);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales);
        const uint16_t* shared = reinterpret_cast<const uint16_t*>(tile + place.shared);
        if (K == kQ4_K) {
            scale[0] = load_half(shared) * bytes_to_floats(scales);
            minimum = set1(-1.0f) * (load_half(shared + kTile) * bytes_to_floats(scales + kTile));
        } else if (K == kQ6_K) {
            scale[0] = load_half(shared) * load_signed(signed_scales);
            scale[1] = load_half(shared) * load_signed(signed_scales + kTile);
        } else {
            scale[0] = load_half(halves);
            if (K == kQ4_1) minimum = load_half(halves + kTile);
        }
    }
};

// Returns minus what codes that are 2^bits too high add to a sum; AVX2 takes wide codes as signed, so they add nothing.
template <int K>
inline Ints start_sum(const int32_t* negated) {
#if !defined(__AVX512F__)
    if (K == kQ8_0) return zero_ints();
#endif
    constexpr int bits = WeightTraits<K>::kOffsetBits;
    if (bits == 0) return zero_ints();
    return shift_left<bits>(set1(*negated));
}

// One block of some neighbouring rows; the data of row r is r places further on.
struct BlockRows {
    const int8_t* codes;
    const float *scales, *sums;
    const int32_t *whole, *first, *last;  // minus the sums of the codes: of all, of the first 16 and of the last 16

    BlockRows(const CodeRows& rows, size_t at, size_t width, int row)
        : codes(rows.codes + (at * width + row) * kBlock),
          scales(rows.scales + at * width + row),
          sums(rows.sums + at * width + row),
          whole(rows.negated + at * 3 * width + row),
          first(whole + width),
          last(first + width) {}
};

// Adds a block's scaled integer sums to a row's result; this is the only place where results are rounded.
template <int K>
inline __attribute__((always_inline)) Floats add_sums(Floats total, const WeightFactors<K>& factors, const Ints* sums,
                                                      const BlockRows& rows, int r) {
    const Floats factor = set1(rows.scales[r]);
    for (int half = 0; half < WeightTraits<K>::kHalves; ++half)
        total = fma(to_floats(sums[half]), factors.scale[half] * factor, total);
    if (WeightTraits<K>::kMinimum) total = fma(factors.minimum, set1(rows.sums[r]), total);
    return total;
}

// Starts a row's sums with minus what the offset of the codes adds to them.
template <int K>
inline __attribute__((always_inline)) void start_sums(Ints* sums, const BlockRows& rows, int r) {
    sums[0] = start_sum<K>((WeightTraits<K>::kHalves == 1 ? rows.whole : rows.first) + r);
    if (WeightTraits<K>::kHalves == 2) sums[1] = start_sum<K>(rows.last + r);
}

// Adds one block of N neighbouring rows from r on. Their integer sums run side by side, because a single one has to
// wait for its own additions.
template <int K, int N>
inline __attribute__((always_inline)) void add_block(Floats* total, const WeightCodes<K>& codes,
                                                     const WeightFactors<K>& factors, const BlockRows& rows, int r) {
    constexpr int per_half = 8 / WeightTraits<K>::kHalves;
    Ints sums[N][2];
    for (int n = 0; n < N; ++n) start_sums<K>(sums[n], rows, r + n);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        for (int n = 0; n < N; ++n) {
            Ints& sum = sums[n][i / per_half];
            sum = dot<WeightTraits<K>::kWide, (N > 1)>(sum, codes.quads[i], rows.codes + (r + n) * kBlock + 4 * i);
        }
    for (int n = 0; n < N; ++n) total[r + n] = add_sums<K>(total[r + n], factors, sums[n], rows, r + n);
}

}  // namespace SLIP_ISA
}  // namespace slip
