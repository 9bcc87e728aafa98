// y = x Wᵀ + b in float32 on weights kept in their own format.
//
// Every output is a chain of fused multiply-adds over each segment of kSegment values of k, and the
// sum of the segments in order, whatever the number of rows, the tile or the thread: a row's bits
// depend on nothing else. (One chain over all of k would lose three times as much to rounding.) A
// weight is expanded to float32 exactly: d and m have 11 bits, q at most 8.
//
// Up to kFewRows rows, weights are expanded in registers; above, a segment of a tile is expanded once
// into a buffer that stays in the first-level cache while panels of rows sweep over it.

#include <omp.h>

#include <algorithm>

#include "formats.h"
#include "int8.h"
#include "kernels.h"
#include "output.h"
#include "simd.h"

using namespace formats;
using simd::F;
using simd::kLanes;
using simd::kTile;
using simd::kVectors;

namespace {

constexpr int64_t kSegment = 128;  // a multiple of every block
constexpr int kFewRows = 5;
constexpr int kPanel = kLanes == 16 ? 12 : 3;  // rows whose sums stay in registers
constexpr int kChunk = 10 * kPanel;            // rows that stay in cache while tiles go by

// --- products ------------------------------------------------------------------------------------

struct Work : Product {
  const float* x;
  const float* packed;  // x in panels, where there are many rows
};

template <int R>
inline void clear(F (&sum)[R][kVectors]) {
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) sum[r][v] = simd::zero();
}

// Add to R rows of totals one segment: `depth` rows of a tile times x, whose element (r, k) is at
// x[r * row + k * step].
template <class Format, int R>
void multiply(const float* x, int64_t row, int64_t step, int64_t depth, const uint8_t* tile,
              float* total) {
  F sum[R][kVectors];
  clear<R>(sum);
  for (int64_t k = 0; k < depth; k += Format::kBlock, tile += Format::kBytes) {
    const auto scale = Format::scale(tile);
    for (int i = 0; i < Format::kBlock; i++, x += step) {
      F w[kVectors];
      Format::weights(tile, i, scale, w);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const F a = simd::set1(x[r * row]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) sum[r][v] = simd::fma(a, w[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) {
      float* to = total + r * kTile + v * kLanes;
      simd::store(to, simd::add(simd::load(to), sum[r][v]));
    }
}

template <class Format, int R>
void multiply_rows(int rows, const float* x, int64_t row, int64_t step, int64_t depth,
                   const uint8_t* tile, float* total) {
  if (rows == R) return multiply<Format, R>(x, row, step, depth, tile, total);
  if constexpr (R > 1) multiply_rows<Format, R - 1>(rows, x, row, step, depth, tile, total);
}

// Expand `depth` rows of a tile to float32.
template <class Format>
void expand(const uint8_t* tile, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; k += Format::kBlock, tile += Format::kBytes) {
    const auto scale = Format::scale(tile);
    for (int i = 0; i < Format::kBlock; i++, to += kTile) {
      F w[kVectors];
      Format::weights(tile, i, scale, w);
      for (int v = 0; v < kVectors; v++) simd::store(to + v * kLanes, w[v]);
    }
  }
}

// Copy `rows` rows side by side, [depth][rows], so that a panel is read in one stream.
void pack(const float* x, int64_t row, int rows, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; k++)
    for (int r = 0; r < rows; r++) to[k * rows + r] = x[r * row + k];
}

template <class Format>
constexpr int64_t segment_bytes() {
  return kSegment / Format::kBlock * (int64_t)Format::kBytes;
}

template <class Format>
void few_rows(const Work& w) {
  const int64_t bytes = w.depth / Format::kBlock * Format::kBytes;
#pragma omp for schedule(static) nowait
  for (int64_t tile = 0; tile < w.tile_count(); tile++) {
    float total[kFewRows * kTile] = {};
    const uint8_t* weights = w.tiles + tile * bytes;
    for (int64_t k = 0; k < w.depth; k += kSegment, weights += segment_bytes<Format>())
      multiply_rows<Format, kFewRows>((int)w.rows, w.x + k, w.depth, 1, std::min(kSegment, w.depth - k),
                                      weights, total);
    store_rows((int)w.rows, total, w.output(tile, 0));
  }
}

// Rows in panels of equal size (but for the last), panels in chunks of equal size, so that threads
// that take the same number of tiles end together.
struct Panels {
  int64_t rows, count, size, in_chunk, chunks;

  explicit Panels(int64_t rows_) : rows(rows_) {
    count = (rows + kPanel - 1) / kPanel;
    size = (rows + count - 1) / count;
    count = (rows + size - 1) / size;
    in_chunk = kChunk / size;
    chunks = (count + in_chunk - 1) / in_chunk;
    in_chunk = (count + chunks - 1) / chunks;
  }
  int height(int64_t panel) const { return (int)std::min(size, rows - panel * size); }
};

// One tile for one chunk of rows, segment by segment: the expanded segment and the totals stay in
// the first-level cache.
template <class Format>
void chunk_tile(const Work& w, const Panels& panels, int64_t chunk, int64_t tile) {
  alignas(64) float expanded[kSegment * kTile], total[kChunk * kTile];
  const int64_t begin = chunk * panels.in_chunk;
  const int64_t end = std::min(panels.count, begin + panels.in_chunk);
  std::fill(total, total + (end - begin) * panels.size * kTile, 0.0f);
  const uint8_t* weights = w.tiles + tile * (w.depth / Format::kBlock * Format::kBytes);
  for (int64_t k = 0; k < w.depth; k += kSegment, weights += segment_bytes<Format>()) {
    const int64_t depth = std::min(kSegment, w.depth - k);
    const uint8_t* dense = weights;
    // Tiles follow each other in memory. Asking for the next segment now hides its latency behind
    // the panels; the processor's own prefetching gives up between two short bursts.
    for (int64_t i = 0; i < segment_bytes<Format>(); i += 64)
      __builtin_prefetch(weights + segment_bytes<Format>() + i);
    if constexpr (Format::kBytes != Float32::kBytes || Format::kBlock != 1) {
      expand<Format>(weights, depth, expanded);
      dense = (const uint8_t*)expanded;
    }
    for (int64_t p = begin; p < end; p++) {
      const int rows = panels.height(p);
      const float* x = w.packed + p * panels.size * w.depth + k * rows;
      multiply_rows<Float32, kPanel>(rows, x, 1, rows, depth, dense,
                                     total + (p - begin) * panels.size * kTile);
    }
  }
  const int64_t first = begin * panels.size;
  store_rows((int)(std::min(w.rows, end * panels.size) - first), total, w.output(tile, first));
}

template <class Format>
void many_rows(const Work& w) {
  const Panels panels(w.rows);
#pragma omp for schedule(static) nowait
  for (int64_t unit = 0; unit < panels.chunks * w.tile_count(); unit++)
    chunk_tile<Format>(w, panels, unit / w.tile_count(), unit % w.tile_count());
}

void pack_panels(const float* x, int64_t rows, int64_t depth, float* packed) {
  const Panels panels(rows);
#pragma omp for schedule(static)
  for (int64_t p = 0; p < panels.count; p++)
    pack(x + p * panels.size * depth, depth, panels.height(p), depth, packed + p * panels.size * depth);
}

// Rows of W (an embedding look-up): lane by lane out of the tiles.
template <class Format>
void look_up(const uint8_t* tiles, int64_t depth, const int64_t* ids, int64_t count, float* out,
             int threads) {
  const int64_t bytes = depth / Format::kBlock * Format::kBytes;
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 16)
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* tile = tiles + ids[i] / kTile * bytes;
    float* to = out + i * depth;
    for (int64_t k = 0; k < depth; k += Format::kBlock, tile += Format::kBytes) {
      const auto scale = Format::scale(tile);
      for (int j = 0; j < Format::kBlock; j++) {
        F w[kVectors];
        float lanes[kTile];
        Format::weights(tile, j, scale, w);
        for (int v = 0; v < kVectors; v++) simd::store(lanes + v * kLanes, w[v]);
        *to++ = lanes[ids[i] % kTile];
      }
    }
  }
}

template <class Format>
void run(const Work& w) {
  if (w.rows <= kFewRows) few_rows<Format>(w);
  else many_rows<Format>(w);
}

void run(int64_t kind, const Work& work) {
  switch (kind) {
    case kF32: return run<Float32>(work);
    case kBF16: return run<BFloat16>(work);
    case kF16: return run<Float16>(work);
    case kQ8_0: return run<Q8_0>(work);
    case kQ4_0: return run<Q4_0>(work);
    default: return run<Q4_1>(work);
  }
}

// Whether a matrix of the layer is multiplied in integers, or in floats.
bool has(const Linear& layer, bool integers) {
  return std::any_of(layer.matrices, layer.matrices + layer.count,
                     [=](const Matrix& m) { return is_int8(m.kind) == integers; });
}

}  // namespace

int64_t linear_scratch(const Linear& layer, int64_t rows) {
  const bool pack = rows > kFewRows && has(layer, false);
  return (pack ? rows * layer.depth : 0) + (has(layer, true) ? int8::scratch(rows, layer.depth) : 0);
}

void team::linear(const Linear& layer, const float* x, int64_t rows, float* y, float* scratch) {
  const float* packed = scratch;
  if (rows > kFewRows && has(layer, false)) {
    pack_panels(x, rows, layer.depth, scratch);
    scratch += rows * layer.depth;
  }
  int8::Rows quantised;
  if (has(layer, true)) quantised = int8::quantise(x, rows, layer.depth, scratch);
  int64_t offset = 0;
  for (const Matrix* m = layer.matrices; m < layer.matrices + layer.count; offset += m++->outputs) {
    const float* bias = layer.bias ? layer.bias + offset : nullptr;
    const Product product{rows, layer.depth, m->outputs, m->tiles, bias, y + offset, layer.outputs};
    if (is_int8(m->kind)) int8::multiply(m->kind, product, quantised);
    else run(m->kind, {product, x, packed});
  }
#pragma omp barrier
}

extern "C" {

// Bytes of a packed matrix [outputs, depth] of this kind.
int64_t prefixcache_linear_bytes(int kind, int64_t outputs, int64_t depth) {
  return (outputs + kTile - 1) / kTile * tile_bytes(kind, depth);
}

// Pack rows [outputs, row_bytes] in their file format.
void prefixcache_linear_pack(int kind, const uint8_t* rows, int64_t row_bytes, int64_t outputs,
                             int64_t depth, uint8_t* to, int threads) {
  const int64_t bytes = tile_bytes(kind, depth);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t tile = 0; tile < (outputs + kTile - 1) / kTile; tile++) {
    const int columns = (int)std::min<int64_t>(kTile, outputs - tile * kTile);
    const uint8_t* from = rows + tile * kTile * row_bytes;
    uint8_t* target = to + tile * bytes;
    switch (kind) {
      case kF32: pack_dense((const uint32_t*)from, depth, columns, (uint32_t*)target); break;
      case kBF16:
      case kF16: pack_dense((const uint16_t*)from, depth, columns, (uint16_t*)target); break;
      case kQ8_0: pack_blocks<1, false>(from, row_bytes, columns, depth, target); break;
      case kQ4_0: pack_blocks<1, true>(from, row_bytes, columns, depth, target); break;
      case kQ8_0Int8:
      case kQ4_0Int8:
      case kQ4_1Int8: int8::pack(kind, from, row_bytes, columns, depth, target); break;
      default: pack_blocks<2, true>(from, row_bytes, columns, depth, target); break;
    }
  }
}

int64_t prefixcache_linear_scratch(const Linear* layer, int64_t rows) { return linear_scratch(*layer, rows); }

void prefixcache_linear(const Linear* layer, const float* x, int64_t rows, float* y, float* scratch, int threads) {
#pragma omp parallel num_threads(threads)
  team::linear(*layer, x, rows, y, scratch);
}

// out [count, depth] = rows `ids` of W.
void prefixcache_linear_rows(int kind, const uint8_t* tiles, int64_t depth, const int64_t* ids,
                             int64_t count, float* out, int threads) {
  if (is_int8(kind)) return int8::look_up(kind, tiles, depth, ids, count, out);
  switch (kind) {
    case kF32: return look_up<Float32>(tiles, depth, ids, count, out, threads);
    case kBF16: return look_up<BFloat16>(tiles, depth, ids, count, out, threads);
    case kF16: return look_up<Float16>(tiles, depth, ids, count, out, threads);
    case kQ8_0: return look_up<Q8_0>(tiles, depth, ids, count, out, threads);
    case kQ4_0: return look_up<Q4_0>(tiles, depth, ids, count, out, threads);
    default: return look_up<Q4_1>(tiles, depth, ids, count, out, threads);
  }
}

}  // extern "C"
