// Moves keys and values of rows between places of the page pools, for all layers in one call.
#include <cstring>
#include <vector>

#include "native.h"

// Pools are [pages, heads, page_tokens, dim]; `places` holds, per row, the page and offset of its source and
// destination. All rows of a pool are read before any is written, because one row's destination may be another row's
// source.
SLIP_VISIBLE void slip_move_rows(
    float* const* pools, int count, int heads, int page_tokens, int dim, const int32_t* places, int rows
) {
    const size_t head = static_cast<size_t>(page_tokens) * dim, page = heads * head;
    std::vector<float> held(static_cast<size_t>(rows) * heads * dim);
    const auto each = [&](float* pool, int side, auto&& take) {
        float* kept = held.data();
        for (int row = 0; row < rows; ++row) {
            const int32_t* place = places + 4 * row + 2 * side;
            float* at = pool + place[0] * page + static_cast<size_t>(place[1]) * dim;
            for (int i = 0; i < heads; ++i, at += head, kept += dim) take(kept, at);
        }
    };
    const size_t bytes = dim * sizeof(float);
    for (int i = 0; i < count; ++i) {
        each(pools[i], 0, [bytes](float* kept, float* at) { std::memcpy(kept, at, bytes); });
        each(pools[i], 1, [bytes](float* kept, float* at) { std::memcpy(at, kept, bytes); });
    }
}
