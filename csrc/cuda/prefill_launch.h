// Joins the parts of the prefill kernel: its host side (prefill.cu) and its instances (prefill_*.cu).
#pragma once

#include <cuda.h>

#include "launch.h"

namespace paged_kv::cuda::prefill {

inline constexpr int kBoxKeys = 16;  // of one copy: every block size that is a multiple of this fits

// A row tile of one sequence, the same for all kv heads. A unit of work is a tile and a kv head.
struct alignas(32) Tile {
  int32_t sequence, token, q_len, seq_len;
  int32_t first_row, rows;  // packed: query token x head of the group
  int32_t keys_begin, keys_end;  // visible to any row; empty where end <= begin
};

struct Header {
  int32_t num_tiles;
  int32_t next_unit;  // units are taken from here
  int32_t num_blocks;  // thread blocks that take units; the others make room for the decode kernel
  int32_t section;  // kv heads whose units come before those of the next heads
};

inline constexpr int64_t kHeaderBytes = 256;

struct Launch {
  CUtensorMap queries, keys, values;
  AttentionParams params;
  Header* header;
  Tile* tiles;  // [max_tiles], those with most keys first
  int32_t max_tiles, max_blocks;
  int32_t group, decode_rows;
  int32_t tile_rows;  // whole tokens: a multiple of the group
  int32_t capacity;  // tokens of a row of the table
  int32_t window_left, window_right;  // clipped to 2^30
  int32_t log2_block_size;  // -1: no power of two
  bool outside;
};

// Shapes of a kernel instance.
inline constexpr int rows_of(int head_size_class) { return head_size_class == 256 ? 128 : 192; }

// Launches the instance of a class of head sizes: 64, 128 or 256. `can_run`: was it built for the current device?
void launch_float16(const Launch& launch, int head_size_class, cudaStream_t stream);
void launch_bfloat16(const Launch& launch, int head_size_class, cudaStream_t stream);
bool can_run();

}  // namespace paged_kv::cuda::prefill
