#include "attention_mma_instances.cuh"

namespace paged_kv::cuda {

void launch_mma_float8_e5m2(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  mma::launch_eight_bit<mma::E5M2>(launch, plan, stream);
}

}  // namespace paged_kv::cuda
