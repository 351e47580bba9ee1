// The nouns that the kernels share. Everything here crosses the border to Python, so it is plain C.
#pragma once

#include <cstdint>

// Python picks the instruction set by a function's suffix: SLIP_EXPORT(void, slip_norm) defines slip_norm_avx2, ...
#define SLIP_JOIN2(a, b) a##_##b
#define SLIP_JOIN(a, b) SLIP_JOIN2(a, b)
#define SLIP_VISIBLE extern "C" __attribute__((visibility("default")))
#define SLIP_EXPORT(type, name) SLIP_VISIBLE type SLIP_JOIN(name, SLIP_ISA)

extern "C" {

// The rows of one sequence in a batch, as RowGroup of rows.py describes them.
struct SlipGroup {
    int32_t start, stop;     // rows of the batch
    int32_t base;            // position of the first row; row i of the group is stored in slot base + i
    int32_t earliest;        // keys at positions before this one are hidden
    int32_t window;          // 0: all; otherwise keys further away than this are hidden
    int32_t causal;          // 0: every row sees up to the group's last position
    int32_t pages;           // where the sequence's page ids begin in the batch's list of page ids
    int32_t parents;         // where the rows' parents begin in the batch's list, -1 for a chain
};

// All that one forward knows about its rows.
struct SlipBatch {
    int32_t rows;
    int32_t groups;
    int32_t page_tokens;
    const SlipGroup* group;
    const int32_t* page_ids;
    const int32_t* parents;    // within the group; -1 for the root
    const int32_t* positions;  // of each row
    const int32_t* pages;      // page id and offset where each row's keys and values are stored
    const int32_t* offsets;
};

}  // extern "C"
