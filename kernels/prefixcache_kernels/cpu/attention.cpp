// Causal attention over KV blocks, in spans of 128 tokens at fixed absolute positions.
//
// For a pair (query row, head) and a span: scores in order of the head's dimensions, their maximum
// m, weights e^(s - m), their sum l, and values in order of the keys. Spans are merged in order:
//
//     (m, l, a) + (m', l', a') = (M, l e^(m-M) + l' e^(m'-M), a e^(m-M) + a' e^(m'-M)),  M = max(m, m')
//
// Both depend on the row's position alone, so it does not matter which pairs share a tile, nor
// whether a span's partial is merged at once (runs: prefill) or written and merged later (groups:
// rows of several sequences that read the same blocks). FlashAttention-2, arXiv 2307.08691;
// FlashDecoding, arXiv 2311.01282, with fixed cuts.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "simd.h"

using simd::F;
using simd::kLanes;

namespace {

constexpr int kSpan = 128;
constexpr int kPairs = 24;                                     // pairs of an item, at most
constexpr int kPadded = (kPairs + kLanes - 1) / kLanes * kLanes;
constexpr int kRegisterRows = kLanes >= 8 ? 12 : 4;             // rows of a register tile
constexpr int kColumns = kLanes == 16 ? 2 : 1;                 // its vectors
constexpr int kVectors = kSpan / kLanes;

struct Partial {
  float max, sum;
  float* values;  // [padded dim]
};

struct Visible {
  int low, high;  // keys of the span that a pair sees; none if low > high
};

// What one thread needs for an item.
struct Buffers {
  std::vector<Visible> runs;
  std::vector<float> query, keys, values, state;
  float scores[kPairs * kSpan];
  const float* key_vectors[kVectors];
  const float* value_rows[kSpan];
  int64_t key_stride = 0;
  float state_max[kPairs], state_sum[kPairs];
  bool begun[kPairs];
};

struct Attention {
  const CacheShape& s;
  const AttentionWork& w;
  const float* q;
  int64_t q_row;
  const float *k_cache, *v_cache;
  float* out;
  int64_t group, padded;
  float scale;

  Attention(const CacheShape& shape, const AttentionWork& work, const float* q_, int64_t q_row_, const float* k,
            const float* v, float* out_)
      : s(shape), w(work), q(q_), q_row(q_row_), k_cache(k), v_cache(v), out(out_),
        group(shape.heads / shape.kv_heads), padded((shape.dim + kLanes - 1) / kLanes * kLanes),
        scale((float)(1.0 / std::sqrt((double)shape.dim))) {}

  int64_t row_of(const AttentionItem& item, int pair) const {
    const int64_t row = (item.pair + pair) / group;
    return item.span < 0 ? item.first + row : w.rows[item.first + row];
  }

  Visible visible(int64_t row, int span) const {
    const int64_t position = w.positions[row] - (int64_t)span * kSpan;
    const int64_t low = w.window ? std::max<int64_t>(position - w.window + 1, 0) : 0;
    return {(int)std::min<int64_t>(low, kSpan), (int)std::min<int64_t>(position, kSpan - 1)};
  }

  // Scaled queries, [dim][rows] for each register tile.
  void load_queries(const AttentionItem& item, int kv_head, Buffers& b) const {
    for (int tile = 0; tile < item.pairs; tile += kRegisterRows) {
      const int rows = std::min(kRegisterRows, item.pairs - tile);
      float* to = b.query.data() + tile * s.dim;
      for (int r = 0; r < rows; r++) {
        const int64_t head = kv_head * group + (item.pair + tile + r) % group;
        const float* from = q + row_of(item, tile + r) * q_row + head * s.dim;
        for (int64_t d = 0; d < s.dim; d++) to[d * rows + r] = from[d] * scale;
      }
    }
  }

  // Where the span's keys and values lie; only the blocks up to `last` (a key) are looked up.
  void locate(const AttentionItem& item, int span, int kv_head, int last, Buffers& b) const {
    const int64_t size = s.block_size;
    const int32_t* ids = w.block_table + item.table_row * w.table_width + (int64_t)span * kSpan / size;
    for (int key = 0; key <= last;) {  // block by block: a division a key costs as much as the scores
      const float* row = v_cache + ids[key / size] * s.v_block + kv_head * s.v_head;
      for (int64_t slot = 0; slot < size; slot++, row += s.v_slot) b.value_rows[key++] = row;
    }
    if (size >= kLanes) {
      b.key_stride = s.k_dim;
      for (int v = 0; v * kLanes <= last; v++)
        b.key_vectors[v] = k_cache + ids[v * kLanes / size] * s.k_block + kv_head * s.k_head + v * kLanes % size;
      return;
    }
    // Blocks narrower than a vector: lay the span out as [dim][128].
    b.keys.resize(s.dim * kSpan);
    b.key_stride = kSpan;
    for (int key = 0; key <= last; key += (int)size) {
      const float* from = k_cache + ids[key / size] * s.k_block + kv_head * s.k_head;
      for (int64_t d = 0; d < s.dim; d++)
        std::memcpy(b.keys.data() + d * kSpan + key, from + d * s.k_dim, sizeof(float) * size);
    }
    for (int v = 0; v < kVectors; v++) b.key_vectors[v] = b.keys.data() + v * kLanes;
  }

  template <int R, int C>
  void score_tile(const float* query, const float* const* keys, int64_t stride, float* scores) const {
    F sum[R][C];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = simd::zero();
    for (int64_t d = 0; d < s.dim; d++, query += R) {
      F k[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) k[c] = simd::load(keys[c] + d * stride);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const F a = simd::set1(query[r]);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) sum[r][c] = simd::fma(a, k[c], sum[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) simd::store(scores + r * kSpan + c * kLanes, sum[r][c]);
  }

  template <int R>
  void score_rows(int rows, const float* query, const Buffers& b, int last, float* scores) const {
    if (rows != R) {
      if constexpr (R > 1) score_rows<R - 1>(rows, query, b, last, scores);
      return;
    }
    for (int v = 0; v * kLanes <= last; v += kColumns) {
      // A vector beyond the last key may have no block; then it is left out.
      if (kColumns == 1 || (v + 1) * kLanes > last)
        score_tile<R, 1>(query, b.key_vectors + v, b.key_stride, scores + v * kLanes);
      else
        score_tile<R, kColumns>(query, b.key_vectors + v, b.key_stride, scores + v * kLanes);
    }
  }

  // Turn a row of scores into weights; returns maximum and sum. Hidden keys get weight 0 whatever
  // their score was: they may never have been written.
  static void weigh(float* scores, Visible seen, float& max, float& sum) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int vectors = seen.high / kLanes + 1;
    std::fill(scores, scores + seen.low, lowest);
    std::fill(scores + seen.high + 1, scores + vectors * kLanes, lowest);
    F most = simd::set1(lowest);
    for (int v = 0; v < vectors; v++) most = simd::max(most, simd::load(scores + v * kLanes));
    max = simd::lane_max(most);
    const F top = simd::set1(max);
    for (int v = 0; v < vectors; v++)
      simd::store(scores + v * kLanes, simd::exp(simd::sub(simd::load(scores + v * kLanes), top)));
    std::fill(scores, scores + seen.low, 0.0f);
    std::fill(scores + seen.high + 1, scores + kSpan, 0.0f);
    F total = simd::zero();
    for (int v = 0; v < vectors; v++) total = simd::add(total, simd::load(scores + v * kLanes));
    sum = simd::lane_sum(total);
  }

  template <int R, int C, bool Part>
  void value_tile(const float* weights, const float* const* rows, int from, int to, int64_t d, F (&sum)[R][C]) const {
    const int n = (int)(s.dim - d);
    for (int key = from; key < to; key++) {
      F v[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++)
        v[c] = Part ? simd::load_part(rows[key] + d, n) : simd::load(rows[key] + d + c * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const F a = simd::set1(weights[r * kSpan + key]);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) sum[r][c] = simd::fma(a, v[c], sum[r][c]);
      }
    }
  }

  template <int R, int C, bool Part>
  void value_columns(const float* weights, const Buffers& b, const std::vector<Visible>& runs, int64_t d,
                     float* values) const {
    F sum[R][C];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = simd::zero();
    for (const Visible& run : runs)
      value_tile<R, C, Part>(weights, b.value_rows, run.low, run.high + 1, d, sum);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) simd::store(values + r * padded + d + c * kLanes, sum[r][c]);
  }

  template <int R>
  void value_rows(int rows, const float* weights, const Buffers& b, const std::vector<Visible>& runs,
                  float* values) const {
    if (rows != R) {
      if constexpr (R > 1) value_rows<R - 1>(rows, weights, b, runs, values);
      return;
    }
    int64_t d = 0;
    if (kColumns > 1)
      for (; d + kColumns * kLanes <= s.dim; d += kColumns * kLanes)
        value_columns<R, kColumns, false>(weights, b, runs, d, values);
    for (; d + kLanes <= s.dim; d += kLanes) value_columns<R, 1, false>(weights, b, runs, d, values);
    if (d < s.dim) value_columns<R, 1, true>(weights, b, runs, d, values);
  }

  // Keys that at least one pair sees, as runs. Others must not be read: 0 · NaN is NaN.
  static void alive_runs(const Visible* seen, int pairs, std::vector<Visible>& runs) {
    bool alive[kSpan + 1] = {};
    for (int p = 0; p < pairs; p++)
      for (int key = seen[p].low; key <= seen[p].high; key++) alive[key] = true;
    runs.clear();
    for (int key = 0; key < kSpan; key++) {
      if (!alive[key]) continue;
      const int from = key;
      while (alive[key]) key++;
      runs.push_back({from, key - 1});
    }
  }

  // Partials of one span for all pairs of an item: maxima, sums, and b.values.
  void span_partials(const AttentionItem& item, int span, int kv_head, Buffers& b, float* max, float* sum,
                     Visible* seen) const {
    std::vector<Visible>& runs = b.runs;
    int last = -1;
    bool from_start = true;
    for (int p = 0; p < item.pairs; p++) {
      seen[p] = visible(row_of(item, p), span);
      last = std::max(last, seen[p].high);
      from_start = from_start && seen[p].low == 0;
    }
    if (from_start) runs.assign(1, {0, last});
    else alive_runs(seen, item.pairs, runs);
    locate(item, span, kv_head, last, b);
    for (int tile = 0; tile < item.pairs; tile += kRegisterRows) {
      const int rows = std::min(kRegisterRows, item.pairs - tile);
      float* scores = b.scores + tile * kSpan;
      score_rows<kRegisterRows>(rows, b.query.data() + tile * s.dim, b, last, scores);
      for (int r = 0; r < rows; r++) {
        if (seen[tile + r].low <= seen[tile + r].high)
          weigh(scores + r * kSpan, seen[tile + r], max[tile + r], sum[tile + r]);
        else
          std::fill(scores + r * kSpan, scores + (r + 1) * kSpan, 0.0f);
      }
      value_rows<kRegisterRows>(rows, scores, b, runs, b.values.data() + tile * padded);
    }
  }

  // Merge the next partial into a state; `factor` is e to the smaller maximum minus the greater one.
  void merge(float& max, float& sum, float* values, const Partial& next, float factor) const {
    const float top = std::max(max, next.max);
    const float old = max == top ? 1.0f : factor, fresh = next.max == top ? 1.0f : factor;
    sum = sum * old + next.sum * fresh;
    max = top;
    const F a = simd::set1(old), c = simd::set1(fresh);
    for (int64_t d = 0; d < padded; d += kLanes)
      simd::store(values + d, simd::fma(c, simd::load(next.values + d), simd::mul(a, simd::load(values + d))));
  }

  void finish(int64_t row, int64_t head, float sum, const float* values) const {
    float* to = out + (row * s.heads + head) * s.dim;
    const F total = simd::set1(sum);
    int64_t d = 0;
    for (; d + kLanes <= s.dim; d += kLanes) simd::store(to + d, simd::div(simd::load(values + d), total));
    if (d < s.dim) simd::store_part(to + d, simd::div(simd::load(values + d), total), (int)(s.dim - d));
  }

  float* partial(int64_t row, int span, int64_t head) const {
    const int64_t slot = w.partial_base[row] + span - w.first_span[row];
    return w.partials + (slot * s.heads + head) * (padded + 2);
  }

  void run_group(const AttentionItem& item, int kv_head, Buffers& b) const {
    float max[kPairs], sum[kPairs];
    Visible seen[kPairs];
    span_partials(item, item.span, kv_head, b, max, sum, seen);
    for (int p = 0; p < item.pairs; p++) {
      float* to = partial(row_of(item, p), item.span, kv_head * group + (item.pair + p) % group);
      to[padded] = max[p];
      to[padded + 1] = sum[p];
      std::memcpy(to, b.values.data() + p * padded, sizeof(float) * padded);
    }
  }

  void run_rows(const AttentionItem& item, int kv_head, Buffers& b) const {
    float max[kPairs], sum[kPairs];
    Visible seen[kPairs];
    std::fill(b.begun, b.begun + item.pairs, false);
    const int64_t final_row = row_of(item, item.pairs - 1);
    const int last = w.positions[final_row] / kSpan;
    for (int span = w.first_span[row_of(item, 0)]; span <= last; span++) {
      span_partials(item, span, kv_head, b, max, sum, seen);
      float factor[kPadded] = {};
      for (int p = 0; p < item.pairs; p++)
        if (b.begun[p] && seen[p].low <= seen[p].high) factor[p] = -std::fabs(max[p] - b.state_max[p]);
      for (int p = 0; p < item.pairs; p += kLanes) simd::store(factor + p, simd::exp(simd::load(factor + p)));
      for (int p = 0; p < item.pairs; p++) {
        if (seen[p].low > seen[p].high) continue;
        float* state = b.state.data() + p * padded;
        const Partial next{max[p], sum[p], b.values.data() + p * padded};
        if (b.begun[p]) {
          merge(b.state_max[p], b.state_sum[p], state, next, factor[p]);
          continue;
        }
        b.begun[p] = true;
        b.state_max[p] = max[p];
        b.state_sum[p] = sum[p];
        std::memcpy(state, next.values, sizeof(float) * padded);
      }
    }
    for (int p = 0; p < item.pairs; p++)
      finish(row_of(item, p), kv_head * group + (item.pair + p) % group, b.state_sum[p], b.state.data() + p * padded);
  }

  void merge_row(int64_t row, int64_t head) const {
    const int first = w.first_span[row], last = w.positions[row] / kSpan;
    float* state = partial(row, first, head);
    for (int span = first + 1; span <= last; span++) {
      float* next = partial(row, span, head);
      const float factor = simd::exp1(-std::fabs(next[padded] - state[padded]));
      merge(state[padded], state[padded + 1], state, {next[padded], next[padded + 1], next}, factor);
    }
    finish(row, head, state[padded + 1], state);
  }
};

}  // namespace

namespace team {

void attention(const CacheShape& shape, const AttentionWork& work, const float* q, int64_t q_row,
               const float* k_cache, const float* v_cache, float* out) {
  const Attention a(shape, work, q, q_row, k_cache, v_cache, out);
  const int64_t units = work.item_count * shape.kv_heads;
  Buffers b;
  b.query.resize(kPairs * shape.dim);
  b.values.resize(kPairs * a.padded);
  b.state.resize(kPairs * a.padded);
#pragma omp for schedule(dynamic, 1)
  for (int64_t unit = 0; unit < units; unit++) {
    const AttentionItem& item = work.items[unit / shape.kv_heads];
    const int kv_head = (int)(unit % shape.kv_heads);
    a.load_queries(item, kv_head, b);
    if (item.span < 0) a.run_rows(item, kv_head, b);
    else a.run_group(item, kv_head, b);
  }
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < work.tokens * shape.heads; unit++) {
    const int64_t row = unit / shape.heads, head = unit % shape.heads;
    if (work.positions[row] < 0)
      std::fill(out + unit * shape.dim, out + (unit + 1) * shape.dim, 0.0f);
    else if (work.partial_base[row] >= 0)
      a.merge_row(row, head);
  }
}

}  // namespace team

extern "C" {

int64_t prefixcache_attention_pairs() { return kPairs; }

// Floats of partials for so many (row, span) slots.
int64_t prefixcache_attention_partials(int64_t slots, int64_t heads, int64_t dim) {
  return slots * heads * ((dim + kLanes - 1) / kLanes * kLanes + 2);
}

void prefixcache_attention(const CacheShape* shape, const AttentionWork* work, const float* q, int64_t q_row,
                           const float* k_cache, const float* v_cache, float* out, int threads) {
#pragma omp parallel num_threads(threads)
  team::attention(*shape, *work, q, q_row, k_cache, v_cache, out);
}

}  // extern "C"
