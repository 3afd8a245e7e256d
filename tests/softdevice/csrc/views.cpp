// Operators that look at memory in another way, allocate it, or exchange it. None of them is queued.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"

namespace softdevice {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void refuse_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only memory of the host can be page-locked");
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin_memory);
  return Tensor(at::detail::empty_generic(
      size, device_allocator(), kKeys, at::dtype_or_default(dtype), format));
}

Tensor empty_with_strides(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pin_memory) {
  refuse_pinned(pin_memory);
  return empty_strided(size, stride, at::dtype_or_default(dtype));
}

void resize_storage_for(const Tensor& self) {
  size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
}

const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    if (format && *format != at::MemoryFormat::Preserve) {
      impl->empty_tensor_restride(*format);
    }
    resize_storage_for(self);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  resize_storage_for(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, length, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  at::Storage none(
      at::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

// Whether `self.data = from` is possible: between any two dense tensors, as for CUDA, so that a
// parameter may move to the host.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void record_stream(Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

}  // namespace
}  // namespace softdevice

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", softdevice::empty);
  library.impl("empty_strided", softdevice::empty_with_strides);
  library.impl("resize_", softdevice::resize_);
  library.impl("set_.source_Storage", softdevice::set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", softdevice::set_storage);
  library.impl("set_.source_Tensor", softdevice::set_tensor);
  library.impl("set_", softdevice::set_empty);
  library.impl("record_stream", softdevice::record_stream);
  library.impl("_has_compatible_shallow_copy_type", softdevice::has_compatible_type);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
}
