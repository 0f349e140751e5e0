// A rank that waits for the others lends them its core. Their helpers take chunks of their own jobs there: a layer then takes
// as long as the work of all ranks over all cores, and not as long as the work of the busiest rank on its own.
//
// A rank has a helper for each other rank. It goes to the core of the one that waits, and to no other: the rank's own thread
// computes elsewhere. Who waits is woken by what is sent after a job, and a job ends with its last chunk: so whoever lent a
// core finds it free again.

#pragma once

#include <system_error>
#include <thread>
#include <vector>

#include "exchange.h"
#include "futex.h"
#include "pool.h"

#if defined(__linux__)
class Helpers {
 public:
  explicit Helpers(const Exchange& exchange) : exchange_(exchange) {
    sched_getaffinity(0, sizeof usable_, &usable_);
    try {
      for (int64_t of = 0; of < exchange.n_ranks; of++)
        if (of != exchange.rank) threads_.emplace_back(&Helpers::attend, this, of);
    } catch (const std::system_error&) {  // the system starts no more: nobody helps the ranks that are left
    }
    pool().expect_helpers(int(threads_.size()));
  }

  ~Helpers() {
    ends_.store(true, std::memory_order_seq_cst);
    // One may be about to sleep: woken until none is left.
    while (n_ended_.load(std::memory_order_acquire) < threads_.size()) {
      for (int64_t of = 0; of < exchange_.n_ranks; of++) futex_wake(exchange_.core(of).lent);
      pool().wake_helpers();
      std::this_thread::yield();
    }
    for (std::thread& thread : threads_) thread.join();
    pool().expect_helpers(-int(threads_.size()));
  }

 private:
  void attend(int64_t of) {
    FutexWord& lent = exchange_.core(of).lent;
    int32_t there = -1;
    while (!ends_.load(std::memory_order_seq_cst)) {
      const uint32_t now = lent.load(std::memory_order_seq_cst);
      if (now % 2 && goes_to(exchange_.core(of).number.load(std::memory_order_relaxed), there))
        pool().help([&] {
          return !ends_.load(std::memory_order_seq_cst) && lent.load(std::memory_order_seq_cst) == now;
        });
      // Of a core that cannot be had, or is taken back: until it is lent again.
      if (lent.load(std::memory_order_seq_cst) == now && !ends_.load(std::memory_order_seq_cst)) futex_wait(lent, now);
    }
    n_ended_.fetch_add(1, std::memory_order_release);
  }

  // Only to cores that this process may use.
  bool goes_to(int32_t core, int32_t& there) {
    if (core == there) return true;
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &usable_)) return false;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    if (sched_setaffinity(0, sizeof only, &only)) return false;
    there = core;
    return true;
  }

  const Exchange exchange_;
  cpu_set_t usable_ = {};
  std::atomic<bool> ends_{false};
  std::atomic<size_t> n_ended_{0};
  std::vector<std::thread> threads_;
};
#else
// Nothing binds threads there.
struct Helpers {
  explicit Helpers(const Exchange&) {}
};
#endif
