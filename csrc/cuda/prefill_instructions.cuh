// The instructions that the Hopper prefill kernel is made of: barriers in shared memory, bulk tensor copies, products of a
// warpgroup (wgmma). All of them belong to sm_90a.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "mma_instructions.cuh"

namespace paged_kv::cuda::prefill {

// ---- Barriers in shared memory: a phase ends when all arrivals and all announced bytes are there ----

__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline bool phase_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 10000000;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  while (!phase_ended(barrier, parity)) {
  }
}

// Ordinary writes to shared memory before it are seen by the copy engine and by wgmma after it.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Named barriers of the thread block ----

__device__ inline void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void arrive_named(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Copies ----

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// One box of a pool [blocks, heads, slots, dims]; zeros where it lies outside.
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int dim, int slot, int head,
                                int block) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(dim), "r"(slot), "r"(head), "r"(block)
      : "memory");
}

// ---- Registers of a warpgroup ----

template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Products of a warpgroup ----

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers that a product still reads or writes.
template <class Register, int kCount>
__device__ void pin(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(Register) == 4 && std::is_same<Register, float>::value) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// Describes an operand in shared memory, its rows 128 bytes with the chunks of 16 bytes permuted by row % 8.
// Rows along the operand's outer side (Q, K): eight rows are `group_bytes` apart. Rows along the summed side (V): eight
// rows are group_bytes apart, and the next 64 columns panel_bytes.
__device__ constexpr uint64_t operand(uint32_t group_bytes, uint32_t panel_bytes) {
  return uint64_t(1) << 62 | uint64_t(group_bytes >> 4) << 32 | uint64_t(panel_bytes >> 4) << 16;
}

__device__ inline uint64_t at(uint64_t operand, uint32_t address) {
  return operand | uint64_t((address & 0x3ffff) >> 4);
}

#define PAGED_KV_8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PAGED_KV_32(d, i) PAGED_KV_8(d, i), PAGED_KV_8(d, i + 8), PAGED_KV_8(d, i + 16), PAGED_KV_8(d, i + 24)
#define PAGED_KV_40(d, i) PAGED_KV_32(d, i), PAGED_KV_8(d, i + 32)
#define PAGED_KV_64(d, i) PAGED_KV_32(d, i), PAGED_KV_32(d, i + 32)
#define PAGED_KV_128(d, i) PAGED_KV_64(d, i), PAGED_KV_64(d, i + 64)

#define PAGED_KV_NAMES_32                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PAGED_KV_NAMES_40                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define PAGED_KV_NAMES_64                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define PAGED_KV_NAMES_128                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "     \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "     \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// c[64 x kColumns] (+)= a[64 x 16] b[16 x kColumns]. A thread has columns 8j + 2 * (lane % 4) + {0, 1} of row lane / 4 of
// its warp's 16 in c[4j .. 4j + 1], of row lane / 4 + 8 in c[4j + 2 .. 4j + 3].
template <class T, int kColumns>
struct Product;

template <>
struct Product<BFloat16, 64> {
  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PAGED_KV_NAMES_32
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
        : PAGED_KV_32(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct Product<Float16, 64> {
  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" PAGED_KV_NAMES_32
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
        : PAGED_KV_32(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct Product<BFloat16, 80> {
  // a, b: both with rows along the outer side.
  __device__ static void of_shared(float (&c)[40], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" PAGED_KV_NAMES_40 "}, %40, %41, add, 1, 1, 0, 0;\n}"
        : PAGED_KV_40(c, 0)
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

template <>
struct Product<Float16, 80> {
  // a, b: both with rows along the outer side.
  __device__ static void of_shared(float (&c)[40], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" PAGED_KV_NAMES_40 "}, %40, %41, add, 1, 1, 0, 0;\n}"
        : PAGED_KV_40(c, 0)
        : "l"(a), "l"(b), "r"(int(add)));
  }
};

template <>
struct Product<BFloat16, 128> {
  // a, b: both with rows along the outer side.
  __device__ static void of_shared(float (&c)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PAGED_KV_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
        : PAGED_KV_64(c, 0)
        : "l"(a), "l"(b), "r"(int(add)));
  }

  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PAGED_KV_NAMES_64
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
        : PAGED_KV_64(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct Product<Float16, 128> {
  // a, b: both with rows along the outer side.
  __device__ static void of_shared(float (&c)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PAGED_KV_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
        : PAGED_KV_64(c, 0)
        : "l"(a), "l"(b), "r"(int(add)));
  }

  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PAGED_KV_NAMES_64
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
        : PAGED_KV_64(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct Product<BFloat16, 256> {
  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PAGED_KV_NAMES_128
        "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n}"
        : PAGED_KV_128(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct Product<Float16, 256> {
  // b with rows along the summed side.
  __device__ static void add_registers(float (&c)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" PAGED_KV_NAMES_128
        "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n}"
        : PAGED_KV_128(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

#undef PAGED_KV_NAMES_128
#undef PAGED_KV_NAMES_64
#undef PAGED_KV_NAMES_40
#undef PAGED_KV_NAMES_32
#undef PAGED_KV_128
#undef PAGED_KV_64
#undef PAGED_KV_40
#undef PAGED_KV_32
#undef PAGED_KV_8

}  // namespace paged_kv::cuda::prefill
