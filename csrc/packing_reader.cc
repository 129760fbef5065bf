#include "packing_reader.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "packing_copy.h"
#include "packing_ring.h"

namespace recom::packing {

namespace {

constexpr size_t kOrders = 4;

// Whether every view of the lease still is what was given out: someone may have changed a shape or
// dtype in place.
bool Intact(const Lease& lease) {
  const Layout& layout = *lease.ring->layout;
  if (Checker(/*narrow=*/false).Check(layout, lease.views.data(), nullptr) >= 0) return false;
  bool intact = true;
  for (size_t i = 0; i < lease.views.size(); ++i) {
    const auto* array = py::detail::array_proxy(lease.views[i]);
    intact &= (array->flags & npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0 &&
              array->data == lease.data() + layout.entries[i].offset;
  }
  return intact;
}

}  // namespace

DictReader::DictReader(py::tuple keys) : keys_(std::move(keys)) {
  Order order;
  for (size_t i = 0; i < keys_.size(); ++i) {
    order.keys.push_back(keys_[i]);
    order.places.push_back(i);
  }
  orders_.push_back(std::make_shared<const Order>(std::move(order)));  // that of leased views
}

bool DictReader::Walk(const Order& order, const py::dict& dict, const py::tuple& values) {
  PyObject *key, *value;
  py::ssize_t at = 0;
  const size_t n = order.keys.size();
  // Nothing runs between the two loops that could change the dict.
  std::vector<PyObject*> found(n);
  for (size_t i = 0; i < n; ++i) {
    if (!PyDict_Next(dict.ptr(), &at, &key, &value) || key != order.keys[i].ptr()) return false;
    PrefetchObject(value);
    found[i] = value;
  }
  for (size_t i = 0; i < n; ++i)
    PyTuple_SET_ITEM(values.ptr(), order.places[i], Py_NewRef(found[i]));
  return true;
}

std::shared_ptr<Lease> DictReader::LeaseIn(const Order& order, const py::dict& dict) {
  PyObject *key, *value;
  py::ssize_t at = 0;
  std::shared_ptr<Lease> lease;
  for (size_t n = 0; n < order.keys.size(); ++n) {
    if (!PyDict_Next(dict.ptr(), &at, &key, &value) || key != order.keys[n].ptr()) return nullptr;
    if (n == 0) {
      lease = LeaseOf(value);
      if (!lease || lease->views.size() != order.keys.size() ||
          lease->ring->layout->entries.size() != order.keys.size())
        return nullptr;
    }
    if (value != lease->views[order.places[n]]) return nullptr;
    // Intact is next, and whoever filled a thousand views has used them last.
    PrefetchObject(value);
  }
  return lease && Intact(*lease) ? lease : nullptr;
}

void DictReader::Remember(const py::dict& dict) {
  // Of strings alone: looking other keys up may run code that changes the dict meanwhile.
  const auto is_string = [](py::handle key) { return PyUnicode_CheckExact(key.ptr()); };
  for (const auto& item : dict)
    if (!is_string(item.first)) return;
  py::dict places;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (!is_string(keys_[i])) return;
    places[keys_[i]] = i;
  }
  Order order;
  for (const auto& item : dict) {
    order.keys.push_back(py::reinterpret_borrow<py::object>(item.first));
    order.places.push_back(places[item.first].cast<size_t>());
  }
  if (orders_.size() == kOrders) orders_.erase(orders_.begin() + 1);
  orders_.push_back(std::make_shared<const Order>(std::move(order)));
}

py::object DictReader::Read(const py::dict& dict) {
  if (dict.size() != keys_.size()) return py::none();
  if (LiveViews() > 0) {
    for (const auto& order : orders_)
      if (auto lease = LeaseIn(*order, dict)) return py::cast(std::move(lease));
  }
  py::tuple values(keys_.size());  // first, as allocating may run Python code
  bool known = false;
  for (size_t i = orders_.size(); i-- > 0 && !known;) known = Walk(*orders_[i], dict, values);
  if (!known) {
    values = py::tuple(keys_.size());
    for (size_t i = 0; i < keys_.size(); ++i) {
      PyObject* value = PyDict_GetItemWithError(dict.ptr(), py::handle(keys_[i]).ptr());
      if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (value == nullptr) return py::none();
      values[i] = py::handle(value);
    }
    Remember(dict);
  }
  return values;
}

void BindReader(py::module_& module) {
  py::class_<DictReader>(module, "DictReader", "Reads dicts of the same keys.")
      .def(py::init<py::tuple>(), py::arg("keys"))
      .def("read", &DictReader::Read, py::arg("dict"),
           "The values in the keys' order; the Slot if they are all views of one lease, in place; "
           "None if the keys differ.");
}

}  // namespace recom::packing
