// Elementwise operations with XLA's semantics (docs/program_format.md), on numbers and on rows. A row meets a
// number by spreading it.

#ifndef RECOM_JAX_CUDA_OPS_CUH_
#define RECOM_JAX_CUDA_OPS_CUH_

#include "recom_types.cuh"

namespace recom_cuda {

// A lane's share of a row of features.
template <class T, int N>
struct Row {
  T v[N];
};

template <class T>
struct RowOf {
  static constexpr int kSize = 0;
};
template <class T, int N>
struct RowOf<Row<T, N>> {
  static constexpr int kSize = N;
};
template <class T>
RECOM_FN T element(const T& x, int) {
  return x;
}
template <class T, int N>
RECOM_FN T element(const Row<T, N>& x, int i) {
  return x.v[i];
}

namespace ops {

template <class T>
constexpr int kBits = static_cast<int>(sizeof(T)) * 8;

struct Neg {
  template <class T>
  static RECOM_FN T of(T x) {
    if constexpr (kIsFloat<T>) {
      return -x;
    } else {
      return static_cast<T>(bits_t<T>(0) - static_cast<bits_t<T>>(x));
    }
  }
};
struct Abs {
  template <class T>
  static RECOM_FN T of(T x) {
    if constexpr (kIsFloat<T>) {
      return from_bits(bits_of(x) & ~(bits_t<T>(1) << (kBits<T> - 1)));
    } else {
      return x < T(0) ? Neg::of(x) : x;
    }
  }
};
struct Sign {
  template <class T>
  static RECOM_FN T of(T x) {
    if constexpr (kIsFloat<T>) {
      return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;  // of NaN and of zeros: themselves
    } else {
      return static_cast<T>((x > T(0)) - (x < T(0)));
    }
  }
};
struct Not {
  template <class T>
  static RECOM_FN T of(T x) {
    if constexpr (kSame<T, pred>) {
      return !x;
    } else {
      return static_cast<T>(~x);
    }
  }
};
struct Floor {
  static RECOM_FN f32 of(f32 x) { return floorf(x); }
  static RECOM_FN f64 of(f64 x) { return floor(x); }
};
struct Ceil {
  static RECOM_FN f32 of(f32 x) { return ceilf(x); }
  static RECOM_FN f64 of(f64 x) { return ceil(x); }
};
struct RoundEven {
  static RECOM_FN f32 of(f32 x) { return rintf(x); }
  static RECOM_FN f64 of(f64 x) { return rint(x); }
};
struct RoundAway {
  static RECOM_FN f32 of(f32 x) { return roundf(x); }
  static RECOM_FN f64 of(f64 x) { return round(x); }
};
struct Sqrt {
  static RECOM_FN f32 of(f32 x) { return sqrtf(x); }
  static RECOM_FN f64 of(f64 x) { return sqrt(x); }
};
struct IsFinite {
  static RECOM_FN pred of(f32 x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
  static RECOM_FN pred of(f64 x) { return (bits_of(x) & 0x7ff0000000000000ull) != 0x7ff0000000000000ull; }
};
template <class T>
RECOM_FN u64 low_bits(T x) {
  u64 u = static_cast<u64>(x);
  if constexpr (kBits<T> < 64) u &= (u64{1} << kBits<T>) - 1;
  return u;
}
struct Popcnt {
  template <class T>
  static RECOM_FN T of(T x) {
    return static_cast<T>(__popcll(low_bits(x)));
  }
};
struct Clz {
  template <class T>
  static RECOM_FN T of(T x) {
    return static_cast<T>(__clzll(static_cast<i64>(low_bits(x))) - (64 - kBits<T>));
  }
};

struct Add {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    if constexpr (kSame<T, pred>) {
      return a | b;
    } else if constexpr (kIsFloat<T>) {
      return a + b;
    } else {
      return static_cast<T>(static_cast<bits_t<T>>(a) + static_cast<bits_t<T>>(b));
    }
  }
};
struct Sub {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    if constexpr (kIsFloat<T>) {
      return a - b;
    } else {
      return static_cast<T>(static_cast<bits_t<T>>(a) - static_cast<bits_t<T>>(b));
    }
  }
};
struct Mul {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    if constexpr (kSame<T, pred>) {
      return a & b;
    } else if constexpr (kIsFloat<T>) {
      return a * b;
    } else {
      return static_cast<T>(static_cast<bits_t<T>>(a) * static_cast<bits_t<T>>(b));
    }
  }
};
struct Div {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    if constexpr (kIsFloat<T>) {
      return a / b;
    } else {
      if (b == T(0)) return static_cast<T>(~T(0));
      if constexpr (kIsSigned<T>) {
        if (b == T(-1)) return Neg::of(a);
      }
      return static_cast<T>(a / b);
    }
  }
};
struct Rem {
  static RECOM_FN f32 of(f32 a, f32 b) { return fmodf(a, b); }
  static RECOM_FN f64 of(f64 a, f64 b) { return fmod(a, b); }
  template <class T>
  static RECOM_FN T of(T a, T b) {
    if (b == T(0)) return a;
    if constexpr (kIsSigned<T>) {
      if (b == T(-1)) return T(0);
    }
    return static_cast<T>(a % b);
  }
};
// NaN wins, and +0 is above -0. Of float32 that is one instruction; written out it is a dozen, with branches.
struct Max {
  template <class T>
  static RECOM_FN T of(T a, T b) {
#ifdef __CUDA_ARCH__
    if constexpr (kSame<T, f32>) {
      f32 r;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
      return r;
    }
#endif
    if constexpr (kIsFloat<T>) {
      if (a != a) return a;
      if (b != b) return b;
      return a > b ? a : a == b ? from_bits(bits_of(a) & bits_of(b)) : b;
    } else {
      return a > b ? a : b;
    }
  }
};
struct Min {
  template <class T>
  static RECOM_FN T of(T a, T b) {
#ifdef __CUDA_ARCH__
    if constexpr (kSame<T, f32>) {
      f32 r;
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
      return r;
    }
#endif
    if constexpr (kIsFloat<T>) {
      if (a != a) return a;
      if (b != b) return b;
      return a < b ? a : a == b ? from_bits(bits_of(a) | bits_of(b)) : b;
    } else {
      return a < b ? a : b;
    }
  }
};
struct And {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
// A negative amount is a huge unsigned one.
struct Shl {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    const u64 by = low_bits(b);
    return by >= kBits<T> ? T(0) : static_cast<T>(low_bits(a) << by);
  }
};
struct ShrL {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    const u64 by = low_bits(b);
    return by >= kBits<T> ? T(0) : static_cast<T>(low_bits(a) >> by);
  }
};
struct ShrA {
  template <class T>
  static RECOM_FN T of(T a, T b) {
    // Arithmetic on the bits, whatever the signedness of the dtype.
    const u64 by = low_bits(b);
    const i64 wide = static_cast<i64>(low_bits(a) << (64 - kBits<T>)) >> (64 - kBits<T>);
    return static_cast<T>(wide >> (by >= kBits<T> ? kBits<T> - 1 : static_cast<int>(by)));
  }
};
struct Eq {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <class T>
  static RECOM_FN pred of(T a, T b) {
    return a >= b;
  }
};

template <class F, class A>
RECOM_FN auto map(const A& a) {
  constexpr int n = RowOf<A>::kSize;
  if constexpr (n == 0) {
    return F::of(a);
  } else {
    Row<decltype(F::of(element(a, 0))), n> r;
#pragma unroll
    for (int i = 0; i < n; ++i) r.v[i] = F::of(element(a, i));
    return r;
  }
}
template <class F, class A, class B>
RECOM_FN auto map(const A& a, const B& b) {
  constexpr int n = RowOf<A>::kSize > RowOf<B>::kSize ? RowOf<A>::kSize : RowOf<B>::kSize;
  if constexpr (n == 0) {
    return F::of(a, b);
  } else {
    Row<decltype(F::of(element(a, 0), element(b, 0))), n> r;
#pragma unroll
    for (int i = 0; i < n; ++i) r.v[i] = F::of(element(a, i), element(b, i));
    return r;
  }
}

}  // namespace ops

#define RECOM_UNARY(name, Op)                                        \
  template <class A>                                                 \
  RECOM_FN auto x_##name(const A& a) {                               \
    return ops::map<ops::Op>(a);                                     \
  }
#define RECOM_BINARY(name, Op)                                       \
  template <class A, class B>                                        \
  RECOM_FN auto x_##name(const A& a, const B& b) {                   \
    return ops::map<ops::Op>(a, b);                                  \
  }
RECOM_UNARY(neg, Neg)
RECOM_UNARY(abs, Abs)
RECOM_UNARY(sign, Sign)
RECOM_UNARY(not, Not)
RECOM_UNARY(floor, Floor)
RECOM_UNARY(ceil, Ceil)
RECOM_UNARY(round_even, RoundEven)
RECOM_UNARY(round_away, RoundAway)
RECOM_UNARY(sqrt, Sqrt)
RECOM_UNARY(is_finite, IsFinite)
RECOM_UNARY(popcnt, Popcnt)
RECOM_UNARY(clz, Clz)
RECOM_BINARY(add, Add)
RECOM_BINARY(sub, Sub)
RECOM_BINARY(mul, Mul)
RECOM_BINARY(div, Div)
RECOM_BINARY(rem, Rem)
RECOM_BINARY(max, Max)
RECOM_BINARY(min, Min)
RECOM_BINARY(and, And)
RECOM_BINARY(or, Or)
RECOM_BINARY(xor, Xor)
RECOM_BINARY(shl, Shl)
RECOM_BINARY(shr_l, ShrL)
RECOM_BINARY(shr_a, ShrA)
RECOM_BINARY(eq, Eq)
RECOM_BINARY(ne, Ne)
RECOM_BINARY(lt, Lt)
RECOM_BINARY(le, Le)
RECOM_BINARY(gt, Gt)
RECOM_BINARY(ge, Ge)
#undef RECOM_UNARY
#undef RECOM_BINARY

// The program's select: on_false comes first.
template <int N, class P, class A, class B>
RECOM_FN auto x_select_row(const P& p, const A& on_false, const B& on_true) {
  Row<decltype(element(on_true, 0)), N> r;
#pragma unroll
  for (int i = 0; i < N; ++i) r.v[i] = element(p, i) ? element(on_true, i) : element(on_false, i);
  return r;
}
template <class P, class A, class B>
RECOM_FN auto x_select(const P& p, const A& on_false, const B& on_true) {
  constexpr int a = RowOf<A>::kSize, b = RowOf<B>::kSize, m = RowOf<P>::kSize;
  constexpr int n = a > b ? (a > m ? a : m) : (b > m ? b : m);
  if constexpr (n == 0) {
    return p ? on_true : on_false;
  } else {
    return x_select_row<n>(p, on_false, on_true);
  }
}
template <class To, class A>
RECOM_FN auto x_convert(const A& a) {
  constexpr int n = RowOf<A>::kSize;
  if constexpr (n == 0) {
    return convert<To>(a);
  } else {
    Row<To, n> r;
#pragma unroll
    for (int i = 0; i < n; ++i) r.v[i] = convert<To>(a.v[i]);
    return r;
  }
}
template <class To, class From>
RECOM_FN To bitcast_one(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bitcast keeps the size");
  To t;
  memcpy(&t, &x, sizeof(To));
  return t;
}
template <class To, class A>
RECOM_FN auto x_bitcast(const A& a) {
  constexpr int n = RowOf<A>::kSize;
  if constexpr (n == 0) {
    return bitcast_one<To>(a);
  } else {
    Row<To, n> r;
#pragma unroll
    for (int i = 0; i < n; ++i) r.v[i] = bitcast_one<To>(a.v[i]);
    return r;
  }
}
template <int N, class T>
RECOM_FN Row<T, N> spread(const T& x) {
  Row<T, N> r;
#pragma unroll
  for (int i = 0; i < N; ++i) r.v[i] = x;
  return r;
}
template <int N, class T>
RECOM_FN Row<T, N> spread(const Row<T, N>& x) {
  return x;
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_OPS_CUH_
