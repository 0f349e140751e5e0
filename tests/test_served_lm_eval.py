"""lm-eval's own client of servers, `local-completions`, gets from `joulebench serve` what its `hf` model gets."""

from __future__ import annotations

import pytest

from tests.fakes.random_models import BUNDLED
from tests.hf_peer import load_pair
from tests.protocol_server import served

pytest.importorskip("tenacity", reason="lm-eval's clients need it (pip install 'lm-eval[api]')")
pytestmark = pytest.mark.numbers

PAIRS = [
    ("The miller came home.", " He was tired."),
    ("The key is", " in the old mill."),
    ("Das ist", " schön, größer 😀"),
    ("Hello ", "world"),
    ("", "The rain had stopped"),
]
TEXTS = [
    ("The miller came home. The key is", {"until": ["."], "max_gen_toks": 24}),
    ("Once", {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
    ("Das ist 😀", {"until": [], "max_gen_toks": 12}),
]


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "texts"])
@pytest.mark.parametrize(("batch_size", "n_at_once"), [(1, 1), (4, 1), (1, 3)])
def test_lm_eval_gets_from_our_server_what_its_hf_model_gets(as_ids: bool, batch_size: int, n_at_once: int) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    scored = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(PAIRS)]
    written = [Instance(request_type="generate_until", doc={}, arguments=(t, dict(g)), idx=0) for t, g in TEXTS]
    hf = load_pair(BUNDLED).hf
    with served() as server:
        through = LocalCompletionsAPI(
            base_url=f"{server.url}/completions",
            model="bundled:tiny-qwen3-moe",
            tokenizer=str(BUNDLED),
            tokenizer_backend="huggingface",
            tokenized_requests=as_ids,
            batch_size=batch_size,
            num_concurrent=n_at_once,
        )
        found = through.loglikelihood(scored, disable_tqdm=True)
        texts = through.generate_until(written, disable_tqdm=True)
    expected = hf.loglikelihood(scored, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert texts == hf.generate_until(written, disable_tqdm=True)
