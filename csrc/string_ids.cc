#include "string_ids.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace recom::strings {
namespace {

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
