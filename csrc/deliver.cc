#include "deliver.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "handover.h"

namespace recom {

namespace {

int64_t now_us() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(t).count();
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t aligned(int64_t n) {
  return (n + Delivery::kAlign - 1) / Delivery::kAlign * Delivery::kAlign;
}

// Threads that look without sleeping: half of the processors at most.
std::atomic<int> spinning{0};

struct Spinner {
  Spinner() : may(2 * ++spinning <= static_cast<int>(std::thread::hardware_concurrency())) {}
  ~Spinner() { --spinning; }
  const bool may;
};

constexpr int kLooks = 64;  // pauses between two looks: a look asks the driver
constexpr auto kNap = std::chrono::microseconds(20);

}  // namespace

Delivery::~Delivery() { Free(); }

void Delivery::Free() {
  if (event_ != nullptr || (data_ != nullptr && ordinal_ >= 0)) {
    try {  // what fails where the process ends is lost with it
      const cuda::Driver& driver = cuda::Driver::get();
      const cuda::DeviceScope scope(driver, ordinal_);
      if (event_ != nullptr) driver.event_destroy(event_);
      if (data_ != nullptr) driver.host_free(data_);
    } catch (const CudaError&) {
    }
  } else {
    std::free(data_);
  }
  event_ = nullptr;
  data_ = nullptr;
  room_ = 0;
}

void Delivery::Begin(int64_t nbytes, int ordinal) {
  nbytes_ = -1;
  copied_ = false;
  if (ordinal != ordinal_) Free();
  ordinal_ = ordinal;
  if (ordinal >= 0 && (event_ == nullptr || nbytes > room_)) {
    const cuda::Driver& driver = cuda::Driver::get();
    const cuda::DeviceScope scope(driver, ordinal);
    if (event_ == nullptr)
      driver.check(driver.event_create(&event_, cuda::kEventDisableTiming), "create an event");
    if (nbytes > room_) {
      if (data_ != nullptr) driver.host_free(data_);
      data_ = nullptr;
      room_ = 0;
      void* made = nullptr;
      driver.check(driver.host_alloc(&made, static_cast<size_t>(nbytes), cuda::kHostPortable),
                   "page-lock " + std::to_string(nbytes) + " bytes of host memory for results");
      data_ = static_cast<char*>(made);
      room_ = nbytes;
    }
  } else if (ordinal < 0 && nbytes > room_) {
    std::free(data_);
    room_ = 0;
    data_ = static_cast<char*>(std::malloc(static_cast<size_t>(nbytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    room_ = nbytes;
  }
  nbytes_ = nbytes;
  begun_us_ = now_us();
}

void Delivery::Copy(const std::vector<std::pair<const void*, int64_t>>& results,
                    cuda::Stream stream) {
  const int64_t wanted = nbytes_;
  if (wanted < 0) return;
  int64_t total = 0;
  for (const auto& [data, size] : results) total = aligned(total) + size;
  if (total != wanted)
    throw std::runtime_error("recom deliver: the call has results of " + std::to_string(total) +
                             " bytes, " + std::to_string(wanted) + " were asked for");
  int64_t at = 0;
  if (ordinal_ < 0) {
    take_over(data_);
    for (const auto& [data, size] : results) {
      at = aligned(at);
      if (size > 0) std::memcpy(data_ + at, data, static_cast<size_t>(size));
      at += size;
    }
  } else {
    const cuda::Driver& driver = cuda::Driver::get();
    for (const auto& [data, size] : results) {
      at = aligned(at);
      if (size > 0)
        driver.check(driver.copy_to_host_async(
                         data_ + at, static_cast<cuda::Pointer>(reinterpret_cast<uintptr_t>(data)),
                         static_cast<size_t>(size), stream),
                     "copy a result to the host");
      at += size;
    }
    driver.check(driver.event_record(event_, stream), "record an event");
  }
  copied_ = true;
}

bool Delivery::Wait(int64_t us, int64_t spin_us) const {
  const int64_t until = now_us() + us;
  const Spinner spinner;
  const int64_t spins_until = spinner.may ? begun_us_ + spin_us : 0;
  std::unique_ptr<cuda::DeviceScope> scope;
  for (;;) {
    if (copied_) {
      if (event_ == nullptr) break;
      const cuda::Driver& driver = cuda::Driver::get();
      if (!scope) scope = std::make_unique<cuda::DeviceScope>(driver, ordinal_);
      const cuda::Result state = driver.event_query(event_);
      if (state == 0) break;
      if (state != cuda::kNotReady) driver.fail(state, "compute or copy a result");
    }
    const int64_t now = now_us();
    if (now >= until) return false;
    if (now < spins_until) {
      for (int k = 0; k < kLooks; ++k) pause();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  hand_over(data_);
  return true;
}

}  // namespace recom
