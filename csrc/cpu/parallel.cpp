#include "parallel.h"

#include <torch/csrc/stable/ops.h>

namespace paged_kv::cpu {

void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(begin, end, grain, [=](int64_t first, int64_t last) { fn(context, first, last); });
}

int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace paged_kv::cpu
