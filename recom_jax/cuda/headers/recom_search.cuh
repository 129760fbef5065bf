// Searches in boundaries. Comparisons are JAX's total order after canonicalisation: -0 == 0, NaNs are equal and
// above +inf.

#ifndef RECOM_JAX_CUDA_SEARCH_CUH_
#define RECOM_JAX_CUDA_SEARCH_CUH_

#include "recom_types.cuh"

namespace recom_cuda {

enum Side : int { kLeft = 0, kRight = 1 };

template <class T>
RECOM_FN bool total_lt(T a, T b) {
  if constexpr (kIsFloat<T>) {
    return (a < b) | ((b != b) & (a == a));
  } else {
    return a < b;
  }
}
// Does boundary v count for x? left: v < x, right: v <= x.
template <int kSide, class T>
RECOM_FN bool counts(T v, T x) {
  return kSide == kLeft ? total_lt(v, x) : !total_lt(x, v);
}

// The probes of `jnp.searchsorted(method="scan")`, one by one: on boundaries that are not sorted they decide.
template <int kSide, class T>
RECOM_FN i32 search_scan(T x, const T* boundary, i64 n) {
  if (n == 0) return 0;
  u32 low = 0, high = static_cast<u32>(n);
#pragma unroll 1
  for (int level = 64 - __clzll(n); level > 0; --level) {
    const u32 mid = low + ((high - low) >> 1);
    const T b = __ldg(boundary + (mid < n ? mid : static_cast<u32>(n - 1)));
    const bool left = !counts<kSide>(b, x);
    high = left ? mid : high;
    low = left ? low : mid;
  }
  return static_cast<i32>(high);
}
template <int kSide, class T>
RECOM_FN i32 search_compare_all(T x, const T* boundary, i64 n) {
  i32 c = 0;
#pragma unroll 4
  for (i64 k = 0; k < n; ++k) c += counts<kSide>(__ldg(boundary + k), x);
  return c;
}
// Boundaries ascend and hold no NaN.
template <int kSide, class T>
RECOM_FN i32 search_sorted(T x, const T* boundary, i64 n) {
  if (n == 0) return 0;
  i32 base = 0;
#pragma unroll 1
  for (i32 len = static_cast<i32>(n); len > 1;) {
    const i32 half = len >> 1;
    base += counts<kSide>(__ldg(boundary + base + half - 1), x) ? half : 0;
    len -= half;
  }
  return base + counts<kSide>(__ldg(boundary + base), x);
}

// The position at which a bag starts, of a sum that wrapped; -1 if none of `total` positions is there.
template <class T>
RECOM_FN i32 start_at(bits_t<T> sum, i64 total) {
  if (kIsSigned<T> && static_cast<T>(sum) < T(0)) sum += static_cast<bits_t<T>>(total);
  const i32 at = static_cast<i32>(static_cast<u32>(sum));
  return at < total ? at : -1;
}
// How many of the bags between n row splits start at x or before it (before it, on the left), in any order.
template <int kSide, class T>
RECOM_FN i32 search_splits(T x, const T* split, i64 n, i64 total) {
  i32 c = 0;
  for (i64 k = 0; k < n; ++k) {
    const auto sum = static_cast<bits_t<T>>(__ldg(split + k)) - static_cast<bits_t<T>>(__ldg(split));
    const i32 at = start_at<T>(sum, total);
    c += at >= 0 && counts<kSide>(static_cast<T>(at), x);
  }
  return c;
}
// The same for n lengths.
template <int kSide, class T>
RECOM_FN i32 search_lengths(T x, const T* length, i64 n, i64 total) {
  i32 c = 0;
  bits_t<T> sum = 0;
  for (i64 k = 0; k < n; ++k) {
    const i32 at = start_at<T>(sum, total);
    c += at >= 0 && counts<kSide>(static_cast<T>(at), x);
    sum += static_cast<bits_t<T>>(__ldg(length + k));
  }
  return c;
}

// start + k * step, exactly: the format promises that the value is representable.
RECOM_FN f32 uniform_bound(f32 start, f32 step, f32 k) { return fmaf(k, step, start); }
RECOM_FN f64 uniform_bound(f64 start, f64 step, f64 k) { return fma(k, step, start); }

// Boundaries start + k * step for k < n.
template <int kSide, class T>
RECOM_FN i32 search_uniform(T x, T start, T step, i64 n) {
  if constexpr (kIsFloat<T>) {
    const T big = sizeof(T) == 4 ? T(1.2676506002282294e30) : T(8.452712498170644e270);  // 2^100, 2^900
    const T small = T(1) / big, first = start < 0 ? -start : start;
    // Below 2^22 boundaries the guess is off by less than half a step in float32.
    const i64 most = sizeof(T) == 4 ? 1 << 22 : 1 << 29;
    if (!(step >= small && step <= big && first <= big && step * T(n) <= big && n <= most)) {
      // Steps so extreme that arithmetic on them could overflow or lose the guess.
      i32 low = 0, high = static_cast<i32>(n);
      while (low < high) {
        const i32 mid = low + (high - low) / 2;
        const bool c = counts<kSide>(uniform_bound(start, step, T(mid)), x);
        low = c ? mid + 1 : low;
        high = c ? high : mid;
      }
      return low;
    }
    const T limit = T(n);
    T t = (x - start) * (T(1) / step) - T(0.5);
    t = t > T(0) ? t : T(0);  // NaN too
    t = t < limit ? t : limit;
    // The true count is k or one or two more.
    const T k = T(static_cast<i32>(t));
    const T b0 = uniform_bound(start, step, k), b1 = uniform_bound(start, step, k + T(1));
    T c = k;
    c += (kSide == kLeft ? b0 < x : b0 <= x) ? T(1) : T(0);
    c += (kSide == kLeft ? b1 < x : b1 <= x) ? T(1) : T(0);
    c = c < limit ? c : limit;
    return static_cast<i32>(x == x ? c : limit);
  } else {
    u64 c = 0;
    if (kSide == kLeft ? x > start : x >= start) {
      // The distance fits the unsigned type even where it does not fit the signed one.
      const u64 diff = static_cast<u64>(static_cast<bits_t<T>>(x) - static_cast<bits_t<T>>(start));
      const u64 by = static_cast<u64>(step);
      c = kSide == kLeft ? (diff - 1) / by + 1 : diff / by + 1;
    }
    return c < static_cast<u64>(n) ? static_cast<i32>(c) : static_cast<i32>(n);
  }
}

// The first q in [0, n) with f(q) >= x, n if there is none; f ascends.
template <class F>
RECOM_FN i32 lower_bound(const F& f, i32 n, i64 x) {
  i32 low = 0, high = n;
  while (low < high) {
    const i32 mid = low + (high - low) / 2;
    if (f(mid) < x) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  return low;
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_SEARCH_CUH_
