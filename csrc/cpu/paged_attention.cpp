// First version: one scalar loop per (token, head); correct for everything, fast for nothing.
#include <cmath>
#include <vector>

#include "../common/float8.h"
#include "../common/slots.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_kv::cpu {
namespace {

float element(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::float32: return static_cast<const float*>(data)[i];
    case DType::float16: return to_float(static_cast<const Float16*>(data)[i]);
    case DType::bfloat16: return to_float(static_cast<const BFloat16*>(data)[i]);
    case DType::float8_e4m3fn: return to_float(static_cast<const Float8E4M3*>(data)[i]);
    case DType::float8_e5m2: return to_float(static_cast<const Float8E5M2*>(data)[i]);
    case DType::int8: return to_float(static_cast<const int8_t*>(data)[i]);
  }
  return 0.0f;
}

void put(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::float32) static_cast<float*>(data)[i] = value;
  if (dtype == DType::float16) static_cast<Float16*>(data)[i] = from_float<Float16>(value);
  if (dtype == DType::bfloat16) static_cast<BFloat16*>(data)[i] = from_float<BFloat16>(value);
}

float scale_at(const Scale& scale, int64_t block, int64_t offset, int64_t head) {
  return scale.kind == ScaleKind::none ? 1.0f : *scale_of(scale, block, offset, head);
}

void attend_row(const AttentionParams& p, int64_t seq, Span span, int64_t token, int64_t head, int64_t visible_tokens) {
  const int64_t len = visible_tokens, kv_head = head / (p.num_heads / p.num_kv_heads);
  const int64_t position = len - (span.end - span.begin) + token - span.begin;
  const int64_t size = p.key_cache.head_size, size_v = p.value_cache.head_size;
  int64_t low = p.window_left >= 0 ? position - p.window_left : 0;
  int64_t high = p.window_right >= 0 ? position + p.window_right + 1 : len;
  if (p.causal && position + 1 < high) high = position + 1;
  low = low < 0 ? 0 : low;
  high = high > len ? len : high;
  std::vector<float> q(size), acc(size_v, 0.0f);
  for (int64_t d = 0; d < size; ++d)
    q[d] = element(p.query, p.query_dtype, token * p.query_token_stride + head * p.query_head_stride + d);
  float max = -INFINITY, sum = 0.0f;
  for (int64_t key = low; key < high; ++key) {
    const int64_t block = p.block_table[seq * p.block_table_stride + key / p.block_size], offset = key % p.block_size;
    if (!is_block(block, p.num_blocks)) continue;
    const int64_t column = key - (len - p.mask.width);
    const int64_t mask_at = token * p.mask.token_stride + head * p.mask.head_stride + column;
    const bool masked = p.mask.kind != MaskKind::none && column >= 0;
    if (masked && p.mask.kind == MaskKind::boolean && !static_cast<const uint8_t*>(p.mask.data)[mask_at]) continue;
    const float bias = masked && p.mask.kind == MaskKind::additive ? static_cast<const float*>(p.mask.data)[mask_at] : 0;
    if (bias == -INFINITY) continue;
    const void* k = row_of(p.key_cache, block, offset, kv_head);
    float score = 0.0f;
    for (int64_t d = 0; d < size; ++d) score += q[d] * element(k, p.key_cache.dtype, d);
    score *= p.scale * scale_at(p.key_cache.scale, block, offset, kv_head);
    if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi_slopes) score += p.alibi_slopes[head] * float(key);
    score += bias;
    if (score == -INFINITY) continue;
    if (score > max) {
      const float factor = std::exp(max - score);
      for (float& x : acc) x *= factor;
      sum *= factor;
      max = score;
    }
    const float weight = std::exp(score - max);
    sum += weight;
    const float v_scale = scale_at(p.value_cache.scale, block, offset, kv_head);
    const void* v = row_of(p.value_cache, block, offset, kv_head);
    for (int64_t d = 0; d < size_v; ++d) acc[d] += weight * v_scale * element(v, p.value_cache.dtype, d);
  }
  const int64_t row = token * p.num_heads + head;
  if (p.lse) p.lse[row] = sum == 0.0f ? -INFINITY : max + std::log(sum);
  if (p.sinks && sum != 0.0f) {
    const float top = p.sinks[head] > max ? p.sinks[head] : max;
    const float factor = std::exp(max - top);
    for (float& x : acc) x *= factor;
    sum = sum * factor + std::exp(p.sinks[head] - top);
  }
  for (int64_t d = 0; d < size_v; ++d) put(p.out, p.query_dtype, row * size_v + d, sum == 0.0f ? 0.0f : acc[d] / sum);
}

void zero_token(const AttentionParams& p, int64_t token) {
  for (int64_t head = 0; head < p.num_heads; ++head) {
    const int64_t row = token * p.num_heads + head;
    for (int64_t d = 0; d < p.value_cache.head_size; ++d) put(p.out, p.query_dtype, row * p.value_cache.head_size + d, 0);
    if (p.lse) p.lse[row] = -INFINITY;
  }
}

}  // namespace

void paged_attention(const AttentionParams& params) {
  for (int64_t token = 0; token < params.num_tokens; ++token) zero_token(params, token);
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    struct Job { const AttentionParams* p; int64_t seq; Span span; int64_t len; };
    Job job{&params, seq, span_of(params.cu_seqlens_q, seq, params.num_tokens),
            clamp(params.seq_lens[seq], 0, params.max_blocks * params.block_size)};
    const int64_t rows = (job.span.end - job.span.begin) * params.num_heads;
    parallel_for(0, rows, 1, [](void* context, int64_t first, int64_t last) {
      const Job& job = *static_cast<Job*>(context);
      for (int64_t row = first; row < last; ++row)
        attend_row(*job.p, job.seq, job.span, job.span.begin + row / job.p->num_heads, row % job.p->num_heads, job.len);
    }, &job);
  }
}

}  // namespace paged_kv::cpu
