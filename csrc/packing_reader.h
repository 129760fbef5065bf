// Part of packing.h: reading a batch that is one dict, without Python's help.
#pragma once

#include <memory>
#include <vector>

#include "packing_layout.h"

namespace recom::packing {

struct Lease;

// The values of dicts that have the same keys, in an order fixed once.
class DictReader {
 public:
  explicit DictReader(py::tuple keys);

  // None: `dict` has other keys. The Slot: its values are a lease's own views, each in its place
  // and as it was given out, so that nothing has to be copied. Otherwise a tuple of the values.
  py::object Read(const py::dict& dict);

 private:
  // The keys as a dict held them, and which of ours each one is: dicts made by the same code hold
  // the same objects in the same order, which is quicker to see than to look a thousand keys up.
  struct Order {
    std::vector<py::object> keys;
    std::vector<size_t> places;
  };

  static std::shared_ptr<Lease> LeaseIn(const Order& order, const py::dict& dict);
  static bool Walk(const Order& order, const py::dict& dict, const py::tuple& values);
  void Remember(const py::dict& dict);

  const py::tuple keys_;
  std::vector<std::shared_ptr<const Order>> orders_;  // the latest last
};

void BindReader(py::module_& module);

}  // namespace recom::packing
