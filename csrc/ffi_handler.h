// The custom calls as XLA FFI handlers. Only their own files include ffi.h (it is slow to compile).

#ifndef RECOM_JAX_CSRC_FFI_HANDLER_H_
#define RECOM_JAX_CSRC_FFI_HANDLER_H_

namespace recom {

// XLA_FFI_Handler*, as Python passes them on to XLA.
void* fused_v1_handler();
void* empty_v1_handler();
void* row_sums_v1_handler();
// The same fused target on CUDA, by stage; the empty one serves both platforms.
void* cuda_initialize_handler();
void* cuda_execute_handler();
void* cuda_alone_handler();
// Staging (cuda_stage.h), and what stands for it without a GPU.
void* stage_on_host_handler();
void* stage_on_cuda_handler();
// Results to the host (deliver.h).
void* deliver_on_host_handler();
void* deliver_on_cuda_handler();
// Co-running (corun_runtime.h), and its simulation without a GPU.
void* corun_stream_handler(bool cuda);
void* corun_take_handler(bool cuda);
void* corun_event_handler(bool cuda);
void* corun_mark_handler(bool cuda);
void* corun_pass_handler(bool cuda);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FFI_HANDLER_H_
