// A prepared batch's results as DLPack tensors: JAX reads them where they are, without a copy.

#ifndef RECOM_JAX_CSRC_CORUN_VIEW_H_
#define RECOM_JAX_CSRC_CORUN_VIEW_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "corun_runtime.h"

namespace recom::corun {

// DLPack's first, stable layout (the capsule "dltensor").
struct DlDevice {
  int32_t type, id;
};
struct DlType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;  // null: row-major
  uint64_t byte_offset;
};
struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

struct View {
  DlManaged managed;
  std::vector<int64_t> shape;
  std::shared_ptr<Runtime> owner;  // the memory is there as long as a view of it is
};

inline DlManaged* make_view(const std::shared_ptr<Runtime>& runtime, int place, size_t result,
                            std::vector<int64_t> shape, DlType dtype, DlDevice device) {
  auto* v = new View{{}, std::move(shape), runtime};
  v->managed.tensor = {reinterpret_cast<void*>(runtime->result_at(place, result)),
                       device,
                       static_cast<int32_t>(v->shape.size()),
                       dtype,
                       v->shape.data(),
                       nullptr,
                       0};
  v->managed.context = v;
  v->managed.deleter = [](DlManaged* m) { delete static_cast<View*>(m->context); };
  return &v->managed;
}

}  // namespace recom::corun

#endif  // RECOM_JAX_CSRC_CORUN_VIEW_H_
