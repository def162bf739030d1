// What DeepSpeed's ops need of torch's own <torch/extension.h>, which reads all of torch besides: in half the time.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}  // namespace torch
