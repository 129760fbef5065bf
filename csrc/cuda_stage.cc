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

std::atomic<int64_t> copies{0}, pieces{0}, delay_us{0};
// To issue a copy takes 2 us, as long as it takes to copy 100 KB.
std::atomic<int64_t> piece_bytes{int64_t{1} << 20};

// Calls copy(begin, end) for all of the slot, each part once it is written.
template <typename Copy>
void in_pieces(const StageSource& source, Copy copy) {
  const std::shared_ptr<StageWriter> writer = source.feed ? source.feed->Get() : nullptr;
  for (int64_t at = 0; at < source.nbytes;) {
    const int64_t end = writer ? writer->Ready(at, piece_bytes) : source.nbytes;
    copy(at, end);
    ++pieces;
    at = end;
  }
  ++copies;
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

void stage_copy(void* to, const StageSource& source, cuda::Stream stream) {
  const cuda::Driver& driver = cuda::Driver::get();
  in_pieces(source, [&](int64_t begin, int64_t end) {
    driver.check(
        driver.copy_to_device_async(reinterpret_cast<cuda::Pointer>(to) + begin,
                                    source.host + begin, static_cast<size_t>(end - begin), stream),
        "copy a batch to the device");
  });
}

void stage_copy_on_host(void* to, const StageSource& source) {
  if (const int64_t us = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  in_pieces(source, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, source.host + begin,
                static_cast<size_t>(end - begin));
  });
}

void set_stage_piece(int64_t nbytes) { piece_bytes = nbytes; }

void set_stage_delay(int64_t microseconds) { delay_us = microseconds; }

StageStats stage_stats() {
  std::shared_lock<std::shared_mutex> lock(Registry::get().mutex);
  return {copies, pieces, static_cast<int64_t>(Registry::get().sources.size())};
}

}  // namespace recom
