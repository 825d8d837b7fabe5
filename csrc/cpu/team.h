// The teams of threads of this process.
#pragma once

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "arrays.h"
#include "pool.h"
#include "sample.h"

namespace anyrig {

// One team per size, shared by everything in the process; a caller holds it for one step.
struct Team {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<std::mutex> busy;
  std::shared_ptr<std::vector<DrawScratch>> draws;

  // What all teams hang on; never freed: threads may outlive static objects.
  struct Register {
    std::mutex guard;
    std::map<int, Team> teams;
  };
  static Register& all() {
    static auto* teams = [] {
      auto* made = new Register;
      // A thread of the parent may have held these at the time of the fork; in the child nobody does.
      pthread_atfork(nullptr, nullptr, [] {
        new (&all().guard) std::mutex;
        for (auto& [size, team] : all().teams) new (team.busy.get()) std::mutex;
      });
      return made;
    }();
    return *teams;
  }

  static Team of(int threads) {
    if (threads < 1 || threads > Pool::MOST)
      refuse("threads must be 1 to " + std::to_string(Pool::MOST) + ". Given: " + std::to_string(threads));
    std::lock_guard lock(all().guard);
    auto& team = all().teams[threads];
    if (!team.pool)
      team = {std::make_shared<Pool>(threads), std::make_shared<std::mutex>(),
              std::make_shared<std::vector<DrawScratch>>(threads)};
    return team;
  }
};

}  // namespace anyrig
