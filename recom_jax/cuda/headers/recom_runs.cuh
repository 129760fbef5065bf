// Jagged bags of narrow rows: a block's threads share a tile's positions, not its bags.

#ifndef RECOM_JAX_CUDA_RUNS_CUH_
#define RECOM_JAX_CUDA_RUNS_CUH_

#include "recom_tile.cuh"

namespace recom_cuda {

// A warp that sums up one bag after the other spends most of its instructions between bags, where rows are narrow: it
// shuffles ids and joins slices. Here each team of kLanes threads (one row side by side) has a *run*: equally many positions,
// one behind another, whichever bags they belong to. It adds the rows of a bag up in their order, and no team tells another
// anything until the end, when bags that several runs share are joined, in the runs' order. (Segmented sums by equal parts,
// as in Merrill and Garland's sparse product, 2016.) What is joined where depends on the tile's limits alone: results are
// deterministic.
template <int kLanes>
struct Run {
  static constexpr int kTeams = kThreads / kLanes;
  int team, lane;
  i32 each, first, last;  // positions of a run; this team's, counted from the tile's first

  RECOM_FN explicit Run(const Range& tile)
      : team(static_cast<int>(threadIdx.x) / kLanes), lane(static_cast<int>(threadIdx.x) % kLanes) {
    const i32 n = tile.end > tile.begin ? tile.end - tile.begin : 0;
    each = ((n + kTeams - 1) / kTeams) | 1;  // odd: the ids of neighbouring teams lie in different banks
    first = team * each < n ? team * each : n;
    last = first + each < n ? first + each : n;
  }
};

// A vector of each thread: the sum of a run's first positions, whose bag began in a run before.
template <class R>
RECOM_FN R* run_sums() {
  static_assert(sizeof(R) <= 16, "a lane's vector does not fit");
  __shared__ __align__(16) u8 memory[kThreads * 16];
  return reinterpret_cast<R*>(memory);
}

// Waits for what the block brings to shared memory. `ok`: of this thread's bags none ends before it begins. Bags begin where the
// one before ends, as both are found the same way; so, if that holds for all threads, the tile's bags lie side by side.
RECOM_FN bool tile_is_there(bool ok) {
  copies_land();
  return __syncthreads_and(ok) != 0;
}

// The first of bags [low, high) that ends behind `position`, or the last of them.
template <class L>
RECOM_FN i32 bag_of(const L& limits, i32 low, i32 high, i32 position) {
  --high;
  while (low < high) {
    const i32 middle = (low + high) / 2;
    if (limits.in_tile(middle).end > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Sums all bags of a tile up. ids, limits: in shared memory; number(id): a row's number, kMissing or kSkipped; mine: this lane's
// share of row 0; done(bag, row): takes a bag's sum. The whole block calls it, when its tile is there.
template <int kKind, int kFlight, bool kLine, int kLanes, class T, int N, class E, class S, class I, class L, class F, class G>
RECOM_FN void sum_runs(const Run<kLanes>& run, const Tile& t, const L& limits, const I& ids, const E* mine, S stride,
                       const Row<T, N>& init, T fill, const F& number, const G& done) {
  using Index = decltype(number(ids.near(0)));
  using R = Row<T, N>;
  const i32 bag0 = static_cast<i32>(t.bag0), bags = bag0 + t.bags;
  for (i32 bag = bag0 + run.team; bag < bags; bag += Run<kLanes>::kTeams) {
    const Range it = limits.in_tile(bag);
    if (it.begin >= it.end) done(bag, init);
  }
  bool begun = true, goes_on = false;  // the bag at hand began in this run; it ends in another one
  i32 q = run.first, bag = bag0, end = 0;
  R acc = init;
  if (q < run.last) {
    bag = bag_of(limits, bag0, bags, q);
    const Range here = limits.in_tile(bag);
    end = here.end;
    begun = here.begin >= q;
    if (!begun) acc = spread<N>(start_of<kKind>(init.v[0], 1));
    goes_on = end > run.last;
  }
#pragma unroll 1
  while (q < run.last) {
    const i32 stop = goes_on ? run.last : end;
    Index row[kFlight];
    R x[kFlight];
    bool lost = false;
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const Index r = number(ids.near(q + u));
      row[u] = q + u < stop ? r : static_cast<Index>(kSkipped);
      lost |= row[u] == kMissing;
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (row[u] >= 0) x[u] = fetch<T, N, kLine>(mine, row[u], stride);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (row[u] >= 0) acc = combine<kKind>(acc, x[u]);
    }
    if (lost) {  // missing rows are rare, and all of them look alike
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (row[u] == kMissing) acc = combine<kKind>(acc, fill);
      }
    }
    q += kFlight;
    if (q >= stop && !goes_on) {  // the bag ends here
      if (begun) {
        done(bag, acc);
      } else {
        run_sums<R>()[threadIdx.x] = acc;
      }
      q = end;
      if (q < run.last) {  // the next one that isn't empty begins
        begun = true;
        acc = init;
        do {
          end = limits.in_tile(++bag).end;
        } while (end <= q);
        goes_on = end > run.last;
      }
    }
  }
  if (goes_on && !begun) run_sums<R>()[threadIdx.x] = acc;
  __syncthreads();
  if (!goes_on || !begun) return;
#pragma unroll 1
  for (i32 other = run.team + 1; other * run.each < end; ++other) {
    acc = combine<kKind>(acc, run_sums<R>()[other * kLanes + run.lane]);
  }
  done(bag, acc);
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_RUNS_CUH_
