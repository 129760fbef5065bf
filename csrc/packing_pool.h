// Part of packing.h: threads that help with large copies.
#pragma once

#include <cstdint>
#include <functional>

#include "parallel.h"

namespace recom::packing {

// Runs tasks on up to `threads - 1` threads that are started at their first use and then kept: to
// start them for every batch would take as long as what they save.
Executor Helpers(int threads);

// Offers a task to that many of them: it is run that often, or less often, by whoever is free.
void Offer(int helpers, std::function<void()> task);

// How long a thread that ran a task looks out for another one before it sleeps. To wake a sleeping
// one takes tens of microseconds.
void SetSpin(int64_t microseconds);

}  // namespace recom::packing
