"""Parameters, bytes of weights and peak memory: against the checkpoint's own header, closed forms, and the kernel."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from devices.peak_memory import peak_memory, reset_peak_memory
from engines.base import HoldsWeights
from engines.model.checkpoints import load_checkpoint
from engines.model.held_weights import held_weights
from engines.model.quantised import Quantisation, quantise_int4
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results import tables
from results.metrics import size_observations
from results.report.html import page_context
from tests.run_builders import cell, run, trial

MODEL = "bundled:tiny-qwen3-moe"


def parameters_in_the_file() -> int:
    """By the header of the safetensors file that ships with the project."""
    (path,) = (Path(__file__).parent.parent / "engines/tiny/bundled/tiny-qwen3-moe").glob("*.safetensors")
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def test_parameters_are_those_of_the_file_and_bytes_those_of_the_form() -> None:
    n = parameters_in_the_file()
    assert held_weights(load_checkpoint(MODEL, torch.float32).weights) == (n, 4 * n)
    narrow = held_weights(load_checkpoint(MODEL, torch.float32, Quantisation(experts="int8")).weights)
    assert narrow.n_parameters == n
    assert n < narrow.n_bytes < 4 * n


def test_a_narrowed_copy_of_a_tied_head_adds_bytes_and_no_parameters() -> None:
    """The bundled model ties them: half a byte a parameter, and scales, beside the embedding in fp32."""
    model = load_checkpoint(MODEL, torch.float32, Quantisation(head="int4-g32"))
    plain = load_checkpoint(MODEL, torch.float32)
    rows, width = plain.weights.embedding_LH.shape
    assert held_weights(model.weights).n_parameters == parameters_in_the_file()
    added = held_weights(model.weights).n_bytes - held_weights(plain.weights).n_bytes
    assert rows * width / 2 < added < rows * width


def test_a_narrowed_matrix_has_the_parameters_that_it_stands_for_and_the_bytes_of_its_scales() -> None:
    matrix = quantise_int4(torch.randn(8, 64), 32)
    # Half a byte each, and an fp32 scale for every 32.
    assert held_weights((matrix,)) == (512, 512 // 2 + 4 * 512 // 32)


def test_an_embedding_that_is_also_the_head_counts_once() -> None:
    tied = torch.zeros(5, 3)
    assert held_weights((tied, torch.ones(2), tied)) == (17, 68)


def test_the_reference_engine_tells_its_weights() -> None:
    engine = ReferenceEngine(load_checkpoint(MODEL, torch.float32), DroplessParameters())
    assert isinstance(engine, HoldsWeights)
    assert engine.held_weights().n_parameters == parameters_in_the_file()


# In a process of its own: in a large one the kernel may take mapped pages back while the test looks.
PEAK = """
import numpy as np
from devices.peak_memory import peak_memory, reset_peak_memory

before = np.ones(200_000_000, dtype=np.uint8)
assert before[-1] == 1
del before
why_not = reset_peak_memory()
if why_not is None:
    at_rest = peak_memory().n_bytes
    inside = np.ones(100_000_000, dtype=np.uint8)
    assert inside[-1] == 1
    del inside
    print(peak_memory().n_bytes - at_rest)
else:
    print(why_not.remark)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark of the peak is Linux's")
def test_the_peak_is_of_the_window_and_not_of_what_was_before() -> None:
    said = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout.strip()
    if "does not let us" in said:
        pytest.skip(said)
    assert 90_000_000 < int(said) < 190_000_000


def test_a_kernel_that_tells_nothing_gives_a_reason(tmp_path: Path) -> None:
    assert "Linux only" in (getattr(reset_peak_memory(tmp_path / "none"), "remark", "") or "")
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t   2048 kB\n")
    assert peak_memory(tmp_path).n_bytes == 2 * 1024**2
    (tmp_path / "status").write_text("Name:\tx\n")
    assert peak_memory(tmp_path) == (None, "peak memory: the kernel does not tell it (no VmHWM)")


def test_sizes_stand_in_the_tables_with_their_methods_and_are_no_scores() -> None:
    known = trial(n_parameters=5_716_160, weight_bytes=22_864_640, peak_memory_bytes=2**30)
    data = run([cell()], [known])
    frame = tables.tidy(data)
    rows = {r["metric"]: (r["mean"], r["method"]) for r in frame.to_dict("records")}
    assert rows["parameters"] == (5_716_160, "derived")
    assert rows["peak_memory"] == (2**30, "measured")
    assert tables.accuracy_rows(frame).empty
    table = page_context(data)["figure_tables"][-1]
    ((_, (row,)),) = table.parts
    assert [entry.text for entry in row.entries] == ["5.72 million", "21.8 MiB", "1.00 GiB"]


def test_what_was_not_recorded_is_missing_with_a_reason() -> None:
    assert {o.value for o in size_observations(trial())} == {None}
    assert all(o.reason for o in size_observations(trial()))
