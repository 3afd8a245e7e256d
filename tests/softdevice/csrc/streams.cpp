// See streams.h. The orders of execution are at the end of this file.
#include "streams.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace softdevice {
namespace {

std::atomic<bool> forked{false};

struct Stream {
  std::deque<Job> jobs;
  bool is_running = false;  // a job that is no longer in `jobs`
  uint64_t priority = 0;    // for the random order, as is the next
  int64_t reign = 0;        // number of the time when `priority` was drawn
  std::thread worker;       // for the order "threads"
  std::condition_variable work;
  MarkerPtr asked;  // the last mark that a question whether the stream is idle left
};

// What is queued, for as long as the process lives. The order of execution may change while other
// threads of the host queue and wait: nothing that they queued is lost, and their waits go on.
struct Queues {
  std::mutex mutex;  // guards all that follows, and the streams
  std::condition_variable marker_done;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<MarkerPtr> wanted;  // the host waits for these
  std::exception_ptr error;       // of a job, until the host waits
  int64_t num_run = 0;            // jobs, since the order was chosen
  bool ended = false;             // nothing runs any more
};
using Lock = std::unique_lock<std::mutex>;

bool is_reached(const MarkerPtr& marker) {
  return marker->done;
}

// Kernels run below autograd, in threads of their own: nothing of the caller's modes reaches them.
// One thread a kernel: kernels of several streams run beside each other, and bits do not depend on
// how a sum is split.
void prepare_thread() {
  at::set_num_threads(1);
  c10::GradMode::set_enabled(false);
}

// ---- the executor -------------------------------------------------------------------------------

// Runs what is queued, in one order. Another executor takes its place when the order changes. All
// of its functions are called with the lock held.
class Executor {
 public:
  explicit Executor(Queues& queues) : queues_(queues) {}
  virtual ~Executor() = default;

  // Goes on with what is queued already, and with what the host waits for.
  virtual void begin() = 0;
  // These two may release the lock for a while.
  virtual void after_queueing(StreamId id, Lock& lock) = 0;
  virtual void after_query(const MarkerPtr& marker, Lock& lock) = 0;
  // The host waits for one more marker.
  virtual void after_demand() = 0;

  // Ends the threads, without the lock. A job that has begun is run to its end.
  void end(Lock& lock) {
    stopping_ = true;
    wake_all();
    lock.unlock();
    join();
    lock.lock();
  }

 protected:
  virtual void wake_all() = 0;
  virtual void join() = 0;

  // Marks and waits at the head of a queue take no time. Returns whether there were any.
  bool pass_markers(Stream& stream) {
    bool moved = false;
    while (!stream.jobs.empty() && !stream.is_running) {
      Job& job = stream.jobs.front();
      if (job.kind == Kind::mark) {
        job.marker->time = Clock::now();
        job.marker->done = true;
        queues_.marker_done.notify_all();
      } else if (job.kind != Kind::wait || !job.marker->done) {
        break;
      }
      stream.jobs.pop_front();
      moved = true;
    }
    return moved;
  }

  static bool can_run(const Stream& stream) {
    if (stream.is_running || stream.jobs.empty()) {
      return false;
    }
    Kind kind = stream.jobs.front().kind;
    return kind != Kind::mark && kind != Kind::wait;
  }

  // Runs the job at the head of a queue, without the lock.
  void run_head(Stream& stream, Lock& lock) {
    Job job = std::move(stream.jobs.front());
    stream.jobs.pop_front();
    stream.is_running = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      job.run();
    } catch (c10::Error& raised) {
      raised.add_context(c10::str("In ", job.name, ", which was queued before"));
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    job.run = nullptr;  // what it holds goes before anybody hears that it has run
    lock.lock();
    if (error && !queues_.error) {
      queues_.error = error;
    }
    stream.is_running = false;
    ++queues_.num_run;
  }

  Queues& queues_;
  bool stopping_ = false;
};

// ---- a worker thread for each stream ------------------------------------------------------------

class ThreadedExecutor final : public Executor {
 public:
  using Executor::Executor;

  void begin() override {
    for (auto& stream : queues_.streams) {
      if (!stream->jobs.empty()) {
        start(*stream);
      }
    }
  }

  void after_queueing(StreamId id, Lock&) override {
    start(*queues_.streams[id]);
  }

  void after_query(const MarkerPtr&, Lock&) override {}
  void after_demand() override {}

 private:
  void start(Stream& stream) {
    if (stopping_) {
      return;  // the next executor goes on with it
    }
    if (!stream.worker.joinable()) {
      stream.worker = std::thread([this, &stream] { work(stream); });
    }
    stream.work.notify_one();
  }

  void wake_all() override {
    for (auto& stream : queues_.streams) {
      stream->work.notify_all();
    }
  }

  void join() override {
    for (auto& worker : workers()) {
      worker.join();
    }
  }

  std::vector<std::thread> workers() {
    Lock lock(queues_.mutex);
    std::vector<std::thread> taken;
    for (auto& stream : queues_.streams) {
      if (stream->worker.joinable()) {
        taken.push_back(std::move(stream->worker));
      }
    }
    return taken;
  }

  void work(Stream& stream) {
    prepare_thread();
    Lock lock(queues_.mutex);
    while (!stopping_) {
      if (pass_markers(stream)) {
        wake_all();  // other streams may have waited for these markers
      } else if (!can_run(stream)) {
        stream.work.wait(lock);
      } else if (stream.jobs.front().kind == Kind::sleep) {
        sleep(stream, lock);
      } else {
        run_head(stream, lock);
      }
    }
  }

  void sleep(Stream& stream, Lock& lock) {
    auto until = Clock::now() + std::chrono::microseconds(stream.jobs.front().duration_us);
    stream.jobs.pop_front();
    stream.is_running = true;
    while (!stopping_ && Clock::now() < until) {
      stream.work.wait_until(lock, until);
    }
    stream.is_running = false;
    ++queues_.num_run;
  }
};

// ---- one thread that picks the next job ---------------------------------------------------------

// Runs nothing until somebody waits, or until its order says so.
class OrderedExecutor : public Executor {
 public:
  using Executor::Executor;

  void begin() override {
    if (!queues_.wanted.empty()) {
      start();
    }
  }

  void after_queueing(StreamId, Lock&) override {}

  // Code that asks again and again makes progress, as it would on a GPU.
  void after_query(const MarkerPtr& marker, Lock& lock) override {
    if (++marker->num_queries % kQueriesUntilProgress == 0) {
      queues_.wanted.push_back(marker);
      start();
      queues_.marker_done.wait(lock, [&] { return marker->done || stopping_; });
    }
  }

  void after_demand() override {
    start();
  }

 protected:
  // The stream whose head runs next while somebody waits for `marker`. At least one stream can run.
  virtual Stream* pick(const MarkerPtr& marker) = 0;

  // The stream that must go on so that the marker is reached.
  Stream* needed(MarkerPtr marker) {
    while (true) {
      Stream* stream = queues_.streams[marker->stream].get();
      if (stream->jobs.empty() || stream->jobs.front().kind != Kind::wait) {
        TORCH_INTERNAL_ASSERT(can_run(*stream), "A marker that is waited for is in no queue");
        return stream;
      }
      marker = stream->jobs.front().marker;
    }
  }

  std::vector<Stream*> runnable() {
    std::vector<Stream*> found;
    for (auto& stream : queues_.streams) {
      if (can_run(*stream)) {
        found.push_back(stream.get());
      }
    }
    return found;
  }

  // Lets the executor run some jobs although nobody waits, and waits for them.
  void spend(int num_jobs, Lock& lock) {
    if (num_jobs == 0 || stopping_) {
      return;
    }
    credit_ = num_jobs;
    start();
    credit_spent_.wait(lock, [&] { return credit_ == 0 || stopping_; });
  }

 private:
  static constexpr int kQueriesUntilProgress = 64;

  void start() {
    if (stopping_) {
      return;  // the next executor goes on with it
    }
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
    work_.notify_one();
  }

  void wake_all() override {
    queues_.marker_done.notify_all();
    credit_spent_.notify_all();
    work_.notify_all();
  }

  void join() override {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void work() {
    prepare_thread();
    Lock lock(queues_.mutex);
    while (!stopping_) {
      pass_all_markers();
      std::erase_if(queues_.wanted, is_reached);
      if (credit_ > 0 && runnable().empty()) {
        credit_ = 0;
      }
      if (credit_ == 0) {
        credit_spent_.notify_all();
      }
      if (queues_.wanted.empty() && credit_ == 0) {
        work_.wait(lock);
        continue;
      }
      run_next(lock);
    }
  }

  void run_next(Lock& lock) {
    TORCH_INTERNAL_ASSERT(!runnable().empty(), "The host waits for what can never run");
    Stream& stream = *pick(queues_.wanted.empty() ? nullptr : queues_.wanted.front());
    if (stream.jobs.front().kind == Kind::sleep) {
      stream.jobs.pop_front();
      ++queues_.num_run;
    } else {
      run_head(stream, lock);
    }
    credit_ = std::max(credit_ - 1, 0);
  }

  void pass_all_markers() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (auto& stream : queues_.streams) {
        moved |= pass_markers(*stream);
      }
    }
  }

  std::thread thread_;
  std::condition_variable work_;
  std::condition_variable credit_spent_;
  int credit_ = 0;
};

// Runs all that it can of its favourite kind whenever somebody waits; of the rest, only what
// somebody waits for. A stream that sleeps lets its favourites go first.
class LazyExecutor final : public OrderedExecutor {
 public:
  LazyExecutor(Queues& queues, Kind favourite)
      : OrderedExecutor(queues), favourite_(favourite) {}

 private:
  Stream* pick(const MarkerPtr& marker) override {
    for (Stream* stream : runnable()) {
      if (stream->jobs.front().kind == favourite_) {
        return stream;
      }
    }
    return needed(marker);
  }

  const Kind favourite_;
};

// Runs the head of the stream with the highest priority. Priorities are drawn anew now and then. A
// stream that sleeps comes last.
class RandomExecutor final : public OrderedExecutor {
 public:
  RandomExecutor(Queues& queues, uint64_t seed) : OrderedExecutor(queues), random_(seed) {}

 private:
  Stream* pick(const MarkerPtr&) override {
    if (until_new_priorities_-- == 0) {
      until_new_priorities_ = static_cast<int>(random_() % kLongestReign);
      ++reign_;
    }
    auto streams = runnable();
    for (Stream* stream : streams) {
      // Drawn when it is needed, so that streams which others made and left change nothing.
      if (stream->reign != reign_) {
        stream->reign = reign_;
        stream->priority = random_();
      }
    }
    return *std::max_element(streams.begin(), streams.end(), [](Stream* a, Stream* b) {
      return rank(*a) < rank(*b);
    });
  }

  static std::pair<bool, uint64_t> rank(const Stream& stream) {
    return {stream.jobs.front().kind != Kind::sleep, stream.priority};
  }

  void after_queueing(StreamId, Lock& lock) override {
    spend(draw_credit(), lock);
  }

  void after_query(const MarkerPtr&, Lock& lock) override {
    spend(1 + draw_credit(), lock);
  }

  // The device is mostly behind the host, and catches up in bursts.
  int draw_credit() {
    uint64_t drawn = random_() % 16;
    return drawn < 12 ? 0 : drawn < 15 ? static_cast<int>(drawn) - 11 : 32;
  }

  static constexpr uint64_t kLongestReign = 12;  // jobs

  std::mt19937_64 random_;
  int until_new_priorities_ = 0;
  int64_t reign_ = 0;
};

// ---- the order in force -------------------------------------------------------------------------

std::unique_ptr<Executor> make_executor(const std::string& order, Queues& queues) {
  if (order == "threads") {
    return std::make_unique<ThreadedExecutor>(queues);
  }
  if (order == "compute-first") {
    return std::make_unique<LazyExecutor>(queues, Kind::kernel);
  }
  if (order == "copies-first") {
    return std::make_unique<LazyExecutor>(queues, Kind::copy);
  }
  const std::string random = "random:";
  const std::string seed = order.rfind(random, 0) == 0 ? order.substr(random.size()) : "";
  TORCH_CHECK(
      !seed.empty() && seed.size() < 19 &&
          std::all_of(seed.begin(), seed.end(), [](unsigned char c) { return std::isdigit(c); }),
      "The order \"", order, "\" is not threads, compute-first, copies-first or random:SEED, "
      "where SEED is a number");
  return std::make_unique<RandomExecutor>(queues, std::stoull(seed));
}

// The queues, and who runs what is in them. Neither is ever destroyed: tensors outlive every static
// object of ours, and a thread of the host may still be in an executor that has been replaced.
struct Device {
  Device() {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    queues.streams.push_back(std::make_unique<Stream>());  // the default stream
    executor = make_executor("threads", queues).release();
  }

  Queues queues;
  Executor* executor;
  std::mutex choosing;  // held while the order changes, and taken before the queues' lock
};

Device& device() {
  static auto* made = new Device;
  return *made;
}

thread_local StreamId current_stream_of_thread = kDefaultStream;

void queue(StreamId stream, Job job) {
  refuse_if_forked();
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  if (queues.ended) {
    return;
  }
  queues.streams.at(stream)->jobs.push_back(std::move(job));
  device().executor->after_queueing(stream, lock);
}

void finish_markers(const std::vector<MarkerPtr>& markers) {
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  for (auto& marker : markers) {
    if (!marker->done && !queues.ended) {
      queues.wanted.push_back(marker);
      device().executor->after_demand();
    }
  }
  queues.marker_done.wait(lock, [&] {
    return queues.ended || std::all_of(markers.begin(), markers.end(), is_reached);
  });
  std::erase_if(queues.wanted, is_reached);
  if (queues.error) {
    std::rethrow_exception(std::exchange(queues.error, nullptr));
  }
}

std::vector<StreamId> busy_streams() {
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  std::vector<StreamId> busy;
  for (size_t id = 0; id < queues.streams.size(); ++id) {
    if (queues.streams[id]->is_running || !queues.streams[id]->jobs.empty()) {
      busy.push_back(static_cast<StreamId>(id));
    }
  }
  return busy;
}

}  // namespace

void choose_order(const std::string& order) {
  refuse_if_forked();
  Queues& queues = device().queues;
  auto next = make_executor(order, queues);
  std::lock_guard choosing(device().choosing);
  finish_all();
  Lock lock(queues.mutex);
  if (queues.ended) {
    return;
  }
  device().executor->end(lock);
  for (auto& stream : queues.streams) {
    stream->reign = 0;
  }
  queues.num_run = 0;
  device().executor = next.release();
  device().executor->begin();
}

StreamId new_stream() {
  refuse_if_forked();
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  queues.streams.push_back(std::make_unique<Stream>());
  return static_cast<StreamId>(queues.streams.size()) - 1;
}

StreamId current_stream() {
  return current_stream_of_thread;
}

StreamId exchange_current_stream(StreamId stream) {
  return std::exchange(current_stream_of_thread, stream);
}

void queue_kernel(StreamId stream, const char* name, std::function<void()> run) {
  queue(stream, {Kind::kernel, name, std::move(run), nullptr});
}

void queue_copy(StreamId stream, const char* name, std::function<void()> run) {
  queue(stream, {Kind::copy, name, std::move(run), nullptr});
}

void queue_sleep(StreamId stream, int64_t duration_us) {
  queue(stream, {Kind::sleep, "sleep", nullptr, nullptr, duration_us});
}

MarkerPtr queue_mark(StreamId stream) {
  auto marker = std::make_shared<Marker>(stream);
  queue(stream, {Kind::mark, "mark", nullptr, marker});
  return marker;
}

void queue_wait(StreamId stream, const MarkerPtr& marker) {
  queue(stream, {Kind::wait, "wait", nullptr, marker});
}

bool is_done(const MarkerPtr& marker) {
  if (is_forked() || marker->done) {
    return true;
  }
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  if (queues.ended) {
    return true;
  }
  device().executor->after_query(marker, lock);
  return marker->done;
}

void finish(const MarkerPtr& marker) {
  refuse_if_forked();
  finish_markers({marker});
}

void finish_stream(StreamId stream) {
  finish(queue_mark(stream));
}

void finish_all() {
  refuse_if_forked();
  std::vector<MarkerPtr> markers;
  for (StreamId id : busy_streams()) {
    markers.push_back(queue_mark(id));
  }
  finish_markers(markers);
}

bool is_idle(StreamId id) {
  if (is_forked()) {
    return true;
  }
  MarkerPtr marker;
  {
    Lock lock(device().queues.mutex);
    Stream& stream = *device().queues.streams.at(id);
    if (stream.jobs.empty() && !stream.is_running) {
      return true;
    }
    if (!stream.asked || stream.asked->done) {
      stream.asked = std::make_shared<Marker>(id);
      stream.jobs.push_back({Kind::mark, "mark", nullptr, stream.asked});
    }
    marker = stream.asked;
  }
  return is_done(marker);
}

void shut_down() {
  if (is_forked()) {
    return;
  }
  std::lock_guard choosing(device().choosing);
  Queues& queues = device().queues;
  Lock lock(queues.mutex);
  queues.ended = true;
  queues.marker_done.notify_all();
  device().executor->end(lock);
}

bool is_forked() {
  return forked;
}

void refuse_if_forked() {
  TORCH_CHECK(
      !is_forked(),
      "This process was forked from one that uses the software accelerator, which cannot be used "
      "here; start processes with \"spawn\" instead");
}

int64_t num_jobs_run() {
  Lock lock(device().queues.mutex);
  return device().queues.num_run;
}

}  // namespace softdevice
