// What DeepSpeed's ops need of torch's own <torch/extension.h>, which reads all of torch.nn besides: half the time.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
