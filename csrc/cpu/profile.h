// Where the time of the decoder's steps goes.
#pragma once

#include <chrono>

#include "pool.h"

namespace anyrig {

// Seconds that the calling thread spent in each part of the steps so far, waiting for the others included.
struct Profile {
  enum Part { embed, norm, qkv, place, attention, o, gate_up, down, head, PARTS_OF_STEP };
  static constexpr const char* names[PARTS_OF_STEP] = {"embed", "norm", "qkv",  "place", "attention",
                                                       "o",     "gate_up", "down", "head"};
  double seconds[PARTS_OF_STEP] = {};
  Clock::time_point last;

  void start() { last = Clock::now(); }
  void end(Part part) {
    const auto now = Clock::now();
    const double spent = std::chrono::duration<double>(now - last).count();
    seconds[part] += spent;
    last = now;
  }
};

}  // namespace anyrig
