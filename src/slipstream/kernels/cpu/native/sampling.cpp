// Rankings of logits: the best token and the K best, without noise (then with the row's logsumexp) and with Gumbel noise.
//
// Rows are cut into stretches that fit into the first cache. The team takes stretches in any order, and their findings
// are combined in the order of tokens, so an answer depends on its row only. Noise is drawn only where it can matter: a
// bound on a token's noise rules out nearly all tokens before a logarithm is computed.
#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "native.h"

namespace slip {
namespace SLIP_ISA {
namespace {

constexpr float kBinary = 1.44269504f;    // log2 e, which turns powers of e into powers of two

// A search for the K best of every row, and where the answers are written.
struct Search {
    const Rows& rows;
    int count;
    float* values;
    int64_t* ids;
    float* total;
    Finding* findings;
    Ranked* places;
    Bar* bars;

    Search(const Rows& rows, int count, float* values, int64_t* ids, float* total)
        : rows(rows), count(count), values(values), ids(ids), total(total),
          findings(memory.findings.get(rows.pieces())),
          places(memory.places.get(static_cast<size_t>(rows.pieces()) * 2 * count)),
          bars(memory.bars.get(rows.count)) {
        for (int row = 0; row < rows.count; ++row) bars[row].score.store(-FLT_MAX, std::memory_order_relaxed);
    }

    Ranked* places_of(int piece) const { return places + static_cast<size_t>(piece) * 2 * count; }

    // Combines a row's findings, largest first; returns how many there are.
    int merge(int row) const {
        Ranked* first = places_of(row * rows.stretches);
        Ranked* end = first;
        const float bar = bars[row].score.load(std::memory_order_relaxed);
        const auto matters = [bar](const Ranked& one) { return one.value >= bar; };
        for (int piece = row * rows.stretches; piece < (row + 1) * rows.stretches; ++piece)
            end = std::copy_if(places_of(piece), places_of(piece) + findings[piece].size, end, matters);
        if (end - first > count) std::nth_element(first, first + count - 1, end, ahead);
        const int size = std::min(count, static_cast<int>(end - first));
        std::sort(first, first + size, ahead);
        return size;
    }

    // Writes a row's best, divided by `divisor`; returns how many there are.
    int answer(int row, bool usable, float divisor) const {
        const Ranked* found = places_of(row * rows.stretches);
        const int size = usable ? merge(row) : 0;
        for (int i = 0; i < count; ++i) {
            const size_t at = static_cast<size_t>(row) * count + i;
            values[at] = i < size ? found[i].value / divisor : usable ? kHidden : NAN;
            ids[at] = i < size ? found[i].id : 0;
        }
        return size;
    }
};

inline Floats largest_of(const Floats score[kVectors]) {
    Floats most = score[0];
    SLIP_UNROLL for (int i = 1; i < kVectors; ++i) most = max(score[i], most);
    return most;
}

// Returns 2^x for x up to 0, exact to seven digits near 0; far below it returns 2^-115, which does not change a sum.
inline Floats power(Floats x) {
    const Floats bounded = max(x, set1(-115.0f));
    const Floats n = round_even(bounded);
    const Floats f = bounded - n;
    Floats p = set1(0.0013276472632f);  // fitted for the least relative error between -½ and ½
    p = fma(p, f, set1(0.0096755413431f));
    p = fma(p, f, set1(0.055507132719f));
    p = fma(p, f, set1(0.24022119724f));
    p = fma(p, f, set1(0.69314696707f));
    p = fma(p, f, set1(1.0000000717f));
    return bits_to_floats(bits_to_ints(p) + shift_left<23>(to_ints(n)));
}

// Finds the K best of one stretch, and the sum of e^((score - largest) / temperature).
void rank_stretch(const Search& search, int piece, float inverse) {
    const Rows& rows = search.rows;
    const int row_index = piece / rows.stretches, stretch = piece % rows.stretches;
    const float* row = rows.row(row_index);
    const int start = rows.start(stretch), stop = rows.stop(stretch);
    Floats maxima[kBlocks];
    const Look seen = rows.looks[piece] = look(row, start, stop, maxima);
    search.findings[piece] = {};
    if (!seen.usable()) return;
    Bar& bar = search.bars[row_index];
    const int blocks = (stop - start + kBlock - 1) / kBlock;
    bar.raise(reached_by(search.count, maxima, blocks, seen.largest, bar.score.load(std::memory_order_relaxed)));
    Leaders leaders(search.places_of(piece), search.count, &bar);
    Floats terms = set1(0.0f);
    for (int at = start; at < stop; at += kTile) {
        Floats score[kVectors];
        load_tile(row, at, stop, score);
        Floats tile = set1(0.0f);
        SLIP_UNROLL for (int i = 0; i < kVectors; ++i)
            tile = tile + power((score[i] - set1(seen.largest)) * set1(inverse * kBinary));
        terms = terms + tile;
        if (greater(set1(leaders.bar()), largest_of(score)) == 0xFFFF) continue;
        for (int i = 0; i < kVectors; ++i)
            for (uint32_t kept = ~greater(set1(leaders.bar()), score[i]) & 0xFFFF; kept; kept &= kept - 1) {
                const int id = at + i * kLanes + __builtin_ctz(kept);
                if (row[id] >= leaders.bar()) leaders.offer(row[id], id);
            }
    }
    search.findings[piece] = {leaders.finish(), sum(terms)};
}

void finish_ranking(const Search& search, int row, float temperature) {
    const Rows& rows = search.rows;
    const Look whole = rows.whole(row);
    double terms = 0.0;
    for (int piece = row * rows.stretches; whole.usable() && piece < (row + 1) * rows.stretches; ++piece) {
        const double below = (static_cast<double>(rows.looks[piece].largest) - whole.largest) / temperature;
        terms += search.findings[piece].sum * std::exp(below);
    }
    search.answer(row, whole.usable(), temperature);
    const double largest = static_cast<double>(whole.largest) / temperature;
    search.total[row] = whole.usable() ? static_cast<float>(largest + std::log(terms)) : NAN;
}

// What the noise depends on beside the token, and which tokens it may choose.
struct Noise {
    const int64_t* positions;
    uint64_t seed;
    float temperature;
    const float* floors;  // one per row, or null
    float inverse;
    int* order;   // the rows, sorted by position
    int* groups;  // index of each position's first row in that order, and the index after the last
    int group_count = 0;

    Noise(const int64_t* positions, int rows, uint64_t seed, float temperature, const float* floors)
        : positions(positions), seed(seed), temperature(temperature), floors(floors), inverse(1.0f / temperature),
          order(memory.order.get(2 * static_cast<size_t>(rows) + 1)), groups(order + rows) {
        for (int row = 0; row < rows; ++row) order[row] = row;
        std::sort(order, order + rows, [positions](int a, int b) { return positions[a] < positions[b]; });
        for (int i = 0; i < rows; ++i)
            if (i == 0 || positions[order[i]] != positions[order[i - 1]]) groups[group_count++] = i;
        groups[group_count] = rows;
    }

    // Scores that a low temperature takes out of the range of fp32 cannot be compared any more.
    bool usable(const Look& whole) const { return whole.usable() && std::isfinite(whole.largest / temperature); }
};

// One row in the stretch that is being searched.
struct NoisyRow {
    const float* scores;
    Finding* finding;
    Leaders leaders;
    float slack;  // an upper bound of the rounding error of score * inverse + bound
    float floor;

    // Returns what score * inverse + noise must reach for the token to matter.
    float reach() const { return leaders.bar() - slack; }
};

// The search among scores with noise.
struct NoisySearch {
    const Search& search;
    const Noise& noise;

    // Prepares a row for one stretch; returns false if the row has no token to choose.
    bool begin(NoisyRow& it, const NoiseSource& source, int row, int stretch) const {
        const Rows& rows = search.rows;
        const Look whole = rows.whole(row);
        const int piece = row * rows.stretches + stretch;
        search.findings[piece] = {};
        if (!noise.usable(whole)) return false;
        it.scores = rows.row(row);
        it.finding = search.findings + piece;
        it.slack = 0x1p-20f * (2.0f * std::fabs(whole.largest / noise.temperature) + 64.0f);
        it.floor = noise.floors ? noise.floors[row] : kHidden;
        if (search.count == 1) search.bars[row].raise(score_of(source, it.scores, whole.where));
        it.leaders = Leaders(search.places_of(piece), search.count, search.bars + row);
        return true;
    }

    float score_of(const NoiseSource& source, const float* row, int token) const {
        Ints words[kVectors];
        source.draw(token / kTile * kTile, words);
        float lanes[kLanes];
        store(lanes, gumbel(exponential(words[token % kTile / kLanes])));
        return row[token] / noise.temperature + lanes[token % kLanes];
    }

    // Whether none of these tokens can matter, whatever its noise is.
    bool hopeless(const NoisyRow& it, Floats score) const {
        const float least = std::max(it.reach() - kMostNoise, it.floor - it.slack);
        return greater(set1(least), score * set1(noise.inverse)) == 0xFFFF;
    }

    void meet(NoisyRow& it, const Floats score[kVectors], const Ints words[kVectors], int first) const {
        Floats most[kVectors];
        SLIP_UNROLL for (int i = 0; i < kVectors; ++i)
            most[i] = fma(score[i], set1(noise.inverse), noise_bound(words[i]));
        const Floats best = largest_of(most);
        if (greater(set1(it.reach()), best) == 0xFFFF) return;
        for (int i = 0; i < kVectors; ++i) {
            const uint32_t kept = ~greater(set1(it.reach()), most[i]) & 0xFFFF;
            if (kept) offer(it, score[i], words[i], first + i * kLanes, kept);
        }
    }

    void offer(NoisyRow& it, Floats score, Ints words, int first, uint32_t kept) const {
        Floats scaled = score / set1(noise.temperature);
        if (noise.floors) scaled = choose(scaled, set1(it.floor), set1(kHidden), scaled);
        float lanes[kLanes];
        store(lanes, scaled + gumbel(exponential(words)));
        for (; kept; kept &= kept - 1) {
            const int lane = __builtin_ctz(kept);
            if (lanes[lane] >= it.leaders.bar()) it.leaders.offer(lanes[lane], first + lane);
        }
    }

    // Searches one stretch for all rows of one position, which share the words of the noise.
    void run(int group, int stretch) const {
        const int first = noise.groups[group], size = noise.groups[group + 1] - first;
        thread_local Kept<NoisyRow> kept;
        NoisyRow* live = kept.get(size);
        NoisyRow* end = live;
        const NoiseSource source(noise.seed, noise.positions[noise.order[first]]);
        for (int i = 0; i < size; ++i) end += begin(*end, source, noise.order[first + i], stretch);
        const int stop = search.rows.stop(stretch);
        for (int at = search.rows.start(stretch); end > live && at < stop; at += kTile) {
            Ints words[kVectors];
            bool drawn = false;
            for (NoisyRow* it = live; it < end; ++it) {
                Floats score[kVectors];
                load_tile(it->scores, at, stop, score);
                if (hopeless(*it, largest_of(score))) continue;
                if (!drawn) source.draw(at, words);
                drawn = true;
                meet(*it, score, words, at);
            }
        }
        for (NoisyRow* it = live; it < end; ++it) *it->finding = {it->leaders.finish(), 0.0f};
    }

    void run_all() const {
        look_at_all(search.rows);
        const int stretches = search.rows.stretches;
        Team::shared().share(noise.group_count * stretches,
                             [this, stretches](int piece) { run(piece / stretches, piece % stretches); });
    }
};

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip

using namespace slip;
using namespace slip::SLIP_ISA;

SLIP_EXPORT(void, slip_best_tokens)
(const float* logits, int count, int vocab, int threads, int64_t* ids, uint8_t* usable) {
    const Rows rows(logits, count, vocab);
    Team::shared().run(rows.threads(threads), [&rows] { look_at_all(rows); }, /*brief=*/true);
    for (int row = 0; row < count; ++row) {
        const Look whole = rows.whole(row);
        usable[row] = whole.usable();
        ids[row] = whole.usable() ? whole.where : -1;
    }
}

SLIP_EXPORT(void, slip_top_scores)
(const float* scores, int count, int vocab, int threads, float temperature, int wanted, float* values, int64_t* ids,
 float* total) {
    const Rows rows(scores, count, vocab);
    const Search search(rows, wanted, values, ids, total);
    const auto body = [&search, temperature] {
        Team& team = Team::shared();
        team.share(search.rows.pieces(), [&](int piece) { rank_stretch(search, piece, 1.0f / temperature); });
        team.share(search.rows.count, [&](int row) { finish_ranking(search, row, temperature); });
    };
    Team::shared().run(rows.threads(threads), body, /*brief=*/true);
}

SLIP_EXPORT(void, slip_noisy_best)
(const float* logits, int count, int vocab, int threads, const int64_t* positions, uint64_t seed, float temperature,
 const float* floors, int64_t* ids, uint8_t* usable) {
    const Rows rows(logits, count, vocab);
    const Search search(rows, 1, nullptr, nullptr, nullptr);
    const Noise noise(positions, count, seed, temperature, floors);
    const NoisySearch noisy{search, noise};
    Team::shared().run(rows.threads(threads), [&noisy] { noisy.run_all(); }, /*brief=*/true);
    for (int row = 0; row < count; ++row) {
        usable[row] = noise.usable(rows.whole(row));
        ids[row] = usable[row] && search.merge(row) ? search.places_of(row * rows.stretches)->id : -1;
    }
}

SLIP_EXPORT(void, slip_noisy_top)
(const float* logits, int count, int vocab, int threads, const int64_t* positions, uint64_t seed, float temperature,
 const float* floors, int wanted, float* values, int64_t* ids, float* total) {
    const Rows rows(logits, count, vocab);
    const Search search(rows, wanted, values, ids, total);
    const Noise noise(positions, count, seed, temperature, floors);
    const NoisySearch noisy{search, noise};
    Team::shared().run(rows.threads(threads), [&noisy] { noisy.run_all(); }, /*brief=*/true);
    for (int row = 0; row < count; ++row) {
        const int size = search.answer(row, noise.usable(rows.whole(row)), 1.0f);
        const float* best = values + static_cast<size_t>(row) * wanted;
        double terms = 0.0;
        for (int i = 0; i < size; ++i) terms += std::exp(static_cast<double>(best[i]) - best[0]);
        total[row] = size ? static_cast<float>(best[0] + std::log(terms)) : NAN;
    }
}

SLIP_EXPORT(void, slip_gumbel_row)(uint64_t seed, int64_t position, int vocab, float* out) {
    const NoiseSource source(seed, position);
    for (int at = 0; at < vocab; at += kTile) {
        Ints words[kVectors];
        float lanes[kTile];
        source.draw(at, words);
        for (int i = 0; i < kVectors; ++i) store(lanes + i * kLanes, gumbel(exponential(words[i])));
        std::copy(lanes, lanes + std::min(kTile, vocab - at), out + at);
    }
}
