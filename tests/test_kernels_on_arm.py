"""The kernels for Arm's NEON, compiled across and run under qemu: correctness alone, no speed."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.kernels import compile as compiling
from engines.kernels import tables
from tests.kernel_forms import STORED, random, relative_error

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,  # kernels for another processor are compiled for a minute
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' and no '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
    ),
]

N_ROWS, N_COLUMNS = 130, 384
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "matrix.h"
extern "C" const char* joulebench_instruction_set();
extern "C" void joulebench_linear(const Matrix*, const float*, int64_t, const float*, float*, int32_t);

static void* bytes(FILE* file, size_t n) {
  void* room = std::malloc(n + 1);
  if (std::fread(room, 1, n, file) != n) std::exit(3);
  return room;
}

int main(int, char** argument) {
  if (std::strcmp(joulebench_instruction_set(), "NEON")) return 2;
  FILE *in = std::fopen(argument[1], "rb"), *out = std::fopen(argument[2], "wb");
  int64_t head[7];  // format, rows, columns, group bits, tokens, bytes of values, of scales
  while (std::fread(head, sizeof head, 1, in) == 1) {
    Matrix m = {bytes(in, head[5]), bytes(in, head[6]), head[1], head[2], int32_t(head[0]), int32_t(head[3]), 0};
    const float* x = (const float*)bytes(in, head[4] * head[2] * sizeof(float));
    float* result = (float*)std::malloc(head[4] * head[1] * sizeof(float));
    joulebench_linear(&m, x, head[4], nullptr, result, 2);
    std::fwrite(result, sizeof(float), head[4] * head[1], out);
  }
  return std::fclose(out);
}
"""
"""Reads products to compute from a file, writes their results to another."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    source = folder / "main.cpp"
    source.write_text(PROGRAM)
    command = [
        *(COMPILER, "-O2", "-std=c++17", "-pthread", "-static", "-Wall", "-Wextra", "-Werror"),
        *("-I", str(compiling.SOURCES[0].parent), *map(str, (*compiling.SOURCES, source))),
        *("-o", str(folder / "program")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "program"


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("form", STORED)
def test_products_under_neon_are_those_with_the_widened_matrix(form: str, program: Path, tmp_path: Path) -> None:
    """One row as decoding has it, a few, and panels; 384 columns are widened in two goes."""
    weight = STORED[form](random(N_ROWS, N_COLUMNS, seed=5) / N_COLUMNS**0.5)
    described = tables.described(weight)
    values, scales = (raw(weight), b"") if isinstance(weight, Tensor) else (raw(weight.values), raw(weight.scales))
    inputs = [random(n, N_COLUMNS, seed=n) for n in (1, 3, 8, 25)]
    with open(tmp_path / "in", "wb") as file:
        for x in inputs:
            sizes = (len(x), len(values), len(scales))
            head = (described.format, N_ROWS, N_COLUMNS, described.group_bits, *sizes)
            file.write(struct.pack("7q", *head) + values + scales + raw(x))
    done = subprocess.run(
        [EMULATOR, str(program), str(tmp_path / "in"), str(tmp_path / "out")],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr.decode(errors='replace')}"
    written = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32)
    found = written.split([len(x) * N_ROWS for x in inputs])
    for x, result in zip(inputs, found, strict=True):
        expected = x.double() @ weight.to(torch.float32).double().T
        assert relative_error(result.view(len(x), N_ROWS), expected) < 1e-6


KEEPING = """
#include <cstdio>
#include "kept.h"
float numbers[64], again[64];

int main(int, char** argument) {
  FILE *in = std::fopen(argument[1], "rb"), *out = std::fopen(argument[2], "wb");
  if (std::fread(numbers, sizeof(float), 64, in) != 64) return 3;
  for (int32_t form : {kBf16, kFp16})
    as_kept(form, [&](auto element) {
      decltype(element) kept[64];
      keep(numbers, 64, kept);
      std::fwrite(as_floats(kept, 64, again), sizeof(float), 64, out);
    });
  return std::fclose(out);
}
"""


def test_what_a_cache_keeps_under_neon_is_what_torch_rounds_to(tmp_path: Path) -> None:
    """What is too large for a half is no number."""
    (tmp_path / "keeping.cpp").write_text(KEEPING)
    headers = str(compiling.SOURCES[0].parent)
    command = [COMPILER, "-O2", "-std=c++17", "-static", "-Wall", "-Wextra", "-Werror", "-I", headers]
    program = tmp_path / "keeping"
    done = subprocess.run(
        [*command, tmp_path / "keeping.cpp", "-o", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    edges = torch.tensor([*ties, 65504, 65519.99, 65520, -7e4, 3e38, -3.4e38, 6e-8, 2.9e-8, 0.0, -0.0, torch.nan])
    numbers = torch.cat([edges, 100 * random(64 - len(edges))])
    (tmp_path / "in").write_bytes(raw(numbers))
    assert subprocess.run([EMULATOR, program, tmp_path / "in", tmp_path / "out"], check=False).returncode == 0
    found = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32).view(2, 64)
    half = numbers.half().float()
    expected = torch.stack([numbers.bfloat16().float(), half.masked_fill(half.isinf(), torch.nan)])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
