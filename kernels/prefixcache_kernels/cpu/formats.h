// The formats of packed weights: how a tile is laid out, packed from a file's rows, and expanded.
//
// Outputs lie in tiles of 32, each tile's k side by side, so that one load takes 32 outputs. A
// format expands row k of a tile into vectors of float32, exactly.
#pragma once

#include "simd.h"

namespace formats {

using simd::F;
using simd::kLanes;
using simd::kTile;
using simd::kVectors;

struct Float32 {
  static constexpr int kBlock = 1;
  static constexpr size_t kBytes = 4 * kTile;  // of kBlock rows
  struct Scale {};
  static Scale scale(const uint8_t*) { return {}; }
  static void weights(const uint8_t* block, int, const Scale&, F* w) {
    for (int v = 0; v < kVectors; v++) w[v] = simd::load((const float*)block + v * kLanes);
  }
};

struct BFloat16 {
  static constexpr int kBlock = 1;
  static constexpr size_t kBytes = 2 * kTile;
  struct Scale {};
  static Scale scale(const uint8_t*) { return {}; }
  static void weights(const uint8_t* block, int, const Scale&, F* w) {
    for (int v = 0; v < kVectors; v++) w[v] = simd::load_bf16((const uint16_t*)block + v * kLanes);
  }
};

struct Float16 {
  static constexpr int kBlock = 1;
  static constexpr size_t kBytes = 2 * kTile;
  struct Scale {};
  static Scale scale(const uint8_t*) { return {}; }
  static void weights(const uint8_t* block, int, const Scale&, F* w) {
    for (int v = 0; v < kVectors; v++) w[v] = simd::load_f16((const uint16_t*)block + v * kLanes);
  }
};

// d [32] halves, then 32 rows of 32 signed bytes: w = d q
struct Q8_0 {
  static constexpr int kBlock = 32;
  static constexpr size_t kBytes = 2 * kTile + 32 * kTile;
  struct Scale { F d[kVectors]; };
  static Scale scale(const uint8_t* block) {
    Scale s;
    for (int v = 0; v < kVectors; v++) s.d[v] = simd::load_f16((const uint16_t*)block + v * kLanes);
    return s;
  }
  static void weights(const uint8_t* block, int k, const Scale& s, F* w) {
    const int8_t* q = (const int8_t*)block + 2 * kTile + k * kTile;
    for (int v = 0; v < kVectors; v++) w[v] = simd::mul(s.d[v], simd::load_i8(q + v * kLanes));
  }
};

// d [32] halves, then 32 rows of 16 bytes: w = d (q - 8)
struct Q4_0 {
  static constexpr int kBlock = 32;
  static constexpr size_t kBytes = 2 * kTile + 16 * kTile;
  struct Scale { F d[kVectors], m[kVectors]; };
  static Scale scale(const uint8_t* block) {
    Scale s;
    for (int v = 0; v < kVectors; v++) {
      s.d[v] = simd::load_f16((const uint16_t*)block + v * kLanes);
      s.m[v] = simd::mul(s.d[v], simd::set1(-8.0f));
    }
    return s;
  }
  static void weights(const uint8_t* block, int k, const Scale& s, F* w) {
    simd::load_nibbles(block + 2 * kTile + k * 16, w);
    for (int v = 0; v < kVectors; v++) w[v] = simd::fma(s.d[v], w[v], s.m[v]);
  }
};

// d [32] and m [32] halves, then 32 rows of 16 bytes: w = d q + m
struct Q4_1 {
  static constexpr int kBlock = 32;
  static constexpr size_t kBytes = 4 * kTile + 16 * kTile;
  struct Scale { F d[kVectors], m[kVectors]; };
  static Scale scale(const uint8_t* block) {
    const uint16_t* halves = (const uint16_t*)block;
    Scale s;
    for (int v = 0; v < kVectors; v++) {
      s.d[v] = simd::load_f16(halves + v * kLanes);
      s.m[v] = simd::load_f16(halves + kTile + v * kLanes);
    }
    return s;
  }
  static void weights(const uint8_t* block, int k, const Scale& s, F* w) {
    simd::load_nibbles(block + 4 * kTile + k * 16, w);
    for (int v = 0; v < kVectors; v++) w[v] = simd::fma(s.d[v], w[v], s.m[v]);
  }
};

// One tile out of GGUF rows: `halves` scales of two bytes, then 16 or 32 bytes, a block of 32.
template <int kHalves, bool kNibbles>
void pack_blocks(const uint8_t* rows, int64_t row_bytes, int columns, int64_t depth, uint8_t* to) {
  constexpr int kData = kNibbles ? 16 : 32, kRaw = 2 * kHalves + kData;
  constexpr size_t kBytes = (2 * kHalves + kData) * kTile;
  for (int64_t block = 0; block < depth / 32; block++, to += kBytes) {
    std::memset(to, 0, kBytes);
    uint8_t* data = to + 2 * kHalves * kTile;
    for (int n = 0; n < columns; n++) {
      const uint8_t* raw = rows + n * row_bytes + block * kRaw;
      for (int h = 0; h < kHalves; h++) std::memcpy(to + 2 * (h * kTile + n), raw + 2 * h, 2);
      for (int k = 0; k < 32; k++) {
        if (kNibbles) {  // GGUF: element k is the low half of byte k, or the high half of k - 16
          const int q = k < 16 ? raw[2 * kHalves + k] & 15 : raw[2 * kHalves + k - 16] >> 4;
          data[k * 16 + n % 16] |= (uint8_t)(n < 16 ? q : q << 4);
        } else {
          data[k * kTile + n] = raw[2 * kHalves + k];
        }
      }
    }
  }
}

template <class T>
void pack_dense(const T* rows, int64_t depth, int columns, T* to) {
  for (int64_t k = 0; k < depth; k++)
    for (int n = 0; n < kTile; n++) to[k * kTile + n] = n < columns ? rows[n * depth + k] : T(0);
}

// In the order of library.py.
enum Kind { kF32, kBF16, kF16, kQ8_0, kQ4_0, kQ4_1, kQ8_0Int8, kQ4_0Int8, kQ4_1Int8 };

// Laid out for products of integers (int8.cpp).
inline bool is_int8(int64_t kind) { return kind >= kQ8_0Int8; }

inline int64_t tile_bytes(int kind, int64_t depth) {
  switch (kind) {
    case kF32: return depth * Float32::kBytes;
    case kBF16:
    case kF16: return depth * BFloat16::kBytes;
    case kQ8_0:
    case kQ8_0Int8: return depth / 32 * Q8_0::kBytes;
    case kQ4_0:
    case kQ4_0Int8: return depth / 32 * Q4_0::kBytes;
    default: return depth / 32 * Q4_1::kBytes;
  }
}

}  // namespace formats
