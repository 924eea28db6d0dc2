// The AMX tiles: eight registers of 16 rows of 64 bytes. Everything goes through assembly of our own, since compilers'
// intrinsics do not tell that they touch memory. Internal linkage, as in the simd_<isa>.h headers.
#pragma once

#include "attention_plan.h"

namespace paged_kv::cpu {
namespace {

constexpr int kTileRows = 16;

// Tiles hold nothing until they have a shape; every thread has its own.
PAGED_KV_INLINE void begin_tiles() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shape = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  static_assert(sizeof shape == 64, "what ldtilecfg reads");
  asm volatile("ldtilecfg %0" : : "m"(shape));
}

PAGED_KV_INLINE void end_tiles() { asm volatile("tilerelease"); }

template <int kTile>
PAGED_KV_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
PAGED_KV_INLINE void load_tile(const float* p, int64_t row_floats) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(row_floats * 4), "i"(kTile) : "memory");
}

template <int kTile>
PAGED_KV_INLINE void store_tile(float* p, int64_t row_floats) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(row_floats * 4), "i"(kTile) : "memory");
}

// sum[m][n] += a[m][k] . b[k][n] over k, where elements of a and b are pairs of bfloat16.
template <int kSum, int kA, int kB>
PAGED_KV_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace paged_kv::cpu
