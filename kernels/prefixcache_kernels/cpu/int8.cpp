// y = x Wᵀ + b with the rows of x quantised to int8 in groups of 32, weights in their own format.
//
// In each group s = max |x| / 127 and q = round(x / s), so x is about s q; a weight is d w (+ m), as in
// its file. The products of q and w are whole numbers, added exactly, and groups follow in order:
//
//     y += (d s) Σ q w          and for Q4_1   y += m (s Σ q)
//
// each one fused multiply-add. So the bits of a row depend on that row alone, and are the same on
// every processor. Bytes of w are unsigned, as the instruction wants them: w + 128 in Q8_0, w + 8 in
// Q4_0; sums begin at -128 Σ q and -8 Σ q, which takes that back.
//
// A tile's block of 32 values of k by 32 outputs: scales as in formats.h, then four values of k of
// one output side by side. Nibbles hold k and k + 16.

#include "int8.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "formats.h"
#include "simd.h"

using simd::F;
using simd::I;
using simd::kLanes;
using simd::kTile;
using simd::kVectors;

namespace {

using int8::Group;
using int8::kGroup;

constexpr int kFour = 4;                         // values of k in a lane
constexpr int kSteps = kGroup / kFour;           // of a block
constexpr int kStepBytes = kFour * kTile;        // of one step of all outputs
constexpr int kPanel = kLanes == 16 ? 6 : 2;     // rows whose sums stay in registers
constexpr int kChunk = 40 * kPanel;              // rows that stay in cache while tiles go by

template <int kHalves, bool kNibbles, int kZero>
struct Packed {
  static constexpr bool kMinimum = kHalves == 2;
  static constexpr int kOffset = kZero;
  static constexpr int kScaleBytes = 2 * kHalves * kTile;
  static constexpr int kBytes = kScaleBytes + kGroup * kTile / (kNibbles ? 2 : 1);

  static F scale(const uint8_t* block, int v) { return simd::load_f16((const uint16_t*)block + v * kLanes); }
  static F minimum(const uint8_t* block, int v) {
    return simd::load_f16((const uint16_t*)block + kTile + v * kLanes);
  }
  static I weights(const uint8_t* block, int step, int v) {
    const uint8_t* data = block + kScaleBytes + v * kLanes * kFour;
    if (!kNibbles) return simd::load_bytes(data + step * kStepBytes);
    const I both = simd::load_bytes(data + step % (kSteps / 2) * kStepBytes);
    return step < kSteps / 2 ? simd::low_nibbles(both) : simd::high_nibbles(both);
  }
  // Of output n, for packing and looking up.
  static int get(const uint8_t* block, int k, int n) {
    const uint8_t* byte = block + kScaleBytes + k % (kNibbles ? 16 : 32) / kFour * kStepBytes + n * kFour + k % kFour;
    if (!kNibbles) return *byte;
    return k < 16 ? *byte & 15 : *byte >> 4;
  }
  static void pack(const uint8_t* raw, int n, uint8_t* block) {
    for (int h = 0; h < kHalves; h++) std::memcpy(block + 2 * (h * kTile + n), raw + 2 * h, 2);
    raw += 2 * kHalves;  // GGUF: byte k holds k, or k and k + 16
    for (int k = 0; k < (kNibbles ? 16 : 32); k++)
      block[kScaleBytes + k / kFour * kStepBytes + n * kFour + k % kFour] = kNibbles ? raw[k] : raw[k] ^ 128;
  }
};

using Q8_0 = Packed<1, false, 128>;
using Q4_0 = Packed<1, true, 8>;
using Q4_1 = Packed<2, true, 0>;

// A block as many panels want it: scales in float32, a byte a weight.
template <class Format>
struct Expanded {
  static constexpr bool kMinimum = Format::kMinimum;
  static constexpr int kOffset = Format::kOffset;
  static constexpr int kScaleBytes = 2 * sizeof(float) * kTile;
  static constexpr int kBytes = kScaleBytes + kGroup * kTile;

  static F scale(const uint8_t* block, int v) { return simd::load((const float*)block + v * kLanes); }
  static F minimum(const uint8_t* block, int v) { return simd::load((const float*)block + kTile + v * kLanes); }
  static I weights(const uint8_t* block, int step, int v) {
    return simd::load_bytes(block + kScaleBytes + step * kStepBytes + v * kLanes * kFour);
  }
  static void expand(const uint8_t* from, uint8_t* to) {
    for (int v = 0; v < kVectors; v++) {
      simd::store((float*)to + v * kLanes, Format::scale(from, v));
      if (kMinimum) simd::store((float*)to + kTile + v * kLanes, Format::minimum(from, v));
      for (int step = 0; step < kSteps; step++)
        simd::store_i((int32_t*)(to + kScaleBytes + step * kStepBytes) + v * kLanes, Format::weights(from, step, v));
    }
  }
};

// totals [R, kTile] = R rows of x, `depth` apart, times a tile.
template <class Format, int R>
void multiply_tile(const int8_t* q, const Group* groups, int64_t depth, const uint8_t* tile, float* totals) {
  const int64_t count = depth / kGroup;
  F sum[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) sum[r][v] = simd::zero();
  for (int64_t g = 0; g < count; g++, tile += Format::kBytes, q += kGroup) {
    I dot[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) dot[r][v] = simd::set1_i(-Format::kOffset * groups[r * count + g].sum);
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; step++) {
      I w[kVectors];
      for (int v = 0; v < kVectors; v++) w[v] = Format::weights(tile, step, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t four;
        std::memcpy(&four, q + r * depth + step * kFour, sizeof four);
        const I x = simd::set1_i(four);
        for (int v = 0; v < kVectors; v++) dot[r][v] = simd::dot4(dot[r][v], w[v], x);
      }
    }
    F d[kVectors], m[kVectors];
    for (int v = 0; v < kVectors; v++) {
      d[v] = Format::scale(tile, v);
      if (Format::kMinimum) m[v] = Format::minimum(tile, v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Group& group = groups[r * count + g];
      const F s = simd::set1(group.scale), t = simd::set1(group.scaled_sum);
      for (int v = 0; v < kVectors; v++) {
        sum[r][v] = simd::fma(simd::mul(d[v], s), simd::to_float(dot[r][v]), sum[r][v]);
        if (Format::kMinimum) sum[r][v] = simd::fma(m[v], t, sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) simd::store(totals + r * kTile + v * kLanes, sum[r][v]);
}

template <class Format, int R = kPanel>
void multiply_rows(int rows, const int8_t* q, const Group* groups, int64_t depth, const uint8_t* tile, float* totals) {
  if (rows == R) return multiply_tile<Format, R>(q, groups, depth, tile, totals);
  if constexpr (R > 1) multiply_rows<Format, R - 1>(rows, q, groups, depth, tile, totals);
}

// Rows [begin, end) by one tile, in panels of nearly equal size.
template <class Format>
void sweep(const Product& p, const int8::Rows& x, int64_t begin, int64_t end, const uint8_t* weights, int64_t tile) {
  const int64_t panels = (end - begin + kPanel - 1) / kPanel;
  for (int64_t panel = 0; panel < panels; panel++) {
    const int64_t first = begin + (end - begin) * panel / panels;
    const int rows = (int)(begin + (end - begin) * (panel + 1) / panels - first);
    float totals[kPanel * kTile];
    multiply_rows<Format>(rows, x.q + first * p.depth, x.groups + first * (p.depth / kGroup), p.depth, weights, totals);
    store_rows(rows, totals, p.output(tile, first));
  }
}

template <class Format>
void run(const Product& p, const int8::Rows& x) {
  const int64_t blocks = p.depth / kGroup;
  const int64_t chunks = std::max<int64_t>(1, (p.rows + kChunk - 1) / kChunk);
  const bool few = p.rows <= kPanel;
  struct alignas(64) Block {
    uint8_t bytes[Expanded<Format>::kBytes];
  };
  std::vector<Block> expanded(few ? 0 : blocks);
#pragma omp for schedule(static) nowait
  for (int64_t unit = 0; unit < chunks * p.tile_count(); unit++) {
    const int64_t tile = unit % p.tile_count(), chunk = unit / p.tile_count();
    const int64_t begin = p.rows * chunk / chunks, end = p.rows * (chunk + 1) / chunks;
    const uint8_t* weights = p.tiles + tile * blocks * Format::kBytes;
    if (few) {
      sweep<Format>(p, x, begin, end, weights, tile);
      continue;
    }
    for (int64_t b = 0; b < blocks; b++)
      Expanded<Format>::expand(weights + b * Format::kBytes, expanded[b].bytes);
    sweep<Expanded<Format>>(p, x, begin, end, expanded[0].bytes, tile);
  }
}

// q and the scale of one group. A NaN makes the scale NaN, as bits of |x| it is the greatest.
Group quantise_group(const float* x, int8_t* q) {
  I most = simd::set1_i(0);
  for (int i = 0; i < kGroup; i += kLanes) most = simd::max_i(most, simd::bits(simd::absolute(simd::load(x + i))));
  const int32_t greatest = simd::lane_max_i(most);
  float maximum;
  std::memcpy(&maximum, &greatest, sizeof maximum);
  const float scale = maximum / 127.0f;
  const F divisor = simd::set1(scale > 0.0f ? scale : 1.0f), low = simd::set1(-127.0f), high = simd::set1(127.0f);
  F total = simd::zero();  // of whole numbers, so exact in any order
  for (int i = 0; i < kGroup; i += kLanes) {
    const F whole = simd::round(simd::max(simd::min(simd::div(simd::load(x + i), divisor), high), low));
    simd::store_i8(q + i, whole);
    total = simd::add(total, whole);
  }
  const float sum = simd::lane_sum(total);
  return {scale, scale * sum, (int32_t)sum};
}

template <class Format>
void pack_tile(const uint8_t* rows, int64_t row_bytes, int columns, int64_t depth, uint8_t* to) {
  const int64_t raw = row_bytes / (depth / kGroup);
  for (int64_t b = 0; b < depth / kGroup; b++, to += Format::kBytes) {
    std::memset(to, 0, Format::kBytes);
    for (int n = 0; n < columns; n++) Format::pack(rows + n * row_bytes + b * raw, n, to);
  }
}

template <class Format>
void look_up_row(const uint8_t* tile, int n, int64_t depth, float* out) {
  for (int64_t b = 0; b < depth / kGroup; b++, tile += Format::kBytes) {
    float d[kTile], m[kTile] = {};
    for (int v = 0; v < kVectors; v++) {
      simd::store(d + v * kLanes, Format::scale(tile, v));
      if (Format::kMinimum) simd::store(m + v * kLanes, Format::minimum(tile, v));
    }
    for (int k = 0; k < kGroup; k++)
      *out++ = __builtin_fmaf(d[n], (float)(Format::get(tile, k, n) - Format::kOffset), m[n]);
  }
}

template <class Format>
void look_up_rows(const uint8_t* tiles, int64_t depth, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++)
    look_up_row<Format>(tiles + ids[i] / kTile * (depth / kGroup) * Format::kBytes, (int)(ids[i] % kTile), depth,
                        out + i * depth);
}

}  // namespace

namespace int8 {

int64_t scratch(int64_t rows, int64_t depth) {
  return (rows * depth + rows * (depth / kGroup) * (int64_t)sizeof(Group)) / (int64_t)sizeof(float) + 1;
}

Rows quantise(const float* x, int64_t rows, int64_t depth, float* memory) {
  const int64_t count = depth / kGroup;
  Group* groups = (Group*)memory;
  int8_t* q = (int8_t*)(groups + rows * count);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < rows * count; i++) groups[i] = quantise_group(x + i * kGroup, q + i * kGroup);
  return {q, groups};
}

void multiply(int64_t kind, const Product& product, const Rows& x) {
  switch (kind) {
    case formats::kQ8_0Int8: return run<Q8_0>(product, x);
    case formats::kQ4_0Int8: return run<Q4_0>(product, x);
    default: return run<Q4_1>(product, x);
  }
}

void pack(int64_t kind, const uint8_t* rows, int64_t row_bytes, int columns, int64_t depth, uint8_t* to) {
  switch (kind) {
    case formats::kQ8_0Int8: return pack_tile<Q8_0>(rows, row_bytes, columns, depth, to);
    case formats::kQ4_0Int8: return pack_tile<Q4_0>(rows, row_bytes, columns, depth, to);
    default: return pack_tile<Q4_1>(rows, row_bytes, columns, depth, to);
  }
}

void look_up(int64_t kind, const uint8_t* tiles, int64_t depth, const int64_t* ids, int64_t count, float* out) {
  switch (kind) {
    case formats::kQ8_0Int8: return look_up_rows<Q8_0>(tiles, depth, ids, count, out);
    case formats::kQ4_0Int8: return look_up_rows<Q4_0>(tiles, depth, ids, count, out);
    default: return look_up_rows<Q4_1>(tiles, depth, ids, count, out);
  }
}

}  // namespace int8
