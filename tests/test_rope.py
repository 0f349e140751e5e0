"""Frequencies against transformers' own for the parameters of published models; the turning against complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.rope import (
    BLOCK,
    Rotations,
    Turns,
    rope_frequencies,
    rotation,
    turn,
)
from engines.model.rope_config import RopeConfig, YarnScaling, read_rope

pytestmark = pytest.mark.numbers

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + i for i in range(32)]}
PUBLISHED_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama-3.2": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-4-scout": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "deepseek-v2": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "phi-3": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **LONG},
}


def config_with(rope: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"rope_parameters": rope, "rope_theta": 10000.0, "max_position_embeddings": 131072, **others}


@pytest.mark.parametrize("n_positions", [4096, 4097])
@pytest.mark.parametrize("name", PUBLISHED_ROPE)
def test_frequencies_and_amplitude_agree_with_transformers(name: str, n_positions: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = PUBLISHED_ROPE[name]
    theirs = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    expected, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=n_positions)
    ours = read_rope(config_with(rope), 64, "halves", KINDS)
    frequencies, our_amplitude = rope_frequencies(ours, n_positions)
    assert torch.equal(frequencies, expected), "the last bit is a hundredth of a radian at position 100 000"
    assert our_amplitude == pytest.approx(amplitude, rel=1e-12)


def test_long_sequences_take_the_long_factors_and_their_amplitude() -> None:
    """Phi-MoE: the config gives both amplitudes itself. Frequencies are 1 / (factor * theta^(2i/4)) by definition."""
    rope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope |= {"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 8}
    config = read_rope(config_with(rope, rope_theta=100.0), 4, "halves", KINDS, gives_amplitudes=True)
    short, long = rope_frequencies(config, 8), rope_frequencies(config, 9)
    torch.testing.assert_close(short[0], torch.tensor([1.0, 1 / 20]))
    torch.testing.assert_close(long[0], torch.tensor([1 / 3, 1 / 40]))
    assert (short[1], long[1]) == (1.1, 1.2)


@pytest.mark.parametrize("name", PUBLISHED_ROPE)
def test_tokens_one_by_one_are_turned_as_those_of_a_chunk(name: str) -> None:
    """Bit for bit, across the edge of a block; also where a longer sequence takes other factors."""
    config = read_rope(config_with(PUBLISHED_ROPE[name]), 64, "halves", KINDS)
    first, n = BLOCK - 3, 6
    for n_positions in (4096, 4097):
        cos_TP, sin_TP = rotation(*rope_frequencies(config, n_positions), first, n)
        turns = Turns(config, n_positions)
        ones = [turns.at(first + i, 1) for i in range(n)]
        assert torch.equal(torch.cat([cos for cos, _ in ones]), cos_TP)
        assert torch.equal(torch.cat([sin for _, sin in ones]), sin_TP)


@pytest.mark.parametrize("name", PUBLISHED_ROPE)
def test_a_position_is_turned_alike_in_whatever_chunk_it_comes(name: str) -> None:
    """Bit for bit, also of positions that were made in several goes."""
    config = read_rope(config_with(PUBLISHED_ROPE[name]), 64, "halves", KINDS)
    for n_positions in (4096, 4097):
        frequency_P, amplitude = rope_frequencies(config, n_positions)
        made = Rotations(frequency_P, amplitude)
        for end in (BLOCK - 1, BLOCK + 1, 1000, 2500):
            made.up_to(end)
        cos_TP, sin_TP = rotation(frequency_P, amplitude, 7, 2493)
        cos_SP, sin_SP = made.up_to(2500)
        assert torch.equal(cos_SP[7:2500], cos_TP)
        assert torch.equal(sin_SP[7:2500], sin_TP)
        cos_TP, sin_TP = Turns(config, n_positions).at(990, 33)
        assert torch.equal(cos_TP, cos_SP[990:1023])
        assert torch.equal(sin_TP, sin_SP[990:1023])


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_products_of_turned_vectors_are_those_of_complex_numbers(pairs: Any) -> None:
    """Re(q e^{ia} conj(k e^{ib})) summed over pairs: depends on the distance of two positions only."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 6, generator=generator)
    frequencies = torch.tensor([1.0, 0.5, 0.1])

    def as_complex(x: torch.Tensor) -> torch.Tensor:
        real, imaginary = x[0].chunk(2) if pairs == "halves" else (x[0, 0::2], x[0, 1::2])
        return torch.complex(real, imaginary)

    for at_q, at_k in ((0, 0), (9, 4), (1004, 999)):
        turned_q = turn(q, *rotation(frequencies, 1.5, at_q, 1), pairs)
        turned_k = turn(k, *rotation(frequencies, 1.5, at_k, 1), pairs)
        angle = (at_q - at_k) * frequencies
        expected = 1.5**2 * (as_complex(q) * as_complex(k).conj() * torch.polar(torch.ones(3), angle)).real.sum()
        torch.testing.assert_close((turned_q * turned_k).sum(), expected, rtol=1e-3, atol=1e-3)


def test_features_beyond_the_turned_share_stay() -> None:
    config = read_rope(config_with({}, partial_rotary_factor=0.5), 8, "halves", KINDS)
    assert config == RopeConfig(10000.0, 4, "halves", None)
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    turned = turn(x, *rotation(rope_frequencies(config, 10)[0], 1.0, 3, 1), "halves")
    assert torch.equal(turned[:, 4:], x[:, 4:])
    assert not torch.isclose(turned[:, :4], x[:, :4]).any()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            "each of full_attention, sliding_attention not supported",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' not supported; .* yarn, longrope for this"),
        ({"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1}, "'low_freq_factor' is 1, but rope of type yarn"),
        ({**PUBLISHED_ROPE["phi-3"], "short_mscale": 1.2}, "'short_mscale' is 1.2, but rope of type longrope"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "factor must be a number above 0, found None"),
        (
            {**PUBLISHED_ROPE["phi-3"], "long_factor": [1.0] * 31},
            "long_factor must be 32 numbers, one for each pair .*, found 31 values",
        ),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 not supported"),
    ],
)
def test_rope_that_is_not_computed_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_rope(config_with(rope), 64, "halves", KINDS)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (config_with({"rope_type": "yarn", "factor": 2.0}), 131072),
        (config_with({"rope_type": "yarn", "factor": 2.0}, original_max_position_embeddings=4096), 4096),
        (config_with({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}), 2048),
    ],
)
def test_length_before_stretching_stands_inside_or_beside_or_is_the_models_own(
    config: dict[str, Any], length: int
) -> None:
    scaling = read_rope(config, 64, "halves", KINDS).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_length == length


def test_phi_moe_looks_for_the_original_length_among_the_parameters_only() -> None:
    """Beside them it is not read there: absent among them, it is the model's own length."""
    rope = {"rope_type": "longrope", **LONG, "short_mscale": 1.1, "long_mscale": 1.2}
    with pytest.raises(EngineError, match="original_max_position_embeddings is 4096, and 131072 among"):
        read_rope(config_with(rope, original_max_position_embeddings=4096), 64, "halves", KINDS, gives_amplitudes=True)


def test_parameters_that_contradict_each_other_are_refused() -> None:
    twice = config_with({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048})
    with pytest.raises(EngineError, match="original_max_position_embeddings is 4096, and 2048 among"):
        read_rope({**twice, "original_max_position_embeddings": 4096}, 64, "halves", KINDS)
    with pytest.raises(EngineError, match=r"rope_scaling .* contradicts rope_parameters"):
        read_rope({**twice, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64, "halves", KINDS)
