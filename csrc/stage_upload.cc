#include "stage_upload.h"

#include <cstring>
#include <map>
#include <mutex>

#include "handover.h"

namespace recom {

namespace {

// Of a device: copies of all slots follow one another, as they do on the bus.
cuda::Stream stream_of(int ordinal) {
  static std::mutex mutex;
  static auto* streams = new std::map<int, cuda::Stream>;  // kept for good
  const std::lock_guard<std::mutex> lock(mutex);
  cuda::Stream& stream = (*streams)[ordinal];
  if (stream == nullptr) {
    const cuda::Driver& driver = cuda::Driver::get();
    driver.check(driver.stream_create(&stream, cuda::kStreamNonBlocking), "create a stream");
  }
  return stream;
}

}  // namespace

Upload::Upload(const char* host, int64_t nbytes, uintptr_t buffer, int ordinal)
    : host_(host), nbytes_(nbytes), buffer_(buffer), ordinal_(ordinal) {
  if (ordinal < 0) return;
  const cuda::Driver& driver = cuda::Driver::get();
  const cuda::DeviceScope scope(driver, ordinal);
  stream_ = stream_of(ordinal);
  driver.check(driver.event_create(&event_, cuda::kEventDisableTiming), "create an event");
}

Upload::~Upload() {
  if (event_ == nullptr) return;
  try {
    const cuda::Driver& driver = cuda::Driver::get();
    const cuda::DeviceScope scope(driver, ordinal_);
    driver.event_destroy(event_);  // fails where the process ends: nothing is lost
  } catch (const CudaError&) {
  }
}

void Upload::Issue(int64_t begin, int64_t end, bool last) {
  if (ordinal_ < 0) {
    take_over(reinterpret_cast<void*>(buffer_));
    std::memcpy(reinterpret_cast<char*>(buffer_) + begin, host_ + begin,
                static_cast<size_t>(end - begin));
  } else {
    const cuda::Driver& driver = cuda::Driver::get();
    const cuda::DeviceScope scope(driver, ordinal_);
    driver.check(
        driver.copy_to_device_async(static_cast<cuda::Pointer>(buffer_) + begin, host_ + begin,
                                    static_cast<size_t>(end - begin), stream_),
        "copy a batch to the device");
    if (last) driver.check(driver.event_record(event_, stream_), "record an event");
  }
  if (last) finished_ = true;
}

void Upload::Await(cuda::Stream stream) const {
  const cuda::Driver& driver = cuda::Driver::get();
  driver.check(driver.stream_wait_event(stream, event_, 0), "wait for a batch");
}

void Upload::Drain() const {
  if (ordinal_ < 0) return;
  try {
    const cuda::Driver& driver = cuda::Driver::get();
    const cuda::DeviceScope scope(driver, ordinal_);
    driver.stream_synchronize(stream_);
  } catch (const CudaError&) {
  }
}

}  // namespace recom
