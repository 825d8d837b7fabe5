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

using Clock = std::chrono::steady_clock;

// Wait until `word` is no longer `old`: spinning for `spin`, then asleep. Returns how long it took, 0 if hardly at all.
inline Clock::duration await(const std::atomic<uint32_t>& word, uint32_t old, std::chrono::microseconds spin) {
  for (int i = 0; i < 256; ++i) {
    if (word.load(std::memory_order_acquire) != old) return {};
    relax();
  }
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != old) return Clock::now() - start;
      relax();
    }
  } while (Clock::now() - start < spin);
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
  return Clock::now() - start;
}

// A team of up to `size` threads, the caller included. Made anew in a child process after fork: threads do not survive.
//
// Where other programs want the same cores, threads that meet some hundred times per step wait for each other most of
// the time: whoever lost its core stops all of them. Work here gives the same bits on any number of threads, so the team
// gets smaller when more than a third of its time went into waiting, and tries again with more a while later.
class Pool {
 public:
  explicit Pool(int size) : size_(size < 1 ? 1 : size), active_(size_) {}
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Threads there are, and those that the next run uses.
  int size() const { return size_; }
  int active() const { return active_; }

  // Runs work(thread number) on the active threads; returns when all are done. One caller at a time.
  void run(const std::function<void(int)>& work) {
    if (size_ == 1) return work(0);
    const auto start = Clock::now();
    if (active_ == 1) {
      work(0);
    } else {
      if (!team_ || team_->pid != getpid()) begin();
      Team& team = *team_;
      team.work = &work;
      team.waited.store(0, std::memory_order_relaxed);
      team.members = active_;
      team.epoch.fetch_add(1, std::memory_order_release);
      team.epoch.notify_all();
      work(0);
      barrier();  // the others have left `work` as well
    }
    adapt(Clock::now() - start);
  }

  // All threads of the running function meet here.
  void barrier() {
    if (active_ == 1) return;
    Team& team = *team_;
    const uint32_t phase = team.phase.load(std::memory_order_relaxed);
    if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team.members) {
      team.arrived.store(0, std::memory_order_relaxed);
      team.phase.store(phase + 1, std::memory_order_release);
      team.phase.notify_all();
    } else {
      const auto waited = await(team.phase, phase, std::chrono::microseconds(1000));
      if (waited.count()) team.waited.fetch_add(waited.count(), std::memory_order_relaxed);
    }
  }

 private:
  struct Team {
    pid_t pid = getpid();
    const std::function<void(int)>* work = nullptr;
    int members = 0;
    std::vector<std::thread> threads;
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};
    alignas(64) std::atomic<long> waited{0};  // of all threads, in the clock's ticks
    std::atomic<bool> stopping{false};
  };

  void begin() {
    if (team_) team_.release();  // another process's threads: neither joined nor freed
    team_ = std::make_unique<Team>();
    for (int number = 1; number < size_; ++number) team_->threads.emplace_back([this, number] { serve(number); });
  }

  void serve(int number) {
    Team& team = *team_;
    for (uint32_t seen = 0;;) {
      // Between two steps of one engine the caller is in Python for a fraction of a millisecond.
      await(team.epoch, seen, std::chrono::microseconds(300));
      if (team.stopping.load(std::memory_order_acquire)) return;
      seen = team.epoch.load(std::memory_order_acquire);
      if (number >= team.members) continue;
      (*team.work)(number);
      barrier();
    }
  }

  // Called between runs by the one who runs: decides how many threads the next one gets.
  void adapt(Clock::duration took) {
    spent_ += took;
    if (active_ > 1) {
      const double waited = double(team_->waited.load(std::memory_order_relaxed)) / double(took.count()) / active_;
      waiting_ = (waiting_ + waited) / 2;
      if (waiting_ > 0.3) return resize(std::max(1, active_ / 2));
      if (spent_ > std::chrono::milliseconds(500)) pause_ = std::chrono::milliseconds(50);
    }
    if (active_ < size_ && spent_ > pause_) {
      pause_ = std::min<Clock::duration>(pause_ * 2, std::chrono::seconds(2));
      resize(std::min(size_, active_ * 2));
    }
  }

  void resize(int threads) {
    active_ = threads;
    waiting_ = 0;
    spent_ = {};
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
  int active_;
  double waiting_ = 0;                                         // share of the team's time, lately
  Clock::duration spent_{}, pause_ = std::chrono::milliseconds(50);  // since the last change; before trying more
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
