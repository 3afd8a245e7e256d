// How operators are run: the CPU's kernels, queued.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace softdevice {

// A tensor of the CPU at the same address as one of the device. It holds the address only, never
// the storage: a job that outlives its memory must be able to read what is there by then.
at::Tensor at_same_address(const at::Tensor& tensor);

// A new tensor of the device.
at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

// Queues the CPU's kernel of an operator, whose arguments are on the stack, and leaves its results
// there.
void queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The operators that ran at once so far, because their results' shapes depend on data or because
// torch cannot tell them without running them.
std::vector<std::string> operators_run_at_once();

// A generator of the CPU, from a seed that is drawn from one of the device now, while the operator
// is queued: numbers do not depend on when jobs run.
at::Generator draw_generator(const std::optional<at::Generator>& of_device);

// ---- implemented in registration.cpp ------------------------------------------------------------

uint64_t draw_seed(const std::optional<at::Generator>& generator);

}  // namespace softdevice
