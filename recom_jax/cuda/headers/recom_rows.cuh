// Rows of tables: checked row numbers, loads and stores of a lane's vector, and pooling.

#ifndef RECOM_JAX_CUDA_ROWS_CUH_
#define RECOM_JAX_CUDA_ROWS_CUH_

#include "recom_ops.cuh"

namespace recom_cuda {

constexpr int kMissing = -1;  // a row number outside the table: the fill value
constexpr int kSkipped = -2;  // a masked-out position: nothing

// Row numbers of type I, wide enough for `rows`.
template <class I, class T>
RECOM_FN I index_clip(T x, i64 rows) {
  if (rows <= 0) return kMissing;
  if constexpr (kIsSigned<T>) {
    if constexpr (sizeof(I) == 4 && sizeof(T) <= 4) {
      const i32 r = static_cast<i32>(x), last = static_cast<i32>(rows - 1);
      return r < 0 ? 0 : r < last ? r : last;
    } else {
      const i64 r = static_cast<i64>(x);
      return static_cast<I>(r < 0 ? 0 : r < rows ? r : rows - 1);
    }
  } else {
    const u64 r = static_cast<u64>(x);
    return static_cast<I>(r < static_cast<u64>(rows) ? r : static_cast<u64>(rows - 1));
  }
}
template <class I, class T>
RECOM_FN I index_fill(T x, i64 rows) {
  // A signed number widens with its sign: negative ones become huge unsigned ones, and miss.
  using Wide = typename If<sizeof(I) == 4 && sizeof(T) <= 4, u32, u64>::type;
  using Signed = typename If<sizeof(Wide) == 4, i32, i64>::type;
  const Wide r = kIsSigned<T> ? static_cast<Wide>(static_cast<Signed>(x)) : static_cast<Wide>(x);
  return r < static_cast<Wide>(rows) ? static_cast<I>(r) : static_cast<I>(kMissing);
}
template <class I>
RECOM_FN I predicate(I index, pred mask) {
  return mask ? index : static_cast<I>(kSkipped);
}

// N neighbouring elements. N > 1 promises that they are aligned to min(16, their bytes).
template <class E, int N>
RECOM_FN Row<E, N> load_vector(const E* at) {
  constexpr int bytes = static_cast<int>(sizeof(E)) * N;
  Row<E, N> r;
  if constexpr (N == 1) {
    if constexpr (kIsHalf<E>) {
      r.v[0].bits = __ldg(reinterpret_cast<const decltype(E::bits)*>(at));
    } else if constexpr (kSame<E, pred>) {
      r.v[0] = __ldg(reinterpret_cast<const u8*>(at)) != 0;
    } else {
      r.v[0] = __ldg(at);
    }
  } else if constexpr (bytes % 16 == 0) {
    uint4 w[bytes / 16];
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) w[i] = __ldg(reinterpret_cast<const uint4*>(at) + i);
    memcpy(&r, w, bytes);
  } else if constexpr (bytes == 8) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(at));
    memcpy(&r, &w, bytes);
  } else if constexpr (bytes == 4) {
    const u32 w = __ldg(reinterpret_cast<const u32*>(at));
    memcpy(&r, &w, bytes);
  } else {
    static_assert(bytes == 2, "a vector is 2, 4, 8 or a multiple of 16 bytes");
    const u16 w = __ldg(reinterpret_cast<const u16*>(at));
    memcpy(&r, &w, bytes);
  }
  return r;
}
// The same; a miss brings all 128 bytes of its line.
template <class E, int N>
RECOM_FN Row<E, N> load_line(const E* at) {
#ifdef __CUDA_ARCH__
  constexpr int bytes = static_cast<int>(sizeof(E)) * N;
  if constexpr (bytes % 16 == 0) {
    Row<E, N> r;
    uint4 w[bytes / 16];
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      asm("ld.global.nc.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
          : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
          : "l"(reinterpret_cast<const uint4*>(at) + i));
    }
    memcpy(&r, w, bytes);
    return r;
  }
#endif
  return load_vector<E, N>(at);
}
// Sixteen bytes at once: a plain assignment may be split into its elements.
RECOM_FN void store_16(void* at, const uint4& w) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .u64 g; cvta.to.global.u64 g, %0; st.global.v4.b32 [g], {%1, %2, %3, %4}; }" ::"l"(at), "r"(w.x),
      "r"(w.y), "r"(w.z), "r"(w.w)
      : "memory");
#else
  *static_cast<uint4*>(at) = w;
#endif
}
template <class E, int N>
RECOM_FN void store_vector(E* at, const Row<E, N>& r) {
  constexpr int bytes = static_cast<int>(sizeof(E)) * N;
  if constexpr (N == 1) {
    *at = r.v[0];
  } else if constexpr (bytes % 16 == 0) {
    uint4 w[bytes / 16];
    memcpy(w, &r, bytes);
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) store_16(reinterpret_cast<uint4*>(at) + i, w[i]);
  } else if constexpr (bytes == 8) {
    uint2 w;
    memcpy(&w, &r, bytes);
    *reinterpret_cast<uint2*>(at) = w;
  } else if constexpr (bytes == 4) {
    u32 w;
    memcpy(&w, &r, bytes);
    *reinterpret_cast<u32*>(at) = w;
  } else {
    static_assert(bytes == 2, "a vector is 2, 4, 8 or a multiple of 16 bytes");
    u16 w;
    memcpy(&w, &r, bytes);
    *reinterpret_cast<u16*>(at) = w;
  }
}

template <class E>
RECOM_FN E load_one(const E* at) {
  return load_vector<E, 1>(at).v[0];
}
// N elements `stride` apart. N > 1 promises stride 1.
template <class E, int N>
RECOM_FN Row<E, N> load_row(const E* at, i64 feature, i64 stride) {
  return load_vector<E, N>(at + feature * stride);
}

// A lane's share of a table's row, as T; `fill` everywhere where there is no such row.
template <class T, int N, class E, class I>
RECOM_FN Row<T, N> take(const E* table, I index, i64 row_stride, i64 feature, T fill) {
  Row<T, N> r = spread<N>(fill);
  if (index >= 0) r = x_convert<T>(load_vector<E, N>(table + static_cast<i64>(index) * row_stride + feature));
  return r;
}

// A pointer that stays what it is: the compiler would add its parts up anew for each row.
template <class E>
RECOM_FN E* kept(E* at) {
#ifdef __CUDA_ARCH__
  asm("" : "+l"(at));
#endif
  return at;
}
RECOM_FN int kept_number(int x) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(x));
#endif
  return x;
}
// The number of this thread, asked for at this very place.
RECOM_FN int thread_now() {
#ifdef __CUDA_ARCH__
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#else
  return static_cast<int>(threadIdx.x);
#endif
}
// Where a bag's row begins in the result. kNear: the plan has seen that 32 bits hold the stride.
template <bool kNear>
RECOM_FN i64 row_offset(i32 bag, i64 stride) {
  if constexpr (kNear) return static_cast<i64>(bag) * static_cast<i32>(stride);
  return i64{bag} * stride;
}
// A lane's share of a row that exists, as T; `mine` is its share of row 0. In bytes, and multiplied at once: one
// instruction makes the address. kLine: a miss brings its line's other rows as well.
template <class T, int N, bool kLine, class E, class I, class S>
RECOM_FN Row<T, N> fetch(const E* mine, I index, S row_stride) {
  const S bytes = row_stride * static_cast<S>(sizeof(E));
  const auto* at = reinterpret_cast<const u8*>(mine) + static_cast<i64>(index) * bytes;
  const auto* const row = reinterpret_cast<const E*>(at);
  if constexpr (kLine) {
    return x_convert<T>(load_line<E, N>(row));
  } else {
    return x_convert<T>(load_vector<E, N>(row));
  }
}

// A lane's share of a row on its way, to be added as T. Narrow elements stay as they lie in memory, packed, until then.
//
// What holds it is written before the loop over flights, for the compiler's sake: rows that don't exist are not read, so a
// flight writes part of its registers only, and all of them would hold something all the time, from bag to bag.
template <class T, class E, int N>
struct Flying {
  static constexpr int kBytes = static_cast<int>(sizeof(E)) * N;
  static constexpr bool kPacked = sizeof(E) < sizeof(T) && kBytes % 4 == 0;
  typename If<kPacked, Row<u32, kPacked ? kBytes / 4 : 1>, Row<T, N>>::type held;

  RECOM_FN Row<T, N> row() const {
    if constexpr (kPacked) {
      Row<E, N> r;
      memcpy(&r, &held, kBytes);
      return x_convert<T>(r);
    } else {
      return held;
    }
  }
};
template <bool kLine, class E, int N>
RECOM_FN Row<E, N> load_share(const E* at) {
  if constexpr (kLine) {
    return load_line<E, N>(at);
  } else {
    return load_vector<E, N>(at);
  }
}
// Reads a row that exists, as `fetch` above does.
template <bool kLine, class T, class E, int N, class I, class S>
RECOM_FN void fetch(Flying<T, E, N>& x, const E* mine, I index, S row_stride) {
  const S bytes = row_stride * static_cast<S>(sizeof(E));
  const u8* const at = reinterpret_cast<const u8*>(mine) + static_cast<i64>(index) * bytes;
  if constexpr (Flying<T, E, N>::kPacked) {
    x.held = load_share<kLine, u32, Flying<T, E, N>::kBytes / 4>(reinterpret_cast<const u32*>(at));
  } else {
    x.held = x_convert<T>(load_share<kLine, E, N>(reinterpret_cast<const E*>(at)));
  }
}

// Stores a number or a row; a 16-bit result rounds to nearest even.
template <class E, class T>
RECOM_FN void store(E* at, const T& value) {
  if constexpr (RowOf<T>::kSize == 0) {
    *at = convert<E>(value);
  } else {
    store_vector(at, x_convert<E>(value));
  }
}
// Rows whose features do not lie side by side come one element a lane.
template <class E, class T>
RECOM_FN void store_strided(E* at, i64 feature, i64 stride, const Row<T, 1>& value) {
  at[feature * stride] = convert<E>(value.v[0]);
}

enum Kind : int { kSum = 0, kMax = 1, kMin = 2, kProd = 3 };

template <int kKind, class A, class B>
RECOM_FN auto combine(const A& a, const B& b) {
  if constexpr (kKind == kSum) {
    return x_add(a, b);
  } else if constexpr (kKind == kMax) {
    return x_max(a, b);
  } else if constexpr (kKind == kMin) {
    return x_min(a, b);
  } else {
    return x_mul(a, b);
  }
}
// What a slice starts from: the first from init, the others from what changes nothing.
template <int kKind, class T>
RECOM_FN T start_of(T init, int slice) {
  if (slice == 0 || kKind == kMax || kKind == kMin) return init;
  if constexpr (kKind == kSum) {
    if constexpr (kIsFloat<T>) {
      return -T(0);
    } else {
      return T(0);
    }
  } else {
    return T(1);
  }
}
template <int kKind, class A, class B>
RECOM_FN void combine_if(bool on, A& acc, const B& x) {
  const A next = combine<kKind>(acc, x);
  acc = x_select(on, acc, next);
}

template <class T>
RECOM_FN T shuffle_xor(T x, int mask) {
  if constexpr (sizeof(T) == 8) {
    return bitcast_one<T>(__shfl_xor_sync(0xffffffffu, bitcast_one<u64>(x), mask));
  } else if constexpr (sizeof(T) == 4) {
    return bitcast_one<T>(__shfl_xor_sync(0xffffffffu, bitcast_one<u32>(x), mask));
  } else {
    return static_cast<T>(__shfl_xor_sync(0xffffffffu, static_cast<i32>(x), mask));
  }
}
// Combines what threads found that are `first`, twice `first`, ... up to less than `end` apart; every one gets the result.
// Both are powers of two. All threads of a warp call it.
template <int kKind, class T>
RECOM_FN void join_upto(T& acc, int first, int end) {
  for (int m = first; m < end; m *= 2) acc = combine<kKind>(acc, shuffle_xor(acc, m));
}
template <int kKind, class T, int N>
RECOM_FN void join_upto(Row<T, N>& acc, int first, int end) {
  for (int m = first; m < end; m *= 2) {
    Row<T, N> other;
#pragma unroll
    for (int i = 0; i < N; ++i) other.v[i] = shuffle_xor(acc.v[i], m);
    acc = combine<kKind>(acc, other);
  }
}
// What the slices of a bag found.
template <int kKind, class T>
RECOM_FN void join_slices(T& acc, int lanes, int slices) {
  join_upto<kKind>(acc, lanes, lanes * slices);
}
// The same with half the shuffles, for many slices: one slice of a pair joins the first half of both rows, the other one
// the second, and at last they tell each other. Every element is joined in the order that it would be without. `end`:
// lanes times slices, one number at every depth, so that the compiler keeps one.
template <int kKind, int kLanes, class T, int N>
RECOM_FN void join_halves(Row<T, N>& acc, int end, int thread) {
  constexpr int kHalf = N / 2;
  if constexpr (N == 2 * kHalf) {
    const bool second = (thread & kLanes) != 0;
    Row<T, kHalf> mine, other;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      mine.v[i] = second ? acc.v[kHalf + i] : acc.v[i];
      other.v[i] = shuffle_xor(second ? acc.v[i] : acc.v[kHalf + i], kLanes);
    }
    mine = combine<kKind>(mine, other);
    join_halves<kKind, kLanes * 2>(mine, end, thread);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const T theirs = shuffle_xor(mine.v[i], kLanes);
      acc.v[i] = second ? theirs : mine.v[i];
      acc.v[kHalf + i] = second ? mine.v[i] : theirs;
    }
  } else {
    join_upto<kKind>(acc, kLanes, end);
  }
}
template <int kKind, int kLanes, class T, int N>
RECOM_FN void join_rows(Row<T, N>& acc, int slices, int thread) {
  if constexpr (kLanes <= 2 && N % 2 == 0 && N <= 4) {
    if (slices > 4) return join_halves<kKind, kLanes>(acc, kLanes * slices, thread);
  }
  join_slices<kKind>(acc, kLanes, slices);
}

// Whether a row number that was seen stood for a missing row. As unsigned numbers kMissing is the largest of all.
template <class I>
struct Missed {
  using U = typename If<sizeof(I) == 4, u32, u64>::type;
  U highest = 0;

  RECOM_FN void see(I index) { highest = static_cast<U>(index) > highest ? static_cast<U>(index) : highest; }
  RECOM_FN bool any() const { return highest == static_cast<U>(static_cast<I>(kMissing)); }
};

// One missing row makes the bag what it is (NaN), however many there are: over `team` threads, each `step` behind
// the one before. All threads of a warp call it.
template <int kKind, class T, class R>
RECOM_FN void poison_missing(R& acc, T fill, bool missed, int step, int team) {
  if (!__any_sync(0xffffffffu, missed)) return;
  join_slices<kMax>(missed, step, team);
  if (missed) acc = combine<kKind>(acc, fill);
}

// Missing rows are rare, and all of them look alike: they are summed up as numbers, by the lanes that found them,
// and join the bag's rows at the end: over `team` threads, each `step` behind the one before. All threads of a warp
// call it.
template <int kKind, class T, class R>
RECOM_FN void join_missing(R& acc, T lost, bool missed, int step, int team) {
  if (!__any_sync(0xffffffffu, missed)) return;
  join_slices<kKind>(lost, step, team);
  join_slices<kMax>(missed, step, team);
  if (missed) acc = combine<kKind>(acc, lost);
}

// Is the element not finite? (Never, for integers.)
template <class E>
RECOM_FN bool non_finite(E x) {
  if constexpr (kIsHalf<E>) {
    return !ops::IsFinite::of(widen(x));
  } else if constexpr (kIsFloat<E>) {
    return !ops::IsFinite::of(x);
  } else {
    return false;
  }
}
template <class E, int N>
RECOM_FN bool any_non_finite(const Row<E, N>& x) {
  bool bad = false;
#pragma unroll
  for (int i = 0; i < N; ++i) bad |= non_finite(x.v[i]);
  return bad;
}
// Whether a table holds anything that is not finite; the whole block asks. One that is dense is read by vectors, of which a thread
// always has several on their way: what arrives is looked at and replaced by the next.
template <class E>
RECOM_FN bool block_non_finite(const E* table, i64 rows, i64 row_stride, i64 width) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(E)), kFlight = 8;
  const i64 n = rows * width;
  const bool dense = row_stride == width && reinterpret_cast<u64>(table) % 16 == 0 && n / kVector < (i64{1} << 30);
  const i32 vectors = dense ? static_cast<i32>(n / kVector) : 0;
  bool bad = false;
  if (vectors > 0) {
    const auto vector = [&](i32 k) -> Row<E, kVector> {
      return load_vector<E, kVector>(table + static_cast<i64>(k < vectors ? k : vectors - 1) * kVector);
    };
    const i32 thread = static_cast<i32>(threadIdx.x);
    Row<E, kVector> x[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) x[u] = vector(thread + u * kThreads);
#pragma unroll 1
    for (i32 k = thread + kThreads * kFlight; k < vectors; k += kThreads * kFlight) {
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        bad |= any_non_finite(x[u]);
        x[u] = vector(k + u * kThreads);
      }
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) bad |= any_non_finite(x[u]);
  }
#pragma unroll 1
  for (i64 k = static_cast<i64>(vectors) * kVector + threadIdx.x; k < n; k += kThreads) {
    bad |= non_finite(load_one(table + k / width * row_stride + k % width));
  }
  return __syncthreads_or(bad) != 0;
}
template <class T>
RECOM_FN T quiet_nan() {
  if constexpr (sizeof(T) == 4) {
    return from_bits(0x7fc00000u);
  } else {
    return from_bits(u64{0x7ff8000000000000ull});
  }
}
// What a dense product with a one-hot matrix makes of rows that were not selected: 0 * inf and 0 * NaN are NaN.
// `selected(r)` says whether row r was selected. -0 becomes +0 as in a dot.
template <class E, class T, int N, class F>
RECOM_FN void one_hot_finish(Row<T, N>& acc, const E* table, i64 rows, i64 row_stride, i64 feature, bool dirty,
                             const F& selected) {
  if constexpr (kIsFloat<T>) {
#pragma unroll
    for (int i = 0; i < N; ++i) acc.v[i] = acc.v[i] + T(0);
    if (!dirty) return;
#pragma unroll 1
    for (i64 r = 0; r < rows; ++r) {
      const Row<E, N> row = load_vector<E, N>(table + r * row_stride + feature);
      bool any = false;
#pragma unroll
      for (int i = 0; i < N; ++i) any |= non_finite(row.v[i]);
      if (!any || selected(r)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (non_finite(row.v[i])) acc.v[i] = quiet_nan<T>();
      }
    }
  }
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_ROWS_CUH_
