// Bucketized floats: evenly spaced, irregular and unsorted boundaries.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 4, no reduction.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
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
      const i32 r2 = search_uniform<kRight>(r1, immediate<f32>(0), immediate<f32>(1073741824), 30);
      const i32 r3 = index_clip<i32>(r2, 32);
      const Row<f32, kVec> r0 = take<f32, kVec>(b9, r3, 4, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b16 + i64{bag} * 4 + f, r0);
    }
  }
}

// Class 1: rows of 4, no reduction.
template <int kVec>
__device__ __forceinline__ void class_1(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 4, kVec);
  const Worker me(p, t, kLanes, 18);
  const f32* const b3 = source<f32>(p, me.word(4));
  const f32* const b5 = source<f32>(p, me.word(6));
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
      const i32 r2 = search_sorted<kRight>(r1, b5 + 0, 6);
      const i32 r3 = index_clip<i32>(r2, 32);
      const Row<f32, kVec> r0 = take<f32, kVec>(b9, r3, 4, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b16 + i64{bag} * 4 + f, r0);
    }
  }
}

// Class 2: rows of 4, no reduction.
template <int kVec>
__device__ __forceinline__ void class_2(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 4, kVec);
  const Worker me(p, t, kLanes, 20);
  const f32* const b3 = source<f32>(p, me.word(4));
  const f32* const b5 = source<f32>(p, me.word(6));
  const i64 s7 = me.word(8);
  const f32* const b11 = source<f32>(p, me.word(12));
  f32* const b18 = target<f32>(p, me.word(19));
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 4; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 4;
      const i32 f = mine < 4 ? mine : 0;
      const f32 r1 = load_one(b3 + bag);
      const i32 r2 = search_scan<kLeft>(r1, b5 + 0, s7);
      const i32 r3 = immediate<i32>(0);
      const pred r4 = x_lt(r2, r3);
      const i32 r5 = immediate<i32>(32);
      const i32 r6 = x_add(r2, r5);
      const i32 r7 = x_select(r4, r2, r6);
      const i32 r8 = index_clip<i32>(r7, 32);
      const Row<f32, kVec> r0 = take<f32, kVec>(b11, r8, 4, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b18 + i64{bag} * 4 + f, r0);
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
    case 2: if (t.aligned) recom_cuda::class_2<4>(p, t); else recom_cuda::class_2<1>(p, t); break;
  }
}
