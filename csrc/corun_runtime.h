// Co-running on a device: a ring of batches that we own, preprocessing kernels on a stream of our
// own, started where the train step's stages begin. Nothing here waits for the device except
// `acquire`, which the reader's thread calls, and the end.
//
// The reader's thread: acquire, pack, commit (or abandon). The thread that trains: begin (a step
// will be dispatched) and dispatched (it was).
//
// Stages end at markers. A marker records an event by itself, wherever the step runs it: mostly as
// a node of a CUDA graph, of which the host hears nothing. Launching the step, graph or not, counts
// as recording; so what is enqueued behind `dispatched` may wait for this step's markers. Should
// XLA launch later, or leave a marker out, the event is an older one or none, and kernels start
// early: nothing is ever waited for that is not enqueued. Where stages are timed, each marker tells
// the host instead (XLA's thread: mark), which starts what comes next.
//
// A slot holds a raw batch, a place a prepared one, which the step reads where it is. Batches get
// places in turns; there are more places than slots, for batches that are trained on.
//
// What protects them, all by device events:
//
// - copied (slot): the raw batch has arrived. Kernels wait for it, and the reader before it packs
//   again.
// - ready (slot): the kernels have run. `begin` makes XLA's stream wait for it; the next raw
//   batch's copy waits, too.
// - consumed (place): the step that read the place has ended; recorded as the next one begins. The
//   kernels that write there next wait for it. Should XLA dispatch a step later than it is asked
//   to, the event comes too early: so whoever trains also makes sure that `begin` is not called
//   before the step `ahead` steps ago has ended.

#ifndef RECOM_JAX_CSRC_CORUN_RUNTIME_H_
#define RECOM_JAX_CSRC_CORUN_RUNTIME_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "corun_backend.h"

namespace recom::corun {

enum Mode : int {
  kPlan = 0,        // kernels start at their stages
  kEager = 1,       // as soon as the raw batch is there, on our stream
  kSequential = 2,  // in `take`, on XLA's stream
  // The same for the first batch in each place; what comes later is taken to be that batch again.
  // So that steps can be timed with nothing beside them.
  kOnce = 3,
};

struct KernelPlan {
  int first_tile, n_tiles;
  int blocks;
  int stage;  // index; kernels of one batch are in order of stages
};

struct RuntimePlan {
  int slots = 2;
  int ahead =
      1;  // steps that may be dispatched and unfinished, and so places besides those of slots
  int64_t in_bytes = 0;
  struct Result {
    int64_t offset, bytes;
  };
  std::vector<Result> results;
  std::string tiles, words, consts;
  std::vector<KernelPlan> kernels;
  std::vector<std::string> stages;  // names of the markers that end them, in order
  bool in_graphs = true;            // markers record events; false: they call `mark`
  Mode mode = kPlan;
  bool profile = false;
};

struct RuntimeStats {
  int64_t packed = 0, taken = 0, launched = 0;
  int64_t late = 0;     // kernels that missed their stage and ran in front of their step
  int64_t marks = 0;    // markers of the plan's stages that the host saw: once for each graph
  int64_t unknown = 0;  // those of other stages
  int64_t host_bytes = 0, device_bytes = 0;
};

class Runtime {
 public:
  // A part of a raw batch: `bytes` at `from`, to be at `offset` of the slot.
  struct Part {
    uintptr_t from;
    int64_t bytes, offset;
  };

  Runtime(std::unique_ptr<Backend> backend, RuntimePlan plan);
  ~Runtime();

  // Waits for a free slot, then until its page-locked memory may be written. Throws once closed.
  int acquire();
  void pack(int slot, const std::vector<Part>& parts, int threads);
  void commit(int slot);
  // Gives up a slot that was acquired, or committed and not taken. No step may run meanwhile.
  void abandon(int slot);

  // The stream on which XLA runs the device's programs. Throws std::runtime_error if it was another
  // one before: steps would not wait for their batches.
  void learn(Stream xla);
  // A step will be dispatched, from this thread, with the oldest committed batch: XLA's stream
  // waits for it, and what follows may read its place until the next `begin`. Throws
  // std::runtime_error unless that batch is in `slot` and the stream is known. Returns the stream.
  Stream begin(int slot);
  // The same within a program of XLA's, for those who keep the batch: puts it into `results`
  // (device addresses).
  void take(int slot, const std::vector<std::pair<Address, int64_t>>& results, Stream xla);
  // The step was handed to XLA: kernels of its later stages may be enqueued.
  void dispatched();
  void mark(std::string_view name, Stream xla);
  // What a marker does in a simulation (on CUDA: `corun::record_stage`).
  void record_stage(std::string_view name, Stream xla);
  // A marker recorded its event, or became part of a graph.
  void saw(std::string_view name);

  // The place of the batch that was committed in `slot`, and the address of one of its results.
  int place_of(int slot);
  Address result_at(int place, size_t result) const;

  void close();
  RuntimeStats stats();
  // For each batch that was looked at, in milliseconds: each kernel; from the step's beginning to
  // each stage's end; from each kernel's beginning to the step's; from there to the step's end, and
  // to the next step's beginning. -1: not seen.
  std::vector<std::vector<double>> times();
  Backend& backend() { return *backend_; }

 private:
  enum class State { kFree, kPacking, kStaged };
  struct Slot {
    State state = State::kFree;
    void* host = nullptr;
    Address in = 0;
    Event copied, ready;
    size_t place = 0;
    size_t launched = 0;
    size_t sample = 0;
  };
  struct Place {
    Address out = 0;
    Event consumed;
    bool written = false;
  };
  // What is timed of a batch. Looked at when its turn comes again, long after it has run.
  struct Sample {
    std::vector<Event> begun, ended;  // of each kernel
    std::vector<Event> marks;         // of each stage's end
    Event arrived, taken;             // the step's beginning, before and behind its batch
    size_t kernels = 0;               // how many were recorded
    std::vector<char> marked;
    bool used = false;
    bool skipped = false;  // no kernel ran
  };

  void begin_locked(int slot, Stream xla);
  void launch(Slot* slot, int last_stage, bool in_time, Stream stream);
  void advance();
  void collect(size_t sample);

  std::unique_ptr<Backend> backend_;
  const RuntimePlan plan_;
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<Slot> slots_;
  std::vector<Place> places_;
  size_t next_place_ = 0;
  Stream xla_ = nullptr;
  int used_ = -1;  // the place that the step that runs reads
  std::deque<int> staged_;
  Stream copies_, work_;
  Event marker_;
  std::vector<Event> ends_;  // of stages
  Address tiles_ = 0, words_ = 0, consts_ = 0;
  int stage_ = -1;  // of the step that runs; -1: none has begun
  std::vector<Sample> samples_;
  size_t next_sample_ = 0, running_ = 0;
  bool closed_ = false;
  RuntimeStats stats_;
  std::vector<std::vector<double>> times_;
};

// Tokens: device addresses that stand for a slot, as cuda_stage.h has them.
void register_token(uintptr_t token, const std::shared_ptr<Runtime>& runtime, int slot);
void forget_tokens(const Runtime* runtime);
std::pair<std::shared_ptr<Runtime>, int> find_token(const void* token);
// The runtime whose batch the step on this XLA stream took last; null if there is none.
std::shared_ptr<Runtime> current_runtime(Stream xla);
void set_current_runtime(Stream xla, const std::shared_ptr<Runtime>& runtime);

}  // namespace recom::corun

#endif  // RECOM_JAX_CSRC_CORUN_RUNTIME_H_
