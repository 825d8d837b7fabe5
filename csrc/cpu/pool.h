// The threads of the hot path: all of them run the same function, meet at barriers, and sleep when there is no work.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anyrig {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Wait until `word` is no longer `old`: spinning for `spin`, then asleep.
inline void await(const std::atomic<uint32_t>& word, uint32_t old, std::chrono::microseconds spin) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      relax();
    }
    if (clock::now() - start > spin) break;
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

// A team of `size` threads, the caller included. Made anew in a child process after fork: threads do not survive it.
class Pool {
 public:
  explicit Pool(int size) : size_(size < 1 ? 1 : size) {}
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Runs work(thread number) on every thread; returns when all are done. One caller at a time.
  void run(const std::function<void(int)>& work) {
    if (size_ == 1) return work(0);
    if (!team_ || team_->pid != getpid()) start();
    Team& team = *team_;
    team.work = &work;
    team.epoch.fetch_add(1, std::memory_order_release);
    team.epoch.notify_all();
    work(0);
    barrier();  // the others have left `work` as well
  }

  // All threads of the running function meet here.
  void barrier() {
    if (size_ == 1) return;
    Team& team = *team_;
    const uint32_t phase = team.phase.load(std::memory_order_relaxed);
    if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      team.arrived.store(0, std::memory_order_relaxed);
      team.phase.store(phase + 1, std::memory_order_release);
      team.phase.notify_all();
    } else {
      await(team.phase, phase, std::chrono::microseconds(500));
    }
  }

 private:
  struct Team {
    pid_t pid = getpid();
    const std::function<void(int)>* work = nullptr;
    std::vector<std::thread> threads;
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};
    std::atomic<bool> stopping{false};
  };

  void start() {
    if (team_) team_.release();  // another process's threads: neither joined nor freed
    team_ = std::make_unique<Team>();
    for (int number = 1; number < size_; ++number) team_->threads.emplace_back([this, number] { serve(number); });
  }

  void serve(int number) {
    Team& team = *team_;
    for (uint32_t seen = 0;; ++seen) {
      // Between two steps of one engine the caller is in Python for a fraction of a millisecond.
      await(team.epoch, seen, std::chrono::microseconds(300));
      if (team.stopping.load(std::memory_order_acquire)) return;
      (*team.work)(number);
      barrier();
    }
  }

  void stop() {
    if (!team_) return;
    if (team_->pid != getpid()) {
      team_.release();
      return;
    }
    team_->stopping.store(true, std::memory_order_release);
    team_->epoch.fetch_add(1, std::memory_order_release);
    team_->epoch.notify_all();
    for (auto& thread : team_->threads) thread.join();
  }

  const int size_;
  std::unique_ptr<Team> team_;
};

// Hands out the numbers 0 .. count-1, each to one thread.
class Tickets {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace anyrig
