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

template <class T>
RECOM_FN T warp_sum(T x) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<T>(__reduce_add_sync(0xffffffffu, static_cast<u32>(x)));
  } else {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
  }
}
// Sums of two numbers over the block, and whether `ok` holds for all its threads. All threads call
// it.
template <class T>
RECOM_FN bool sum_block(T& first, T& last, bool ok) {
  __shared__ __align__(16) T sums[2 * (kThreads / 32)];  // a vector of them holds nothing else
  const T a = warp_sum(first), b = warp_sum(last);
  __syncthreads();  // nobody reads what an earlier call left there
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32 * 2] = a;
    sums[threadIdx.x / 32 * 2 + 1] = b;
  }
  ok = __syncthreads_and(ok) != 0;
  first = last = 0;
#pragma unroll
  for (int k = 0; k < kThreads / 32; ++k) {
    first += sums[2 * k];
    last += sums[2 * k + 1];
  }
  return ok;
}

// What a thread has seen of segment ids.
template <class T>
struct Seen {
  T bag0, bag1;
  i32 before = 0, upto = 0;
  bool ok = true;

  RECOM_FN void see(T here, T next) {
    ok &= here <= next;
    before += here < bag0;
    upto += here < bag1;
  }
};

// Whether `total` segment ids ascend; if so, `tile` is the positions of bags [bag0, bag0 + bags).
// The whole block asks.
template <class F>
RECOM_FN bool find_segments(const F& seg, i64 total_wide, const Tile& t, Range& tile) {
  using T = decltype(seg(0));
  constexpr i32 kFlight = 16, kRound = kThreads * kFlight, kLess = 8;
  const i32 total = static_cast<i32>(total_wide);  // the plan lets no more than 2^30 through
  Seen<T> seen{static_cast<T>(t.bag0), static_cast<T>(t.bag0 + t.bags)};
  i32 q = static_cast<i32>(threadIdx.x);
#pragma unroll 1
  for (; q + kRound - kThreads + 1 < total; q += kRound) {
    T here[kFlight], next[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      here[u] = seg(q + u * kThreads);
      next[u] = seg(q + u * kThreads + 1);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) seen.see(here[u], next[u]);
  }
  // What is left is less than a round: positions behind the end are the last one's.
#pragma unroll 1
  for (; q < total; q += kThreads * kLess) {
    T here[kLess], next[kLess];
#pragma unroll
    for (int u = 0; u < kLess; ++u) {
      const i32 at = q + u * kThreads < total ? q + u * kThreads : total - 1;
      here[u] = seg(at);
      next[u] = seg(at + 1 < total ? at + 1 : at);
    }
#pragma unroll
    for (int u = 0; u < kLess; ++u) {
      if (q + u * kThreads < total) seen.see(here[u], next[u]);
    }
  }
  const bool ok = sum_block(seen.before, seen.upto, seen.ok);
  tile = Range{seen.before, seen.upto};
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
