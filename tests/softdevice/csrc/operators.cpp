// Runs any operator of torch by one boxed fallback: the results are allocated at once, from what
// torch's meta kernels say about their shapes, and the CPU's kernel is queued.
#include "operators.h"

#include <mutex>
#include <set>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace softdevice {

at::Tensor at_same_address(const at::Tensor& tensor) {
  at::Tensor view = at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
                        .strides(tensor.strides())
                        .options(tensor.options().device(c10::kCPU).pinned_memory(false))
                        .make_tensor();
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::Tensor(
      at::detail::empty_strided_generic(sizes, strides, device_allocator(), keys, dtype));
}

at::Generator draw_generator(const std::optional<at::Generator>& of_device) {
  return at::make_generator<at::CPUGeneratorImpl>(draw_seed(of_device));
}

namespace {

using c10::IValue;
using torch::jit::Stack;

bool on_device(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
      value.toTensor().is_privateuseone();
}

// Applies a function to a value, or to each element of a list.
template <typename Function>
IValue map(const IValue& value, Function function) {
  if (!value.isList()) {
    return function(value);
  }
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) {
    list.set(i, function(list.get(i)));
  }
  return list;
}

template <typename Function>
void for_each(const IValue& value, Function function) {
  if (!value.isList()) {
    function(value);
    return;
  }
  for (const IValue& element : value.toListRef()) {
    function(element);
  }
}

// A number that Python gave promotes types in another way than a tensor does.
at::Tensor keep_promotion(at::Tensor made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

// ---- arguments for the CPU's kernel -------------------------------------------------------------

IValue for_cpu(const IValue& value, at::Generator& drawn) {
  if (on_device(value)) {
    return at_same_address(value.toTensor());
  }
  if (value.isTensor() && value.toTensor().defined()) {
    // The host may change it, or free it, before the job runs.
    return keep_promotion(value.toTensor().clone(), value.toTensor());
  }
  if (value.isDevice()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  if (value.isGenerator()) {
    drawn = draw_generator(value.toGenerator());
    return drawn;
  }
  return value;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

// Some kernels give their result another size in between: mse_loss first that of its input.
at::Tensor resizable_at_same_address(const at::Tensor& tensor) {
  return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(c10::kCPU).pinned_memory(false))
      .allocator(c10::GetCPUAllocator())
      .resizeable_storage()
      .make_tensor();
}

Stack stack_for_cpu(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  Stack stack;
  at::Generator drawn;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isNone() && takes_generator(schema.arguments()[i])) {
      stack.emplace_back(draw_generator(std::nullopt));
    } else if (schema.arguments()[i].is_out() && on_device(arguments[i])) {
      stack.emplace_back(resizable_at_same_address(arguments[i].toTensor()));
    } else {
      stack.push_back(map(arguments[i], [&](const IValue& v) { return for_cpu(v, drawn); }));
    }
  }
  return stack;
}

// ---- what torch's meta kernels say --------------------------------------------------------------

struct TensorMetadata {
  bool defined = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;
};

TensorMetadata metadata_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

struct OperatorMetadata {
  // For each of the operator's results that is new, one entry; several for a list.
  std::vector<std::vector<TensorMetadata>> results;
  // What "out" arguments look like afterwards, by number of the argument.
  std::vector<std::pair<size_t, TensorMetadata>> outs;
};

IValue for_meta(const IValue& value) {
  if (on_device(value)) {
    const at::Tensor& tensor = value.toTensor();
    at::Tensor meta = at::empty_strided(
        tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
    meta._set_conj(tensor.is_conj());
    meta._set_neg(tensor.is_neg());
    return keep_promotion(meta, tensor);
  }
  if (value.isDevice()) {
    return c10::Device(c10::DeviceType::Meta);
  }
  if (value.isGenerator()) {
    return IValue();
  }
  return value;
}

bool is_new(const c10::Argument& result) {
  return result.alias_info() == nullptr;
}

OperatorMetadata ask_meta_kernel(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto& schema = op.schema();
  Stack stack;
  for (const IValue& value : arguments) {
    stack.push_back(map(value, for_meta));
  }
  const Stack given = stack;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  OperatorMetadata found;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (is_new(schema.returns()[i])) {
      auto& result = found.results.emplace_back();
      for_each(stack[i], [&](const IValue& value) {
        result.push_back(value.isTensor() ? metadata_of(value.toTensor()) : TensorMetadata{});
      });
    }
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (schema.arguments()[i].is_out() && given[i].isTensor()) {
      found.outs.emplace_back(i, metadata_of(given[i].toTensor()));
    }
  }
  return found;
}

// ---- the cache of what they said ----------------------------------------------------------------

// All that the shapes of an operator's results can depend on, as bytes.
class Signature {
 public:
  Signature(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
    add(reinterpret_cast<uintptr_t>(&op.schema()));
    for (const IValue& value : arguments) {
      add(value);
    }
  }

  std::string bytes;

 private:
  template <typename T>
  void add(T number) {
    static_assert(std::is_arithmetic_v<T>);
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  void add(c10::IntArrayRef numbers) {
    add(numbers.size());
    for (int64_t number : numbers) {
      add(number);
    }
  }

  void add(const at::Tensor& tensor) {
    add(tensor.defined());
    if (tensor.defined()) {
      add(static_cast<int>(tensor.device().type()));
      add(static_cast<int>(tensor.scalar_type()));
      add(tensor.is_conj());
      add(tensor.is_neg());
      add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      add(tensor.sizes());
      add(tensor.strides());
    }
  }

  void add(const IValue& value) {
    if (value.isTensor()) {
      bytes += 't';
      add(value.toTensor());
    } else if (value.isInt()) {
      bytes += 'i';
      add(value.toInt());
    } else if (value.isDouble()) {
      bytes += 'd';
      add(value.toDouble());
    } else if (value.isBool()) {
      bytes += 'b';
      add(value.toBool());
    } else if (value.isString()) {
      bytes += 's';
      add(value.toStringRef().size());
      bytes += value.toStringRef();
    } else if (value.isList()) {
      bytes += 'l';
      add(value.toListRef().size());
      for (const IValue& element : value.toListRef()) {
        add(element);
      }
    } else {
      bytes += 'x';  // none, complex numbers, devices, generators: shapes depend on none of these
    }
  }
};

constexpr size_t kCacheSize = 20000;  // signatures

OperatorMetadata results_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  static std::mutex mutex;
  static auto* cache = new std::unordered_map<std::string, OperatorMetadata>;
  Signature signature(op, arguments);
  {
    std::lock_guard lock(mutex);
    auto found = cache->find(signature.bytes);
    if (found != cache->end()) {
      return found->second;
    }
  }
  // Without the lock: a meta kernel may be Python.
  OperatorMetadata asked = ask_meta_kernel(op, arguments);
  std::lock_guard lock(mutex);
  if (cache->size() >= kCacheSize) {
    cache->clear();
  }
  cache->emplace(std::move(signature.bytes), asked);
  return asked;
}

// ---- results ------------------------------------------------------------------------------------

at::Tensor allocate(const TensorMetadata& metadata) {
  return metadata.defined ? empty_strided(metadata.sizes, metadata.strides, metadata.dtype)
                          : at::Tensor();
}

// The argument that a result is, by the schema's alias sets.
size_t argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() &&
        alias->beforeSet() == result.alias_info()->beforeSet()) {
      return i;
    }
  }
  TORCH_CHECK(
      false, "The view operator ", schema.operator_name(),
      " must be written by hand for the software accelerator (views.cpp)");
}

// What the operator returns: new tensors, and arguments that it changed.
struct Results {
  Stack stack;
  std::vector<std::vector<at::Tensor>> fresh;  // those of `stack` that the job fills
};

Results make_results(
    const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments,
    const OperatorMetadata& metadata) {
  Results results;
  size_t next = 0;
  for (const auto& result : schema.returns()) {
    if (!is_new(result)) {
      results.stack.push_back(arguments[argument_of(schema, result)]);
      continue;
    }
    auto& tensors = results.fresh.emplace_back();
    for (const auto& one : metadata.results[next++]) {
      tensors.push_back(allocate(one));
    }
    if (result.type()->kind() == c10::TypeKind::ListType) {
      results.stack.emplace_back(tensors);
    } else {
      results.stack.emplace_back(tensors.at(0));
    }
  }
  return results;
}

void resize_outs(
    c10::ArrayRef<IValue> arguments,
    const std::vector<std::pair<size_t, TensorMetadata>>& outs) {
  for (const auto& [number, metadata] : outs) {
    const at::Tensor& out = arguments[number].toTensor();
    if (out.sizes() != c10::IntArrayRef(metadata.sizes)) {
      out.resize_(metadata.sizes);
    }
  }
}

void fill(const at::Tensor& target, const IValue& computed, const char* name) {
  at::Tensor source = computed.isTensor() ? computed.toTensor() : at::Tensor();
  if (!target.defined() && !source.defined()) {
    return;
  }
  if (target.defined() && source.defined() && source.numel() == 0) {
    return;  // nobody may read it: the saved statistics of a batch norm in evaluation, for example
  }
  TORCH_CHECK(
      target.defined() == source.defined() && target.sizes() == source.sizes() &&
          target.scalar_type() == source.scalar_type(),
      "The CPU's kernel of ", name, " has another result than its meta kernel: ",
      source.defined() ? c10::str(source.sizes(), " ", source.scalar_type()) : "none", ", not ",
      target.defined() ? c10::str(target.sizes(), " ", target.scalar_type()) : "none");
  target.copy_(source);
}

// ---- queueing -----------------------------------------------------------------------------------

// One call of an operator: all that its job needs.
struct Call {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<std::vector<at::Tensor>> targets;  // the new results, at their addresses

  const char* name() const {
    return op.schema().name().c_str();
  }

  void run() {
    std::vector<std::pair<at::Tensor, void*>> outs;
    for (size_t i = 0; i < op.schema().arguments().size(); ++i) {
      if (op.schema().arguments()[i].is_out() && stack[i].isTensor()) {
        outs.emplace_back(stack[i].toTensor(), stack[i].toTensor().mutable_data_ptr());
      }
    }
    op.callBoxed(stack);
    for (const auto& [out, address] : outs) {
      if (out.data_ptr() != address) {  // the kernel resized it
        at::from_blob(address, out.sizes(), out.strides(), out.options()).copy_(out);
      }
    }
    size_t next = 0;
    for (size_t i = 0; i < op.schema().returns().size(); ++i) {
      if (!is_new(op.schema().returns()[i])) {
        continue;
      }
      const auto& into = targets[next++];
      size_t element = 0;
      for_each(stack[i], [&](const IValue& value) { fill(into.at(element++), value, name()); });
    }
    stack.clear();
  }
};

void queue_with_results(
    const c10::OperatorHandle& op, Stack* stack, const OperatorMetadata& metadata) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  resize_outs(arguments, metadata.outs);
  Results results = make_results(schema, arguments, metadata);
  auto call = std::make_shared<Call>(Call{op, stack_for_cpu(schema, arguments), {}});
  for (const auto& tensors : results.fresh) {
    auto& targets = call->targets.emplace_back();
    for (const at::Tensor& tensor : tensors) {
      targets.push_back(tensor.defined() ? at_same_address(tensor) : at::Tensor());
    }
  }
  queue_kernel(current_stream(), call->name(), [call] { call->run(); });
  torch::jit::drop(*stack, schema.arguments().size());
  for (IValue& value : results.stack) {
    stack->push_back(std::move(value));
  }
}

// ---- running at once ----------------------------------------------------------------------------

std::mutex at_once_mutex;
std::set<std::string>& names_run_at_once() {
  static auto* names = new std::set<std::string>;
  return *names;
}

IValue to_device(const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    return value;
  }
  const at::Tensor& computed = value.toTensor();
  at::Tensor tensor = empty_strided(computed.sizes(), computed.strides(), computed.scalar_type());
  tensor.copy_(computed);
  return tensor;
}

void copy_back(const at::Tensor& argument, const at::Tensor& changed) {
  if (argument.sizes() != changed.sizes()) {
    argument.resize_(changed.sizes());
  }
  argument.copy_(changed);
}

// Waits for the stream and runs the kernel while the host waits. Arguments that the kernel changes
// are copies, which it may resize.
void run_at_once(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  {
    std::lock_guard lock(at_once_mutex);
    names_run_at_once().insert(c10::toString(schema.operator_name()));
  }
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  finish_stream(current_stream());
  Stack on_cpu = stack_for_cpu(schema, arguments);
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      on_cpu[i] = map(on_cpu[i], [](const IValue& v) -> IValue { return v.toTensor().clone(); });
    }
  }
  const Stack given = on_cpu;
  std::exception_ptr error;
  queue_kernel(current_stream(), schema.name().c_str(), [&] {
    try {
      op.callBoxed(on_cpu);
    } catch (...) {
      error = std::current_exception();
    }
  });
  finish_stream(current_stream());
  if (error) {
    std::rethrow_exception(error);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && on_device(arguments[i])) {
      copy_back(arguments[i].toTensor(), given[i].toTensor());
    }
  }
  Stack results;
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    const auto& result = schema.returns()[i];
    results.push_back(
        is_new(result) ? map(on_cpu[i], to_device) : arguments[argument_of(schema, result)]);
  }
  torch::jit::drop(*stack, schema.arguments().size());
  for (IValue& value : results) {
    stack->push_back(std::move(value));
  }
}

// ---- the choice ---------------------------------------------------------------------------------

bool depends_on_data(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  for (const auto& result : op.schema().returns()) {
    auto type = result.type();
    if (auto list = type->cast<c10::ListType>()) {
      type = list->getElementType();
    }
    if (type->kind() != c10::TypeKind::TensorType) {
      return true;  // a number or a truth value
    }
  }
  return false;
}

bool needs_metadata(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (is_new(result)) {
      return true;
    }
  }
  for (const auto& argument : schema.arguments()) {
    if (argument.is_out()) {
      return true;
    }
  }
  return false;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  queue_operator(op, stack);
}

}  // namespace

void queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  refuse_if_forked();
  if (depends_on_data(op)) {
    run_at_once(op, stack);
    return;
  }
  OperatorMetadata metadata;
  if (needs_metadata(op.schema())) {
    try {
      metadata = results_of(op, torch::jit::last(*stack, op.schema().arguments().size()));
    } catch (const c10::NotImplementedError&) {  // there is no meta kernel
      run_at_once(op, stack);
      return;
    } catch (const c10::Error&) {  // the call is wrong
      throw;
    } catch (const std::exception&) {  // a meta kernel in Python needs to see data, or the call is
      run_at_once(op, stack);          // wrong, which the CPU's kernel will say
      return;
    }
  }
  queue_with_results(op, stack, metadata);
}

std::vector<std::string> operators_run_at_once() {
  std::lock_guard lock(at_once_mutex);
  return {names_run_at_once().begin(), names_run_at_once().end()};
}

}  // namespace softdevice

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&softdevice::fallback>());
}

// Operators that have a kernel for the CPU, and another for any device, made of smaller operators,
// which torch would prefer to the fallback.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softdevice::fallback>());
  }
}
