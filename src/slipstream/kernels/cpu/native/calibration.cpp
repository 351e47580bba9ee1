// Records outcomes of drafts in a calibration: the same as Calibration.observe of speculative/calibration.py, in
// batches.
#include "calibration.h"

#include <cmath>

namespace slip {
namespace SLIP_ISA {
namespace {

constexpr int kHits = 3, kProven = 4;  // indices into a state

double trust(const double* state, const double* rules, int level) {
    const double poor = state[1] * std::pow(rules[kPoor], level);
    const double hopeless = state[2] * std::pow(rules[kHopeless], level);
    return (state[0] + poor * rules[kPoor] + hopeless * rules[kHopeless]) / (state[0] + poor + hopeless);
}

// Returns how much the engine's trust counts for a sequence; it counts less the more of its own drafts were accepted.
double parent_say(const SlipCalibration& c) { return 1.0 / (1.0 + c.own_state[kHits] / c.rules[kOwnJudgement]); }

double inherited_trust(const SlipCalibration& c, int level) {
    return c.shared ? std::pow(trust(c.shared_state, c.rules, level), parent_say(c)) : 1.0;
}

void judge(const SlipCalibration& c, double* state, const double* prior, double keep, double expected, bool hit) {
    const double* rules = c.rules;
    expected = std::min(expected, rules[kSurest]);
    if (hit) state[kProven] = 1.0;
    else if (state[kProven] == 0.0) expected = std::max(expected, rules[kUnproven]);
    const double shares[3] = {1.0, rules[kPoor], rules[kHopeless]};
    double total = 0.0;
    for (int i = 0; i < 3; ++i) {
        const double right = i ? std::max(c.least, expected * shares[i]) : expected;
        state[i] = (state[i] + rules[kChange] * (prior[i] - state[i])) * (hit ? right : 1.0 - right);
        total += state[i];
    }
    for (int i = 0; i < 3; ++i) state[i] /= total;
    state[kHits] = state[kHits] * keep + hit;
}

void count(double* bins, int place, double keep, bool hit) {
    bins[2 * place] = bins[2 * place] * keep + hit;
    bins[2 * place + 1] = bins[2 * place + 1] * keep + 1.0;
}

void observe(const SlipCalibration& c, double claimed, int depth, bool hit, bool leading) {
    const int place = place_of(c, claimed, depth);
    double prior = claimed, weight = c.claim_weight;
    if (c.shared) {
        const double engine = recorded(c, c.shared, place, claimed, c.claim_weight);
        prior = engine * inherited_trust(c, std::min(depth, c.trusts) - 1);
        weight = c.parent_weight;
        if (leading || hit) judge(c, c.shared_state, c.shared_prior, c.shared_keep, engine, hit);
        count(c.shared, place, c.shared_keep, hit);
    }
    if (leading || hit) {
        const double expected = recorded(c, c.own, place, prior, weight);
        judge(c, c.own_state, c.own_prior, c.own_keep, expected, hit);
    }
    count(c.own, place, c.own_keep, hit);
}

struct Standing {
    double own, shared;

    explicit Standing(const SlipCalibration& c)
        : own(trust(c.own_state, c.rules, 0) * inherited_trust(c, 0)),
          shared(c.shared ? trust(c.shared_state, c.rules, 0) : own) {}
};

}  // namespace
}  // namespace SLIP_ISA
}  // namespace slip

using namespace slip::SLIP_ISA;

// Computes trust and say for each level.
SLIP_EXPORT(void, slip_refresh_trust)(const SlipCalibration* c) {
    for (int level = 0; level < c->trusts; ++level) {
        c->trust[level] = trust(c->own_state, c->rules, level);
        c->say[level] = inherited_trust(*c, level);
    }
}

// `outcomes` are (claim, depth, hit, leading); `changes` are the ratios of trust after to before, own and engine's.
SLIP_EXPORT(void, slip_observe)(const SlipCalibration* c, const double* outcomes, int32_t number, double* changes) {
    const Standing before(*c);
    for (const double* each = outcomes; each < outcomes + 4 * number; each += 4)
        observe(*c, each[0], static_cast<int>(each[1]), each[2] != 0.0, each[3] != 0.0);
    const Standing after(*c);
    changes[0] = after.own / before.own;
    changes[1] = after.shared / before.shared;
}
