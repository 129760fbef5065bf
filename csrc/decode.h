// What program.cc and class_decoder.cc share: reading words, and complaining.

#ifndef RECOM_JAX_CSRC_DECODE_H_
#define RECOM_JAX_CSRC_DECODE_H_

#include <cstdint>
#include <string>

#include "program.h"

namespace recom::decode {

// More than any real program has; they keep a hostile one from asking for absurd memory.
inline constexpr int64_t kMaxRegs = 4096;
inline constexpr int64_t kMaxRank = 32;

[[noreturn]] inline void fail(const std::string& what) {
  throw ProgramError("recom program: " + what);
}

inline void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

// Refuses words of another version. They may come from an exported model: says what its user can
// do.
inline void check_version(int64_t version, int64_t known, const char* what) {
  if (version == known) return;
  fail(std::string(what) + " version " + std::to_string(version) +
       ", this recom_jax reads version " + std::to_string(known) +
       (version > known ? ": install the recom_jax that exported the model, or a newer one"
                        : ": export the model again with this recom_jax"));
}

class Reader {
 public:
  Reader(const int64_t* words, int64_t n) : p_(words), end_(words + n) {}

  int64_t next() {
    if (p_ == end_) fail("truncated");
    return *p_++;
  }
  // A count of things of which each takes at least `words_each` of the remaining words.
  int64_t count(const char* what, int64_t words_each = 1) {
    int64_t n = next();
    if (n < 0 || n > (end_ - p_) / words_each) fail(std::string("bad count: ") + what);
    return n;
  }
  int below(int64_t limit, const char* what) {
    int64_t v = next();
    if (v < 0 || v >= limit) fail(std::string("out of range: ") + what);
    return static_cast<int>(v);
  }
  Reader sub(int64_t n) {
    if (n < 0 || n > end_ - p_) fail("truncated");
    Reader r(p_, n);
    p_ += n;
    return r;
  }
  bool done() const { return p_ == end_; }

 private:
  const int64_t* p_;
  const int64_t* end_;
};

// Reads one class, checks its code and lays out its derived words.
void decode_class(Reader* r, ColumnClass* c);

}  // namespace recom::decode

#endif  // RECOM_JAX_CSRC_DECODE_H_
