// Element types under the program format's names, and XLA's conversions between them.

#ifndef RECOM_JAX_CUDA_TYPES_CUH_
#define RECOM_JAX_CUDA_TYPES_CUH_

#include "recom_abi.h"

#define RECOM_FN __device__ __forceinline__

namespace recom_cuda {

using pred = bool;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;
struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
struct e5m2 {
  u8 bits;
};
struct e4m3 {  // no infinities: "fn"
  u8 bits;
};

template <bool C, class A, class B>
struct If {
  using type = A;
};
template <class A, class B>
struct If<false, A, B> {
  using type = B;
};
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T>
constexpr bool kIsHalf = kSame<T, f16> || kSame<T, bf16> || kSame<T, e5m2> || kSame<T, e4m3>;
template <class T>
constexpr bool kIsFloat = kSame<T, f32> || kSame<T, f64>;
template <class T>
constexpr bool kIsSigned = T(-1) < T(0);
template <>
inline constexpr bool kIsSigned<pred> = false;

template <class T>
struct Bits {
  // The unsigned type integer arithmetic wraps in: never narrower than int, which it would promote to.
  using type = typename If<sizeof(T) == 8, u64, u32>::type;
};
template <class T>
using bits_t = typename Bits<T>::type;

RECOM_FN u32 bits_of(f32 x) { return __float_as_uint(x); }
RECOM_FN u64 bits_of(f64 x) { return static_cast<u64>(__double_as_longlong(x)); }
RECOM_FN f32 from_bits(u32 x) { return __uint_as_float(x); }
RECOM_FN f64 from_bits(u64 x) { return __longlong_as_double(static_cast<i64>(x)); }

RECOM_FN f32 widen(bf16 h) { return from_bits(static_cast<u32>(h.bits) << 16); }
RECOM_FN f32 widen(f16 h) {
  const u32 e = (h.bits >> 10) & 31u, m = h.bits & 1023u, sign = static_cast<u32>(h.bits & 0x8000u) << 16;
  const u32 normal = ((e + 112u) << 23) | (m << 13);
  const u32 special = 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u);
  const u32 tiny = bits_of(static_cast<f32>(m) * 5.9604644775390625e-8f);  // 2^-24
  return from_bits((e == 31u ? special : e == 0u ? tiny : normal) | sign);
}
RECOM_FN f32 widen(e5m2 h) {
  const u32 e = (h.bits >> 2) & 31u, m = h.bits & 3u, sign = static_cast<u32>(h.bits & 0x80u) << 24;
  const u32 normal = ((e + 112u) << 23) | (m << 21);
  const u32 special = m ? 0x7fc00000u : 0x7f800000u;  // XLA has one NaN
  const u32 tiny = bits_of(static_cast<f32>(m) * 1.52587890625e-5f);  // 2^-16
  return from_bits((e == 31u ? special : e == 0u ? tiny : normal) | sign);
}
RECOM_FN f32 widen(e4m3 h) {
  const u32 e = (h.bits >> 3) & 15u, m = h.bits & 7u, sign = static_cast<u32>(h.bits & 0x80u) << 24;
  const u32 normal = ((e + 120u) << 23) | (m << 20);
  const u32 tiny = bits_of(static_cast<f32>(m) * 0.001953125f);  // 2^-9
  return from_bits(((h.bits & 0x7fu) == 0x7fu ? 0x7fc00000u : e == 0u ? tiny : normal) | sign);
}
RECOM_FN e5m2 narrow(f32 f, e5m2) {
  const u32 u = bits_of(f), a = u & 0x7fffffffu;
  // Adding 2^7 rounds at 2^-16, the spacing of denormals.
  const u32 tiny = bits_of(from_bits(a) + 128.0f) - 0x43000000u;
  const u32 normal = (a + 0xfffffu + ((a >> 21) & 1u) - 0x38000000u) >> 21;
  const u32 r = a > 0x7f800000u ? 0x7eu : a < 0x38800000u ? tiny : normal < 0x7cu ? normal : 0x7cu;
  return e5m2{static_cast<u8>(r | ((u >> 24) & 0x80u))};
}
RECOM_FN e4m3 narrow(f32 f, e4m3) {
  const u32 u = bits_of(f), a = u & 0x7fffffffu;
  const u32 tiny = bits_of(from_bits(a) + 16384.0f) - 0x46800000u;
  const u32 normal = (a + 0x7ffffu + ((a >> 20) & 1u) - 0x3c000000u) >> 20;
  const u32 r = a > 0x7f800000u ? 0x7fu : a < 0x3c800000u ? tiny : normal < 0x7fu ? normal : 0x7fu;
  return e4m3{static_cast<u8>(r | ((u >> 24) & 0x80u))};
}
RECOM_FN f16 narrow(f32 f, f16) {
  const u32 u = bits_of(f), a = u & 0x7fffffffu;
  // Adding 0.5 rounds at 2^-24, the spacing of half denormals.
  const u32 tiny = bits_of(from_bits(a) + 0.5f) - 0x3f000000u;
  const u32 normal = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  const u32 r = a < 0x38800000u ? tiny : a < 0x47800000u ? normal : a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return f16{static_cast<u16>(r | ((u >> 16) & 0x8000u))};
}
RECOM_FN bf16 narrow(f32 f, bf16) {
  const u32 u = bits_of(f);
  const u32 r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  return bf16{static_cast<u16>((u & 0x7fffffffu) > 0x7f800000u ? nan : r)};
}

template <class T>
constexpr T kLowest = kIsSigned<T> ? static_cast<T>(u64{1} << (sizeof(T) * 8 - 1)) : T(0);
template <class T>
constexpr T kHighest = static_cast<T>(~kLowest<T>);

// XLA's convert: integers wrap, floats saturate and NaN becomes 0, anything to pred is "not zero".
template <class To, class From>
RECOM_FN To convert(From x) {
  if constexpr (kSame<To, From>) {
    return x;
  } else if constexpr (kIsHalf<From>) {
    return convert<To>(widen(x));
  } else if constexpr (kSame<To, pred>) {
    return x != From(0);
  } else if constexpr (kIsHalf<To>) {
    return narrow(static_cast<f32>(x), To{});
  } else if constexpr (kIsFloat<From> && !kIsFloat<To>) {
    constexpr From above = static_cast<From>(u64{1} << (sizeof(To) * 8 - 1)) * (kIsSigned<To> ? 1 : 2);
    if (x != x) return To(0);
    if (x >= above) return kHighest<To>;
    if (kIsSigned<To> ? x <= -above : x <= From(0)) return kLowest<To>;
    return static_cast<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

// The value whose bits a slot holds.
template <class T>
RECOM_FN T immediate(i64 word) {
  if constexpr (kSame<T, f32>) {
    return from_bits(static_cast<u32>(word));
  } else if constexpr (kSame<T, f64>) {
    return from_bits(static_cast<u64>(word));
  } else if constexpr (kIsHalf<T>) {
    return T{static_cast<decltype(T::bits)>(word)};
  } else if constexpr (kSame<T, pred>) {
    return (word & 0xff) != 0;
  } else {
    return static_cast<T>(word);
  }
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_TYPES_CUH_
