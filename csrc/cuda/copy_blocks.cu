// Copies whole blocks for every layer in one launch; also swap_blocks. Memory bound: docs/kernels/copy_blocks.md.
#include <vector>

#include "device.cuh"
#include "kernels.h"
#include "launch.h"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;           // 16-byte loads in flight per thread before the first store
constexpr int kTablePairs = 2048;    // pairs whose destinations one hash table in shared memory holds
constexpr int kTableSize = 2 * kTablePairs;
constexpr int kTilePairs = 512;      // pairs made ready at a time: one per thread
constexpr int kBlocksPerSm = 2;
constexpr uint32_t kEmpty = 0xffffffffu;

struct Pair {
  int64_t source, destination;
};

// Lanes and, for swaps between pools, pairs travel by value in the kernel's parameters: nothing is copied to the device
// and nothing has to outlive the call.
template <int kLanes, int kPairs>
struct Launch {
  const int64_t* block_mapping;  // [num_pairs, 2] on the device, or null: `pairs` holds them
  int64_t num_pairs;
  int num_lanes;
  int chunks_per_lane;  // a lane's block is cut into this many chunks, so that few pairs still fill the chip
  bool may_chain;       // sources and destinations lie in the same pool
  int64_t source_blocks, destination_blocks;  // most of any lane: numbers beyond are no blocks
  CopyLane lanes[kLanes];
  Pair pairs[kPairs];
};

template <int kLanes, int kPairs>
__device__ Pair pair_at(const Launch<kLanes, kPairs>& p, int64_t index) {
  if constexpr (kPairs > 1) return p.pairs[index];
  return {p.block_mapping[2 * index], p.block_mapping[2 * index + 1]};
}

// Other pairs, of -1 above all, copy nothing.
template <class Launch>
__device__ bool is_pair(const Launch& p, Pair pair) {
  return uint64_t(pair.source) < uint64_t(p.source_blocks) &&
         uint64_t(pair.destination) < uint64_t(p.destination_blocks);
}

__device__ uint32_t hash(uint32_t block) { return (block * 2654435761u) >> (32 - 12); }
static_assert(kTableSize == 1 << 12, "hash() returns 12 bits");

// The part [begin, end) of a block of this lane that one thread block copies.
struct Range {
  int64_t begin, end;
};

__device__ Range range_of(const CopyLane& lane, int chunk, int chunks) {
  const int64_t step = (lane.bytes / chunks + 15) / 16 * 16 + 16;
  const int64_t begin = chunk * step;
  return {begin < lane.bytes ? begin : lane.bytes, begin + step < lane.bytes ? begin + step : lane.bytes};
}

__device__ bool in_lane(const CopyLane& lane, Pair pair) {
  return pair.source < lane.source_blocks && pair.destination < lane.destination_blocks;
}

// Each thread always copies the same bytes of a range, whatever the pair: copies of one thread need no barrier.
template <class Word>
__device__ void copy_words(const char* source, char* destination, Range range) {
  constexpr int64_t kStep = int64_t(kThreads) * sizeof(Word);
  int64_t at = range.begin + int64_t(threadIdx.x) * sizeof(Word);
  for (; at + (kUnroll - 1) * kStep < range.end; at += kUnroll * kStep) {
    Word words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = *reinterpret_cast<const Word*>(source + at + i * kStep);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) *reinterpret_cast<Word*>(destination + at + i * kStep) = words[i];
  }
  for (; at < range.end; at += kStep)
    *reinterpret_cast<Word*>(destination + at) = *reinterpret_cast<const Word*>(source + at);
}

__device__ bool is_wide(const CopyLane& lane) {
  const uint64_t all = uint64_t(lane.source) | uint64_t(lane.destination) | uint64_t(lane.source_stride) |
                       uint64_t(lane.destination_stride) | uint64_t(lane.bytes);
  return all % 16 == 0;
}

__device__ void copy_range(const CopyLane& lane, Pair pair, Range range) {
  if (!in_lane(lane, pair)) return;
  const char* source = lane.source + pair.source * lane.source_stride;
  char* destination = lane.destination + pair.destination * lane.destination_stride;
  if (source == destination) return;  // blocks of the same number are the same ones only within a pool
  if (is_wide(lane)) {
    copy_words<uint4>(source, destination, range);
  } else {
    copy_words<char>(source, destination, range);
  }
}

// ---- Chains. A pair is chained when its source is another pair's destination or the other way round. ----

__device__ bool test(const uint32_t* bits, int64_t index) { return bits[index / 32] >> (index % 32) & 1; }

// A pair that can be chained: within a pool, a block onto itself moves nothing that others read or write.
template <class Launch>
__device__ bool moves(const Launch& p, Pair pair) {
  return is_pair(p, pair) && pair.source != pair.destination;
}

// Sets chained[i] for every chained pair. Destinations go into a hash table, a table-full at a time; every source is
// then looked up. Returns (to all threads) whether there is any.
template <class Launch>
__device__ bool find_chains(const Launch& p, uint32_t* chained, uint32_t* keys, int32_t* owners) {
  for (int64_t word = threadIdx.x; word < (p.num_pairs + 31) / 32; word += kThreads) chained[word] = 0;
  bool found = false;
  for (int64_t start = 0; start < p.num_pairs; start += kTablePairs) {
    for (int i = threadIdx.x; i < kTableSize; i += kThreads) keys[i] = kEmpty;
    __syncthreads();
    const int64_t end = start + kTablePairs < p.num_pairs ? start + kTablePairs : p.num_pairs;
    for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
      const Pair pair = pair_at(p, i);
      if (!moves(p, pair)) continue;
      uint32_t at = hash(uint32_t(pair.destination));
      while (atomicCAS(&keys[at], kEmpty, uint32_t(pair.destination)) != kEmpty) at = (at + 1) % kTableSize;
      owners[at] = int32_t(i);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.num_pairs; i += kThreads) {
      const Pair pair = pair_at(p, i);
      if (!moves(p, pair)) continue;
      for (uint32_t at = hash(uint32_t(pair.source)); keys[at] != kEmpty; at = (at + 1) % kTableSize) {
        if (keys[at] != uint32_t(pair.source)) continue;
        found = true;
        atomicOr(&chained[i / 32], 1u << (i % 32));
        atomicOr(&chained[owners[at] / 32], 1u << (owners[at] % 32));
        break;
      }
    }
    __syncthreads();
  }
  return __syncthreads_or(found);
}

// The lowest chained pair for which `wanted` holds, or -1; the same for all threads.
template <class Launch, class Wanted>
__device__ int64_t search(const Launch& p, const uint32_t* chained, int64_t* result, Wanted&& wanted) {
  if (threadIdx.x == 0) *result = p.num_pairs;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_pairs; i += kThreads) {
    if (test(chained, i) && wanted(pair_at(p, i))) {
      atomicMin(reinterpret_cast<unsigned long long*>(result), static_cast<unsigned long long>(i));
      break;
    }
  }
  __syncthreads();
  const int64_t index = *result;
  __syncthreads();
  return index == p.num_pairs ? -1 : index;
}

template <class Launch, class Copy>
__device__ void for_my_ranges(const Launch& p, Copy&& copy) {
  const int pieces = p.num_lanes * p.chunks_per_lane;
  for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const CopyLane& lane = p.lanes[piece / p.chunks_per_lane];
    copy(lane, range_of(lane, piece % p.chunks_per_lane, p.chunks_per_lane));
  }
}

// A cycle of pairs, entered at pair `first`: its destination's old words are held in registers while the others move.
// A lane that is too short for some of the blocks leaves those pairs out. The walk is bounded, and may find no pair, as
// a destination given twice makes something that is no cycle.
template <class Launch, class Word>
__device__ void copy_cycle(const Launch& p, const uint32_t* chained, int64_t* result, int64_t first,
                           const CopyLane& lane, Range range) {
  constexpr int64_t kStep = int64_t(kThreads) * sizeof(Word);
  for (int64_t base = range.begin; base < range.end; base += kStep) {
    const int64_t at = base + int64_t(threadIdx.x) * sizeof(Word);
    const int64_t entry = pair_at(p, first).destination;
    const auto read = [&](int64_t block) {
      return *reinterpret_cast<const Word*>(lane.source + block * lane.source_stride + at);
    };
    Word held{};
    if (at < range.end && entry < lane.source_blocks) held = read(entry);
    int64_t index = first;
    for (int64_t step = 0; step < p.num_pairs && index >= 0; ++step) {
      const Pair pair = pair_at(p, index);
      const bool last = pair.source == entry;
      if (at < range.end && in_lane(lane, pair))
        *reinterpret_cast<Word*>(lane.destination + pair.destination * lane.destination_stride + at) =
            last ? held : read(pair.source);
      if (last) break;
      index = search(p, chained, result, [&](Pair other) { return other.destination == pair.source; });
    }
  }
}

// Copies chained pairs so that every read comes before any write: a pair goes when nobody still has to read its
// destination, then the pair that writes its source may; what is left over are cycles. Slow, and rare.
template <class Launch>
__device__ void copy_chains(const Launch& p, uint32_t* chained, int64_t* result) {
  const auto remove = [&](int64_t index) {
    __syncthreads();  // everybody has read the bits
    if (threadIdx.x == 0) chained[index / 32] &= ~(1u << (index % 32));
    __syncthreads();
  };
  const auto is_read = [&](int64_t block) {
    return search(p, chained, result, [&](Pair other) { return other.source == block; }) >= 0;
  };
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    int64_t at = i;
    while (at >= 0 && test(chained, at)) {
      const Pair pair = pair_at(p, at);
      if (is_read(pair.destination)) break;
      for_my_ranges(p, [&](const CopyLane& lane, Range range) { copy_range(lane, pair, range); });
      remove(at);
      at = search(p, chained, result, [&](Pair other) { return other.destination == pair.source; });
    }
  }
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    if (!test(chained, i)) continue;
    for_my_ranges(p, [&](const CopyLane& lane, Range range) {
      if (is_wide(lane)) {
        copy_cycle<Launch, uint4>(p, chained, result, i, lane, range);
      } else {
        copy_cycle<Launch, char>(p, chained, result, i, lane, range);
      }
    });
    for (int64_t at = i; at >= 0;) {
      const int64_t source = pair_at(p, at).source;
      remove(at);
      at = search(p, chained, result, [&](Pair other) { return other.destination == source; });
    }
  }
}

// The live pairs of this tile, in order (the same in every thread block), and their number.
__device__ int compact(bool live, Pair pair, Pair* list, int* warp_counts) {
  const unsigned votes = __ballot_sync(kFullMask, live);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) warp_counts[warp] = __popc(votes);
  __syncthreads();
  int before = 0, count = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    before += w < warp ? warp_counts[w] : 0;
    count += warp_counts[w];
  }
  if (live) list[before + __popc(votes & ((1u << lane) - 1))] = pair;
  __syncthreads();
  return count;
}

// Every thread block makes the list of pairs that really copy, then takes its share of (pair, lane, chunk) pieces: a
// mapping of -1 alone ends here, one live pair among hundreds still uses the whole chip.
template <int kLanes, int kPairs>
__global__ void __launch_bounds__(kThreads) copy_pairs(const __grid_constant__ Launch<kLanes, kPairs> p) {
  extern __shared__ uint32_t chained[];  // [num_pairs / 32] bits, only if may_chain
  __shared__ union {
    struct {
      uint32_t keys[kTableSize];
      int32_t owners[kTableSize];
    } table;
    Pair list[kTilePairs];
  } shared;
  __shared__ int warp_counts[kThreads / kWarp];
  __shared__ int64_t result;

  const bool any = [&] {
    bool found = false;
    for (int64_t i = threadIdx.x; i < p.num_pairs && !found; i += kThreads) found = is_pair(p, pair_at(p, i));
    return __syncthreads_or(found);
  }();
  if (!any) return;
  const bool chains = p.may_chain && find_chains(p, chained, shared.table.keys, shared.table.owners);

  const int pieces = p.num_lanes * p.chunks_per_lane;
  for (int64_t start = 0; start < p.num_pairs; start += kTilePairs) {
    const int64_t i = start + threadIdx.x;
    const Pair pair = i < p.num_pairs ? pair_at(p, i) : Pair{-1, -1};
    const bool live = is_pair(p, pair) && !(chains && test(chained, i));
    const int count = compact(live, pair, shared.list, warp_counts);
    for (int64_t work = blockIdx.x; work < int64_t(count) * pieces; work += gridDim.x) {
      const int piece = int(work % pieces);
      const CopyLane& lane = p.lanes[piece / p.chunks_per_lane];
      copy_range(lane, shared.list[work / pieces], range_of(lane, piece % p.chunks_per_lane, p.chunks_per_lane));
    }
    __syncthreads();
  }
  if (chains) copy_chains(p, chained, &result);
}

// ---- Host ----

// How many chunks a lane's block is cut into: enough for about 8 live pairs to fill the chip.
int chunks_for(const CopyLane* lanes, int64_t num_lanes, int64_t num_pairs) {
  int64_t longest = 0;
  for (int64_t i = 0; i < num_lanes; ++i) longest = lanes[i].bytes > longest ? lanes[i].bytes : longest;
  const int64_t most = divide_up(longest, int64_t(kThreads) * 16 * kUnroll);
  const int64_t wanted =
      divide_up(int64_t(current_device().num_sms) * kBlocksPerSm, num_lanes * (num_pairs < 8 ? num_pairs : 8));
  return int(most < 1 ? 1 : wanted < most ? wanted : most);
}

template <int kLanes, int kPairs>
void launch(const CopyLane* lanes, int64_t num_lanes, const int64_t* block_mapping, int64_t num_pairs,
            int64_t max_blocks, bool may_chain, cudaStream_t stream) {
  Launch<kLanes, kPairs> p{};
  p.block_mapping = kPairs > 1 ? nullptr : block_mapping;
  p.num_pairs = num_pairs;
  p.num_lanes = int(num_lanes);
  p.chunks_per_lane = chunks_for(lanes, num_lanes, num_pairs);
  p.may_chain = may_chain;
  for (int64_t i = 0; i < num_lanes; ++i) {
    p.lanes[i] = lanes[i];
    if (lanes[i].source_blocks > p.source_blocks) p.source_blocks = lanes[i].source_blocks;
    if (lanes[i].destination_blocks > p.destination_blocks) p.destination_blocks = lanes[i].destination_blocks;
  }
  if (kPairs > 1)
    for (int64_t i = 0; i < num_pairs; ++i) p.pairs[i] = {block_mapping[2 * i], block_mapping[2 * i + 1]};
  const int64_t shared_bytes = may_chain ? divide_up(num_pairs, 32) * 4 : 0;
  const int64_t pieces = num_pairs * num_lanes * p.chunks_per_lane;
  const int64_t grid = pieces < max_blocks ? pieces : max_blocks;
  auto* kernel = copy_pairs<kLanes, kPairs>;
  if (shared_bytes > 8192) {
    const int64_t most = current_device().shared_bytes - 40 * 1024;
    if (shared_bytes > most)
      throw std::invalid_argument("block_mapping must hold at most " + std::to_string(most * 8) + " pairs, got " +
                                  std::to_string(num_pairs));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), "copy_blocks");
  }
  kernel<<<unsigned(grid), kThreads, size_t(shared_bytes), stream>>>(p);
  check_launch("copy_blocks");
}

enum class Memory { device, pinned, pageable };

Memory memory_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeHost) return Memory::pinned;
  return attributes.type == cudaMemoryTypeUnregistered ? Memory::pageable : Memory::device;
}

// Pairs of blocks that follow one another on both sides.
struct Run {
  int64_t source, destination, blocks;
};

std::vector<Run> runs_of(const CopyBlocksParams& params) {
  std::vector<Run> runs;
  for (const int64_t *pair = params.block_mapping, *end = pair + 2 * params.num_pairs; pair < end; pair += 2) {
    if (pair[0] < 0 || pair[1] < 0) continue;
    if (!runs.empty() && pair[0] == runs.back().source + runs.back().blocks &&
        pair[1] == runs.back().destination + runs.back().blocks) {
      ++runs.back().blocks;
    } else {
      runs.push_back({pair[0], pair[1], 1});
    }
  }
  return runs;
}

bool is_dense(const CopyLane& lane) {
  return lane.source_stride == lane.bytes && lane.destination_stride == lane.bytes;
}

void copy_run(const CopyLane& lane, const Run& run, cudaStream_t stream) {
  const int64_t there = lane.source_blocks - run.source, here = lane.destination_blocks - run.destination;
  const int64_t fit = there < here ? there : here, blocks = run.blocks < fit ? run.blocks : fit;
  const int64_t at_once = is_dense(lane) ? blocks : 1;
  for (int64_t block = 0; block < blocks; block += at_once)
    check(cudaMemcpyAsync(lane.destination + (run.destination + block) * lane.destination_stride,
                          lane.source + (run.source + block) * lane.source_stride, size_t(at_once * lane.bytes),
                          cudaMemcpyDefault, stream),
          "swap_blocks");
}

// Whether the driver's copies are long enough to follow one another without gaps: then the copy engine gets more out of
// the link than a kernel does, and takes no SM from the step that runs beside.
bool suits_copy_engine(const CopyBlocksParams& params, const std::vector<Run>& runs) {
  constexpr int64_t kLongCopy = 256 << 10;  // bytes, on average
  int64_t bytes = 0;
  for (int64_t lane = 0; lane < params.num_lanes; ++lane) {
    if (!is_dense(params.lanes[lane])) return false;
    bytes += params.lanes[lane].bytes * params.num_pairs;
  }
  return bytes >= kLongCopy * int64_t(runs.size()) * params.num_lanes;
}

// The mapping lies in host memory. Pinned memory in short pieces is copied by a kernel that pairs travel to by value, a
// launch for every kPairs of them: over PCIe or NVLink few thread blocks are enough, the rest of the chip stays free.
void copy_with_host_mapping(const CopyBlocksParams& params, cudaStream_t stream) {
  constexpr int kLanes = 128, kPairs = 1024;
  constexpr int64_t kMaxBlocks = 32;
  bool pageable = false;  // then the driver's copies go through its staging buffers
  for (int64_t lane = 0; lane < params.num_lanes; ++lane)
    pageable |= memory_of(params.lanes[lane].source) == Memory::pageable ||
                memory_of(params.lanes[lane].destination) == Memory::pageable;
  const std::vector<Run> runs = runs_of(params);
  if (pageable || suits_copy_engine(params, runs)) {
    for (const Run& run : runs)
      for (int64_t lane = 0; lane < params.num_lanes; ++lane) copy_run(params.lanes[lane], run, stream);
    return;
  }
  for (int64_t lane = 0; lane < params.num_lanes; lane += kLanes) {
    const int64_t lanes = params.num_lanes - lane < kLanes ? params.num_lanes - lane : kLanes;
    for (int64_t pair = 0; pair < params.num_pairs; pair += kPairs) {
      const int64_t pairs = params.num_pairs - pair < kPairs ? params.num_pairs - pair : kPairs;
      launch<kLanes, kPairs>(params.lanes + lane, lanes, params.block_mapping + 2 * pair, pairs, kMaxBlocks, false,
                             stream);
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& params, cudaStream_t stream) {
  if (params.num_pairs == 0 || params.num_lanes == 0) return;
  constexpr int kFewLanes = 64, kLanes = 512;  // 4 KiB and 28 KiB of kernel parameters
  const int64_t max_blocks = int64_t(current_device().num_sms) * kBlocksPerSm;
  for (int64_t lane = 0; lane < params.num_lanes; lane += kLanes) {
    const int64_t lanes = params.num_lanes - lane < kLanes ? params.num_lanes - lane : kLanes;
    const CopyLane* first = params.lanes + lane;
    bool may_chain = false;
    for (int64_t i = 0; i < lanes; ++i) may_chain |= first[i].source == first[i].destination;
    const auto run = lanes <= kFewLanes ? launch<kFewLanes, 1> : launch<kLanes, 1>;
    run(first, lanes, params.block_mapping, params.num_pairs, max_blocks, may_chain, stream);
  }
}

void swap_blocks(const CopyBlocksParams& params, cudaStream_t stream) {
  if (params.num_pairs == 0 || params.num_lanes == 0) return;
  if (memory_of(params.block_mapping) == Memory::device) return copy_blocks(params, stream);
  copy_with_host_mapping(params, stream);
}

}  // namespace paged_kv::cuda
