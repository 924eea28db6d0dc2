#include "row_kernels.h"

#include "capability.h"

namespace paged_kv::cpu {

const RowKernels& row_kernels() {
  switch (capability()) {
#ifdef PAGED_KV_HAS_AVX512
    case Capability::amx:
    case Capability::avx512: return kRowsAvx512;
#endif
#ifdef PAGED_KV_HAS_AVX2
    case Capability::avx2: return kRowsAvx2;
#endif
    default: return kRowsGeneric;
  }
}

}  // namespace paged_kv::cpu
