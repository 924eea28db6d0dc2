#include "prefill_kernel.cuh"

namespace paged_kv::cuda::prefill {

void launch_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream) {
  launch_class<BFloat16>(launch, head_size_class, stream);
}

// Code for any other architecture is empty: it has no barriers in shared memory.
bool can_run() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, attention<BFloat16, 64, false>), "cudaFuncGetAttributes");
  return attributes.sharedSizeBytes > 0;
}

}  // namespace paged_kv::cuda::prefill
