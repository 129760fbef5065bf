// Maximum and minimum of bags of 16-bit rows, stored as they are.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 24, bags.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kRegion, 24, kVec);
  const int kSlices = kept_number(t.slices);
  constexpr int kShare = kLanes;
  const Worker me(p, t, kLanes, kSlices, 20);
  const Team<kShare> team(me, kSlices);
  constexpr bool kOnce = kLanes * kVec >= 24;
  const i64 s2 = me.word(3);
  const i64 s3 = me.word(4);
  const i32* const b5 = source<i32>(p, me.word(6));
  const f16* const b10 = source<f16>(p, me.word(11));
  auto* const out = kept(!kOnce || (me.slice == 0 && me.lane * kVec < 24) ? target<f16>(p, me.word(19)) + (kOnce ? me.lane * kVec : 0) : nullptr);
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = at + me.first < bags - 1 ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 24; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 24;
      const i32 f = mine < 24 ? mine : 0;
      Row<f32, kVec> r0 = spread<kVec>(start_of<kMax>(immediate<f32>(static_cast<i64>(4286578688ull)), me.slice));
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
          bool in; i32 r7;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end;
          const i32 r1 = raw.r1;
          const i32 r2 = immediate<i32>(0);
          const pred r3 = x_lt(r1, r2);
          const i32 r4 = immediate<i32>(50);
          const i32 r5 = x_add(r1, r4);
          const i32 r6 = x_select(r3, r1, r5);
          const i32 r7 = index_clip<i32>(r6, 50);
          now.in = in;
          now.r7 = in ? r7 : static_cast<i32>(kSkipped);
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
          Flying<f32, f16, kVec> x0[kFlight]{};
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r7[kFlight];
            share_flight<kFlight>(team, r7, g, [&](int i) { return now[i].r7; });
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) fetch<false>(x0[u], mine0, r7[u], 24);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) r0 = combine<kMax>(r0, x0[u].row());
            }
          }
        }
        join_rows<kMax, kLanes>(r0, kSlices, me.thread);
      }
      if (kOnce ? on && out != nullptr : has && me.slice == 0) store(out + i64{bag} * 24 + (kOnce ? 0 : f), r0);
    }
  }
}

// Class 1: rows of 24, bags.
template <int kVec>
__device__ __forceinline__ void class_1(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kRegion, 24, kVec);
  const int kSlices = kept_number(t.slices);
  constexpr int kShare = kLanes;
  const Worker me(p, t, kLanes, kSlices, 20);
  const Team<kShare> team(me, kSlices);
  constexpr bool kOnce = kLanes * kVec >= 24;
  const i64 s2 = me.word(3);
  const i64 s3 = me.word(4);
  const i32* const b5 = source<i32>(p, me.word(6));
  const f16* const b10 = source<f16>(p, me.word(11));
  auto* const out = kept(!kOnce || (me.slice == 0 && me.lane * kVec < 24) ? target<f16>(p, me.word(19)) + (kOnce ? me.lane * kVec : 0) : nullptr);
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = at + me.first < bags - 1 ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 24; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 24;
      const i32 f = mine < 24 ? mine : 0;
      Row<f32, kVec> r0 = spread<kVec>(start_of<kMin>(immediate<f32>(2139095040), me.slice));
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
          bool in; i32 r7;
        };
        const auto numbers = [&](i32 at_q, const Read& raw) -> Position {
          Position now;
          const bool in = at_q < end;
          const i32 r1 = raw.r1;
          const i32 r2 = immediate<i32>(0);
          const pred r3 = x_lt(r1, r2);
          const i32 r4 = immediate<i32>(50);
          const i32 r5 = x_add(r1, r4);
          const i32 r6 = x_select(r3, r1, r5);
          const i32 r7 = index_clip<i32>(r6, 50);
          now.in = in;
          now.r7 = in ? r7 : static_cast<i32>(kSkipped);
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
          Flying<f32, f16, kVec> x0[kFlight]{};
          #pragma unroll 1
          for (int g = 0; g < kOwn * kShare; g += kFlight) {
            if (done + g * kSlices >= most) break;
            i32 r7[kFlight];
            share_flight<kFlight>(team, r7, g, [&](int i) { return now[i].r7; });
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) fetch<false>(x0[u], mine0, r7[u], 24);
            }
            #pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              if (r7[u] >= 0) r0 = combine<kMin>(r0, x0[u].row());
            }
          }
        }
        join_rows<kMin, kLanes>(r0, kSlices, me.thread);
      }
      if (kOnce ? on && out != nullptr : has && me.slice == 0) store(out + i64{bag} * 24 + (kOnce ? 0 : f), r0);
    }
  }
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 4)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned) recom_cuda::class_0<8>(p, t); else recom_cuda::class_0<1>(p, t); break;
    case 1: if (t.aligned) recom_cuda::class_1<8>(p, t); else recom_cuda::class_1<1>(p, t); break;
  }
}
