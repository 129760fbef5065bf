// Lets a C++ compiler read CUDA text: the keywords, vector types and device functions that
// generated kernels use. Threads are fibers that run until they meet a barrier or a shuffle
// (runtime.cc); memory accesses are checked by the compiler's instrumentation (memory.cc).
// Semantics are the GPU's where C++ leaves them open.

#ifndef RECOM_TESTS_EMULATE_H_
#define RECOM_TESTS_EMULATE_H_

#include "threads.h"

#define RECOM_EMULATION 1

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time, so its shared memory may be static; the runtime fills it with garbage
// in between.
#define __shared__ static __attribute__((section("emu_shared")))

// No C++ header is read: they take longer than a kernel, and bring names that NVRTC doesn't have.
using size_t = decltype(sizeof(0));
extern "C" {
void* memcpy(void*, const void*, size_t) noexcept;
void* memset(void*, int, size_t) noexcept;
#define EMU_FUNCTION(name)       \
  float name##f(float) noexcept; \
  double name(double) noexcept;
EMU_FUNCTION(floor)
EMU_FUNCTION(ceil)
EMU_FUNCTION(trunc)
EMU_FUNCTION(round)
EMU_FUNCTION(rint)
EMU_FUNCTION(nearbyint)
EMU_FUNCTION(sqrt)
EMU_FUNCTION(fabs)
#undef EMU_FUNCTION
float fmodf(float, float) noexcept;
double fmod(double, double) noexcept;
float copysignf(float, float) noexcept;
double copysign(double, double) noexcept;
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float ldexpf(float, int) noexcept;
double ldexp(double, int) noexcept;
}

namespace emu {

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
inline T shuffle(int kind, unsigned mask, T value, int arg, int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long raw = 0;
  __builtin_memcpy(&raw, &value, sizeof(T));
  raw = emu_warp(kind, mask, raw, arg, width | static_cast<int>(sizeof(T)) << 8);
  __builtin_memcpy(&value, &raw, sizeof(T));
  return value;
}

// Hides a value from the optimizer: nothing on one side of it is contracted with anything on the
// other.
template <class T>
inline T opaque(T x) {
  asm("" : "+x"(x));
  return x;
}

// cvt.rzi: saturates; NaN is 0 in 32 bits, the lowest number in 64.
template <class To, class From>
inline To saturate(From x) {
  constexpr bool is_signed = static_cast<To>(-1) < static_cast<To>(0);
  constexpr int digits = sizeof(To) * 8 - is_signed;
  constexpr To lowest = is_signed ? static_cast<To>(1ull << (sizeof(To) * 8 - 1)) : To(0);
  constexpr To highest = static_cast<To>(~lowest);
  if (x != x) return sizeof(To) == 8 ? static_cast<To>(1ull << 63) : To(0);
  if (x >= static_cast<From>(ldexp(1.0, digits))) return highest;
  if (x < static_cast<From>(lowest)) return lowest;
  return static_cast<To>(x);
}

}  // namespace emu

#define threadIdx (emu::emu_self->thread)
#define blockIdx (emu::emu_self->block)
#define blockDim (emu::emu_self->block_dim)
#define gridDim (emu::emu_self->grid_dim)
#define warpSize 32

// ---- vector types
// ----------------------------------------------------------------------------------------------

#define EMU_VECTOR(name, T, size)                                                    \
  struct alignas(sizeof(T)) name##1 { T x; };                                        \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct name##3 { T x, y, z; };                                                     \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  inline constexpr name##1 make_##name##1(T x) { return {x}; }                       \
  inline constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }               \
  inline constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }       \
  inline constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMU_VECTOR(char, signed char, 1)
EMU_VECTOR(uchar, unsigned char, 1)
EMU_VECTOR(short, short, 2)
EMU_VECTOR(ushort, unsigned short, 2)
EMU_VECTOR(int, int, 4)
EMU_VECTOR(uint, unsigned, 4)
EMU_VECTOR(longlong, long long, 8)
EMU_VECTOR(ulonglong, unsigned long long, 8)
EMU_VECTOR(float, float, 4)
EMU_VECTOR(double, double, 8)
#undef EMU_VECTOR

// ---- between threads
// -------------------------------------------------------------------------------------------

inline void __syncthreads() { emu::emu_block_barrier(emu::kBarrier); }
inline int __syncthreads_and(int p) { return emu::emu_block_vote(emu::kBarrierAnd, p); }
inline int __syncthreads_or(int p) { return emu::emu_block_vote(emu::kBarrierOr, p); }
inline int __syncthreads_count(int p) { return emu::emu_block_vote(emu::kBarrierCount, p); }
inline void __syncwarp(unsigned mask = ~0u) { emu::emu_warp(emu::kSyncWarp, mask, 0, 0, 32); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emu::shuffle(emu::kShuffleIndex, mask, value, lane, width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emu::shuffle(emu::kShuffleUp, mask, value, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emu::shuffle(emu::kShuffleDown, mask, value, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return emu::shuffle(emu::kShuffleXor, mask, value, lanes, width);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return static_cast<unsigned>(emu::emu_warp(emu::kBallot, mask, p != 0, 0, 32));
}
inline int __any_sync(unsigned mask, int p) {
  return static_cast<int>(emu::emu_warp(emu::kAny, mask, p != 0, 0, 32));
}
inline int __all_sync(unsigned mask, int p) {
  return static_cast<int>(emu::emu_warp(emu::kAll, mask, p != 0, 0, 32));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  unsigned long long raw = 0;
  __builtin_memcpy(&raw, &value, sizeof(T));
  return static_cast<unsigned>(emu::emu_warp(emu::kMatchAny, mask, raw, 0, 32));
}

#define EMU_REDUCE(name, kind)                                              \
  inline unsigned __reduce_##name##_sync(unsigned mask, unsigned v) {       \
    return static_cast<unsigned>(emu::emu_warp(emu::kind, mask, v, 0, 32)); \
  }
EMU_REDUCE(add, kReduceAdd)
EMU_REDUCE(min, kReduceMin)
EMU_REDUCE(max, kReduceMax)
EMU_REDUCE(and, kReduceAnd)
EMU_REDUCE(or, kReduceOr)
EMU_REDUCE(xor, kReduceXor)
#undef EMU_REDUCE

// ---- memory
// ----------------------------------------------------------------------------------------------------

#define EMU_LOAD(name)        \
  template <class T>          \
  inline T name(const T* p) { \
    return *p;                \
  }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
#undef EMU_LOAD
#define EMU_STORE(name)             \
  template <class T>                \
  inline void name(T* p, T value) { \
    *p = value;                     \
  }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_STORE
// A fiber runs alone until it waits for others.
inline int atomicAdd(int* p, int value) {
  const int old = *p;
  *p = old + value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { emu::emu_fail("__trap"); }

// ---- bits
// ------------------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int k = 0; k < 32; ++k) r |= (x >> k & 1u) << (31 - k);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned r = 0;
  for (int k = 0; k < 4; ++k) {
    const unsigned s = selector >> (4 * k) & 15u;
    unsigned byte = static_cast<unsigned>(both >> (8 * (s & 7u))) & 255u;
    if (s & 8u) byte = byte & 128u ? 255u : 0u;
    r |= byte << (8 * k);
  }
  return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(
      (static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}

inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bits<double>(x); }
inline int __double2hiint(double x) {
  return static_cast<int>(emu::bits<unsigned long long>(x) >> 32);
}
inline int __double2loint(double x) { return static_cast<int>(emu::bits<unsigned long long>(x)); }
inline double __hiloint2double(int high, int low) {
  return emu::bits<double>(static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 |
                           static_cast<unsigned>(low));
}

// ---- floats
// ----------------------------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return emu::opaque(a + b); }
inline float __fsub_rn(float a, float b) { return emu::opaque(a - b); }
inline float __fmul_rn(float a, float b) { return emu::opaque(a * b); }
inline float __fdiv_rn(float a, float b) { return emu::opaque(a / b); }
inline float __frcp_rn(float a) { return emu::opaque(1.0f / a); }
inline float __fsqrt_rn(float a) { return emu::opaque(sqrtf(a)); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return emu::opaque(a + b); }
inline double __dsub_rn(double a, double b) { return emu::opaque(a - b); }
inline double __dmul_rn(double a, double b) { return emu::opaque(a * b); }
inline double __ddiv_rn(double a, double b) { return emu::opaque(a / b); }
inline double __dsqrt_rn(double a) { return emu::opaque(sqrt(a)); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

#define EMU_CONVERT(from_name, From, to_name, To)                                   \
  inline To __##from_name##2##to_name##_rz(From x) { return emu::saturate<To>(x); } \
  inline To __##from_name##2##to_name##_rn(From x) {                                \
    return emu::saturate<To>(__builtin_rint(x));                                    \
  }                                                                                 \
  inline To __##from_name##2##to_name##_rd(From x) {                                \
    return emu::saturate<To>(__builtin_floor(x));                                   \
  }                                                                                 \
  inline To __##from_name##2##to_name##_ru(From x) {                                \
    return emu::saturate<To>(__builtin_ceil(x));                                    \
  }                                                                                 \
  inline From __##to_name##2##from_name##_rn(To x) { return static_cast<From>(x); }
EMU_CONVERT(float, float, int, int)
EMU_CONVERT(float, float, uint, unsigned)
EMU_CONVERT(float, float, ll, long long)
EMU_CONVERT(float, float, ull, unsigned long long)
EMU_CONVERT(double, double, int, int)
EMU_CONVERT(double, double, uint, unsigned)
EMU_CONVERT(double, double, ll, long long)
EMU_CONVERT(double, double, ull, unsigned long long)
#undef EMU_CONVERT
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// The GPU's maximum takes the number beside a NaN, and puts +0 above -0.
template <class T>
inline T emu_max(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (__builtin_signbit(a) ? b : a) : (a > b ? a : b);
}
template <class T>
inline T emu_min(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (__builtin_signbit(a) ? a : b) : (a < b ? a : b);
}
#define fmaxf(a, b) emu_max<float>(a, b)
#define fminf(a, b) emu_min<float>(a, b)
#define fmax(a, b) emu_max<double>(a, b)
#define fmin(a, b) emu_min<double>(a, b)

#define EMU_MINMAX(T)                                        \
  inline constexpr T max(T a, T b) { return a > b ? a : b; } \
  inline constexpr T min(T a, T b) { return a < b ? a : b; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
inline float max(float a, float b) { return emu_max(a, b); }
inline float min(float a, float b) { return emu_min(a, b); }
inline double max(double a, double b) { return emu_max(a, b); }
inline double min(double a, double b) { return emu_min(a, b); }

#define EMU_CLASSIFY(name)                                  \
  inline bool name(float x) { return __builtin_##name(x); } \
  inline bool name(double x) { return __builtin_##name(x); }
EMU_CLASSIFY(isnan)
EMU_CLASSIFY(isinf)
EMU_CLASSIFY(isfinite)
EMU_CLASSIFY(signbit)
#undef EMU_CLASSIFY
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

#endif  // RECOM_TESTS_EMULATE_H_
