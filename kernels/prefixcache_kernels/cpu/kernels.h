// The operations of a decoder layer, as each source file gives them to `layers.cpp`.
//
// Those of namespace `team` are called by all threads of a parallel region alike, share the work
// between them, and end with a barrier.
#pragma once

#include <cstdint>

struct Matrix {
  int64_t kind;  // of formats.h
  int64_t outputs;
  const uint8_t* tiles;
};

// Matrices with the same input, outputs side by side.
struct Linear {
  int64_t depth, outputs;
  const float* bias;  // [outputs], or null
  int64_t count;
  const Matrix* matrices;
};

struct CacheShape {
  int64_t heads, kv_heads, dim, block_size;
  int64_t k_block, k_head, k_dim;   // strides of the K cache, in floats; slots are adjacent
  int64_t v_block, v_head, v_slot;  // of the V cache; dims are adjacent
};

// An item is a run of pairs of one K/V head: pair p is row p / group, head p % group. With a span,
// rows are listed (rows[first + i]) and partials are written; without (-1), rows follow each other
// from `first`, and all their spans are merged here.
struct AttentionItem {
  int32_t span, table_row, first, pair, pairs;
};

struct AttentionWork {
  int64_t window;  // tokens that a row sees; 0: all
  const AttentionItem* items;
  int64_t item_count;
  const int32_t* rows;          // of the groups
  const int32_t* positions;     // [T]
  const int32_t* first_span;    // [T]
  const int32_t* partial_base;  // [T], where a grouped row's partials begin, or -1
  int64_t tokens;
  const int32_t* block_table;
  int64_t table_width;
  float* partials;  // [slots, heads, padded dim + 2]
};

struct Rope {
  const int32_t* positions;  // [T]; negative: position 0
  const int64_t* slots;      // [T]; negative: written nowhere
  const float* table;        // [positions, dim]: cosines, then sines
};

struct HeadNorms {
  const float *q, *k;  // [dim] each, or null
  float eps;
};

namespace team {

// y [rows, outputs] = x [rows, depth] W^T + bias; scratch: of linear_scratch.
void linear(const Linear& layer, const float* x, int64_t rows, float* y, float* scratch);

// residual += x (if there is a residual), then out = RMSNorm of the sum (or of x).
void rms_norm(const float* x, float* residual, const float* weight, float eps, float* out, int64_t rows,
              int64_t width);

// out [rows, width] = gate / (1 + e^-gate) * up, of [gate | up] rows.
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width);

// In each row of qkv: normalise Q and K heads (if there are weights), rotate them in place, and
// write K and V to the row's slot.
void rope_write_kv(float* qkv, int64_t rows, const Rope& rope, const CacheShape& shape, const HeadNorms& norms,
                   float* k_cache, float* v_cache);

// out [T, heads * dim] = attention of q (rows q_row floats apart). Rows that see nothing give 0.
void attention(const CacheShape& shape, const AttentionWork& work, const float* q, int64_t q_row,
               const float* k_cache, const float* v_cache, float* out);

}  // namespace team

// Floats of scratch that a product of so many rows needs.
int64_t linear_scratch(const Linear& layer, int64_t rows);
