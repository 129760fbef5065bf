// A tile's positions in shared memory: the ids that its bags read, and where each bag begins and ends.

#ifndef RECOM_JAX_CUDA_STAGE_CUH_
#define RECOM_JAX_CUDA_STAGE_CUH_

#include "recom_rows.cuh"

namespace recom_cuda {

// ---- what the second-level cache is told ----
//
// Tiles and words are read by every launch, and rows stream through the cache in between: they should stay. Ids are
// read once: they should go first.

#ifdef __CUDA_ARCH__
RECOM_FN u64 stays() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
RECOM_FN u64 goes() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#endif

// The positions of a bag.
struct Range {
  i32 begin, end;
};

// ---- positions of a whole tile, brought to shared memory ----
//
// Bags of a tile lie side by side, and so do their positions: all of them are on their way at once, instead of a few for
// each bag in turn.

#ifndef RECOM_STAGE_BYTES
#define RECOM_STAGE_BYTES 16384
#endif
constexpr int kStageBytes = RECOM_STAGE_BYTES;
RECOM_FN u8* stage_memory() {
  __shared__ __align__(16) u8 memory[kStageBytes];
  return memory;
}
// Where a byte lies in shared memory. On a GPU a number of its own; kept, or the compiler makes it anew each time.
RECOM_FN u32 shared_address(const void* at) {
#ifdef __CUDA_ARCH__
  u32 found = static_cast<u32>(__cvta_generic_to_shared(at));
  asm("" : "+r"(found));
  return found;
#else
  return static_cast<u32>(static_cast<const u8*>(at) - stage_memory());
#endif
}
// Four or eight bytes to shared memory, without a register or a wait.
template <class T>
RECOM_FN void copy_async(u32 to, const T* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(sizeof(T)),
               "l"(goes())
               : "memory");
#else
  *reinterpret_cast<T*>(stage_memory() + to) = *from;
#endif
}
// Sixteen bytes of several elements, past the first-level cache, which rows shall have. Both lie at multiples of 16.
template <class T>
RECOM_FN void copy_async_16(u32 to, const T* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(goes()) : "memory");
#else
  memcpy(stage_memory() + to, from, 16);
#endif
}
RECOM_FN void copies_land() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
template <class T>
RECOM_FN T load_shared(u32 at) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
    return bitcast_one<T>(x);
  } else {
    u64 x;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(at));
    return bitcast_one<T>(x);
  }
#else
  return *reinterpret_cast<const T*>(stage_memory() + at);
#endif
}

RECOM_FN void store_shared(u32 at, u32 x) {
#ifdef __CUDA_ARCH__
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
#else
  *reinterpret_cast<u32*>(stage_memory() + at) = x;
#endif
}

RECOM_FN void store_shared(u32 at, u16 x) {
#ifdef __CUDA_ARCH__
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
#else
  *reinterpret_cast<u16*>(stage_memory() + at) = x;
#endif
}

// Where element `begin` of an array lies, whose part a tile reads: in bytes [kFrom, kFrom + kBytes) of the stage.
template <class T, int kFrom, int kBytes>
struct Staged {
  static_assert(kFrom + kBytes <= kStageBytes && kStageBytes <= 1 << 16, "the stage is larger than its memory");
  static constexpr i32 kSpare = 64;  // in front of the first element, and for looks behind the last
  static constexpr u32 kMost = (kBytes - kSpare) / sizeof(T);
  i32 begin;
  u32 memory;

  // `limits`: how many bags' limits lie behind it.
  RECOM_FN static bool fits(const Range& part, i32 limits) {
    const i32 n = part.end > part.begin ? part.end - part.begin : 0;
    return n <= static_cast<i32>(kMost) && n * static_cast<i32>(sizeof(T)) <= kBytes - kSpare - 4 * limits;
  }
  // As far behind a multiple of 16 bytes as in the array, so that most of it is copied by vectors.
  RECOM_FN Staged(const T* array, const Range& part)
      : begin(part.begin),
        memory(shared_address(stage_memory() + kFrom) + (static_cast<u32>(reinterpret_cast<u64>(array + part.begin)) & 15u)) {}
  RECOM_FN void copy(const T* array, const Range& part) const {
    constexpr i32 kVector = 16 / sizeof(T);
    const i32 n = part.end - begin, thread = static_cast<i32>(threadIdx.x);
    const T* const from = array + begin;
    const i32 first = static_cast<i32>(-memory & 15u) / static_cast<i32>(sizeof(T));  // that lies at a multiple of 16
    for (i32 k = first + thread * kVector; k + kVector <= n; k += kThreads * kVector) {
      copy_async_16(memory + static_cast<u32>(k) * sizeof(T), from + k);
    }
    // What is left at both ends: fewer than a vector each.
    const i32 last = n < first ? n : n - (n - first) % kVector;
    const i32 k = thread < first ? thread : last + thread - first;
    if (k < n && thread < first + kVector) copy_async(memory + static_cast<u32>(k) * sizeof(T), from + k);
  }
  // Element q; anything, where that is none of the tile's.
  RECOM_FN T at(i32 q) const {
    const u32 k = static_cast<u32>(q - begin);
    return load_shared<T>(memory + (k < kMost ? k : kMost - 1) * sizeof(T));
  }
  // Element k of the tile's, counted from its first; anything, where there is none.
  RECOM_FN T within(i32 k) const {
    return load_shared<T>(memory + (static_cast<u32>(k) < kMost ? static_cast<u32>(k) : kMost - 1) * sizeof(T));
  }
  // The same; anything, for the few numbers behind its last.
  RECOM_FN T near(i32 k) const { return load_shared<T>(memory + static_cast<u32>(k) * sizeof(T)); }
};

// Where the bags of a tile begin and end, counted from the tile's first position: threads of the block find those of some bags
// each, before the first is summed up. In two bytes each, at the end of bytes [kFrom, kFrom + kBytes) of the stage.
template <int kFrom, int kBytes>
struct Limits {
  i32 begin;    // the tile's first position
  u32 of_zero;  // where bag 0 would be

  RECOM_FN Limits(const Tile& t, const Range& part)
      : begin(part.begin),
        of_zero(shared_address(stage_memory() + kFrom + kBytes) - static_cast<u32>(t.bag0 + t.bags) * 4) {}
  // f(bag): a bag's positions. Where bags turn out not to lie side by side the numbers mean nothing, but stay inside: false, if
  // this thread found a bag that ends before it begins.
  template <class F>
  RECOM_FN bool find(const Tile& t, const Range& part, const F& f) const {
    const i32 most = part.end > begin ? part.end - begin : 0;
    bool ok = true;
    for (i32 k = static_cast<i32>(threadIdx.x); k < t.bags; k += kThreads) {
      const i32 bag = static_cast<i32>(t.bag0) + k;
      const Range r = f(bag);
      ok &= r.begin <= r.end;
      const i32 first = r.begin - begin, last = r.end - begin;
      store_shared(of_zero + static_cast<u32>(bag) * 4, static_cast<u32>(first < 0 ? 0 : first < most ? first : most) |
                                                         static_cast<u32>(last < 0 ? 0 : last < most ? last : most) << 16);
    }
    return ok;
  }
  // What a bag's limits are, counted from the tile's first position; both or one of them, by whoever knows.
  RECOM_FN void put(i32 bag, i32 first, i32 last) const {
    store_shared(of_zero + static_cast<u32>(bag) * 4, static_cast<u32>(first) | static_cast<u32>(last) << 16);
  }
  RECOM_FN void put_begin(i32 bag, i32 first) const {
    store_shared(of_zero + static_cast<u32>(bag) * 4, static_cast<u16>(first));
  }
  RECOM_FN void put_end(i32 bag, i32 last) const {
    store_shared(of_zero + static_cast<u32>(bag) * 4 + 2, static_cast<u16>(last));
  }
  // A bag's positions, counted from the tile's first.
  RECOM_FN Range in_tile(i32 bag) const {
    const u32 both = load_shared<u32>(of_zero + static_cast<u32>(bag) * 4);
    return Range{static_cast<i32>(both & 0xffff), static_cast<i32>(both >> 16)};
  }
  RECOM_FN Range of(i32 bag) const {
    const Range r = in_tile(bag);
    return Range{begin + r.begin, begin + r.end};
  }
};

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_STAGE_CUH_
