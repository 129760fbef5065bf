// The model whose stages tests.test_pipeline keeps.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 8, bags.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kRegion, 8, kVec);
  const int kSlices = kept_number(t.slices);
  constexpr int kShare = kLanes;
  const Worker me(p, t, kLanes, kSlices, 22);
  const Team<kShare> team(me, kSlices);
  constexpr bool kOnce = kLanes * kVec >= 8;
  const i64 s2 = me.word(3);
  const i64 s3 = me.word(4);
  const i32* const b5 = source<i32>(p, me.word(6));
  const f32* const b10 = source<f32>(p, me.word(11));
  auto* const out = kept(!kOnce || (me.slice == 0 && me.lane * kVec < 8) ? target<f32>(p, me.word(21)) + (kOnce ? me.lane * kVec : 0) : nullptr);
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = at + me.first < bags - 1 ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 8;
      const i32 f = mine < 8 ? mine : 0;
      Row<f32, kVec> r0 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
      i32 r8 = start_of<kSum>(immediate<i32>(0), team.rank);
      {
        const i32 total = static_cast<i32>(s2);
        const Range span{0, total};
        constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
        const i32 end = span.end;
        struct Read { i32 r1; };
        const auto* const from1 = kept(b5 + i64{bag} * s3);
        const auto read = [&](i32 at_q) -> Read {
          const i32 q = at_q < end ? at_q : 0;
          Read found;
          found.r1 = load_one(from1 + q);
          return found;
        };
        struct Position {
          bool in; i32 r7; i32 r9;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end;
          const i32 r1 = raw.r1;
          const i32 r2 = immediate<i32>(1000);
          const i32 r3 = x_rem(r1, r2);
          const i32 r4 = index_clip<i32>(r3, 1000);
          const i32 r5 = immediate<i32>(0);
          const pred r6 = x_ge(r1, r5);
          const i32 r7 = predicate(r4, r6);
          const i32 r9 = x_convert<i32>(r6);
          now.in = in;
          now.r7 = in ? r7 : static_cast<i32>(kSkipped);
          now.r9 = r9;
          return now;
        };
        const auto* const mine0 = kept(b10 + f);
        const i32 most = end;
        for (i32 done = 0; done < most; done += kOwn * team.size) {
          const i32 q0 = span.begin + done;
          Position now[kOwn];
          Read raw[kOwn];
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) raw[i] = read(q0 + i * team.size + team.rank);
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);
          #pragma unroll
          for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r8, now[i].r9);
          Flying<f32, f32, kVec> x0[kFlight]{};
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r7[kFlight];
            share_flight<kFlight>(team, r7, g, [&](int i) { return now[i].r7; });
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) fetch<false>(x0[u], mine0, r7[u], 8);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) r0 = combine<kSum>(r0, x0[u].row());
            }
          }
        }
        join_rows<kSum, kLanes>(r0, kSlices, me.thread);
        join_slices<kSum>(r8, kLanes / kShare, team.size);
      }
      const i32 r10 = immediate<i32>(1);
      const i32 r11 = x_max(r8, r10);
      const f32 r12 = x_convert<f32>(r11);
      const Row<f32, kVec> r13 = x_div(r0, r12);
      if (kOnce ? on && out != nullptr : has && me.slice == 0) store(out + i64{bag} * 12 + (kOnce ? 0 : f), r13);
    }
  }
}

// Class 1: rows of 4, no reduction.
template <int kVec>
__device__ __forceinline__ void class_1(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 4, kVec);
  const Worker me(p, t, kLanes, 18);
  const f32* const b3 = source<f32>(p, me.word(4));
  const f32* const b9 = source<f32>(p, me.word(10));
  f32* const b16 = target<f32>(p, me.word(17));
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 4; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 4;
      const i32 f = mine < 4 ? mine : 0;
      const f32 r1 = load_one(b3 + bag);
      const i32 r2 = search_uniform<kRight>(r1, immediate<f32>(0), immediate<f32>(1092616192), 10);
      const i32 r3 = index_clip<i32>(r2, 11);
      const Row<f32, kVec> r0 = take<f32, kVec>(b9, r3, 4, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b16 + 8 + i64{bag} * 12 + f, r0);
    }
  }
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 5)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned) recom_cuda::class_0<4>(p, t); else recom_cuda::class_0<1>(p, t); break;
    case 1: if (t.aligned) recom_cuda::class_1<4>(p, t); else recom_cuda::class_1<1>(p, t); break;
  }
}
