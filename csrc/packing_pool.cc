#include "packing_pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace recom::packing {

namespace {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Task {
  std::function<void()> run;
  int64_t spin_us;
};

struct Pool {
  std::mutex mutex;
  std::condition_variable work;
  std::deque<Task> tasks;
  std::atomic<int> queued{0};  // tasks, without the lock
  int threads = 0, sleeping = 0;
  const pid_t process = getpid();

  void Grow(int to) {
    std::lock_guard<std::mutex> lock(mutex);
    try {
      for (; threads < to; ++threads) std::thread([this] { Serve(); }).detach();
    } catch (const std::system_error&) {  // no thread to be had: the caller does what they would
    }
  }

  // Wakes one thread, which wakes the next: to wake a thread takes long.
  void Add(Task task, int copies) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (threads == 0)
        return;  // tasks are offers of help: nobody waits for one that has not begun
      for (int i = 1; i < copies; ++i) tasks.push_back(task);
      tasks.push_back(std::move(task));
      queued.store(static_cast<int>(tasks.size()), std::memory_order_release);
      if (sleeping == 0) return;
    }
    work.notify_one();
  }

  void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      if (tasks.empty()) {
        ++sleeping;
        work.wait(lock, [this] { return !tasks.empty(); });
        --sleeping;
      }
      Task task = std::move(tasks.front());
      tasks.pop_front();
      queued.store(static_cast<int>(tasks.size()), std::memory_order_release);
      const bool more = !tasks.empty() && sleeping > 0;
      lock.unlock();
      if (more) work.notify_one();
      task.run();
      task.run = nullptr;  // lets go of what it holds
      if (task.spin_us > 0) Spin(task.spin_us);
    }
  }

  // Looks out for the next batch a while before it sleeps.
  void Spin(int64_t us) const {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::microseconds(us);
    while (queued.load(std::memory_order_acquire) == 0 && Clock::now() < until)
      for (int i = 0; i < 16; ++i) Pause();
  }
};

// The process's pool, never destroyed. A forked child has none of its parent's threads, so it gets
// its own; the parent's is left alone, as its lock may be held.
Pool& Get() {
  static std::atomic<Pool*> pool{nullptr};
  Pool* found = pool.load();
  if (found != nullptr && found->process == getpid()) return *found;
  auto* made = new Pool;
  if (pool.compare_exchange_strong(found, made)) return *made;
  delete made;  // another thread was quicker
  return *found;
}

}  // namespace

Executor Helpers(int threads) {
  Executor executor;
  executor.threads = threads;
  if (threads > 1) {
    Pool& pool = Get();
    pool.Grow(threads - 1);
    executor.schedule = [&pool](std::function<void()> task) { pool.Add({std::move(task), 0}, 1); };
  }
  return executor;
}

void Offer(int helpers, std::function<void()> task, int64_t spin_us) {
  Pool& pool = Get();
  pool.Grow(helpers);
  pool.Add({std::move(task), spin_us}, helpers);
}

void Stir(int helpers, int64_t spin_us) {
  if (helpers > 0 && spin_us > 0) Offer(helpers, [] {}, spin_us);
}

}  // namespace recom::packing
