// Running chunks on the caller and whoever else turns up.

#ifndef RECOM_JAX_CSRC_PARALLEL_H_
#define RECOM_JAX_CSRC_PARALLEL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace recom {

// Who runs tasks: XLA's pool in the handler, plain threads in the direct entry point. A scheduled
// task may run late or after the call has returned.
struct Executor {
  int threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// Calls fn(i) for every i in [0, n), and returns when all have. The caller takes chunks from the
// front and helpers in turn from the back and the front, so that two threads stay on disjoint
// ranges. The caller only ever waits for chunks that a running helper has already taken.
template <class F>
void parallel_for(const Executor& executor, int64_t n, const F& fn) {
  if (n <= 0) return;
  if (executor.threads <= 1 || n == 1) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  struct State {
    std::atomic<uint64_t> range;  // front in the low half, back in the high half
    std::atomic<int64_t> done{0};
    int64_t n;
    const F* fn;  // valid while a chunk is unfinished
    std::mutex mutex;
    std::condition_variable finished;
    std::exception_ptr error;

    // The next chunk, or -1.
    int64_t take(bool from_back) {
      uint64_t r = range.load(std::memory_order_relaxed);
      while (true) {
        const uint32_t front = static_cast<uint32_t>(r), back = static_cast<uint32_t>(r >> 32);
        if (front >= back) return -1;
        const uint64_t next =
            from_back ? (uint64_t{back - 1} << 32 | front) : (uint64_t{back} << 32 | (front + 1));
        if (range.compare_exchange_weak(r, next)) return from_back ? back - 1 : front;
      }
    }
    void drain(bool from_back) {
      for (int64_t i; (i = take(from_back)) >= 0;) {
        try {
          (*fn)(i);
        } catch (...) {
          std::lock_guard<std::mutex> lock(mutex);
          if (!error) error = std::current_exception();
        }
        if (done.fetch_add(1) + 1 == n) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }
  };
  auto state = std::make_shared<State>();
  state->range = static_cast<uint64_t>(n) << 32;
  state->n = n;
  state->fn = &fn;
  const int64_t helpers = executor.threads - 1 < n - 1 ? executor.threads - 1 : n - 1;
  for (int64_t h = 0; h < helpers; ++h) {
    executor.schedule([state, h] { state->drain(h % 2 == 0); });
  }
  state->drain(false);
  for (int spin = 0; spin < 4000 && state->done.load() < n; ++spin) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  if (state->done.load() < n) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->finished.wait(lock, [&] { return state->done.load() == n; });
  }
  // The last helper may still hold the lock to notify; its state is shared, so that is fine.
  std::lock_guard<std::mutex> lock(state->mutex);
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace recom

#endif  // RECOM_JAX_CSRC_PARALLEL_H_
