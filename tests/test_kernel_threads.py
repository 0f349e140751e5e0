"""Which threads take chunks of the kernels' jobs: small programs of their own, compiled with the pool."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engines.kernels.compile import SOURCE

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <sched.h>
extern "C" int told_core();
#ifdef TOLD
#define sched_getcpu told_core
#endif
#include "pool.h"

static std::atomic<int> n_threads_seen{0};
extern "C" int told_core() {
  // One number for all, or one for each.
  static thread_local const int own = n_threads_seen++;
#ifdef TOLD
  return TOLD ? own : 0;
#else
  return own;
#endif
}

int main(int, char** argument) {
  const int64_t n_jobs = std::atoll(argument[1]), n_chunks = 16;
  const int32_t caller = thread_id();
  std::atomic<int64_t> by_workers{0}, total{0};
  int64_t job = 0;
  // All of them, or until a worker has taken a chunk.
  for (; n_jobs ? job < n_jobs : by_workers == 0; job++) {
    // As between two tokens.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(n_jobs ? 0 : 30);
    while (std::chrono::steady_clock::now() < until) {
    }
    in_chunks(n_chunks, 1, 2, [&](int64_t begin, int64_t end) {
      double x = 1;
      for (int i = 0; i < 2000; i++) x = x * 0.5 + 1;
      for (int64_t c = begin; c < end; c++) total += c + (x > 3);
      by_workers += thread_id() != caller;
    });
  }
  std::printf("%d %lld\\n", total == job * n_chunks * (n_chunks - 1) / 2, (long long)by_workers.load());
}
"""


def answers(folder: Path, n_jobs: int, *flags: str, cores: set[int] | None = None) -> tuple[bool, int]:
    """Whether each chunk was computed once, and how many a worker took. n_jobs 0: until one did."""
    source, program = folder / "pool.cpp", folder / "pool"
    source.write_text(PROGRAM)
    command = ["c++", "-O1", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-I", str(SOURCE.parent), str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    bind = None if cores is None else lambda: os.sched_setaffinity(0, cores)
    done = subprocess.run([program, str(n_jobs)], capture_output=True, text=True, check=True, preexec_fn=bind)
    is_whole, by_workers = done.stdout.split()
    return is_whole == "1", int(by_workers)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_worker_on_the_callers_core_takes_no_chunk(tmp_path: Path) -> None:
    assert answers(tmp_path, 3000, cores={min(os.sched_getaffinity(0))}) == (True, 0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nobody asks for cores there")
def test_worker_that_is_told_another_core_takes_chunks(tmp_path: Path) -> None:
    is_whole, by_workers = answers(tmp_path, 0, "-DTOLD=1")
    assert is_whole
    assert by_workers > 0


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="of two cores and more"
)
def test_worker_comes_to_work_where_all_threads_are_told_one_core(tmp_path: Path) -> None:
    """As some sandboxes do. It sees jobs begin while it looks, which they could not on its core."""
    is_whole, by_workers = answers(tmp_path, 0, "-DTOLD=0")
    assert is_whole
    assert by_workers > 0
