// Texts on their way from the steps to the thread that inserts them.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ngram {

enum class JobKind : int32_t {
  BEGIN,   // a text begins in `row`, with these tokens
  EXTEND,  // it goes on
  END,     // it ended
};

struct Job {
  JobKind kind;
  int32_t row;
  int32_t name;  // number of the namespace
  int32_t num_tokens;
};

// Bounded, except for END jobs, which release what the request took. Keeps its memory, so that steps do not allocate.
class InsertQueue {
 public:
  explicit InsertQueue(size_t max_tokens) : max_tokens_(max_tokens) {}

  struct Batch {
    std::vector<Job> jobs;
    std::vector<int32_t> tokens;  // of all jobs, one after the other
  };

  // False, and nothing queued, when there is no room. Nor is anything queued where memory runs out.
  bool push(const Job& job, const int32_t* tokens) {
    const size_t num_tokens = static_cast<size_t>(job.num_tokens);
    std::lock_guard lock(mutex_);
    if (job.kind != JobKind::END && num_tokens + pending_.tokens.size() > max_tokens_) return false;
    pending_.jobs.push_back(job);
    try {
      pending_.tokens.insert(pending_.tokens.end(), tokens, tokens + num_tokens);
    } catch (...) {
      pending_.jobs.pop_back();
      throw;
    }
    return true;
  }

  // While `is_busy` the thread polls, a millisecond after the last job and less often if there was none; otherwise it
  // sleeps until notified. Waking a thread can cost more than all lookups of a step.
  void set_busy(bool is_busy) {
    std::lock_guard lock(mutex_);
    if (is_busy_ == is_busy) return;
    is_busy_ = is_busy;
    work_.notify_all();
  }

  // Waits until nothing is queued or in work.
  void flush() {
    std::unique_lock lock(mutex_);
    ++num_flushing_;
    work_.notify_all();
    done_.wait(lock, [&] { return pending_.jobs.empty() && !is_working_; });
    --num_flushing_;
  }

  void stop() {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    work_.notify_all();
  }

  // For the thread: ends the last batch and waits for the next. False once stopped.
  bool take(Batch& batch) {
    batch.jobs.clear();
    batch.tokens.clear();
    std::unique_lock lock(mutex_);
    is_working_ = false;
    done_.notify_all();
    auto period = SHORTEST;
    for (bool is_due = false;;) {
      if (is_stopped_) return false;
      if (!pending_.jobs.empty() && (is_due || num_flushing_ > 0 || !is_busy_)) break;
      if (is_busy_) {
        work_.wait_for(lock, period);
        period = std::min(2 * period, LONGEST);
        is_due = true;
      } else {
        work_.wait(lock);
      }
    }
    is_working_ = true;
    std::swap(batch, pending_);
    return true;
  }

  size_t num_waiting() const {
    std::lock_guard lock(mutex_);
    return pending_.tokens.size();
  }

 private:
  static constexpr std::chrono::milliseconds SHORTEST{1}, LONGEST{4};

  const size_t max_tokens_;
  mutable std::mutex mutex_;
  std::condition_variable work_, done_;
  Batch pending_;
  int num_flushing_ = 0;
  bool is_busy_ = false, is_working_ = false, is_stopped_ = false;
};

}  // namespace ngram
