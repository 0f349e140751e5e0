"""Files as the safetensors library writes them are read alike; damaged ones are named with what is wrong."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engines.errors import EngineError
from engines.model.tensor_files import TensorFile, is_finite

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def write(path: Path, header: Any, body: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def cut(path: Path, n_bytes: int) -> Path:
    write(path, {"w": entry()}, BODY)
    path.write_bytes(path.read_bytes()[:n_bytes])
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64],
)
def test_tensors_are_those_that_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": (20 * random(3, 5)).to(dtype),
        "b.c": (20 * random(7)).to(dtype),
        "scalar": torch.ones(()).to(dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert {name: place.shape for name, place in file.places.items()} == {"a": (3, 5), "b.c": (7,), "scalar": ()}
    for name, tensor in tensors.items():
        found = file.read(name)
        assert found.dtype is dtype
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found, tensor.view(torch.uint8) if tensor.dim() else tensor
        )


def test_tensor_that_lies_askew_is_read_right_and_made_straight(tmp_path: Path) -> None:
    """The format promises no alignment."""
    weight = random(2, 3)
    header = json.dumps({"byte": entry("U8", (1,), (0, 1)), "w": entry(offsets=(1, 25))}).encode()
    padded = header + b" " * (-len(header) % 8)
    file = TensorFile(write(tmp_path / "x.safetensors", padded, b"\x00" + weight.numpy().tobytes()))
    assert torch.equal(file.read("w"), weight)
    assert file.read("w").data_ptr() % 4 == 0


def test_released_tensor_still_has_its_values(tmp_path: Path) -> None:
    weight = random(300, 1000)
    save_file({"before": random(5), "w": weight, "after": random(7)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    found = file.read("w")
    file.release("w")
    assert torch.equal(found, weight)
    assert torch.equal(file.read("after"), random(7))


@linux_only
def test_file_is_mapped_once_read_only_and_costs_no_private_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"w{n}": random(1 << 21) for n in range(8)}, path)
    before = private_bytes()
    file = TensorFile(path)
    tensors = [file.read(f"w{n}") for n in range(8)]
    assert all(map(is_finite, tensors))
    assert private_bytes() - before < 4e6 < sum(tensor.nbytes for tensor in tensors)
    (mapping,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert mapping.split()[1] == "r--s"


@linux_only
def test_file_larger_than_the_private_memory_allowed_is_read(tmp_path: Path) -> None:
    """As under `ulimit -d`, which counts private writable mappings in whole, touched or not."""
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1 << 25)}, path)
    status = Path("/proc/self/status").read_text()
    used = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 26), before[1]))
    try:
        assert is_finite(TensorFile(path).read("w"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 1_000_003, -1])
def test_one_value_that_is_no_number_is_found_wherever_it_is(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = random(1_500_001).to(dtype)
    assert is_finite(tensor)
    tensor[place] = value
    assert not is_finite(tensor)
    assert not is_finite(tensor[place])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_of_e4m3_is_found_and_its_largest_value_is_none(code: int) -> None:
    codes = torch.full((3_000_000,), 0x7E, dtype=torch.uint8)
    codes[::2] = 0xFE
    assert codes.view(torch.float8_e4m3fn).float().abs().max() == 448
    assert is_finite(codes.view(torch.float8_e4m3fn))
    codes[2_500_000] = code
    assert not is_finite(codes.view(torch.float8_e4m3fn))


def test_looking_for_nan_takes_no_memory() -> None:
    tensor = torch.ones(1 << 24)
    with torch.profiler.profile(profile_memory=True) as profile:
        assert is_finite(tensor)
    assert max(event.cpu_memory_usage for event in profile.key_averages()) < 1000


# --- damage -----------------------------------------------------------------------------------------------------------

BODY = bytes(24)
DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: write(p, b"", b"", 0), r"header is not JSON"),
    "shorter than a length": (lambda p: cut(p, 3), r"a header of \d+ bytes in a file of 3"),
    "header beyond the file": (lambda p: write(p, b"{}", b"", 1000), "a header of 1000 bytes in a file of 10"),
    "header of exabytes": (lambda p: write(p, b"{}", b"", 2**63), f"a header of {2**63} bytes"),
    "header cut": (lambda p: write(p, b'{"w": {"dtype"', BODY), "header is not JSON"),
    "not text": (lambda p: write(p, b"\xff\xfe\x00", BODY), "header is not JSON"),
    "nested": (lambda p: write(p, b"[" * 100_000, BODY), "header is not JSON"),
    "list": (lambda p: write(p, [1], BODY), "header is a list"),
    "entry of another kind": (lambda p: write(p, {"w": 5}, BODY), "tensor 'w' is described by 5"),
    "entry without a shape": (lambda p: write(p, {"w": {"dtype": "F32"}}, BODY), "tensor 'w' is described by"),
    "shape that is text": (lambda p: write(p, {"w": entry(shape="23")}, BODY), "tensor 'w' has shape '23'"),
    "negative length": (lambda p: write(p, {"w": entry(shape=[-2, -3])}, BODY), r"has shape \[-2, -3\]"),
    "length that is true": (lambda p: write(p, {"w": entry(shape=[6, True])}, BODY), r"has shape \[6, True\]"),
    "three offsets": (lambda p: write(p, {"w": entry(offsets=[0, 24, 48])}, BODY), r"offsets \[0, 24, 48\]"),
    "empty shape of too many numbers": (
        lambda p: write(p, {"w": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, b""),
        "beyond any tensor",
    ),
    "metadata that is a number": (
        lambda p: write(p, {"__metadata__": 5, "w": entry()}, BODY),
        "__metadata__ is 5, not texts by name",
    ),
    "metadata of numbers": (
        lambda p: write(p, {"__metadata__": {"step": 5}, "w": entry()}, BODY),
        r"__metadata__ is {'step': 5}",
    ),
    "two tensors of the same bytes": (
        lambda p: write(p, {"w": entry(), "v": entry()}, BODY),
        "tensor 'v' begins 24 bytes before tensor 'w' ends",
    ),
    "tensors that overlap": (
        lambda p: write(p, {"w": entry(), "v": entry(offsets=[20, 44])}, BODY + BODY[:20]),
        "tensor 'v' begins 4 bytes before tensor 'w' ends",
    ),
    "bytes before the first tensor": (
        lambda p: write(p, {"w": entry(offsets=[8, 32])}, BODY + bytes(8)),
        "8 bytes between the header and tensor 'w' belong to none",
    ),
    "bytes between tensors": (
        lambda p: write(p, {"w": entry(), "v": entry(offsets=[28, 52])}, BODY + BODY + bytes(4)),
        "4 bytes between tensor 'w' and tensor 'v' belong to none",
    ),
    "bytes after the last tensor": (
        lambda p: write(p, {"w": entry()}, BODY + bytes(3)),
        "3 bytes after tensor 'w' belong to no tensor",
    ),
    "shape larger than its bytes": (lambda p: write(p, {"w": entry(shape=[2**20, 2**20])}, BODY), "at bytes 0 to 24"),
    "body cut": (lambda p: write(p, {"w": entry()}, BODY[:-1]), "at bytes 0 to 24 of a body of 23"),
    "offsets before the body": (lambda p: write(p, {"w": entry(offsets=[24, 0])}, BODY), "at bytes 24 to 0"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_named_with_what_was_found(tmp_path: Path, damage: str) -> None:
    make, message = DAMAGED[damage]
    path = make(tmp_path / "x.safetensors")
    with pytest.raises(EngineError, match=rf"x\.safetensors: truncated or not safetensors \(.*{message}"):
        TensorFile(path)


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_is_refused_is_refused_by_the_safetensors_library(tmp_path: Path, damage: str) -> None:
    with pytest.raises((SafetensorError, UnicodeDecodeError)):
        safe_open(DAMAGED[damage][0](tmp_path / "x.safetensors"), "pt").keys()


TWICE = {
    "tensor": b'{"w": %(entry)s, "w": %(entry)s}',
    "key of a tensor": b'{"w": {"dtype": "F32", "dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}',
}


@pytest.mark.parametrize("what", TWICE)
def test_name_that_stands_twice_is_refused(tmp_path: Path, what: str) -> None:
    """The format forbids it; the library takes the last tensor of a name."""
    header = TWICE[what] % {b"entry": json.dumps(entry()).encode()} if what == "tensor" else TWICE[what]
    with pytest.raises(EngineError, match=r"header is not JSON: '(w|dtype)' stands twice"):
        TensorFile(write(tmp_path / "x.safetensors", header, BODY))


def test_more_dimensions_than_torch_computes_with_are_refused(tmp_path: Path) -> None:
    shape = [1] * 63 + [6]
    assert is_finite(TensorFile(write(tmp_path / "x.safetensors", {"w": entry(shape=shape)}, BODY)).read("w"))
    with pytest.raises(EngineError, match="beyond any tensor"):
        TensorFile(write(tmp_path / "y.safetensors", {"w": entry(shape=[1, *shape])}, BODY))


def test_element_type_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"x\.safetensors: tensor 'w' holds 'F4', which this engine does not read"):
        TensorFile(write(tmp_path / "x.safetensors", {"w": entry("F4")}, BODY))


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"gone\.safetensors: cannot be read \(.*No such file"):
        TensorFile(tmp_path / "gone.safetensors")
