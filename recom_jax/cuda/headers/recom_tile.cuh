// Which part of a tile a thread works on.

#ifndef RECOM_JAX_CUDA_TILE_CUH_
#define RECOM_JAX_CUDA_TILE_CUH_

#include "recom_rows.cuh"
#include "recom_search.cuh"
#include "recom_segments.cuh"
#include "recom_stage.cuh"

namespace recom_cuda {

RECOM_FN i64 load_word(const i64* at) {
#ifdef __CUDA_ARCH__
  i64 x;
  asm("ld.global.nc.L2::cache_hint.b64 %0, [%1], %2;" : "=l"(x) : "l"(at), "l"(stays()));
  return x;
#else
  return *at;
#endif
}
RECOM_FN Tile read_tile(const Tile* tile) {
  i64 words[4];
  const i64* const at = reinterpret_cast<const i64*>(tile);
#ifdef __CUDA_ARCH__
  const u64 policy = stays();
  asm("ld.global.nc.L2::cache_hint.v2.b64 {%0, %1}, [%2], %3;" : "=l"(words[0]), "=l"(words[1]) : "l"(at), "l"(policy));
  asm("ld.global.nc.L2::cache_hint.v2.b64 {%0, %1}, [%2+16], %3;" : "=l"(words[2]), "=l"(words[3]) : "l"(at), "l"(policy));
#else
  memcpy(words, at, sizeof(words));
#endif
  Tile t;
  static_assert(sizeof(Tile) == sizeof(words), "a tile is two vectors");
  memcpy(&t, words, sizeof(t));
  return t;
}
RECOM_FN Tile tile_of(const Params& p) { return read_tile(p.tiles + blockIdx.x); }
// The same, read again: nothing of it was kept meanwhile.
RECOM_FN Tile tile_again(const Params& p) {
  const Tile* tile = p.tiles + blockIdx.x;
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(tile));
#endif
  return read_tile(tile);
}
// The bag behind the tile's last one.
RECOM_FN i32 end_of_tile(const Params& p) {
  const Tile t = tile_again(p);
  return static_cast<i32>(t.bag0) + t.bags;
}

// A thread keeps its lane, slice and column; its bag moves by `step` each pass. Threads behind the last whole
// bag, and bags behind the tile's end, do what the last one does but store nothing, so that whole warps stay
// together for shuffles and every address is one that some bag really has.
struct Worker {
  const i64* words;  // the column's
  int lane, slice, first, step;
  int thread;  // of the block, or of the warp

  RECOM_FN explicit Worker(const i64* words) : words(words) {}
  // Without slices: any number of lanes.
  RECOM_FN Worker(const Params& p, const Tile& t, int lanes, int stride) : slice(0) {
    const int at = thread = static_cast<int>(threadIdx.x);
    lane = at % lanes;
    place(p, t, at / lanes, kThreads / lanes, stride);
  }
  // Lanes and slices are powers of two.
  RECOM_FN Worker(const Params& p, const Tile& t, int lanes, int slices, int stride) {
    const int at = thread = static_cast<int>(threadIdx.x);
    const int per_bag = lanes * slices, shift = 31 - __clz(per_bag);
    lane = at & (lanes - 1);
    slice = (at & (per_bag - 1)) >> (31 - __clz(lanes));
    place(p, t, at >> shift, kThreads >> shift, stride);
  }
  RECOM_FN i64 word(int k) const { return load_word(words + k); }
  // The same, read at this very place: the compiler would read it early, and keep it.
  RECOM_FN i64 late(int k) const {
#ifdef __CUDA_ARCH__
    i64 x;
    asm volatile("ld.global.nc.b64 %0, [%1];" : "=l"(x) : "l"(words + k));
    return x;
#else
    return words[k];
#endif
  }
  // The same, read again each time: the assembler would take what is constant out of loops.
  RECOM_FN i64 again(int k) const {
#ifdef __CUDA_ARCH__
    i64 x;
    asm volatile("ld.relaxed.cta.global.b64 %0, [%1];" : "=l"(x) : "l"(words + k) : "memory");
    return x;
#else
    return words[k];
#endif
  }

 private:
  // Which column and bag thread group `group` of `groups` has. Divisions take a hundred cycles before the first load: most
  // tiles need none.
  RECOM_FN void place(const Params& p, const Tile& t, int group, int groups, int stride) {
    u32 column = 0;
    first = group;
    step = groups;
    if (t.columns > 1) {
      const u32 columns = static_cast<u32>(t.columns);
      first = static_cast<int>(static_cast<u32>(group) / columns);
      column = static_cast<u32>(group) % columns;
      step = static_cast<int>(static_cast<u32>(groups) / columns);
    }
    if (first >= step) first = 1 << 30;  // no tile has so many bags
    words = p.words + t.words + static_cast<i64>(column) * stride;
  }
};

// ---- who does what ----

// The same where every warp goes its own way: `step` bags of a warp at once, `first` of them this thread's.
struct WarpWorker : Worker {
  // Kept, or the compiler asks which thread this is again and again; or not at all, but found out at this very place.
  RECOM_FN WarpWorker(const Params& p, const Tile& t, int lanes, int slices, bool anew = false)
      : Worker(p.words + t.words) {
    thread = anew ? thread_now() % 32 : kept_number(static_cast<int>(threadIdx.x % 32));
    // Lanes and slices are powers of two.
    const int per_bag = lanes * slices, shift = 31 - __clz(per_bag);
    step = 32 >> shift;
    first = thread >> shift;
    slice = (thread & (per_bag - 1)) >> (31 - __clz(lanes));
    lane = thread & (lanes - 1);
  }
};

// The same where all threads of a block take its bags together, of a tile of one column: jagged ones in any order.
struct BlockWorker : Worker {
  RECOM_FN BlockWorker(const Params& p, const Tile& t, int lanes, int slices) : Worker(p.words + t.words) {
    thread = static_cast<int>(threadIdx.x);
    // Lanes and slices are powers of two.
    const int per_bag = lanes * slices, shift = 31 - __clz(per_bag);
    step = kThreads >> shift;
    first = thread >> shift;
    slice = (thread & (per_bag - 1)) >> (31 - __clz(lanes));
    lane = thread & (lanes - 1);
  }
};

// Counts up; what was there before. The compiler makes much more of `atomicAdd`: it first adds up what the threads of a
// warp add, of which there is one.
RECOM_FN i32 count_shared(i32* at) {
#ifdef __CUDA_ARCH__
  i32 was;
  asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(was) : "r"(shared_address(at)) : "memory");
  return was;
#else
  return atomicAdd(at, 1);
#endif
}

// ---- bags that take a block ----
//
// A warp would have to go through a bag of thousands of positions alone, long after all others are done. It leaves such a bag,
// as if it were empty, to its block, whose teams sum up a part each when the other bags are done; the parts' sums are joined
// in their order. Which bags those are depends on their lengths alone, and so do the parts: results stay deterministic.
// Kernels have such code only if `Schedule.long` asks for it: what each bag is asked costs 1 to 3 percent.

constexpr i32 kLongBag = 2048;
RECOM_FN bool is_long(const Range& r) { return r.end - r.begin >= kLongBag; }
RECOM_FN i32* met_long() {
  __shared__ i32 met;
  return &met;
}
RECOM_FN Range unless_long(const Range& r) {
  if (!is_long(r)) return r;
  *static_cast<volatile i32*>(met_long()) = 1;  // a plain store: nothing that a register would have to be kept for
  return Range{r.begin, r.begin};
}
// Before the first bag.
RECOM_FN void no_long_bags() { *static_cast<volatile i32*>(met_long()) = 0; }
// Where bags turn out not to lie side by side, so that all are summed up another way: for the whole block, before anyone asks.
RECOM_FN void forget_long_bags() {
  no_long_bags();
  __syncthreads();
}
// All warps are through with their bags: the caller has met them at a barrier. This one tells the compiler that all threads
// go the same way: it would not believe that warps are together in the loop before, and synchronize them at each shuffle.
RECOM_FN bool block_met_long() { return __syncthreads_or(*static_cast<volatile i32*>(met_long()) != 0) != 0; }

// The part of a long bag that a thread's team sums up.
struct Parts {
  int rank, number;

  RECOM_FN explicit Parts(const WarpWorker& me)
      : rank(static_cast<int>(threadIdx.x) / 32 * me.step + me.first), number(kThreads / 32 * me.step) {}
  RECOM_FN Range of(const Range& r) const {
    const i32 n = r.end > r.begin ? r.end - r.begin : 0, each = (n + number - 1) / number;
    const i32 first = each * rank < n ? each * rank : n, last = first + each < n ? first + each : n;
    return Range{r.begin + first, r.begin + last};
  }
};

// Joins the teams' parts, in their order; all threads of the block call it, and have the result.
template <int kKind, class T>
RECOM_FN void join_parts(T& acc, const WarpWorker& me, int lanes, const Parts& parts) {
  static_assert(sizeof(T) <= 8 && kThreads * 8 <= kStageBytes, "a part's number does not fit");
  T* const all = reinterpret_cast<T*>(stage_memory());
  __syncthreads();
  if (me.slice == 0) all[parts.rank * lanes + me.lane] = acc;
  __syncthreads();
  acc = all[me.lane];
  for (int k = 1; k < parts.number; ++k) acc = combine<kKind>(acc, all[k * lanes + me.lane]);
}
template <int kKind, class T, int N>
RECOM_FN void join_parts(Row<T, N>& acc, const WarpWorker& me, int lanes, const Parts& parts) {
#pragma unroll
  for (int i = 0; i < N; ++i) join_parts<kKind>(acc.v[i], me, lanes, parts);
}

// Jagged bags take a warp longer or shorter, so the warps of a block take the next ones as they get ready. Which warp
// sums a bag up makes no difference to the sum.
struct Turn {
  i32 at;  // the warp's first bag

  RECOM_FN Turn(const Tile& t, int step) : begin_(static_cast<i32>(t.bag0)), step_(step) {
    __shared__ i32 next;
    next_ = &next;
    if (threadIdx.x == 0) next = kThreads / 32;
    copies_land();
    __syncthreads();
    at = begin_ + static_cast<i32>(threadIdx.x / 32) * step_;
  }
  // Asks for the next bags: the answer is on its way while these are summed up. `thread`: of the warp.
  RECOM_FN void draw(int thread) {
    if (thread == 0) drawn_ = count_shared(next_);
  }
  RECOM_FN void end() { at = begin_ + __shfl_sync(0xffffffffu, drawn_, 0) * step_; }

 private:
  i32* next_;
  i32 begin_, drawn_ = 0;
  int step_;
};

// How many positions each thread of a team computes the numbers of, so that all slices have a flight of rows.
RECOM_FN constexpr int own_numbers(int share, int flight) { return flight > share ? flight / share : 1; }

// The threads that share a bag's numbers: kShare lanes of each slice (1: no lane knows its neighbours'). A slice's own
// lanes hold its positions, so that a shuffle's source is the same lane in every slice.
template <int kShare>
struct Team {
  int size, rank;  // rank: which of `size` positions in a row is this thread's
  int thread;      // the worker's

  RECOM_FN Team(const Worker& me, int slices)
      : thread(me.thread), size(kShare * slices), rank((kShare == 1 ? 0 : me.lane) * slices + me.slice) {}
  // Positions that the warp's bags have at most, so that all of it goes round together. Shuffles of a part of a warp,
  // told by a mask that only the run knows, cost a search for the other members each time.
  RECOM_FN i32 most(i32 positions) const {
    if constexpr (kShare == 1) return positions;
    return static_cast<i32>(__reduce_max_sync(0xffffffffu, static_cast<u32>(positions > 0 ? positions : 0)));
  }
  // The same of two neighbouring positions, n even, of two lanes that know one each.
  template <class T>
  RECOM_FN void share_pair(T mine, T& first, T& second) const {
    static_assert(kShare == 2, "two lanes know a position each");
    const T theirs = shuffle_xor(mine, 1);
    const bool odd = (thread & 1) != 0;
    first = odd ? theirs : mine;
    second = odd ? mine : theirs;
  }
  // What the thread knows that computed the numbers of this slice's n-th position. The whole warp calls it.
  template <class T>
  RECOM_FN T share(T x, int n) const {
    if constexpr (kShare == 1) {
      return x;  // each slice computes its own
    } else {
      const int from = n % kShare;
      if constexpr (sizeof(T) == 8) {
        return bitcast_one<T>(__shfl_sync(0xffffffffu, bitcast_one<u64>(x), from, kShare));
      } else if constexpr (sizeof(T) == 4) {
        return bitcast_one<T>(__shfl_sync(0xffffffffu, bitcast_one<u32>(x), from, kShare));
      } else {
        return static_cast<T>(__shfl_sync(0xffffffffu, static_cast<i32>(x), from, kShare));
      }
    }
  }
};

// What the threads know that computed the numbers of this slice's positions g to g + kFlight; own(i) is what this one
// knows of its i-th. The whole warp calls it.
template <int kFlight, int kShare, class T, class F>
RECOM_FN void share_flight(const Team<kShare>& team, T (&out)[kFlight], int g, const F& own) {
  if constexpr (kShare == 2 && kFlight % 2 == 0) {
#pragma unroll
    for (int u = 0; u < kFlight; u += 2) team.share_pair(own(u / 2), out[u], out[u + 1]);
  } else {
#pragma unroll
    for (int u = 0; u < kFlight; ++u) out[u] = team.share(own(u / kShare), g + u);
  }
}

template <class T>
RECOM_FN const T* source(const Params& p, i64 place) {
  return reinterpret_cast<const T*>(p.buffer[place >> kOffsetBits] + (place & ((i64{1} << kOffsetBits) - 1)));
}
template <class T>
RECOM_FN T* target(const Params& p, i64 place) {
  return const_cast<T*>(source<T>(p, place));
}

// What the words behind a column's slots say of how its tiles search segment ids: each read where it is used, to hold no
// register in between.
struct Looks {
  const Params& p;
  const Worker& me;
  int behind;

  RECOM_FN u8* found() const { return target<u8>(p, me.late(behind)); }  // by tile: whether what it has looked at ascends
  RECOM_FN i32 tile(const Tile& t) const {
    return static_cast<i32>(static_cast<u32>(t.bag0) / static_cast<u32>(me.late(behind + 1)));
  }
  RECOM_FN u32 tiles() const { return static_cast<u32>(me.late(behind + 2)); }
};
// Whether all tiles have found that a column's ids ascend. The whole block asks, of a launch that follows theirs.
RECOM_FN bool all_ascend(const Params& p, const Tile& t, int behind) {
  const Worker me(p.words + t.words);
  const Looks looks{p, me, behind};
  const u8* const found = looks.found();
  const u32 tiles = looks.tiles();
  bool ok = true;
#pragma unroll 4
  for (u32 k = threadIdx.x; k < tiles; k += kThreads) ok &= found[k] != 0;
  return __syncthreads_and(ok) != 0;
}

// Whether those of n numbers ascend that this thread looks at: the threads of a block look at all.
template <class F>
RECOM_FN bool ascends(const F& f, i64 n) {
  bool ok = true;
#pragma unroll 4  // more on their way would take registers that the rest of the kernel has no use for
  for (i64 k = threadIdx.x; k + 1 < n; k += kThreads) ok &= f(k) <= f(k + 1);
  return ok;
}
// Whether n numbers ascend; the whole block asks.
template <class F>
RECOM_FN bool block_ascends(const F& f, i64 n) {
  return __syncthreads_and(ascends(f, n)) != 0;
}

// From n splits that ascend: [splits[bag], splits[bag + 1]), the last one's up to the end.
template <class T>
RECOM_FN Range split_range(const T* splits, i64 n_wide, i32 total, i32 bag) {
  const i32 n = static_cast<i32>(n_wide);  // the plan lets no more than 2^31 through
  if (bag >= n) return Range{total, total};
  const i64 first = static_cast<i64>(load_one(splits + bag));
  const i64 last = bag + 1 < n ? static_cast<i64>(load_one(splits + bag + 1)) : total;
  return Range{static_cast<i32>(first < 0 ? 0 : first < total ? first : total),
               static_cast<i32>(last < 0 ? 0 : last < total ? last : total)};
}
// From segment ids that ascend, those of a tile's bags at positions `tile`.
template <class F>
RECOM_FN Range range_in(const F& seg, const Range& tile, i64 bag) {
  const auto near = [&](i32 k) -> i64 { return seg(tile.begin + k); };
  const i32 n = tile.end - tile.begin;
  return Range{tile.begin + lower_bound(near, n, bag), tile.begin + lower_bound(near, n, bag + 1)};
}

// Bags as `jnp.repeat` makes them of n row splits, whatever the first: positions of a bag whose number is n - 1 end
// with the last position. `ascend` says whether the bags lie one behind another without wrapping; else the rest
// doesn't count.
template <class T>
struct SplitBags {
  const T* split;
  i64 n;

  RECOM_FN i64 at(i64 k) const { return static_cast<i64>(load_one(split + k)); }
  RECOM_FN bool ascend(const Tile&) const {
    const bool ok = block_ascends([&](i64 k) { return at(k); }, n);
    return ok && (n == 0 || static_cast<u64>(at(n - 1)) - static_cast<u64>(at(0)) < (u64{1} << 31));
  }
  RECOM_FN Range range(i32 total, i64 bag) const {
    if (bag >= n) return Range{total, total};
    const i64 first = at(bag) - at(0);
    const i64 last = bag + 1 < n ? at(bag + 1) - at(0) : total;
    return Range{static_cast<i32>(first < 0 ? 0 : first < total ? first : total),
                 static_cast<i32>(last < 0 ? 0 : last < total ? last : total)};
  }
};
// The same for n lengths: a thread adds them up on its way from bag to bag.
template <class T>
struct LengthBags {
  const T* length;
  i64 n;
  i64 tile = 0, before = 0;  // the tile's first bag, and where it starts
  i64 here = 0, start = 0;   // the bag at hand, and where it starts

  RECOM_FN i64 of(i64 k) const { return static_cast<i64>(load_one(length + k)); }
  RECOM_FN bool ascend(const Tile& t) {
    bool ok = true;
    i64 all = 0, front = 0;
#pragma unroll 4
    for (i64 k = threadIdx.x; k + 1 < n; k += kThreads) {
      const i64 l = of(k);
      ok &= l >= 0 && l < (i64{1} << 31);
      all += l;
      front += k < t.bag0 ? l : 0;
    }
    ok = sum_block(all, front, ok);
    here = tile = t.bag0;
    start = before = front;
    return ok && all < (i64{1} << 31);
  }
  RECOM_FN Range range(i32 total, i64 bag) {
    if (bag >= n) return Range{0, 0};
    if (bag < here) {
      here = tile;
      start = before;
    }
    for (; here < bag; ++here) start += of(here);
    const i64 last = bag + 1 < n ? start + of(bag) : total;
    return Range{static_cast<i32>(start < total ? start : total), static_cast<i32>(last < total ? last : total)};
  }
};

}  // namespace recom_cuda

#if RECOM_POINTERS == 0
// Fills the array of addresses that recom_fused reads.
extern "C" __global__ void recom_point(const __grid_constant__ recom_cuda::Pointing p) {
  const int i = blockIdx.x * recom_cuda::kThreads + threadIdx.x;
  if (i < p.n) p.to[i] = p.address[i];
}
#endif

#endif  // RECOM_JAX_CUDA_TILE_CUH_
