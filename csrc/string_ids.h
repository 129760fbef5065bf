// Strings on the host: their fingerprints (fingerprint.h) and bucket numbers, and lists in one
// string.
//
// Nothing here needs Python or XLA. Strings come through a Source, a batch at a time, so that a
// loop over them costs no call a string and no copy where memory holds their bytes already.

#ifndef RECOM_JAX_CSRC_STRING_IDS_H_
#define RECOM_JAX_CSRC_STRING_IDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fingerprint.h"
#include "parallel.h"

namespace recom::strings {

// How a string's units are laid out. All but kBytes become UTF-8 before they are hashed.
enum class Encoding : uint8_t { kBytes, kLatin1, kUcs2, kUcs4 };

// A batch of strings as bytes. A view without data is a null.
struct Batch {
  static constexpr int64_t kSize = 64;
  std::string_view at[kSize];
  std::string memory;  // of those that had to be encoded
};

class Source {
 public:
  virtual ~Source() = default;
  virtual int64_t size() const = 0;
  // Strings [begin, begin + count), count <= Batch::kSize. Returns how many could be read before
  // the first that has no UTF-8 form (a lone surrogate).
  virtual int64_t read(int64_t begin, int64_t count, Batch* out) const = 0;
  // The first null, or -1.
  virtual int64_t first_null() const { return -1; }
};

// Arrow's bitmap of entries that are there, from `offset` on; null: all are.
struct Validity {
  const uint8_t* bits = nullptr;
  int64_t offset = 0;
  bool operator[](int64_t i) const {
    return bits == nullptr || (bits[(offset + i) >> 3] >> ((offset + i) & 7) & 1);
  }
  int64_t first_null(int64_t n) const;
};

// String i is data[offsets[i], offsets[i + 1]). Offset is int32_t or int64_t.
template <typename Offset>
class OffsetSource : public Source {
 public:
  // Throws std::invalid_argument unless offsets ascend from 0 or more to at most `bytes`.
  OffsetSource(const Offset* offsets, const char* data, int64_t bytes, int64_t n,
               Validity validity);
  int64_t size() const override { return n_; }
  int64_t read(int64_t begin, int64_t count, Batch* out) const override;
  int64_t first_null() const override { return validity_.first_null(n_); }

 private:
  const Offset* offsets_;
  const char* data_;
  int64_t n_;
  Validity validity_;
};

// Every string has `width` units side by side.
class FixedSource : public Source {
 public:
  // `padded`: zeros at the end are padding, as in numpy's arrays of bytes and str.
  FixedSource(const char* data, int64_t width, int64_t n, Encoding encoding, bool padded,
              Validity validity)
      : data_(data),
        width_(width),
        n_(n),
        encoding_(encoding),
        padded_(padded),
        validity_(validity) {}
  int64_t size() const override { return n_; }
  int64_t read(int64_t begin, int64_t count, Batch* out) const override;
  int64_t first_null() const override { return validity_.first_null(n_); }

 private:
  const char* data_;
  int64_t width_, n_;
  Encoding encoding_;
  bool padded_;
  Validity validity_;
};

// Strings anywhere in memory. A piece without data is a null.
class PieceSource : public Source {
 public:
  struct Piece {
    const void* data;
    int64_t units;
    Encoding encoding;
  };
  explicit PieceSource(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}
  int64_t size() const override { return static_cast<int64_t>(pieces_.size()); }
  int64_t read(int64_t begin, int64_t count, Batch* out) const override;
  int64_t first_null() const override;

 private:
  std::vector<Piece> pieces_;
};

// Each returns -1, or the first string that has no UTF-8 form. `null` is what nulls become.
int64_t fingerprints(const Source& source, uint64_t null, const Executor& executor, uint64_t* out);
int64_t bucket_ids(const Source& source, uint64_t buckets, int32_t null, const Executor& executor,
                   int32_t* out);

struct SplitOptions {
  std::string delimiter;     // not empty
  uint64_t buckets = 1;      // of the tokens' ids
  bool skip_empty = false;   // leaves out empty tokens
  bool null_is_list = true;  // a null is an empty list; else it is the string `null`
  std::string null;
};

// The ids of all tokens of all strings.
class Tokens {
 public:
  // Tokens of string i are between two delimiters, as in Python's str.split and tf.strings.split.
  Tokens(const Source& source, const SplitOptions& options, const Executor& executor);
  int64_t bad() const { return bad_; }  // as above
  int64_t rows() const { return rows_; }
  int64_t total() const { return total_; }
  // The first string with more than `length` tokens, or -1.
  int64_t first_longer(int64_t length) const;
  // values [total], splits [rows + 1] from `start` on.
  void jagged(int32_t* values, int32_t* splits, int32_t start) const;
  // out [rows, length]: the first tokens, then `pad`.
  void padded(int32_t* out, int64_t length, int32_t pad) const;

 private:
  struct Chunk {
    std::vector<int32_t> ids;
    std::vector<int64_t> ends;  // of each string's tokens in `ids`
  };
  std::vector<Chunk> chunks_;
  int64_t rows_ = 0, total_ = 0, bad_ = -1;
};

}  // namespace recom::strings

#endif  // RECOM_JAX_CSRC_STRING_IDS_H_
