#include "prefill_mma_kernel.cuh"

namespace paged_kv::cuda::prefill::mma_sync {

void launch_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream) {
  launch_class<BFloat16, false>(launch, head_size_class, stream);
}

}  // namespace paged_kv::cuda::prefill::mma_sync
