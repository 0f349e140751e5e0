// Sleeping until a word changes that processes share, and which core a thread is on: Linux's. Elsewhere a sleeper gives up
// its core for a moment.

#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <thread>

typedef std::atomic<uint32_t> FutexWord;
static_assert(FutexWord::is_always_lock_free && sizeof(FutexWord) == 4, "the kernel reads it");

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

// Returns at once where the word is not `seen`; else when it is woken, after `most`, or for no reason.
inline void futex_wait(FutexWord& word, uint32_t seen, std::chrono::microseconds most) {
  const timespec until = {time_t(most.count() / 1000000), long(most.count() % 1000000 * 1000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &until, nullptr, 0);
}
inline void futex_wait(FutexWord& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}
inline void futex_wake(FutexWord& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
inline int32_t core_now() { return int32_t(sched_getcpu()); }
#else
inline void futex_wait(FutexWord&, uint32_t, std::chrono::microseconds) { std::this_thread::yield(); }
inline void futex_wake(FutexWord&) {}
inline int32_t core_now() { return -1; }
#endif
