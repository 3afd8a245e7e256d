// Copies within the device, between the device and the host, and of single numbers.
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace softdevice {
namespace {

using at::Tensor;

bool has_same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void queue_copy_between(const Tensor& target, const Tensor& source) {
  StreamId stream = current_stream();
  auto run = [into = at_same_address(target), from = at_same_address(source)] { into.copy_(from); };
  if (target.is_privateuseone() && source.is_privateuseone()) {
    queue_kernel(stream, "copy_", run);
    return;
  }
  queue_copy(stream, "copy_", run);
  const Tensor& on_host = target.is_cpu() ? target : source;
  note_host_use(on_host.storage().data(), stream);
}

// As CUDA: the host goes on only if asked to, and only from or to page-locked memory. What comes
// from the host in another layout or type goes through a buffer that is not page-locked.
bool host_goes_on(const Tensor& target, const Tensor& source, bool non_blocking) {
  if (!non_blocking) {
    return false;
  }
  if (source.is_cpu()) {
    return has_same_layout(target, source) && is_page_locked(source.const_data_ptr());
  }
  return is_page_locked(target.const_data_ptr());
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  queue_copy_between(target, source);
  bool within = target.is_privateuseone() && source.is_privateuseone();
  if (!within && !host_goes_on(target, source, non_blocking)) {
    finish_stream(current_stream());
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor number = at::empty({}, self.options().device(c10::kCPU));
  copy_from(self, number.view(self.sizes()), false);
  return at::_local_scalar_dense(number);
}

}  // namespace
}  // namespace softdevice

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", softdevice::copy_from);
  library.impl("_copy_from_and_resize", softdevice::copy_from_and_resize);
  library.impl("_local_scalar_dense", softdevice::local_scalar_dense);
}

// Without these, torch would resolve a lazy conjugate by a copy before it copies, and so on for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
