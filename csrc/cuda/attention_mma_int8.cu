#include "attention_mma_instances.cuh"

namespace paged_kv::cuda {

void launch_mma_int8(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  mma::launch_eight_bit<mma::Int8>(launch, plan, stream);
}

}  // namespace paged_kv::cuda
