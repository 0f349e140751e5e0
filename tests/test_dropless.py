from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.dispatch import Routing
from engines.techniques.presets import dropless
from tests.techniques import seen


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**31))
def test_every_routed_pair_is_one_row_of_its_expert(n_tokens: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, 9, generator=generator).argsort(-1)[:, :top_k]
    weights_TK = torch.rand(n_tokens, top_k, generator=generator)
    plan = dropless().plan(seen(Routing(ids_TK, weights_TK, 9)))

    rows = []
    for call in plan.calls:
        ((expert,), (n_rows,)) = call.experts, call.rows_per_expert
        assert call.valid_per_expert == (n_rows,)
        assert not call.static
        for row in range(call.first_row, call.first_row + n_rows):
            rows.append((int(plan.token_R[row]), expert, float(plan.weight_R[row])))
    expected = [
        (token, int(ids_TK[token, k]), float(weights_TK[token, k])) for token in range(n_tokens) for k in range(top_k)
    ]
    assert sorted(rows) == sorted(expected)
    assert (plan.routed_pairs, plan.dropped_pairs) == (n_tokens * top_k, 0)


def test_experts_without_tokens_are_not_called() -> None:
    routing = Routing(torch.tensor([[7], [2], [7]]), torch.ones(3, 1), 8)
    plan = dropless().plan(seen(routing, "decode"))
    assert [(call.experts, call.rows_per_expert, call.first_row) for call in plan.calls] == [
        ((2,), (1,), 0),
        ((7,), (2,), 1),
    ]
    assert plan.token_R.tolist() == [1, 0, 2]
