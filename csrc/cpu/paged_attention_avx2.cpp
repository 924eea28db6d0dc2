// clang-format off: the kernels are written in terms of the vectors, which therefore come first
#include "simd_avx2.h"
#include "attention_kernel.h"
// clang-format on

namespace paged_kv::cpu {

const AttentionKernels kAttentionAvx2 = {state_floats, scratch_bytes, run};

}  // namespace paged_kv::cpu
