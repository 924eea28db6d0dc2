// clang-format off: the kernels are written in terms of the vectors, which therefore come first
#include "simd_avx512.h"
#include "tiles_amx.h"
#include "attention_kernel.h"
// clang-format on

namespace paged_kv::cpu {
namespace {

// AMX multiplies bfloat16, for many rows at a time. All else is AVX-512's.
const AttentionKernels& kernels_for(const AttentionParams& p, const Job& job) {
  static constexpr AttentionKernels kTiles = {state_floats, scratch_bytes, run};
  return job.tiled && TileKernel::uses_bfloat16(p) ? kTiles : kAttentionAvx512;
}

int64_t state_floats_of(const AttentionParams& p, const Job& job) { return kernels_for(p, job).state_floats(p, job); }

int64_t scratch_bytes_of(const AttentionParams& p, const Job& job) { return kernels_for(p, job).scratch_bytes(p, job); }

void run_of(const AttentionParams& p, Job& job, int64_t chunk, float* states, char* scratch) {
  kernels_for(p, job).run(p, job, chunk, states, scratch);
}

}  // namespace

const AttentionKernels kAttentionAmx = {state_floats_of, scratch_bytes_of, run_of};

}  // namespace paged_kv::cpu
