// Rows of a job: loading queries, partial states, merging them and writing the output. Shared by both kernels.
#pragma once

#include "attention_policy.h"
#include "attention_softmax.h"

namespace paged_kv::cpu {
namespace {

template <class T>
struct Type {
  using type = T;
};

template <class F>
PAGED_KV_INLINE auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::float32: return f(Type<float>{});
    case DType::float16: return f(Type<Float16>{});
    case DType::bfloat16: return f(Type<BFloat16>{});
    case DType::float8_e4m3fn: return f(Type<Float8E4M3>{});
    case DType::float8_e5m2: return f(Type<Float8E5M2>{});
    default: return f(Type<int8_t>{});
  }
}

// The dtypes of queries and outputs.
template <class F>
PAGED_KV_INLINE auto with_query_type(DType dtype, F f) {
  switch (dtype) {
    case DType::float32: return f(Type<float>{});
    case DType::float16: return f(Type<Float16>{});
    default: return f(Type<BFloat16>{});
  }
}

PAGED_KV_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool loads_interleaved(DType dtype) { return dtype == DType::bfloat16 && Elements<BFloat16>::kInterleaved; }

float load_factor(DType dtype) { return dtype == DType::float8_e4m3fn ? Elements<Float8E4M3>::kFactor : 1.0f; }

// Fetches rows of the cache that are wanted soon, line by line in their order, a few lines with every step of the work:
// in a burst they would wait for each other, in another order the memory would.
struct Ahead {
  const char* rows;
  const int64_t* offset;
  const int64_t* end;
  int bytes;  // of a row
  const char* line;
  const char* row_end;

  Ahead(const char* of, const int64_t* offsets, int count, int row_bytes)
      : rows(of),
        offset(offsets),
        end(offsets + count),
        bytes(row_bytes),
        line(count ? of + *offsets : of),
        row_end(line + row_bytes) {}

  PAGED_KV_INLINE void fetch_line() {
    __builtin_prefetch(line);
    line += 64;
    if (line >= row_end) next_row();
  }

  PAGED_KV_INLINE void next_row() {
    if (offset + 1 < end) ++offset;
    line = rows + *offset;
    row_end = line + bytes;
  }

  // As many lines as `kBytes` at byte `from` of a row begin.
  template <int kBytes>
  PAGED_KV_INLINE void fetch(int from) {
    if (kBytes >= 64 || from % 64 == 0)
#pragma GCC unroll 4
      for (int byte = 0; byte < kBytes; byte += 64) fetch_line();
  }

  PAGED_KV_INLINE void fetch_rest() {
    while (offset + 1 < end) fetch_line();
  }

  int64_t lines() const { return (end - offset) * ((bytes + 63) / 64); }
};

// Cuts aligned arrays from a piece of memory; started from null it measures instead.
struct Cutter {
  char* next;

  template <class T>
  T* take(int64_t count) {
    char* taken = next;
    next += round_up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(taken);
  }
};

// The running softmax of some rows. The accumulators keep the order in which the values' dtype loads.
struct State {
  float* accumulator;  // [rows, width]
  float* sum;          // [rows, kLanes]
  float* max;          // [rows]

  State(Cutter& cutter, int64_t rows, int64_t width)
      : accumulator(cutter.take<float>(rows * width)),
        sum(cutter.take<float>(rows * kLanes)),
        max(cutter.take<float>(rows)) {}

  void clear(int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows * width; i += kLanes) store(accumulator + i, zero());
    for (int64_t i = 0; i < rows; ++i) {
      store(sum + i * kLanes, zero());
      max[i] = -kInfinity;
    }
  }
};

int64_t state_bytes(int64_t rows, int64_t width) {
  Cutter cutter{nullptr};
  State(cutter, rows, width);
  return cutter.next - static_cast<char*>(nullptr);
}

// Folds the state of later keys into that of earlier ones.
void merge_states(const State& into, const State& from, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    const float max = into.max[i] > from.max[i] ? into.max[i] : from.max[i];
    if (max == -kInfinity) continue;
    const Vec a = set1(exp(into.max[i] - max)), b = set1(exp(from.max[i] - max));
    float* x = into.accumulator + i * width;
    const float* y = from.accumulator + i * width;
    for (int64_t j = 0; j < width; j += kLanes) store(x + j, fma(load(y + j), b, mul(load(x + j), a)));
    float* sum = into.sum + i * kLanes;
    store(sum, fma(load(from.sum + i * kLanes), b, mul(load(sum), a)));
    into.max[i] = max;
  }
}

// One query row as floats [round_up(head_size, kPair)], in the order in which `interleaved` keys load.
template <class T>
void load_query(const void* row, int64_t size, bool interleaved, float* out) {
  for (int64_t d = 0; d < size; d += kPair) {
    const void* p = static_cast<const T*>(row) + d;
    Pair x = size - d >= kPair ? Elements<T>::load(p) : Elements<T>::load(p, int(size - d));
    if (Elements<T>::kInterleaved && !interleaved) x = interleave(x);
    if (!Elements<T>::kInterleaved && interleaved) x = deinterleave(x);
    store(out + d, x.a);
    store(out + d + kLanes, x.b);
  }
}

PAGED_KV_INLINE const char* query_row(const AttentionParams& p, int64_t token, int64_t head) {
  const int64_t at = token * p.query_token_stride + head * p.query_head_stride;
  return static_cast<const char*>(p.query) + at * size_of(p.query_dtype);
}

void load_query(const AttentionParams& p, int64_t token, int64_t head, bool interleaved, float* out) {
  with_query_type(p.query_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    load_query<T>(query_row(p, token, head), p.key_cache.head_size, interleaved, out);
  });
}

// The row's accumulator times `factor` -> output row. False if a value is not finite.
template <class T>
bool store_output(const float* accumulator, int64_t size, bool interleaved, float factor, T* out) {
  const Vec f = set1(factor);
  bool finite = true;
  for (int64_t d = 0; d < size; d += kPair) {
    Pair x = {mul(load(accumulator + d), f), mul(load(accumulator + d + kLanes), f)};
    finite = finite && all_finite(x.a) && all_finite(x.b);
    if (interleaved) x = interleave(x);
    Stored<T>::store(out + d, x, int(size - d < kPair ? size - d : kPair));
  }
  return finite;
}

// Final combine of one row: normalise, add the sink, write out and lse. `value_scale` is the KV head's.
bool finish_row(const AttentionParams& p, const State& state, int64_t row, int64_t width, bool interleaved,
                int64_t token, int64_t head, float value_scale) {
  float sum = reduce_sum(load(state.sum + row * kLanes));
  const float max = state.max[row];
  const bool empty = sum == 0.0f;
  const int64_t out_row = token * p.num_heads + head;
  if (p.lse) p.lse[out_row] = empty ? -kInfinity : max + __builtin_logf(sum);
  float factor = empty ? 0.0f : value_scale / sum;
  if (p.sinks && !empty) {
    const float sink = p.sinks[head], top = sink > max ? sink : max;
    sum = sum * exp(max - top) + exp(sink - top);
    factor = value_scale * exp(max - top) / sum;
  }
  const float* accumulator = state.accumulator + row * width;
  return with_query_type(p.query_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* out = static_cast<T*>(p.out) + out_row * p.value_cache.head_size;
    return store_output<T>(accumulator, p.value_cache.head_size, interleaved, factor, out);
  });
}

}  // namespace
}  // namespace paged_kv::cpu
