// What is added to which rows of gradients: the words of a row sum (docs/program_format.md, "Row
// sums"), read and checked.

#ifndef RECOM_JAX_CSRC_ROW_SUMS_WORDS_H_
#define RECOM_JAX_CSRC_ROW_SUMS_WORDS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "plan.h"

namespace recom {
namespace sums {

struct Table {
  int64_t rows, row_stride;
  std::vector<int> terms;
  int64_t work = 0;
  int64_t buckets = 1;
};

// One lookup. Numbers `*_at` are places in what the program computed, -1 for none.
struct Term {
  int64_t table, ct, base, width, offset, feature, items, bags, inner;
  int64_t row_at, bag_at, weight_at, scale_at, divisor_at, there_at;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (size, stride) of the bags in the cotangent
  bool plain;  // rows of the cotangent are added as they lie there, times at most one number
  std::vector<int32_t> order, starts;  // items by bucket, in order; empty for one bucket
};

struct Sums {
  int64_t n_cts, n_ints, n_floats, n_preds;
  bool wide;
  std::vector<Table> tables;
  std::vector<Term> terms;
};

int64_t elements(const Buffer& b);

// Throws ProgramError where the words are malformed or do not fit the buffers.
Sums read_sums(const int64_t* words, int64_t n_words, const std::vector<Buffer>& physical,
               const std::vector<Buffer>& results);

}  // namespace sums
}  // namespace recom

#endif  // RECOM_JAX_CSRC_ROW_SUMS_WORDS_H_
