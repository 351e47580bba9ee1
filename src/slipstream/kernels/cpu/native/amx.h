// Int8 tiles (AMX): the same integer sums sixteen rows at a time. Set only where a probe has seen them work.
#pragma once

#include "matrix.h"

namespace slip {

struct RowsIn;

constexpr int kAmxRows = 9;  // with fewer rows the tiles' detour through memory costs more than it saves

// All 16 rows of a group with one tile: out[row * 16 + column]. Threads call enter before and leave behind it.
using AmxTile = void (*)(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, float* out);
extern AmxTile amx_tile;
extern void (*amx_enter)();
extern void (*amx_leave)();
extern int64_t (*amx_products)(int rounds);  // the products that so many rounds of tile instructions make

namespace amx {
void multiply_tile(const SlipMatrix& matrix, int tile, const RowsIn& in, int group, float* out);
void enter();
void leave();
int64_t products(int rounds);
}  // namespace amx
}  // namespace slip
