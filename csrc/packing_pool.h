// Part of packing.h: threads that help with large copies.
#pragma once

#include <cstdint>
#include <functional>

#include "parallel.h"

namespace recom::packing {

// Runs tasks on up to `threads - 1` threads that are started at their first use and then kept: to
// start them for every batch would take as long as what they save.
Executor Helpers(int threads);

// Offers a task to that many of them: it is run that often, or less often, by whoever is free. A
// thread that ran it looks out for the next task for `spin_us` before it sleeps: to wake a sleeping
// one takes tens of microseconds, and a processor that sleeps is slow when it wakes.
void Offer(int helpers, std::function<void()> task, int64_t spin_us);

// Wakes that many of them for `spin_us`.
void Stir(int helpers, int64_t spin_us);

}  // namespace recom::packing
