// Grows the chain and the tree of one drafted block: it takes candidates and returns prefixes that are worth a row of
// the verify step.
//
// It computes the same as grow_chain and grow_tree of speculative/tree.py over BlockDrafts of
// speculative/candidates.py, without a Python call per node. As there, sums over a head's rank are float, and
// everything about chances is double.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "growth.h"
#include "simd.h"

extern "C" {

enum SlipFloatType : int32_t { kFloat = 0, kHalf = 1, kBrain = 2 };
enum SlipGrowthState : int32_t { kGrown = 0, kBroken = 1, kUnknownToken = 2 };

// Tables that correct a slot's candidates once the token before the slot is chosen.
struct SlipHead {
    int32_t vocabulary, rank;  // rank 0 corrects nothing
    int32_t before_type, after_type;
    const void* before;   // [vocabulary, rank], indexed by the token before the slot
    const void* after;    // [vocabulary, rank], indexed by the candidate
    const float* trusted;  // [rank], the weight of the token before in the slot's confidence; null if it has none
};

struct SlipBlock {
    int32_t slots, candidates;
    const int64_t* tokens;    // [slots, candidates], likeliest first
    const float* scores;      // the candidates' log-probabilities
    const SlipHead* head;     // null if candidates do not depend on the token before
    const float* confidence;  // [slots], the slot's own part of the confidence; null if there is no confidence head
    double scale;             // the factor from a correction to a score
    double min_confidence;
};

}  // extern "C"

namespace slip {
namespace SLIP_ISA {
namespace {

// Standard containers are not used: of their code for several instruction sets the linker would keep only one.
template <class T>
class List {
    static_assert(std::is_trivially_copyable<T>::value, "elements are moved as bytes");

public:
    List() = default;
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    ~List() { std::free(items_); }

    void clear() { size_ = 0; }
    void push_back(T item) {
        reserve(size_ + 1);
        items_[size_++] = item;
    }
    void pop_back() { --size_; }
    void assign(int count, T item) {
        size_ = 0;
        reserve(count);
        for (; size_ < count; ++size_) items_[size_] = item;
    }
    int size() const { return size_; }
    T& operator[](int place) { return items_[place]; }
    const T& operator[](int place) const { return items_[place]; }
    T* begin() { return items_; }
    T* end() { return items_ + size_; }

private:
    void reserve(int count) {
        if (count <= room_) return;
        const int room = std::max(count, 2 * room_);
        void* moved = std::realloc(items_, room * sizeof(T));
        if (!moved) throw std::bad_alloc();
        items_ = static_cast<T*>(moved);
        room_ = room;
    }

    T* items_ = nullptr;
    int size_ = 0, room_ = 0;
};

void widen(const void* table, int32_t type, int64_t row, int rank, float* out) {
    const int64_t first = row * rank;
    if (type == kFloat) {
        std::memcpy(out, static_cast<const float*>(table) + first, rank * sizeof(float));
        return;
    }
    const uint16_t* bits = static_cast<const uint16_t*>(table) + first;
    if (type == kBrain) {
        for (int i = 0; i < rank; ++i) {
            const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
            std::memcpy(out + i, &wide, sizeof wide);
        }
        return;
    }
    int i = 0;
    for (; i + kLanes <= rank; i += kLanes) store(out + i, load_half(bits + i));
    for (; i < rank; ++i) out[i] = _cvtsh_ss(bits[i]);
}

// Multiplies a row of any length with one that is padded to whole vectors; `lanes(i)` loads the row's vector at i.
template <class Lanes>
float dot(int rank, const float* padded, const Lanes& lanes) {
    Floats totals[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int i = 0;
    for (; i + 4 * kLanes <= rank; i += 4 * kLanes)
        for (int k = 0; k < 4; ++k) totals[k] = fma(lanes(i + k * kLanes), load(padded + i + k * kLanes), totals[k]);
    for (; i < rank; i += kLanes) totals[0] = fma(lanes(i), load(padded + i), totals[0]);
    return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

// The candidates after one token, likeliest first: `count` of them from index `first` on in the ranked lists.
struct Branch {
    int64_t previous;
    int32_t next;  // index of another branch of the same slot, or -1
    int32_t count;
    int32_t first;
};

struct Waiting {
    double survival;
    int32_t order, parent, rank, branch;
};

bool later(const Waiting& a, const Waiting& b) {
    return a.survival != b.survival ? a.survival < b.survival : a.order > b.order;
}

class Grower {
public:
    void begin(const SlipBlock& block, const SlipCalibration* calibration) {
        block_ = &block;
        calibration_ = calibration;
        state = kGrown;
        branches_.clear();
        tokens_.clear();
        chances_.clear();
        newest_.assign(block.slots, -1);
        rest_.assign(block.slots, -1.0);
        rank_ = block.head ? block.head->rank : 0;
        padded_ = (rank_ + kLanes - 1) / kLanes * kLanes;
        before_.assign(padded_, 0.0f);
        after_.assign(padded_, 0.0f);
        weights_.assign(block.candidates, 0.0);
        fetched_ = 0;
    }

    void chain(SlipGrown& grown, int32_t anchor, int length) {
        begin_growth(grown, anchor);
        extend(grown, length);
    }

    void tree(SlipGrown& grown, int32_t anchor, int nodes, int depth, bool seeded, double floor) {
        begin_growth(grown, anchor);
        waiting_.clear();
        order_ = 0;
        if (seeded) {
            extend(grown, std::min(depth, nodes));
            for (int row = 0; row + 1 < grown.rows; ++row)
                offer(grown, row, 1, branch(row, grown.tokens[row]), grown.survivals[row + 1]);
            if (grown.rows > 1) open_below(grown, grown.rows - 1, depth);
        } else {
            open_below(grown, 0, depth);
        }
        while (waiting_.size() && grown.rows <= nodes && waiting_[0].survival >= floor) {
            std::pop_heap(waiting_.begin(), waiting_.end(), later);
            const Waiting best = waiting_[waiting_.size() - 1];
            waiting_.pop_back();
            const int row = add(grown, best.parent, best.branch, best.rank, best.survival);
            offer(grown, best.parent, best.rank + 1, best.branch, best.survival);
            open_below(grown, row, depth);
        }
    }

    int32_t state = kGrown;

private:
    int add(SlipGrown& grown, int parent, int branch, int rank, double survival) {
        const int place = branches_[branch].first + rank;
        return add_node(grown, parent, static_cast<int32_t>(tokens_[place]), chances_[place], survival);
    }

    void extend(SlipGrown& grown, int length) {
        for (int slot = 0; slot < length; ++slot) {
            const int found = branch(slot, grown.tokens[slot]);
            if (!branches_[found].count) return;
            const double chance = calibrated(calibration_, chances_[branches_[found].first], slot + 1);
            add(grown, slot, found, 0, grown.survivals[slot] * chance);
        }
    }

    void offer(const SlipGrown& grown, int parent, int rank, int branch, double ceiling) {
        if (rank >= branches_[branch].count) return;
        const double claimed = chances_[branches_[branch].first + rank];
        const double own = grown.survivals[parent] * calibrated(calibration_, claimed, grown.depths[parent] + 1);
        // a calibration need not be monotone, but a sibling of lower rank must not come first
        waiting_.push_back({std::min(own, ceiling), order_++, parent, rank, branch});
        std::push_heap(waiting_.begin(), waiting_.end(), later);
    }

    void open_below(const SlipGrown& grown, int row, int depth) {
        if (grown.depths[row] < depth)
            offer(grown, row, 0, branch(grown.depths[row], grown.tokens[row]), grown.survivals[row]);
    }

    // Returns a branch. The chain and the tree pass through the same branches, so each is ranked once and kept.
    int branch(int slot, int64_t previous) {
        if (!block_->head) previous = 0;
        for (int known = newest_[slot]; known >= 0; known = branches_[known].next)
            if (branches_[known].previous == previous) return known;
        Branch made{previous, newest_[slot], 0, tokens_.size()};
        if (weigh(slot, previous)) made.count = ranked(slot);
        if (made.count && block_->confidence) trusting(&chances_[made.first], made.count);
        branches_.push_back(made);
        return newest_[slot] = branches_.size() - 1;
    }

    // Computes the chances of the slot's candidates after `previous`; returns false if there are none to offer.
    bool weigh(int slot, int64_t previous) {
        const int count = block_->candidates;
        const float* scores = block_->scores + static_cast<int64_t>(slot) * count;
        if (rest_[slot] < 0.0) {
            double inside = 0.0;
            for (int i = 0; i < count; ++i) inside += std::exp(static_cast<double>(scores[i]));
            rest_[slot] = std::max(0.0, 1.0 - inside);
        }
        if (!block_->head) {
            for (int i = 0; i < count; ++i) weights_[i] = std::exp(static_cast<double>(scores[i]));
            return true;
        }
        if (!read_before(previous)) return false;
        if (block_->confidence) {
            confidence_ = confidence(slot);
            if (confidence_ < block_->min_confidence) return false;
        }
        double shift = 0.0;  // keeps exp in its range, because a low temperature may make a correction very large
        if (!correct(slot, scores, shift) || (block_->confidence && !std::isfinite(confidence_))) {
            state = state == kGrown ? kBroken : state;
            return false;
        }
        double total = 0.0;
        for (int i = 0; i < count; ++i) total += weights_[i] = std::exp(weights_[i] - shift);
        total += rest_[slot] * std::exp(-shift);
        for (int i = 0; i < count; ++i) weights_[i] /= total;
        return true;
    }

    bool known(int64_t token) {
        if (token >= 0 && token < block_->head->vocabulary) return true;
        state = kUnknownToken;
        return false;
    }

    bool read_before(int64_t previous) {
        if (!rank_) return true;
        if (!known(previous)) return false;
        widen(block_->head->before, block_->head->before_type, previous, rank_, before_.begin());
        return true;
    }

    double confidence(int slot) const {
        double score = block_->confidence[slot];
        if (const float* trusted = block_->head->trusted) {
            float added = 0.0f;
            for (int i = 0; i < rank_; ++i) added += trusted[i] * before_[i];
            score += added;
        }
        return 0.5f * (std::tanh(0.5f * static_cast<float>(score)) + 1.0f);
    }

    // Corrects the scores and sets `shift` to the largest if it is above 0; returns false if a correction is not
    // finite.
    bool correct(int slot, const float* scores, double& shift) {
        const SlipHead& head = *block_->head;
        const int count = block_->candidates;
        const int64_t* tokens = block_->tokens + static_cast<int64_t>(slot) * count;
        fetch(slot + 1);
        for (int i = 0; i < count; ++i) {
            float correction = 0.0f;
            if (rank_) {
                if (!known(tokens[i])) return false;
                correction = product(head, tokens[i]);
            }
            if (!std::isfinite(correction)) return false;
            weights_[i] = static_cast<double>(scores[i]) + block_->scale * static_cast<double>(correction);
            shift = std::max(shift, weights_[i]);
        }
        return true;
    }

    float product(const SlipHead& head, int64_t token) {
        if (head.after_type == kHalf && rank_ == padded_) {
            const uint16_t* row = static_cast<const uint16_t*>(head.after) + token * rank_;
            return dot(rank_, before_.begin(), [row](int i) { return load_half(row + i); });
        }
        float* row = after_.begin();  // has padding, which stays zero
        widen(head.after, head.after_type, token, rank_, row);
        return dot(rank_, before_.begin(), [row](int i) { return load(row + i); });
    }

    // Prefetches the rows of the next slot's candidates, which are scattered over a large table.
    void fetch(int slot) {
        if (!rank_ || slot != fetched_ + 1 || slot >= block_->slots) return;
        fetched_ = slot;
        const SlipHead& head = *block_->head;
        const int64_t bytes = static_cast<int64_t>(rank_) * (head.after_type == kFloat ? 4 : 2);
        const int64_t* tokens = block_->tokens + static_cast<int64_t>(slot) * block_->candidates;
        for (int i = 0; i < block_->candidates; ++i) {
            if (tokens[i] < 0 || tokens[i] >= head.vocabulary) continue;
            const char* row = static_cast<const char*>(head.after) + tokens[i] * bytes;
            for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(row + at, _MM_HINT_T0);
        }
    }

    // Appends the candidates with a chance above 0, likeliest first and equal ones in their order; returns how many.
    int ranked(int slot) {
        const int64_t* tokens = block_->tokens + static_cast<int64_t>(slot) * block_->candidates;
        const int first = tokens_.size();
        for (int i = 0; i < block_->candidates; ++i) {
            const double chance = weights_[i];
            if (!(chance > 0.0)) continue;
            int place = tokens_.size();
            tokens_.push_back(0);
            chances_.push_back(0.0);
            for (; place > first && chances_[place - 1] < chance; --place) {
                chances_[place] = chances_[place - 1];
                tokens_[place] = tokens_[place - 1];
            }
            chances_[place] = chance;
            tokens_[place] = tokens[i];
        }
        return tokens_.size() - first;
    }

    // Sets the first candidate's chance to the confidence; the others share the rest.
    void trusting(double* chances, int count) const {
        const double left = 1.0 - chances[0];
        const double share = left > 0.0 ? (1.0 - confidence_) / left : 0.0;
        chances[0] = confidence_;
        for (int i = 1; i < count; ++i) chances[i] = std::min(confidence_, chances[i] * share);
    }

    const SlipBlock* block_ = nullptr;
    const SlipCalibration* calibration_ = nullptr;
    int rank_ = 0, padded_ = 0, fetched_ = 0;
    int32_t order_ = 0;
    double confidence_ = 0.0;
    List<Branch> branches_;
    List<int64_t> tokens_;
    List<double> chances_, weights_, rest_;
    List<int32_t> newest_;
    List<float> before_, after_;
    List<Waiting> waiting_;
};

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip

// Grows one of the shapes of kernels/rows.py.
SLIP_EXPORT(int32_t, slip_grow)
(const SlipBlock* block, const SlipCalibration* calibration, int32_t anchor, int32_t shape, int32_t nodes,
 int32_t depth, double floor, SlipGrown* grown) {
    static thread_local slip::SLIP_ISA::Grower grower;
    grower.begin(*block, calibration);
    nodes = std::min(nodes, kMostRows - 1);
    depth = std::min({depth, block->slots, kMostRows - 1});
    if (shape == kChain) grower.chain(*grown, anchor, std::min(nodes, depth));
    else grower.tree(*grown, anchor, nodes, depth, shape == kSeededTree, floor);
    return grower.state;
}
