// Ties the two kernels of an instruction set together: one chunk of a job, and the end of a job.
#pragma once

#include "attention_stream.h"
#include "attention_tile.h"

namespace paged_kv::cpu {
namespace {

int64_t accumulator_width(const AttentionParams& p) { return round_up(p.value_cache.head_size, kPair); }

int64_t state_rows(const Job& job) { return job.tiled ? round_up(job.num_rows(), kMicroRows) : job.num_rows(); }

int64_t state_floats(const AttentionParams& p, const Job& job) {
  return state_bytes(state_rows(job), accumulator_width(p)) / int64_t(sizeof(float));
}

// The order in which accumulators of a job hold the elements of a value.
bool is_accumulator_interleaved(const AttentionParams& p, const Job& job) {
  return (job.tiled && TileKernel::uses_bfloat16(p)) || loads_interleaved(p.value_cache.dtype);
}

void attend_part(const AttentionParams& p, const Job& job, KeyRange keys, State& state, Cutter cutter) {
  state.clear(state_rows(job), accumulator_width(p));
  if (keys.begin >= keys.end) return;
  if (job.tiled)
    TileKernel(p, job, cutter).attend(keys, state);
  else
    StreamKernel(p, job, cutter).attend(keys, state);
}

// The keys of a chunk, part after part.
void attend(const AttentionParams& p, const Job& job, KeyRange keys, State& state, Cutter cutter) {
  if (keys.end - keys.begin <= job.part_keys) return attend_part(p, job, keys, state, cutter);
  const int64_t rows = state_rows(job), width = accumulator_width(p);
  State part(cutter, rows, width);
  attend_part(p, job, {keys.begin, keys.begin + job.part_keys}, state, cutter);
  for (int64_t begin = keys.begin + job.part_keys; begin < keys.end; begin += job.part_keys) {
    const int64_t end = keys.end - begin > job.part_keys ? begin + job.part_keys : keys.end;
    attend_part(p, job, {begin, end}, part, cutter);
    merge_states(state, part, rows, width);
  }
}

float value_scale_of(const AttentionParams& p, int64_t kv_head) {
  return head_scale(p.value_cache.scale, kv_head) * load_factor(p.value_cache.dtype);
}

// Where every key of the list is visible to every row, weights are never zero times something invisible.
bool sees_alike(const AttentionParams& p, const Job& job) {
  if (job.num_rows() == 1) return true;
  if (p.mask.kind != MaskKind::none) return false;
  if (job.num_queries() == 1) return true;
  const KeyRange first = visible_keys(p, job.seq_len, job.position);
  const KeyRange last = visible_keys(p, job.seq_len, job.position + job.num_queries() - 1);
  return first.begin == last.begin && first.end == last.end;
}

// A row alone: no key that it does not see comes near it.
void attend_alone(const AttentionParams& p, const Job& job, int64_t query, int64_t kv_head, int64_t g, Cutter cutter) {
  Job row = job;
  row.tiled = false;
  row.query_begin = job.query_begin + query;
  row.query_end = row.query_begin + 1;
  row.position = job.position + query;
  row.kv_head_begin = kv_head;
  row.kv_head_end = kv_head + 1;
  row.group_begin = g;
  row.group_end = g + 1;
  row.keys = visible_keys(p, job.seq_len, row.position);
  State state(cutter, 1, accumulator_width(p));
  attend_part(p, row, row.keys, state, cutter);
  const int64_t head = kv_head * (p.num_heads / p.num_kv_heads) + g;
  finish_row(p, state, 0, accumulator_width(p), is_accumulator_interleaved(p, row), row.query_begin, head,
             value_scale_of(p, kv_head));
}

// Writes the rows of a job. A value that is not finite may stem from a key hidden from its row (0 * NaN); such a row
// is done again alone.
void finish(const AttentionParams& p, const Job& job, const State& state, Cutter cutter) {
  const bool interleaved = is_accumulator_interleaved(p, job), alike = sees_alike(p, job);
  const int64_t group = p.num_heads / p.num_kv_heads, width = accumulator_width(p);
  int64_t row = 0;
  for (int64_t h = job.kv_head_begin; h < job.kv_head_end; ++h)
    for (int64_t query = 0; query < job.num_queries(); ++query)
      for (int64_t g = job.group_begin; g < job.group_end; ++g, ++row) {
        const bool finite =
            finish_row(p, state, row, width, interleaved, job.query_begin + query, h * group + g, value_scale_of(p, h));
        if (!finite && !alike) attend_alone(p, job, query, h, g, cutter);
      }
}

void run(const AttentionParams& p, Job& job, int64_t chunk, float* states, char* scratch) {
  const int64_t rows = state_rows(job), width = accumulator_width(p), floats = state_floats(p, job);
  const bool whole = job.num_chunks == 1;
  const auto state_of = [&](int64_t c) {
    Cutter at{reinterpret_cast<char*>(states + job.states + c * floats)};
    return State(at, rows, width);
  };
  Cutter cutter{scratch};
  State state = whole ? State(cutter, rows, width) : state_of(chunk);
  const int64_t begin = job.keys.begin + chunk * job.chunk_keys;
  attend(p, job, {begin, whole || chunk == job.num_chunks - 1 ? job.keys.end : begin + job.chunk_keys}, state, cutter);
  if (whole) return finish(p, job, state, cutter);
  if (__atomic_sub_fetch(&job.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
  const State total = state_of(0);
  for (int64_t c = 1; c < job.num_chunks; ++c) merge_states(total, state_of(c), rows, width);
  finish(p, job, total, cutter);
}

int64_t scratch_bytes(const AttentionParams& p, const Job& job) {
  Job row = job;  // attend_alone's
  row.tiled = false;
  row.query_end = row.query_begin + 1;
  row.kv_head_end = row.kv_head_begin + 1;
  row.group_end = row.group_begin + 1;
  Cutter alone{nullptr}, all{nullptr};
  State(alone, 1, accumulator_width(p));
  StreamKernel(p, row, alone);
  State(all, state_rows(job), accumulator_width(p));
  if (job.chunk_keys > job.part_keys) State(all, state_rows(job), accumulator_width(p));
  if (job.tiled)
    TileKernel(p, job, all);
  else
    StreamKernel(p, job, all);
  return (alone.next - static_cast<char*>(nullptr)) + (all.next - static_cast<char*>(nullptr));
}

}  // namespace
}  // namespace paged_kv::cpu
