// Rows of scores cut into stretches, and the K best of a stretch: what the rankings of sampling.cpp share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>

#include "noise.h"
#include "team.h"

namespace slip {
namespace SLIP_ISA {
namespace {

constexpr int kStretch = 8192;  // scores of a stretch: 32 KiB, which fit into the first cache
constexpr int64_t kWorthSharing = 8 * kStretch;  // fewer scores are ranked sooner than a second thread wakes up
constexpr float kHidden = -INFINITY;

struct Ranked {
    float value;
    int32_t id;
};

bool ahead(const Ranked& a, const Ranked& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Memory that is kept between calls; `get` does not initialise it.
template <typename T>
class Kept {
public:
    T* get(size_t count) {
        if (count > size_) {
            values_.reset(new T[count]);
            size_ = count;
        }
        return values_.get();
    }

private:
    std::unique_ptr<T[]> values_;
    size_t size_ = 0;
};

// A score that at least K tokens of the row reach; the stretches of a row raise it for each other.
struct Bar {
    std::atomic<float> score;

    void raise(float to) {
        float now = score.load(std::memory_order_relaxed);
        while (to > now && !score.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
        }
    }
};

// The K best of one stretch, whose tokens are offered in rising order; it needs room for 2K.
class Leaders {
public:
    Leaders() = default;
    Leaders(Ranked* places, int count, Bar* shared) : places_(places), shared_(shared), count_(count) { lift(); }

    float bar() const { return bar_; }  // scores below it need not be offered

    void offer(float value, int32_t id) {
        places_[size_++] = {value, id};
        if (size_ != count_ && size_ != 2 * count_) return;
        finish();
        float last = places_[0].value;
        for (int i = 1; i < count_; ++i) last = std::min(last, places_[i].value);
        own_ = std::nextafter(last, INFINITY);  // a later token with the same score ranks after
        shared_->raise(last);
        lift();
    }

    int finish() {
        if (size_ > count_) {
            std::nth_element(places_, places_ + count_ - 1, places_ + size_, ahead);
            size_ = count_;
        }
        return size_;
    }

private:
    void lift() { bar_ = std::max(own_, shared_->score.load(std::memory_order_relaxed)); }

    Ranked* places_ = nullptr;
    Bar* shared_ = nullptr;
    int count_ = 0;
    int size_ = 0;
    float own_ = -FLT_MAX;
    float bar_ = -FLT_MAX;
};

// The result of a first pass over a stretch.
struct Look {
    float largest = kHidden;
    int32_t where = 0;    // the first token with that score
    bool broken = false;  // whether some score is NaN

    bool usable() const { return !broken && std::isfinite(largest); }
};

// What the ranking of a stretch found, in addition to the leaders.
struct Finding {
    int size = 0;
    float sum = 0.0f;  // the sum of e^((score - largest) / temperature); rankings with noise need none
};

struct Memory {
    Kept<Look> looks;
    Kept<Finding> findings;
    Kept<Ranked> places;
    Kept<Bar> bars;
    Kept<int> order;
};
thread_local Memory memory;

struct Rows {
    const float* scores;
    int count, vocab;
    int stretches;
    Look* looks;

    Rows(const float* scores, int count, int vocab)
        : scores(scores), count(count), vocab(vocab), stretches((vocab + kStretch - 1) / kStretch),
          looks(memory.looks.get(static_cast<size_t>(count) * stretches)) {}

    const float* row(int index) const { return scores + static_cast<size_t>(index) * vocab; }
    int pieces() const { return count * stretches; }
    int start(int stretch) const { return stretch * kStretch; }
    int stop(int stretch) const { return std::min((stretch + 1) * kStretch, vocab); }
    int threads(int wanted) const { return static_cast<int64_t>(count) * vocab < kWorthSharing ? 1 : wanted; }

    Look whole(int index) const {
        Look all;
        for (int i = 0; i < stretches; ++i) {
            const Look& part = looks[index * stretches + i];
            if (part.largest > all.largest) all = {part.largest, part.where, all.broken};
            all.broken |= part.broken;
        }
        return all;
    }
};

// Loads sixteen scores from `at` on; those after the end are hidden.
inline Floats load_some(const float* row, int at, int stop) {
    if (at + kLanes <= stop) return load(row + at);
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = at + i < stop ? row[at + i] : kHidden;
    return load(lanes);
}

inline void load_tile(const float* row, int at, int stop, Floats score[kVectors]) {
    if (at + kTile <= stop) {
        SLIP_UNROLL for (int i = 0; i < kVectors; ++i) score[i] = load(row + at + i * kLanes);
    } else {
        for (int i = 0; i < kVectors; ++i) score[i] = load_some(row, at + i * kLanes, stop);
    }
}

constexpr int kBlock = 16 * kLanes;
constexpr int kBlocks = kStretch / kBlock;

// Passes over a stretch. `maxima` receives the largest scores of every block, lane by lane, all of different tokens.
Look look(const float* row, int start, int stop, Floats maxima[kBlocks]) {
    Look seen;
    uint32_t broken = 0;
    seen.where = start;
    for (int from = start; from < stop; from += kBlock) {
        Floats even = set1(kHidden), odd = set1(kHidden);
        const int end = std::min(from + kBlock, stop);
        for (int at = from; at < end; at += 2 * kLanes) {
            const Floats a = load_some(row, at, end), b = load_some(row, at + kLanes, end);
            broken |= not_numbers(a) | not_numbers(b);
            even = max(a, even);
            odd = max(b, odd);
        }
        const Floats both = maxima[(from - start) / kBlock] = max(even, odd);
        if (greater(both, set1(seen.largest))) {
            seen.largest = largest(both);
            seen.where = from;
        }
    }
    while (seen.where + 1 < stop && row[seen.where] != seen.largest) ++seen.where;
    seen.broken = broken != 0;
    return seen;
}

// Maps floats to integers in the same order, and back.
inline int32_t rank_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}
inline float of_rank(int32_t rank) {
    const int32_t bits = rank < 0 ? rank ^ 0x7FFFFFFF : rank;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Returns the highest score for which the maxima show that at least `count` tokens reach it, but at least `known`.
float reached_by(int count, const Floats* maxima, int blocks, float largest, float known) {
    const auto reaching = [=](float score) {
        int lower = 0;
        for (int i = 0; i < blocks; ++i) lower += __builtin_popcount(greater(set1(score), maxima[i]));
        return blocks * kLanes - lower;
    };
    if (reaching(known) < count) return known;
    int64_t low = rank_of(known), high = static_cast<int64_t>(rank_of(largest)) + 1;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        const int found = reaching(of_rank(static_cast<int32_t>(middle)));
        (found < count ? high : low) = middle;
        if (found == count) break;
    }
    return of_rank(static_cast<int32_t>(low));
}

void look_at_all(const Rows& rows) {
    Team::shared().share(rows.pieces(), [&rows](int piece) {
        const int stretch = piece % rows.stretches;
        Floats maxima[kBlocks];
        rows.looks[piece] = look(rows.row(piece / rows.stretches), rows.start(stretch), rows.stop(stretch), maxima);
    });
}

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip
