// The extension module: importing it registers the operators under torch.ops.longspark.
#include "schemas.h"

#include <Python.h>

TORCH_LIBRARY(longspark, m) { longspark::define_operators(m); }

// Python loads the library by importing it; there is nothing to see inside.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
