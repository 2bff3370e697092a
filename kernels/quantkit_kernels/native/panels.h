// A weight in panels of 16 of its rows, and the rows of activations that are multiplied with a panel in tiles.
#pragma once
#include <type_traits>

#include "vectors.h"

constexpr int WIDTH = 16;                  // rows of the weight in a panel
constexpr int TILE_ROWS = 6;               // most rows of activations whose sums registers hold
constexpr int64_t ROWS_BYTES = 192 << 10;  // activations that a core goes through again for each panel stay in its cache

static inline int64_t panels_of(int64_t width) { return (width + WIDTH - 1) / WIDTH; }
static inline int64_t columns_of(int64_t panel, int64_t width) {
    return width - panel * WIDTH < WIDTH ? width - panel * WIDTH : WIDTH;
}
static inline int64_t rows_at_once(int64_t bytes_of_row) {
    int64_t rows = ROWS_BYTES / bytes_of_row / TILE_ROWS * TILE_ROWS;
    return rows < TILE_ROWS ? TILE_ROWS : rows;
}

// tile(n, r) for rows r to r + n - 1, for all rows; n is a constant up to MOST.
template <int MOST, class Tile> static inline void in_tiles(int64_t rows, Tile tile) {
    static_assert(MOST >= 4 && MOST <= TILE_ROWS);
    int64_t r = 0;
    for (; r + MOST <= rows; r += MOST) tile(std::integral_constant<int, MOST>{}, r);
    switch (rows - r) {
        case 5: if constexpr (MOST > 5) tile(std::integral_constant<int, 5>{}, r); break;
        case 4: if constexpr (MOST > 4) tile(std::integral_constant<int, 4>{}, r); break;
        case 3: tile(std::integral_constant<int, 3>{}, r); break;
        case 2: tile(std::integral_constant<int, 2>{}, r); break;
        case 1: tile(std::integral_constant<int, 1>{}, r); break;
    }
}
