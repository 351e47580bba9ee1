// What a claimed probability is worth: the record that growth reads and that outcomes change.
#pragma once

#include <algorithm>

#include "native.h"

extern "C" {

// See Calibration of speculative/calibration.py. A record belongs to one sequence and refines the engine's, or is the
// engine's.
struct SlipCalibration {
    int32_t claims, depths, trusts;
    const double* claim_edges;
    const double* depth_edges;
    double least, most, claim_weight, parent_weight;
    double* own;     // (hits, seen) per place
    double* shared;  // the same of the engine's record; null if there is none
    double* trust;   // by depth from 1; the last entry is for all greater depths
    double* say;     // the factor that the engine's trust puts on its record, by depth
    // the probability of each of three kinds of drafter, faded accepted tokens, whether any was accepted
    double* own_state;
    double* shared_state;
    const double* own_prior;  // the prior probability of the three kinds
    const double* shared_prior;
    double own_keep, shared_keep;  // the factor by which an outcome fades the counts before it
    const double* rules;           // constants in the order of SlipRule
};

enum SlipRule : int32_t { kPoor, kHopeless, kChange, kUnproven, kSurest, kOwnJudgement };

}  // extern "C"

namespace slip {
namespace SLIP_ISA {

inline double recorded(const SlipCalibration& c, const double* bins, int place, double prior, double weight) {
    const double hits = bins[2 * place], seen = bins[2 * place + 1];
    const double chance = seen == 0.0 ? prior : (weight * prior + hits) / (weight + seen);
    return std::min(c.most, std::max(c.least, chance));
}

inline int edges_upto(const double* edges, int count, double value) {
    int below = 0;
    while (below < count && edges[below] <= value) ++below;
    return below;
}

inline int place_of(const SlipCalibration& c, double claimed, int depth) {
    return edges_upto(c.claim_edges, c.claims, claimed) * (c.depths + 1) + edges_upto(c.depth_edges, c.depths, depth);
}

inline double calibrated(const SlipCalibration* c, double claimed, int depth) {
    if (!c) return claimed;
    const int place = place_of(*c, claimed, depth);
    const int level = std::min(depth, c->trusts) - 1;
    double prior = claimed, weight = c->claim_weight;
    if (c->shared) {
        prior = recorded(*c, c->shared, place, claimed, c->claim_weight) * c->say[level];
        weight = c->parent_weight;
    }
    return std::min(c->most, std::max(c->least, c->trust[level] * recorded(*c, c->own, place, prior, weight)));
}

}  // namespace SLIP_ISA
}  // namespace slip
