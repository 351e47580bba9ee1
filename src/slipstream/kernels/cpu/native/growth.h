// What growth reads and returns: the factors that say what a claimed probability is worth, and the grown nodes.
#pragma once

#include <algorithm>

#include "native.h"

extern "C" {

// See Estimate of speculative/estimate.py.
struct SlipCalibration {
    int32_t claims, depths;
    const double* claim_edges;
    const double* depth_edges;
    double least, most;
    const double* factors;  // [claims + 1, depths + 1]
};

constexpr int32_t kMostRows = 256;
constexpr int32_t kChain = 0, kSeededTree = 2;  // CHAIN and SEEDED_TREE of kernels/rows.py; 1 is a tree

// Nodes in the order in which they were added, the anchor first.
struct SlipGrown {
    int32_t rows;
    int32_t tokens[kMostRows], parents[kMostRows], depths[kMostRows];
    double claims[kMostRows], survivals[kMostRows];
};

}  // extern "C"

namespace slip {
namespace SLIP_ISA {

inline int edges_upto(const double* edges, int count, double value) {
    int below = 0;
    while (below < count && edges[below] <= value) ++below;
    return below;
}

inline void begin_growth(SlipGrown& grown, int32_t anchor) {
    grown.rows = 1;
    grown.tokens[0] = anchor;
    grown.parents[0] = -1;
    grown.depths[0] = 0;
    grown.claims[0] = grown.survivals[0] = 1.0;
}

inline int add_node(SlipGrown& grown, int parent, int32_t token, double claim, double survival) {
    const int row = grown.rows++;
    grown.tokens[row] = token;
    grown.parents[row] = parent;
    grown.depths[row] = grown.depths[parent] + 1;
    grown.claims[row] = claim;
    grown.survivals[row] = survival;
    return row;
}

inline double calibrated(const SlipCalibration* c, double claimed, int depth) {
    if (!c) return claimed;
    const int claim = edges_upto(c->claim_edges, c->claims, claimed);
    const int place = claim * (c->depths + 1) + edges_upto(c->depth_edges, c->depths, depth);
    return std::min(c->most, std::max(c->least, claimed * c->factors[place]));
}

}  // namespace SLIP_ISA
}  // namespace slip
