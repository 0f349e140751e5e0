"""What a checkpoint asks of greedy choices, and lm-eval's `hf` model does, is told where engines here do not."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.checkpoints import inspect_checkpoint
from engines.model.generation_config import notes_on_choices
from engines.model.idle_keys import CHANGES_NO_NUMBER
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.records import Request, Sampling
from tests.fakes.random_models import write_random_model
from tests.hf_peer import load_pair, texts_of_hf
from tests.plans import raw_plan

PROMPT = "The fox reads 1234 maps."
N_NEW_TOKENS = 24
FIRST, FIFTH = 224, 1995
"""Tokens that the random model answers with."""


REQUEST = Request(request_id="q", sample_id="q", kind="generate", prompt_ids=(1,), max_new_tokens=N_NEW_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_random_model(folder := tmp_path_factory.mktemp("model"), "qwen3-moe")
    return folder


@pytest.mark.numbers
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 5.0}},
        {"watermarking_config": {}},
        {"suppress_tokens": [FIFTH]},
        {"begin_suppress_tokens": [FIRST]},
        {"forced_eos_token_id": 0},
        {"max_new_tokens": 2 * N_NEW_TOKENS},
        {"max_time": 1e-9},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
def test_rules_that_change_what_lm_eval_gets_are_told(
    rules: dict[str, Any], file: str, folder: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((own / file).read_text())
    (own / file).write_text(json.dumps(settings | rules))
    if file == "config.json":
        (own / "generation_config.json").unlink()
        if not rules.keys() <= CHANGES_NO_NUMBER:
            with pytest.raises(EngineError, match="has no such key"):
                inspect_checkpoint(str(own))
            return
    pair = load_pair(own)
    request = REQUEST.model_copy(update={"prompt_ids": tuple(pair.engine.tokenizer.encode_prompt(PROMPT))})
    ours = pair.engine.run(request, lambda event, at_s: None)
    assert {FIRST, FIFTH} <= set(ours.token_ids)
    (theirs,) = texts_of_hf(pair.hf, [PROMPT], {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS})
    notes = notes_on_choices(own, [request])
    assert len(notes) == (theirs != ours.text)
    assert all(
        f"{key} = {value}"[:40] in note and note.startswith(file) for key, value in rules.items() for note in notes
    )
    assert notes_on_choices(own, [request.model_copy(update={"ignore_end_tokens": True})]) == ()


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("rules", "asked", "is_told"),
    [
        ({"top_k": 1}, {}, True),
        ({"top_p": 1e-6}, {}, True),
        ({"min_p": 1.0}, {}, True),
        ({"typical_p": 1e-6}, {}, True),
        ({"epsilon_cutoff": 0.9}, {}, True),
        ({"top_h": 1e-6}, {}, True),
        ({"top_k": 1, "top_p": 1e-6}, {"top_k": 40, "top_p": 0.99}, False),
        ({"top_k": 50, "top_p": 1.0, "min_p": None, "temperature": 1e-3, "do_sample": True}, {}, False),
    ],
    ids=str,
)
def test_what_a_model_draws_from_is_told_of_tasks_that_draw_and_do_not_say_it(
    rules: dict[str, Any], asked: dict[str, float], is_told: bool, folder: Path, tmp_path: Path
) -> None:
    """From so few tokens that lm-eval's model always says the same; else its draws differ."""
    own = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(settings | rules))
    hf = load_pair(own).hf
    generation = {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS, "do_sample": True, "temperature": 1.0, **asked}
    torch.manual_seed(0)
    texts = {texts_of_hf(hf, [PROMPT], generation)[0] for _ in range(3)}
    assert (len(texts) == 1) == is_told
    sampling = Sampling(temperature=1.0, top_k=int(asked.get("top_k", 50)), top_p=asked.get("top_p", 1.0))
    draws = REQUEST.model_copy(update={"sampling": sampling})
    notes = notes_on_choices(own, [REQUEST, draws])
    assert len(notes) == is_told
    assert all(f"{key} = {value}" in note for key, value in rules.items() for note in notes)
    assert notes_on_choices(own, [REQUEST]) == (), "greedy answers are the same"


@pytest.mark.numbers
@pytest.mark.parametrize(
    "rules",
    [
        {"stop_strings": [" "]},
        {"token_healing": True},
        {"dola_layers": "high"},
        {"force_words_ids": [[FIFTH]]},
        {"num_return_sequences": 2},
        {"use_mtp": True},
        {"return_dict_in_generate": True},
        {"is_assistant": True},
        {"compile_config": {}},
        pytest.param(
            {"cache_implementation": "quantized"},
            marks=pytest.mark.skipif(
                find_spec("optimum") is not None, reason="with quanto there are answers, and others"
            ),
        ),
        *(
            pytest.param(
                {"cache_implementation": kind},
                marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU there are answers, and the same"),
            )
            for kind in ("offloaded", "offloaded_static", "offloaded_hybrid")
        ),
        {"cache_implementation": "mamba"},
        *({"cache_implementation": kind} for kind in ("dynamic", "hybrid", "sliding_window", "paged")),
        {"cache_implementation": "static", "use_mtp": False, "return_dict_in_generate": False},
        {"is_assistant": False, "compile_config": None},
        {"stop_strings": None, "token_healing": False, "dola_layers": None, "num_return_sequences": 1},
    ],
    ids=str,
)
def test_rules_with_which_lm_eval_gets_no_answer_are_told(rules: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(settings | rules))
    try:
        texts_of_hf(load_pair(own).hf, [PROMPT], {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS})
        answers = True
    except (ValueError, ImportError, AttributeError, TypeError, AssertionError):
        answers = False
    notes = notes_on_choices(own, [REQUEST])
    assert len(notes) == (not answers)
    assert all(f"{key} = {value!r}" in note for key, value in rules.items() for note in notes)


def test_rules_of_config_json_do_not_count_beside_a_generation_config(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.3}))
    assert load_pair(own).hf.model.generation_config.repetition_penalty in (None, 1.0)
    assert notes_on_choices(own, [REQUEST]) == ()


@pytest.mark.numbers
@pytest.mark.parametrize(
    "generation",
    [None, {}, {"temperature": 0.6, "do_sample": True}, {"eos_token_id": None}, {"eos_token_id": [7, FIFTH]}],
    ids=str,
)
def test_answers_end_with_the_tokens_of_the_file_that_transformers_reads(
    generation: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    """config.json names one of the answer's tokens, which is not the tokenizer's own end token."""
    own = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(settings | {"eos_token_id": FIRST}))
    (own / "generation_config.json").unlink()
    if generation is not None:
        (own / "generation_config.json").write_text(json.dumps(generation))
    pair = load_pair(own)
    prompt = tuple(pair.engine.tokenizer.encode_prompt(PROMPT))
    ours = pair.engine.run(REQUEST.model_copy(update={"prompt_ids": prompt}), lambda event, at_s: None)
    asked = {"attention_mask": torch.ones(1, len(prompt)), "do_sample": False, "pad_token_id": 0}
    theirs = pair.hf.model.generate(torch.tensor([prompt]), max_new_tokens=N_NEW_TOKENS, **asked)
    assert [*ours.token_ids] == theirs[0, len(prompt) :].tolist()
    ends_early = generation is None or generation.get("eos_token_id") is not None
    assert (len(ours.token_ids) < N_NEW_TOKENS) == ends_early


def test_a_window_of_generated_answers_says_that_its_models_rules_are_not_followed(
    folder: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    (own / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05}))
    talk = {"name": "sharegpt", "data": "generated", "limit": 1, "max_new_tokens": 4}
    choices = {"name": "boolq", "data": "generated", "limit": 1}
    draft = draft_plan(raw_plan(model={"source": str(own)}, workload=[talk, choices]))
    parts = RunParts(draft.plan.protocol)
    told = {cell.cell.workload: parts.arm(cell).unmeasured.notes for cell in preflight(draft, parts).cells}
    parts.close()
    assert len(told) == 2
    for workload, notes in told.items():
        assert [note for note in notes if "repetition_penalty = 1.05" in note] == list(notes)
        assert len(notes) == workload.startswith("sharegpt")


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "BPE that is asked"])
@pytest.mark.parametrize("said", [True, False])
def test_blanks_that_transformers_takes_out_of_texts_are_told(kind: str, said: bool, tmp_path: Path) -> None:
    import tokenizers
    from transformers import AutoTokenizer

    write_random_model(tmp_path, "qwen3-moe")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": said}
    config["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = kind == "BPE that is asked"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if kind == "Unigram":
        pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("a", "b", ".", "\u2581"))]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = inspect_checkpoint(str(tmp_path)).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("a b .")
    assert ours.decode(ids) == "a b ."
    assert ours.asks_to_clean == (theirs.decode(ids) == "a b.")
    assert len(notes_on_choices(tmp_path, [REQUEST], ours.asks_to_clean)) == ours.asks_to_clean
