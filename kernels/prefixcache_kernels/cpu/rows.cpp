// Row-wise operations: RMSNorm with residual, SiLU · mul, rotation with the write of K and V.
//
// Each element, and each sum along a row, is computed in an order that depends on the width alone.

#include <omp.h>

#include <algorithm>

#include "kernels.h"
#include "simd.h"

using simd::F;
using simd::kLanes;

namespace {

// Call f(offset, lanes) for each vector of a row, the last one perhaps partial.
template <class Function>
inline void each_vector(int64_t width, Function f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f(i, kLanes);
  if (i < width) f(i, (int)(width - i));
}

inline F get(const float* p, int lanes) { return lanes == kLanes ? simd::load(p) : simd::load_part(p, lanes); }
inline void put(float* p, F x, int lanes) {
  if (lanes == kLanes) simd::store(p, x);
  else simd::store_part(p, x, lanes);
}

// out = x / sqrt(mean(x²) + eps) * weight; out may be x.
void normalise(const float* x, const float* weight, float eps, float* out, int64_t width) {
  F squares = simd::zero();
  each_vector(width, [&](int64_t i, int n) {
    const F v = get(x + i, n);
    squares = simd::fma(v, v, squares);
  });
  const F scale = simd::set1(1.0f / std::sqrt(simd::lane_sum(squares) / (float)width + eps));
  each_vector(width, [&](int64_t i, int n) {
    put(out + i, simd::mul(simd::mul(get(x + i, n), scale), get(weight + i, n)), n);
  });
}

// Rotate pairs (i, i + half) of one head in place.
void rotate(float* x, const float* cosine, const float* sine, int64_t half) {
  each_vector(half, [&](int64_t i, int n) {
    const F low = get(x + i, n), high = get(x + half + i, n), c = get(cosine + i, n), s = get(sine + i, n);
    put(x + i, simd::sub(simd::mul(low, c), simd::mul(high, s)), n);
    put(x + half + i, simd::add(simd::mul(high, c), simd::mul(low, s)), n);
  });
}

}  // namespace

namespace team {

void rms_norm(const float* x, float* residual, const float* weight, float eps, float* out, int64_t rows,
              int64_t width) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * width;
    if (residual) {
      float* total = residual + row * width;
      each_vector(width, [&](int64_t i, int n) { put(total + i, simd::add(get(total + i, n), get(from + i, n)), n); });
      from = total;
    }
    normalise(from, weight, eps, out + row * width, width);
  }
}

void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float* gate = gate_up + row * 2 * width;
    each_vector(width, [&](int64_t i, int n) {
      const F g = get(gate + i, n);
      const F denominator = simd::add(simd::set1(1.0f), simd::exp(simd::sub(simd::zero(), g)));
      put(out + row * width + i, simd::mul(simd::div(g, denominator), get(gate + width + i, n)), n);
    });
  }
}

void rope_write_kv(float* qkv, int64_t rows, const Rope& rope, const CacheShape& s, const HeadNorms& norms,
                   float* k_cache, float* v_cache) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.dim;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float* states = qkv + row * width;
    const float* angle = rope.table + std::max(rope.positions[row], 0) * s.dim;
    for (int64_t head = 0; head < s.heads + s.kv_heads; head++) {
      float* x = states + head * s.dim;
      const float* norm = head < s.heads ? norms.q : norms.k;
      if (norm) normalise(x, norm, norms.eps, x, s.dim);
      rotate(x, angle, angle + s.dim / 2, s.dim / 2);
    }
    if (rope.slots[row] < 0) continue;
    const int64_t block = rope.slots[row] / s.block_size, slot = rope.slots[row] % s.block_size;
    const float* k = states + s.heads * s.dim;
    const float* v = k + s.kv_heads * s.dim;
    for (int64_t head = 0; head < s.kv_heads; head++, k += s.dim, v += s.dim) {
      float* to = k_cache + block * s.k_block + head * s.k_head + slot;
      for (int64_t d = 0; d < s.dim; d++) to[d * s.k_dim] = k[d];
      std::memcpy(v_cache + block * s.v_block + head * s.v_head + slot * s.v_slot, v, sizeof(float) * s.dim);
    }
  }
}

}  // namespace team

extern "C" {

void prefixcache_rms_norm(const float* x, float* residual, const float* weight, float eps, float* out,
                          int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
  team::rms_norm(x, residual, weight, eps, out, rows, width);
}

void prefixcache_silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
  team::silu_mul(gate_up, out, rows, width);
}

void prefixcache_rope_write_kv(float* qkv, int64_t rows, const Rope* rope, const CacheShape* shape,
                               const HeadNorms* norms, float* k_cache, float* v_cache, int threads) {
#pragma omp parallel num_threads(threads)
  team::rope_write_kv(qkv, rows, *rope, *shape, *norms, k_cache, v_cache);
}

}  // extern "C"
