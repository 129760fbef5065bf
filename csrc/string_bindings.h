#pragma once

#include <pybind11/pybind11.h>

// Adds StringSource to `module`.
void bind_strings(pybind11::module_& module);
