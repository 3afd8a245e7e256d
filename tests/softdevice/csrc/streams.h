// Streams, events and the executor that runs what is queued on them.
//
// A stream is a queue of jobs that run one after the other. Which stream goes on next is up to the
// order of execution. Only waits for markers are binding, as on a GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <c10/core/Device.h>

namespace softdevice {

inline c10::Device the_device() {
  return c10::Device(c10::DeviceType::PrivateUse1, 0);
}

using StreamId = int64_t;
using Clock = std::chrono::steady_clock;

constexpr StreamId kDefaultStream = 0;

// A point in a stream. An event that is recorded again gets a new marker, so whoever waits for the
// old one goes on waiting for the old one.
struct Marker {
  explicit Marker(StreamId of) : stream(of) {}
  const StreamId stream;
  std::atomic<bool> done{false};
  Clock::time_point time{};  // when it was reached; valid once done
  int num_queries = 0;       // unsuccessful ones; guarded by the executor's lock
};
using MarkerPtr = std::shared_ptr<Marker>;

enum class Kind { kernel, copy, sleep, mark, wait };

struct Job {
  Kind kind;
  const char* name;           // outlives the job: an operator's name, or a literal
  std::function<void()> run;  // of kernels and copies
  MarkerPtr marker;           // of marks and waits
  int64_t duration_us = 0;    // of sleeps
};

// ---- what the rest of the device calls ----------------------------------------------------------

// Sets the order of execution: "threads", "compute-first", "copies-first" or "random:SEED".
// Throws c10::Error for anything else. Finishes what is queued first.
void choose_order(const std::string& order);

StreamId new_stream();

// Of the calling thread.
StreamId current_stream();
StreamId exchange_current_stream(StreamId stream);

void queue_kernel(StreamId stream, const char* name, std::function<void()> run);
// A copy between the device and the host.
void queue_copy(StreamId stream, const char* name, std::function<void()> run);
void queue_sleep(StreamId stream, int64_t duration_us);
// The returned marker is done once all that has been queued on the stream so far has run.
MarkerPtr queue_mark(StreamId stream);
// What is queued on the stream from now on runs after the marker.
void queue_wait(StreamId stream, const MarkerPtr& marker);

bool is_done(const MarkerPtr& marker);
// The host waits. Throws what a job has thrown since the last such wait, as GPUs report errors.
void finish(const MarkerPtr& marker);
void finish_stream(StreamId stream);
void finish_all();
bool is_idle(StreamId stream);

// Ends the threads. What is still queued never runs, and what is queued later is dropped.
void shut_down();

// Whether this process was forked after the device was loaded: its threads are gone, its locks may
// be held for ever, and nothing works.
bool is_forked();
void refuse_if_forked();

// The number of jobs that ran so far.
int64_t num_jobs_run();

}  // namespace softdevice
