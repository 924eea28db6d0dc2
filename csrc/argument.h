// A tensor argument as the checks see it, and the rules that any argument may have to keep. A broken rule throws
// std::invalid_argument (Python: ValueError) that reads "<argument> must <rule>, got <value>"; messages are built only then.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "params.h"

namespace paged_kv {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

[[noreturn]] void fail(const std::string& argument, const std::string& rule, const std::string& value);

std::string text(int64_t value);
std::string text(double value);
std::string text(const int64_t* values, int64_t count);  // "[1, 2]"

struct Device {
  int32_t type, index;  // libtorch's numbers; the index of the CPU is 0
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool is_cpu() const;
};

Device cpu_device();

enum class Access { read, write };

struct Argument {
  const char* name;
  const Tensor* tensor;
  int64_t position;  // in a list of tensors, else -1
  void* data = nullptr;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int32_t dtype = 0;  // libtorch's number
  Device device = {};

  Argument(const char* name, const Tensor& tensor, Access access = Access::read, int64_t position = -1);

  std::string full_name() const;
  std::string shape() const { return text(sizes, dim); }
  int64_t numel() const;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// ---- dtypes ----

std::optional<DType> kernel_dtype(int32_t code);  // what kernels call libtorch's dtype `code`, if they know it
std::string dtype_name(int32_t code);
bool is_bool(const Argument& argument);

void require_dtype(const Argument& argument, int32_t code);
void require_int32(const Argument& argument);
void require_int64(const Argument& argument);
void require_float32(const Argument& argument);
DType require_float_dtype(const Argument& argument);  // one that models compute in
DType require_cache_dtype(const Argument& argument);

// ---- shapes and strides ----

constexpr int64_t kAny = -1;

struct Dim {
  const char* name;
  int64_t size = kAny;  // what it must be
};

bool has_shape(const Argument& argument, std::initializer_list<Dim> dims);
void require_shape(const Argument& argument, std::initializer_list<Dim> dims);
void require_dim_within(const Argument& argument, const char* dim_name, int64_t value, int64_t least, int64_t most);

void require_device(const Argument& argument, const Device& device);
void require_contiguous(const Argument& argument);
void require_last_dim_contiguous(const Argument& argument);
void require_no_overlap(const Argument& argument);  // of a tensor that is written: no two indices name one element

// Rows of tokens: [num_tokens, heads, size], or, one token of each sequence as models have them, [num_seqs, heads, 1,
// size]. Either way a token is one step of dimension 0, a head one of dimension 1.
void require_token_rows(const Argument& argument, Dim num_tokens, Dim heads, Dim size);

// An index or per-head vector: one dimension, contiguous, on the device of the call.
void require_vector(const Argument& argument, const Device& device, Dim dim);

// ---- numbers ----

void require_at_least(const char* name, int64_t value, int64_t least);
void require_within(const char* name, int64_t value, int64_t least, int64_t most);

}  // namespace paged_kv
