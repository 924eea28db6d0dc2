// Elements of a cache as operands of the matrix instruction. 16-bit elements are operands as they are; 8-bit ones become
// float16 in registers, which holds each of their values exactly.
#pragma once

#include "mma_instructions.cuh"

namespace paged_kv::cuda::mma {

__device__ inline bool has_slot_scales(const Cache& cache) { return cache.scale.kind == ScaleKind::per_slot; }

// The scale that all slots of a head share; 1 where each has its own.
__device__ inline float static_scale(const Cache& cache, int32_t kv_head) {
  if (cache.scale.kind == ScaleKind::none || has_slot_scales(cache)) return 1.0f;
  return cache.scale.data[kv_head * cache.scale.head_stride];
}

template <class T>
struct SixteenBit {
  using Operand = T;
  static constexpr int kBytes = 2;
};

__device__ inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// Each has expand<a, b, c, d>(word, first, second): bytes a and b of a word, and c and d, as two float16s each.
struct E4M3 {
  using Operand = Float16;
  static constexpr int kBytes = 1;

  template <int a, int b, int c, int d>
  __device__ static void expand(uint32_t word, uint32_t& first, uint32_t& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    constexpr uint32_t kOrder = d << 12 | c << 8 | b << 4 | a;
    const uint32_t ordered = kOrder == 0x3210 ? word : permute_bytes(word, 0, kOrder);
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
        : "=r"(first), "=r"(second)
        : "r"(ordered));
#else
    __trap();  // the host takes another kernel
#endif
  }
};

struct E5M2 {  // the upper byte of a float16
  using Operand = Float16;
  static constexpr int kBytes = 1;

  template <int a, int b, int c, int d>
  __device__ static void expand(uint32_t word, uint32_t& first, uint32_t& second) {
    first = permute_bytes(word, 0, b << 12 | 4 << 8 | a << 4 | 4);
    second = permute_bytes(word, 0, d << 12 | 4 << 8 | c << 4 | 4);
  }
};

struct Int8 {
  using Operand = Float16;
  static constexpr int kBytes = 1;

  template <int a, int b, int c, int d>
  __device__ static void expand(uint32_t word, uint32_t& first, uint32_t& second) {
    const uint32_t raised = word ^ 0x80808080u;  // value + 128
    first = subtract(permute_bytes(raised, 0x64646464u, 4 << 12 | b << 8 | 4 << 4 | a));
    second = subtract(permute_bytes(raised, 0x64646464u, 4 << 12 | d << 8 | 4 << 4 | c));
  }

 private:
  // 0x6400 + n is 1024 + n for n below 1024.
  __device__ static uint32_t subtract(uint32_t halves) {
    uint32_t result;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(halves), "r"(0x64806480u));
    return result;
  }
};

}  // namespace paged_kv::cuda::mma
