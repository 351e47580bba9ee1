// What a claimed probability is worth: the record that growth reads and that outcomes change.
#pragma once

#include <algorithm>

#include "native.h"

extern "C" {

// See Calibration of speculative/calibration.py; a record is that of one sequence on top of the engine's, or the latter.
struct SlipCalibration {
    int32_t claims, depths, trusts;
    const double* claim_edges;
    const double* depth_edges;
    double least, most, claim_weight, parent_weight;
    double* own;     // (hits, seen) of every place
    double* shared;  // those of the parent; null: there is none
    double* trust;   // by depth from 1, the last one for all below
    double* say;     // what the parent's trust leaves of its record, by depth
    double* own_state;  // how likely each of three drafters is, accepted tokens that fade, whether there ever were any
    double* shared_state;
    const double* own_prior;  // of the three drafters
    const double* shared_prior;
    double own_keep, shared_keep;  // what an outcome leaves of the counts before it
    const double* rules;           // in the order of SlipRule
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
