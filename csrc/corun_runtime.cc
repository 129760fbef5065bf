#include "corun_runtime.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "packing_pool.h"
#include "parallel.h"

namespace recom::corun {
namespace {

constexpr int64_t kPiece = 256 << 10;  // bytes that a thread packs at a time
constexpr size_t kKeep = 512;          // batches whose times are kept
constexpr int kAll = 1 << 30;          // "up to the last stage"

void need(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("recom corun: ") + what);
}

RuntimePlan checked(RuntimePlan p) {
  need(p.slots >= 1, "at least one slot");
  need(p.ahead >= 1, "at least one step");
  need(p.in_bytes >= 0, "a negative size");
  need(p.tiles.size() % sizeof(recom_cuda::PrepTile) == 0 && p.words.size() % 8 == 0,
       "not whole tiles or words");
  const auto n = static_cast<int64_t>(p.tiles.size() / sizeof(recom_cuda::PrepTile));
  int stage = 0;
  for (const KernelPlan& k : p.kernels) {
    need(k.first_tile >= 0 && k.n_tiles > 0 && int64_t{k.first_tile} + k.n_tiles <= n,
         "a kernel's tiles are not there");
    need(k.blocks > 0, "a kernel without blocks");
    need(k.stage >= stage, "kernels are in order of their stages");
    stage = k.stage;
  }
  for (const auto& r : p.results) need(r.offset >= 0 && r.bytes >= 0, "a result's place");
  return p;
}

}  // namespace

Runtime::Runtime(std::unique_ptr<Backend> backend, RuntimePlan plan)
    : backend_(std::move(backend)), plan_(checked(std::move(plan))) {
  Backend& b = *backend_;
  copies_ = b.own_stream();
  work_ = b.own_stream();
  marker_ = b.event(false);
  if (plan_.in_graphs) {
    for (const std::string& name : plan_.stages) ends_.push_back(b.stage_event(name));
  }
  const auto put = [&](const std::string& bytes) {
    const Address at = b.device_memory(bytes.size());
    b.upload(at, bytes.data(), bytes.size());
    stats_.device_bytes += static_cast<int64_t>(bytes.size());
    return at;
  };
  tiles_ = put(plan_.tiles);
  words_ = put(plan_.words);
  consts_ = put(plan_.consts);
  int64_t out = 0;
  for (const auto& r : plan_.results) out = std::max(out, r.offset + r.bytes);
  for (int k = 0; k < plan_.slots; ++k) {
    Slot s;
    s.host = b.host_memory(static_cast<size_t>(plan_.in_bytes));
    s.in = b.device_memory(static_cast<size_t>(plan_.in_bytes));
    s.copied = b.event(false);
    s.ready = b.event(false);
    slots_.push_back(std::move(s));
    stats_.host_bytes += plan_.in_bytes;
    stats_.device_bytes += plan_.in_bytes;
  }
  for (int k = 0; k < plan_.slots + plan_.ahead; ++k) {
    places_.push_back({b.device_memory(static_cast<size_t>(out)), b.event(false)});
    stats_.device_bytes += out;
  }
  for (int k = 0; plan_.profile && k < 2 * plan_.slots + 8; ++k) {
    Sample s;
    for (size_t i = 0; i < plan_.kernels.size(); ++i) {
      s.begun.push_back(b.event(true));
      s.ended.push_back(b.event(true));
    }
    for (size_t i = 0; i < plan_.stages.size(); ++i) s.marks.push_back(b.event(true));
    s.marked.resize(plan_.stages.size());
    s.arrived = b.event(true);
    s.taken = b.event(true);
    samples_.push_back(std::move(s));
  }
}

Runtime::~Runtime() {
  try {
    close();
  } catch (...) {  // the device is lost, and so is what would be waited for
  }
}

int Runtime::acquire() {
  std::unique_lock<std::mutex> lock(mutex_);
  int found = -1;
  freed_.wait(lock, [&] {
    if (closed_) return true;
    for (size_t k = 0; k < slots_.size() && found < 0; ++k) {
      // In turns, so that the slot used longest ago comes first.
      const size_t at = (static_cast<size_t>(stats_.packed) + k) % slots_.size();
      if (slots_[at].state == State::kFree) found = static_cast<int>(at);
    }
    return found >= 0;
  });
  if (closed_) throw std::runtime_error("recom corun: the pipeline was closed");
  Slot& s = slots_[found];
  s.state = State::kPacking;
  ++stats_.packed;
  lock.unlock();
  backend_->host_wait(s.copied);
  return found;
}

// Keeps the times of the batch that this sample was last used for, and begins anew.
void Runtime::collect(size_t at) {
  Sample& s = samples_[at];
  const Sample& next = samples_[(at + 1) % samples_.size()];
  if (s.used && s.kernels == s.begun.size() && next.used && backend_->done(next.taken)) {
    std::vector<double> ms;
    for (size_t i = 0; i < s.begun.size(); ++i) {
      ms.push_back(s.skipped ? 0 : backend_->elapsed_ms(s.begun[i], s.ended[i]));
    }
    for (size_t i = 0; i < s.marks.size(); ++i) {
      ms.push_back(s.marked[i] ? backend_->elapsed_ms(s.taken, s.marks[i]) : -1);
    }
    for (size_t i = 0; i < s.begun.size(); ++i) {
      ms.push_back(s.skipped ? 0 : backend_->elapsed_ms(s.begun[i], s.taken));
    }
    ms.push_back(backend_->elapsed_ms(s.taken, next.arrived));
    ms.push_back(backend_->elapsed_ms(s.taken, next.taken));
    times_.push_back(std::move(ms));
    if (times_.size() > kKeep) times_.erase(times_.begin());
  }
  s.kernels = 0;
  std::fill(s.marked.begin(), s.marked.end(), 0);
  s.used = s.skipped = false;
}

void Runtime::pack(int slot, const std::vector<Part>& parts, int threads) {
  std::vector<Part> pieces;
  for (const Part& p : parts) {
    need(p.bytes >= 0 && p.offset >= 0 && p.offset <= plan_.in_bytes - p.bytes,
         "a part outside its slot");
    for (int64_t at = 0; at < p.bytes; at += kPiece) {
      pieces.push_back(
          {p.from + static_cast<uintptr_t>(at), std::min(kPiece, p.bytes - at), p.offset + at});
    }
  }
  char* const host = static_cast<char*>(slots_.at(slot).host);
  parallel_for(packing::Helpers(threads), static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Part& p = pieces[i];
    std::memcpy(host + p.offset, reinterpret_cast<const void*>(p.from),
                static_cast<size_t>(p.bytes));
  });
}

void Runtime::commit(int slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& s = slots_.at(slot);
  need(s.state == State::kPacking, "a slot that was not acquired");
  backend_->wait(copies_, s.ready);  // kernels may still read the batch before
  if (plan_.in_bytes) {
    backend_->copy_in(s.in, s.host, static_cast<size_t>(plan_.in_bytes), copies_);
  }
  backend_->record(s.copied, copies_);
  s.state = State::kStaged;
  s.launched = 0;
  s.place = next_place_++ % places_.size();
  if (plan_.profile) {
    s.sample = next_sample_++ % samples_.size();
    collect(s.sample);
  }
  staged_.push_back(slot);
  if (plan_.mode == kEager) {
    launch(&s, kAll, true, work_);
  } else {
    advance();
  }
}

void Runtime::abandon(int slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& s = slots_.at(slot);
    if (s.state == State::kFree) return;
    const auto it = std::find(staged_.begin(), staged_.end(), slot);
    if (it != staged_.end()) staged_.erase(it);
    // Some of its kernels may run: what is put into the slot next waits for them.
    if (s.state == State::kStaged && s.launched > 0) backend_->record(s.ready, work_);
    s.state = State::kFree;
  }
  freed_.notify_all();
}

// Kernels of stages up to `last_stage` that were not launched yet.
void Runtime::launch(Slot* s, int last_stage, bool in_time, Stream stream) {
  const size_t n = plan_.kernels.size();
  const size_t before = s->launched;
  const bool all_done = before == n && n > 0;
  if (all_done) return;
  if (n > 0 && plan_.kernels[before].stage > last_stage) return;
  Place& place = places_[s->place];
  if (plan_.mode == kOnce && place.written) {
    s->launched = n;
    if (plan_.profile) {
      samples_[s->sample].kernels = n;
      samples_[s->sample].skipped = true;
    }
    return;
  }
  if (before == 0) {
    backend_->wait(stream, s->copied);
    backend_->wait(stream, place.consumed);
  }
  // Of the stages whose ends are waited for. What missed its stage waits for nothing.
  int waited = plan_.mode == kPlan && plan_.in_graphs && in_time ? 0 : kAll;
  while (s->launched < n && plan_.kernels[s->launched].stage <= last_stage) {
    const KernelPlan& k = plan_.kernels[s->launched];
    recom_cuda::PrepParams p{};
    p.tiles = reinterpret_cast<const recom_cuda::PrepTile*>(tiles_) + k.first_tile;
    p.words = reinterpret_cast<const long long*>(words_);
    p.in = reinterpret_cast<const unsigned char*>(s->in);
    p.consts = reinterpret_cast<const unsigned char*>(consts_);
    p.out = reinterpret_cast<unsigned char*>(place.out);
    p.n_tiles = k.n_tiles;
    if (k.stage > waited) {
      waited = k.stage;
      backend_->wait(stream, ends_[k.stage - 1]);
    }
    if (plan_.profile) backend_->record(samples_[s->sample].begun[s->launched], stream);
    backend_->launch(static_cast<unsigned>(std::min(k.blocks, k.n_tiles)), p, stream);
    if (plan_.profile) {
      backend_->record(samples_[s->sample].ended[s->launched], stream);
      ++samples_[s->sample].kernels;
    }
    ++s->launched;
    ++stats_.launched;
    if (!in_time && k.stage <= static_cast<int>(plan_.stages.size())) ++stats_.late;
  }
  if (s->launched == n) {
    backend_->record(s->ready, stream);
    place.written = true;
  }
}

// Launches what the running step's stage allows for the next batch.
void Runtime::advance() {
  if (plan_.mode != kPlan || stage_ < 0 || staged_.empty()) return;
  Slot& s = slots_[staged_.front()];
  const size_t n = plan_.kernels.size();
  if (s.launched >= n || plan_.kernels[s.launched].stage > stage_) return;
  if (!plan_.in_graphs || plan_.kernels[s.launched].stage == 0) backend_->wait(work_, marker_);
  launch(&s, stage_, true, work_);
}

void Runtime::dispatched() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || stage_ < 0 || !plan_.in_graphs) return;
  stage_ = static_cast<int>(plan_.stages.size());
  advance();
}

void Runtime::record_stage(std::string_view name, Stream xla) {
  const std::lock_guard<std::mutex> lock(mutex_);
  backend_->record(backend_->stage_event(name), xla);
}

void Runtime::saw(std::string_view name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool ours = std::find(plan_.stages.begin(), plan_.stages.end(), name) != plan_.stages.end();
  ++(ours ? stats_.marks : stats_.unknown);
}

void Runtime::mark(std::string_view name, Stream xla) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || stage_ < 0) return;
  for (size_t k = static_cast<size_t>(stage_); k < plan_.stages.size(); ++k) {
    if (plan_.stages[k] != name) continue;
    ++stats_.marks;
    stage_ = static_cast<int>(k) + 1;
    backend_->record(marker_, xla);
    if (plan_.profile) {
      backend_->record(samples_[running_].marks[k], xla);
      samples_[running_].marked[k] = 1;
    }
    advance();
    return;
  }
  ++stats_.unknown;
}

void Runtime::learn(Stream xla) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (xla_ && xla_ != xla) {
    throw std::runtime_error(
        "recom corun: XLA runs programs on another stream than before, so that steps don't wait "
        "for "
        "their batches");
  }
  xla_ = xla;
}

Stream Runtime::begin(int slot) {
  Stream xla = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!xla_) throw std::runtime_error("recom corun: XLA's stream is not known yet");
    xla = xla_;
    begin_locked(slot, xla);
  }
  freed_.notify_all();
  return xla;
}

void Runtime::begin_locked(int slot, Stream xla) {
  if (closed_) throw std::runtime_error("recom corun: the pipeline was closed");
  if (staged_.empty() || staged_.front() != slot)
    throw std::runtime_error("recom corun: a step asks for a batch that is not the next one");
  Slot& s = slots_[slot];
  const bool sequential = plan_.mode == kSequential || plan_.mode == kOnce;
  if (used_ >= 0) backend_->record(places_[used_].consumed, xla);
  if (plan_.profile) backend_->record(samples_[s.sample].arrived, xla);
  launch(&s, kAll, sequential, sequential ? xla : work_);
  if (plan_.kernels.empty()) launch(&s, kAll, true, work_);
  backend_->wait(xla, s.ready);
  used_ = static_cast<int>(s.place);
  staged_.pop_front();
  s.state = State::kFree;
  ++stats_.taken;
  stage_ = 0;
  if (plan_.mode == kPlan && !plan_.kernels.empty() && plan_.kernels.front().stage == 0) {
    backend_->record(marker_, xla);  // else nothing starts before a marker does the same
  }
  if (plan_.profile) {
    running_ = s.sample;
    samples_[running_].used = true;
    backend_->record(samples_[running_].taken, xla);
  }
  advance();
}

void Runtime::take(int slot, const std::vector<std::pair<Address, int64_t>>& results, Stream xla) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    need(results.size() == plan_.results.size(), "the wrong number of results");
    for (size_t i = 0; i < results.size(); ++i)
      need(results[i].second == plan_.results[i].bytes, "a result of the wrong size");
    begin_locked(slot, xla);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].second == 0) continue;
      backend_->copy(results[i].first, result_at(used_, i), static_cast<size_t>(results[i].second),
                     xla);
    }
  }
  freed_.notify_all();
}

int Runtime::place_of(int slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Slot& s = slots_.at(slot);
  need(s.state == State::kStaged, "a slot without a batch");
  return static_cast<int>(s.place);
}

Address Runtime::result_at(int place, size_t result) const {
  return places_.at(place).out + static_cast<Address>(plan_.results.at(result).offset);
}

void Runtime::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  freed_.notify_all();
  for (Slot& s : slots_) {
    backend_->host_wait(s.copied);
  }
  for (const Place& p : places_) backend_->host_wait(p.consumed);
  backend_->finish(copies_);
  backend_->finish(work_);
}

RuntimeStats Runtime::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

std::vector<std::vector<double>> Runtime::times() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return times_;
}

}  // namespace recom::corun
