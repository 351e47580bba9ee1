// What a claimed probability is worth: the factors that growth reads.
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

}  // extern "C"

namespace slip {
namespace SLIP_ISA {

inline int edges_upto(const double* edges, int count, double value) {
    int below = 0;
    while (below < count && edges[below] <= value) ++below;
    return below;
}

inline double calibrated(const SlipCalibration* c, double claimed, int depth) {
    if (!c) return claimed;
    const int claim = edges_upto(c->claim_edges, c->claims, claimed);
    const int place = claim * (c->depths + 1) + edges_upto(c->depth_edges, c->depths, depth);
    return std::min(c->most, std::max(c->least, claimed * c->factors[place]));
}

}  // namespace SLIP_ISA
}  // namespace slip
