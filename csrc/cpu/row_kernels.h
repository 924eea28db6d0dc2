// Loops over one row (one head of one token: contiguous elements) that cast and scale, compiled once per instruction
// set. No torch, no std.
#pragma once

#include <cstdint>

#include "../params.h"

namespace paged_kv::cpu {

using RowFunction = void (*)(const void* source, void* destination, int64_t size, float scale);
using BlendFunction = void (*)(const void* a, const void* b, void* out, int64_t size, float weight_a, float weight_b);
using AbsmaxFunction = float (*)(const void* row, int64_t size);

// Null where a function does not exist for a dtype.
struct RowKernels {
  RowFunction (*divide)(DType from, DType to);    // destination = source / scale, from what models compute in
  RowFunction (*multiply)(DType from, DType to);  // destination = source * scale, to what models compute in
  BlendFunction (*blend)(DType dtype);            // out = weight_a * a + weight_b * b, of what models compute in
  AbsmaxFunction (*absmax)(DType from);  // NaN counts as 0 and infinity as the largest float, so that neither takes
                                         // the other elements of its row with it
};

extern const RowKernels kRowsGeneric, kRowsAvx2, kRowsAvx512;

const RowKernels& row_kernels();  // those of this machine

}  // namespace paged_kv::cpu
