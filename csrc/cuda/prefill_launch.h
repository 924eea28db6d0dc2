// Joins the parts of the prefill kernels: their host side (prefill.cu) and their instances (prefill_*.cu).
#pragma once

#include <cuda.h>

#include <type_traits>

#include "attention_host.h"
#include "divisor.cuh"
#include "launch.h"

namespace paged_kv::cuda::prefill {

inline constexpr int kBoxKeys = 16;  // of one copy: every block size that is a multiple of this fits

// Packed rows of one sequence and keys that they see, the same for all kv heads. A unit of work is this and a kv head.
struct Tile {
  int32_t sequence, token, q_len, seq_len;
  int32_t first_row, rows;  // packed: query token x head of the group
  int32_t keys_begin, keys_end;  // visible to any row; empty where end <= begin
  int32_t part, num_parts;  // which of so many that have the same rows and share their keys
  int32_t first_slot;  // where results of part 0 lie, if there are others
};
static_assert(sizeof(Tile) == 11 * sizeof(int32_t));  // its words are read one by one: there are none between

struct Header {
  int32_t num_tiles;
  int32_t next_unit;  // units are taken from here
  int32_t num_blocks;  // of the Hopper kernel, thread blocks that take units; others make room for the decode kernel
  int32_t section;  // kv heads whose units come before those of the next heads
  int32_t num_merges;  // row tiles whose keys are shared by parts
  int32_t has_decodes;  // whether there are sequences for the decode kernel
};

inline constexpr int64_t kHeaderBytes = 256;

// Where the rows of a cache lie, in units of bytes, of which 32 bits count all (the kernel of every chip).
struct RowPlaces {
  uint32_t block, slot, head, unit_bytes;
};

// Partial results: a slot for each kv head of each part. A slot holds a state of `rows` rows (maximum in base 2, sum of
// weights), then their weighted sums of values, a class of head sizes wide.
struct Slots {
  float* data;
  int64_t slot_floats;
  int32_t rows, most;  // most: slots of a kv head; 0: no tile has parts
};

struct Launch {
  CUtensorMap queries, keys, values;
  AttentionParams params;
  Header* header;
  Tile* tiles;  // [max_tiles], those with most keys first
  Tile* merges;  // [max_row_tiles], of those with parts one each
  Slots slots;
  RowPlaces key_places, value_places;  // the kernel of every chip
  Divisor block_size;
  int32_t max_tiles, max_row_tiles, max_blocks;
  int32_t group, decode_rows;
  int32_t tile_rows, tile_keys;  // rows: whole tokens, a multiple of the group
  int32_t capacity;  // tokens of a row of the table
  int32_t window_left, window_right;  // clipped to 2^30
};

// Packed rows of a tile, and keys of one step of it, by the class of head sizes: 64, 128 or 256. What registers hold.
inline constexpr int rows_of(int head_size_class) { return head_size_class == 256 ? 128 : 192; }
inline constexpr int keys_of(int head_size_class) { return head_size_class == 64 ? 128 : 80; }

// Launches the instance of a class. `can_run`: was it built for the current device?
void launch_float16(const Launch& launch, int head_size_class, cudaStream_t stream);
void launch_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream);
bool can_run();

namespace mma_sync {

inline constexpr int rows_of(int head_size_class) { return head_size_class == 256 ? 64 : 128; }
inline constexpr int keys_of(int head_size_class) { return head_size_class == 256 ? 32 : 64; }
inline constexpr int blocks_of_sm(int head_size_class) { return head_size_class == 64 ? 3 : 2; }

// By the queries' dtype; caches are of that or of 8 bits.
void launch_float16(const Launch& launch, int head_size_class, cudaStream_t stream);
void launch_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream);
void launch_eight_bit_float16(const Launch& launch, int head_size_class, cudaStream_t stream);
void launch_eight_bit_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream);

}  // namespace mma_sync

// A launch of max_blocks thread blocks.
template <void (*kKernel)(Launch)>
void launch_blocks(const Launch& launch, int threads, int64_t shared_bytes, cudaStream_t stream) {
  launch_in_order<kKernel>(Order::beside_predecessor, dim3(unsigned(launch.max_blocks)), dim3(unsigned(threads)),
                           shared_bytes, launch, stream, "paged_attention");
}

// Calls function(head size class, has softcap) with the two as constants.
template <class Function>
void dispatch_instance(const Launch& launch, int head_size_class, Function&& function) {
  dispatch_head_size(head_size_class, [&](auto size) {
    if (launch.params.softcap > 0.0f) return function(size, std::true_type{});
    function(size, std::false_type{});
  });
}

}  // namespace paged_kv::cuda::prefill
