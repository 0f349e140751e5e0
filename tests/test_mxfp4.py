from __future__ import annotations

import pytest
import torch

from engines.model.mxfp4 import unpack_mxfp4

pytestmark = pytest.mark.numbers


def test_values_of_one_block_by_the_format() -> None:
    """Codes 0..15 twice: sign, two exponent bits, one mantissa bit; low half of a byte first; scale 2^(128 - 127)."""
    codes = [*range(16), *range(16)]
    blocks = torch.tensor(
        [[low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]], dtype=torch.uint8
    )
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    expected = torch.tensor([*positive, *(-v for v in positive)] * 2, dtype=torch.bfloat16)
    assert torch.equal(unpack_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8)), expected)


@pytest.mark.parametrize("scale", [90, 120, 127, 140])
def test_unpacked_experts_equal_transformers(scale: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(scale)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(scale - 3, scale + 3, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    assert torch.equal(unpack_mxfp4(blocks, scales), expected)
