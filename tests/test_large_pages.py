"""Memory for weights in large pages: what lies in it, how much of it is taken, and when it goes back."""

from __future__ import annotations

import mmap
import re
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.model.checkpoints import BUNDLED_FOLDER, load_checkpoint
from engines.model.large_pages import ALIGNMENT, LARGE_PAGE, SHARED, LargePages
from engines.model.quantised import Quantisation, QuantisedMatrix, store
from engines.model.weights import SparseWeights

ADVISED = "hg"
"""Of a mapping's flags in smaps: large pages were asked for."""
pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="another system than Linux")


def mapping_of(address: int) -> Mapping[str, str] | None:
    """What Linux tells of the mapping that holds it."""
    found: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if edges := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found is not None:
                return found
            first, end = (int(edge, 16) for edge in edges.groups())
            found = {} if first <= address < end else None
        elif found is not None:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def resident_bytes(tensor: Tensor) -> int:
    """Of all the memory that it lies in."""
    whole = tensor.untyped_storage()
    first, n_pages = whole.data_ptr() // mmap.PAGESIZE, -(-whole.nbytes() // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = struct.unpack(f"{n_pages}Q", file.read(8 * n_pages))
    n_present: int = sum(page >> 63 for page in pages)
    return n_present * mmap.PAGESIZE


def test_tensors_lie_apart_and_at_lines_of_the_cache() -> None:
    room, n_values = LargePages(), (1, 1000, 70_001, 3 * LARGE_PAGE // 4, 5)
    tensors = [room((n,), torch.float32).fill_(i) for i, n in enumerate(n_values)]
    for i, (tensor, n) in enumerate(zip(tensors, n_values, strict=True)):
        assert tensor.shape == (n,)
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert bool((tensor == i).all())


def test_memory_that_is_full_is_followed_by_more() -> None:
    room, n_bytes = LargePages(), SHARED // 16
    tensors = [room((n_bytes,), torch.uint8).fill_(i) for i in range(17)]
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    in_order = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    assert in_order[:16] == [i * n_bytes for i in range(16)]
    assert not 0 <= in_order[16] < SHARED


@pytest.mark.parametrize("n_bytes", [3 * LARGE_PAGE + 100_000, LARGE_PAGE // 4], ids=["of its own", "shared"])
def test_no_more_memory_is_taken_than_tensors_fill(n_bytes: int) -> None:
    room = LargePages()
    tensor = room((n_bytes,), torch.uint8).fill_(1)
    room.close()
    assert n_bytes <= resident_bytes(tensor) <= n_bytes + mmap.PAGESIZE


def test_memory_goes_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    original, made = mmap.mmap, list[weakref.ref[mmap.mmap]]()

    def recorded(*arguments: int, **options: int) -> mmap.mmap:
        mapping = original(*arguments, **options)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mmap, "mmap", recorded)
    room = LargePages()
    first, second = (room((1000,), torch.float32) for _ in range(2))
    room.close()
    (mapping,) = made
    del first
    assert mapping() is not None
    del second
    assert mapping() is None


@pytest.mark.parametrize("form", ["bf16", "fp16", "int8", "fp8", "int4-g32", "mxfp4"])
def test_a_form_is_the_same_wherever_it_lies(form: str) -> None:
    weight = torch.randn(3, 700, 512)
    for taken in (weight, weight[1], weight.transpose(0, 1)):
        here, there = store(taken, form), store(taken, form, room=LargePages())  # type: ignore[arg-type]
        if isinstance(here, Tensor):
            assert isinstance(there, Tensor)
            assert torch.equal(here, there)
        else:
            assert isinstance(there, QuantisedMatrix)
            assert torch.equal(here.values.view(torch.uint8), there.values.view(torch.uint8))
            assert torch.equal(here.scales, there.scales)


def test_weights_that_are_narrowed_lie_in_large_pages() -> None:
    model = sorted(path.name for path in BUNDLED_FOLDER.iterdir() if path.is_dir())[0]
    quantise = Quantisation(experts="int8", attention="int8")
    weights = load_checkpoint(f"bundled:{model}", torch.float32, quantise).weights
    layer = weights.layers[-1]
    assert isinstance(layer.mlp, SparseWeights)
    for matrix in (layer.mlp.experts.experts[0].gate_IH, layer.attention.out_HQ):
        assert isinstance(matrix, QuantisedMatrix)
        mapping = mapping_of(matrix.values.data_ptr())
        assert mapping is not None
        assert ADVISED in mapping["VmFlags"].split()
