// Checks of what index tensors and scales hold: always for the allocator's small tensors on the CPU, where a look costs nothing, and
// for every index tensor with PAGED_KV_DEBUG=1. Messages name row and column.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "argument.h"

namespace paged_kv {

bool debug_mode();  // PAGED_KV_DEBUG, read once

// The elements of an integer tensor on the host: in place on the CPU, else a copy that waits for the device.
template <class T>
class HostView {
 public:
  explicit HostView(const Argument& argument)
      : argument_(&argument), data_(argument.as<const T>()), row_stride_(argument.dim > 1 ? argument.strides[0] : 1) {
    if (argument.device.is_cpu()) return;
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    copy_ = torch::stable::contiguous(torch::stable::to(*argument.tensor, cpu));
    data_ = copy_->const_data_ptr<T>();
    row_stride_ = argument.dim > 1 ? argument.sizes[argument.dim - 1] : 1;
  }

  int64_t size() const { return argument_->sizes[0]; }
  int64_t operator[](int64_t i) const { return data_[i]; }  // of a contiguous tensor
  int64_t operator()(int64_t row, int64_t column) const { return data_[row * row_stride_ + column]; }

  void require_within(int64_t i, int64_t least, int64_t most, const char* index_name) const {
    const int64_t value = (*this)[i];
    if (value < least || value > most)
      fail(argument_->full_name(), "hold values in " + text(least) + " .. " + text(most),
           text(value) + " at " + index_name + " " + text(i));
  }

 private:
  const Argument* argument_;
  const T* data_;
  int64_t row_stride_;
  OptionalTensor copy_;
};

void check_spans(const Argument& cu_seqlens_q, int64_t num_seqs, int64_t num_tokens);
void check_longest_query(const Argument& cu_seqlens_q, int64_t num_seqs, int64_t max_seqlen_q);
void check_lengths(const Argument& seq_lens, int64_t most);
void check_slots(const Argument& slot_mapping, int64_t num_slots);
void check_block_mapping(const Argument& block_mapping, int64_t source_blocks, int64_t destination_blocks);

// The used columns of a block table [num_seqs, max_blocks]; -1 is an unmapped block, which a window may leave behind.
void check_table(const Argument& block_table, const Argument& seq_lens, int64_t block_size, int64_t num_blocks);

// A number or one per head, to divide by and to multiply with: finite and above 0.
void check_scale_values(const Argument& scale);

// Of scales per slot [num_blocks, block_size, num_kv_heads] those of the slots that hold a token of a row.
void check_slot_scales(const Argument& scale, const Argument& block_table, const Argument& seq_lens);

// The allocator's queue of free blocks [num_blocks], from head to tail: blocks of the pool, once each, that nobody holds.
void check_ring(const Argument& free_ring, const Argument& ref_counts, const Argument& counters);

// The allocator's table [num_groups, num_seqs, max_blocks] whole, and that every block in it is counted.
void check_counts(const Argument& block_table, const Argument& ref_counts);

}  // namespace paged_kv
