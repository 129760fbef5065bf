#include "packing_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace recom::packing {

namespace {

struct Pool {
  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::function<void()>> tasks;
  int threads = 0;
  const pid_t process = getpid();

  void Grow(int to) {
    std::lock_guard<std::mutex> lock(mutex);
    try {
      for (; threads < to; ++threads) std::thread([this] { Serve(); }).detach();
    } catch (const std::system_error&) {  // no thread to be had: the caller does what they would
    }
  }

  void Add(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (threads == 0)
        return;  // tasks are offers of help: nobody waits for one that has not begun
      tasks.push_back(std::move(task));
    }
    work.notify_one();
  }

  void Serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      work.wait(lock, [this] { return !tasks.empty(); });
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
    }
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
    executor.schedule = [&pool](std::function<void()> task) { pool.Add(std::move(task)); };
  }
  return executor;
}

}  // namespace recom::packing
