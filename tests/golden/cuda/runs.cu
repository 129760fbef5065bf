// Jagged sums of narrow rows: a tile's positions are dealt out evenly.
#define RECOM_STAGE_BYTES 24576
#include "recom_runs.cuh"

namespace recom_cuda {

// The same for segment ids in any order.
__device__ __forceinline__ void class_0_any(const Params& p) {
  constexpr int kVec = 1;
  const Tile t = tile_again(p);
  const int kLanes = t.lanes;
  const int kSlices = t.slices;
  constexpr int kShare = 1;
  const BlockWorker me(p, t, kLanes, kSlices);
  const Team<kShare> team(me, kSlices);
  const i64 s2 = me.again(3);
  const i32* const b5 = source<i32>(p, me.again(6));
  const i64 s7 = me.again(8);
  const auto seg_3 = [&](i32 q) -> i32 {
    const i32 r0 = static_cast<i32>(q);
    const i32 r1 = search_scan<kRight>(r0, b5 + 0, s7);
    const i32 r2 = immediate<i32>(1);
    const i32 r3 = x_sub(r1, r2);
    return static_cast<i32>(r3);
  };
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 8;
      const i32 f = mine < 8 ? mine : 0;
      const i64 s2 = me.again(3);
      const i32* const b10 = source<i32>(p, me.again(11));
      const f32* const b15 = source<f32>(p, me.again(16));
      Row<f32, kVec> r4 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
      {
        const i32 total = static_cast<i32>(s2);
        const Range span{0, total};
        constexpr int kFlight = 1, kOwn = own_numbers(kShare, kFlight);
        const i32 end = span.end;
        struct Read { i32 r5; };
        const auto read = [&](i32 at_q) -> Read {
          const i32 q = at_q < end ? at_q : 0;
          Read found;
          found.r5 = load_one(b10 + q);
          return found;
        };
        struct Position {
          bool in; i32 r11;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end && seg_3(at_q) == bag;
          const i32 r5 = raw.r5;
          const i32 r6 = immediate<i32>(0);
          const pred r7 = x_lt(r5, r6);
          const i32 r8 = immediate<i32>(50);
          const i32 r9 = x_add(r5, r8);
          const i32 r10 = x_select(r7, r5, r9);
          const i32 r11 = index_clip<i32>(r10, 50);
          now.in = in;
          now.r11 = in ? r11 : static_cast<i32>(kSkipped);
          return now;
        };
        const auto* const mine4 = kept(b15 + f);
        const i32 most = end;
        for (i32 done = 0; done < most; done += kOwn * team.size) {
          const i32 q0 = span.begin + done;
          Position now[kOwn];
          Read raw[kOwn];
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r11[kFlight];
            share_flight<kFlight>(team, r11, g, [&](int i) { return now[i].r11; });
            Row<f32, kVec> x4[kFlight];
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r11[u] >= 0) x4[u] = fetch<f32, kVec, true>(mine4, r11[u], 8);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r11[u] >= 0) r4 = combine<kSum>(r4, x4[u]);
            }
          }
        }
        join_slices<kSum>(r4, kLanes, kSlices);
      }
      if (has && me.slice == 0) store(target<f32>(p, me.again(24)) + i64{bag} * 8 + f, r4);
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
  const i32* const b5 = source<i32>(p, me.word(6));
  const i64 s7 = me.word(8);
  const i32* const b10 = source<i32>(p, me.word(11));
  const f32* const b15 = source<f32>(p, me.word(16));
  auto* const out = kept(target<f32>(p, me.word(24)));
  const auto* const splits_3 = b5;
  const auto tile_3 = [&]() -> Range {
    const i32 total = static_cast<i32>(s2);
    const Range begin = split_range(splits_3, s7, total, t.bag0);
    return Range{begin.begin, split_range(splits_3, s7, total, t.bag0 + t.bags - 1).end};
  }();
  if (kStaged && !(Staged<i32, 0, 24576>::fits(tile_3, t.bags))) return class_0<kVec, false>(p, t);
  Staged<i32, 0, 24576> staged_5(b10, tile_3);
  if (kStaged) staged_5.copy(b10, tile_3);
  Limits<0, 24576> limits_3(t, tile_3);
  bool in_order_3 = true;
  if (kStaged) in_order_3 = limits_3.find(t, tile_3, [&](i32 at) -> Range {
    const i32 total = static_cast<i32>(s2);
    return split_range(splits_3, s7, total, at);
  });
  if constexpr (kStaged) {
    if (!tile_is_there(ascends([&](i64 k) { return static_cast<i64>(load_one(splits_3 + k)); }, s7) && in_order_3)) return true;
    const Run<kLanes> run(tile_3);
    const i32 mine = run.lane * kVec, f = mine < 8 ? mine : 0;
    const auto number = [&](i32 r5) -> i32 {
      const i32 r6 = immediate<i32>(0);
      const pred r7 = x_lt(r5, r6);
      const i32 r8 = immediate<i32>(50);
      const i32 r9 = x_add(r5, r8);
      const i32 r10 = x_select(r7, r5, r9);
      const i32 r11 = index_clip<i32>(r10, 50);
      return r11;
    };
    const auto done = [&](i32 bag, const Row<f32, kVec>& sum) {
      if (mine < 8) store(out + row_offset<true>(bag, 8) + f, sum);
    };
    sum_runs<kSum, 4, true>(run, t, limits_3, staged_5, kept(b15 + f), 8,
        spread<kVec>(immediate<f32>(0)), immediate<f32>(0), number, done);
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
        const i32* const b5 = source<i32>(p, me.again(6));
        const i64 s7 = me.again(8);
        const i32* const b10 = source<i32>(p, me.again(11));
        const f32* const b15 = source<f32>(p, me.again(16));
        Row<f32, kVec> r4 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
        {
          const i32 total = static_cast<i32>(s2);
          const auto* const splits_3 = b5;
          const Range span = split_range(splits_3, s7, total, bag);
          constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
          const i32 end = span.end;
          struct Read { i32 r5; };
          const auto read = [&](i32 at_q) -> Read {
            const i32 q = at_q < end ? at_q : 0;
            Read found;
            found.r5 = load_one(b10 + q);
            return found;
          };
          struct Position {
            bool in; i32 r11;
          };
          const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
            Position now;
            const bool in = at_q < end;
            const i32 r5 = raw.r5;
            const i32 r6 = immediate<i32>(0);
            const pred r7 = x_lt(r5, r6);
            const i32 r8 = immediate<i32>(50);
            const i32 r9 = x_add(r5, r8);
            const i32 r10 = x_select(r7, r5, r9);
            const i32 r11 = index_clip<i32>(r10, 50);
            now.in = in;
            now.r11 = in ? r11 : static_cast<i32>(kSkipped);
            return now;
          };
          const auto* const mine4 = kept(b15 + f);
          const i32 most = team.most(end - span.begin);
          for (i32 done = 0; done < most; done += kOwn * team.size) {
            const i32 q0 = span.begin + done;
            Position now[kOwn];
            Read raw[kOwn];
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
            Row<f32, kVec> x4[kFlight]{};
            #pragma unroll 1
            for (int g = 0; g < kOwn * kShare; g += kFlight) {
              if (done + g * kSlices >= most) break;
              i32 r11[kFlight];
              share_flight<kFlight>(team, r11, g, [&](int i) { return now[i].r11; });
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r11[u] >= 0) x4[u] = fetch<f32, kVec, true>(mine4, r11[u], 8);
              }
              #pragma unroll
              for (int u = 0; u < kFlight; ++u) {
                if (r11[u] >= 0) r4 = combine<kSum>(r4, x4[u]);
              }
            }
          }
          if (kShare == 1 || most > 0) join_rows<kSum, kLanes>(r4, kSlices, me.thread); else r4 = spread<kVec>(immediate<f32>(0));
        }
        if (has && me.slice == 0) store(target<f32>(p, me.again(24)) + row_offset<kStaged>(bag, 8) + f, r4);
      }
      turn.draw(me.thread);
    }
    const i32* const b5 = source<i32>(p, me.again(6));
    const i64 s7 = me.again(8);
    const auto* const splits_3 = b5;
    if (!block_ascends([&](i64 k) { return static_cast<i64>(load_one(splits_3 + k)); }, s7)) return true;
  }
  return false;
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 5)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned ? recom_cuda::class_0<4, true>(p, t) : recom_cuda::class_0<1, false>(p, t)) recom_cuda::class_0_any(p); break;
  }
}
