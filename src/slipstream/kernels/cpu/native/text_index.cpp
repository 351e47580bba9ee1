// Finds what followed the earlier occurrences of a text's last tokens, as SuffixIndex of speculative/suffix_index.py
// does, which explains the method. The forward pass between two steps pushes Python's objects out of the processor's
// caches, so the same search takes several times as long there.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "growth.h"

namespace {

using slip::SLIP_ISA::add_node;
using slip::SLIP_ISA::begin_growth;
using slip::SLIP_ISA::calibrated;

constexpr int kMostOccurrences = 16;  // the size of arrays; an index may look at fewer

struct Occurrence {
    int32_t match, end;  // how many tokens match, and the position of the last of them
};

using Positions = std::vector<int32_t>;

// All grams of one length. A gram's name is the position where it occurred first; `older` says where the gram at a
// position occurred the last time before, or -1.
struct Grams {
    int span;
    Positions names, older;
    std::unordered_map<uint64_t, int32_t> newest;

    uint64_t key(const Positions& halves, int position) const {
        const uint64_t first = static_cast<uint32_t>(halves[position - span / 2]);
        return first << 32 | static_cast<uint32_t>(halves[position]);
    }

    void extend(const Positions& halves) {
        for (int position = static_cast<int>(names.size()); position < static_cast<int>(halves.size()); ++position) {
            if (position < span - 1) {
                names.push_back(-1);
                older.push_back(-1);
                continue;
            }
            const auto [place, is_new] = newest.try_emplace(key(halves, position), position);
            names.push_back(is_new ? position : names[place->second]);
            older.push_back(is_new ? -1 : place->second);
            place->second = position;
        }
    }

    void truncate(const Positions& halves, int length) {
        for (int position = static_cast<int>(older.size()) - 1; position >= std::max(length, span - 1); --position) {
            if (older[position] < 0) newest.erase(key(halves, position));
            else newest[key(halves, position)] = older[position];
        }
        names.resize(length);
        older.resize(length);
    }
};

// A continuation that waits to become a node: the occurrences that go on with its token, the best one first.
struct Waiting {
    double survival, claim;
    int32_t order, parent, token, count;
    Occurrence group[kMostOccurrences];
};

bool later(const Waiting& a, const Waiting& b) {
    return a.survival != b.survival ? a.survival < b.survival : a.order > b.order;
}

double claim_of(double share, int known) { return share * known / (known + 1); }

}  // namespace

struct SlipText {
    Positions text;
    std::vector<Grams> levels;
    int longest_match, most_occurrences;

    int longest() const {
        int bound = 0;
        for (const Grams& level : levels) {
            if (level.older.back() < 0) return bound;
            bound = 2 * level.span - 1;
        }
        return longest_match;
    }

    int match(int end, int last) const {
        const int start = end, least = std::max(end - longest_match, -1);
        for (auto level = levels.rbegin(); level != levels.rend(); ++level)
            while (end - level->span >= least && level->names[end] == level->names[last]) {
                end -= level->span;
                last -= level->span;
            }
        return start - end;
    }

    int occurrences(Occurrence* found) const {
        const int last = static_cast<int>(text.size()) - 1;
        int count = 0;
        if (last < 0) return 0;
        for (auto level = levels.rbegin(); level != levels.rend(); ++level)
            for (int end = level->older[last]; end >= 0 && count < most_occurrences; end = level->older[end]) {
                const auto known = [end](const Occurrence& one) { return one.end == end; };
                if (std::none_of(found, found + count, known)) found[count++] = {match(end, last), end};
            }
        std::sort(found, found + count, [](const Occurrence& a, const Occurrence& b) {
            return a.match != b.match ? a.match > b.match : a.end > b.end;
        });
        return count;
    }

    // The token that came `step` tokens after an occurrence; behind the text's end the text repeats itself.
    int32_t after(const Occurrence& one, int step) const {
        const int left = static_cast<int>(text.size()) - 1 - one.end;
        return text[one.end + 1 + step % left];
    }

    void grow(const SlipCalibration* calibration, int most_nodes, int depth, double floor, SlipGrown& grown) const {
        std::vector<Waiting> heap;
        Occurrence here[kMostOccurrences];
        int count = occurrences(here), row = 0, order = 0;
        while (grown.rows <= most_nodes) {
            const int step = grown.depths[row];
            if (step < depth) offer(calibration, grown, row, here, count, floor, order, heap);
            if (heap.empty()) break;
            std::pop_heap(heap.begin(), heap.end(), later);
            const Waiting best = heap.back();
            heap.pop_back();
            row = add_node(grown, best.parent, best.token, best.claim, best.survival);
            count = best.count;
            std::copy_n(best.group, count, here);
        }
    }

private:
    void offer(
        const SlipCalibration* calibration, const SlipGrown& grown, int row, const Occurrence* here, int count,
        double floor, int& order, std::vector<Waiting>& heap
    ) const {
        const int step = grown.depths[row];
        Waiting groups[kMostOccurrences];
        int weights[kMostOccurrences], total = 0, kinds = 0;
        for (int i = 0; i < count; ++i) {
            const int32_t token = after(here[i], step);
            int kind = 0;
            while (kind < kinds && groups[kind].token != token) ++kind;
            if (kind == kinds) {
                groups[kinds] = {0.0, 0.0, 0, row, token, 0, {}};
                weights[kinds++] = 0;
            }
            groups[kind].group[groups[kind].count++] = here[i];
            weights[kind] += here[i].match;
            total += here[i].match;
        }
        for (int kind = 0; kind < kinds; ++kind) {
            Waiting& one = groups[kind];
            one.claim = claim_of(static_cast<double>(weights[kind]) / total, one.group[0].match + step);
            one.survival = grown.survivals[row] * calibrated(calibration, one.claim, step + 1);
            if (one.survival < floor) continue;
            one.order = ++order;
            heap.push_back(one);
            std::push_heap(heap.begin(), heap.end(), later);
        }
    }
};

// An index of the grams of 1, 2, 4, ... tokens; `most_occurrences` must not exceed kMostOccurrences.
SLIP_VISIBLE SlipText* slip_text_new(int levels, int longest_match, int most_occurrences) {
    auto* made = new SlipText{{}, {}, longest_match, std::min(most_occurrences, kMostOccurrences)};
    for (int level = 0; level < levels; ++level) made->levels.push_back({1 << level, {}, {}, {}});
    return made;
}

SLIP_VISIBLE SlipText* slip_text_copy(const SlipText* index) { return new SlipText(*index); }

SLIP_VISIBLE void slip_text_free(SlipText* index) { delete index; }

SLIP_VISIBLE void slip_text_extend(SlipText* index, const int32_t* tokens, int count) {
    index->text.insert(index->text.end(), tokens, tokens + count);
    const Positions* halves = &index->text;
    for (Grams& level : index->levels) {
        level.extend(*halves);
        halves = &level.names;
    }
}

SLIP_VISIBLE void slip_text_truncate(SlipText* index, int length) {
    for (int place = static_cast<int>(index->levels.size()) - 1; place >= 0; --place)
        index->levels[place].truncate(place ? index->levels[place - 1].names : index->text, length);
    index->text.resize(length);
}

// Writes the matches and ends of the occurrences, alternately, and returns how many there are.
SLIP_VISIBLE int slip_text_occurrences(const SlipText* index, int32_t* found) {
    Occurrence here[kMostOccurrences];
    const int count = index->occurrences(here);
    for (int i = 0; i < count; ++i) {
        found[2 * i] = here[i].match;
        found[2 * i + 1] = here[i].end;
    }
    return count;
}

// Grows nothing, and saves the search, unless the likeliest next token is at least as likely as `first`.
SLIP_VISIBLE void slip_text_grow(
    const SlipText* index, const SlipCalibration* calibration, int most_nodes, int depth, double floor, double first,
    SlipGrown* grown
) {
    begin_growth(*grown, index->text.back());
    const double claim = claim_of(1.0, index->longest());
    if (claim == 0.0 || calibrated(calibration, claim, 1) < std::max(floor, first)) return;
    index->grow(calibration, std::min(most_nodes, kMostRows - 1), depth, floor, *grown);
}
