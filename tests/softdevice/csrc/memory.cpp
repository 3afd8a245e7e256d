// See memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

namespace softdevice {
namespace {

constexpr size_t kRounding = 512;      // bytes; as CUDA's allocator rounds sizes
constexpr int kPoison = 0xff;          // NaN in every floating type, -1 in every signed one

size_t round_up(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

// Memory straight from the system, and back to it: a late job that still uses it is found.
void* map_memory(size_t size_bytes) {
  void* address = mmap(
      nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

// ---- blocks -------------------------------------------------------------------------------------

struct Block {
  char* address;
  size_t size;                  // bytes
  StreamId stream;              // the one that it is handed out on
  std::set<StreamId> users;     // other streams with queued uses
  std::vector<MarkerPtr> uses;  // set when it is freed: the ends of those uses
};

bool is_unused(const Block& block) {
  for (auto& use : block.uses) {
    if (!is_done(use)) {
      return false;
    }
  }
  return true;
}

void mark_uses(Block& block) {
  for (StreamId user : block.users) {
    block.uses.push_back(queue_mark(user));
  }
  block.users.clear();
}

// Freed blocks. Those that other streams still use wait until these are done.
class Pool {
 public:
  void put(Block* block) {
    mark_uses(*block);
    (block->uses.empty() ? free_ : waiting_).emplace(key(*block), block);
  }

  // A block of exactly this size (nothing is split), or nullptr. The one that was freed last comes
  // first: whoever still uses it is found.
  Block* take(size_t size, StreamId stream) {
    collect();
    auto [begin, end] = free_.equal_range({stream, size});
    if (begin == end) {
      return nullptr;
    }
    auto found = std::prev(end);
    Block* block = found->second;
    free_.erase(found);
    return block;
  }

  // Takes out everything. The device must be idle.
  std::vector<Block*> empty() {
    std::vector<Block*> blocks;
    for (auto* pool : {&free_, &waiting_}) {
      for (auto& [_, block] : *pool) {
        blocks.push_back(block);
      }
      pool->clear();
    }
    return blocks;
  }

 private:
  using Key = std::pair<StreamId, size_t>;

  static Key key(const Block& block) {
    return {block.stream, block.size};
  }

  void collect() {
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
      Block* block = entry->second;
      if (!is_unused(*block)) {
        ++entry;
        continue;
      }
      block->uses.clear();
      free_.emplace(key(*block), block);
      entry = waiting_.erase(entry);
    }
  }

  // By stream: memory is handed out again on its own stream at once, for what is queued there runs
  // after all earlier uses.
  std::multimap<Key, Block*> free_;
  std::multimap<Key, Block*> waiting_;
};

// ---- the device's allocator ---------------------------------------------------------------------

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    refuse_if_forked();
    if (size == 0) {
      return {nullptr, nullptr, &free_block, the_device()};
    }
    StreamId stream = current_stream();
    Block* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      block = take_or_make(round_up(size, kRounding), stream);
      count(*block, size);
    }
    // What was here must not be right by chance. The stream's earlier jobs may still read it, so
    // this is a job, too.
    queue_kernel(stream, "poison", [address = block->address, bytes = block->size] {
      std::memset(address, kPoison, bytes);
    });
    return {block->address, block, &free_block, the_device()};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // an address alone does not say which block it is
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    queue_kernel(current_stream(), "copy_data", [=] { std::memcpy(target, source, size); });
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex_);
    release_cached();
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    if (block == nullptr || block->stream == stream.id()) {
      return;
    }
    std::lock_guard lock(mutex_);
    block->users.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) {
      stat->reset_accumulated();
    }
    stats_.num_alloc_retries = 0;
    stats_.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) {
      stat->reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return {capacity_ - std::min(capacity_, reserved_), capacity_};
  }

  size_t capacity() {
    std::lock_guard lock(mutex_);
    return capacity_;
  }

  void set_capacity(size_t size) {
    std::lock_guard lock(mutex_);
    capacity_ = size;
  }

 private:
  static DeviceAllocator& get() {
    return *static_cast<DeviceAllocator*>(device_allocator());
  }

  static void free_block(void* context) {
    if (context == nullptr || is_forked()) {
      return;
    }
    auto& self = get();
    auto* block = static_cast<Block*>(context);
    std::lock_guard lock(self.mutex_);
    self.stats_.allocated_bytes[0].decrease(block->size);
    self.stats_.active_bytes[0].decrease(block->size);
    self.stats_.requested_bytes[0].decrease(self.requested_.at(block));
    self.stats_.allocation[0].decrease(1);
    self.requested_.erase(block);
    self.pool_.put(block);
  }

  Block* take_or_make(size_t size, StreamId stream) {
    if (Block* block = pool_.take(size, stream)) {
      return block;
    }
    if (reserved_ + size > capacity_) {
      ++stats_.num_alloc_retries;
      release_cached();
    }
    char* address =
        reserved_ + size > capacity_ ? nullptr : static_cast<char*>(map_memory(size));
    if (address == nullptr) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "softdevice out of memory. Tried to allocate ", size,
          " bytes. The device has a total capacity of ", capacity_, " bytes, of which ",
          reserved_, " bytes are reserved.");
    }
    reserved_ += size;
    stats_.reserved_bytes[0].increase(size);
    stats_.segment[0].increase(1);
    return new Block{address, size, stream, {}, {}};
  }

  void count(const Block& block, size_t requested) {
    requested_[&block] = requested;
    stats_.allocated_bytes[0].increase(block.size);
    stats_.active_bytes[0].increase(block.size);
    stats_.requested_bytes[0].increase(requested);
    stats_.allocation[0].increase(1);
  }

  // Like cudaFree, this waits for the device.
  void release_cached() {
    finish_all();
    for (Block* block : pool_.empty()) {
      munmap(block->address, block->size);
      reserved_ -= block->size;
      stats_.reserved_bytes[0].decrease(block->size);
      stats_.segment[0].decrease(1);
      delete block;
    }
  }

  std::vector<c10::CachingAllocator::Stat*> all_stats() {
    return {
        &stats_.allocation[0],     &stats_.segment[0],      &stats_.allocated_bytes[0],
        &stats_.reserved_bytes[0], &stats_.active_bytes[0], &stats_.requested_bytes[0]};
  }

  std::mutex mutex_;
  Pool pool_;
  std::unordered_map<const Block*, size_t> requested_;  // bytes, of blocks that are handed out
  size_t capacity_ = size_t{8} << 30;
  size_t reserved_ = 0;  // bytes taken from the system
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// ---- the host's allocator -----------------------------------------------------------------------

// Page-locked memory is memory like any other here, whose addresses are known.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    refuse_if_forked();
    if (size == 0) {
      return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    }
    std::lock_guard lock(mutex_);
    // As torch's allocator for CUDA does, in powers of two.
    size_t rounded = kRounding;
    while (rounded < size) {
      rounded *= 2;
    }
    Block* block = pool_.take(rounded, kDefaultStream);
    if (block == nullptr) {
      auto* address = static_cast<char*>(map_memory(rounded));
      TORCH_CHECK(address != nullptr, "No memory to page-lock ", rounded, " bytes");
      block = new Block{address, rounded, kDefaultStream, {}, {}};
    }
    in_use_[block->address] = block;
    return {block->address, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }

  bool is_page_locked(const void* address) {
    std::lock_guard lock(mutex_);
    return find_block(address) != nullptr || find_registered(address) != registered_.end();
  }

  void note_use(const void* address, StreamId stream) {
    std::lock_guard lock(mutex_);
    if (Block* block = find_block(address)) {
      block->users.insert(stream);
    }
  }

  bool register_memory(uintptr_t begin, size_t size) {
    std::lock_guard lock(mutex_);
    auto next = registered_.lower_bound(begin);
    bool overlaps = next != registered_.end() && next->first < begin + size;
    overlaps |= next != registered_.begin() &&
        std::prev(next)->first + std::prev(next)->second > begin;
    if (overlaps || size == 0) {
      return false;
    }
    registered_.emplace(begin, size);
    return true;
  }

  bool unregister_memory(uintptr_t begin) {
    std::lock_guard lock(mutex_);
    return registered_.erase(begin) > 0;
  }

  void empty_cache() {
    std::lock_guard lock(mutex_);
    finish_all();
    for (Block* block : pool_.empty()) {
      munmap(block->address, block->size);
      delete block;
    }
  }

 private:
  static HostAllocator& get() {
    return *static_cast<HostAllocator*>(host_allocator());
  }

  static void free_block(void* context) {
    if (context == nullptr || is_forked()) {
      return;
    }
    auto& self = get();
    auto* block = static_cast<Block*>(context);
    std::lock_guard lock(self.mutex_);
    self.in_use_.erase(block->address);
    self.pool_.put(block);
  }

  Block* find_block(const void* address) {
    auto at = in_use_.upper_bound(static_cast<const char*>(address));
    if (at == in_use_.begin()) {
      return nullptr;
    }
    Block* block = std::prev(at)->second;
    return address < block->address + block->size ? block : nullptr;
  }

  std::map<uintptr_t, size_t>::iterator find_registered(const void* address) {
    auto wanted = reinterpret_cast<uintptr_t>(address);
    auto at = registered_.upper_bound(wanted);
    if (at == registered_.begin()) {
      return registered_.end();
    }
    --at;
    return wanted < at->first + at->second ? at : registered_.end();
  }

  std::mutex mutex_;
  Pool pool_;
  std::map<const char*, Block*> in_use_;      // by address
  std::map<uintptr_t, size_t> registered_;  // begin and size of what others had page-locked
};

HostAllocator& the_host_allocator() {
  return *static_cast<HostAllocator*>(host_allocator());
}

}  // namespace

// Neither allocator is ever destroyed: tensors outlive every static object of ours.

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* host_allocator() {
  static auto* allocator = new HostAllocator;
  return allocator;
}

void set_capacity(size_t size_bytes) {
  static_cast<DeviceAllocator*>(device_allocator())->set_capacity(size_bytes);
}

size_t capacity() {
  return static_cast<DeviceAllocator*>(device_allocator())->capacity();
}

void empty_host_cache() {
  the_host_allocator().empty_cache();
}

bool is_page_locked(const void* address) {
  return address != nullptr && !is_forked() && the_host_allocator().is_page_locked(address);
}

void note_host_use(const void* address, StreamId stream) {
  the_host_allocator().note_use(address, stream);
}

bool register_host_memory(uintptr_t address, size_t size_bytes) {
  return the_host_allocator().register_memory(address, size_bytes);
}

bool unregister_host_memory(uintptr_t address) {
  return the_host_allocator().unregister_memory(address);
}

}  // namespace softdevice
