// Where a product's sums go: into a tile of y's columns, plus the bias.
#pragma once

#include <algorithm>

#include "simd.h"

struct Output {
  float* y;           // first row, first column of the tile
  int64_t stride;     // between rows
  int columns;        // of the tile, 32 but for the last one
  const float* bias;  // of the tile, or null
};

// Rows of sums, kTile side by side, plus bias into y. (Adding a zero bias would turn -0 into +0,
// which no row can see, so there is no second path.)
inline void store_rows(int rows, const float* total, const Output& out) {
  for (int v = 0; v < simd::kVectors; v++) {
    const int n = std::min(simd::kLanes, out.columns - v * simd::kLanes);
    if (n <= 0) return;
    const simd::F bias = out.bias ? simd::load_part(out.bias + v * simd::kLanes, n) : simd::zero();
    for (int r = 0; r < rows; r++) {
      const simd::F sum = simd::add(simd::load(total + r * simd::kTile + v * simd::kLanes), bias);
      float* to = out.y + r * out.stride + v * simd::kLanes;
      if (n == simd::kLanes) simd::store(to, sum);
      else simd::store_part(to, sum, n);
    }
  }
}

// A matrix of a layer, and what it is multiplied with.
struct Product {
  int64_t rows, depth, outputs;
  const uint8_t* tiles;
  const float* bias;  // of its outputs, or null
  float* y;
  int64_t stride;  // of y

  int64_t tile_count() const { return (outputs + simd::kTile - 1) / simd::kTile; }
  Output output(int64_t tile, int64_t row) const {
    const int64_t column = tile * simd::kTile;
    return {y + row * stride + column, stride, (int)std::min<int64_t>(simd::kTile, outputs - column),
            bias ? bias + column : nullptr};
  }
};
