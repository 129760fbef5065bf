#include "string_ids.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace recom::strings {
namespace {

// ---- fingerprints ----

constexpr uint64_t kP0 = 0xc3a5c85c97cb3127u, kP1 = 0xb492b66fbe98f273u, kP2 = 0x9ae16a3b2f90404fu;

uint64_t word(const char* p) {
  uint64_t w;
  std::memcpy(&w, p, sizeof w);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  w = __builtin_bswap64(w);
#endif
  return w;
}

uint64_t half_word(const char* p) {
  uint32_t w;
  std::memcpy(&w, p, sizeof w);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  w = __builtin_bswap32(w);
#endif
  return w;
}

uint64_t right(uint64_t x, int by) { return x >> by | x << (64 - by); }  // rotated; 0 < by < 64
uint64_t fold(uint64_t x) { return x ^ x >> 47; }

// Two words into one, by the multiplier.
uint64_t mix(uint64_t a, uint64_t b, uint64_t multiplier) {
  const uint64_t once = fold((a ^ b) * multiplier);
  return fold((b ^ once) * multiplier) * multiplier;
}

uint64_t up_to_16(const char* s, uint64_t n) {
  const uint64_t multiplier = kP2 + n * 2;
  if (n >= 8) {
    const uint64_t head = word(s) + kP2, tail = word(s + n - 8);
    return mix(right(tail, 37) * multiplier + head, (right(head, 25) + tail) * multiplier,
               multiplier);
  }
  if (n >= 4) return mix(n + (half_word(s) << 3), half_word(s + n - 4), multiplier);
  if (n == 0) return kP2;
  const auto byte = [s](uint64_t i) { return uint64_t{static_cast<uint8_t>(s[i])}; };
  return fold((byte(0) + (byte(n / 2) << 8)) * kP2 ^ (n + (byte(n - 1) << 2)) * kP0) * kP2;
}

uint64_t up_to_32(const char* s, uint64_t n) {
  const uint64_t multiplier = kP2 + n * 2;
  const uint64_t a = word(s) * kP1, b = word(s + 8);
  const uint64_t c = word(s + n - 8) * multiplier, d = word(s + n - 16) * kP2;
  return mix(right(a + b, 43) + right(c, 30) + d, a + right(b + kP2, 18) + c, multiplier);
}

uint64_t up_to_64(const char* s, uint64_t n) {
  const uint64_t multiplier = kP2 + n * 2;
  const uint64_t a = word(s) * kP2, b = word(s + 8);
  const uint64_t c = word(s + n - 8) * multiplier, d = word(s + n - 16) * kP2;
  const uint64_t outer = right(a + b, 43) + right(c, 30) + d;
  const uint64_t outer_mixed = mix(outer, a + right(b + kP2, 18) + c, multiplier);
  const uint64_t e = word(s + 16) * multiplier, f = word(s + 24);
  const uint64_t g = (outer + word(s + n - 32)) * multiplier;
  const uint64_t h = (outer_mixed + word(s + n - 24)) * multiplier;
  return mix(right(e + f, 43) + right(g, 30) + h, e + right(f + a, 18) + g, multiplier);
}

struct Pair {
  uint64_t first = 0, second = 0;
};

// 32 bytes into a pair that starts as (a, b).
Pair absorb(const char* s, uint64_t a, uint64_t b) {
  const uint64_t last = word(s + 24);
  a += word(s);
  b = right(b + a + last, 21);
  const uint64_t before = a;
  a += word(s + 8) + word(s + 16);
  return {a + last, b + right(a, 44) + before};
}

// The state over blocks of 64 bytes.
struct State {
  uint64_t x, y, z;
  Pair v, w;

  // `weight` is what the last block counts more.
  void block(const char* s, uint64_t multiplier, uint64_t weight) {
    x = right(x + y + v.first + word(s + 8), 37) * multiplier;
    y = right(y + v.second + word(s + 48), 42) * multiplier;
    x ^= w.second * weight;
    y += v.first * weight + word(s + 40);
    z = right(z + w.first, 33) * multiplier;
    v = absorb(s, v.second * multiplier, x + w.first);
    w = absorb(s + 32, z + w.second, y + word(s + 16));
    std::swap(x, z);
  }
};

uint64_t over_64(const char* s, uint64_t n) {
  constexpr uint64_t kSeed = 81;
  State state;
  state.y = kSeed * kP1 + 113;
  state.z = fold(state.y * kP2 + 113) * kP2;
  state.x = kSeed * kP2 + word(s);
  const char* const last = s + n - 64;  // the last block overlaps the one before
  for (const char *p = s, *end = s + (n - 1) / 64 * 64; p != end; p += 64) state.block(p, kP1, 1);
  const uint64_t multiplier = kP1 + ((state.z & 0xff) << 1);
  state.w.first += (n - 1) & 63;
  state.v.first += state.w.first;
  state.w.first += state.v.first;
  state.block(last, multiplier, 9);
  const auto& [x, y, z, v, w] = state;
  return mix(mix(v.first, w.first, multiplier) + fold(y) * kP0 + z,
             mix(v.second, w.second, multiplier) + x, multiplier);
}

// ---- encoding ----

template <typename Unit>
struct Units {
  const char* data;
  uint32_t operator[](int64_t i) const {
    Unit u;  // may be misaligned
    std::memcpy(&u, data + i * sizeof(Unit), sizeof u);
    return u;
  }
};

// Writes the UTF-8 of n units at *end and moves *end behind it; memory only grows, as to clear it
// costs as much as to write it. False if a unit is no character.
template <typename Unit>
bool append_utf8(Units<Unit> units, int64_t n, std::string* out, size_t* end) {
  uint32_t all = 0;
  for (int64_t i = 0; i < n; ++i) all |= units[i];
  const bool ascii = all < 0x80;
  const size_t most = *end + n * (ascii ? 1 : sizeof(Unit) == 1 ? 2 : sizeof(Unit) == 2 ? 3 : 4);
  if (out->size() < most) out->resize(std::max(most, 2 * out->size()));
  char* p = out->data() + *end;
  if (ascii) {
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<char>(units[i]);
    *end += n;
    return true;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t c = units[i];
    const auto tail = [c](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3f)); };
    if (c < 0x80) {
      *p++ = static_cast<char>(c);
    } else if (c < 0x800) {
      *p++ = static_cast<char>(0xc0 | c >> 6);
      *p++ = tail(0);
    } else if (c < 0x10000) {
      if (c >= 0xd800 && c < 0xe000) return false;
      *p++ = static_cast<char>(0xe0 | c >> 12);
      *p++ = tail(6);
      *p++ = tail(0);
    } else if (c < 0x110000) {
      *p++ = static_cast<char>(0xf0 | c >> 18);
      *p++ = tail(12);
      *p++ = tail(6);
      *p++ = tail(0);
    } else {
      return false;
    }
  }
  *end = p - out->data();
  return true;
}

bool append_utf8(const void* data, int64_t n, Encoding encoding, std::string* out, size_t* end) {
  const char* const p = static_cast<const char*>(data);
  switch (encoding) {
    case Encoding::kLatin1:
      return append_utf8(Units<uint8_t>{p}, n, out, end);
    case Encoding::kUcs2:
      return append_utf8(Units<uint16_t>{p}, n, out, end);
    default:
      return append_utf8(Units<uint32_t>{p}, n, out, end);
  }
}

// Collects encoded strings; their views are set in the end, as memory moves while it grows.
class Encoded {
 public:
  explicit Encoded(Batch* batch) : batch_(batch) {}
  bool add(int64_t i, const void* data, int64_t units, Encoding encoding) {
    if (!append_utf8(data, units, encoding, &batch_->memory, &end_)) return false;
    index_[n_] = i;
    ends_[n_++] = end_;
    return true;
  }
  ~Encoded() {
    size_t from = 0;
    for (int k = 0; k < n_; ++k) {
      batch_->at[index_[k]] = {batch_->memory.data() + from, ends_[k] - from};
      from = ends_[k];
    }
  }

 private:
  Batch* batch_;
  int n_ = 0;
  size_t end_ = 0;
  int64_t index_[Batch::kSize];
  size_t ends_[Batch::kSize];
};

// ---- loops ----

constexpr int64_t kChunk = 2048;  // strings a thread takes at a time

void lower(std::atomic<int64_t>* least, int64_t i) {
  int64_t seen = least->load();
  while (i < seen && !least->compare_exchange_weak(seen, i)) {
  }
}

// Calls each(chunk, i, string) for every string. Returns the first that has no UTF-8 form, or -1.
template <typename Each>
int64_t for_each(const Source& source, const Executor& executor, const Each& each) {
  const int64_t n = source.size();
  std::atomic<int64_t> bad{n};
  parallel_for(executor, (n + kChunk - 1) / kChunk, [&](int64_t chunk) {
    Batch batch;
    const int64_t end = std::min(n, (chunk + 1) * kChunk);
    for (int64_t begin = chunk * kChunk; begin < end; begin += Batch::kSize) {
      const int64_t count = std::min(Batch::kSize, end - begin);
      const int64_t good = source.read(begin, count, &batch);
      if (good < count) return lower(&bad, begin + good);
      for (int64_t i = 0; i < count; ++i) each(chunk, begin + i, batch.at[i]);
    }
  });
  return bad.load() == n ? -1 : bad.load();
}

}  // namespace

uint64_t fingerprint64(const char* data, size_t size) {
  if (size <= 16) return up_to_16(data, size);
  if (size <= 32) return up_to_32(data, size);
  return size <= 64 ? up_to_64(data, size) : over_64(data, size);
}

// ---- sources ----

int64_t Validity::first_null(int64_t n) const {
  if (bits == nullptr) return -1;
  for (int64_t i = 0; i < n; ++i) {
    if ((offset + i) % 8 == 0 && bits[(offset + i) >> 3] == 0xff) {
      i += 7;
    } else if (!(*this)[i]) {
      return i;
    }
  }
  return -1;
}

template <typename Offset>
OffsetSource<Offset>::OffsetSource(const Offset* offsets, const char* data, int64_t bytes,
                                   int64_t n, Validity validity)
    : offsets_(offsets), data_(data == nullptr ? "" : data), n_(n), validity_(validity) {
  bool ascending = n == 0 || offsets[0] >= 0;
  for (int64_t i = 0; i < n; ++i) ascending &= offsets[i] <= offsets[i + 1];
  if (!ascending || (n > 0 && offsets[n] > bytes)) {
    throw std::invalid_argument("the offsets of the strings are damaged");
  }
}

template <typename Offset>
int64_t OffsetSource<Offset>::read(int64_t begin, int64_t count, Batch* out) const {
  for (int64_t i = 0; i < count; ++i) {
    const Offset from = offsets_[begin + i];
    out->at[i] = validity_[begin + i]
                     ? std::string_view(data_ + from, offsets_[begin + i + 1] - from)
                     : std::string_view();
  }
  return count;
}

template class OffsetSource<int32_t>;
template class OffsetSource<int64_t>;

int64_t FixedSource::read(int64_t begin, int64_t count, Batch* out) const {
  const int64_t unit = encoding_ == Encoding::kBytes ? 1 : 4;
  Encoded encoded(out);
  for (int64_t i = 0; i < count; ++i) {
    if (!validity_[begin + i]) {
      out->at[i] = std::string_view();
      continue;
    }
    const char* const data = data_ + (begin + i) * width_ * unit;
    int64_t n = width_;
    if (padded_ && unit == 1) {
      while (n > 0 && data[n - 1] == 0) --n;
    } else if (padded_) {
      while (n > 0 && Units<uint32_t>{data}[n - 1] == 0) --n;
    }
    if (encoding_ == Encoding::kBytes) {
      out->at[i] = {data, static_cast<size_t>(n)};
    } else if (!encoded.add(i, data, n, encoding_)) {
      return i;
    }
  }
  return count;
}

int64_t PieceSource::read(int64_t begin, int64_t count, Batch* out) const {
  Encoded encoded(out);
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = pieces_[begin + i];
    if (piece.data == nullptr || piece.encoding == Encoding::kBytes) {
      out->at[i] = {static_cast<const char*>(piece.data), static_cast<size_t>(piece.units)};
    } else if (!encoded.add(i, piece.data, piece.units, piece.encoding)) {
      return i;
    }
  }
  return count;
}

int64_t PieceSource::first_null() const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].data == nullptr) return static_cast<int64_t>(i);
  }
  return -1;
}

// ---- results ----

int64_t fingerprints(const Source& source, uint64_t null, const Executor& executor, uint64_t* out) {
  return for_each(source, executor, [=](int64_t, int64_t i, std::string_view s) {
    out[i] = s.data() == nullptr ? null : fingerprint64(s.data(), s.size());
  });
}

int64_t bucket_ids(const Source& source, uint64_t buckets, int32_t null, const Executor& executor,
                   int32_t* out) {
  return for_each(source, executor, [=](int64_t, int64_t i, std::string_view s) {
    out[i] = s.data() == nullptr
                 ? null
                 : static_cast<int32_t>(fingerprint64(s.data(), s.size()) % buckets);
  });
}

Tokens::Tokens(const Source& source, const SplitOptions& options, const Executor& executor)
    : rows_(source.size()) {
  chunks_.resize((rows_ + kChunk - 1) / kChunk);
  const std::string_view delimiter = options.delimiter;
  bad_ = for_each(source, executor, [&](int64_t at, int64_t, std::string_view s) {
    Chunk& chunk = chunks_[at];
    if (s.data() != nullptr || !options.null_is_list) {
      if (s.data() == nullptr) s = options.null;
      const auto add = [&](std::string_view token) {
        if (token.empty() && options.skip_empty) return;
        chunk.ids.push_back(
            static_cast<int32_t>(fingerprint64(token.data(), token.size()) % options.buckets));
      };
      size_t from = 0;
      for (size_t to; (to = s.find(delimiter, from)) != s.npos; from = to + delimiter.size()) {
        add(s.substr(from, to - from));
      }
      add(s.substr(from));
    }
    chunk.ends.push_back(static_cast<int64_t>(chunk.ids.size()));
  });
  for (const Chunk& chunk : chunks_) total_ += static_cast<int64_t>(chunk.ids.size());
}

int64_t Tokens::first_longer(int64_t length) const {
  for (size_t at = 0; at < chunks_.size(); ++at) {
    int64_t from = 0;
    for (size_t i = 0; i < chunks_[at].ends.size(); ++i) {
      if (chunks_[at].ends[i] - from > length) return static_cast<int64_t>(at * kChunk + i);
      from = chunks_[at].ends[i];
    }
  }
  return -1;
}

void Tokens::jagged(int32_t* values, int32_t* splits, int32_t start) const {
  *splits++ = start;
  for (const Chunk& chunk : chunks_) {
    std::copy(chunk.ids.begin(), chunk.ids.end(), values);
    values += chunk.ids.size();
    for (const int64_t end : chunk.ends) *splits++ = static_cast<int32_t>(start + end);
    start += static_cast<int32_t>(chunk.ids.size());
  }
}

void Tokens::padded(int32_t* out, int64_t length, int32_t pad) const {
  for (const Chunk& chunk : chunks_) {
    int64_t from = 0;
    for (const int64_t end : chunk.ends) {
      const int64_t n = std::min(end - from, length);
      std::copy_n(chunk.ids.begin() + from, n, out);
      std::fill(out + n, out + length, pad);
      out += length;
      from = end;
    }
  }
}

}  // namespace recom::strings
