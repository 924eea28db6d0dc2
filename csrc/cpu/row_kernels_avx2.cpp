#include "row_loops.h"

namespace paged_kv::cpu {

const RowKernels kRowsAvx2 = {divide_of, multiply_of, blend_of, absmax_of};

}  // namespace paged_kv::cpu
