#include "attention_mma_instances.cuh"

namespace paged_kv::cuda {

void launch_mma_float8_e4m3fn(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  mma::launch_eight_bit<mma::E4M3>(launch, plan, stream);
}

}  // namespace paged_kv::cuda
