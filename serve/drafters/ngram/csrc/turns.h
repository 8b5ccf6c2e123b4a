// A mutex that steps get before the inserting thread.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace ngram {

// A thread that unlocks a std::mutex and locks it again usually beats one that sleeps on it. So the inserting thread,
// which holds the lock for a few tokens at a time, lets all others go first in between.
class Turns {
 public:
  void lock() {
    num_waiting_.fetch_add(1);
    for (int spin = 0; spin < SPINS; ++spin) {  // a slice takes microseconds, waking a thread many more
      if (mutex_.try_lock()) return void(num_waiting_.fetch_sub(1));
    }
    mutex_.lock();
    num_waiting_.fetch_sub(1);
  }
  void lock_last() {
    while (num_waiting_.load() > 0) std::this_thread::yield();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr int SPINS = 2000;
  std::mutex mutex_;
  std::atomic<int> num_waiting_{0};
};

}  // namespace ngram
