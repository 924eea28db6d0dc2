// The instructions that the tensor-core kernels are made of, all of them there from sm_80 on, and the layout of tiles.
#pragma once

#include "device.cuh"

namespace paged_kv::cuda::mma {

__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Keys and values are read once a step: they shall leave the L2 before anything else does.
__device__ inline uint64_t streaming_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// 16 bytes global -> shared; zeros if !valid (nothing is read then).
__device__ inline void copy_async(uint32_t target, const void* source, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
               "r"(valid ? 16 : 0), "l"(policy));
}

// The same for what others will read soon: without a word about the L2.
__device__ inline void copy_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid ? 16 : 0));
}

// 4 bytes likewise.
__device__ inline void copy_word_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid ? 4 : 0));
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where 16-byte chunk `chunk` of row `row` of a tile lies in shared memory: chunks of a row are permuted by the row's
// number, so that one column's chunks of eight rows lie in different banks. With row = a + b where a and b have no bits
// in common, and chunk = c + d likewise, this is (swizzled(a, c) ^ swizzle(b) ^ (d % 8 << 4)) + the rest of b and d:
// addresses are one exclusive or away from a lane's own constant. Stages are aligned, so their address may be added
// first.
template <int kRowBytes>
__host__ __device__ constexpr uint32_t swizzle(int row) {
  return uint32_t(kRowBytes >= 128 ? row & 7 : row >> 1 & 3) << 4;
}

template <int kRowBytes>
__host__ __device__ constexpr uint32_t swizzled(int row, int chunk) {
  return uint32_t(row * kRowBytes + (chunk << 4)) ^ swizzle<kRowBytes>(row);
}

struct Fragment {
  uint32_t data[4];
};

__device__ inline Fragment load_matrices(uint32_t address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.data[0]), "=r"(f.data[1]), "=r"(f.data[2]), "=r"(f.data[3])
               : "r"(address)
               : "memory");
  return f;
}

__device__ inline Fragment load_matrices_transposed(uint32_t address) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.data[0]), "=r"(f.data[1]), "=r"(f.data[2]), "=r"(f.data[3])
               : "r"(address)
               : "memory");
  return f;
}

__device__ inline uint32_t transpose_matrix(uint32_t value) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// c[16 x 8] += a[16 x 16] b[16 x 8]
__device__ inline void multiply(float (&c)[4], const Fragment& a, const uint32_t (&b)[2], BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.data[0]), "r"(a.data[1]), "r"(a.data[2]), "r"(a.data[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void multiply(float (&c)[4], const Fragment& a, const uint32_t (&b)[2], Float16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.data[0]), "r"(a.data[1]), "r"(a.data[2]), "r"(a.data[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t pack(float low, float high, BFloat16) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ inline uint32_t pack(float low, float high, Float16) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float fast_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

}  // namespace paged_kv::cuda::mma
