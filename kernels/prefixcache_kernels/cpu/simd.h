// The few vector operations that the kernels need, for AVX-512, AVX2 with FMA, and anything else.
//
// Lanes always run over independent outputs, so their number never changes a result, and every
// product that is added goes through fma(): one rounding on every path (-ffp-contract=off keeps
// the compiler from making more of them).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define PREFIXCACHE_LANES 16
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PREFIXCACHE_LANES 8
#include <immintrin.h>
#else
#define PREFIXCACHE_LANES 4
#endif

namespace simd {

constexpr int kLanes = PREFIXCACHE_LANES;
constexpr int kTile = 32;                 // outputs of a weight tile
constexpr int kVectors = kTile / kLanes;  // vectors of a tile row

#if PREFIXCACHE_LANES == 16

using F = __m512;
inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scale2(F x, F n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n whole
inline F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
inline void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// 32 numbers 0..15 out of 16 bytes: low halves first, then high halves.
inline void load_nibbles(const uint8_t* p, F* w) {
  const F digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  w[0] = _mm512_permutexvar_ps(bytes, digits);  // looks at the low four bits only
  w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), digits);
}

// Integers: 16 lanes of 32 bits, or of four bytes each.
using I = __m512i;
inline I set1_i(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline I high_nibbles(I x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline F absolute(F x) { return _mm512_abs_ps(x); }
inline I bits(F x) { return _mm512_castps_si512(x); }
inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
inline void store_i(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline void store_i8(int8_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
// sum + the four products of each lane: unsigned bytes of w, signed bytes of x.
#if defined(__AVX512VNNI__)
inline I dot4(I sum, I w, I x) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
inline I dot4(I sum, I w, I x) {
  const I even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
  const I x_even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), x_odd = _mm512_srai_epi16(x, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, x_even));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, x_odd));
}
#endif

#elif PREFIXCACHE_LANES == 8

using F = __m256;
inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void load_nibbles(const uint8_t* p, F* w) {
  const __m256i low = _mm256_set1_epi32(15);
  for (int i = 0; i < 2; i++) {
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)));
    w[i] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, low));
    w[2 + i] = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
  }
}
inline F scale2(F x, F n) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

using I = __m256i;
inline I set1_i(int32_t x) { return _mm256_set1_epi32(x); }
inline I load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline I high_nibbles(I x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline F absolute(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline I bits(F x) { return _mm256_castps_si256(x); }
inline I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
inline void store_i(int32_t* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
inline void store_i8(int8_t* p, F x) {
  int32_t lanes[kLanes];
  store_i(lanes, _mm256_cvtps_epi32(x));
  for (int i = 0; i < kLanes; i++) p[i] = (int8_t)lanes[i];
}
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline I dot4(I sum, I w, I x) { return _mm256_dpbusd_epi32(sum, w, x); }
#elif defined(__AVXVNNI__)
inline I dot4(I sum, I w, I x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
inline I dot4(I sum, I w, I x) {
  const I even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  const I x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x_even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x_odd));
}
#endif

#else

struct F { float v[4]; };
#define PREFIXCACHE_EACH(expression) \
  F r;                               \
  for (int i = 0; i < 4; i++) r.v[i] = (expression); \
  return r;
inline F set1(float x) { PREFIXCACHE_EACH(x) }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { PREFIXCACHE_EACH(p[i]) }
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline F add(F a, F b) { PREFIXCACHE_EACH(a.v[i] + b.v[i]) }
inline F sub(F a, F b) { PREFIXCACHE_EACH(a.v[i] - b.v[i]) }
inline F mul(F a, F b) { PREFIXCACHE_EACH(a.v[i] * b.v[i]) }
inline F div(F a, F b) { PREFIXCACHE_EACH(a.v[i] / b.v[i]) }
inline F max(F a, F b) { PREFIXCACHE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
inline F min(F a, F b) { PREFIXCACHE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]) }
inline F fma(F a, F b, F c) { PREFIXCACHE_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])) }
inline F round(F x) { PREFIXCACHE_EACH(__builtin_nearbyintf(x.v[i])) }
inline F scale2(F x, F n) { PREFIXCACHE_EACH(__builtin_ldexpf(x.v[i], (int)n.v[i])) }
inline F load_i8(const int8_t* p) { PREFIXCACHE_EACH((float)p[i]) }
inline float from_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
  float value = (float)rest * 0x1p-24f;  // subnormal
  if (rest >= 0x400) {
    bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    std::memcpy(&value, &bits, 4);
  }
  return sign ? -value : value;
}
inline float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline F load_f16(const uint16_t* p) { PREFIXCACHE_EACH(from_f16(p[i])) }
inline F load_bf16(const uint16_t* p) { PREFIXCACHE_EACH(from_bf16(p[i])) }
inline void load_nibbles(const uint8_t* p, F* w) {
  for (int i = 0; i < 16; i++) {
    w[i / 4].v[i % 4] = (float)(p[i] & 15);
    w[4 + i / 4].v[i % 4] = (float)(p[i] >> 4);
  }
}
#undef PREFIXCACHE_EACH

struct I { int32_t v[4]; };
#define PREFIXCACHE_EACH_I(expression) \
  I r;                                 \
  for (int i = 0; i < 4; i++) r.v[i] = (expression); \
  return r;
inline I set1_i(int32_t x) { PREFIXCACHE_EACH_I(x) }
inline I load_bytes(const uint8_t* p) { I r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline I low_nibbles(I x) { PREFIXCACHE_EACH_I(x.v[i] & 0x0f0f0f0f) }
inline I high_nibbles(I x) { PREFIXCACHE_EACH_I((int32_t)((uint32_t)x.v[i] >> 4 & 0x0f0f0f0f)) }
inline F to_float(I x) { F r; for (int i = 0; i < 4; i++) r.v[i] = (float)x.v[i]; return r; }
inline F absolute(F x) { F r; for (int i = 0; i < 4; i++) r.v[i] = std::fabs(x.v[i]); return r; }
inline I bits(F x) { I r; std::memcpy(r.v, x.v, sizeof r.v); return r; }
inline I max_i(I a, I b) { PREFIXCACHE_EACH_I(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
inline void store_i(int32_t* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
inline void store_i8(int8_t* p, F x) { for (int i = 0; i < 4; i++) p[i] = (int8_t)__builtin_nearbyintf(x.v[i]); }
inline I dot4(I sum, I w, I x) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 32; j += 8)
      sum.v[i] += (int32_t)((uint32_t)w.v[i] >> j & 255) * (int32_t)(int8_t)((uint32_t)x.v[i] >> j);
  return sum;
}
#undef PREFIXCACHE_EACH_I

#endif

#if PREFIXCACHE_LANES != 16
inline F load_part(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * n);
  return load(lanes);
}
inline void store_part(float* p, F x, int n) {
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(float) * n);
}
#endif

// e^x in about one unit in the last place, for x in [-87, 88]; below it gives 0, above e^88.
// 2^n * e^r with n = round(x / ln 2) and a polynomial of degree 6 on |r| <= ln 2 / 2.
inline F exp(F x) {
  const F lowest = set1(-87.0f);
  F clamped = min(max(x, lowest), set1(88.0f));
  F n = round(mul(clamped, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693145751953125f), clamped);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return scale2(p, n);
}

// Over the lanes: the greatest, and the sum of a tree that adds the upper half to the lower one.
inline float lane_max(F x) {
#if PREFIXCACHE_LANES == 16
  return _mm512_reduce_max_ps(x);
#else
  float lanes[kLanes];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

inline int32_t lane_max_i(I x) {
#if PREFIXCACHE_LANES == 16
  return _mm512_reduce_max_epi32(x);
#else
  int32_t lanes[kLanes];
  store_i(lanes, x);
  int32_t most = lanes[0];
  for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

inline float lane_sum(F x) {
#if PREFIXCACHE_LANES == 16
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int step = kLanes / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

inline float exp1(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

}  // namespace simd
