from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.model.attention import AttentionWeights
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint, tensor_shapes
from engines.model.weights import SparseWeights
from tests.fakes.random_models import BUNDLED, KINDS, copy_bundled, write_random_model

GATE = "model.layers.2.mlp.experts.5.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_bundled(tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_tensors_are_those_transformers_writes(tmp_path: Path, kind: str) -> None:
    write_random_model(tmp_path, kind)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert tensor_shapes(inspect_checkpoint(str(tmp_path)).config) == written


def test_each_experts_gate_up_and_down_are_its_own() -> None:
    tensors = load_file(BUNDLED / "model.safetensors")
    mlp = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).weights.layers[2].mlp
    assert isinstance(mlp, SparseWeights)
    expert = mlp.experts.experts[5]
    for name, matrix in (("gate", expert.gate_IH), ("up", expert.up_IH), ("down", expert.down_HI)):
        assert isinstance(matrix, torch.Tensor)
        assert torch.equal(matrix, tensors[GATE.replace("gate", name)].float())


def test_matrices_take_the_asked_dtype_and_vectors_stay_wide() -> None:
    weights = load_checkpoint("bundled:tiny-qwen3-moe", torch.bfloat16).weights
    mlp, attention = weights.layers[0].mlp, weights.layers[0].attention
    assert isinstance(mlp, SparseWeights)
    assert isinstance(attention, AttentionWeights)
    down_HI = mlp.experts.experts[3].down_HI
    assert isinstance(down_HI, torch.Tensor)
    assert isinstance(attention.q_QH, torch.Tensor)
    assert {weights.embedding_LH.dtype, down_HI.dtype, attention.q_QH.dtype} == {torch.bfloat16}
    assert {weights.norm.weight.dtype, mlp.router.weight_EH.dtype} == {torch.float32}


def test_tied_head_is_the_embedding_itself_and_an_untied_one_is_not(tmp_path: Path) -> None:
    tied = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).weights
    assert tied.head_LH is tied.embedding_LH
    write_random_model(tmp_path, "llama")
    untied = load_checkpoint(str(tmp_path), torch.float32).weights
    assert not torch.equal(untied.head_LH, untied.embedding_LH)


def test_facts_of_the_bundled_model_tell_what_it_has_learnt() -> None:
    facts = inspect_checkpoint("bundled:tiny-qwen3-moe")
    assert facts.note == "trained on generated text"
    assert facts.tokenizer.eos_token_ids == facts.config.eos_token_ids == (0,)
    assert facts.tokenizer.name.startswith("tiny-qwen3-moe@")


def test_inspecting_needs_neither_transformers_nor_the_weights_in_memory() -> None:
    code = (
        "import sys; from engines.model.checkpoints import inspect_checkpoint; "
        "inspect_checkpoint('bundled:tiny-qwen3-moe'); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_end_tokens_of_the_generation_config_stand_beside_the_tokenizers_own(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert inspect_checkpoint(str(folder)).tokenizer.eos_token_ids == (0, 3, 4)


# --- damaged folders -------------------------------------------------------------------------------------------------


def refuse_to_load_and_to_inspect(folder: Path, message: str) -> None:
    """Whatever can be seen without weights is seen when the plan is checked already."""
    with pytest.raises(EngineError, match=message):
        load_checkpoint(str(folder), torch.float32)
    with pytest.raises(EngineError, match=message):
        inspect_checkpoint(str(folder))


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(GATE))
    refuse_to_load_and_to_inspect(folder, rf"tensor '{GATE}' missing \(1 in all\)")


def test_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({GATE: torch.zeros(128, 191)}))
    refuse_to_load_and_to_inspect(folder, rf"tensor '{GATE}' has shape \(128, 191\), config.json asks for \(128, 192\)")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_tensor_of_a_form_that_is_not_read_is_named_before_a_run(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({GATE: torch.zeros(128, 192).to(dtype)}))
    refuse_to_load_and_to_inspect(
        folder, rf"model.safetensors: tensor '{GATE}' holds {dtype}; quantised weights are not supported"
    )


def test_head_beside_tied_embeddings_may_not_be_whole_numbers(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2048, 192, dtype=torch.int32)}))
    refuse_to_load_and_to_inspect(folder, r"tensor 'lm_head.weight' holds torch.int32")


def test_left_over_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.shared_expert.weight": torch.zeros(2)}))
    refuse_to_load_and_to_inspect(folder, r"tensor 'model.layers.0.mlp.shared_expert.weight' left over")


def test_rotary_frequencies_of_old_exports_are_no_left_over(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    assert load_checkpoint(str(folder), torch.float32).config.n_layers == 4


def test_head_beside_tied_embeddings_must_equal_them(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert load_checkpoint(str(folder), torch.float32).weights.head_LH.shape == (2048, 192)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(EngineError, match=r"lm_head\.weight.*tie_word_embeddings; .*write false there"):
        load_checkpoint(str(folder), torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_checkpoint(str(folder), torch.float32).weights
    assert torch.equal(weights.head_LH, 2 * weights.embedding_LH)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensor_with_nan_or_infinity_is_named(folder: Path, value: float) -> None:
    rewrite(folder, lambda tensors: tensors[GATE][3].fill_(value))
    with pytest.raises(EngineError, match=f"tensor '{GATE}' holds NaN or infinity"):
        load_checkpoint(str(folder), torch.float32)


@pytest.mark.parametrize("kept_bytes", [4, 1000, 3_000_000])
def test_truncated_file_is_named(folder: Path, kept_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    refuse_to_load_and_to_inspect(folder, r"model\.safetensors: truncated or not safetensors")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen2", max_shard_size="200KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuse_to_load_and_to_inspect(tmp_path, shard.name)


@pytest.mark.parametrize("content", [[1], {"weight_map": [1]}, {"weight_map": {"a": 5}}, {"weight_map": None}])
def test_index_that_is_none_is_named(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    refuse_to_load_and_to_inspect(folder, r"index\.json: (expected a JSON object|weight_map is no map)")


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"1" * 5000, b"null"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
def test_file_of_another_content_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    refuse_to_load_and_to_inspect(folder, rf"{name}: (not JSON|not a tokenizer|expected a JSON object|truncated or)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 256},
            r"tensor 'model.embed_tokens.weight' has shape \(2048, 192\), .* asks for \(2048, 256\)",
        ),
        ({"num_hidden_layers": 5}, r"tensor 'model.layers.4.\S+' missing \(\d+ in all\)"),
        ({"num_hidden_layers": 1000}, r"tensor 'model.layers.10.\S+' missing \(\d+ in all\)"),
        ({"num_hidden_layers": 3}, r"tensor 'model.layers.3.\S+' left over"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            r"tensor 'model.layers.0.self_attn.\w_proj.weight' has shape",
        ),
        ({"num_experts": 17}, r"tensor 'model.layers.0.mlp.experts.16.\S+' missing"),
        ({"moe_intermediate_size": 2**31 - 1}, r"tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' has shape"),
        ({"moe_intermediate_size": 97}, r"has shape \(128, 192\), config.json asks for \(97, 192\)"),
        ({"tie_word_embeddings": False}, r"tensor 'lm_head.weight' missing \(1 in all\)"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 16}, "but MixtralForCausalLM has no such key"),
    ],
)
def test_config_that_lies_about_sizes_is_told_from_the_tensors(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    refuse_to_load_and_to_inspect(folder, message)


@pytest.mark.parametrize("template", [5, [1], [{"name": "default", "template": 5}]])
def test_chat_template_that_is_no_text_is_named_or_left_out(folder: Path, template: object) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    if template == [1]:
        assert (
            inspect_checkpoint(str(folder)).tokenizer.chat([{"role": "user", "content": "hi"}]).startswith("user: hi")
        )
    else:
        refuse_to_load_and_to_inspect(folder, r"tokenizer_config\.json: chat_template must be a text, found 5")


def test_one_file_beside_an_index_of_others_leaves_no_silent_choice(tmp_path: Path) -> None:
    """As a merged model that was saved into the folder of its shards: transformers takes the one file."""
    write_random_model(tmp_path, "llama", max_shard_size="300KB")
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    tensors = {
        name: tensor for path in tmp_path.glob("model-*.safetensors") for name, tensor in load_file(path).items()
    }
    save_file(tensors, single)
    with pytest.raises(
        EngineError, match=r"model\.safetensors is there, and .*index\.json names other files: two models"
    ):
        inspect_checkpoint(str(tmp_path))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, single.name)}))
    assert inspect_checkpoint(str(tmp_path)).config.n_layers == 3


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pkl"])
def test_pickles_are_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refuse_to_load_and_to_inspect(folder, rf"only {name}; pickle checkpoints are never loaded; convert to safetensors")


def test_folder_without_weights_or_config_says_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuse_to_load_and_to_inspect(folder, r"no model\.safetensors")
    (folder / "config.json").unlink()
    refuse_to_load_and_to_inspect(folder, r"no config\.json")


def test_config_that_is_not_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refuse_to_load_and_to_inspect(folder, r"config\.json: not JSON")


def test_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2000}))
    refuse_to_load_and_to_inspect(folder, "tokenizer does not match the model: ids up to 2047, embedding rows 2000")


def test_source_that_is_neither_folder_nor_on_the_hub_names_both_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub client reads this switch when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for check in (inspect_checkpoint, lambda source: load_checkpoint(source, torch.float32)):
        with pytest.raises(EngineError, match=r"no folder /.*/nobody/nothing, and the Hugging Face hub did not give"):
            check("nobody/nothing")
    with pytest.raises(EngineError, match=r"no folder .*, and not a hub id"):
        inspect_checkpoint("./not/a/model/folder")


def test_hub_id_is_read_from_the_local_cache_and_tells_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--acme--tiny"
    copy_bundled(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for source in ("acme/tiny", f"acme/tiny@{commit}"):
        checkpoint = load_checkpoint(source, torch.float32)
        assert (checkpoint.source, checkpoint.revision) == (source, commit)
    with pytest.raises(EngineError, match="hub did not give 'acme/tiny'"):
        load_checkpoint("acme/tiny@another-branch", torch.float32)


def test_plan_check_of_a_hub_id_does_not_ask_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = copy_bundled(tmp_path / "models--acme--tiny" / "snapshots" / ("0" * 40))
    (snapshot / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = "acme/tiny@" + "0" * 40
    assert inspect_checkpoint(source).config.n_layers == 4
    with pytest.raises(EngineError, match=r"no model\.safetensors"):
        load_checkpoint(source, torch.float32)


def test_weights_are_fetched_once_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of gpt-oss-20b and of Mistral-7B-v0.3 together, by the hub's own choice among them."""
    from huggingface_hub.utils import filter_repo_objects

    used = ["config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/default.jinja"]
    used += ["model.safetensors.index.json", "model-00000-of-00002.safetensors", "original/config.json"]
    copies = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors", "README.md"]
    fetched: list[str] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        fetched.extend(
            filter_repo_objects(used + copies, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_checkpoint("acme/tiny", torch.float32)
    assert fetched == used


def test_unknown_bundled_model_lists_those_there_are() -> None:
    with pytest.raises(EngineError, match=r"no such bundled model; there is tiny-qwen3-moe"):
        inspect_checkpoint("bundled:huge")
