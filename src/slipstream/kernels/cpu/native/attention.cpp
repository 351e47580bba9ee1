// Row attention in two passes: the scores of every visible key, then the weighted sum of values, key after key.
//
// A row's bits do not depend on other rows, because every sum has a fixed order: a score adds up dim lane by lane and
// then the lanes in one fixed tree; a weight is added to lane `position % kLanes` of the total; values are added in the
// order of positions. Hidden keys are skipped and never multiplied, so that the contents of their slots have no effect.
#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>

#include "scores.h"
#include "simd.h"

namespace slip {
namespace SLIP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileQueries = 6;  // queries and vectors in one tile of weighted sums, as many as fit into the registers
constexpr int kTileVectors = 4;
#else
constexpr int kTileQueries = 3;
constexpr int kTileVectors = 2;
#endif
constexpr int kBlockRows = 16;  // the most rows of a piece
constexpr int64_t kBlockScores = 1 << 17;  // the most scores of a piece; more would leave no room for keys in the cache
constexpr double kReading = 1.5;  // the cost of reading a piece's keys, in units of one query's work
constexpr int kAhead = 2 * kLanes;  // positions between the keys that are prefetched and those in use
constexpr int kNoBorder = std::numeric_limits<int>::max();
const float kHidden = -std::numeric_limits<float>::infinity();

int block_of(int position) { return position / kLanes * kLanes; }

// The range of positions that at least one of the rows sees.
struct Sight {
    int low = kNoBorder, high = -1;
    bool empty() const { return high < low; }
};

Sight sight_of(const RowPlan& plan, int start, int stop) {
    Sight sight;
    for (int row = start; row < stop; ++row) {
        const RowPlan::Row& own = plan.rows[row];
        if (own.low > own.high) continue;
        sight.low = std::min(sight.low, own.low);
        sight.high = std::max(sight.high, own.high);
    }
    return sight;
}

// Returns how many of the query heads that share keys stay in one piece: all, unless there are fewer `units` than
// threads. Reading the keys costs as much as kReading queries, and the thread with the most pieces determines the time.
int heads_of_piece(int units, int share, int threads) {
    int best = share;
    double least = std::numeric_limits<double>::infinity();
    for (int heads = share; heads > 0 && units < threads; --heads) {
        if (share % heads) continue;
        const int turns = (units * (share / heads) + threads - 1) / threads;
        if (turns * (kReading + heads) >= least) continue;
        least = turns * (kReading + heads), best = heads;
    }
    return best;
}

// The memory of one thread, which grows and is never freed before the thread ends; growing loses its contents.
class Buffer {
public:
    ~Buffer() { std::free(data_); }
    float* of(size_t floats) {
        if (floats > size_) {
            std::free(data_);
            size_ = 0;
            const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
            data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = bytes / sizeof(float);
        }
        return data_;
    }

private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

struct Scratch {
    Buffer scores, queries;
};

Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

// Turns the scores of positions first + low .. first + high into weights, and hidden neighbours in the same blocks into
// zeros; returns the sum of the weights.
float soften(float* scores, int low, int high) {
    const int first = block_of(low), last = block_of(high);
    for (int at = first; at < low; ++at) scores[at] = kHidden;
    for (int at = high + 1; at < last + kLanes; ++at) scores[at] = kHidden;
    Floats most = load(scores + first);
    for (int at = first + kLanes; at <= last; at += kLanes) most = max(most, load(scores + at));
    const Floats peak = set1(largest(most));
    Floats total = set1(0.0f);
    for (int at = first; at <= last; at += kLanes) {
        // exp does not handle infinities, and its result is zero long before -200; max returns its second operand for
        // NaN
        const Floats weight = exp(max(set1(-200.0f), load(scores + at) - peak));
        store(scores + at, weight);
        total = total + weight;
    }
    return sum(total);
}

// Adds weighted values to sums in memory, in the order of the keys.
template <int Queries, int Vectors>
void add_values(const Pool& pool, const int64_t* places, int count, const float* weights, int64_t stride, int column,
                float* const* sums) {
    Floats total[Queries][Vectors];
    for (int n = 0; n < Queries; ++n)
        for (int v = 0; v < Vectors; ++v) total[n][v] = load(sums[n] + column + v * kLanes);
    for (int at = 0; at < count; ++at) {
        const float* value = pool.value(places[at]) + column;
        Floats part[Vectors];
        for (int v = 0; v < Vectors; ++v) part[v] = load(value + v * kLanes);
        for (int n = 0; n < Queries; ++n) {
            const Floats weight = set1(weights[n * stride + at]);
            for (int v = 0; v < Vectors; ++v) total[n][v] = fma(weight, part[v], total[n][v]);
        }
    }
    for (int n = 0; n < Queries; ++n)
        for (int v = 0; v < Vectors; ++v) store(sums[n] + column + v * kLanes, total[n][v]);
}

template <int Queries>
void add_columns(const Pool& pool, const int64_t* places, int count, const float* weights, int64_t stride,
                 float* const* sums) {
    int column = 0;
    for (; column + kTileVectors * kLanes <= pool.dim; column += kTileVectors * kLanes)
        add_values<Queries, kTileVectors>(pool, places, count, weights, stride, column, sums);
    for (; column < pool.dim; column += kLanes)
        add_values<Queries, 1>(pool, places, count, weights, stride, column, sums);
}

// Adds the values of `count` places for up to kTileQueries queries, whose weights are `stride` floats apart.
void add_weighted(const Pool& pool, const int64_t* places, int count, const float* weights, int64_t stride, int queries,
                  float* const* sums) {
    if (count <= 0) return;
    switch (queries) {
        case 1: return add_columns<1>(pool, places, count, weights, stride, sums);
        case 2: return add_columns<2>(pool, places, count, weights, stride, sums);
        case 3: return add_columns<3>(pool, places, count, weights, stride, sums);
#if defined(__AVX512F__)
        case 4: return add_columns<4>(pool, places, count, weights, stride, sums);
        case 5: return add_columns<5>(pool, places, count, weights, stride, sums);
        case 6: return add_columns<6>(pool, places, count, weights, stride, sums);
#endif
    }
}

// The attention of one piece: some rows of a group with query heads of one kv head.
class PieceWork {
public:
    PieceWork(const RowPlan& plan, const RowPlan::Piece& piece, const Pool& pool, const float* queries,
              int query_stride, float scale, float* out, int out_stride)
        : plan_(plan), piece_(piece), pool_(pool), group_(plan.groups[plan.rows[piece.start].group]), out_(out),
          out_stride_(out_stride), count_((piece.stop - piece.start) * piece.head_count) {
        const Sight sight = sight_of(plan, piece.start, piece.stop);
        first_ = block_of(sight.low);
        end_ = sight.empty() ? first_ : block_of(sight.high) + kLanes;
        // an odd number of cache lines, so that the scores of all queries do not compete for one set of the first cache
        stride_ = ((end_ - first_) / kLanes | 1) * kLanes;
        Scratch& mine = scratch();
        scores_ = mine.scores.of(static_cast<size_t>(count_) * stride_);
        scaled_ = mine.queries.of(static_cast<size_t>(count_) * pool.dim);
        scale_queries(queries, query_stride, scale);
    }

    void run() {
        score_shared();
        for (int row = piece_.start; row < piece_.stop; ++row) score_own(row);
        const int heads = piece_.head_count;
        const int tiles = (heads + kTileQueries - 1) / kTileQueries, together = (heads + tiles - 1) / tiles;
        const int rows = std::max(1, kTileQueries / heads);
        for (int row = piece_.start; row < piece_.stop; row += rows)
            for (int head = 0; head < heads; head += together)
                add_tile(row, std::min(rows, piece_.stop - row), head, std::min(together, heads - head));
    }

private:
    void scale_queries(const float* queries, int query_stride, float scale) {
        float* to = scaled_;
        for (int row = piece_.start; row < piece_.stop; ++row) {
            const float* from = queries + static_cast<int64_t>(row) * query_stride + piece_.head * pool_.dim;
            for (int at = 0; at < piece_.head_count * pool_.dim; at += kLanes, to += kLanes)
                store(to, load(from + at) * set1(scale));
        }
    }

    int index(int row, int head) const { return (row - piece_.start) * piece_.head_count + head; }
    float* scores(int row, int head) const { return scores_ + index(row, head) * stride_; }
    const int64_t* shared_places(int position) const { return &plan_.places[group_.places + position - group_.first]; }
    const int64_t* own_places(int row, int position) const {
        return &plan_.places[plan_.rows[row].own + position - group_.shared];
    }

    // Keys and values are prefetched: a block of them may fill a page of memory, and the processor's own prefetching
    // ends at a page's border. Values can be prefetched early, because all keys are scored before the first value is
    // added.
    void score_shared() {
        const int end = std::min(end_, group_.shared);
        for (int at = first_; at < end; at += kLanes) {
            const int64_t* places = shared_places(at);
            for (int i = 0; i < kLanes; ++i) {
                if (at + kAhead < end) pool_.prefetch(pool_.key(places[kAhead + i]));
                pool_.prefetch(pool_.value(places[i]));
            }
            score(pool_, places, scaled_, count_, scores_ + (at - first_), stride_);
        }
    }

    // Scores the keys that a row of a tree finds through its ancestors.
    void score_own(int row) {
        for (int at = std::max(first_, group_.shared); at <= plan_.rows[row].high; at += kLanes)
            score(pool_, own_places(row, at), scaled_ + index(row, 0) * pool_.dim, piece_.head_count,
                  scores(row, 0) + (at - first_), stride_);
    }

    // Adds the values at positions low .. high, both included, for some heads of a row.
    void add_span(int row, int low, int high, int head, int heads, float* const* sums) {
        const int border = std::min(high + 1, std::max(low, group_.shared));
        const float* weights = scores(row, head);
        if (low < border)
            add_weighted(pool_, shared_places(low), border - low, weights + (low - first_), stride_, heads, sums);
        if (border <= high)
            add_weighted(pool_, own_places(row, border), high + 1 - border, weights + (border - first_), stride_, heads,
                         sums);
    }

    // Computes weights and sums of a few rows, whose common stretch of keys is read once for all of them. A tile of
    // several rows contains all heads of the piece, so that the scores are evenly spaced.
    void add_tile(int row, int rows, int head, int heads) {
        float* sums[kTileQueries];
        float totals[kTileQueries];
        int low = 0, high = group_.shared - 1;
        for (int i = 0; i < rows; ++i) {
            const RowPlan::Row& own = plan_.rows[row + i];
            for (int h = 0; h < heads; ++h) {
                float* own_scores = scores(row + i, head + h);
                float* to = out_ + static_cast<int64_t>(row + i) * out_stride_ + (piece_.head + head + h) * pool_.dim;
                for (int at = 0; at < pool_.dim; at += kLanes) store(to + at, set1(0.0f));
                sums[i * heads + h] = to;
                const bool sees = own.low <= own.high;
                totals[i * heads + h] = sees ? soften(own_scores, own.low - first_, own.high - first_) : 0.0f;
            }
            low = std::max(low, own.low);
            high = std::min(high, own.high);
        }
        const bool meet = low <= high;
        for (int i = 0; i < rows; ++i) {
            const RowPlan::Row& own = plan_.rows[row + i];
            add_span(row + i, own.low, meet ? low - 1 : own.high, head, heads, sums + i * heads);
        }
        if (meet) {
            add_weighted(pool_, shared_places(low), high + 1 - low, scores(row, head) + (low - first_), stride_,
                         rows * heads, sums);
            for (int i = 0; i < rows; ++i)
                add_span(row + i, high + 1, plan_.rows[row + i].high, head, heads, sums + i * heads);
        }
        for (int n = 0; n < rows * heads; ++n)
            for (int at = 0; at < pool_.dim; at += kLanes)
                // without any key this is 0 / 0, as in torch
                store(sums[n] + at, load(sums[n] + at) / set1(totals[n]));
    }

    const RowPlan& plan_;
    const RowPlan::Piece& piece_;
    const Pool& pool_;
    const RowPlan::Group& group_;
    float* out_;
    int out_stride_;
    int count_;  // number of queries: rows times heads
    int first_, end_;  // the range of positions whose scores are stored
    int64_t stride_;
    float *scores_, *scaled_;
};

}  // namespace


// Where the slots of one sequence are in memory.
struct RowPlan::Slots {
    const int32_t* page_ids;
    int page_tokens;
    int64_t page_places;

    int64_t place(int slot) const { return page_ids[slot / page_tokens] * page_places + slot % page_tokens; }

    // Appends the places of slots from .. end - 1; a slot outside low .. high is hidden and repeats a visible one's
    // place.
    void append(std::vector<int64_t>& places, int from, int end, int low, int high) const {
        if (from >= end) return;
        const size_t before = places.size();
        places.resize(before + (end - from));
        int64_t* to = &places[before];
        for (int slot = from; slot < end;) {
            const int seen = std::clamp(slot, low, high);
            int64_t next = place(seen);
            const int left = seen == slot ? std::min(page_tokens - slot % page_tokens, high + 1 - slot) : 1;
            for (const int stop = std::min(end, slot + left); slot < stop; ++slot) *to++ = next++;
        }
    }
};

void RowPlan::build(const SlipBatch& batch, int heads, int kv_heads, int threads) {
    page_tokens = batch.page_tokens;
    groups.clear();
    rows.clear();
    pieces.clear();
    places.clear();
    for (int index = 0; index < batch.groups; ++index) add_group(batch, batch.group[index], kv_heads);
    cut(batch, heads, kv_heads, std::max(threads, 1));
}

void RowPlan::add_group(const SlipBatch& batch, const SlipGroup& group, int kv_heads) {
    const int count = group.stop - group.start, last = group.base + count - 1;
    const bool tree = group.parents >= 0;
    rows.resize(group.stop);
    for (int i = 0; i < count; ++i) {
        Row& row = rows[group.start + i];
        const int parent = tree ? batch.parents[group.parents + i] : i - 1;
        const int position = parent < 0 ? group.base : positions_[parent] + 1;
        positions_.resize(std::max<size_t>(positions_.size(), i + 1));
        positions_[i] = position;
        row.group = static_cast<int>(groups.size());
        row.own = 0;
        row.low = std::max(group.earliest, 0);
        row.high = group.causal ? position : last;
        if (group.window > 0) {
            row.low = std::max(row.low, position - group.window + 1);
            row.high = std::min<int64_t>(row.high, int64_t{position} + group.window - 1);
        }
    }
    const Sight sight = sight_of(*this, group.start, group.stop);
    const int shared = tree ? block_of(group.base) : kNoBorder;
    groups.push_back({sight.empty() ? 0 : block_of(sight.low), shared, places.size()});
    if (sight.empty()) return;
    const Slots slots{batch.page_ids + group.pages, batch.page_tokens, int64_t{kv_heads} * batch.page_tokens};
    const int end = std::min(shared, block_of(sight.high) + kLanes);
    if (sight.low < end) slots.append(places, groups.back().first, end, sight.low, sight.high);
    if (tree)
        for (int i = 0; i < count; ++i) add_way(batch, group, i, slots);
}

// Appends the places of a tree's row from the group's `shared` on: committed keys, then the row's ancestors, then
// itself.
void RowPlan::add_way(const SlipBatch& batch, const SlipGroup& group, int index, const Slots& slots) {
    Row& row = rows[group.start + index];
    row.own = places.size();
    if (row.low > row.high) return;
    const int shared = groups[row.group].shared;
    const size_t end = places.size() + (block_of(row.high) + kLanes - shared);
    slots.append(places, shared, group.base, row.low, row.high);
    // hidden and missing positions repeat a place that is safe to read
    places.resize(end, slots.place(group.base + index));
    for (int node = index; node >= 0; node = batch.parents[group.parents + node])
        if (positions_[node] >= row.low) places[row.own + positions_[node] - shared] = slots.place(group.base + node);
}

// Cuts the work into pieces. A thread's share is a contiguous stretch of rows, one kv head after the other, so that
// keys are read by one thread, or by two where a share ends among their rows.
void RowPlan::cut(const SlipBatch& batch, int heads, int kv_heads, int threads) {
    const int share = heads / kv_heads;
    int longest = kLanes, count = 0;
    for (const Row& row : rows) longest = std::max(longest, row.high - row.low + 1);
    for (int i = 0; i < batch.groups; ++i) count += batch.group[i].stop - batch.group[i].start;
    const int together = heads_of_piece(count * kv_heads, share, threads);
    const int64_t most = std::clamp<int64_t>(kBlockScores / (int64_t{longest} * together), 1, kBlockRows);
    const int64_t total = int64_t{count} * (heads / together);
    int64_t done = 0;
    for (int i = 0; i < batch.groups; ++i)
        for (int head = 0; head < heads; head += together)
            // later rows see more keys, so their longer pieces come first and the short ones even out the end
            for (int stop = batch.group[i].stop; stop > batch.group[i].start;) {
                const int64_t end = ((done * threads / total + 1) * total + threads - 1) / threads;
                const int own = std::min({most, end - done, int64_t{stop - batch.group[i].start}});
                pieces.push_back({stop - own, stop, head, together});
                stop -= own;
                done += own;
            }
}

void attend(Team& team, const RowPlan& plan, const float* queries, int query_stride, const float* keys,
            const float* values, int heads, int kv_heads, int dim, float scale, float* out, int out_stride) {
    const int share = heads / kv_heads, pieces = static_cast<int>(plan.pieces.size());
    team.share(pieces, [&](int next) {
        const RowPlan::Piece& piece = plan.pieces[next];
        const Pool pool{keys, values, int64_t{piece.head / share} * plan.page_tokens, dim};
        PieceWork(plan, piece, pool, queries, query_stride, scale, out, out_stride).run();
    });
}

}  // namespace SLIP_ISA
}  // namespace slip

SLIP_EXPORT(void, slip_attention)
(const SlipBatch* batch, const float* queries, int query_stride, const float* keys, const float* values, int heads,
 int kv_heads, int dim, float scale, float* out, int threads) {
    using namespace slip::SLIP_ISA;
    thread_local RowPlan mine;
    RowPlan& plan = mine;  // a reference, because `mine` would name another object in each thread of the team
    plan.build(*batch, heads, kv_heads, threads);
    slip::Team& team = slip::Team::shared();
    team.run(threads, [&] {
        attend(team, plan, queries, query_stride, keys, values, heads, kv_heads, dim, scale, out, heads * dim);
    });
}
