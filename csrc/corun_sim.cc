// The co-run runtime's device without a GPU: what is enqueued runs later, in a random order among
// those that streams and events allow. A missing wait shows as wrong bytes.

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "corun_backend.h"

namespace recom::corun {
namespace {

class SimBackend : public Backend {
 public:
  SimBackend(uint64_t seed, SimKernel kernel) : random_(seed), kernel_(kernel) {}

  void* host_memory(size_t bytes) override { return block(bytes); }
  Address device_memory(size_t bytes) override { return reinterpret_cast<Address>(block(bytes)); }
  Stream own_stream() override { return reinterpret_cast<Stream>(++last_stream_); }
  Event event(bool) override {
    const Guard guard(mutex_);
    recorded_.push_back(0);
    completed_.push_back(0);
    when_.push_back(0);
    return static_cast<Event>(recorded_.size()) - 1;
  }
  Event stage_event(std::string_view name) override {
    const auto it = stages_.find(name);
    if (it != stages_.end()) return it->second;
    return stages_[std::string(name)] = event(false);
  }
  void upload(Address to, const void* from, size_t bytes) override {
    if (bytes) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  }

  void copy_in(Address to, const void* from, size_t bytes, Stream stream) override {
    work(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  }
  void copy(Address to, Address from, size_t bytes, Stream stream) override {
    copy_in(to, reinterpret_cast<const void*>(from), bytes, stream);
  }
  void launch(unsigned blocks, const recom_cuda::PrepParams& params, Stream stream) override {
    work(stream, [=] {
      for (unsigned b = 0; b < blocks; ++b) {
        kernel_(&params, static_cast<int>(b), static_cast<int>(blocks));
      }
    });
  }
  void record(Event event, Stream stream) override {
    const Guard guard(mutex_);
    const int64_t number = ++recorded_[event];
    streams_[stream].push_back({-1, 0, [this, event, number] {
                                  completed_[event] = number;
                                  when_[event] = ++clock_;
                                }});
  }
  void wait(Stream stream, Event event) override {
    const Guard guard(mutex_);
    streams_[stream].push_back({event, recorded_[event], [] {}});
  }

  bool done(Event event) override {
    const Guard guard(mutex_);
    return completed_[event] >= recorded_[event];
  }
  void host_wait(Event event) override {
    const Guard guard(mutex_);
    while (completed_[event] < recorded_[event]) step();
  }
  double elapsed_ms(Event from, Event to) override {
    const Guard guard(mutex_);
    return static_cast<double>(when_[to] - when_[from]);
  }
  void finish(Stream stream) override {
    const Guard guard(mutex_);
    while (!streams_[stream].empty()) step();
  }
  int processors() const override { return 4; }
  bool simulated() const override { return true; }

 private:
  using Guard = std::lock_guard<std::mutex>;
  struct Item {
    Event event;  // to wait for, or -1
    int64_t number;
    std::function<void()> run;
  };

  void* block(size_t bytes) {
    const Guard guard(mutex_);
    // Nothing is zero by chance.
    memory_.push_back(std::make_unique<std::vector<uint64_t>>(bytes / 8 + 34, 0xa5a5a5a5a5a5a5a5u));
    const auto at = reinterpret_cast<uintptr_t>(memory_.back()->data());
    return reinterpret_cast<void*>((at + 255) / 256 * 256);  // as a device's memory
  }
  void work(Stream stream, std::function<void()> run) {
    const Guard guard(mutex_);
    streams_[stream].push_back({-1, 0, std::move(run)});
  }
  void step() {
    std::vector<std::deque<Item>*> able;
    for (auto& [stream, items] : streams_) {
      if (items.empty()) continue;
      const Item& head = items.front();
      if (head.event < 0 || completed_[head.event] >= head.number) able.push_back(&items);
    }
    if (able.empty()) throw std::runtime_error("recom corun: streams wait for each other");
    std::deque<Item>& items = *able[random_() % able.size()];
    const Item item = std::move(items.front());
    items.pop_front();
    item.run();
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
  SimKernel kernel_;
  uintptr_t last_stream_ = 1;
  int64_t clock_ = 0;
  std::map<Stream, std::deque<Item>> streams_;
  std::map<std::string, Event, std::less<>> stages_;
  std::vector<int64_t> recorded_, completed_, when_;
  std::vector<std::unique_ptr<std::vector<uint64_t>>> memory_;
};

}  // namespace

std::unique_ptr<Backend> make_sim_backend(uint64_t seed, SimKernel kernel) {
  return std::make_unique<SimBackend>(seed, kernel);
}

}  // namespace recom::corun
