// Where the bags of a tile lie, of segment ids that ascend: few enough to look at, or many.

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

// ---- many ids ----
//
// Looks at all of them grow with the square of a column. Where the plan says so (Tile::columns is 0), a block trusts that
// they ascend: it searches its bags, looks at its share of the ids, and leaves behind whether those ascend. When all blocks
// are through, kernel recom_mend asks what they have left, and if any id is out of order sums the column's bags up anew. So
// nobody waits for anybody, and what order blocks run in makes no difference. Whatever the ids are, a search ends inside of
// them, and what it finds is checked before memory is addressed by it.

// Unlikely: where few ids are looked at, as nearly always, no time is to be lost.
RECOM_FN bool searches(const Tile& t) { return __builtin_expect(t.columns == 0, 0); }

// The block's search, by 1,024 places a round: positions of bags [bag0, bag0 + bags), and whether `ok` holds for all.
template <class F>
RECOM_FN bool search_block(const F& seg, i32 total, const Tile& t, bool ok, Range& tile) {
  using T = decltype(seg(0));
  constexpr i32 kProbes = 4, kWays = kThreads * kProbes;
  const T bag0 = static_cast<T>(t.bag0), bag1 = static_cast<T>(t.bag0 + t.bags);
  i32 first = 0, last = 0;  // what is looked for is among the n positions from there on, or behind them
  bool all = true;
#pragma unroll 1
  for (i32 n = total; n > 0;) {
    const i32 step = (n + kWays - 1) / kWays;
    T a[kProbes], b[kProbes];
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      const i32 at = (static_cast<i32>(threadIdx.x) + u * kThreads + 1) * step - 1;
      a[u] = at < n && first + at < total ? seg(first + at) : bag1;
      b[u] = at < n && last + at < total ? seg(last + at) : bag1;
    }
    i32 before = 0, upto = 0;
#pragma unroll
    for (int u = 0; u < kProbes; ++u) {
      before += a[u] < bag0;
      upto += b[u] < bag1;
    }
    all = sum_block(before, upto, ok);
    first += before * step;
    last += upto * step;
    n = step - 1;
  }
  tile = Range{first, last > first ? last : first};
  return all;
}

// Whether those of `total` ids ascend that this thread looks at, and their neighbours: the block looks at [first, end).
template <class F>
RECOM_FN bool share_ascends(const F& seg, i32 first, i32 end, i32 total) {
  bool ok = true;
#pragma unroll 4
  for (i32 q = first + static_cast<i32>(threadIdx.x); q < end; q += kThreads) {
    ok &= seg(q) <= seg(q + 1 < total ? q + 1 : q);
  }
  return ok;
}
// Finds the positions of a tile's bags; false if the block has seen ids that don't ascend: then its sums don't count. Of a
// class with segment ids of several kinds the last one's answer stays behind, as no block that has said no asks any further.
template <class F, class L>
RECOM_FN bool search_segments(const F& seg, i32 total, const Tile& t, const L& looks, Range& tile) {
  const u32 tiles = looks.tiles();
  const i32 share = static_cast<i32>((static_cast<u32>(total) + tiles - 1) / tiles), at = looks.tile(t) * share;
  const i32 first = at < total ? at : total, end = first + share < total ? first + share : total;
  const bool ok = search_block(seg, total, t, share_ascends(seg, first, end, total), tile);
  if (threadIdx.x == 0) looks.found()[looks.tile(t)] = ok;
  return ok;
}
// Whether the ids at a tile's positions ascend and are its bags': if all of the column do, they are. The whole block asks.
template <class F>
RECOM_FN bool tile_ascends(const F& seg, const Tile& t, const Range& tile) {
  using T = decltype(seg(0));
  bool ok = true;
#pragma unroll 4
  for (i32 q = tile.begin + static_cast<i32>(threadIdx.x); q < tile.end; q += kThreads) {
    const T here = seg(q), next = seg(q + 1 < tile.end ? q + 1 : q);
    ok &= here >= static_cast<T>(t.bag0) && here <= next && next < static_cast<T>(t.bag0 + t.bags);
  }
  return __syncthreads_and(ok) != 0;
}

// Whether `total` segment ids ascend; if so, `tile` is the positions of bags [bag0, bag0 + bags).
// The whole block asks. Where it searches, a no doesn't mean that it has to sum its bags up another
// way: others will.
template <class F, class L>
RECOM_FN bool find_segments(const F& seg, i64 total_wide, const Tile& t, const L& looks, Range& tile) {
  using T = decltype(seg(0));
  constexpr i32 kFlight = 16, kRound = kThreads * kFlight, kLess = 8;
  const i32 total = static_cast<i32>(total_wide);  // the plan lets no more than 2^30 through
  if (searches(t)) return search_segments(seg, total, t, looks, tile);
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

// ---- ids in any order ----

// What the threads of a team have said, a bit each: `size` of a warp's threads side by side, a power of two. `rank`: this
// one's. The whole warp says.
RECOM_FN u32 said_by_team(bool yes, int size, int rank) {
  const int first = static_cast<int>(threadIdx.x) % 32 - rank;
  return __ballot_sync(0xffffffffu, yes) >> first & (0xffffffffu >> (32 - size));
}

// A bit for each lane of the warp before this one. The GPU has it at hand: no register keeps it.
RECOM_FN u32 lanes_before(int lane) {
#ifdef __CUDA_ARCH__
  u32 x;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(x));
  return x;
#else
  return (1u << lane) - 1;
#endif
}

// The positions of some bags, in their order, in bytes [kFrom, kFrom + kBytes) of the stage: the block goes through all ids
// once, instead of once for each bag.
template <int kFrom, int kBytes>
struct Gathered {
  static constexpr i32 kMost = kBytes / 4;
  i32 n = 0;         // positions
  bool all = false;  // there is no room: every position, whichever bag's

  // Those of bags [bag0, bag1), fewer bags if there is no room: bag1 becomes what it is. The whole block calls it, and
  // may have read what was there before until then.
  template <class F>
  RECOM_FN void gather(const F& seg, i64 total_wide, i32 bag0, i32& bag1) {
    const i32 total = static_cast<i32>(total_wide);
#pragma unroll 1
    while ((n = count(seg, total, bag0, bag1)) > kMost && bag1 - bag0 > 1) bag1 = bag0 + (bag1 - bag0) / 2;
    all = n > kMost;
    if (all) n = total;
  }
  RECOM_FN i32 at(i32 k) const {
    return all ? k : load_shared<i32>(memory() + static_cast<u32>(k) * 4);
  }

 private:
  RECOM_FN static u32 memory() { return shared_address(stage_memory() + kFrom); }

  // How many positions are those bags', each of which is written down while there is room: a warp has ids side by side, and
  // knows from the others how many stand before its own. Goes on no further than to know that there are too many.
  template <class F>
  RECOM_FN i32 count(const F& seg, i32 total, i32 bag0, i32 bag1) const {
    using T = decltype(seg(0));
    constexpr int kFlight = 8, kWarps = kThreads / 32;
    __shared__ i32 counts[2][kWarps];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const T low = static_cast<T>(bag0), high = static_cast<T>(bag1);
    i32 before = 0;
    int turn = 0;
#pragma unroll 1
    for (i32 q0 = 0; q0 < total && before <= kMost; q0 += kThreads * kFlight) {
      const i32 mine = q0 + warp * (32 * kFlight) + lane;
      T id[kFlight];
      u32 theirs[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) id[u] = mine + u * 32 < total ? seg(mine + u * 32) : high;
      i32 some = 0;
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        theirs[u] = __ballot_sync(0xffffffffu, id[u] >= low && id[u] < high);
        some += __popc(theirs[u]);
      }
      if (lane == 0) counts[turn][warp] = some;
      __syncthreads();
      i32 at = before;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        at += w < warp ? counts[turn][w] : 0;
        before += counts[turn][w];
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const i32 k = at + __popc(theirs[u] & lanes_before(lane));
        if (id[u] >= low && id[u] < high && k < kMost) {
          store_shared(memory() + static_cast<u32>(k) * 4, static_cast<u32>(mine + u * 32));
        }
        at += __popc(theirs[u]);
      }
      turn ^= 1;  // a warp that is ahead writes where nobody reads any longer
    }
    __syncthreads();
    return before;
  }
};

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_SEGMENTS_CUH_
