// Gradients of tables: rows of cotangents, added up row by row in a fixed order.

#ifndef RECOM_JAX_CSRC_ROW_SUMS_H_
#define RECOM_JAX_CSRC_ROW_SUMS_H_

#include <cstdint>
#include <vector>

#include "parallel.h"
#include "plan.h"
#include "program.h"

namespace recom {

// Runs `numbers`, the program that computes which rows are read and what they are multiplied by,
// then sums the cotangents, the last of `physical`, into `results`, one for each table
// (docs/program_format.md, "Row sums"). Throws ProgramError.
void run_row_sums(const Program& numbers, const std::vector<Buffer>& physical,
                  const std::vector<Buffer>& results, const int64_t* binding, int64_t n_binding,
                  const int64_t* words, int64_t n_words, const Executor& executor);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_ROW_SUMS_H_
