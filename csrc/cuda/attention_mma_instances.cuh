// Chooses among the instances of the tensor-core kernel of one element type.
#pragma once

#include "attention_launch.h"
#include "attention_mma.cuh"

namespace paged_kv::cuda::mma {

template <class T, int kHeadSize, int kTiles>
void launch_instance(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  using S = Shape<kHeadSize, kTiles>;
  constexpr int64_t kWarpBytes = S::kStages * S::kStageBytes;
  const auto run = launch.deterministic ? launch_kernel<attention<T, kHeadSize, kTiles, true>>
                                        : launch_kernel<attention<T, kHeadSize, kTiles, false>>;
  run(Order::beside_predecessor, plan.grid, plan.warps * kWarp, plan.warps * kWarpBytes + S::kQueryBytes, launch,
      stream);
}

template <class T>
void launch(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  const auto choose = [&](auto size) {
    constexpr int kHeadSize = decltype(size)::value;
    if (plan.rows == 8) return launch_instance<T, kHeadSize, 1>(launch, plan, stream);
    if (plan.rows == 16) return launch_instance<T, kHeadSize, 2>(launch, plan, stream);
    if constexpr (kHeadSize <= 128) {
      if (plan.rows == 32) return launch_instance<T, kHeadSize, 4>(launch, plan, stream);
    }
    throw std::logic_error("no attention kernel has tiles of " + std::to_string(plan.rows) + " rows");
  };
  switch (plan.head_size_class) {
    case 64: return choose(std::integral_constant<int, 64>{});
    case 128: return choose(std::integral_constant<int, 128>{});
    case 256: return choose(std::integral_constant<int, 256>{});
    default: throw std::logic_error("no attention kernel has head size " + std::to_string(plan.head_size_class));
  }
}

}  // namespace paged_kv::cuda::mma
