// Chooses among the instances of the tensor-core kernel of one element type.
#pragma once

#include "attention_host.h"
#include "attention_launch.h"
#include "attention_mma.cuh"

namespace paged_kv::cuda::mma {

template <class Format, int kHeadSize, int kTiles, bool kDeterministic>
void launch_instance(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  using S = Shape<Format, kHeadSize, kTiles>;
  const int64_t shared_bytes = plan.warps * int64_t(S::kStages) * S::kStageBytes + S::kQueryBytes;
  launch_kernel<attention<Format, kHeadSize, kTiles, kDeterministic>>(Order::beside_predecessor, plan.grid,
                                                                      plan.warps * kWarp, shared_bytes, launch, stream);
}

[[noreturn]] inline void fail_rows(int rows) {
  throw std::logic_error("no attention kernel has tiles of " + std::to_string(rows) + " rows");
}

template <class T>
void launch_sixteen_bit(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  dispatch_head_size(plan.head_size_class, [&](auto size) {
    constexpr int kHeadSize = decltype(size)::value;
    const auto run = [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      if (launch.deterministic) return launch_instance<SixteenBit<T>, kHeadSize, kTiles, true>(launch, plan, stream);
      launch_instance<SixteenBit<T>, kHeadSize, kTiles, false>(launch, plan, stream);
    };
    if (plan.rows == 8) return run(std::integral_constant<int, 1>{});
    if (plan.rows == 16) return run(std::integral_constant<int, 2>{});
    if constexpr (kHeadSize <= 128) {
      if (plan.rows == 32) return run(std::integral_constant<int, 4>{});
    }
    fail_rows(plan.rows);
  });
}

template <class Format>
void launch_eight_bit(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  dispatch_head_size(plan.head_size_class, [&](auto size) {
    constexpr int kHeadSize = decltype(size)::value;
    if (plan.rows == 8) return launch_instance<Format, kHeadSize, 1, false>(launch, plan, stream);
    if (plan.rows == 16) return launch_instance<Format, kHeadSize, 2, false>(launch, plan, stream);
    fail_rows(plan.rows);
  });
}

}  // namespace paged_kv::cuda::mma
