#include "cuda_stage.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "cuda_copy.h"
#include "handover.h"

namespace recom {

namespace {

struct Registry {
  // A leaf lock: nothing else is taken while it is held.
  std::shared_mutex mutex;
  std::unordered_map<uintptr_t, StageSource> sources;
  static Registry& get() {
    // Never destroyed: rings may die after static destruction began.
    static Registry* registry = new Registry;
    return *registry;
  }
};

std::atomic<int64_t> copies{0}, delay_us{0};

// Waits until the slot's bytes are final. Whether they are on the device, or on their way.
bool complete(const StageSource& source) {
  if (const auto writer = source.feed ? source.feed->Get() : nullptr) writer->Complete();
  ++copies;
  return source.upload && source.upload->finished();
}

}  // namespace

void stage_register(uintptr_t token, const StageSource& source) {
  std::unique_lock<std::shared_mutex> lock(Registry::get().mutex);
  Registry::get().sources[token] = source;
}

void stage_forget(const void* owner) {
  std::unique_lock<std::shared_mutex> lock(Registry::get().mutex);
  auto& sources = Registry::get().sources;
  for (auto it = sources.begin(); it != sources.end();)
    it = it->second.owner == owner ? sources.erase(it) : std::next(it);
}

StageSource stage_source(const void* token, int64_t nbytes) {
  std::shared_lock<std::shared_mutex> lock(Registry::get().mutex);
  const auto it = Registry::get().sources.find(reinterpret_cast<uintptr_t>(token));
  if (it == Registry::get().sources.end())
    throw std::runtime_error(
        "recom stage: the call was handed no staging slot of this process. A served function's "
        "program was exported, or its first operand copied, neither of which works");
  if (it->second.nbytes != nbytes)
    throw std::runtime_error("recom stage: the slot holds " + std::to_string(it->second.nbytes) +
                             " bytes, the program was compiled for " + std::to_string(nbytes));
  return it->second;
}

std::string pin_memory(void* data, size_t nbytes, int device) {
  try {
    const cuda::Driver& driver = cuda::Driver::get();
    const cuda::DeviceScope scope(driver, device);
    driver.check(driver.host_register(data, nbytes, cuda::kHostPortable),
                 "page-lock " + std::to_string(nbytes) + " bytes of host memory");
    return "";
  } catch (const std::exception& e) {
    return e.what();
  }
}

void unpin_memory(void* data) {
  try {
    cuda::Driver::get().host_unregister(data);  // fails where the process ends: nothing is lost
  } catch (const std::exception&) {
  }
}

void stage_copy(const StageWish& wish, const StageSource& source, int device, cuda::Stream stream) {
  const cuda::Driver& driver = cuda::Driver::get();
  const auto token = reinterpret_cast<cuda::Pointer>(wish.token);
  bool there = complete(source);
  if (there) {
    source.upload->Await(stream);
  } else if (wish.whole) {
    driver.check(
        driver.copy_to_device_async(token, source.host, static_cast<size_t>(source.nbytes), stream),
        "copy a batch to the device");
    there = true;
  }
  if (wish.part == nullptr) return;
  const auto to = reinterpret_cast<cuda::Pointer>(wish.part);
  const auto nbytes = static_cast<size_t>(wish.nbytes);
  if (there) {
    copy_on_device(device, to, token + wish.begin, nbytes, stream);
  } else {
    driver.check(driver.copy_to_device_async(to, source.host + wish.begin, nbytes, stream),
                 "copy a batch to the device");
  }
}

void stage_copy_on_host(const StageWish& wish, const StageSource& source) {
  bool there = complete(source);
  if (const int64_t us = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  if (!there && wish.whole) {
    std::memcpy(wish.token, source.host, static_cast<size_t>(source.nbytes));
    hand_over(source.host);
    there = true;
  }
  if (wish.part == nullptr) return;
  std::memcpy(wish.part, (there ? wish.token : source.host) + wish.begin,
              static_cast<size_t>(wish.nbytes));
  hand_over(there ? wish.token : source.host);
}

void set_stage_delay(int64_t microseconds) { delay_us = microseconds; }

StageStats stage_stats() {
  std::shared_lock<std::shared_mutex> lock(Registry::get().mutex);
  return {copies, static_cast<int64_t>(Registry::get().sources.size())};
}

}  // namespace recom
