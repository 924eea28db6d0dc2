// The tile kernel: many rows per KV head (prefill, chunks, large groups). Keys come in blocks of kBlockKeys, packed
// once per job into panels for a register-blocked product; a strip of rows then does its scores, softmax and values
// on that block while the scores stay in the L1 cache and the panels in the L2. Where keys lie in the pool matters to
// the packing alone. Strips above the diagonal or outside the window are skipped.
#pragma once

#include "attention_rows.h"

namespace paged_kv::cpu {
namespace {

constexpr int kBlockKeys = kMaxKeys;
constexpr int kStripRows = kMicroRows == 32 ? 32 : 24;  // a multiple of kMicroRows
constexpr int kPanel = kPair;   // columns of the register block
static_assert(kStripRows % kMicroRows == 0 && kBlockKeys % kPanel == 0,
              "strips and blocks must hold whole register blocks");

// What one step of the product sums: one float, or a pair of bfloat16 in 32 bits.
struct FloatStep {
  static constexpr int kDepth = 1;
  PAGED_KV_INLINE static Vec madd(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

#ifdef __AVX512BF16__
struct BFloat16Step {
  static constexpr int kDepth = 2;
  PAGED_KV_INLINE static Vec madd(Vec sum, Vec a, Vec b) { return madd_bfloat16(sum, a, b); }
};
#endif

// c[kMicroRows][kPanel] (+)= a[kMicroRows][steps] b[steps][kPanel]; element (r, k) of a is
// a[r * kRowStride + k * kStepStride].
template <class Step, int kRowStride, int kStepStride, bool kAccumulate>
void multiply_block(const float* a, const float* b, int steps, float* c, int64_t c_stride) {
  Vec sum[kMicroRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kMicroRows; ++r) {
    sum[r][0] = kAccumulate ? load(c + r * c_stride) : zero();
    sum[r][1] = kAccumulate ? load(c + r * c_stride + kLanes) : zero();
  }
  for (int k = 0; k < steps; ++k) {
    Vec b0 = load(b + k * kPanel), b1 = load(b + k * kPanel + kLanes);
    keep_in_register(b0);
    keep_in_register(b1);
#pragma GCC unroll 16
    for (int r = 0; r < kMicroRows; ++r) {
      Vec x = set1(a[r * kRowStride + k * kStepStride]);
      keep_in_register(x);
      sum[r][0] = Step::madd(sum[r][0], x, b0);
      sum[r][1] = Step::madd(sum[r][1], x, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kMicroRows; ++r) {
    store(c + r * c_stride, sum[r][0]);
    store(c + r * c_stride + kLanes, sum[r][1]);
  }
}

// The two products of a register block of rows: with a panel of keys, and with one of values. kSteps: how many steps
// are taken at a time. kRowMajor: how queries are packed, [rows][steps] or [row blocks][steps][kMicroRows].
template <class Step>
struct Product {
  static constexpr int kSteps = 1;
  static void score(const float* queries, const float* panel, int steps, float* scores) {
    multiply_block<Step, 1, kMicroRows, false>(queries, panel, steps, scores, kBlockKeys);
  }
  static void add_values(const float* weights, const float* panel, int steps, float* accumulator, int64_t width) {
    multiply_block<Step, kBlockKeys, 1, true>(weights, panel, steps, accumulator, width);
  }
};

#ifdef __AMX_BF16__
constexpr bool kRowMajorQueries = true;

template <>
struct Product<BFloat16Step> {
  static constexpr int kSteps = kTileRows;
  static void score(const float* queries, const float* panel, int steps, float* scores) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    multiply(queries, steps, panel, steps);
    store_sums(scores, kBlockKeys);
  }
  static void add_values(const float* weights, const float* panel, int steps, float* accumulator, int64_t width) {
    load_tile<0>(accumulator, width);
    load_tile<1>(accumulator + kTileRows, width);
    load_tile<2>(accumulator + kTileRows * width, width);
    load_tile<3>(accumulator + kTileRows * width + kTileRows, width);
    multiply(weights, kBlockKeys, panel, steps);
    store_sums(accumulator, width);
  }

 private:
  static void multiply(const float* a, int64_t a_stride, const float* b, int steps) {
    for (int k = 0; k < steps; k += kSteps) {
      load_tile<4>(a + k, a_stride);
      load_tile<5>(a + kTileRows * a_stride + k, a_stride);
      load_tile<6>(b + k * kPanel, kPanel);
      load_tile<7>(b + k * kPanel + kTileRows, kPanel);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  static void store_sums(float* c, int64_t stride) {
    store_tile<0>(c, stride);
    store_tile<1>(c + kTileRows, stride);
    store_tile<2>(c + kTileRows * stride, stride);
    store_tile<3>(c + kTileRows * stride + kTileRows, stride);
  }
};
#else
constexpr bool kRowMajorQueries = false;

PAGED_KV_INLINE void begin_tiles() {}
PAGED_KV_INLINE void end_tiles() {}
#endif

// Keys of the list -> [panels][depth][kPanel] floats. Along depth the elements have the order in which T loads.
template <class T>
void pack_keys(const char* keys, const KeyList& list, int size, float* out) {
  const int64_t depth = round_up(size, kPair);
  for (int t = 0; t < list.count; t += kLanes) {
    float* panel = out + t / kPanel * depth * kPanel + t % kPanel;
    for (int d = 0; d < size; d += kPair, panel += kPair * kPanel) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vec x[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const char* p = keys + list.key[t + i] + d * sizeof(T);
          const Pair v = size - d >= kPair ? Elements<T>::load(p) : Elements<T>::load(p, size - d);
          x[i] = half ? v.b : v.a;
        }
        transpose(x);
        for (int i = 0; i < kLanes; ++i) store(panel + (half * kLanes + i) * kPanel, x[i]);
      }
    }
  }
}

// Values of the list -> [panels][keys][kPanel] floats in the order in which T loads.
template <class T>
void pack_values(const char* values, const KeyList& list, int size, float* out) {
  for (int d = 0; d < size; d += kPair)
    for (int t = 0; t < list.count; ++t, out += kPanel) {
      const char* p = values + list.value[t] + d * sizeof(T);
      const Pair v = size - d >= kPair ? Elements<T>::load(p) : Elements<T>::load(p, size - d);
      store(out, v.a);
      store(out + kLanes, v.b);
    }
}

#ifdef __AVX512BF16__
// As pack_keys; a step holds elements 2i and 2i + 1 of a key as a pair of bfloat16.
template <class T>
void pack_keys_bfloat16(const char* keys, const KeyList& list, int size, float* out) {
  const int64_t steps = round_up(size, kPair) / 2;
  for (int t = 0; t < list.count; t += kLanes) {
    float* panel = out + t / kPanel * steps * kPanel + t % kPanel;
    for (int d = 0; d < size; d += kPair, panel += kLanes * kPanel) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load_bfloat16<T>(keys + list.key[t + i] + d * sizeof(T), size - d);
      transpose(x);
      for (int i = 0; i < kLanes; ++i) store(panel + i * kPanel, x[i]);
    }
  }
}

// As pack_values; a step holds keys 2i and 2i + 1 as pairs, even elements first, then odd ones. Zeros fill it up to as
// many steps as are taken at a time.
template <class T>
void pack_values_bfloat16(const char* values, const KeyList& list, int size, float* out) {
  const int padded = int(round_up(list.count, 2 * Product<BFloat16Step>::kSteps));
  for (int d = 0; d < size; d += kPair)
    for (int t = 0; t < padded; t += 2, out += kPanel) {
      const auto load_key = [&](int i) {
        return i < list.count ? load_bfloat16<T>(values + list.value[i] + d * sizeof(T), size - d) : zero();
      };
      const Vec x = load_key(t), y = load_key(t + 1);
      const Pair pairs = pair_rows(x, y);
      store(out, pairs.a);
      store(out + kLanes, pairs.b);
    }
}
#endif

using PackFunction = void (*)(const char* cache, const KeyList& list, int size, float* out);

// While one block is worked on the next is fetched: some lines with each product.
struct Fetch {
  Ahead rows;
  int64_t lines;  // with each product

  Fetch(const Cache& cache, int64_t kv_head, const int64_t* offsets, int count, int64_t products)
      : rows(row_of(cache, 0, 0, kv_head), offsets, count, int(cache.head_size * size_of(cache.dtype))),
        lines(count ? (rows.lines() + products - 1) / products : 0) {}

  PAGED_KV_INLINE void step() {
    for (int64_t i = 0; i < lines; ++i) rows.fetch_line();
  }
};

struct TileKernel {
  const AttentionParams& p;
  const Job& job;
  const int rows;           // of the job, one KV head
  const int padded_rows;    // to whole register blocks
  const bool bfloat16;
  const int key_steps;      // of the score product
  const int64_t width;      // floats of an accumulator row
  float *queries, *keys, *values, *scores, *key_scales, *value_scales;
  KeyList *list, *next;

  // Products in bfloat16 where queries are and where every value of the cache is one.
  static bool uses_bfloat16(const AttentionParams& p) {
    const auto fits = [](DType dtype) { return dtype == DType::bfloat16 || size_of(dtype) == 1; };
    return kHasBFloat16Dot && p.query_dtype == DType::bfloat16 && fits(p.key_cache.dtype) && fits(p.value_cache.dtype);
  }

  TileKernel(const AttentionParams& params, const Job& of, Cutter& cutter)
      : p(params),
        job(of),
        rows(int(of.rows_per_head())),
        padded_rows(int(round_up(rows, kMicroRows))),
        bfloat16(uses_bfloat16(params)),
        key_steps(int(round_up(params.key_cache.head_size, kPair)) / (bfloat16 ? 2 : 1)),
        width(round_up(params.value_cache.head_size, kPair)) {
    queries = cutter.take<float>(int64_t(padded_rows) * key_steps);
    keys = cutter.take<float>(int64_t(kBlockKeys) * key_steps);
    values = cutter.take<float>(kBlockKeys * width / (bfloat16 ? 2 : 1));
    scores = cutter.take<float>(kStripRows * kBlockKeys);
    key_scales = cutter.take<float>(kBlockKeys);
    value_scales = cutter.take<float>(kBlockKeys);
    list = cutter.take<KeyList>(1);
    next = cutter.take<KeyList>(1);
  }

  PackFunction key_packer() const {
    return with_type(p.key_cache.dtype, [&](auto type) -> PackFunction {
      using T = typename decltype(type)::type;
#ifdef __AVX512BF16__
      if (bfloat16) return pack_keys_bfloat16<T>;
#endif
      return pack_keys<T>;
    });
  }

  PackFunction value_packer() const {
    return with_type(p.value_cache.dtype, [&](auto type) -> PackFunction {
      using T = typename decltype(type)::type;
#ifdef __AVX512BF16__
      if (bfloat16) return pack_values_bfloat16<T>;
#endif
      return pack_values<T>;
    });
  }

  int64_t head_of(int row) const {
    return job.kv_head_begin * (p.num_heads / p.num_kv_heads) + job.group_begin + row % job.group();
  }
  int64_t query_of(int row) const { return row / job.group(); }

  // Queries as Product wants them; `row_buffer` holds one row.
  void pack_queries(float* row_buffer) const {
    constexpr int kStride = kRowMajorQueries ? 1 : kMicroRows;
    for (int r = 0; r < padded_rows; ++r) {
      const int64_t block = r / kMicroRows, row = r % kMicroRows;
      float* out = queries + block * key_steps * kMicroRows + (kRowMajorQueries ? row * key_steps : row);
      if (r < rows) load_row(job.query_begin + query_of(r), head_of(r), row_buffer);
      for (int k = 0; k < key_steps; ++k) out[k * kStride] = r < rows ? row_buffer[k] : 0.0f;
    }
  }

  void load_row(int64_t token, int64_t head, float* out) const {
    if (!bfloat16) return load_query(p, token, head, loads_interleaved(p.key_cache.dtype), out);
    const int64_t bytes = 2 * p.key_cache.head_size;
    __builtin_memcpy(out, query_row(p, token, head), bytes);
    __builtin_memset(reinterpret_cast<char*>(out) + bytes, 0, key_steps * 4 - bytes);
  }

  template <class Step>
  void score_strip(int first, int last, LocalRange panels, Fetch& fetch) const {
    for (int panel = panels.begin; panel < panels.end; ++panel)
      for (int r = first; r < last; r += kMicroRows) {
        fetch.step();
        Product<Step>::score(queries + int64_t(r) * key_steps, keys + int64_t(panel) * key_steps * kPanel, key_steps,
                             scores + (r - first) * kBlockKeys + panel * kPanel);
      }
  }

  template <class Step>
  void value_strip(int first, int last, LocalRange entries, const State& state, Fetch& fetch) const {
    constexpr int kKeys = Step::kDepth * Product<Step>::kSteps;  // are added at a time
    const int steps = int(round_up(list->count, kKeys)) / Step::kDepth;
    const int begin = entries.begin / kKeys * Product<Step>::kSteps;
    const int end = int(round_up(entries.end, kKeys)) / Step::kDepth;
    for (int64_t d = 0; d < width; d += kPanel)
      for (int r = first; r < last; r += kMicroRows) {
        fetch.step();
        Product<Step>::add_values(scores + (r - first) * kBlockKeys + begin, values + (d * steps + begin * kPanel),
                                  end - begin, state.accumulator + r * width + d, width);
      }
  }

  // scores -> weights for rows first .. last - 1, entries `span` of the list (whole vectors).
  void absorb_strip(int first, int last, LocalRange span, const State& state) const {
    const float scale = p.scale * head_scale(p.key_cache.scale, job.kv_head_begin) * load_factor(p.key_cache.dtype);
    const bool features = has_features(p), key_slots = p.key_cache.scale.kind == ScaleKind::per_slot;
    const bool value_slots = p.value_cache.scale.kind == ScaleKind::per_slot;
    const int count = span.end - span.begin;
    for (int row = first; row < last; ++row) {
      float* all = scores + (row - first) * kBlockKeys;
      float* s = all + span.begin;
      const LocalRange visible = visible_entries(p, job, *list, query_of(row));
      if (key_slots) multiply(s, key_scales + span.begin, count);
      if (features) apply_features(p, job, job.query_begin + query_of(row), head_of(row), scale, *list, all);
      const float correction = absorb(s, count, {visible.begin - span.begin, visible.end - span.begin},
                                      features ? 1.0f : scale, state.max + row, state.sum + row * kLanes);
      if (correction != 1.0f) rescale(state.accumulator + row * width, width, correction);
      if (value_slots) multiply(s, value_scales + span.begin, count);
      if (bfloat16) round_weights(all, span);
    }
  }

  // Weights -> bfloat16, in place: entry i then lies at 16-bit index i of the row.
  void round_weights(float* row, LocalRange span) const {
#ifdef __AVX512BF16__
    for (int i = span.begin; i < span.end; i += kPair) {
      const Pair x = {load(row + i), load(row + i + kLanes)};
      store(row + i / 2, to_bfloat16(x));
    }
#else
    (void)row, (void)span;
#endif
  }

  // Entries that any row of the strip sees.
  LocalRange strip_entries(int first, int last) const {
    const LocalRange a = visible_entries(p, job, *list, query_of(first));
    const LocalRange b = visible_entries(p, job, *list, query_of(last - 1));
    return {a.begin, b.end};
  }

  template <class Step>
  void attend_strip(int first, int last, const State& state, Fetch& fetch_keys, Fetch& fetch_values) const {
    const LocalRange entries = strip_entries(first, last);
    if (entries.begin >= entries.end) return;
    const int padded_last = int(round_up(last, kMicroRows));
    const LocalRange panels = {entries.begin / kPanel, (entries.end + kPanel - 1) / kPanel};
    const LocalRange span = {panels.begin * kPanel, panels.end * kPanel};
    score_strip<Step>(first, padded_last, panels, fetch_keys);
    absorb_strip(first, last, span, state);
    for (int row = last; row < padded_last; ++row) clear_row(scores + (row - first) * kBlockKeys);
    value_strip<Step>(first, padded_last, entries, state, fetch_values);
  }

  static void clear_row(float* row) {
    for (int i = 0; i < kBlockKeys; i += kLanes) store(row + i, zero());
  }

  void pack_list(PackFunction pack_k, PackFunction pack_v) const {
    const int64_t h = job.kv_head_begin;
    const int padded = int(round_up(list->count, kLanes));
    pack_k(row_of(p.key_cache, 0, 0, h), *list, int(p.key_cache.head_size), keys);
    pack_v(row_of(p.value_cache, 0, 0, h), *list, int(p.value_cache.head_size), values);
    if (p.key_cache.scale.kind == ScaleKind::per_slot)
      gather_scales(p.key_cache.scale, list->key_scale, padded, h, 1.0f, key_scales);
    if (p.value_cache.scale.kind == ScaleKind::per_slot)
      gather_scales(p.value_cache.scale, list->value_scale, padded, h, 1.0f, value_scales);
  }

  void attend_block(const State& state) const {
    const int64_t row_blocks = padded_rows / kMicroRows, h = job.kv_head_begin;
    Fetch fetch_keys(p.key_cache, h, next->key, next->count, row_blocks * (kBlockKeys / kPanel));
    Fetch fetch_values(p.value_cache, h, next->value, next->count, row_blocks * (width / kPanel));
    for (int first = 0; first < rows; first += kStripRows) {
      const int last = first + kStripRows < rows ? first + kStripRows : rows;
#ifdef __AVX512BF16__
      if (bfloat16) {
        attend_strip<BFloat16Step>(first, last, state, fetch_keys, fetch_values);
        continue;
      }
#endif
#ifndef __AMX_BF16__
      attend_strip<FloatStep>(first, last, state, fetch_keys, fetch_values);
#endif
    }
  }

  // The state must have room for padded_rows.
  void attend(KeyRange range, const State& state) {
    const PackFunction pack_k = key_packer(), pack_v = value_packer();
    KeyCursor cursor{range.begin, range.end};
    pack_queries(scores);
    begin_tiles();
    next_keys(p, job, cursor, kBlockKeys, kPanel, *list);
    while (list->count > 0) {
      next_keys(p, job, cursor, kBlockKeys, kPanel, *next);
      pack_list(pack_k, pack_v);
      attend_block(state);
      KeyList* done = list;
      list = next;
      next = done;
    }
    end_tiles();
  }
};

}  // namespace
}  // namespace paged_kv::cpu
