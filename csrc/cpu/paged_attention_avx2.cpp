#include "simd_avx2.h"

#include "attention_kernel.h"

namespace paged_kv::cpu {

const AttentionKernels kAttentionAvx2 = {"avx2", state_floats, scratch_bytes, run};

}  // namespace paged_kv::cpu
