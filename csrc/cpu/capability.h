// Which of the kernels that were compiled per instruction set this process runs.
#pragma once

namespace paged_kv::cpu {

enum class Capability { generic, avx2, avx512, amx };

// The best that the machine has, or the one that PAGED_KV_CPU_CAPABILITY names. Chosen once; throws
// std::invalid_argument if the machine does not have it.
Capability capability();

}  // namespace paged_kv::cpu
