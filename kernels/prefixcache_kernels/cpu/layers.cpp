// All layers of a decoder in one call and one parallel region: between two operations lies a barrier,
// and neither a return to Python nor the waking of a thread.

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "kernels.h"

struct Layer {
  const float *input_norm, *post_norm;
  Linear qkv, output, gate_up, down;
  HeadNorms head_norms;
};

struct Step {
  int64_t tokens, wanted;
  const int64_t* wanted_rows;  // [wanted], those that the last layer goes on with; null: all tokens
  Rope rope;
  CacheShape shape;
  const AttentionWork* const* works;    // [layers]
  float *const *k_caches, *const *v_caches;  // [layers]
};

struct Decoder {
  int64_t count, hidden;
  const Layer* layers;
  const float* final_norm;
  float eps;
};

namespace {

// Where intermediate results lie: [tokens, width] each, side by side in one piece of memory.
struct Buffers {
  float *normed, *states, *attended, *delta, *gate_up, *scratch;
  int64_t size = 0;

  Buffers(const Decoder& d, int64_t tokens, float* memory) {
    const Layer& layer = d.layers[0];
    auto take = [&](int64_t floats) {
      float* at = memory + size;
      size += (floats + 15) / 16 * 16;
      return at;
    };
    normed = take(tokens * d.hidden);
    states = take(tokens * std::max(layer.qkv.outputs, layer.down.depth));
    attended = take(tokens * layer.output.depth);
    delta = take(tokens * d.hidden);
    gate_up = take(tokens * layer.gate_up.outputs);
    int64_t most = 0;
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      most = std::max(most, linear_scratch(*linear, tokens));
    scratch = take(most);
  }
};

void gather(const float* x, const int64_t* rows, int64_t count, int64_t width, float* to) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < count; i++) std::memcpy(to + i * width, x + rows[i] * width, sizeof(float) * width);
}

void run(const Decoder& d, const Step& s, float* residual, float* out, const Buffers& b) {
  int64_t rows = s.tokens;
  team::rms_norm(residual, nullptr, d.layers[0].input_norm, d.eps, b.normed, rows, d.hidden);
  for (int64_t i = 0; i < d.count; i++) {
    const Layer& layer = d.layers[i];
    const bool last = i + 1 == d.count;
    const float* attended = b.attended;
    team::linear(layer.qkv, b.normed, rows, b.states, b.scratch);
    team::rope_write_kv(b.states, rows, s.rope, s.shape, layer.head_norms, s.k_caches[i], s.v_caches[i]);
    if (last && s.wanted == 0) return;
    team::attention(s.shape, *s.works[i], b.states, layer.qkv.outputs, s.k_caches[i], s.v_caches[i], b.attended);
    if (last && s.wanted_rows) {
      gather(b.attended, s.wanted_rows, s.wanted, layer.output.depth, b.states);
      gather(residual, s.wanted_rows, s.wanted, d.hidden, out);
      attended = b.states;
      residual = out;
      rows = s.wanted;
    }
    team::linear(layer.output, attended, rows, b.delta, b.scratch);
    team::rms_norm(b.delta, residual, layer.post_norm, d.eps, b.normed, rows, d.hidden);
    team::linear(layer.gate_up, b.normed, rows, b.gate_up, b.scratch);
    team::silu_mul(b.gate_up, b.states, rows, layer.down.depth);
    team::linear(layer.down, b.states, rows, b.delta, b.scratch);
    const float* norm = last ? d.final_norm : d.layers[i + 1].input_norm;
    team::rms_norm(b.delta, residual, norm, d.eps, last ? out : b.normed, rows, d.hidden);
  }
}

}  // namespace

extern "C" {

// Floats of scratch that a step of so many tokens needs.
int64_t prefixcache_layers_scratch(const Decoder* decoder, int64_t tokens) {
  return Buffers(*decoder, tokens, nullptr).size;
}

// out [wanted or tokens, hidden] = last hidden states; residual [tokens, hidden]: the embeddings,
// which are overwritten.
void prefixcache_layers(const Decoder* decoder, const Step* step, float* residual, float* out, float* scratch,
                        int threads) {
  const Buffers buffers(*decoder, step->tokens, scratch);
#pragma omp parallel num_threads(threads)
  run(*decoder, *step, residual, out, buffers);
}

}  // extern "C"
