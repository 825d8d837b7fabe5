// The threads of the hot path: all of them run the same function, meet at barriers, and sleep when there is no work.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <system_error>
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
  static constexpr int MOST = 1000;  // threads

  explicit Pool(int size) : size_(size < 1 ? 1 : size > MOST ? MOST : size), active_(size_) {}
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Threads there are at most; those that the next run uses, or the present one does.
  int size() const { return size_; }
  int active() const { return members_ ? members_ : active_; }

  // Runs work(thread number) on the active threads, `most` of them; returns when all are done. One caller at a time;
  // `work` must not throw.
  void run(const std::function<void(int)>& work, int most = MOST) {
    if (active_ > 1 && most > 1 && (!team_ || team_->pid != getpid())) begin();
    const auto start = Clock::now();
    members_ = std::min(active_, std::max(most, 1));
    if (members_ == 1) {
      work(0);
    } else {
      Team& team = *team_;
      team.work = &work;
      // One word says that there is work and for whom: a thread that looks late sees either both or neither.
      team.call.store(((team.call.load(std::memory_order_relaxed) >> BITS) + 1) << BITS | uint32_t(members_),
                      std::memory_order_release);
      team.call.notify_all();
      work(0);
      barrier();  // the others have left `work` as well
    }
    const bool whole = members_ == active_;
    members_ = 0;
    if (size_ > 1) adapt(Clock::now() - start, whole);
  }

  // All threads of the running function meet here.
  void barrier() {
    if (members_ == 1) return;
    Team& team = *team_;
    const uint32_t phase = team.phase.load(std::memory_order_relaxed);
    const int members = members_;
    if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      team.arrived.store(0, std::memory_order_relaxed);
      team.phase.store(phase + 1, std::memory_order_release);
      team.phase.notify_all();
    } else {
      const auto waited = await(team.phase, phase, std::chrono::microseconds(1000));
      if (waited.count()) team.waited.fetch_add(waited.count(), std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int BITS = 10;  // of the number of members in `call`

  struct Team {
    pid_t pid = getpid();
    const std::function<void(int)>* work = nullptr;
    std::vector<std::thread> threads;
    alignas(64) std::atomic<uint32_t> call{0};  // runs so far, and the members of the last one; no members: leave
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};
    alignas(64) std::atomic<long> waited{0};  // of all threads so far, in the clock's ticks
  };

  void begin() {
    if (team_) team_.release();  // another process's threads: neither joined nor freed
    team_ = std::make_unique<Team>();
    counted_ = 0;
    // Signals are for the threads that Python knows: one that ended here would not wake a prompt that waits for a key.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int number = 1; number < size_; ++number)
        team_->threads.emplace_back([this, number, team = team_.get()] { serve(*team, number); });
    } catch (const std::system_error&) {  // a limit on threads: go on with those there are
      size_ = int(team_->threads.size()) + 1;
      active_ = std::min(active_, size_);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(Team& team, int number) {
    for (uint32_t seen = 0;;) {
      // Between two steps of one engine the caller is in Python for a fraction of a millisecond.
      await(team.call, seen, std::chrono::microseconds(300));
      seen = team.call.load(std::memory_order_acquire);
      const int members = int(seen & ((1u << BITS) - 1));
      if (members == 0) return;
      if (number >= members) continue;
      (*team.work)(number);
      barrier();
    }
  }

  // Called after a run by the one who runs: decides how many threads the next one gets. Runs of fewer threads than are
  // active say nothing about those.
  void adapt(Clock::duration took, bool whole) {
    spent_ += took;
    if (active_ > 1 && whole) {
      busy_ += took;
      if (busy_ >= WINDOW) {
        const long waited = team_->waited.load(std::memory_order_relaxed);
        const double share = double(waited - counted_) / double(busy_.count()) / active_;
        counted_ = waited, busy_ = {};
        waiting_ = (waiting_ + share) / 2;
        if (waiting_ > 0.35) return resize(std::max(1, active_ / 2));
      }
      if (spent_ > std::chrono::milliseconds(500)) pause_ = FIRST_PAUSE;
    }
    if (active_ < size_ && spent_ > pause_) {
      pause_ = std::min<Clock::duration>(pause_ * 2, std::chrono::seconds(2));
      resize(std::min(size_, active_ * 2));
    }
  }

  void resize(int threads) {
    active_ = threads;
    waiting_ = 0;
    spent_ = busy_ = {};
    if (team_) counted_ = team_->waited.load(std::memory_order_relaxed);
  }

  void stop() {
    if (!team_) return;
    if (team_->pid != getpid()) {
      team_.release();
      return;
    }
    team_->call.store(((team_->call.load() >> BITS) + 1) << BITS, std::memory_order_release);
    team_->call.notify_all();
    for (auto& thread : team_->threads) thread.join();
  }

  static constexpr Clock::duration FIRST_PAUSE = std::chrono::milliseconds(50);
  // Long enough that somebody who takes a core for a moment, as monitors do ten times a second, changes nothing.
  static constexpr Clock::duration WINDOW = std::chrono::milliseconds(50);

  int size_;
  int active_;
  int members_ = 0;                                   // of the present run
  double waiting_ = 0;                                // share of the team's time, lately
  Clock::duration spent_{}, busy_{}, pause_ = FIRST_PAUSE;  // since the last change; counted; before trying more
  long counted_ = 0;                                  // of Team::waited
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
