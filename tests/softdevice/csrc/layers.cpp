// Operators of neural networks that torch has for accelerators only, or under other names there.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "operators.h"

namespace softdevice {
namespace {

using at::Tensor;
using torch::jit::Stack;

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// ---- convolutions: the CPU's, by torch's general operators --------------------------------------

void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = find("aten::convolution");
  queue_operator(op, stack);
}

void convolution_backward(const c10::OperatorHandle& overrideable, Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  constexpr int kAfterWeight = 3;
  auto first = stack->end() - static_cast<int64_t>(overrideable.schema().arguments().size());
  // The general operator also takes the bias's sizes: one number for each channel of the output,
  // which a transposed convolution has in the weight's other dimension.
  std::vector<int64_t> bias_sizes = {first->toTensor().size(1)};
  stack->insert(first + kAfterWeight, bias_sizes);
  queue_operator(op, stack);
}

// ---- attention: always by products of matrices and a softmax ------------------------------------

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// ---- dropout ------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double probability, std::optional<bool> train) {
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) {
    return {input.clone(), mask.fill_(true)};
  }
  if (probability == 1) {
    return {at::zeros_like(input), mask.fill_(false)};
  }
  mask.bernoulli_(1 - probability);
  return {input.mul(mask).mul_(1 / (1 - probability)), mask};
}

// ---- recurrent cells ----------------------------------------------------------------------------

Tensor add_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

Tensor one_minus(const Tensor& y) {
  return y.neg().add_(1);
}

// Derivatives of sigmoid and tanh, from their results.
Tensor slope_of_sigmoid(const Tensor& y) {
  return y.mul(one_minus(y));
}

Tensor slope_of_tanh(const Tensor& y) {
  return one_minus(y.mul(y));
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor gates = add_bias(input_gates, input_bias).add(add_bias(hidden_gates, hidden_bias));
  auto parts = gates.chunk(4, 1);
  Tensor in = at::sigmoid(parts[0]), forget = at::sigmoid(parts[1]);
  Tensor cell = at::tanh(parts[2]), out = at::sigmoid(parts[3]);
  Tensor cy = forget.mul(cx).add_(in.mul(cell));
  Tensor hy = out.mul(at::tanh(cy));
  return {hy, cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx,
    const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  Tensor ghy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor gcy = grad_cy && grad_cy->defined() ? *grad_cy : at::zeros_like(cy);
  Tensor squashed = at::tanh(cy);
  Tensor through = ghy.mul(out).mul_(slope_of_tanh(squashed)).add_(gcy);
  Tensor grad_gates = at::cat(
      {through.mul(cell).mul_(slope_of_sigmoid(in)), through.mul(cx).mul_(slope_of_sigmoid(forget)),
       through.mul(in).mul_(slope_of_tanh(cell)), ghy.mul(squashed).mul_(slope_of_sigmoid(out))},
      1);
  return {grad_gates, through.mul(forget), has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto from_input = add_bias(input_gates, input_bias).chunk(3, 1);
  auto from_hidden = add_bias(hidden_gates, hidden_bias).chunk(3, 1);
  Tensor reset = at::sigmoid(from_input[0].add(from_hidden[0]));
  Tensor update = at::sigmoid(from_input[1].add(from_hidden[1]));
  Tensor next = at::tanh(from_input[2].add(reset.mul(from_hidden[2])));
  Tensor hy = next.add(update.mul(hx.sub(next)));
  return {hy, at::cat({reset, update, next, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &next = parts[2], &hx = parts[3];
  Tensor for_update = grad.mul(hx.sub(next)).mul_(slope_of_sigmoid(update));
  Tensor for_next = grad.mul(one_minus(update)).mul_(slope_of_tanh(next));
  Tensor for_reset = for_next.mul(parts[4]).mul_(slope_of_sigmoid(reset));
  Tensor for_input = at::cat({for_reset, for_update, for_next}, 1);
  Tensor for_hidden = at::cat({for_reset, for_update, for_next.mul(reset)}, 1);
  return {
      for_input, for_hidden, grad.mul(update), has_bias ? for_input.sum(0) : Tensor(),
      has_bias ? for_hidden.sum(0) : Tensor()};
}

}  // namespace
}  // namespace softdevice

// torch asks the stub in some places and the operator in others.
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &softdevice::choose_attention)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using torch::CppFunction;
  library.impl(
      "convolution_overrideable",
      CppFunction::makeFromBoxedFunction<&softdevice::convolution>());
  library.impl(
      "convolution_backward_overrideable",
      CppFunction::makeFromBoxedFunction<&softdevice::convolution_backward>());
  library.impl("_fused_sdp_choice", softdevice::choose_attention);
  library.impl("native_dropout", softdevice::native_dropout);
  library.impl("_thnn_fused_lstm_cell", softdevice::lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", softdevice::lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", softdevice::gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", softdevice::gru_cell_backward);
}
