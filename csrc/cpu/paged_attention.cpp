// paged_attention on CPU: plans jobs and chunks, hands them to threads, picks the kernels of an instruction set.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "attention_plan.h"
#include "attention_policy.h"
#include "capability.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_kv::cpu {
namespace {

const AttentionKernels& attention_kernels() {
  switch (capability()) {
#ifdef PAGED_KV_HAS_AMX
    case Capability::amx: return kAttentionAmx;
#endif
#ifdef PAGED_KV_HAS_AVX512
    case Capability::avx512: return kAttentionAvx512;
#endif
#ifdef PAGED_KV_HAS_AVX2
    case Capability::avx2: return kAttentionAvx2;
#endif
    default: return kAttentionGeneric;
  }
}

// Memory that a thread keeps between calls.
class Arena {
 public:
  ~Arena() { release(); }
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      release();
      data_ = static_cast<char*>(::operator new(size_t(bytes), std::align_val_t(64)));
      size_ = bytes;
    }
    return data_;
  }

 private:
  void release() {
    if (data_) ::operator delete(data_, std::align_val_t(64));
    data_ = nullptr;
    size_ = 0;
  }
  char* data_ = nullptr;
  int64_t size_ = 0;
};

struct Item {
  int32_t job, chunk;
  int64_t cost;
};

struct Plan {
  std::vector<Job> jobs;
  std::vector<Item> items;
  int64_t total_cost, scratch_bytes, state_floats;
};

void zero_tokens(const AttentionParams& p, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t row = p.num_heads * p.value_cache.head_size * size_of(p.query_dtype);
  std::memset(static_cast<char*>(p.out) + begin * row, 0, size_t((end - begin) * row));
  if (p.lse) std::fill(p.lse + begin * p.num_heads, p.lse + end * p.num_heads, -__builtin_inff());
}

// Tokens before the first span and behind the last belong to no sequence.
void zero_outside(const AttentionParams& p) {
  const int64_t first = p.num_seqs ? clamp(p.cu_seqlens_q[0], 0, p.num_tokens) : p.num_tokens;
  const int64_t last = p.num_seqs ? clamp(p.cu_seqlens_q[p.num_seqs], 0, p.num_tokens) : p.num_tokens;
  zero_tokens(p, 0, first);
  zero_tokens(p, last, p.num_tokens);
}

// Keys that queries at positions first .. last see between them.
KeyRange visible_to_any(const AttentionParams& p, int64_t seq_len, int64_t first, int64_t last) {
  KeyRange keys{visible_keys(p, seq_len, first).begin, visible_keys(p, seq_len, last).end};
  if (keys.end < keys.begin) keys.end = keys.begin;
  return keys;
}

void add_jobs(const AttentionParams& p, int64_t seq, int threads, std::vector<Job>& jobs) {
  const Span span = span_of(p.cu_seqlens_q, seq, p.num_tokens);
  const int64_t queries = span.end - span.begin, group = p.num_heads / p.num_kv_heads;
  const int64_t size = p.key_cache.head_size, size_v = p.value_cache.head_size;
  if (queries == 0) return;
  Job job{};
  job.seq = seq;
  job.seq_len = clamp(p.seq_lens[seq], 0, p.max_blocks * p.block_size);
  job.tiled = policy::use_tiles(queries * group);
  job.group_end = group;
  job.num_chunks = 1;
  const int64_t tile = job.tiled ? policy::tile_queries(group, size, size_v) : queries;
  const int64_t parts = policy::head_parts(job.seq_len, p.num_seqs, threads, p.deterministic);
  const int64_t part = (p.num_kv_heads + parts - 1) / parts;
  const int64_t heads = job.tiled ? 1 : std::min(part, policy::stream_heads(queries * group, size, size_v));
  for (int64_t begin = 0; begin < queries; begin += tile) {
    const int64_t end = std::min(begin + tile, queries);
    job.query_begin = span.begin + begin;
    job.query_end = span.begin + end;
    job.position = job.seq_len - queries + begin;
    job.keys = visible_to_any(p, job.seq_len, job.position, job.position + end - begin - 1);
    for (int64_t head = 0; head < p.num_kv_heads; head += heads) {
      job.kv_head_begin = head;
      job.kv_head_end = std::min(head + heads, p.num_kv_heads);
      jobs.push_back(job);
    }
  }
}

void split_job(const AttentionParams& p, const AttentionKernels& kernels, int64_t at, int threads, Plan& plan) {
  Job& job = plan.jobs[size_t(at)];
  const int64_t keys = job.keys.end - job.keys.begin;
  const int64_t cost = policy::cost(job, p.key_cache.head_size, p.value_cache.head_size);
  const double share = threads == 1 ? 0.0 : double(cost) * threads / double(plan.total_cost);
  const Span span = span_of(p.cu_seqlens_q, job.seq, p.num_tokens);
  const bool precise = p.query_dtype == DType::float32 && span.end - span.begin > 1;
  job.part_keys = policy::part_keys(keys, job.tiled, p.deterministic, precise);
  job.chunk_keys = policy::chunk_keys(keys, share, job.part_keys, job.tiled, p.deterministic);
  job.num_chunks = std::max<int64_t>(1, (keys + job.chunk_keys - 1) / job.chunk_keys);
  job.pending = int32_t(job.num_chunks);
  job.states = plan.state_floats;
  if (job.num_chunks > 1) plan.state_floats += job.num_chunks * kernels.state_floats(p, job);
  plan.scratch_bytes = std::max(plan.scratch_bytes, kernels.scratch_bytes(p, job));
  for (int64_t chunk = 0; chunk < job.num_chunks; ++chunk)
    plan.items.push_back({int32_t(at), int32_t(chunk), cost / job.num_chunks});
}

void make_plan(const AttentionParams& p, const AttentionKernels& kernels, int threads, Plan& plan) {
  plan.jobs.clear();
  plan.items.clear();
  plan.total_cost = plan.scratch_bytes = plan.state_floats = 0;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) add_jobs(p, seq, threads, plan.jobs);
  for (const Job& job : plan.jobs) plan.total_cost += policy::cost(job, p.key_cache.head_size, p.value_cache.head_size);
  if (!policy::is_worth_threads(plan.total_cost)) threads = 1;
  for (size_t i = 0; i < plan.jobs.size(); ++i) split_job(p, kernels, int64_t(i), threads, plan);
  const auto longer = [](const Item& a, const Item& b) { return a.cost > b.cost; };
  if (!std::is_sorted(plan.items.begin(), plan.items.end(), longer))
    std::stable_sort(plan.items.begin(), plan.items.end(), longer);
}

// What the threads share: items are taken one by one, longest first.
struct Work {
  const AttentionParams& p;
  const AttentionKernels& kernels;
  Plan& plan;
  float* states;
  int64_t next;
};

void work(void* context, int64_t, int64_t) {
  Work& work = *static_cast<Work*>(context);
  thread_local Arena arena;
  char* scratch = arena.reserve(work.plan.scratch_bytes);
  const int64_t count = int64_t(work.plan.items.size());
  for (;;) {
    const int64_t at = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    if (at >= count) return;
    const Item& item = work.plan.items[size_t(at)];
    work.kernels.run(work.p, work.plan.jobs[size_t(item.job)], item.chunk, work.states, scratch);
  }
}

}  // namespace

void paged_attention(const AttentionParams& params) {
  const AttentionKernels& kernels = attention_kernels();
  thread_local Plan plan;
  thread_local Arena states;
  zero_outside(params);
  make_plan(params, kernels, num_threads(), plan);
  const int64_t items = int64_t(plan.items.size());
  if (items == 0) return;
  Work shared{params, kernels, plan, reinterpret_cast<float*>(states.reserve(plan.state_floats * 4)), 0};
  const int64_t workers = policy::is_worth_threads(plan.total_cost) ? std::min<int64_t>(num_threads(), items) : 1;
  if (workers == 1)
    work(&shared, 0, 1);
  else
    parallel_for(0, workers, 1, work, &shared);
}

}  // namespace paged_kv::cpu
