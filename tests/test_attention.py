"""Masks and softmax extras against their definitions, position by position."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from engines.model.architecture import AttentionConfig
from engines.model.attention import mix_values
from engines.model.key_value_cache import view_of
from engines.model.quantised import Arithmetic
from engines.model.spans import Span

pytestmark = pytest.mark.numbers

PLAIN = AttentionConfig(0.25, False, False, None, False, None, None, (None,), (True,), None, None)


def sees(span: Span | None, query: int, key: int) -> bool:
    """The definition of a span."""
    if key > query:
        return False
    if span is None:
        return True
    return query - key < span.n_tokens if span.kind == "sliding" else query // span.n_tokens == key // span.n_tokens


@pytest.mark.parametrize("span", [None, Span("sliding", 5), Span("chunked", 5), Span("sliding", 1), Span("chunked", 1)])
@pytest.mark.parametrize(("position", "n_tokens"), [(0, 1), (0, 13), (4, 1), (5, 1), (9, 7), (3, 4), (20, 2)])
def test_view_is_what_the_span_says_and_starts_at_the_first_key_that_anyone_sees(
    span: Span | None, position: int, n_tokens: int
) -> None:
    view, end = view_of(span, position, n_tokens), position + n_tokens
    expected = torch.tensor([[sees(span, q, k) for k in range(end)] for q in range(position, end)])
    mask = torch.ones(n_tokens, end - view.first, dtype=torch.bool) if view.mask_TS is None else view.mask_TS
    assert torch.equal(mask, expected[:, view.first :])
    assert not expected[:, : view.first].any()
    assert expected[:, view.first].any()


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, cap: float | None, sinks: list[float] | None
) -> torch.Tensor:
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    for head in range(q.shape[0]):
        kv_head = head * k.shape[0] // q.shape[0]
        for token in range(q.shape[1]):
            total = math.exp(sinks[head]) if sinks is not None else 0.0
            for key in range(k.shape[1]):
                if not mask[token, key]:
                    continue
                score = 0.25 * float(q[head, token] @ k[kv_head, key])
                share = math.exp(score if cap is None else cap * math.tanh(score / cap))
                out[head, token] += share * v[kv_head, key]
                total += share
            out[head, token] /= total
    return out


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, [1.0, -2.0, 0.3, 4.0]])
def test_softmax_with_sinks_and_cap_is_its_definition(cap: float | None, sinks: list[float] | None) -> None:
    generator = torch.Generator().manual_seed(4)
    q = 2 * torch.randn(4, 3, 8, generator=generator)
    k, v = 2 * torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 6, generator=generator)
    mask = view_of(Span("sliding", 3), 2, 3).mask_TS
    assert mask is not None
    config = replace(PLAIN, softcap=cap, sinks=sinks is not None)
    got = mix_values(q, k, v, mask, config, None if sinks is None else torch.tensor(sinks))
    torch.testing.assert_close(got, by_definition(q, k, v, mask, cap, sinks), atol=1e-5, rtol=1e-5)


def test_sink_alone_takes_what_no_key_deserves() -> None:
    """One key of score 0 and a sink of ln 3: a quarter of the value remains."""
    got = mix_values(
        torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1, 4), None, PLAIN, torch.tensor([math.log(3)])
    )
    torch.testing.assert_close(got, torch.full((1, 1, 4), 0.25))


@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
def test_a_sink_that_takes_all_leaves_nothing(arithmetic: Arithmetic) -> None:
    """e^-200 is no number of fp32 but 0."""
    got = mix_values(
        torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1, 4), None, PLAIN, torch.tensor([200.0]), arithmetic
    )
    assert torch.equal(got, torch.zeros(1, 1, 4))


def test_attention_in_int8_multiplies_whole_numbers() -> None:
    """One query, two keys. Values of 3 and 5 are multiples of 1/256, and shares of 2^-13 of the larger of their
    products with such units; the total of shares is as it was."""
    config = replace(PLAIN, scale=1.0)
    values = torch.tensor([[[3.001, 5.003], [0.70003, 0.1]]])
    keys = torch.tensor([[[1.0], [0.0]]])
    found = mix_values(torch.ones(1, 1, 1), keys, values, None, config, None, "int8")
    shares = torch.tensor([1.0, 0.0]).softmax(0)
    units = torch.tensor([2.0**-8, 2.0**-11])  # 5.003 is below 2^3, and 0.70003 below 2^0
    in_units = shares * units
    whole = (in_units * 8192 / in_units.max()).round() / 8192 * in_units.max() / units
    expected = whole @ torch.stack([(row / unit).round() * unit for row, unit in zip(values[0], units, strict=True)])
    assert torch.allclose(found.flatten(), expected, rtol=1e-6)
    assert not torch.allclose(found.flatten(), shares @ values[0], rtol=1e-5)
