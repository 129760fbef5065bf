#pragma once

#include <pybind11/pybind11.h>

namespace recom {

void bind_corun(pybind11::module_& m);

}  // namespace recom
