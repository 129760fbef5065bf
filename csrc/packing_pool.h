// Part of packing.h: threads that help with large copies.
#pragma once

#include "parallel.h"

namespace recom::packing {

// Runs tasks on up to `threads - 1` threads that are started at their first use and then kept: to
// start them for every batch would take as long as what they save.
Executor Helpers(int threads);

}  // namespace recom::packing
