// Sums over the processes ("ranks") of one machine, through memory that all of them map: a sum of a few thousand values
// takes microseconds, where a message takes a system call and another thread's waking.
//
// Legend: E experts, L sparse layers.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "pool.h"

// The memory: a line of 64 bytes that says whether a rank was lost; then of each rank a line with the number of its last
// sum, and two boxes of `most_values` floats, taken in turn. A rank writes its box of a turn again two turns later; by then
// it has seen everybody's box of the turn between, which is written only after this one's boxes are read.
struct Exchange {
  unsigned char* memory;
  int64_t rank, n_ranks, most_values;
  uint64_t turn;            // sums so far
  double limit_s;           // so long one is waited for
  const int64_t* local_LE;  // where an expert stands among this rank's, -1 for elsewhere; read by a whole step only

  typedef std::atomic<uint64_t> Word;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "processes share it");

  int64_t box_bytes() const { return (most_values * int64_t(sizeof(float)) + 63) / 64 * 64; }
  unsigned char* part(int64_t of) const { return memory + 64 + of * (64 + 2 * box_bytes()); }
  Word& lost() const { return *reinterpret_cast<Word*>(memory); }
  Word& written(int64_t of) const { return *reinterpret_cast<Word*>(part(of)); }
  float* box(int64_t of) const { return reinterpret_cast<float*>(part(of) + 64 + int64_t(turn & 1) * box_bytes()); }

  // Whether that rank has put its part in. It comes in microseconds or a layer's imbalance: first it is looked for, then
  // the core is left to others between two looks.
  bool has_come(int64_t of) const {
    for (int i = 0; i < 4000; i++) {
      if (written(of).load(std::memory_order_acquire) >= turn) return true;
      relax();
    }
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
    while (written(of).load(std::memory_order_acquire) < turn) {
      if (lost().load(std::memory_order_acquire) || std::chrono::steady_clock::now() > until) return false;
      std::this_thread::yield();
    }
    return true;
  }

  // values[n] becomes the sum over the ranks, in their order: all have the same bits. False where a rank is lost.
  bool sum(float* values, int64_t n) {
    turn++;
    std::memcpy(box(rank), values, size_t(n) * sizeof(float));
    written(rank).store(turn, std::memory_order_release);
    for (int64_t of = 0; of < n_ranks; of++) {
      if (!has_come(of)) return false;
      const float* const part = box(of);
      if (of == 0) std::memcpy(values, part, size_t(n) * sizeof(float));
      else
        for (int64_t i = 0; i < n; i++) values[i] += part[i];
    }
    return true;
  }
};
