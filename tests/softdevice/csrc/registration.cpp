// What makes torch take this for an accelerator: the device guard, the hooks, the generator, the
// allocators. And the functions that Python calls.
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace softdevice {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr size_t kNumPooledStreams = 32;  // as many as CUDA has before it gives the first one again

c10::Stream as_stream(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
}

StreamId next_pooled_stream() {
  static std::mutex mutex;
  static std::vector<StreamId> pool;
  static size_t next = 0;
  std::lock_guard lock(mutex);
  if (pool.size() < kNumPooledStreams) {
    pool.push_back(new_stream());
    return pool.back();
  }
  return pool[next++ % kNumPooledStreams];
}

// ---- the guard: streams and events --------------------------------------------------------------

// Behind the pointer that torch keeps for an event. Recording again gives it another marker.
struct Event {
  MarkerPtr marker;
};

const MarkerPtr& marker_of(void* event) {
  return static_cast<Event*>(event)->marker;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }

  // There is one device, so there is nothing to switch.
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "There is one device of software, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return as_stream(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return as_stream(kDefaultStream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(next_pooled_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_stream(next_pooled_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(exchange_current_stream(stream.id()));
  }

  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish_stream(stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    finish_all();
  }

  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex,
      c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->marker = queue_mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      queue_wait(stream.id(), marker_of(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_done(marker_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      finish(marker_of(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between =
        marker_of(end)->time - marker_of(begin)->time;
    return between.count();
  }

  void recordDataPtrOnStream(
      const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- the generator ------------------------------------------------------------------------------

// Numbers of the CPU's generator. Each operator draws one of them, and seeds its own with it.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator() : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(kKey)) {}

  void set_current_seed(uint64_t seed) override {
    numbers_.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "A generator of the software accelerator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "A generator of the software accelerator has no offset");
  }
  uint64_t current_seed() const override {
    return numbers_.current_seed();
  }
  uint64_t seed() override {
    return numbers_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    numbers_.set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers_.get_state();
  }
  uint64_t draw() {
    return numbers_.random64();
  }

 private:
  static constexpr auto kKey = c10::DispatchKey::PrivateUse1;

  Generator* clone_impl() const override {
    auto* made = new Generator;
    made->numbers_.set_state(*numbers_.get_state());
    return made;
  }

  at::CPUGeneratorImpl numbers_;
};

at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<Generator>());
  return *generator;
}

// ---- the hooks ----------------------------------------------------------------------------------

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return the_device();
  }
  bool isPinnedPtr(const void* address) const override {
    return is_page_locked(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return host_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr fresh = device_allocator()->allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      device_allocator()->copy_data(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

const bool registered = [] {
  c10::SetAllocator(kType, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- what Python calls --------------------------------------------------------------------------

// Page-locked memory is recognised only once torch has initialised the device.
void initialise() {
  at::globalContext().lazyInitDevice(kType);
}

void sleep_on_current_stream(int64_t duration_us) {
  queue_sleep(current_stream(), duration_us);
}

std::string names_of_operators_run_at_once() {
  std::string lines;
  for (const auto& name : operators_run_at_once()) {
    lines += name + "\n";
  }
  return lines;
}

void manual_seed(int64_t seed) {
  std::lock_guard lock(default_generator().mutex());
  default_generator().set_current_seed(static_cast<uint64_t>(seed));
}

at::Tensor get_rng_state() {
  std::lock_guard lock(default_generator().mutex());
  return default_generator().get_state();
}

void set_rng_state(const at::Tensor& state) {
  std::lock_guard lock(default_generator().mutex());
  default_generator().set_state(state);
}

}  // namespace

uint64_t draw_seed(const std::optional<at::Generator>& generator) {
  at::Generator from = generator && generator->defined() ? *generator : default_generator();
  std::lock_guard lock(from.mutex());
  return from.device().is_cpu() ? at::check_generator<at::CPUGeneratorImpl>(from)->random64()
                                : static_cast<Generator*>(from.unsafeGetGeneratorImpl())->draw();
}

}  // namespace softdevice

// torch.ops.softdevice; library.py documents these.
TORCH_LIBRARY(softdevice, library) {
  using namespace softdevice;
  library.def("initialise", initialise);
  library.def("choose_order", [](const std::string& order) { choose_order(order); });
  library.def("sleep", sleep_on_current_stream);
  library.def("set_capacity", [](int64_t size_bytes) { set_capacity(size_bytes); });
  library.def("capacity", [] { return static_cast<int64_t>(capacity()); });
  library.def("host_register", [](int64_t address, int64_t size_bytes) {
    return register_host_memory(address, size_bytes);
  });
  library.def("host_unregister", [](int64_t address) { return unregister_host_memory(address); });
  library.def("is_forked", is_forked);
  library.def("num_jobs_run", num_jobs_run);
  library.def("operators_run_at_once", names_of_operators_run_at_once);
  library.def("manual_seed", manual_seed);
  library.def("get_rng_state", get_rng_state);
  library.def("set_rng_state", set_rng_state);
  library.def("shut_down", shut_down);
}
