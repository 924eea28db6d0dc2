// Threads for the CPU kernels, without torch or std headers. The host implements them with libtorch's own pool, so
// torch.set_num_threads and OMP_NUM_THREADS are honoured.
#pragma once

#include <cstdint>

namespace paged_kv::cpu {

// Calls fn(context, first, last) on disjoint ranges that cover begin .. end - 1, each of at least `grain` indices but
// the last; returns when all are done. `fn` must not throw. Nested calls run on the calling thread.
void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* context);

// Threads a parallel_for may use; ranges are handed to at most that many.
int num_threads();

}  // namespace paged_kv::cpu
