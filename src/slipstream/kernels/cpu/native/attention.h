// Attention of a batch's rows over paged keys and values. It is planned once per forward and run by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "native.h"
#include "team.h"

namespace slip {
namespace SLIP_ISA {

// Which keys each row sees and where they are, and the pieces into which a layer's attention is cut.
//
// Keys are addressed by position, in blocks that begin at multiples of kLanes. For positions before the group's
// `shared` every row finds the key in the same place; from there on each row of a tree has its own places.
class RowPlan {
public:
    struct Group {
        int first;      // position of the first place below, a multiple of kLanes
        int shared;     // the places are valid for positions before this one, a multiple of kLanes or INT32_MAX
        size_t places;  // index of the first place in `places`
    };
    struct Row {
        int low, high;  // the visible positions, both ends included; none if high < low
        int group;
        size_t own;     // index in `places` of the row's own places, which start at the group's `shared`
    };
    struct Piece {
        int start, stop;       // rows of the batch, all of one group
        int head, head_count;  // query heads that share a kv head
    };

    // Cuts the work for this number of heads and threads; the cut does not change a row's result.
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

    std::vector<int> positions_;  // the positions of the rows of the group that is being added
};

// Runs one phase of a team; all its workers call it.
//
// Rows of queries are query_stride floats apart, with their heads one after the other; rows of `out` likewise. `dim`
// is a multiple of kLanes. A row's result depends only on its query, its position and the keys it sees.
void attend(Team& team, const RowPlan& plan, const float* queries, int query_stride, const float* keys,
            const float* values, int heads, int kv_heads, int dim, float scale, float* out, int out_stride);

}  // namespace SLIP_ISA
}  // namespace slip
