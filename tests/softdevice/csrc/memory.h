// Device memory, and host memory that is page-locked.
#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace softdevice {

// ---- the device's -------------------------------------------------------------------------------

// Hands out memory on the current stream of the calling thread.
c10::DeviceAllocator* device_allocator();

// How much the device has. Less than what is reserved now is refused only to later allocations.
void set_capacity(size_t size_bytes);
size_t capacity();

// ---- the host's ---------------------------------------------------------------------------------

c10::Allocator* host_allocator();
void empty_host_cache();

// Whether the device may copy to or from this address while the host goes on.
bool is_page_locked(const void* address);

// Tells the allocator, if the memory is its own, that a stream copies to or from it.
void note_host_use(const void* address, StreamId stream);

// As cudaHostRegister and cudaHostUnregister. They return whether they did it: memory that overlaps
// what is registered is refused, and an address that is not registered.
bool register_host_memory(uintptr_t address, size_t size_bytes);
bool unregister_host_memory(uintptr_t address);

}  // namespace softdevice
