// Running a program on buffers.

#ifndef RECOM_JAX_CSRC_INTERP_H_
#define RECOM_JAX_CSRC_INTERP_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel.h"
#include "plan.h"
#include "program.h"

namespace recom {

// Virtual operands from the call's physical ones (docs/program_format.md, "Binding"). The dims of
// pack entries are copied into `storage`. Checks dtypes, ranks, sizes and alignment.
void bind_operands(const Program& program, const std::vector<Buffer>& physical,
                   const int64_t* binding, int64_t n_binding, std::vector<int64_t>* storage,
                   std::vector<Buffer>* operands);

// Runs the program. Throws ProgramError.
void run_program(const Program& program, const std::vector<Buffer>& physical,
                 const std::vector<Buffer>& results, const int64_t* binding, int64_t n_binding,
                 const Executor& executor);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_INTERP_H_
