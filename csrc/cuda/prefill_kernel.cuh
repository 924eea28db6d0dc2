// The prefill kernel: sm_90a, float16 and bfloat16, head sizes up to 256. docs/kernels/prefill.md draws it.
//
// A thread block is one per SM and stays. Its first warpgroup feeds: one warp takes the work and brings tiles of keys, one
// tiles of values (bulk tensor copies of 16 keys each, found by the block table), one queries. The other warpgroups compute 64 packed
// rows each: S = Q K^T and O += P V with wgmma, the softmax of a tile under the products of the tile before.
#pragma once

#include <cstddef>
#include <type_traits>

#include "prefill_instructions.cuh"
#include "prefill_rows.cuh"

namespace paged_kv::cuda::prefill {

using mma::copy_async;
using mma::shared_address;

inline constexpr int kGroupThreads = 128;  // of a warpgroup

template <int kHeadSize>
struct Shape {
  static constexpr int kRows = rows_of(kHeadSize);
  static constexpr int kConsumers = kRows / 64;  // warpgroups
  static constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kKeys = keys_of(kHeadSize);
  static constexpr int kBoxes = kKeys / kBoxKeys;
  static constexpr int kPanels = kHeadSize / 64;  // a panel: 64 dims of all rows, 128 bytes a row
  static constexpr int kStages = kHeadSize == 256 ? 2 : 4;
  static constexpr int kQueryStages = kHeadSize == 64 ? 2 : 1;
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kBoxBytes = kBoxKeys * 128;
  static constexpr int kQueryPanelBytes = kRows * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kSharedBytes = 1024 + kQueryStages * kQueryBytes + 2 * kStages * kTileBytes;  // 1024 to align
  static constexpr int kFeederRegisters = kHeadSize == 64 ? 32 : kHeadSize == 128 ? 56 : 40;
  static constexpr int kConsumerRegisters = kHeadSize == 64 ? 160 : kHeadSize == 128 ? 152 : 232;
  static constexpr uint32_t kAllMapped = (1u << kBoxes) - 1;
};

inline constexpr int kItems = 2;  // known at a time

// What the warps tell one another. Whoever reads or writes here arrives at the barriers itself, none for another: so it
// is plain, to readers and to tools, what orders each access.
template <int kHeadSize>
struct Control {
  using S = Shape<kHeadSize>;
  uint64_t key_full[S::kStages], key_empty[S::kStages], value_full[S::kStages], value_empty[S::kStages];
  uint64_t item_full[kItems], item_empty[kItems], query_full[S::kQueryStages], query_empty[S::kQueryStages];
  uint32_t mapped[S::kStages];  // a bit for each box of keys that lies in a block
  Item items[kItems];
};

// The addresses of a Control's barriers: one register and constants.
template <int kHeadSize>
struct Barriers {
  using C = Control<kHeadSize>;
  uint32_t base;

  __device__ uint32_t key_full(int stage) const { return base + offsetof(C, key_full) + 8 * stage; }
  __device__ uint32_t key_empty(int stage) const { return base + offsetof(C, key_empty) + 8 * stage; }
  __device__ uint32_t value_full(int stage) const { return base + offsetof(C, value_full) + 8 * stage; }
  __device__ uint32_t value_empty(int stage) const { return base + offsetof(C, value_empty) + 8 * stage; }
  __device__ uint32_t item_full(int stage) const { return base + offsetof(C, item_full) + 8 * stage; }
  __device__ uint32_t item_empty(int stage) const { return base + offsetof(C, item_empty) + 8 * stage; }
  __device__ uint32_t query_full(int stage) const { return base + offsetof(C, query_full) + 8 * stage; }
  __device__ uint32_t query_empty(int stage) const { return base + offsetof(C, query_empty) + 8 * stage; }
};

// A position in a ring of stages; `parity` is that of the phase which ends when the stage has been filled.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// ---- Feeding ----

// Where the boxes of one item's tiles lie. Lane l knows about box l of a tile.
template <int kHeadSize>
class Boxes {
 public:
  using S = Shape<kHeadSize>;

  __device__ Boxes(const Launch& a, const Tile& t) : a_(a), begin_(t.keys_begin), end_(t.keys_end) {
    table_ = a.params.block_table + t.sequence * a.params.block_table_stride;
  }

  // The block and slot of this lane's box; the block is num_blocks (nowhere: it reads zeros) where no key is visible.
  __device__ void find(int tile, int& block, int& slot) const {
    const int lane = threadIdx.x % kWarp, key = tile * S::kKeys + lane * kBoxKeys;
    const int32_t num_blocks = int32_t(a_.params.num_blocks);
    block = num_blocks;
    slot = 0;
    if (lane >= S::kBoxes || key >= end_ || key + kBoxKeys <= begin_) return;
    // The usual block size without the multiplication: measured, 2 % of a call.
    const int column = a_.block_size.value == kBoxKeys ? key / kBoxKeys : a_.block_size.divide(key);
    slot = key - column * int32_t(a_.block_size.value);
    const int32_t entry = table_[column];
    if (uint32_t(entry) < uint32_t(num_blocks)) block = entry;
  }

  // Does this lane's box hold keys that no row of the item sees, beside others?
  __device__ bool is_partial(int tile) const {
    const int key = tile * S::kKeys + threadIdx.x % kWarp * kBoxKeys;
    return (key < begin_ && begin_ < key + kBoxKeys) || (key < end_ && end_ < key + kBoxKeys);
  }

  __device__ bool is_visible(int key) const { return key >= begin_ && key < end_; }

 private:
  const Launch& a_;
  const int32_t* table_;
  int32_t begin_, end_;
};

// This lane's box of a tile, one copy for each panel.
template <int kHeadSize>
__device__ void copy_boxes(uint32_t stage, const CUtensorMap& map, uint32_t barrier, int head, int block, int slot) {
  using S = Shape<kHeadSize>;
  const uint32_t target = stage + threadIdx.x % kWarp * S::kBoxBytes;
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel)
    copy_box(target + panel * S::kPanelBytes, map, barrier, panel * 64, slot, head, block);
}

template <int kHeadSize>
__device__ void feed_keys(const Launch& a, Control<kHeadSize>& control, Barriers<kHeadSize> barriers, uint32_t stages) {
  using S = Shape<kHeadSize>;
  const int lane = threadIdx.x % kWarp;
  wait_for_predecessor();
  let_dependents_start();  // not before: they read what the schedule says
  const bool works = int32_t(blockIdx.x) < a.header->num_blocks;
  const Units units = units_of(a, works);
  int32_t unit = works ? __shfl_sync(kFullMask, take_unit(a), 0) : 0, word = read_item(a, units, unit);
  Ring<S::kStages> keys;
  Ring<kItems> ring;
#pragma unroll 1
  for (;; ring.advance()) {
    Item& item = control.items[ring.stage];
    const bool more = unit < units.end;
    wait(barriers.item_empty(ring.stage), ring.parity ^ 1);
    if (lane < kItemWords) {
      reinterpret_cast<int32_t*>(&item)[lane] = word;
      arrive(barriers.item_full(ring.stage));
    }
    __syncwarp();
    if (!more) return;
    const int32_t taken = take_unit(a);  // reaches this warp while it feeds the item
    const Tile tile = item.tile;
    const int32_t head = item.kv_head;
    const Boxes<kHeadSize> boxes(a, tile);
    const int first = first_tile<S::kKeys>(tile);
    const int last = last_tile<S::kKeys>(tile);
    int block, slot;
    boxes.find(last, block, slot);
#pragma unroll 1
    for (int number = last; number >= first; --number) {
      int next_block = 0, next_slot = 0;
      if (number > first) boxes.find(number - 1, next_block, next_slot);
      const uint32_t full = barriers.key_full(keys.stage);
      wait(barriers.key_empty(keys.stage), keys.parity ^ 1);
      const uint32_t mapped = __ballot_sync(kFullMask, block != int32_t(a.params.num_blocks)) & S::kAllMapped;
      if (lane == 0) {
        control.mapped[keys.stage] = mapped;
        arrive_expecting(full, S::kTileBytes);
      }
      __syncwarp();
      if (lane < S::kBoxes) copy_boxes<kHeadSize>(stages + keys.stage * S::kTileBytes, a.keys, full, head, block, slot);
      __syncwarp();
      keys.advance();
      block = next_block;
      slot = next_slot;
      if (number == last) {
        unit = __shfl_sync(kFullMask, taken, 0);
        word = read_item(a, units, unit);
      }
    }
  }
}

// Values of keys that no row of the item sees must not enter a product, not even with a weight of zero: rows of a box
// that is partly visible are copied one by one, the others set to zero. Called by a whole warp, for box `box` of a tile.
template <int kHeadSize>
__device__ __forceinline__ void copy_visible_rows(const Launch& a, const Boxes<kHeadSize>& boxes, uint32_t stage,
                                                  int32_t head, int tile, int box, int32_t block, int32_t slot) {
  using S = Shape<kHeadSize>;
  constexpr int kChunks = kHeadSize / 8;
  const Cache& cache = a.params.value_cache;
  const bool mapped = block != int32_t(a.params.num_blocks);
  const char* base = static_cast<const char*>(cache.data) + 2 * (head * cache.head_stride);
#pragma unroll 1
  for (int index = threadIdx.x % kWarp; index < kBoxKeys * kChunks; index += kWarp) {
    const int row = index / kChunks, chunk = index % kChunks;
    const bool valid =
        mapped && boxes.is_visible(tile * S::kKeys + box * kBoxKeys + row) && chunk * 8 < cache.head_size;
    const char* source = base + 2 * (block * cache.block_stride + (slot + row) * cache.slot_stride) + 16 * chunk;
    const uint32_t target =
        stage + chunk / 8 * S::kPanelBytes + (box * kBoxKeys + row) * 128 + ((chunk % 8 ^ row % 8) << 4);
    copy_async(target, valid ? source : static_cast<const char*>(cache.data), valid, mma::streaming_policy());
  }
}

template <int kHeadSize>
__device__ void feed_values(const Launch& a, const Control<kHeadSize>& control, Barriers<kHeadSize> barriers,
                            uint32_t stages) {
  using S = Shape<kHeadSize>;
  const int lane = threadIdx.x % kWarp;
  Ring<S::kStages> values;
  Ring<kItems> ring;
#pragma unroll 1
  for (;; ring.advance()) {
    wait(barriers.item_full(ring.stage), ring.parity);
    const Tile tile = control.items[ring.stage].tile;
    const int32_t head = control.items[ring.stage].kv_head;
    arrive(barriers.item_empty(ring.stage));
    if (head < 0) return;
    const Boxes<kHeadSize> boxes(a, tile);
    const int first = first_tile<S::kKeys>(tile);
    int number = last_tile<S::kKeys>(tile), block, slot;
    boxes.find(number, block, slot);
#pragma unroll 1
    for (; number >= first; --number) {
      int next_block = 0, next_slot = 0;
      if (number > first) boxes.find(number - 1, next_block, next_slot);
      const uint32_t full = barriers.value_full(values.stage);
      const uint32_t stage = stages + values.stage * S::kTileBytes;
      wait(barriers.value_empty(values.stage), values.parity ^ 1);
      const bool partial = lane < S::kBoxes && boxes.is_partial(number);
      if (lane < S::kBoxes && !partial) copy_boxes<kHeadSize>(stage, a.values, full, head, block, slot);
      __syncwarp();
      const uint32_t all_partial = __ballot_sync(kFullMask, partial);
      if (all_partial != 0) {
#pragma unroll 1
        for (uint32_t left = all_partial; left != 0; left &= left - 1) {
          const int box = __ffs(int(left)) - 1;
          copy_visible_rows<kHeadSize>(a, boxes, stage, head, number, box, __shfl_sync(kFullMask, block, box),
                                       __shfl_sync(kFullMask, slot, box));
        }
        mma::commit_copies();
        mma::wait_for_copies<0>();
        fence_async_proxy();
        __syncwarp();
      }
      if (lane == 0) arrive_expecting(full, S::kTileBytes - __popc(all_partial) * S::kBoxBytes * S::kPanels);
      __syncwarp();
      values.advance();
      block = next_block;
      slot = next_slot;
    }
  }
}

// Brings the packed rows of items: whole tokens x the heads of the group. Rows past the sequence's end bring others'
// queries or zeros: their results are never stored. Called by one thread.
template <int kHeadSize>
__device__ void feed_queries(const Launch& a, const Control<kHeadSize>& control, Barriers<kHeadSize> barriers,
                             uint32_t stages) {
  using S = Shape<kHeadSize>;
  Ring<S::kQueryStages> queries;
  Ring<kItems> ring;
#pragma unroll 1
  for (;; ring.advance(), queries.advance()) {
    wait(barriers.item_full(ring.stage), ring.parity);
    const Item& item = control.items[ring.stage];
    const int32_t head = item.kv_head, token = item.tile.token + item.tile.first_row / a.group;
    const uint32_t full = barriers.query_full(queries.stage), stage = stages + queries.stage * S::kQueryBytes;
    wait(barriers.query_empty(queries.stage), queries.parity ^ 1);
    if (head < 0) return arrive(full);
    arrive_expecting(full, S::kPanels * 128 * a.tile_rows);
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel)
      copy_box(stage + panel * S::kQueryPanelBytes, a.queries, full, panel * 64, head * a.group, token, 0);
    arrive(barriers.item_empty(ring.stage));
  }
}

// ---- Computing ----

// One warpgroup: 64 packed rows of each item.
template <class T, int kHeadSize, bool kSoftcap>
class Consumer {
 public:
  using S = Shape<kHeadSize>;
  static constexpr int kScores = S::kKeys / 2, kOut = kHeadSize / 2;  // registers

  __device__ Consumer(const Launch& a, const Control<kHeadSize>& control, Barriers<kHeadSize> barriers,
                      uint32_t queries, uint32_t keys, uint32_t values)
      : a_(a), control_(control), barriers_(barriers), queries_(queries), keys_(keys), values_(values) {
    number_ = threadIdx.x / kGroupThreads - 1;
  }

  __device__ void run() {
    if (number_ == 0) arrive_named(turn(0), 2 * kGroupThreads);  // the first turn is the first warpgroup's
    Ring<kItems> ring;
    Ring<S::kQueryStages> queries;
#pragma unroll 1
    for (;; ring.advance(), queries.advance()) {
      wait(barriers_.item_full(ring.stage), ring.parity);
      const Item item = control_.items[ring.stage];
      wait(barriers_.query_full(queries.stage), queries.parity);
      if (item.kv_head < 0) return;
      arrive(barriers_.item_empty(ring.stage));
      attend(item, queries.stage);
    }
  }

 private:
  // Named barriers: warpgroups issue products in turn, so that the softmax of one lies under the products of another.
  __device__ static int turn(int number) { return 1 + number; }
  __device__ void await_turn() const { sync_named(turn(number_) + signs_, 2 * kGroupThreads); }
  __device__ void pass_turn() const {
    arrive_named(turn(number_ + 1 == S::kConsumers ? 0 : number_ + 1), 2 * kGroupThreads);
  }

  __device__ static void release(uint32_t barrier) {
    if (threadIdx.x % kWarp == 0) arrive(barrier);
  }

  // S = Q K^T of a tile.
  __device__ void multiply_keys(float (&scores)[kScores], uint64_t queries, int stage) const {
    const uint64_t keys = at(operand(1024, 0), keys_ + stage * S::kTileBytes);
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      const int panel = step / 4, inside = step % 4 * 32;
      Product<T, S::kKeys>::of_shared(scores, queries + (panel * S::kQueryPanelBytes + inside) / 16,
                                      keys + (panel * S::kPanelBytes + inside) / 16, step > 0);
    }
    commit_products();
  }

  // O += P V of a tile.
  __device__ void multiply_values(float (&out)[kOut], const uint32_t (&weights)[S::kKeys / 16][4], int stage) const {
    const uint64_t values = at(operand(1024, S::kPanelBytes), values_ + stage * S::kTileBytes);
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
      Product<T, kHeadSize>::add_registers(out, weights[step], values + step * 2048 / 16);
    commit_products();
  }

  __device__ void to_logits(float (&scores)[kScores], const Rows& rows, int tile, uint32_t mapped) const {
    if constexpr (kSoftcap) {
      const float factor = a_.params.scale / a_.params.softcap;
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = bounded_tanh(scores[i] * factor);
    }
    const int32_t first = tile * S::kKeys;
    if (__builtin_expect(mapped != S::kAllMapped || first < rows.all_begin || first + S::kKeys > rows.all_end, 0))
      hide<S::kKeys>(scores, rows, first, [mapped](int key) { return mapped >> (key / kBoxKeys) & 1; });
  }

  // The scores of a tile, once the product is done: their stage is free, hidden ones are -inf, their base is known.
  __device__ void examine(float (&scores)[kScores], Softmax& softmax, const Rows& rows, int tile, float factor) {
    pin(scores);
    uint32_t mapped = 0;
    if (threadIdx.x % kWarp == 0) {
      mapped = *const_cast<const volatile uint32_t*>(&control_.mapped[examined_ring_.stage]);
      arrive(barriers_.key_empty(examined_ring_.stage));
    }
    mapped = __shfl_sync(kFullMask, mapped, 0);
    examined_ring_.advance();
    to_logits(scores, rows, tile, mapped);
    softmax.follow(scores, factor);
  }

  // Weights have no sign, but the compiler does not know: asking all lanes for one, and using the answer, makes it round
  // them here, and not when this warpgroup has its turn.
  __device__ void weigh(float (&scores)[kScores], uint32_t (&weights)[S::kKeys / 16][4], Softmax& softmax,
                        float factor) {
    softmax.weigh(scores, factor);
    round(scores, weights);
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < S::kKeys / 4; ++i) all |= weights[i / 4][i % 4];
    signs_ = __any_sync(kFullMask, int32_t(all) < 0);
  }

  // The scores of a tile, and O += P V of the tile before, whose weights are given; then the weights of this tile.
  __device__ void attend_tile(float (&scores)[kScores], uint32_t (&weights)[S::kKeys / 16][4], float (&out)[kOut],
                              Softmax& softmax, const Rows& rows, uint64_t queries, int tile, float factor) {
    wait(barriers_.key_full(key_ring_.stage), key_ring_.parity);
    wait(barriers_.value_full(value_ring_.stage), value_ring_.parity);
    await_turn();
    begin_products();
    multiply_keys(scores, queries, key_ring_.stage);
    key_ring_.advance();
    begin_products();
    multiply_values(out, weights, value_ring_.stage);
    pass_turn();
    wait_for_products<1>();
    examine(scores, softmax, rows, tile, factor);
    // A branch must lie between here and the second wait, which the compiler moves up as far as it can.
    if (softmax.shrinks) {
      wait_for_products<0>();
      pin(out);
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] *= softmax.shrink[i / 2 % 2];
    }
    wait_for_products<0>();
    pin(out);
    release(barriers_.value_empty(value_ring_.stage));
    value_ring_.advance();
    weigh(scores, weights, softmax, factor);
  }

  // The layout of a product's result is that of the next product's operand.
  __device__ static void round(const float (&scores)[kScores], uint32_t (&weights)[S::kKeys / 16][4]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1], T{});
  }

  __device__ void attend(const Item& item, int query_stage) {
    const Tile& tile = item.tile;
    const Rows rows = rows_of_thread(a_, tile, item.kv_head, number_ * 64);
    const uint64_t queries = at(operand(1024, 0), queries_ + query_stage * S::kQueryBytes + number_ * 64 * 128);
    const float factor = (kSoftcap ? a_.params.softcap : a_.params.scale) * kLog2e;
    const int first = first_tile<S::kKeys>(tile);
    int number = last_tile<S::kKeys>(tile);
    float scores[kScores], out[kOut];
    uint32_t weights[S::kKeys / 16][4];
    Softmax softmax;
    softmax.begin();
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] = 0.0f;

    wait(barriers_.key_full(key_ring_.stage), key_ring_.parity);
    pin(scores);
    begin_products();
    multiply_keys(scores, queries, key_ring_.stage);
    key_ring_.advance();
    wait_for_products<0>();
    examine(scores, softmax, rows, number, factor);
    weigh(scores, weights, softmax, factor);
#pragma unroll 1
    for (--number; number >= first; --number) attend_tile(scores, weights, out, softmax, rows, queries, number, factor);
    release(barriers_.query_empty(query_stage));
    wait(barriers_.value_full(value_ring_.stage), value_ring_.parity);
    pin(out);
    begin_products();
    multiply_values(out, weights, value_ring_.stage);
    softmax.finish();
    wait_for_products<0>();
    pin(out);
    release(barriers_.value_empty(value_ring_.stage));
    value_ring_.advance();
    if (tile.num_parts > 1)
      store_part<kHeadSize>(a_, out, softmax, tile, item.kv_head, number_ * 64, factor);
    else
      store_rows<T, kHeadSize>(a_, out, softmax, rows, factor);
  }

  const Launch& a_;
  const Control<kHeadSize>& control_;
  Barriers<kHeadSize> barriers_;
  uint32_t queries_, keys_, values_;
  int number_;
  int signs_ = 0;  // always: see weigh()
  Ring<S::kStages> key_ring_, examined_ring_, value_ring_;  // keys: next to multiply, next to release
};

// ---- The kernel ----

template <int kHeadSize>
__device__ void set_up(const Launch& a, Barriers<kHeadSize> barriers) {
  using S = Shape<kHeadSize>;
  constexpr int kConsumerWarps = S::kConsumers * 4;
  if (threadIdx.x == 0) {
    prefetch_map(a.keys);
    prefetch_map(a.values);
    prefetch_map(a.queries);
    for (int i = 0; i < S::kStages; ++i) {
      init_barrier(barriers.key_full(i), 1);
      init_barrier(barriers.value_full(i), 1);
      init_barrier(barriers.key_empty(i), kConsumerWarps);
      init_barrier(barriers.value_empty(i), kConsumerWarps);
    }
    for (int i = 0; i < kItems; ++i) {
      init_barrier(barriers.item_full(i), kItemWords);
      // Those that compute, a warp that feeds values, the thread that feeds queries.
      init_barrier(barriers.item_empty(i), S::kConsumers * kGroupThreads + kWarp + 1);
    }
    for (int i = 0; i < S::kQueryStages; ++i) {
      init_barrier(barriers.query_full(i), 1);
      init_barrier(barriers.query_empty(i), kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

template <class T, int kHeadSize, bool kSoftcap>
__global__ void __launch_bounds__(Shape<kHeadSize>::kThreads, 1) attention(const __grid_constant__ Launch a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<kHeadSize>;
  extern __shared__ char memory[];
  __shared__ Control<kHeadSize> control;
  const uint32_t queries = (shared_address(memory) + 1023) / 1024 * 1024;
  const uint32_t keys = queries + S::kQueryStages * S::kQueryBytes, values = keys + S::kStages * S::kTileBytes;
  Barriers<kHeadSize> barriers;
  asm volatile("mov.u32 %0, %1;" : "=r"(barriers.base) : "r"(shared_address(&control)));  // once: it is no constant
  set_up<kHeadSize>(a, barriers);
  if (threadIdx.x < kGroupThreads) {
    give_registers<S::kFeederRegisters>();
    const int warp = threadIdx.x / kWarp;
    if (warp == 0) {
      feed_keys<kHeadSize>(a, control, barriers, keys);
    } else if (warp == 1) {
      feed_values<kHeadSize>(a, control, barriers, values);
    } else if (warp == 2) {
      if (threadIdx.x % kWarp == 0) feed_queries<kHeadSize>(a, control, barriers, queries);
    } else {
      zero_outside_spans(a);
    }
  } else {
    take_registers<S::kConsumerRegisters>();
    Consumer<T, kHeadSize, kSoftcap>(a, control, barriers, queries, keys, values).run();
  }
#endif
}

template <class T>
void launch_class(const Launch& launch, int head_size_class, cudaStream_t stream) {
  dispatch_instance(launch, head_size_class, [&](auto size, auto softcap) {
    constexpr int kHeadSize = decltype(size)::value;
    using S = Shape<kHeadSize>;
    launch_blocks<attention<T, kHeadSize, decltype(softcap)::value>>(launch, S::kThreads, S::kSharedBytes, stream);
  });
}

}  // namespace paged_kv::cuda::prefill
