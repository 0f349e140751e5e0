// Threads that share the chunks of one job. Nobody waits for a thread that has not taken a chunk: where a neighbour
// keeps a core busy, the others finish the job. With OpenMP's barrier the same product waits a scheduler's time slice
// for every thread of the team: 6 ms instead of 0.1 ms per call was seen with one busy neighbour on two cores.
//
// The system may put a worker on the caller's core, and leaves it there as long as all cores are busy. A worker that finds
// itself there takes no chunk: what it computed or looked for would be the caller's time.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>

#include "futex.h"
#include "parts.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
inline int32_t thread_id() { return int32_t(syscall(SYS_gettid)); }
#else
inline int32_t thread_id() { return -1; }  // nothing binds threads there
#endif

#if defined(__x86_64__)
#include <immintrin.h>
inline void relax() { _mm_pause(); }
#else
inline void relax() { std::atomic_signal_fence(std::memory_order_seq_cst); }
#endif

class Pool {
 public:
  typedef void (*Body)(const void* context, int64_t chunk);

  // body(context, c) for c in 0..n_chunks-1, on up to n_threads threads, the caller's among them.
  void run(int64_t n_chunks, int n_threads, Body body, const void* context) {
    // Two Python threads may call at once; the second then works alone.
    std::unique_lock<std::mutex> only(running_, std::try_to_lock);
    const bool is_shared = n_threads > 1 || n_helpers_.load(std::memory_order_relaxed) > 0;
    if (!is_shared || n_chunks <= 1 || n_chunks >= kMaxChunks || !only.owns_lock()) {
      for (int64_t c = 0; c < n_chunks; c++) body(context, c);
      return;
    }
    choose(n_threads - 1);
    caller_core_.store(core_now(), std::memory_order_relaxed);
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    generation_++;
    tickets_.store((generation_ << 32) | uint64_t(n_chunks) << 16, std::memory_order_seq_cst);
    if (n_asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(sleeping_);
      wake_.notify_all();
    }
    while (take_one()) {
    }
    const Timed timed(kWaiting);
    wait_for(n_chunks);
  }

  // Helpers are threads that take chunks only at times, beside the workers: those of lending.h. `n` more of them.
  void expect_helpers(int n) { n_helpers_.fetch_add(n, std::memory_order_relaxed); }

  // A helper's: takes chunks while `may()`. It sleeps where there is none, until the next job or `wake_helpers`.
  template <class May>
  void help(const May& may) {
    while (may()) {
      const auto until = std::chrono::steady_clock::now() + kHelperLooks;
      while (!has_chunk(tickets_.load(std::memory_order_acquire)) && std::chrono::steady_clock::now() < until) relax();
      if (take_one()) continue;
      std::unique_lock<std::mutex> lock(sleeping_);
      n_asleep_.fetch_add(1, std::memory_order_seq_cst);
      if (!has_chunk(tickets_.load(std::memory_order_seq_cst)) && may()) wake_.wait(lock);
      n_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void wake_helpers() {
    std::lock_guard<std::mutex> lock(sleeping_);
    wake_.notify_all();
  }

  // How long a worker looks for the next job before it sleeps.
  void spin(int64_t spin_us) { spin_us_.store(spin_us, std::memory_order_relaxed); }

  // Chooses the workers of the jobs to come, n_threads - 1 of them, and parks the others: those sleep, and no job wakes
  // them. Writes the system's ids of up to n_ids workers, the chosen ones first, and returns how many workers there are:
  // fewer than chosen where the system starts no more. Asks it anew.
  int32_t choose(int32_t n_threads, int32_t* ids, int32_t n_ids) {
    std::lock_guard<std::mutex> only(running_);
    most_workers_ = kAny;
    choose(n_threads > 1 ? n_threads - 1 : 0);
    for (int i = 0; i < n_workers_ && i < n_ids; i++) {
      while (ids_[size_t(i)].load(std::memory_order_acquire) == 0) std::this_thread::yield();
      ids[i] = ids_[size_t(i)].load(std::memory_order_relaxed);
    }
    return n_workers_;
  }

 private:
  static constexpr int64_t kMaxChunks = 1 << 16;
  static constexpr int kAny = std::numeric_limits<int>::max();
  // Of the core that a helper is on another thread wants to be woken.
  static constexpr auto kHelperLooks = std::chrono::microseconds(5);
  static constexpr int64_t kSpinUs = 1000;  // longer than what lies between two tokens
  // On the caller's core a worker looks for a job no longer than this.
  static constexpr auto kLooksInTheWay = std::chrono::microseconds(50);
  // For so much of each while it stands in line there, and lets the caller go first: the system moves who waits to a core
  // that is free, at its next tick, and never who sleeps. Then no core is free: it sleeps, and looks again. To wake up and
  // look takes some microseconds.
  static constexpr auto kInLine = std::chrono::microseconds(6000);
  static constexpr auto kWhile = std::chrono::microseconds(60000);
  static constexpr auto kOutOfTheWay = std::chrono::microseconds(2000);
  // Who looked so lately was not taken off its core since. So many doubts, and numbers of cores are believed no more.
  static constexpr auto kLately = std::chrono::microseconds(20);
  static constexpr int kDoubts = 4;
  // So long the caller looks for the last chunks of others; a chunk takes a few microseconds where tokens are decoded. Then
  // it sleeps: a worker that the system took off its core with a chunk in hand may go on where the caller was.
  static constexpr auto kWait = std::chrono::microseconds(200);

  // A ticket word is generation, number of chunks, next chunk. Whoever moves `next` on owns that chunk, and until it is
  // done the job cannot end: body_ and context_ are then those of this generation.
  static bool has_chunk(uint64_t word) { return (word & 0xFFFF) < (word >> 16 & 0xFFFF); }

  bool take_one() {
    uint64_t word = tickets_.load(std::memory_order_acquire);
    do {
      if (!has_chunk(word)) return false;
    } while (!tickets_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel));
    body_(context_, int64_t(word & 0xFFFF));
    if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == int64_t(word >> 16 & 0xFFFF) &&
        caller_sleeps_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(sleeping_);
      finished_.notify_one();
    }
    return true;
  }

  void wait_for(int64_t n_chunks) {
    const auto until = std::chrono::steady_clock::now() + kWait;
    while (done_.load(std::memory_order_acquire) < n_chunks) {
      for (int i = 0; i < 32 && done_.load(std::memory_order_acquire) < n_chunks; i++) relax();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleeping_);
      caller_sleeps_.store(true, std::memory_order_seq_cst);
      finished_.wait(lock, [&] { return done_.load(std::memory_order_seq_cst) >= n_chunks; });
      caller_sleeps_.store(false, std::memory_order_relaxed);
    }
  }

  // `running_` is held: no job is under way whose workers these are.
  void choose(int n_workers) {
    for (; n_workers_ < std::min(n_workers, most_workers_); n_workers_++) {
      ids_.emplace_back(0);
      try {
        std::thread(&Pool::work, this, n_workers_, &ids_.back()).detach();
      } catch (const std::system_error&) {  // a limit of this user's or container's; who is there computes
        ids_.pop_back();
        most_workers_ = n_workers_;
        break;
      }
    }
    if (n_chosen_.load(std::memory_order_relaxed) == n_workers) return;
    std::lock_guard<std::mutex> lock(sleeping_);
    n_chosen_.store(n_workers, std::memory_order_seq_cst);
    wake_.notify_all();
    parked_.notify_all();
  }

  bool is_chosen(int number) { return number < n_chosen_.load(std::memory_order_seq_cst); }

  bool is_called(int number) { return has_chunk(tickets_.load(std::memory_order_seq_cst)) && is_chosen(number); }

  // On the core on which the caller began its job. Where nobody tells cores, it is not known.
  bool is_in_the_way() const {
    if (n_doubts_.load(std::memory_order_relaxed) >= kDoubts) return false;
    const int32_t core = core_now();
    return core >= 0 && core == caller_core_.load(std::memory_order_relaxed);
  }

  // Until there is a job, or it is time to sleep.
  void look(int number) {
    const bool was_in_the_way = is_in_the_way();
    const auto spin = std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
    auto now = std::chrono::steady_clock::now();
    const auto until = now + (was_in_the_way ? std::min(spin, kLooksInTheWay) : spin);
    while (is_chosen(number) && !is_called(number) && now < until) {
      for (int i = 0; i < 32 && !is_called(number); i++) relax();
      const auto before = now;
      now = std::chrono::steady_clock::now();
      // Some sandboxes make up the numbers of cores. A job that begins under the eyes of a worker begins on another core.
      if (was_in_the_way && is_called(number) && is_in_the_way() && now < before + kLately)
        n_doubts_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // How long a worker stood in line since `began`, of up to kWhile.
  struct InLine {
    std::chrono::steady_clock::time_point began;
    std::chrono::steady_clock::duration stood{0};
  };

  // What a worker on the caller's core does while there is a job: it stands in line, and then sleeps.
  void let_caller_go_first(int number, InLine* lately) {
    const auto begin = std::chrono::steady_clock::now();
    auto now = begin;
    if (begin > lately->began + kWhile) *lately = {begin};
    for (; is_called(number) && is_in_the_way() && lately->stood + (now - begin) < kInLine;
         now = std::chrono::steady_clock::now())
      std::this_thread::yield();
    lately->stood += now - begin;
    if (is_called(number) && is_in_the_way()) std::this_thread::sleep_for(kOutOfTheWay);
  }

  void work(int number, std::atomic<int32_t>* id) {
    id->store(thread_id(), std::memory_order_release);
    InLine lately;
    for (;;) {
      look(number);
      if (!is_called(number)) {
        std::unique_lock<std::mutex> lock(sleeping_);
        if (is_chosen(number)) {
          n_asleep_.fetch_add(1, std::memory_order_seq_cst);
          // Woken too late for a job, it must not sleep on: the next job comes in a moment.
          if (!is_called(number)) wake_.wait(lock);
          n_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        } else {
          parked_.wait(lock, [&] { return is_chosen(number); });
        }
      }
      while (is_called(number) && !is_in_the_way() && take_one()) {
      }
      if (is_called(number) && is_in_the_way()) let_caller_go_first(number, &lately);
    }
  }

  std::mutex running_, sleeping_;
  std::condition_variable wake_, parked_, finished_;
  std::deque<std::atomic<int32_t>> ids_;  // of the workers; 0 until one runs
  std::atomic<uint64_t> tickets_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> spin_us_{kSpinUs};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<int32_t> caller_core_{-1};
  std::atomic<int> n_asleep_{0}, n_chosen_{0}, n_helpers_{0}, n_doubts_{0};
  uint64_t generation_ = 0;
  int n_workers_ = 0, most_workers_ = kAny;
  Body body_ = nullptr;
  const void* context_ = nullptr;
};

// Never destroyed: its threads live until the process ends. A process that is forked off has none of them, and takes a new
// one: locks that they held would be held there for ever.
inline Pool& pool() {
  static Pool* only = nullptr;
  static const int told = (only = new Pool, pthread_atfork(nullptr, nullptr, [] { only = new Pool; }));
  (void)told;
  return *only;
}

// body(begin, end) over 0..n-1 in contiguous chunks of about `chunk` units.
template <class F>
void in_chunks(int64_t n, int64_t chunk, int n_threads, const F& body) {
  struct Split {
    const F* body;
    int64_t n, n_chunks;
  };
  const int64_t wanted = (n + chunk - 1) / chunk;
  const Split split = {&body, n, wanted < 4096 ? wanted : 4096};
  pool().run(split.n_chunks, n_threads, [](const void* context, int64_t c) {
    const Split& s = *static_cast<const Split*>(context);
    (*s.body)(s.n * c / s.n_chunks, s.n * (c + 1) / s.n_chunks);
  }, &split);
}
