#include "rouse.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "cuda_driver.h"
#include "packing_pool.h"

namespace recom {

namespace {

std::atomic<bool> rousing{true};
std::atomic<int64_t> times{0};

// A device's own stream: host functions would hold up whatever else is on theirs.
struct Rouser {
  explicit Rouser(int ordinal_in) : ordinal(ordinal_in) {}
  const int ordinal;
  std::atomic<bool> pending{false};  // one at a time, however many threads call
  cuda::Stream stream = nullptr;     // of whoever has set `pending`

  void Rouse() {
    if (ordinal >= 0) {
      const cuda::Driver& driver = cuda::Driver::get();
      const cuda::DeviceScope scope(driver, ordinal);
      if (stream == nullptr)
        driver.check(driver.stream_create(&stream, cuda::kStreamNonBlocking), "create a stream");
      driver.check(driver.host_function(stream, &Rouser::Done, this), "call the host");
    } else {
      Done(this);
    }
    ++times;
  }

  static void Done(void* rouser) { static_cast<Rouser*>(rouser)->pending = false; }
};

// Kept for good: the driver may call at any time.
Rouser& rouser_of(int ordinal) {
  static std::mutex mutex;
  static auto* rousers = new std::map<int, std::unique_ptr<Rouser>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Rouser>& found = (*rousers)[ordinal];
  if (!found) found = std::make_unique<Rouser>(ordinal);
  return *found;
}

}  // namespace

void rouse_driver(int ordinal) noexcept {
  if (!rousing) return;
  try {
    Rouser& rouser = rouser_of(ordinal);
    if (rouser.pending.exchange(true)) return;
    const bool taken = packing::OfferAwake([&rouser] {
      try {
        rouser.Rouse();
      } catch (...) {  // calls say themselves what is wrong with the device
        rouser.pending = false;
      }
    });
    if (!taken) rouser.pending = false;
  } catch (...) {  // no memory
  }
}

int64_t roused() { return times; }
void set_rousing(bool on) { rousing = on; }

}  // namespace recom
