// Products of rows quantised to int8 with weights of Q8_0, Q4_0 and Q4_1.
#pragma once

#include <cstdint>

#include "output.h"

namespace int8 {

constexpr int kGroup = 32;  // values of k with a scale of their own, as in the weights

struct Group {
  float scale;       // max |x| / 127
  float scaled_sum;  // scale * sum
  int32_t sum;       // of the group's integers
};

struct Rows {
  const int8_t* q;      // [rows, depth]
  const Group* groups;  // [rows, depth / kGroup]
};

// Floats of memory that so many quantised rows take.
int64_t scratch(int64_t rows, int64_t depth);

// By all threads of a team, as `multiply`: ends with a barrier, which that one does not.
Rows quantise(const float* x, int64_t rows, int64_t depth, float* memory);
void multiply(int64_t kind, const Product& product, const Rows& x);

// One tile out of GGUF rows.
void pack(int64_t kind, const uint8_t* rows, int64_t row_bytes, int columns, int64_t depth, uint8_t* to);

// out [count, depth] = rows `ids` of W.
void look_up(int64_t kind, const uint8_t* tiles, int64_t depth, const int64_t* ids, int64_t count, float* out);

}  // namespace int8
