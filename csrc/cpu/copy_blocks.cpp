// Copies whole blocks for all lanes. Every read comes before any write: where a block that is read is also written,
// its bytes are set aside first; all other pairs are copied straight.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../params.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_kv::cpu {
namespace {

constexpr int64_t kBytesPerThread = 128 << 10;  // below, a second thread costs more than it saves

struct Pair {
  int64_t source, destination;
};

bool overlap(const CopyLane& read, const CopyLane& written) {
  const char* read_end = read.source + read.source_blocks * read.source_stride;
  const char* written_end = written.destination + written.destination_blocks * written.destination_stride;
  return read.source < written_end && written.destination < read_end;
}

// Can a copy of one lane change what another, or the same, still has to read? Block numbers alone do not tell: between
// two pools the same number means different memory.
bool lanes_alias(const CopyBlocksParams& params) {
  for (int64_t read = 0; read < params.num_lanes; ++read)
    for (int64_t written = 0; written < params.num_lanes; ++written)
      if (overlap(params.lanes[read], params.lanes[written])) return true;
  return false;
}

std::vector<Pair> mapped_pairs(const CopyBlocksParams& params) {
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < params.num_pairs; ++i) {
    const Pair pair{params.block_mapping[2 * i], params.block_mapping[2 * i + 1]};
    if (pair.source >= 0 && pair.destination >= 0) pairs.push_back(pair);
  }
  return pairs;
}

// Moves the pairs whose source another pair overwrites to the front; returns how many there are.
int64_t endangered_first(std::vector<Pair>& pairs) {
  std::vector<int64_t> written;
  for (const Pair& pair : pairs) written.push_back(pair.destination);
  std::sort(written.begin(), written.end());
  const auto safe = std::stable_partition(pairs.begin(), pairs.end(), [&](const Pair& pair) {
    return std::binary_search(written.begin(), written.end(), pair.source);
  });
  return safe - pairs.begin();
}

struct Context {
  const CopyBlocksParams& params;
  const std::vector<Pair>& pairs;
  int64_t num_staged;         // pairs at the front that go through `staging`
  int64_t bytes_per_pair;     // over all lanes
  std::vector<char> staging;  // [num_staged, bytes_per_pair]
};

bool in_range(const CopyLane& lane, const Pair& pair) {
  return pair.source < lane.source_blocks && pair.destination < lane.destination_blocks;
}

const char* source_of(const CopyLane& lane, const Pair& pair) { return lane.source + pair.source * lane.source_stride; }

char* destination_of(const CopyLane& lane, const Pair& pair) {
  return lane.destination + pair.destination * lane.destination_stride;
}

// Calls visit(lane, staged bytes) for every lane of a staged pair.
template <class Visit>
void for_each_staged(Context& context, Visit visit) {
  char* staged = context.staging.data();
  for (int64_t i = 0; i < context.num_staged; ++i) {
    for (int64_t l = 0; l < context.params.num_lanes; ++l) {
      const CopyLane& lane = context.params.lanes[l];
      if (in_range(lane, context.pairs[i])) visit(lane, context.pairs[i], staged);
      staged += lane.bytes;
    }
  }
}

// Item = lane * number of straight pairs + pair: a lane's pairs follow one another.
void copy_straight(void* pointer, int64_t first, int64_t last) {
  const Context& context = *static_cast<const Context*>(pointer);
  const int64_t num_straight = int64_t(context.pairs.size()) - context.num_staged;
  for (int64_t item = first; item < last; ++item) {
    const CopyLane& lane = context.params.lanes[item / num_straight];
    const Pair& pair = context.pairs[context.num_staged + item % num_straight];
    if (!in_range(lane, pair)) continue;
    const char* source = source_of(lane, pair);
    char* destination = destination_of(lane, pair);
    if (source != destination) std::memcpy(destination, source, size_t(lane.bytes));
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& params) {
  std::vector<Pair> pairs = mapped_pairs(params);
  if (pairs.empty() || params.num_lanes == 0) return;
  Context context{params, pairs, endangered_first(pairs), 0, {}};
  if (context.num_staged > 0 && !lanes_alias(params)) context.num_staged = 0;
  for (int64_t l = 0; l < params.num_lanes; ++l) context.bytes_per_pair += params.lanes[l].bytes;
  context.staging.resize(size_t(context.num_staged * context.bytes_per_pair));

  for_each_staged(context, [](const CopyLane& lane, const Pair& pair, char* staged) {
    std::memcpy(staged, source_of(lane, pair), size_t(lane.bytes));
  });
  const int64_t items = params.num_lanes * (int64_t(pairs.size()) - context.num_staged);
  const int64_t mean_bytes = std::max<int64_t>(1, context.bytes_per_pair / params.num_lanes);
  parallel_for(0, items, std::max<int64_t>(1, kBytesPerThread / mean_bytes), copy_straight, &context);
  for_each_staged(context, [](const CopyLane& lane, const Pair& pair, const char* staged) {
    std::memcpy(destination_of(lane, pair), staged, size_t(lane.bytes));
  });
}

}  // namespace paged_kv::cpu
