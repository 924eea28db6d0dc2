// Scores to weights: exp and tanh on vectors, what a model may add to a score, and the online softmax of one row.
#pragma once

#include "attention_keys.h"

namespace paged_kv::cpu {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x to 1 ulp for x <= 127; 0 below -127 at the latest, NaN for NaN.
PAGED_KV_INLINE Vec exp2(Vec x) {
  x = max_(set1(kLowestExponent), x);
  const Vec n = round(x), r = sub(x, n);
  Vec p = fma(set1(0x1.446c82p-13f), r, set1(0x1.5f0896p-10f));
  p = fma(p, r, set1(0x1.3b29e4p-7f));
  p = fma(p, r, set1(0x1.c6af6cp-5f));
  p = fma(p, r, set1(0x1.ebfbe0p-3f));
  p = fma(p, r, set1(0x1.62e430p-1f));
  return scale_by_power(fma(p, r, set1(1.0f)), n);
}

// e^x for x <= 88. Differences of scores come here, so that the rounding of x * log2(e) is theirs, not the scores'.
PAGED_KV_INLINE Vec exp(Vec x) { return exp2(mul(x, set1(kLog2E))); }

PAGED_KV_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// tanh through exp(2x) - 1, which keeps its relative accuracy near 0.
PAGED_KV_INLINE Vec tanh(Vec x) {
  const Vec t = mul(set1(2.0f), min_(set1(10.0f), max_(set1(-10.0f), x)));
  const Vec n = round(mul(t, set1(kLog2E)));
  const Vec r = fma(n, set1(-0x1.7f7d1cp-20f), fma(n, set1(-0x1.62e400p-1f), t));
  Vec p = fma(set1(0x1.a1850ep-13f), r, set1(0x1.6d4914p-10f));
  p = fma(p, r, set1(0x1.1110a8p-7f));
  p = fma(p, r, set1(0x1.5554e4p-5f));
  p = fma(p, r, set1(0x1.555556p-3f));
  p = fma(p, r, set1(0.5f));
  const Vec power = scale_by_power(set1(1.0f), n);
  const Vec minus_one = fma(power, fma(mul(r, r), p, r), sub(power, set1(1.0f)));
  return div(minus_one, add(minus_one, set1(2.0f)));
}

PAGED_KV_INLINE void multiply(float* x, const float* factors, int count) {
  for (int i = 0; i < count; i += kLanes) store(x + i, mul(load(x + i), load(factors + i)));
}

// The mask of one row: scores of hidden keys become -infinity, whatever they were.
void apply_mask(const Mask& mask, int64_t row, int64_t shift, const KeyList& list, float* scores) {
  int i = 0;
  if (list.contiguous && list.position[0] >= shift) {
    const int64_t first = row + list.position[0] - shift;
    if (mask.kind == MaskKind::boolean) {
      for (; i + kLanes <= list.count; i += kLanes)
        store(scores + i, keep_true(load(scores + i), static_cast<const uint8_t*>(mask.data) + first + i));
    } else {
      for (; i + kLanes <= list.count; i += kLanes)
        store(scores + i, add_bias(load(scores + i), load(static_cast<const float*>(mask.data) + first + i)));
    }
  }
  for (; i < list.count; ++i) {
    const int64_t column = list.position[i] - shift;
    if (column < 0) continue;
    if (!is_visible(mask, row + column))
      scores[i] = -kInfinity;
    else if (mask.kind == MaskKind::additive)
      scores[i] += static_cast<const float*>(mask.data)[row + column];
  }
}

PAGED_KV_INLINE bool has_features(const AttentionParams& p) {
  return p.softcap > 0.0f || p.alibi_slopes != nullptr || p.mask.kind != MaskKind::none;
}

// Scale, softcap, ALiBi, mask, in this order; the result is in natural units.
void apply_features(const AttentionParams& p, const Job& job, int64_t token, int64_t head, float scale,
                    const KeyList& list, float* scores) {
  const float cap_inverse = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
  const Vec slope = set1(p.alibi_slopes ? p.alibi_slopes[head] : 0.0f);
  for (int i = 0; i < list.count; i += kLanes) {
    Vec x = mul(load(scores + i), set1(scale));
    if (p.softcap > 0.0f) x = mul(set1(p.softcap), tanh(mul(x, set1(cap_inverse))));
    if (p.alibi_slopes) x = fma(slope, from_int(list.position + i), x);
    store(scores + i, x);
  }
  if (p.mask.kind != MaskKind::none)
    apply_mask(p.mask, token * p.mask.token_stride + head * p.mask.head_stride, job.seq_len - p.mask.width, list,
               scores);
}

// Online softmax of one row: `max` and `sum` (kLanes partial sums) speak of the keys so far. Turns the visible
// scores, times `scale`, into weights (all others up to `count` become 0) and returns what the row's accumulator must
// be multiplied by.
PAGED_KV_INLINE float absorb(float* scores, int count, LocalRange visible, float scale, float* max, float* sum) {
  const bool partial = visible.begin > 0 || visible.end < count;
  const Vec factor = set1(scale);
  Vec top = set1(*max);
  for (int i = 0; i < count; i += kLanes) {
    Vec x = mul(load(scores + i), factor);
    if (partial) x = keep_range(x, visible.begin - i, visible.end - i);
    store(scores + i, x);
    top = max_(top, x);
  }
  float correction = 1.0f;
  if (any_greater(top, set1(*max))) {
    const float new_max = reduce_max(top);
    correction = *max == -kInfinity ? 0.0f : exp(*max - new_max);
    *max = new_max;
    store(sum, mul(load(sum), set1(correction)));
  }
  const Vec base = set1(*max == -kInfinity ? 0.0f : *max);
  Vec total = load(sum);
  for (int i = 0; i < count; i += kLanes) {
    const Vec weight = exp(sub(load(scores + i), base));
    total = add(total, weight);
    store(scores + i, weight);
  }
  store(sum, total);
  return correction;
}

PAGED_KV_INLINE void rescale(float* accumulator, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += kLanes) store(accumulator + i, mul(load(accumulator + i), set1(factor)));
}

}  // namespace
}  // namespace paged_kv::cpu
