#include "attention_mma_instances.cuh"

namespace paged_kv::cuda {

void launch_mma_bfloat16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  mma::launch_sixteen_bit<BFloat16>(launch, plan, stream);
}

}  // namespace paged_kv::cuda
