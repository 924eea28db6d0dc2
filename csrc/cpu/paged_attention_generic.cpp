#include "simd_generic.h"

#include "attention_kernel.h"

namespace paged_kv::cpu {

const AttentionKernels kAttentionGeneric = {"generic", state_floats, scratch_bytes, run};

}  // namespace paged_kv::cpu
