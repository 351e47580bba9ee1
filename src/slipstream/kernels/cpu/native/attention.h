// Attention of a batch's rows over paged keys and values, planned once per forward and run by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "native.h"
#include "team.h"

namespace slip {
namespace SLIP_ISA {

// Which keys each row sees and where they lie, and the pieces of work that a layer's attention is cut into.
//
// Keys are addressed by position, in blocks that begin at multiples of kLanes. Up to its group's `shared` every row
// finds the key of a position in the same place; from there on a row of a tree goes its own way.
class RowPlan {
public:
    struct Group {
        int first;      // position of the first place below: a multiple of kLanes
        int shared;     // the places hold for positions before this one: a multiple of kLanes, or INT32_MAX
        size_t places;  // where they begin in `places`
    };
    struct Row {
        int low, high;  // visible positions, both ends included; none if high < low
        int group;
        size_t own;     // where the places of the positions from the group's `shared` on begin in `places`
    };
    struct Piece {
        int start, stop;       // rows of the batch, all of one group
        int head, head_count;  // query heads that share a kv head
    };

    // Cuts the work for heads and threads as they are; neither changes a row's result.
    void build(const SlipBatch& batch, int heads, int kv_heads, int threads);

    int page_tokens = 0;
    std::vector<Group> groups;
    std::vector<Row> rows;
    std::vector<Piece> pieces;
    // in units of one key: page id * kv heads * page tokens + offset, so that a head adds head * page tokens
    std::vector<int64_t> places;

private:
    struct Slots;
    void add_group(const SlipBatch& batch, const SlipGroup& group, int kv_heads);
    void add_way(const SlipBatch& batch, const SlipGroup& group, int index, const Slots& slots);
    void cut(const SlipBatch& batch, int heads, int kv_heads, int threads);

    std::vector<int> positions_;  // of the rows of the group at hand
};

// One phase of a team, to be called by all its workers.
//
// Rows of queries lie query_stride floats apart, heads one behind the other in a row; so do rows of `out`. `dim` is
// a multiple of kLanes. A row's result depends on its query, its position and the keys it sees, and on nothing else.
void attend(Team& team, const RowPlan& plan, const float* queries, int query_stride, const float* keys,
            const float* values, int heads, int kv_heads, int dim, float scale, float* out, int out_stride);

}  // namespace SLIP_ISA
}  // namespace slip
