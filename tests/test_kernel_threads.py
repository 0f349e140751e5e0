"""Which threads take chunks of the kernels' jobs: small programs of their own, compiled with the pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.kernels.compile import SOURCES

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


def built(folder: Path, text: str, *flags: str) -> Path:
    source, program = folder / "pool.cpp", folder / "pool"
    source.write_text(text)
    command = ["c++", "-O1", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-I", str(SOURCES[0].parent), str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def answers(folder: Path, n_jobs: int, *flags: str, cores: set[int] | None = None) -> tuple[bool, int]:
    """Whether each chunk was computed once, and how many a worker took. n_jobs 0: until one did."""
    program = built(folder, PROGRAM, *flags)
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


LIMITED = """
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sys/wait.h>
#include "pool.h"
#ifdef REFUSED
#include <cerrno>
extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) { return EAGAIN; }
#endif

static int64_t sum() {
  std::atomic<int64_t> total{0};
  for (int job = 0; job < 100; job++)
    in_chunks(16, 1, 4, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; c++) total += c;
    });
  return total;
}

int main() {
  std::printf("%lld %d\\n", (long long)sum(), pool().choose(4, nullptr, 0));
  const auto tasks = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); };
  const auto n_threads = tasks();
#ifndef REFUSED
  // Another thread is in the middle of jobs, most of the time.
  std::thread([] { for (;;) sum(); }).detach();
#endif
  for (int child = 0; child < 50; child++) {
    const pid_t started = fork();
    if (started == 0) {
      alarm(20);
      _exit(sum() == 12000 && tasks() == n_threads ? 0 : 1);
    }
    int status = 0;
    waitpid(started, &status, 0);
    if (status) std::printf("child %d: %d\\n", child, status);
  }
  std::fflush(stdout);
  _exit(0);
}
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system lists no threads")
@pytest.mark.parametrize(("flags", "n_workers"), [([], 3), (["-DREFUSED"], 0)])
def test_threads_that_cannot_start_are_done_without_and_a_forked_process_has_its_own(
    tmp_path: Path, flags: list[str], n_workers: int
) -> None:
    done = subprocess.run([built(tmp_path, LIMITED, *flags)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{100 * sum(range(16))} {n_workers}\n"


REFUSING = """
#include <cerrno>
#include <dlfcn.h>
#include <pthread.h>
extern "C" { int refuses = 0; }
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*body)(void*), void* of) {
  static const auto real = (decltype(&pthread_create))dlsym(RTLD_NEXT, "pthread_create");
  return refuses ? EAGAIN : real(thread, how, body, of);
}
"""
ENGINES = """
import ctypes, torch
from engines.base import unheard
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.records import Request
checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(40, 41), max_new_tokens=4)
ctypes.c_int.in_dll(ctypes.CDLL(None), "refuses").value = 1
for n in (3, 1):
    try:
        print(len(ReferenceEngine(checkpoint, DroplessParameters(), threads=n).run(request, unheard).token_ids))
    except EngineError as error:
        print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
def test_an_engine_whose_threads_cannot_start_names_the_limit_and_computes_with_fewer(tmp_path: Path) -> None:
    preloaded = built(tmp_path, REFUSING, "-shared", "-fPIC")
    done = subprocess.run(
        [sys.executable, "-c", ENGINES], capture_output=True, text=True, env=os.environ | {"LD_PRELOAD": str(preloaded)}
    )
    assert done.stdout.splitlines() == [
        "the system starts no more than 1 of 3 threads (ulimit -u, ulimit -v, or pids.max of its cgroup); raise that"
        " limit, or set threads to 1",
        "4",
    ], done.stderr
