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

#include "futex.h"
#include "pool.h"

// The memory: a line of 64 bytes that says whether a rank was lost, and how many sleep until others have come; then of each
// rank a line with the number of its last sum and what it says of its core, and two boxes of `most_values` floats, taken in turn. A rank writes its box of a turn again two turns later; by then
// it has seen everybody's box of the turn between, which is written only after this one's boxes are read.
struct Exchange {
  // The ranks that have an expert, as far as they take turns: `n` of them from `first` of `takers` on. Those experts of a
  // token that the same ranks have are dealt to these by number.
  struct Holders {
    int64_t first, n;
  };

  unsigned char* memory;
  int64_t rank, n_ranks, most_values;
  uint64_t turn;            // sums so far
  double limit_s;           // so long one is waited for
  const int64_t* local_LE;  // where an expert stands among this rank's, -1 for elsewhere; read by a whole step only
  int32_t splits_attention;  // of a whole step: see split_attention
  const Holders* holders_LE;  // of a whole step too; null: every rank computes what it has
  const int64_t* takers;

  typedef std::atomic<uint64_t> Word;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "processes share it");
  // Odd while the rank waits and lends its core, of this number.
  struct Core {
    FutexWord lent;
    std::atomic<int32_t> number;
  };
  static constexpr auto kLooks = std::chrono::microseconds(50), kSleeps = std::chrono::microseconds(20000);

  int64_t box_bytes() const { return (most_values * int64_t(sizeof(float)) + 63) / 64 * 64; }
  unsigned char* part(int64_t of) const { return memory + 64 + of * (64 + 2 * box_bytes()); }
  Word& lost() const { return *reinterpret_cast<Word*>(memory); }
  FutexWord& n_asleep() const { return *reinterpret_cast<FutexWord*>(memory + sizeof(Word)); }
  Word& written(int64_t of) const { return *reinterpret_cast<Word*>(part(of)); }
  // The half of it that changes with every sum.
  FutexWord& low_word(int64_t of) const {
    return reinterpret_cast<FutexWord*>(part(of))[__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 1];
  }
  Core& core(int64_t of) const { return *reinterpret_cast<Core*>(part(of) + sizeof(Word)); }
  float* box(int64_t of) const { return reinterpret_cast<float*>(part(of) + 64 + int64_t(turn & 1) * box_bytes()); }

  // From now until `take_back` the caller waits, and helpers of the other ranks may have its core: see lending.h.
  void lend() const {
    core(rank).number.store(core_now(), std::memory_order_relaxed);
    core(rank).lent.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(core(rank).lent);
  }
  void take_back() const { core(rank).lent.fetch_add(1, std::memory_order_seq_cst); }

  // Whether that rank has put its part in. It comes in microseconds or a layer's imbalance: first it is looked for, then
  // the core is left to who can use it.
  bool has_come(int64_t of) const {
    const auto come = [&] { return written(of).load(std::memory_order_seq_cst) >= turn; };
    const auto begin = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 32; i++) {
        if (come()) return true;
        relax();
      }
    } while (std::chrono::steady_clock::now() < begin + kLooks);
    lend();
    n_asleep().fetch_add(1, std::memory_order_seq_cst);
    bool is_lost = false;
    while (!is_lost) {
      const uint32_t seen = low_word(of).load(std::memory_order_seq_cst);
      if (come()) break;
      futex_wait(low_word(of), seen, kSleeps);
      is_lost = lost().load(std::memory_order_acquire) ||
                std::chrono::steady_clock::now() > begin + std::chrono::duration<double>(limit_s);
    }
    n_asleep().fetch_sub(1, std::memory_order_seq_cst);
    take_back();
    return !is_lost;
  }

  // Gives the others own[n], and take(rank, values) what each has given, in their order, its own too. False where a rank
  // is lost.
  template <class Take>
  bool pass(const float* own, int64_t n, const Take& take) {
    turn++;
    std::memcpy(box(rank), own, size_t(n) * sizeof(float));
    written(rank).store(turn, std::memory_order_seq_cst);
    if (n_asleep().load(std::memory_order_seq_cst)) futex_wake(low_word(rank));
    for (int64_t of = 0; of < n_ranks; of++) {
      if (!has_come(of)) return false;
      take(of, static_cast<const float*>(box(of)));
    }
    return true;
  }

  // values[n] becomes the sum over the ranks, in their order: all have the same bits.
  bool sum(float* values, int64_t n) {
    return pass(values, n, [&](int64_t of, const float* part) {
      if (of == 0) std::memcpy(values, part, size_t(n) * sizeof(float));
      else
        for (int64_t i = 0; i < n; i++) values[i] += part[i];
    });
  }

  // Of n things that are shared out in order: the first of that rank's, which is the end of those of the rank before.
  int64_t first_of(int64_t of, int64_t n) const { return n * of / n_ranks; }
};
