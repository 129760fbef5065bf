// Hashed ids, several widths, an offset that allows no vectors, and a bfloat16 table read as float32.
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
      const i32 r2 = immediate<i32>(50);
      const i32 r3 = x_rem(r1, r2);
      const i32 r4 = immediate<i32>(0);
      const pred r5 = x_lt(r3, r4);
      const i32 r6 = x_add(r3, r2);
      const i32 r7 = x_select(r5, r3, r6);
      const i32 r8 = index_clip<i32>(r7, 50);
      const Row<f32, kVec> r0 = take<f32, kVec>(b8, r8, 16, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b15 + i64{bag} * 43 + f, r0);
    }
  }
}

// Class 1: rows of 3, no reduction.
template <int kVec>
__device__ __forceinline__ void class_1(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 3, kVec);
  const Worker me(p, t, kLanes, 18);
  const i32* const b3 = source<i32>(p, me.word(4));
  const f32* const b9 = source<f32>(p, me.word(10));
  f32* const b16 = target<f32>(p, me.word(17));
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 3; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 3;
      const i32 f = mine < 3 ? mine : 0;
      const i32 r1 = load_one(b3 + bag);
      const i32 r2 = immediate<i32>(1);
      const i32 r3 = x_add(r1, r2);
      const i32 r4 = immediate<i32>(0);
      const pred r5 = x_lt(r3, r4);
      const i32 r6 = immediate<i32>(20);
      const i32 r7 = x_add(r3, r6);
      const i32 r8 = x_select(r5, r3, r7);
      const i32 r9 = index_clip<i32>(r8, 20);
      const Row<f32, kVec> r0 = take<f32, kVec>(b9, r9, 3, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b16 + 16 + i64{bag} * 43 + f, r0);
    }
  }
}

// Class 2: rows of 16, no reduction.
template <int kVec>
__device__ __forceinline__ void class_2(const Params& p, const Tile& t) {
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
      if (has && me.slice == 0) store(b15 + 19 + i64{bag} * 43 + f, r0);
    }
  }
}

// Class 3: rows of 8, no reduction.
template <int kVec>
__device__ __forceinline__ void class_3(const Params& p, const Tile& t) {
  constexpr int kLanes = lanes_for(kPlain, 8, kVec);
  const Worker me(p, t, kLanes, 18);
  const u32* const b3 = source<u32>(p, me.word(4));
  const bf16* const b9 = source<bf16>(p, me.word(10));
  f32* const b16 = target<f32>(p, me.word(17));
  const i32 bags = static_cast<i32>(t.bag0) + t.bags;
  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {
    const bool on = at + me.first < bags;
    const i32 bag = on ? at + me.first : bags - 1;
    for (i32 chunk = 0; chunk < 8; chunk += kLanes * kVec) {
      const i32 mine = chunk + me.lane * kVec;
      const bool has = on && mine < 8;
      const i32 f = mine < 8 ? mine : 0;
      const u32 r1 = load_one(b3 + bag);
      const u32 r2 = immediate<u32>(16);
      const u32 r3 = x_shr_l(r1, r2);
      const u32 r4 = x_xor(r1, r3);
      const u32 r5 = immediate<u32>(static_cast<i64>(2246822519ull));
      const u32 r6 = x_mul(r4, r5);
      const u32 r7 = immediate<u32>(101);
      const u32 r8 = x_rem(r6, r7);
      const i32 r9 = index_clip<i32>(r8, 101);
      const Row<f32, kVec> r0 = take<f32, kVec>(b9, r9, 8, f, immediate<f32>(0));
      if (has && me.slice == 0) store(b16 + 35 + i64{bag} * 43 + f, r0);
    }
  }
}

}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, 5)
recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = recom_cuda::tile_of(p);
  switch (t.cls) {
    case 0: if (t.aligned) recom_cuda::class_0<4>(p, t); else recom_cuda::class_0<1>(p, t); break;
    case 1: recom_cuda::class_1<1>(p, t); break;
    case 2: if (t.aligned) recom_cuda::class_2<4>(p, t); else recom_cuda::class_2<1>(p, t); break;
    case 3: if (t.aligned) recom_cuda::class_3<8>(p, t); else recom_cuda::class_3<1>(p, t); break;
  }
}
