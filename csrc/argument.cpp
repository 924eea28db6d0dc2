#include "argument.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdio>
#include <stdexcept>

namespace paged_kv {

void fail(const std::string& argument, const std::string& rule, const std::string& value) {
  throw std::invalid_argument(argument + " must " + rule + ", got " + value);
}

std::string text(int64_t value) { return std::to_string(value); }

std::string text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return buffer;
}

std::string text(const int64_t* values, int64_t count) {
  std::string list = "[";
  for (int64_t i = 0; i < count; ++i) list += (i == 0 ? "" : ", ") + text(values[i]);
  return list + "]";
}

// ---- devices ----

bool Device::is_cpu() const { return *this == cpu_device(); }

Device cpu_device() {
  static const int32_t type = aoti_torch_device_type_cpu();
  return {type, 0};
}

static std::string text(const Device& device) {
  if (device.is_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return "cuda:" + text(int64_t{device.index});
  return device.type == aoti_torch_device_type_meta() ? "meta" : "device type " + text(int64_t{device.type});
}

void require_device(const Argument& argument, const Device& device) {
  if (!(argument.device == device)) fail(argument.full_name(), "be on " + text(device), text(argument.device));
}

// ---- reading a tensor ----

Argument::Argument(const char* name, const Tensor& tensor, Access access, int64_t position)
    : name(name), tensor(&tensor), position(position) {
  AtenTensorHandle handle = tensor.get();
  int64_t* raw_sizes = nullptr;
  int64_t* raw_strides = nullptr;
  const void* const_data = nullptr;
  const bool failed = aoti_torch_get_dim(handle, &dim) || aoti_torch_get_sizes(handle, &raw_sizes) ||
                      aoti_torch_get_strides(handle, &raw_strides) || aoti_torch_get_dtype(handle, &dtype) ||
                      aoti_torch_get_device_type(handle, &device.type) ||
                      aoti_torch_get_device_index(handle, &device.index) ||
                      (access == Access::write ? torch_get_mutable_data_ptr(handle, &data)
                                               : torch_get_const_data_ptr(handle, &const_data));
  if (failed) fail(full_name(), "be a dense tensor", "one without sizes, strides or data");
  if (access == Access::read) data = const_cast<void*>(const_data);
  sizes = raw_sizes;
  strides = raw_strides;
  if (device.type == cpu_device().type) device.index = 0;  // a CPU tensor's is 0 or -1
}

std::string Argument::full_name() const {
  return position < 0 ? std::string(name) : std::string(name) + "[" + text(position) + "]";
}

int64_t Argument::numel() const {
  int64_t count = 1;
  for (int64_t d = 0; d < dim; ++d) count *= sizes[d];
  return count;
}

// ---- dtypes ----

namespace {

struct DTypeEntry {
  int32_t code;
  const char* name;
  std::optional<DType> dtype;
};

const DTypeEntry* find_dtype(int32_t code) {
  static const DTypeEntry table[] = {
      {aoti_torch_dtype_float32(), "float32", DType::float32},
      {aoti_torch_dtype_bfloat16(), "bfloat16", DType::bfloat16},
      {aoti_torch_dtype_float16(), "float16", DType::float16},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn", DType::float8_e4m3fn},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2", DType::float8_e5m2},
      {aoti_torch_dtype_int8(), "int8", DType::int8},
      {aoti_torch_dtype_int16(), "int16", {}},
      {aoti_torch_dtype_int32(), "int32", {}},
      {aoti_torch_dtype_int64(), "int64", {}},
      {aoti_torch_dtype_uint8(), "uint8", {}},
      {aoti_torch_dtype_bool(), "bool", {}},
      {aoti_torch_dtype_float64(), "float64", {}},
      {aoti_torch_dtype_complex64(), "complex64", {}},
      {aoti_torch_dtype_complex128(), "complex128", {}},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz", {}},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz", {}},
  };
  for (const DTypeEntry& entry : table) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
}

}  // namespace

std::optional<DType> kernel_dtype(int32_t code) {
  const DTypeEntry* entry = find_dtype(code);
  return entry == nullptr ? std::nullopt : entry->dtype;
}

std::string dtype_name(int32_t code) {
  const DTypeEntry* entry = find_dtype(code);
  return entry == nullptr ? "dtype number " + text(int64_t{code}) : entry->name;
}

void require_dtype(const Argument& argument, int32_t code) {
  if (argument.dtype != code) fail(argument.full_name(), "have dtype " + dtype_name(code), dtype_name(argument.dtype));
}

void require_int32(const Argument& argument) {
  static const int32_t code = aoti_torch_dtype_int32();
  require_dtype(argument, code);
}

void require_int64(const Argument& argument) {
  static const int32_t code = aoti_torch_dtype_int64();
  require_dtype(argument, code);
}

void require_float32(const Argument& argument) {
  static const int32_t code = aoti_torch_dtype_float32();
  require_dtype(argument, code);
}

bool is_bool(const Argument& argument) {
  static const int32_t code = aoti_torch_dtype_bool();
  return argument.dtype == code;
}

DType require_float_dtype(const Argument& argument) {
  const std::optional<DType> dtype = kernel_dtype(argument.dtype);
  if (!dtype || size_of(*dtype) == 1)
    fail(argument.full_name(), "have dtype float32, float16 or bfloat16", dtype_name(argument.dtype));
  return *dtype;
}

DType require_cache_dtype(const Argument& argument) {
  const std::optional<DType> dtype = kernel_dtype(argument.dtype);
  if (!dtype)
    fail(argument.full_name(), "have dtype float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8",
         dtype_name(argument.dtype));
  return *dtype;
}

// ---- shapes ----

static std::string text(const std::initializer_list<Dim>& dims) {
  std::string list = "[";
  for (const Dim& dim : dims) {
    if (&dim != dims.begin()) list += ", ";
    list += dim.name;
    if (dim.size != kAny) list += (*dim.name == '\0' ? "" : "=") + text(dim.size);
  }
  return list + "]";
}

bool has_shape(const Argument& argument, std::initializer_list<Dim> dims) {
  if (argument.dim != static_cast<int64_t>(dims.size())) return false;
  const int64_t* size = argument.sizes;
  for (const Dim& dim : dims) {
    if (dim.size != kAny && *size != dim.size) return false;
    ++size;
  }
  return true;
}

void require_shape(const Argument& argument, std::initializer_list<Dim> dims) {
  if (!has_shape(argument, dims)) fail(argument.full_name(), "have shape " + text(dims), argument.shape());
}

void require_token_rows(const Argument& argument, Dim num_tokens, Dim heads, Dim size) {
  if (argument.dim != 4) return require_shape(argument, {num_tokens, heads, size});
  require_shape(argument, {{"num_seqs", num_tokens.size}, heads, {"", 1}, size});
}

void require_dim_within(const Argument& argument, const char* dim_name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail(argument.full_name(), std::string("have ") + dim_name + " in " + text(least) + " .. " + text(most),
         text(value));
}

void require_vector(const Argument& argument, const Device& device, Dim dim) {
  require_device(argument, device);
  require_shape(argument, {dim});
  require_contiguous(argument);
}

// ---- strides ----

static void fail_strides(const Argument& argument, const char* rule) {
  fail(argument.full_name(), rule, "strides " + text(argument.strides, argument.dim));
}

void require_contiguous(const Argument& argument) {
  int64_t expected = 1;
  for (int64_t d = argument.dim - 1; d >= 0; --d) {
    if (argument.sizes[d] == 0) return;
    if (argument.sizes[d] != 1 && argument.strides[d] != expected) fail_strides(argument, "be contiguous");
    expected *= argument.sizes[d];
  }
}

void require_last_dim_contiguous(const Argument& argument) {
  const int64_t last = argument.dim - 1;
  if (argument.sizes[last] > 1 && argument.strides[last] != 1)
    fail_strides(argument, "have a contiguous last dimension");
}

// From the smallest stride to the largest, each dimension must step over all that the earlier ones span.
void require_no_overlap(const Argument& argument) {
  constexpr int64_t kMaxDims = 16;
  if (argument.numel() == 0) return;
  if (argument.dim > kMaxDims) fail(argument.full_name(), "have at most 16 dimensions", text(argument.dim));
  int64_t order[kMaxDims];  // dimensions of more than one element, by stride
  int64_t count = 0;
  for (int64_t d = 0; d < argument.dim; ++d) {
    if (argument.sizes[d] == 1) continue;
    int64_t at = count++;
    for (; at > 0 && argument.strides[order[at - 1]] > argument.strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t span = 1;  // elements from the first index to the last
  for (int64_t i = 0; i < count; ++i) {
    if (argument.strides[order[i]] < span) fail_strides(argument, "not overlap itself");
    span += (argument.sizes[order[i]] - 1) * argument.strides[order[i]];
  }
}

// ---- numbers ----

void require_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) fail(name, "be >= " + text(least), text(value));
}

void require_within(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) fail(name, "be in " + text(least) + " .. " + text(most), text(value));
}

}  // namespace paged_kv
