// Where the bags of a tile lie, of segment ids that ascend: nobody searches.

#ifndef RECOM_JAX_CUDA_SEGMENTS_CUH_
#define RECOM_JAX_CUDA_SEGMENTS_CUH_

#include "recom_stage.cuh"

namespace recom_cuda {

// A search of thousands of positions is a dozen loads one after the other, and a bag takes two:
// some five times as long as to sum a short bag up. A block has to see every id anyway, to know
// that they ascend (an id elsewhere may be one of its bags'), so it looks at all of them before it
// begins: a few rounds of loads that don't depend on each other say whether they ascend, and how
// many stand before the tile's bags and before their end, which are the places where those begin
// and end. Then neighbours that differ say where each of the tile's bags begins.

// Sums of two counts over the block, and whether `ok` holds for all its threads. All threads call
// it.
RECOM_FN bool count_block(i32& first, i32& last, bool ok) {
  __shared__ i32 counts[2 * (kThreads / 32)];
  const u32 a = __reduce_add_sync(0xffffffffu, static_cast<u32>(first));
  const u32 b = __reduce_add_sync(0xffffffffu, static_cast<u32>(last));
  __syncthreads();  // nobody reads what an earlier call left there
  if (threadIdx.x % 32 == 0) {
    counts[threadIdx.x / 32 * 2] = static_cast<i32>(a);
    counts[threadIdx.x / 32 * 2 + 1] = static_cast<i32>(b);
  }
  ok = __syncthreads_and(ok) != 0;
  first = last = 0;
#pragma unroll
  for (int k = 0; k < kThreads / 32; ++k) {
    first += counts[2 * k];
    last += counts[2 * k + 1];
  }
  return ok;
}

// Whether `total` segment ids ascend; if so, `tile` is the positions of bags [bag0, bag0 + bags).
// The whole block asks.
template <class F>
RECOM_FN bool find_segments(const F& seg, i64 total_wide, const Tile& t, Range& tile) {
  constexpr i32 kFlight = 8;
  const i32 total = static_cast<i32>(total_wide);  // the plan lets no more than 2^30 through
  const i64 bag0 = t.bag0, bag1 = t.bag0 + t.bags;
  i32 before = 0, upto = 0;
  bool ok = true;
#pragma unroll 1
  for (i32 q = static_cast<i32>(threadIdx.x); q < total; q += kThreads * kFlight) {
    i64 here[kFlight], next[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const i32 at = q + u * kThreads < total ? q + u * kThreads : total - 1;
      here[u] = seg(at);
      next[u] = seg(at + 1 < total ? at + 1 : at);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const bool in = q + u * kThreads < total;
      ok &= here[u] <= next[u];
      before += in && here[u] < bag0;
      upto += in && here[u] < bag1;
    }
  }
  ok = count_block(before, upto, ok);
  tile = Range{before, upto};
  return ok;
}

// Writes a tile's limits where its segment ids change. They ascend, so every limit is written, and
// once.
template <class L, class F>
RECOM_FN void mark_segments(const L& limits, const Tile& t, const Range& tile, const F& seg) {
  const i32 bag0 = static_cast<i32>(t.bag0), bag1 = bag0 + t.bags, n = tile.end - tile.begin;
  // Bags behind the last position: often many at once, of a batch that is not full.
  const i32 last = n > 0 ? static_cast<i32>(seg(tile.end - 1)) : bag0 - 1;
  for (i32 bag = last + 1 + static_cast<i32>(threadIdx.x); bag < bag1; bag += kThreads)
    limits.put(bag, n, n);
  for (i32 k = static_cast<i32>(threadIdx.x); k < n; k += kThreads) {
    const i32 q = tile.begin + k;
    const i32 here = static_cast<i32>(seg(q));
    const i32 before = k > 0 ? static_cast<i32>(seg(q - 1)) : bag0 - 1;
    if (before < here) {
      if (before >= bag0) limits.put_end(before, k);
      for (i32 bag = before + 1; bag < here; ++bag) limits.put(bag, k, k);
      limits.put_begin(here, k);
    }
    if (k + 1 == n) limits.put_end(here, n);
  }
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_SEGMENTS_CUH_
