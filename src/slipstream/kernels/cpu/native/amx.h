// Int8 tiles (AMX): the same integer sums, sixteen rows at a time. The pointers are set only after a probe has
// succeeded.
#pragma once

#include "matrix.h"

namespace slip {

struct RowsIn;

constexpr int kAmxRows = 9;  // with fewer rows the tiles' way through memory costs more than it saves

// Multiplies all 16 rows of a group with one tile: out[row * 16 + column]. A thread calls enter before it and leave
// after it.
using AmxTile = void (*)(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, float* out);
extern AmxTile amx_tile;
extern void (*amx_enter)();
extern void (*amx_leave)();
extern int64_t (*amx_products)(int rounds);  // returns how many products this many rounds of tile instructions compute

namespace amx {
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, float* out);
void enter();
void leave();
int64_t products(int rounds);
}  // namespace amx
}  // namespace slip
