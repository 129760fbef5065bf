// A padded bag: weights, a mask, the sum over its square root.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 32, bags.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kRegion, 32, kVec);
  const int kSlices = kept_number(t.slices);
  constexpr int kShare = kLanes;
  const Worker me(p, t, kLanes, kSlices, 25);
  const Team<kShare> team(me, kSlices);
  constexpr bool kOnce = kLanes * kVec >= 32;
  const i64 s2 = me.word(3);
  const i64 s3 = me.word(4);
  const i32* const b5 = source<i32>(p, me.word(6));
  const f32* const b9 = source<f32>(p, me.word(10));
  const i64 s12 = me.word(13);
  const f32* const b14 = source<f32>(p, me.word(15));
  auto* const out = kept(!kOnce || (me.slice == 0 && me.lane * kVec < 32) ? target<f32>(p, me.word(24)) + (kOnce ? me.lane * kVec : 0) : nullptr);
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = at + me.first < bags - 1 ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 32; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 32;
      const i32 f = mine < 32 ? mine : 0;
      Row<f32, kVec> r0 = spread<kVec>(start_of<kSum>(immediate<f32>(0), me.slice));
      i32 r7 = start_of<kSum>(immediate<i32>(0), team.rank);
      {
        const i32 total = static_cast<i32>(s2);
        const Range span{0, total};
        constexpr int kFlight = 4, kOwn = own_numbers(kShare, kFlight);
        const i32 end = span.end;
        struct Read { i32 r1; f32 r6; };
        const auto* const from1 = kept(b5 + i64{bag} * s3);
        const auto* const from6 = kept(b14 + i64{bag} * s12);
        const auto read = [&](i32 at_q) -> Read {
          const i32 q = at_q < end ? at_q : 0;
          Read found;
          found.r1 = load_one(from1 + q);
          found.r6 = load_one(from6 + q);
          return found;
        };
        struct Position {
          bool in; i32 r5; f32 r6; i32 r8;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end;
          const i32 r1 = raw.r1;
          const i32 r2 = index_clip<i32>(r1, 50);
          const i32 r3 = immediate<i32>(0);
          const pred r4 = x_ge(r1, r3);
          const i32 r5 = predicate(r2, r4);
          const f32 r6 = raw.r6;
          const i32 r8 = x_convert<i32>(r4);
          now.in = in;
          now.r5 = in ? r5 : static_cast<i32>(kSkipped);
          now.r6 = r6;
          now.r8 = r8;
          return now;
        };
        const auto* const mine0 = kept(b9 + f);
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
          for (int i = 0; i < kOwn; ++i) combine_if<kSum>(now[i].in, r7, now[i].r8);
          Flying<f32, f32, kVec> x0[kFlight]{};
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r5[kFlight];
            share_flight<kFlight>(team, r5, g, [&](int i) { return now[i].r5; });
            f32 r6[kFlight];
            share_flight<kFlight>(team, r6, g, [&](int i) { return now[i].r6; });
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r5[u] >= 0) fetch<false>(x0[u], mine0, r5[u], 32);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r5[u] >= 0) r0 = combine<kSum>(r0, x_mul(x0[u].row(), r6[u]));
            }
          }
        }
        join_rows<kSum, kLanes>(r0, kSlices, me.thread);
        join_slices<kSum>(r7, kLanes / kShare, team.size);
      }
      const i32 r9 = immediate<i32>(1);
      const i32 r10 = x_max(r7, r9);
      const f32 r11 = x_convert<f32>(r10);
      const f32 r12 = x_sqrt(r11);
      const Row<f32, kVec> r13 = x_div(r0, r12);
      if (kOnce ? on && out != nullptr : has && me.slice == 0) store(out + i64{bag} * 32 + (kOnce ? 0 : f), r13);
    }
  }
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 4)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned) recom_cuda::class_0<4>(p, t); else recom_cuda::class_0<1>(p, t); break;
  }
}
