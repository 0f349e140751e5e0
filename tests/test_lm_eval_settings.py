"""What a checkpoint's own files ask of lm-eval: our answers are those of its `hf` model, whatever the files say.

A begin token that the tokenizer adds, end tokens in two places, choices that tie, lengths at the edge of the context,
requests in a batch, and weights of few bits.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Form, Quantisation, store
from engines.reference import ReferenceEngine
from engines.sampling import token_probabilities
from engines.techniques.presets import DroplessParameters
from results.records import Request
from tests.cases import marked
from tests.fakes.random_models import write_random_model
from tests.hf_peer import Pair, ask_hf, ask_ours, assert_same_answers, load_pair, texts_of_hf
from workloads.any_task import AnyTask, AnyTaskParameters

PROMPT = "The fox reads 1234 maps."
N_NEW_TOKENS = 12
OWN_END, LISTED_END = 1, 2
"""<|user|> and the token behind it: special ones of the bundled tokenizer."""


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def swap_rows_of_the_head(folder: Path, first: int, second: int) -> None:
    """What was answered with one token is answered with the other."""
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[[first, second]] = head[[second, first]].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def ours(engine: ReferenceEngine, prompt: str) -> Any:
    request = Request(
        request_id="q",
        sample_id="q",
        kind="generate",
        prompt_ids=tuple(engine.tokenizer.encode_prompt(prompt)),
        max_new_tokens=N_NEW_TOKENS,
    )
    return engine.run(request, lambda event, at_s: None)


@pytest.mark.parametrize("end", [OWN_END, LISTED_END])
def test_an_answer_ends_at_the_models_end_tokens_and_at_the_tokenizers_own(end: int, tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    free = ours(load_pair(tmp_path).engine, PROMPT)
    fifth = free.token_ids[4]
    assert fifth not in free.token_ids[:4]
    swap_rows_of_the_head(tmp_path, fifth, end)
    change(tmp_path / "tokenizer_config.json", eos_token="<|user|>")
    change(tmp_path / "generation_config.json", eos_token_id=[LISTED_END])
    pair = load_pair(tmp_path)
    completion = ours(pair.engine, PROMPT)
    (theirs,) = texts_of_hf(pair.hf, [PROMPT], {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS})
    assert completion.text == theirs
    assert completion.token_ids == (*free.token_ids[:4], end)


def show_as_text(folder: Path, token: int) -> None:
    """The tokenizer does not call it special any more."""
    file = json.loads((folder / "tokenizer.json").read_text())
    next(one for one in file["added_tokens"] if one["id"] == token)["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(file))


def recorded(pair: Pair, **generation: Any) -> Request:
    """The request that lm-eval's generation settings make of `PROMPT`."""
    from lm_eval.api.instance import Instance

    from workloads.lm_eval_models import RecordingLM

    model = RecordingLM(pair.engine.tokenizer, {"t": ["q"]}, None)
    metadata = ("t", 0, 1)
    model.generate_until([Instance("generate_until", {}, (PROMPT, generation), 0, metadata=metadata)])
    return model.recorded["q"]


@pytest.mark.parametrize("until", [["@@", "<|user|>"], ["<|user|>", " "], ["app&<|user|>"]], ids=str)
def test_an_answer_ends_at_a_special_token_that_a_task_stops_at(until: list[str], tmp_path: Path) -> None:
    """GSM8K's own list has <|im_end|>, which a base model may write and end on another token."""
    write_random_model(tmp_path, "qwen3-moe")
    fifth = ours(load_pair(tmp_path).engine, PROMPT).token_ids[4]
    swap_rows_of_the_head(tmp_path, fifth, 1)
    pair = load_pair(tmp_path)
    completion = pair.engine.run(recorded(pair, until=until, max_gen_toks=N_NEW_TOKENS), lambda event, at_s: None)
    (theirs,) = texts_of_hf(pair.hf, [PROMPT], {"until": until, "max_gen_toks": N_NEW_TOKENS})
    assert completion.text == theirs
    assert completion.token_ids[-1] == 1 or " " in until


def test_an_end_token_that_shows_is_cut_off_as_in_lm_eval(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    fifth = ours(load_pair(tmp_path).engine, PROMPT).token_ids[4]
    swap_rows_of_the_head(tmp_path, fifth, 0)
    show_as_text(tmp_path, 0)
    pair = load_pair(tmp_path)
    completion = pair.engine.run(recorded(pair, until=["@@"], max_gen_toks=N_NEW_TOKENS), lambda event, at_s: None)
    (theirs,) = texts_of_hf(pair.hf, [PROMPT], {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS})
    assert completion.text == theirs
    assert completion.token_ids[-1] == 0


SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 5}]


@pytest.mark.parametrize("settings", marked(SETTINGS, pytest.mark.slow, but=SETTINGS[2:3]))
def test_a_task_that_samples_draws_as_lm_evals_model_does(settings: dict[str, Any], pair: Pair) -> None:
    """What it does not state is transformers' default, 50 likeliest tokens among it."""
    n = 4000
    request = recorded(pair, do_sample=True, until=["@@"], max_gen_toks=1, **settings)
    prompt = torch.tensor([request.prompt_ids])
    torch.manual_seed(3)
    with torch.inference_mode():
        logits = pair.hf.model(prompt).logits[0, -1]
        drawn = pair.hf.model.generate(
            prompt.expand(n, -1), do_sample=True, max_new_tokens=1, pad_token_id=0, **settings
        )[:, -1]
    shares = torch.bincount(drawn, minlength=len(logits)) / n
    expected = token_probabilities(logits, request.sampling)
    # Half the sum of errors: of k tokens alike, sqrt(k / (2 pi n)) is expected, 0.045 of 50.
    assert float((shares - expected).abs().sum() / 2) < 0.07


def begin_with_a_token(folder: Path) -> None:
    """As Llama's and Gemma's tokenizers do."""
    file = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|user|>", "type_id": 0}}
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(file))
    change(folder / "tokenizer_config.json", bos_token="<|user|>", add_bos_token=True)


ENDINGS = "hellaswag/hellaswag.yaml"


NARROWED = re.compile(r"\.experts\.\d+\..*_proj|self_attn\..*_proj|^lm_head")
WORDS = ("takes out a lamp.", "eats.", "sings a song.", "is a box.")


def endings(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    files = {split: folder / f"{split}.jsonl" for split in ("train", "validation")}
    for file in files.values():
        file.write_text("".join(json.dumps({"ind": i, **row}) + "\n" for i, row in enumerate(rows)))
    return files


def row(*texts: str, label: int = 0, a: str = "A man opens a box.") -> dict[str, Any]:
    return {
        "activity_label": "Opening",
        "ctx_a": a,
        "ctx_b": "he",
        "endings": list(texts),
        "label": str(label),
        "split": "val",
        "split_type": "indomain",
        "source_id": "x",
    }


def compare(pair: Pair, rows: list[dict[str, Any]], folder: Path, **asked: Any) -> dict[str, float]:
    files = endings(folder, rows)
    names = {split: str(path) for split, path in files.items()}
    workload = AnyTask(AnyTaskParameters(task="hellaswag", data_files=names, **asked), None)
    requests, completions, scores = ask_ours(workload, pair.engine)
    documents = sorted({int(r.sample_id.rpartition("/")[2]) for r in requests})
    theirs, samples = ask_hf(pair.hf, ENDINGS, files, folder / "cache", documents, asked.get("num_fewshot"))
    assert_same_answers(pair, samples, requests, completions)
    found = {s.metric: s.value for s in scores if s.sample_id is None}
    assert found == {k.removesuffix(",none"): v for k, v in theirs.items() if "," in k and "_stderr" not in k}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_random_model(folder := tmp_path_factory.mktemp("model"), "qwen3-moe")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder)


def test_a_begin_token_that_the_tokenizer_adds_stands_before_every_question(tmp_path: Path) -> None:
    (own := tmp_path / "model").mkdir()
    write_random_model(own, "qwen3-moe")
    begin_with_a_token(own)
    begun = load_pair(own)
    rows = [row(*WORDS, label=i, a=f"Man {i} waits.") for i in range(4)]
    compare(begun, rows, tmp_path)
    compare(begun, rows, tmp_path, num_fewshot=2)
    (theirs,) = texts_of_hf(begun.hf, [PROMPT], {"until": ["@@"], "max_gen_toks": N_NEW_TOKENS})
    assert begun.engine.tokenizer.encode_prompt(PROMPT)[0] == 1
    assert ours(begun.engine, PROMPT).text == theirs


@pytest.mark.parametrize("reuse_prefix", [False, True])
def test_of_choices_alike_the_first_counts_as_in_lm_eval(
    reuse_prefix: bool, folder: Path, pair: Pair, tmp_path: Path
) -> None:
    """Behind a reused prefix the same tokens are computed in another order of sums: some digits differ."""
    checkpoint = load_checkpoint(str(folder), torch.float32)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), reuse_prefix=reuse_prefix)
    rows = [row(*4 * [WORDS[0]], label=i % 4, a=f"A man who is {i * 'very '}old opens a box.") for i in range(16)]
    assert compare(Pair(engine, pair.hf), rows, tmp_path) == {"acc": 0.25, "acc_norm": 0.25}


def test_lengths_of_choices_are_told_in_bytes_as_in_lm_eval(pair: Pair, tmp_path: Path) -> None:
    texts = ("liest 東京 🦊.", "Zürich ist schön.", "a.", "goes home to eat bread.")
    compare(pair, [row(*texts, label=i % 4, a=f"Man {i} waits.") for i in range(8)], tmp_path)


def test_a_choice_that_fills_the_context_is_answered_as_in_lm_eval(pair: Pair) -> None:
    """Its last token is asked about and never read. lm-eval cuts what is longer by a token, and here it is an error."""
    prompt = tuple(8 + (37 * i) % 2000 for i in range(pair.engine.max_length - 2))
    asked = Request(
        request_id="q", sample_id="q", kind="loglikelihood", prompt_ids=prompt, continuation_ids=(77, 78, 79)
    )
    ((theirs, greedy),) = pair.hf._loglikelihood_tokens([(("", ""), list(prompt), [77, 78, 79])], disable_tqdm=True)
    found = pair.engine.run(asked, lambda event, at_s: None)
    assert found.loglikelihood == pytest.approx(theirs, abs=1e-3)
    assert found.is_greedy is greedy
    longer = asked.model_copy(update={"prompt_ids": (8, *prompt)})
    with pytest.raises(EngineError, match="exceed max_length"):
        pair.engine.run(longer, lambda event, at_s: None)


def test_a_batch_is_scored_as_lm_evals_batch(pair: Pair, tmp_path: Path) -> None:
    files = endings(tmp_path, [row(*WORDS, label=i % 4, a=f"Man {i} waits{i * ' long'}.") for i in range(6)])
    names = {split: str(path) for split, path in files.items()}
    requests = AnyTask(AnyTaskParameters(task="hellaswag", data_files=names), None).requests(
        pair.engine.tokenizer, pair.engine.max_length
    )
    theirs = pair.hf._loglikelihood_tokens(
        [(("", ""), list(r.prompt_ids), list(r.continuation_ids)) for r in requests], disable_tqdm=True, override_bs=8
    )
    found = pair.engine.run_batch(requests, lambda event, at_s: None)
    assert [one.loglikelihood for one in found] == [pytest.approx(value, abs=1e-3) for value, _ in theirs]
    assert [one.is_greedy for one in found] == [greedy for _, greedy in theirs]


@pytest.mark.parametrize(
    ("experts", "others"), [("int8", "int8"), ("int8", "int4-g32"), ("fp8", "int4-g64"), ("bf16", "mxfp4")]
)
def test_narrow_weights_are_scored_as_lm_eval_scores_the_values_that_they_stand_for(
    experts: Form, others: Form, folder: Path, tmp_path: Path
) -> None:
    """transformers computes in fp32 with the widened values of the same matrices."""
    shutil.copytree(folder, widened := tmp_path / "widened")
    weights = load_file(folder / "model.safetensors")
    forms = {name: experts if ".experts." in name else others for name in weights if NARROWED.search(name)}
    assert len(forms) == 3 * (3 * 8 + 4) + 1
    for name, form in forms.items():
        weights[name] = store(weights[name], form).to(torch.float32)
    save_file(weights, widened / "model.safetensors", metadata={"format": "pt"})
    asked = Quantisation(experts=experts, attention=others, head=others)
    engine = ReferenceEngine(load_checkpoint(str(folder), torch.float32, asked), DroplessParameters())
    rows = [row(*WORDS, label=i, a=f"Man {i} waits.") for i in range(4)]
    compare(Pair(engine, load_pair(widened).hf), rows, tmp_path)
