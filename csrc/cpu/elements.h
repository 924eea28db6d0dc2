// From run-time dtypes to loops over typed rows. A row is one head of one token: contiguous elements.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../common/float8.h"
#include "../params.h"
#include "row_kernels.h"

namespace paged_kv::cpu {

[[noreturn]] inline void fail_dtype(const char* rule, DType dtype) {
  throw std::invalid_argument(std::string("dtype must be ") + rule + ", got code " + std::to_string(int(dtype)));
}

// Calls visit with a value of the element type of `dtype`, one that models compute in.
template <class Visit>
auto visit_float(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(float{});
    case DType::float16: return visit(Float16{});
    case DType::bfloat16: return visit(BFloat16{});
    default: fail_dtype("float32, float16 or bfloat16", dtype);
  }
}

// Elements of kBytes bytes as they are; the scale is none.
template <int64_t kBytes>
void copy_row(const void* source, void* destination, int64_t size, float) {
  std::memcpy(destination, source, size_t(size * kBytes));
}

inline RowFunction copy_row_of(DType dtype) {
  return size_of(dtype) == 4 ? copy_row<4> : size_of(dtype) == 2 ? copy_row<2> : copy_row<1>;
}

}  // namespace paged_kv::cpu
