// How the work of a plan is cut: the last steps of making one (plan.cc).

#ifndef RECOM_JAX_CSRC_PLAN_CHUNKS_H_
#define RECOM_JAX_CSRC_PLAN_CHUNKS_H_

#include <vector>

#include "plan.h"

namespace recom {

// Finds runs of columns whose rows lie side by side, so that one pass may write them all, and
// decides whether it does so past the caches.
void group_columns(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                   int threads, Plan* plan);

// Splits the work: runs of adjacent columns with equally many bags, by tiles of bags. `cost` is
// per bag, of each column.
void cut_chunks(const std::vector<double>& cost, int threads, Plan* plan);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_PLAN_CHUNKS_H_
