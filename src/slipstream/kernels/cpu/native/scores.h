// The scores of 16 keys at a time.
//
// A score multiplies and adds lane by lane along dim, and then adds up the lanes at distance 8, 4, 2 and 1.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace slip {
namespace SLIP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kDotQueries = 3;  // queries that share the loads of 16 keys
#else
constexpr int kDotQueries = 1;
#endif

// One kv head of the pools: the keys and values of a place.
struct Pool {
    const float* keys;
    const float* values;
    int64_t head;  // places before this head's in a page
    int dim;

    const float* key(int64_t place) const { return keys + (place + head) * dim; }
    const float* value(int64_t place) const { return values + (place + head) * dim; }
    // Prefetches a key or a value.
    void prefetch(const float* from) const {
        for (int at = 0; at < dim; at += kLanes) _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T1);
    }
};

#if defined(__AVX512F__)

// Adds the lanes of four keys at distance 8 and 4: four lanes of each key are left, one key per quarter.
inline Floats fold_far(const Floats (&a)[4]) {
    const auto halves = [](Floats x, Floats y) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x44), _mm512_shuffle_f32x4(x.v, y.v, 0xEE));
    };
    const __m512 ab = halves(a[0], a[1]), cd = halves(a[2], a[3]);
    return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD))};
}

// Then adds at distance 2 and 1, within the quarters of four vectors: lane 4 q + i is the sum of quarter q of vector i.
inline Floats fold_near(const Floats (&a)[4]) {
    const auto halves = [](__m512 x, __m512 y) {
        const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    };
    const __m512 ab = halves(a[0].v, a[1].v), cd = halves(a[2].v, a[3].v);
    return {_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xDD))};
}

#else

inline Floats fold_far(const Floats (&a)[4]) {
    const auto quarters = [](Floats x, Floats y) {
        const __m256 p = _mm256_add_ps(x.lo, x.hi), q = _mm256_add_ps(y.lo, y.hi);
        return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
    };
    return {quarters(a[0], a[1]), quarters(a[2], a[3])};
}

inline __m256 fold_near(__m256 a, __m256 b, __m256 c, __m256 d) {
    const auto halves = [](__m256 x, __m256 y) {
        const __m256d p = _mm256_castps_pd(x), q = _mm256_castps_pd(y);
        return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(p, q)), _mm256_castpd_ps(_mm256_unpackhi_pd(p, q)));
    };
    const __m256 ab = halves(a, b), cd = halves(c, d);
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xDD));
}

inline Floats fold_near(const Floats (&a)[4]) {
    return {fold_near(a[0].lo, a[1].lo, a[2].lo, a[3].lo), fold_near(a[0].hi, a[1].hi, a[2].hi, a[3].hi)};
}

#endif

// Computes the scores of 16 keys for some queries; each key's products stay in its lanes until all are folded together.
template <int Queries, int Dim>
void dot_keys(const Pool& pool, const int64_t* places, const float* queries, float* scores, int64_t stride) {
    const int dim = Dim ? Dim : pool.dim;
    Floats folded[Queries][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float* key[4];
        for (int q = 0; q < 4; ++q) key[q] = pool.key(places[4 * q + i]);
        Floats sums[Queries][4];
        for (int n = 0; n < Queries; ++n)
            for (int q = 0; q < 4; ++q) sums[n][q] = load(queries + n * dim) * load(key[q]);
        for (int at = kLanes; at < dim; at += kLanes)
            for (int q = 0; q < 4; ++q) {
                const Floats part = load(key[q] + at);
                for (int n = 0; n < Queries; ++n) sums[n][q] = fma(load(queries + n * dim + at), part, sums[n][q]);
            }
        for (int n = 0; n < Queries; ++n) folded[n][i] = fold_far(sums[n]);
    }
    for (int n = 0; n < Queries; ++n) store(scores + n * stride, fold_near(folded[n]));
}

template <int Dim>
void score_all(const Pool& pool, const int64_t* places, const float* queries, int count, float* scores,
               int64_t stride) {
    int done = 0;
    for (; done + kDotQueries <= count; done += kDotQueries)
        dot_keys<kDotQueries, Dim>(pool, places, queries + done * pool.dim, scores + done * stride, stride);
    for (; done < count; ++done)
        dot_keys<1, Dim>(pool, places, queries + done * pool.dim, scores + done * stride, stride);
}

// Computes the scores of 16 keys for `count` queries, which all find the keys in the same places.
void score(const Pool& pool, const int64_t* places, const float* queries, int count, float* scores, int64_t stride) {
    if (pool.dim == 64) score_all<64>(pool, places, queries, count, scores, stride);
    else score_all<0>(pool, places, queries, count, scores, stride);
}

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip
