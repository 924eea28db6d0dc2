#include "contents.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

namespace paged_kv {

bool debug_mode() {
  static const bool on = [] {
    const char* value = std::getenv("PAGED_KV_DEBUG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return on;
}

void check_spans(const Argument& cu_seqlens_q, int64_t num_seqs, int64_t num_tokens) {
  const HostView<int32_t> spans(cu_seqlens_q);
  for (int64_t i = 0; i <= num_seqs; ++i) {
    spans.require_within(i, 0, num_tokens, "index");
    if (i > 0 && spans[i] < spans[i - 1])
      fail(cu_seqlens_q.full_name(), "ascend",
           text(spans[i]) + " after " + text(spans[i - 1]) + " at row " + text(i - 1));
  }
}

void check_lengths(const Argument& seq_lens, int64_t most) {
  const HostView<int32_t> lengths(seq_lens);
  for (int64_t row = 0; row < lengths.size(); ++row) lengths.require_within(row, 0, most, "row");
}

void check_table(const Argument& block_table, const Argument& seq_lens, int64_t block_size, int64_t num_blocks) {
  const HostView<int32_t> table(block_table);
  const HostView<int32_t> lengths(seq_lens);
  for (int64_t row = 0; row < lengths.size(); ++row) {
    const int64_t used = (lengths[row] + block_size - 1) / block_size;
    for (int64_t column = 0; column < used; ++column) {
      const int64_t block = table(row, column);
      if (block < -1 || block >= num_blocks)
        fail(block_table.full_name(), "hold blocks in -1 .. " + text(num_blocks - 1),
             text(block) + " at row " + text(row) + ", column " + text(column));
    }
  }
}

void check_longest_query(const Argument& cu_seqlens_q, int64_t num_seqs, int64_t max_seqlen_q) {
  const HostView<int32_t> spans(cu_seqlens_q);
  for (int64_t row = 0; row < num_seqs; ++row) {
    const int64_t length = spans[row + 1] - spans[row];
    if (length > max_seqlen_q)
      fail("max_seqlen_q", "be at least the query length " + text(length) + " of row " + text(row), text(max_seqlen_q));
  }
}

void check_slots(const Argument& slot_mapping, int64_t num_slots) {
  const HostView<int64_t> slots(slot_mapping);
  std::unordered_set<int64_t> seen;
  for (int64_t token = 0; token < slots.size(); ++token) {
    slots.require_within(token, -1, num_slots - 1, "token");
    if (slots[token] >= 0 && !seen.insert(slots[token]).second)
      fail(slot_mapping.full_name(), "hold each slot once", text(slots[token]) + " again at token " + text(token));
  }
}

void check_block_mapping(const Argument& block_mapping, int64_t source_blocks, int64_t destination_blocks) {
  const HostView<int64_t> pairs(block_mapping);
  std::unordered_set<int64_t> written;
  for (int64_t pair = 0; pair < pairs.size(); ++pair) {
    const int64_t limits[2] = {source_blocks, destination_blocks};
    for (int64_t column = 0; column < 2; ++column) {
      const int64_t block = pairs(pair, column);
      if (block < -1 || block >= limits[column])
        fail(block_mapping.full_name(), "hold blocks in -1 .. " + text(limits[column] - 1),
             text(block) + " at row " + text(pair) + ", column " + text(column));
    }
    const int64_t destination = pairs(pair, 1);
    if (pairs(pair, 0) >= 0 && destination >= 0 && !written.insert(destination).second)
      fail(block_mapping.full_name(), "hold each destination once", text(destination) + " again at row " + text(pair));
  }
}

namespace {

bool is_scale(float value) { return std::isfinite(value) && value > 0; }

// A float tensor on the host, dense: in place or a copy.
Tensor dense_on_host(const Argument& argument) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor& tensor = *argument.tensor;
  return torch::stable::contiguous(argument.device.is_cpu() ? tensor : torch::stable::to(tensor, cpu));
}

}  // namespace

void check_scale_values(const Argument& scale) {
  const Tensor host = dense_on_host(scale);
  const float* values = host.const_data_ptr<float>();
  for (int64_t head = 0; head < scale.numel(); ++head) {
    if (!is_scale(values[head]))
      fail(scale.full_name(), "be finite and above 0", text(static_cast<double>(values[head])) + " at " + text(head));
  }
}

void check_slot_scales(const Argument& scale, const Argument& block_table, const Argument& seq_lens) {
  const Tensor host = dense_on_host(scale);
  const float* values = host.const_data_ptr<float>();
  const HostView<int32_t> table(block_table);
  const HostView<int32_t> lengths(seq_lens);
  const int64_t block_size = scale.sizes[1], num_kv_heads = scale.sizes[2];
  for (int64_t row = 0; row < lengths.size(); ++row) {
    for (int64_t position = 0; position < lengths[row]; ++position) {
      const int64_t block = table(row, position / block_size);
      if (block < 0) continue;
      const float* heads = values + (block * block_size + position % block_size) * num_kv_heads;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        if (!is_scale(heads[head]))
          fail(scale.full_name(), "be finite and above 0 where a token is",
               text(static_cast<double>(heads[head])) + " at row " + text(row) + ", position " + text(position) +
                   ", head " + text(head));
      }
    }
  }
}

void check_ring(const Argument& free_ring, const Argument& ref_counts, const Argument& counters) {
  const HostView<int32_t> ring(free_ring);
  const HostView<int32_t> counts(ref_counts);
  const HostView<int64_t> numbers(counters);
  const int64_t num_blocks = ring.size();
  const int64_t head = numbers[kHead], free = numbers[kTail] - head;
  if (head < 0 || free < 0 || free > num_blocks)
    fail(counters.full_name(), "hold 0 <= head <= tail <= head + " + text(num_blocks),
         text(head) + " and " + text(numbers[kTail]));
  std::unordered_set<int64_t> seen;
  for (int64_t i = 0; i < free; ++i) {
    const int64_t place = (head + i) % num_blocks, block = ring[place];
    ring.require_within(place, 0, num_blocks - 1, "index");
    if (!seen.insert(block).second)
      fail(free_ring.full_name(), "hold each free block once", text(block) + " again at index " + text(place));
    if (counts[block] != 0)
      fail(ref_counts.full_name(), "be 0 for the free blocks of free_ring",
           text(counts[block]) + " for block " + text(block) + " at index " + text(place));
  }
}

void check_counts(const Argument& block_table, const Argument& ref_counts) {
  const HostView<int32_t> table(block_table);
  const HostView<int32_t> counts(ref_counts);
  const int64_t max_blocks = block_table.sizes[block_table.dim - 1];
  const int64_t num_seqs = block_table.sizes[block_table.dim - 2];
  const int64_t num_blocks = counts.size();
  for (int64_t i = 0; i < block_table.numel(); ++i) {
    const int64_t block = table[i];
    const bool valid = block >= -1 && block < num_blocks;
    if (valid && (block == -1 || counts[block] > 0)) continue;
    const std::string place = " at row " + text(i / max_blocks % num_seqs) + ", column " + text(i % max_blocks);
    if (!valid) fail("block_table", "hold blocks in -1 .. " + text(num_blocks - 1), text(block) + place);
    fail("ref_counts", "count every block that block_table holds",
         text(counts[block]) + " for block " + text(block) + place);
  }
}

}  // namespace paged_kv
