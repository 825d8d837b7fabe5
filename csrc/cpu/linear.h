// Products with packed weights: y[m, n] = sum over k of a[m, k] * w[n, k], tile by tile.
#pragma once

#include <array>
#include <utility>

#include "tiles.h"

namespace anyrig {

// Rows of a tile of `blocks`: as many as the registers hold (32 of AVX512; the integer kinds need two sums for each).
constexpr int tile_rows(bool integer, int blocks) {
  const int room = PARTS == 1 ? (integer ? 12 : 24) : (integer ? 4 : 6);
  return std::clamp(room / blocks, 1, MOST_ROWS);
}

template <int MR, int NB>
__attribute__((noinline)) void tile(const Linear& w, const Unpacked* unpacked, const Rows& a, int m, int block,
                                    const uint8_t* ahead, float* out) {
  if constexpr (MR <= tile_rows(true, NB)) {
    if (w.kind == Kind::int8) return tile_int8<MR, NB>(w, a, m, block, ahead, out);
    if (unpacked) return tile_unpacked<MR, NB>(*unpacked, a, m, ahead, out);
    if constexpr (MR < UNPACK_FROM)
      if (w.kind == Kind::int4) return tile_int4<MR, NB>(w, a, m, block, out);
  }
  if constexpr (MR <= tile_rows(false, NB)) tile_float<MR, NB>(w, a, m, block, ahead, out);
}

using Tile = void (*)(const Linear&, const Unpacked*, const Rows&, int, int, const uint8_t*, float*);

template <int NB, int... MR>
constexpr auto tiles_of(std::integer_sequence<int, MR...>) {
  return std::array<Tile, sizeof...(MR)>{&tile<MR + 1, NB>...};
}

constexpr std::array<std::array<Tile, MOST_ROWS>, MOST_BLOCKS> TILES = {
    tiles_of<1>(std::make_integer_sequence<int, MOST_ROWS>{}), tiles_of<2>(std::make_integer_sequence<int, MOST_ROWS>{}),
    tiles_of<3>(std::make_integer_sequence<int, MOST_ROWS>{}), tiles_of<4>(std::make_integer_sequence<int, MOST_ROWS>{})};

// y = a w for the blocks first .. last, handed to done(m, rows, block, blocks, tile) tile by tile, where tile is
// float32 [rows][blocks * 16].
//
// `even`: tiles of an even number of blocks only (gate beside up). `next`: what the thread reads after the last block.
template <class Done>
void product(const Linear& w, const Rows& a, int m, int first, int last, bool even, const uint8_t* next,
             Unpacked& scratch, Done&& done) {
  alignas(64) float out[MOST_ROWS * MOST_BLOCKS * LANES];
  const bool unpack = w.kind == Kind::int4 && m >= UNPACK_FROM;
  // int4 blocks have their scales in registers too: narrower tiles of more rows.
  const int wide = unpack ? 2 : even || m == 1 ? 4 : 3;
  const size_t size = w.block_bytes();
  for (int block = first; block < last;) {
    const int blocks = std::min(wide, last - block);
    if (unpack) scratch.fill(w, block, blocks);
    const int most = tile_rows(w.kind == Kind::int8 || w.kind == Kind::int4, blocks);
    // Each tile of rows fetches one of the blocks that come next; further tiles find them there.
    const uint8_t* after = block + blocks < last ? w.block(block + blocks) : next ? next : w.block(block);
    for (int row = 0, turn = 0; row < m; ++turn) {
      const int rows = std::min(most, m - row);
      const uint8_t* ahead = turn < wide ? after + size * turn : w.block(block);
      TILES[blocks - 1][rows - 1](w, unpack ? &scratch : nullptr, a, row, block, ahead, out);
      done(row, rows, block, blocks, out);
      row += rows;
    }
    block += blocks;
  }
}

}  // namespace anyrig
