// Products with a one-hot matrix: NaN in rows that are not selected counts.
#include "recom_tile.cuh"

namespace recom_cuda {

// Class 0: rows of 8, no reduction.
template <int kVec>
__device__ __forceinline__ void class_0(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 8, kVec);
  const Worker me(p, t, kLanes, 15);
  const i32* const b3 = source<i32>(p, me.word(4));
  const f32* const b6 = source<f32>(p, me.word(7));
  f32* const b13 = target<f32>(p, me.word(14));
  const bool dirty_0 = block_non_finite(b6 + 0, 11, 8, 8);
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 8;
      const i32 f = mine < 8 ? mine : 0;
      const i32 r1 = load_one(b3 + bag);
      const i32 r2 = index_fill<i32>(r1, 11);
      Row<f32, kVec> r0 = take<f32, kVec>(b6, r2, 8, f, immediate<f32>(0));
      one_hot_finish(r0, b6 + 0, 11, 8, f, dirty_0, [&](i64 row) { return row == r2; });
      if (has && me.slice == 0) store(b13 + i64{bag} * 8 + f, r0);
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
