// clang-format off: the kernels are written in terms of the vectors, which therefore come first
#include "simd_avx512.h"
#include "attention_kernel.h"
// clang-format on

namespace paged_kv::cpu {

const AttentionKernels kAttentionAvx512 = {state_floats, scratch_bytes, run};

}  // namespace paged_kv::cpu
