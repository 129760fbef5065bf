// Jagged bags whose segment ids come in any order.
#include "recom_tile.cuh"

namespace recom_cuda {

// The same for segment ids in any order.
__device__ __noinline__ void class_0_any(const Params& p) {
  constexpr int kVec = 1;
  Gathered<kStageBytes / 1 * 0, kStageBytes / 1> gathered_0;
  for (i32 low = static_cast<i32>(tile_again(p).bag0), bags; low < end_of_tile(p); low = bags) {
    bags = end_of_tile(p);
    {
      const Worker me(p.words + tile_again(p).words);
      const i64 s2 = me.again(3);
      const i32* const b4 = source<i32>(p, me.again(5));
      const auto seg_0 = [&](i32 q) -> i32 {
        const i32 r0 = load_one(b4 + q);
        return static_cast<i32>(r0);
      };
      gathered_0.gather(seg_0, s2, low, bags);
    }
    const Tile t = tile_again(p);
    const int kLanes = t.lanes;
    const int kSlices = t.slices;
    constexpr int kShare = 1;
    const BlockWorker me(p, t, kLanes, kSlices);
    const Team<kShare> team(me, kSlices);
    const i64 s2 = me.again(3);
    const i32* const b4 = source<i32>(p, me.again(5));
    const auto seg_0 = [&](i32 q) -> i32 {
      const i32 r0 = load_one(b4 + q);
      return static_cast<i32>(r0);
    };
    for (i32 at = low; at < bags; at += me.step) {
      const bool on = at + me.first < bags;
      const i32 bag = on ? at + me.first : bags - 1;
      for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
        const i32 mine = chunk + me.lane * kVec;
        const bool has = on && mine < 8;
        const i32 f = mine < 8 ? mine : 0;
        const i32* const b7 = source<i32>(p, me.again(8));
        const f32* const b12 = source<f32>(p, me.again(13));
        Row<f32, kVec> r1 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
        f32 r9 = start_of<kSum>(immediate<f32>(0), team.rank);
        {
          [[maybe_unused]] const i32 total = gathered_0.n;
          const Range span{0, total};
          constexpr int kFlight = 1, kOwn = own_numbers(kShare, kFlight);
          const i32 end = span.end;
          struct Read { i32 r2; };
          const auto read = [&](i32 at_q) -> Read {
            const i32 q = gathered_0.at(at_q < end ? at_q : 0);
            Read found;
            found.r2 = load_one(b7 + q);
            return found;
          };
          struct Position {
            bool in; i32 r8; f32 r10;
          };
          const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
            Position now;
            const bool in = at_q < end;
            const i32 r2 = raw.r2;
            const i32 r3 = immediate<i32>(0);
            const pred r4 = x_lt(r2, r3);
            const i32 r5 = immediate<i32>(50);
            const i32 r6 = x_add(r2, r5);
            const i32 r7 = x_select(r4, r2, r6);
            const i32 r8 = index_clip<i32>(r7, 50);
            const f32 r10 = immediate<f32>(1065353216);
            now.in = in;
            now.r8 = in ? r8 : static_cast<i32>(kSkipped);
            now.r10 = r10;
            return now;
          };
          const auto* const mine1 = kept(b12 + f);
          const i32 most = end;
          for (i32 done = 0, met = 0; done < most; done += kLanes * kSlices) {
            const int rank = me.slice * kLanes + me.lane;
            const i32 asked = done + rank < end ? gathered_0.at(done + rank) : -1;
            const bool is = asked >= 0 && seg_0(asked) == bag;
            u32 those = said_by_team(is, kLanes * kSlices, rank);
            for (; those != 0; those &= those - 1) {
              if ((met++ & (kSlices - 1)) != me.slice) continue;
              const i32 q0 = done + __ffs(static_cast<int>(those)) - 1 - me.slice;
              Position now[kOwn];
              Read raw[kOwn];
              #pragma unroll
              for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
              #pragma unroll
              for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
              #pragma unroll
              for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r9, now[i].r10);
              #pragma unroll 1
              for (int g = 0; g < kOwn * kShare; g += kFlight) {
                if (done + g * kSlices >= most) break;
                i32 r8[kFlight];
                share_flight<kFlight>(team, r8, g, [&](int i) { return now[i].r8; });
                Row<f32, kVec> x1[kFlight];
                #pragma unroll
                for (int u = 0; u < kFlight; ++u) {
                  if (r8[u] >= 0) x1[u] = fetch<f32, kVec, true>(mine1, r8[u], 8);
                }
                #pragma unroll
                for (int u = 0; u < kFlight; ++u) {
                  if (r8[u] >= 0) r1 = combine<kSum>(r1, x1[u]);
                }
              }
            }
          }
          join_slices<kSum>(r1, kLanes, kSlices);
          join_slices<kSum>(r9, kLanes / kShare, team.size);
        }
        const f32 r11 = immediate<f32>(1065353216);
        const f32 r12 = x_max(r9, r11);
        const Row<f32, kVec> r13 = x_div(r1, r12);
        if (has && me.slice == 0) store(target<f32>(p, me.again(24)) + i64{bag} * 8 + f, r13);
      }
    }
  }
}

// The same for bags of kLongBag positions or more: all warps of the block sum one up.
__device__ __forceinline__ void class_0_long(const Params& p) {
  constexpr int kVec = 4;
  const Tile t = tile_again(p);
  constexpr int kLanes = lanes_for(kJagged, 8, kVec);
  const int kSlices = t.slices;
  constexpr int kShare = kLanes;
  const WarpWorker me(p, t, kLanes, kSlices);
  const Team<kShare> team(me, kSlices);
  const Parts parts(me);
  const i64 s2 = me.word(3);
  const i32* const b4 = source<i32>(p, me.word(5));
  const i32* const b7 = source<i32>(p, me.word(8));
  const f32* const b12 = source<f32>(p, me.word(13));
  auto* const out = kept(target<f32>(p, me.word(24)));
  const auto seg_0 = [&](i32 q) -> i32 {
    const i32 r0 = load_one(b4 + q);
    return static_cast<i32>(r0);
  };
  const Range tile_0{0, static_cast<i32>(s2)};
  const auto range_0 = [&](i64 bag) -> Range {
    return range_in(seg_0, tile_0, bag);
  };
  const auto takes_all = [&](i64 bag) -> bool { return is_long(range_0(bag)); };
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 bag = static_cast<i32>(t.bag0); bag < bags; ++bag) {
    if (!takes_all(bag)) continue;
    const bool on = parts.rank == 0;
    for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 8;
      const i32 f = mine < 8 ? mine : 0;
      Row<f32, kVec> r1 = spread<kVec>(start_of<kSum>(immediate<f32>(0), parts.rank + me.slice));
      f32 r9 = start_of<kSum>(immediate<f32>(0), parts.rank + team.rank);
      {
        [[maybe_unused]] const i32 total = static_cast<i32>(s2);
        const Range span = parts.of(range_in(seg_0, tile_0, bag));
        constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
        const i32 end = span.end;
        struct Read { i32 r2; };
        const auto read = [&](i32 at_q) -> Read {
          const i32 q = at_q < end ? at_q : 0;
          Read found;
          found.r2 = load_one(b7 + q);
          return found;
        };
        struct Position {
          bool in; i32 r8; f32 r10;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end;
          const i32 r2 = raw.r2;
          const i32 r3 = immediate<i32>(0);
          const pred r4 = x_lt(r2, r3);
          const i32 r5 = immediate<i32>(50);
          const i32 r6 = x_add(r2, r5);
          const i32 r7 = x_select(r4, r2, r6);
          const i32 r8 = index_clip<i32>(r7, 50);
          const f32 r10 = immediate<f32>(1065353216);
          now.in = in;
          now.r8 = in ? r8 : static_cast<i32>(kSkipped);
          now.r10 = r10;
          return now;
        };
        const auto* const mine1 = kept(b12 + f);
        const i32 most = team.most(end - span.begin);
        Row<f32, kVec> x1[kFlight]{};
        for (i32 done = 0; done < most; done += kOwn * team.size) {
          const i32 q0 = span.begin + done;
          Position now[kOwn];
          Read raw[kOwn];
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r9, now[i].r10);
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r8[kFlight];
            share_flight<kFlight>(team, r8, g, [&](int i) { return now[i].r8; });
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r8[u] >= 0) x1[u] = fetch<f32, kVec, true>(mine1, r8[u], 8);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r8[u] >= 0) r1 = combine<kSum>(r1, x1[u]);
            }
          }
        }
        join_slices<kSum>(r1, kLanes, kSlices);
        join_slices<kSum>(r9, kLanes / kShare, team.size);
        join_parts<kSum>(r1, me, kLanes, parts);
        join_parts<kSum>(r9, me, kLanes, parts);
      }
      const f32 r11 = immediate<f32>(1065353216);
      const f32 r12 = x_max(r9, r11);
      const Row<f32, kVec> r13 = x_div(r1, r12);
      if (has && me.slice == 0) store(out + i64{bag} * 8 + f, r13);
    }
  }
}

// Class 0: rows of 8, jagged bags.
template <int kVec, bool kStaged>
__device__ __forceinline__ bool class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kJagged, 8, kVec);
  const int kSlices = kept_number(t.slices);
  constexpr int kShare = kLanes;
  const WarpWorker me(p, t, kLanes, kSlices);
  const Team<kShare> team(me, kSlices);
  const i64 s2 = me.word(3);
  const i32* const b4 = source<i32>(p, me.word(5));
  const i32* const b7 = source<i32>(p, me.word(8));
  const f32* const b12 = source<f32>(p, me.word(13));
  auto* const out = kept(target<f32>(p, me.word(24)));
  no_long_bags();
  const auto seg_0 = [&](i32 q) -> i32 {
    const i32 r0 = load_one(b4 + q);
    return static_cast<i32>(r0);
  };
  const Looks looks{p, me, 25};
  Range tile_0;
  if (!find_segments(seg_0, s2, t, looks, tile_0)) return !searches(t);
  if (kStaged && !(Staged<i32, 0, 16384>::fits(tile_0, t.bags))) return class_0<kVec, false>(p, t);
  if (kStaged && searches(t) && !tile_ascends(seg_0, t, tile_0)) return false;
  Staged<i32, 0, 16384> staged_2(b7, tile_0);
  if (kStaged) staged_2.copy(b7, tile_0);
  Limits<0, 16384> limits_0(t, tile_0);
  if (kStaged) mark_segments(limits_0, t, tile_0, seg_0);
  if constexpr (kStaged) {
    const i32 bags = static_cast<i32>(t.bag0) + t.bags;
    for (Turn turn(t, me.step); turn.at < bags; turn.end()) {
      turn.draw(me.thread);
      const bool on = turn.at + me.first < bags;
      const i32 bag = on ? turn.at + me.first : bags - 1;
      for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
        const i32 mine = chunk + me.lane * kVec;
        const bool has = on && mine < 8;
        const i32 f = mine < 8 ? mine : 0;
        Row<f32, kVec> r1 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
        f32 r9 = start_of<kSum>(immediate<f32>(0), team.rank);
        {
          [[maybe_unused]] const i32 total = static_cast<i32>(s2);
          const Range span = kVec == 4 ? unless_long(limits_0.in_tile(bag)) : limits_0.in_tile(bag);
          constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
          const i32 end = span.end;
          struct Read { i32 r2; };
          const auto read = [&](i32 at_q) -> Read {
            Read found;
            found.r2 = staged_2.within(at_q);
            return found;
          };
          struct Position {
            bool in; i32 r8; f32 r10;
          };
          const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
            Position now;
            const bool in = at_q < end;
            const i32 r2 = raw.r2;
            const i32 r3 = immediate<i32>(0);
            const pred r4 = x_lt(r2, r3);
            const i32 r5 = immediate<i32>(50);
            const i32 r6 = x_add(r2, r5);
            const i32 r7 = x_select(r4, r2, r6);
            const i32 r8 = index_clip<i32>(r7, 50);
            const f32 r10 = immediate<f32>(1065353216);
            now.in = in;
            now.r8 = in ? r8 : static_cast<i32>(kSkipped);
            now.r10 = r10;
            return now;
          };
          const auto* const mine1 = kept(b12 + f);
          const i32 most = team.most(end - span.begin);
          for (i32 done = 0; done < most; done += kOwn * team.size) {
            const i32 q0 = span.begin + done;
            Position now[kOwn];
            Read raw[kOwn];
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r9, now[i].r10);
            #pragma unroll 1
            for (int g = 0; g < kOwn * kShare; g += kFlight) {
              if (done + g * kSlices >= most) break;
              i32 r8[kFlight];
              share_flight<kFlight>(team, r8, g, [&](int i) { return now[i].r8; });
              Row<f32, kVec> x1[kFlight];
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r8[u] >= 0) x1[u] = fetch<f32, kVec, true>(mine1, r8[u], 8);
              }
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r8[u] >= 0) r1 = combine<kSum>(r1, x1[u]);
              }
            }
          }
          if (kShare == 1 || most > 0) join_rows<kSum, kLanes>(r1, kSlices, me.thread); else r1 = spread<kVec>(immediate<f32>(0));
          if (kShare == 1 || most > 0) join_slices<kSum>(r9, kLanes / kShare, team.size); else r9 = immediate<f32>(0);
        }
        const f32 r11 = immediate<f32>(1065353216);
        const f32 r12 = x_max(r9, r11);
        const Row<f32, kVec> r13 = x_div(r1, r12);
        if (has && me.slice == 0) store(out + row_offset<kStaged>(bag, 8) + f, r13);
      }
    }
    __syncthreads();
  } else {
    const i32 bags = static_cast<i32>(t.bag0) + t.bags;
    for (Turn turn(t, me.step); turn.at < bags; turn.end()) {
      const WarpWorker me(p, t, kLanes, kSlices, true);
      const Team<kShare> team(me, kSlices);
      const bool on = turn.at + me.first < bags;
      const i32 bag = on ? turn.at + me.first : bags - 1;
      for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
        const i32 mine = chunk + me.lane * kVec;
        const bool has = on && mine < 8;
        const i32 f = mine < 8 ? mine : 0;
        const i64 s2 = me.again(3);
        const i32* const b4 = source<i32>(p, me.again(5));
        const i32* const b7 = source<i32>(p, me.again(8));
        const f32* const b12 = source<f32>(p, me.again(13));
        Row<f32, kVec> r1 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
        f32 r9 = start_of<kSum>(immediate<f32>(0), team.rank);
        {
          [[maybe_unused]] const i32 total = static_cast<i32>(s2);
          const auto seg_0 = [&](i32 q) -> i32 {
            const i32 r0 = load_one(b4 + q);
            return static_cast<i32>(r0);
          };
          const Range span = kVec == 4 ? unless_long(range_in(seg_0, tile_0, bag)) : range_in(seg_0, tile_0, bag);
          constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
          const i32 end = span.end;
          struct Read { i32 r2; };
          const auto read = [&](i32 at_q) -> Read {
            const i32 q = at_q < end ? at_q : 0;
            Read found;
            found.r2 = load_one(b7 + q);
            return found;
          };
          struct Position {
            bool in; i32 r8; f32 r10;
          };
          const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
            Position now;
            const bool in = at_q < end;
            const i32 r2 = raw.r2;
            const i32 r3 = immediate<i32>(0);
            const pred r4 = x_lt(r2, r3);
            const i32 r5 = immediate<i32>(50);
            const i32 r6 = x_add(r2, r5);
            const i32 r7 = x_select(r4, r2, r6);
            const i32 r8 = index_clip<i32>(r7, 50);
            const f32 r10 = immediate<f32>(1065353216);
            now.in = in;
            now.r8 = in ? r8 : static_cast<i32>(kSkipped);
            now.r10 = r10;
            return now;
          };
          const auto* const mine1 = kept(b12 + f);
          const i32 most = team.most(end - span.begin);
          for (i32 done = 0; done < most; done += kOwn * team.size) {
            const i32 q0 = span.begin + done;
            Position now[kOwn];
            Read raw[kOwn];
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r9, now[i].r10);
            Row<f32, kVec> x1[kFlight]{};
            #pragma unroll 1
            for (int g = 0; g < kOwn * kShare; g += kFlight) {
              if (done + g * kSlices >= most) break;
              i32 r8[kFlight];
              share_flight<kFlight>(team, r8, g, [&](int i) { return now[i].r8; });
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r8[u] >= 0) x1[u] = fetch<f32, kVec, true>(mine1, r8[u], 8);
              }
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r8[u] >= 0) r1 = combine<kSum>(r1, x1[u]);
              }
            }
          }
          if (kShare == 1 || most > 0) join_rows<kSum, kLanes>(r1, kSlices, me.thread); else r1 = spread<kVec>(immediate<f32>(0));
          if (kShare == 1 || most > 0) join_slices<kSum>(r9, kLanes / kShare, team.size); else r9 = immediate<f32>(0);
        }
        const f32 r11 = immediate<f32>(1065353216);
        const f32 r12 = x_max(r9, r11);
        const Row<f32, kVec> r13 = x_div(r1, r12);
        if (has && me.slice == 0) store(target<f32>(p, me.again(24)) + row_offset<kStaged>(bag, 8) + f, r13);
      }
      turn.draw(me.thread);
    }
    __syncthreads();
  }
  return false;
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 5)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned ? recom_cuda::class_0<4, true>(p, t) : recom_cuda::class_0<1, false>(p, t)) recom_cuda::class_0_any(p); if (recom_cuda::block_met_long()) recom_cuda::class_0_long(p); break;
  }
}

// Where segment ids that tiles have searched do not ascend.
extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 2)
recom_mend(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (!recom_cuda::all_ascend(p, t, 25)) recom_cuda::class_0_any(p); break;
  }
}
