// The stream kernel: few rows per KV head (decode, speculative steps). K and V are read once, row by row, straight
// from the cache. Tiles of keys are outermost and KV heads inside, so that a block's heads, adjacent in the pool the
// library makes, are read as one stream; while one tile is worked on the next is prefetched.
#pragma once

#include "attention_rows.h"

namespace paged_kv::cpu {
namespace {

constexpr int kTileKeys = 64;  // most keys of a tile
constexpr int kVectorRegisters = kLanes == 16 ? 32 : 16;

// How queries meet keys. FloatDot: keys are converted to float. BFloat16Dot: bfloat16 products, float sums.
template <class T>
struct FloatDot {
  static constexpr int kVectors = 2;
  static constexpr int kQueryFloats = kPair;  // floats of a packed query per kPair elements
  static constexpr int kBytes = sizeof(T);
  struct Chunk {
    Vec v[kVectors];
  };
  PAGED_KV_INLINE static Chunk load_keys(const char* p, int d) {
    const Pair x = Elements<T>::load(p + d * sizeof(T));
    return {{x.a, x.b}};
  }
  PAGED_KV_INLINE static Chunk load_keys(const char* p, int d, int n) {
    const Pair x = Elements<T>::load(p + d * sizeof(T), n);
    return {{x.a, x.b}};
  }
  PAGED_KV_INLINE static Vec madd(Vec sum, Vec q, Vec k) { return fma(q, k, sum); }
};

struct BFloat16Dot;  // defined where the instruction set has it

template <class Dot, int kRows>
struct ScoreBlock {
  static constexpr int kKeys = kLanes / kRows;  // kRows x kKeys accumulators: sum_each yields one vector
  static constexpr bool kHoldQueries = kLanes + kRows * Dot::kVectors + 2 <= kVectorRegisters;
  // Key after key is the order of memory, which the hardware follows best; several keys at once take fewer loads of
  // the queries, which pays where products or conversions are the bound and not memory.
  static constexpr bool kKeyByKey =
      kVectorRegisters == 32 ? kRows == 1 || Dot::kBytes >= 2 : kRows == 1 && Dot::kBytes >= 2;
  using Chunk = typename Dot::Chunk;

  PAGED_KV_INLINE static void step(const Chunk (&k)[kKeys], const float* q, int64_t stride, Vec (&sum)[kLanes]) {
#pragma GCC unroll 2
    for (int half = 0; half < Dot::kVectors; ++half)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Vec x = load(q + r * stride + half * kLanes);
        keep_in_register(x);
#pragma GCC unroll 16
        for (int c = 0; c < kKeys; ++c) sum[r * kKeys + c] = Dot::madd(sum[r * kKeys + c], x, k[c].v[half]);
      }
  }

  // As step, with the queries held in registers while keys pass by.
  template <class Load>
  PAGED_KV_INLINE static void step_keys(Load load_chunk, const float* q, int64_t stride, Vec (&sum)[kLanes]) {
    Vec x[kRows][Dot::kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int half = 0; half < Dot::kVectors; ++half) {
        x[r][half] = load(q + r * stride + half * kLanes);
        keep_in_register(x[r][half]);
      }
#pragma GCC unroll 16
    for (int c = 0; c < kKeys; ++c) {
      const Chunk k = load_chunk(c);
#pragma GCC unroll 2
      for (int half = 0; half < Dot::kVectors; ++half)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r * kKeys + c] = Dot::madd(sum[r * kKeys + c], x[r][half], k.v[half]);
    }
  }

  // A whole key; load_chunk(d) and load_tail(d, n) give its elements.
  template <class Load, class LoadTail>
  PAGED_KV_INLINE static void whole_key(Load load_chunk, LoadTail load_tail, int size, const float* q, int64_t stride,
                                        Vec (&sum)[kRows]) {
    const auto add_chunk = [&](const Chunk& k, const float* qd) {
#pragma GCC unroll 2
      for (int half = 0; half < Dot::kVectors; ++half)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r] = Dot::madd(sum[r], load(qd + r * stride + half * kLanes), k.v[half]);
    };
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = zero();
    int d = 0;
    for (; d + kPair <= size; d += kPair, q += Dot::kQueryFloats) add_chunk(load_chunk(d), q);
    if (d < size) add_chunk(load_tail(d, size - d), q);
  }

  template <class Load>
  PAGED_KV_INLINE static void advance(Load load_chunk, const float* q, int64_t stride, Vec (&sum)[kLanes]) {
    if constexpr (kHoldQueries) {
      step_keys(load_chunk, q, stride, sum);
    } else {
      Chunk k[kKeys];
#pragma GCC unroll 16
      for (int c = 0; c < kKeys; ++c) k[c] = load_chunk(c);
      step(k, q, stride, sum);
    }
  }
};

// scores[r][t] = q[r] . k[t] for kRows rows and all keys of the list, padded ones included.
template <class Dot, int kRows, bool kFetch>
void score_rows(const char* keys, const KeyList& list, int size, const float* q, int64_t stride, float* scores,
                const Ahead& ahead) {
  using Block = ScoreBlock<Dot, kRows>;
  constexpr int kKeys = Block::kKeys, kBytes = kPair * Dot::kBytes;
  Ahead soon = ahead;
  for (int t = 0; t < list.count; t += kKeys) {
    const char* row[kKeys];
#pragma GCC unroll 16
    for (int c = 0; c < kKeys; ++c) row[c] = keys + list.key[t + c];
    const auto load_chunk = [&](int c, int d) {
      if (kFetch) soon.fetch<kBytes>(d * Dot::kBytes);
      return Dot::load_keys(row[c], d);
    };
    const auto load_tail = [&](int c, int d, int n) { return Dot::load_keys(row[c], d, n); };
    Vec sum[kLanes];
    if constexpr (Block::kKeyByKey) {
#pragma GCC unroll 16
      for (int c = 0; c < kKeys; ++c) {
        Vec one[kRows];
        Block::whole_key([&](int d) { return load_chunk(c, d); }, [&](int d, int n) { return load_tail(c, d, n); },
                         size, q, stride, one);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r * kKeys + c] = one[r];
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sum[i] = zero();
      int d = 0;
      const float* qd = q;
      for (; d + kPair <= size; d += kPair, qd += Dot::kQueryFloats)
        Block::advance([&](int c) { return load_chunk(c, d); }, qd, stride, sum);
      if (d < size) Block::advance([&](int c) { return load_tail(c, d, size - d); }, qd, stride, sum);
    }
    store_rows<kRows>(scores + t, kTileKeys, sum_each(sum));
  }
  if (kFetch) soon.fetch_rest();
}

// accumulator[r][d] += weights[r][t] * v[t][d] over the list, for kRows rows and kPairs pairs of vectors from d on.
template <class T, int kRows, int kPairs, bool kFetch>
PAGED_KV_INLINE void add_values_at(const char* values, const KeyList& list, int d, int n, const float* weights,
                                   float* accumulator, int64_t width, Ahead& ahead) {
  Vec a[kRows][2 * kPairs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) a[r][i] = load(accumulator + r * width + d + i * kLanes);
  for (int t = 0; t < list.count; ++t) {
    const char* row = values + list.value[t] + d * sizeof(T);
    if (kFetch) ahead.fetch<kPairs * kPair* int(sizeof(T))>(d * int(sizeof(T)));
    Vec w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) w[r] = set1(weights[r * kTileKeys + t]);
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const char* p = row + i * kPair * sizeof(T);
      const Pair v = n < kPair * kPairs ? Elements<T>::load(p, n - i * kPair) : Elements<T>::load(p);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        a[r][2 * i] = fma(w[r], v.a, a[r][2 * i]);
        a[r][2 * i + 1] = fma(w[r], v.b, a[r][2 * i + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) store(accumulator + r * width + d + i * kLanes, a[r][i]);
}

template <class T, int kRows, bool kFetch>
void add_values(const char* values, const KeyList& list, int size, const float* weights, float* accumulator,
                int64_t width, const Ahead& ahead) {
  Ahead soon = ahead;
  constexpr int kMost = kVectorRegisters / 2 / (2 * kRows), kPairs = kMost > 4 ? 4 : kMost;
  int d = 0;
  for (; d + kPairs * kPair <= size; d += kPairs * kPair)
    add_values_at<T, kRows, kPairs, kFetch>(values, list, d, kPairs * kPair, weights, accumulator, width, soon);
  if constexpr (kPairs > 2)
    for (; d + 2 * kPair <= size; d += 2 * kPair)
      add_values_at<T, kRows, 2, kFetch>(values, list, d, 2 * kPair, weights, accumulator, width, soon);
  for (; d + kPair <= size; d += kPair)
    add_values_at<T, kRows, 1, kFetch>(values, list, d, kPair, weights, accumulator, width, soon);
  if (d < size) add_values_at<T, kRows, 1, false>(values, list, d, size - d, weights, accumulator, width, soon);
  if (kFetch) soon.fetch_rest();
}

// All rows of a KV head, in groups of 4, 2 and 1; the first group fetches ahead.
using ScoreFunction = void (*)(const char* keys, const KeyList& list, int size, const float* q, int64_t stride,
                               int rows, float* scores, const Ahead& ahead);
using ValueFunction = void (*)(const char* values, const KeyList& list, int size, const float* weights, int rows,
                               float* accumulator, int64_t width, const Ahead& ahead);

template <class Dot, bool kFetch>
PAGED_KV_INLINE void score_group(const char* keys, const KeyList& list, int size, const float* q, int64_t stride,
                                 int rows, float* scores, const Ahead& ahead) {
  if (rows >= 4)
    score_rows<Dot, 4, kFetch>(keys, list, size, q, stride, scores, ahead);
  else if (rows >= 2)
    score_rows<Dot, 2, kFetch>(keys, list, size, q, stride, scores, ahead);
  else
    score_rows<Dot, 1, kFetch>(keys, list, size, q, stride, scores, ahead);
}

template <class T, bool kFetch>
PAGED_KV_INLINE void add_group(const char* values, const KeyList& list, int size, const float* weights, int rows,
                               float* accumulator, int64_t width, const Ahead& ahead) {
  if (rows >= 4)
    add_values<T, 4, kFetch>(values, list, size, weights, accumulator, width, ahead);
  else if (rows >= 2)
    add_values<T, 2, kFetch>(values, list, size, weights, accumulator, width, ahead);
  else
    add_values<T, 1, kFetch>(values, list, size, weights, accumulator, width, ahead);
}

PAGED_KV_INLINE int group_rows(int rows) { return rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

template <class Dot>
void score_all(const char* keys, const KeyList& list, int size, const float* q, int64_t stride, int rows, float* scores,
               const Ahead& ahead) {
  score_group<Dot, true>(keys, list, size, q, stride, rows, scores, ahead);
  for (int r = group_rows(rows); r < rows; r += group_rows(rows - r))
    score_group<Dot, false>(keys, list, size, q + r * stride, stride, rows - r, scores + r * kTileKeys, ahead);
}

template <class T>
void add_all_values(const char* values, const KeyList& list, int size, const float* weights, int rows,
                    float* accumulator, int64_t width, const Ahead& ahead) {
  add_group<T, true>(values, list, size, weights, rows, accumulator, width, ahead);
  for (int r = group_rows(rows); r < rows; r += group_rows(rows - r))
    add_group<T, false>(values, list, size, weights + r * kTileKeys, rows - r, accumulator + r * width, width, ahead);
}

// bfloat16 queries on a bfloat16 cache meet as they are, where the instruction set has the product.
#ifdef __AVX512BF16__
struct BFloat16Dot {
  static constexpr int kVectors = 1;
  static constexpr int kQueryFloats = kPair / 2;
  static constexpr int kBytes = 2;
  struct Chunk {
    Vec v[kVectors];
  };
  PAGED_KV_INLINE static Chunk load_keys(const char* p, int d) { return {{load_bfloat16<BFloat16>(p + 2 * d, kPair)}}; }
  PAGED_KV_INLINE static Chunk load_keys(const char* p, int d, int n) {
    return {{load_bfloat16<BFloat16>(p + 2 * d, n)}};
  }
  PAGED_KV_INLINE static Vec madd(Vec sum, Vec q, Vec k) { return madd_bfloat16(sum, q, k); }
};
#endif

struct StreamKernel {
  const AttentionParams& p;
  const Job& job;
  const int rows;              // per KV head
  const int64_t query_stride;  // floats of a packed query row
  const int64_t width;         // floats of an accumulator row
  const bool bfloat16_dot;
  float *queries, *scores, *key_scales, *value_scales;
  KeyList* lists;              // [2]

  static bool uses_bfloat16_dot(const AttentionParams& p) {
    return kHasBFloat16Dot && p.query_dtype == DType::bfloat16 && p.key_cache.dtype == DType::bfloat16;
  }

  StreamKernel(const AttentionParams& params, const Job& of, Cutter& cutter)
      : p(params),
        job(of),
        rows(int(of.rows_per_head())),
        query_stride(round_up(params.key_cache.head_size, kPair) / (uses_bfloat16_dot(params) ? 2 : 1)),
        width(round_up(params.value_cache.head_size, kPair)),
        bfloat16_dot(uses_bfloat16_dot(params)) {
    queries = cutter.take<float>(job.num_rows() * query_stride);
    scores = cutter.take<float>(rows * kTileKeys);
    key_scales = cutter.take<float>(kTileKeys);
    value_scales = cutter.take<float>(kTileKeys);
    lists = cutter.take<KeyList>(2);
  }

  ScoreFunction score_function() const {
#ifdef __AVX512BF16__
    if (bfloat16_dot) return score_all<BFloat16Dot>;
#endif
    return with_type(p.key_cache.dtype,
                     [](auto type) -> ScoreFunction { return score_all<FloatDot<typename decltype(type)::type>>; });
  }

  ValueFunction value_function() const {
    return with_type(p.value_cache.dtype,
                     [](auto type) -> ValueFunction { return add_all_values<typename decltype(type)::type>; });
  }

  void load_row(int64_t token, int64_t head, float* out) const {
    if (!bfloat16_dot) return load_query(p, token, head, loads_interleaved(p.key_cache.dtype), out);
    const int64_t bytes = 2 * p.key_cache.head_size;
    __builtin_memcpy(out, query_row(p, token, head), bytes);
    __builtin_memset(reinterpret_cast<char*>(out) + bytes, 0, query_stride * 4 - bytes);
  }

  void load_queries() const {
    const int64_t group = p.num_heads / p.num_kv_heads;
    float* out = queries;
    for (int64_t h = job.kv_head_begin; h < job.kv_head_end; ++h)
      for (int64_t token = job.query_begin; token < job.query_end; ++token)
        for (int64_t g = job.group_begin; g < job.group_end; ++g, out += query_stride)
          load_row(token, h * group + g, out);
  }

  // scores -> weights for the rows of KV head h, whose state begins at row `first`.
  void absorb_head(const KeyList& list, int64_t h, const State& state, int64_t first) const {
    const int count = int(round_up(list.count, kLanes));
    const float scale = p.scale * head_scale(p.key_cache.scale, h) * load_factor(p.key_cache.dtype);
    const bool features = has_features(p), key_slots = p.key_cache.scale.kind == ScaleKind::per_slot;
    const bool value_slots = p.value_cache.scale.kind == ScaleKind::per_slot;
    if (key_slots) gather_scales(p.key_cache.scale, list.key_scale, count, h, 1.0f, key_scales);
    if (value_slots) gather_scales(p.value_cache.scale, list.value_scale, count, h, 1.0f, value_scales);
    for (int64_t r = 0; r < rows; ++r) {
      float* s = scores + r * kTileKeys;
      const int64_t query = r / job.group(), g = job.group_begin + r % job.group();
      if (key_slots) multiply(s, key_scales, count);
      if (features)
        apply_features(p, job, job.query_begin + query, h * (p.num_heads / p.num_kv_heads) + g, scale, list, s);
      const LocalRange visible = visible_entries(p, job, list, query);
      const int64_t row = first + r;
      const float correction =
          absorb(s, count, visible, features ? 1.0f : scale, state.max + row, state.sum + row * kLanes);
      if (correction != 1.0f) rescale(state.accumulator + row * width, width, correction);
      if (value_slots) multiply(s, value_scales, count);
    }
  }

  // The keys behind `list` for prefetching: the next KV head's rows, or the next list's first.
  Ahead keys_after(int64_t h, const KeyList& list, const KeyList& next) const {
    const bool same = h + 1 < job.kv_head_end;
    const int64_t head = same ? h + 1 : job.kv_head_begin;
    const KeyList& of = same || next.count == 0 ? list : next;
    return {head_base(p.key_cache, head), of.key, of.count, row_bytes(p.key_cache)};
  }

  // Fetches the scales of the slots behind `list`, a head ahead as keys_after does: two lines of a block each.
  PAGED_KV_INLINE void fetch_scales_after(int64_t h, const KeyList& list, const KeyList& next) const {
    const bool same = h + 1 < job.kv_head_end;
    const int64_t head = same ? h + 1 : job.kv_head_begin;
    const KeyList& of = same || next.count == 0 ? list : next;
    fetch_scales(p.key_cache.scale, of.key_scale, of.count, head);
    fetch_scales(p.value_cache.scale, of.value_scale, of.count, head);
  }

  static const char* head_base(const Cache& cache, int64_t head) { return row_of(cache, 0, 0, head); }
  static int row_bytes(const Cache& cache) { return int(cache.head_size * size_of(cache.dtype)); }

  void attend(KeyRange keys, const State& state) const {
    const ScoreFunction score = score_function();
    const ValueFunction add_values = value_function();
    KeyCursor cursor{keys.begin, keys.end};
    const int tile_keys = policy::stream_tile_keys(row_bytes(p.key_cache), kTileKeys);
    KeyList *list = lists, *next = lists + 1;
    load_queries();
    next_keys(p, job, cursor, tile_keys, kTileKeys, *list);
    while (list->count > 0) {
      next_keys(p, job, cursor, tile_keys, kTileKeys, *next);
      for (int64_t h = job.kv_head_begin; h < job.kv_head_end; ++h) {
        const int64_t first = (h - job.kv_head_begin) * rows;
        const char* values = head_base(p.value_cache, h);
        fetch_scales_after(h, *list, *next);
        score(head_base(p.key_cache, h), *list, int(p.key_cache.head_size), queries + first * query_stride,
              query_stride, rows, scores, {values, list->value, list->count, row_bytes(p.value_cache)});
        absorb_head(*list, h, state, first);
        add_values(values, *list, int(p.value_cache.head_size), scores, rows, state.accumulator + first * width, width,
                   keys_after(h, *list, *next));
      }
      KeyList* done = list;
      list = next;
      next = done;
    }
  }
};

}  // namespace
}  // namespace paged_kv::cpu
