#include "attention_mma_instances.cuh"

namespace paged_kv::cuda {

void launch_mma_float16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  mma::launch_sixteen_bit<Float16>(launch, plan, stream);
}

}  // namespace paged_kv::cuda
