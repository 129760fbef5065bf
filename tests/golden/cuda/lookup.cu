// One plain lookup: rows of 64 bytes.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 16, no reduction.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 16, kVec);
  const Worker me(p, t, kLanes, 17);
  const i32* const b3 = source<i32>(p, me.word(4));
  const f32* const b8 = source<f32>(p, me.word(9));
  f32* const b15 = target<f32>(p, me.word(16));
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 16; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 16;
      const i32 f = mine < 16 ? mine : 0;
      const i32 r1 = load_one(b3 + bag);
      const i32 r2 = immediate<i32>(0);
      const pred r3 = x_lt(r1, r2);
      const i32 r4 = immediate<i32>(50);
      const i32 r5 = x_add(r1, r4);
      const i32 r6 = x_select(r3, r1, r5);
      const i32 r7 = index_clip<i32>(r6, 50);
      const Row<f32, kVec> r0 = take<f32, kVec>(b8, r7, 16, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b15 + i64{bag} * 16 + f, r0);
    }
  }
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 5)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned) recom_cuda::class_0<4>(p, t); else recom_cuda::class_0<1>(p, t); break;
  }
}
