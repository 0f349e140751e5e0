// Where a step's time goes, for the benchmarks decode_parts and prefill_parts: counted only where JOULEBENCH_PARTS is
// defined. JOULEBENCH_PARTS_OF_CPU: only what the thread itself computes, whoever else has the core between.

#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

// The order is that of tests.benchmarks.decode_parts. kPacking: of many tokens, into panels, and there rounded.
enum Part {
  kInProjections, kHeads, kAttending, kOutProjection, kRouting, kGateUp, kDown, kNorms, kWaiting, kPacking, kHead,
  kParts
};

#ifdef JOULEBENCH_PARTS

inline double* part_seconds() {
  static double seconds[kParts];
  return seconds;
}

// The time of its own life, on the thread that calls the step, without that of parts that live in it.
class Timed {
 public:
  explicit Timed(Part part) : part_(part), outer_(innermost()), begin_(now()) { innermost() = this; }

  ~Timed() {
    const double lived = now() - begin_;
    part_seconds()[part_] += lived - within_;
    if (outer_) outer_->within_ += lived;
    innermost() = outer_;
  }

 private:
  static double now() {
#ifdef JOULEBENCH_PARTS_OF_CPU
    timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
#else
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
#endif
  }
  static Timed*& innermost() {
    static thread_local Timed* one = nullptr;
    return one;
  }

  Part part_;
  Timed* outer_;
  double begin_, within_ = 0;
};

#else

struct Timed {
  explicit Timed(Part) {}
};

#endif
