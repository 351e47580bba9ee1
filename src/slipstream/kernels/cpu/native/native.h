// The structs that the kernels share. Python fills them, so they are plain C.
#pragma once

#include <cstdint>

// Python chooses the instruction set by a function's suffix: SLIP_EXPORT(void, slip_norm) defines slip_norm_avx2 and
// others.
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
    int32_t window;          // keys further away than this are hidden; 0 hides none
    int32_t causal;          // if 0, every row sees the group's positions up to the last
    int32_t pages;           // index of the sequence's first page id in the batch's list
    int32_t parents;         // index of the rows' first parent in the batch's list, or -1 for a chain
};

// Everything that one forward knows about its rows.
struct SlipBatch {
    int32_t rows;
    int32_t groups;
    int32_t page_tokens;
    const SlipGroup* group;
    const int32_t* page_ids;
    const int32_t* parents;    // row within the group, or -1 for the root
    const int32_t* positions;  // one per row
    const int32_t* pages;      // the page id and offset at which each row's keys and values are stored
    const int32_t* offsets;
};

}  // extern "C"
