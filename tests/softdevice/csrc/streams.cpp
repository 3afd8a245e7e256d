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

// Kernels run below autograd, in threads of their own: nothing of the caller's modes reaches them.
// One thread a kernel: kernels of several streams run beside each other, and bits do not depend on
// how a sum is split.
void prepare_thread() {
  at::set_num_threads(1);
  c10::GradMode::set_enabled(false);
}

// ---- the executor -------------------------------------------------------------------------------

class Executor {
 public:
  virtual ~Executor() = default;

  StreamId new_stream() {
    std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<Stream>());
    return static_cast<StreamId>(streams_.size()) - 1;
  }

  void queue(StreamId id, Job job) {
    std::unique_lock lock(mutex_);
    if (stopping_) {
      return;
    }
    streams_.at(id)->jobs.push_back(std::move(job));
    after_queueing(id, lock);
  }

  bool is_done(const MarkerPtr& marker) {
    if (marker->done) {
      return true;
    }
    std::unique_lock lock(mutex_);
    if (stopping_) {
      return true;
    }
    after_query(marker, lock);
    return marker->done;
  }

  bool is_idle(StreamId id) {
    MarkerPtr marker;
    {
      std::unique_lock lock(mutex_);
      Stream& stream = *streams_.at(id);
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

  void finish(const std::vector<MarkerPtr>& markers) {
    std::unique_lock lock(mutex_);
    for (auto& marker : markers) {
      demand(marker, lock);
    }
    marker_done_.wait(lock, [&] {
      return stopping_ || std::all_of(markers.begin(), markers.end(), [](const MarkerPtr& marker) {
               return marker->done.load();
             });
    });
    throw_error();
  }

  size_t num_streams() {
    std::lock_guard lock(mutex_);
    return streams_.size();
  }

  std::vector<StreamId> busy_streams() {
    std::lock_guard lock(mutex_);
    std::vector<StreamId> busy;
    for (size_t id = 0; id < streams_.size(); ++id) {
      if (streams_[id]->is_running || !streams_[id]->jobs.empty()) {
        busy.push_back(static_cast<StreamId>(id));
      }
    }
    return busy;
  }

  int64_t num_run() {
    std::lock_guard lock(mutex_);
    return num_run_;
  }

  void shut_down() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      wake_all();
    }
    join();
  }

 protected:
  // Called with the lock held; may release it for a while.
  virtual void after_queueing(StreamId id, std::unique_lock<std::mutex>& lock) = 0;
  virtual void after_query(const MarkerPtr& marker, std::unique_lock<std::mutex>& lock) = 0;
  virtual void demand(const MarkerPtr& marker, std::unique_lock<std::mutex>& lock) = 0;
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
        marker_done_.notify_all();
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

  void throw_error() {
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  // Runs the job at the head of a queue, without the lock.
  void run_head(Stream& stream, std::unique_lock<std::mutex>& lock) {
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
    if (error && !error_) {
      error_ = error;
    }
    stream.is_running = false;
    ++num_run_;
  }

  std::mutex mutex_;
  std::condition_variable marker_done_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::exception_ptr error_;
  bool stopping_ = false;
  int64_t num_run_ = 0;
};

// ---- a worker thread for each stream ------------------------------------------------------------

class ThreadedExecutor final : public Executor {
  void after_queueing(StreamId id, std::unique_lock<std::mutex>&) override {
    Stream& stream = *streams_[id];
    if (!stream.worker.joinable()) {
      stream.worker = std::thread([this, &stream] { work(stream); });
    }
    stream.work.notify_one();
  }

  void after_query(const MarkerPtr&, std::unique_lock<std::mutex>&) override {}
  void demand(const MarkerPtr&, std::unique_lock<std::mutex>&) override {}

  void wake_all() override {
    marker_done_.notify_all();
    for (auto& stream : streams_) {
      stream->work.notify_all();
    }
  }

  void join() override {
    for (auto& stream : streams_) {
      if (stream->worker.joinable()) {
        stream->worker.join();
      }
    }
  }

  void work(Stream& stream) {
    prepare_thread();
    std::unique_lock lock(mutex_);
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

  void sleep(Stream& stream, std::unique_lock<std::mutex>& lock) {
    auto until = Clock::now() + std::chrono::microseconds(stream.jobs.front().duration_us);
    stream.jobs.pop_front();
    stream.is_running = true;
    while (!stopping_ && Clock::now() < until) {
      stream.work.wait_until(lock, until);
    }
    stream.is_running = false;
    ++num_run_;
  }
};

// ---- one thread that picks the next job ---------------------------------------------------------

// Runs nothing until somebody waits, or until its order says so.
class OrderedExecutor : public Executor {
 protected:
  // The stream whose head runs next while somebody waits for `marker`. At least one stream can run.
  virtual Stream* pick(const MarkerPtr& marker) = 0;

  // The stream that must go on so that the marker is reached.
  Stream* needed(MarkerPtr marker) {
    while (true) {
      Stream* stream = streams_[marker->stream].get();
      if (stream->jobs.empty() || stream->jobs.front().kind != Kind::wait) {
        return stream;
      }
      marker = stream->jobs.front().marker;
    }
  }

  std::vector<Stream*> runnable() {
    std::vector<Stream*> found;
    for (auto& stream : streams_) {
      if (can_run(*stream)) {
        found.push_back(stream.get());
      }
    }
    return found;
  }

  // Lets the executor run some jobs although nobody waits, and waits for them.
  void spend(int num_jobs, std::unique_lock<std::mutex>& lock) {
    if (num_jobs == 0) {
      return;
    }
    start();
    credit_ = num_jobs;
    work_.notify_one();
    credit_spent_.wait(lock, [&] { return credit_ == 0 || stopping_; });
  }

  void demand(const MarkerPtr& marker, std::unique_lock<std::mutex>&) override {
    if (marker->done || stopping_) {
      return;
    }
    start();
    wanted_.push_back(marker);
    work_.notify_one();
  }

  void after_queueing(StreamId, std::unique_lock<std::mutex>&) override {}

  // Code that asks again and again makes progress, as it would on a GPU.
  void after_query(const MarkerPtr& marker, std::unique_lock<std::mutex>& lock) override {
    if (++marker->num_queries % kQueriesUntilProgress == 0) {
      demand(marker, lock);
      marker_done_.wait(lock, [&] { return marker->done || stopping_; });
    }
  }

 private:
  static constexpr int kQueriesUntilProgress = 64;

  void start() {
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
  }

  void wake_all() override {
    marker_done_.notify_all();
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
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      pass_all_markers();
      std::erase_if(wanted_, [](const MarkerPtr& marker) { return marker->done.load(); });
      if (credit_ > 0 && runnable().empty()) {
        credit_ = 0;
      }
      if (credit_ == 0) {
        credit_spent_.notify_all();
      }
      if (wanted_.empty() && credit_ == 0) {
        work_.wait(lock);
        continue;
      }
      run_next(lock);
    }
  }

  void run_next(std::unique_lock<std::mutex>& lock) {
    Stream& stream = *pick(wanted_.empty() ? nullptr : wanted_.front());
    if (stream.jobs.front().kind == Kind::sleep) {
      stream.jobs.pop_front();
      ++num_run_;
    } else {
      run_head(stream, lock);
    }
    credit_ = std::max(credit_ - 1, 0);
  }

  void pass_all_markers() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (auto& stream : streams_) {
        moved |= pass_markers(*stream);
      }
    }
  }

  std::thread thread_;
  std::condition_variable work_;
  std::condition_variable credit_spent_;
  std::vector<MarkerPtr> wanted_;
  int credit_ = 0;
};

// Runs all that it can of its favourite kind whenever somebody waits; of the rest, only what
// somebody waits for. A stream that sleeps lets its favourites go first.
class LazyExecutor final : public OrderedExecutor {
 public:
  explicit LazyExecutor(Kind favourite) : favourite_(favourite) {}

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
  explicit RandomExecutor(uint64_t seed) : random_(seed) {}

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

  void after_queueing(StreamId, std::unique_lock<std::mutex>& lock) override {
    spend(draw_credit(), lock);
  }

  void after_query(const MarkerPtr&, std::unique_lock<std::mutex>& lock) override {
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

// ---- the one executor ---------------------------------------------------------------------------

std::unique_ptr<Executor> make_executor(const std::string& order) {
  if (order == "threads") {
    return std::make_unique<ThreadedExecutor>();
  }
  if (order == "compute-first") {
    return std::make_unique<LazyExecutor>(Kind::kernel);
  }
  if (order == "copies-first") {
    return std::make_unique<LazyExecutor>(Kind::copy);
  }
  const std::string random = "random:";
  const std::string seed = order.rfind(random, 0) == 0 ? order.substr(random.size()) : "";
  TORCH_CHECK(
      !seed.empty() && seed.size() < 19 &&
          std::all_of(seed.begin(), seed.end(), [](unsigned char c) { return std::isdigit(c); }),
      "The order \"", order, "\" is not threads, compute-first, copies-first or random:SEED, "
      "where SEED is a number");
  return std::make_unique<RandomExecutor>(std::stoull(seed));
}

// Executors are never destroyed: tensors outlive every static object of ours, and a thread of the
// host may still be in one that has been replaced.
std::atomic<Executor*>& executor_in_force() {
  static std::atomic<Executor*> in_force = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    Executor* made = make_executor("threads").release();
    made->new_stream();  // the default stream
    return made;
  }();
  return in_force;
}

Executor& executor() {
  return *executor_in_force();
}

thread_local StreamId current_stream_of_thread = kDefaultStream;

}  // namespace

void choose_order(const std::string& order) {
  refuse_if_forked();
  auto next = make_executor(order);
  finish_all();
  while (next->num_streams() < executor().num_streams()) {
    next->new_stream();  // streams that exist go on to exist
  }
  executor().shut_down();
  executor_in_force() = next.release();
}

StreamId new_stream() {
  refuse_if_forked();
  return executor().new_stream();
}

StreamId current_stream() {
  return current_stream_of_thread;
}

StreamId exchange_current_stream(StreamId stream) {
  return std::exchange(current_stream_of_thread, stream);
}

void queue_kernel(StreamId stream, const char* name, std::function<void()> run) {
  refuse_if_forked();
  executor().queue(stream, {Kind::kernel, name, std::move(run), nullptr});
}

void queue_copy(StreamId stream, const char* name, std::function<void()> run) {
  refuse_if_forked();
  executor().queue(stream, {Kind::copy, name, std::move(run), nullptr});
}

void queue_sleep(StreamId stream, int64_t duration_us) {
  refuse_if_forked();
  executor().queue(stream, {Kind::sleep, "sleep", nullptr, nullptr, duration_us});
}

MarkerPtr queue_mark(StreamId stream) {
  refuse_if_forked();
  auto marker = std::make_shared<Marker>(stream);
  executor().queue(stream, {Kind::mark, "mark", nullptr, marker});
  return marker;
}

void queue_wait(StreamId stream, const MarkerPtr& marker) {
  refuse_if_forked();
  executor().queue(stream, {Kind::wait, "wait", nullptr, marker});
}

bool is_done(const MarkerPtr& marker) {
  return is_forked() || executor().is_done(marker);
}

void finish(const MarkerPtr& marker) {
  refuse_if_forked();
  executor().finish({marker});
}

void finish_stream(StreamId stream) {
  finish(queue_mark(stream));
}

void finish_all() {
  refuse_if_forked();
  std::vector<MarkerPtr> markers;
  for (StreamId id : executor().busy_streams()) {
    markers.push_back(queue_mark(id));
  }
  executor().finish(markers);
}

bool is_idle(StreamId stream) {
  return is_forked() || executor().is_idle(stream);
}

void shut_down() {
  if (!is_forked()) {
    executor().shut_down();
  }
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
  return executor().num_run();
}

}  // namespace softdevice
