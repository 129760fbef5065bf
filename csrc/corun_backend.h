// What the co-run runtime needs of a device: streams, events, copies, launches. Two forms: CUDA's
// driver, and a simulation that runs what was enqueued in any order that streams and events allow.

#ifndef RECOM_JAX_CSRC_CORUN_BACKEND_H_
#define RECOM_JAX_CSRC_CORUN_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "recom_prep.h"

namespace recom::corun {

using Address = uint64_t;
using Stream = void*;
using Event = int;  // an event that was never recorded is complete

class Backend {
 public:
  virtual ~Backend() = default;

  // Kept until the backend goes.
  virtual void* host_memory(size_t bytes) = 0;
  virtual Address device_memory(size_t bytes) = 0;
  virtual Stream own_stream() = 0;
  virtual Event event(bool timed) = 0;
  // The event that markers of this name record by themselves, whoever's step they are in.
  virtual Event stage_event(std::string_view name) = 0;
  // At set-up: returns when the bytes are there.
  virtual void upload(Address to, const void* from, size_t bytes) = 0;

  // These only enqueue. A host's memory must stay as it is until the copy has run.
  virtual void copy_in(Address to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void copy(Address to, Address from, size_t bytes, Stream stream) = 0;
  virtual void launch(unsigned blocks, const recom_cuda::PrepParams& params, Stream stream) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;

  // These look at what has run.
  virtual bool done(Event event) = 0;
  virtual void host_wait(Event event) = 0;
  virtual double elapsed_ms(Event from, Event to) = 0;
  // Returns when all that is on the stream has run.
  virtual void finish(Stream stream) = 0;
  virtual int processors() const = 0;
  // Whether steps run on the host, on no stream.
  virtual bool simulated() const { return false; }
};

// A stage ends here: records the event of its name on the current device. Where the stream is being
// captured, the record becomes part of the graph, and each of its launches records the event. So
// events stay as they are for as long as the process lives: XLA's graphs hold them.
void record_stage(std::string_view name, Stream stream);

// Throws CudaError. `image` is PTX (ending in a zero) or machine code with a kernel `recom_prep`.
std::unique_ptr<Backend> make_cuda_backend(int device, std::string_view image);

// `kernel(params, block, blocks)` runs one block.
using SimKernel = void (*)(const recom_cuda::PrepParams*, int, int);
std::unique_ptr<Backend> make_sim_backend(uint64_t seed, SimKernel kernel);
// The stream that stands for XLA's in a simulation.
inline Stream sim_xla_stream() { return reinterpret_cast<Stream>(uintptr_t{1}); }

}  // namespace recom::corun

#endif  // RECOM_JAX_CSRC_CORUN_BACKEND_H_
