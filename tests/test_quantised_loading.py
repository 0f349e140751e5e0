"""What `quantise` makes of a checkpoint: which tensors, how exactly, and what stays a view of the mapped file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.errors import EngineError
from engines.kernels import compile as compile_module
from engines.kernels import tables
from engines.kernels.compile import FLAGS_VARIABLE
from engines.kernels.library import Loaded
from engines.model.architecture import ModelConfig
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.held_weights import held_weights, rounds_inputs
from engines.model.quantised import AS_THE_MODEL, FORMS, AttentionArithmetic, Quantisation, QuantisedMatrix, store
from engines.model.transformer import KeyValueCache, Transformer
from engines.model.wanted_tensors import check_quantisation
from engines.model.weights import ModelWeights, SparseWeights
from engines.techniques.presets import dropless
from tests.fakes.families import CASES, FamilyCase, write_family
from tests.fakes.random_models import BUNDLED, copy_tokenizer, write_random_model
from tests.kernel_forms import needs_bf16, needs_byte_attention

pytestmark = pytest.mark.numbers

MODEL = "bundled:tiny-qwen3-moe"
TOKENS = torch.randint(0, 2048, (24,), generator=torch.Generator().manual_seed(3))
# hidden and intermediate sizes that fill blocks of 64 columns
WIDE_MOE = FamilyCase(
    "Qwen3Moe",
    {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
)
"""As wide as the largest groups everywhere."""
WIDE_MXFP4 = FamilyCase("GptOss", {**CASES["gpt-oss-mxfp4"].changes, "intermediate_size": 128}, eager=True, mxfp4=True)


def logits_of(folder: Path | str, quantise: Quantisation = AS_THE_MODEL) -> Tensor:
    model = Transformer(load_checkpoint(str(folder), torch.float32, quantise))
    cache = KeyValueCache(model.config)
    cache.start(len(TOKENS))
    with torch.inference_mode():
        return model.logits(model.forward(TOKENS, cache, dropless(), "prefill")[0])


def held(part: Any) -> Iterator[Tensor]:
    """Every tensor of the weights."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from held(one)
    elif is_dataclass(part):
        for field in fields(part):
            yield from held(getattr(part, field.name))


@pytest.mark.parametrize(
    ("form", "rounding"),
    [
        ("int8", {"arithmetic": "int8"}),
        pytest.param("bf16", {"arithmetic": "bf16"}, marks=needs_bf16),
        pytest.param("bf16", {"arithmetic": "bf16", "attention_arithmetic": "fp32"}, marks=needs_bf16),
        pytest.param("fp32", {"attention_arithmetic": "bf16"}, marks=needs_bf16),
        pytest.param("int4-g32", {"attention_arithmetic": "bf16"}, marks=needs_bf16),
        pytest.param("int8", {"arithmetic": "int8", "attention_arithmetic": "int8"}, marks=needs_byte_attention),
        pytest.param("fp32", {"attention_arithmetic": "int8"}, marks=needs_byte_attention),
    ],
)
def test_rounding_arithmetic_of_a_model_is_torchs_with_rounded_inputs(
    form: str, rounding: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and a step of decoding in the kernels, beside products by torch. Of one layer: a level near a tie may go
    the other way, and with many layers that error travels."""
    write_family(tmp_path, FamilyCase("Qwen3Moe", WIDE_MOE.changes | {"num_hidden_layers": 1}))
    copy_tokenizer(tmp_path)
    every = dict.fromkeys(("experts", "attention", "head"), form)
    asked = Quantisation.model_validate(every | rounding)

    def both(quantise: Quantisation) -> tuple[Tensor, Tensor]:
        model = Transformer(load_checkpoint(str(tmp_path), torch.float32, quantise))
        cache = KeyValueCache(model.config)
        cache.start(len(TOKENS) + 1)
        with torch.inference_mode():
            prefill = model.logits(model.forward(TOKENS, cache, dropless(), "prefill")[0])
            decode = model.logits(model.forward(TOKENS[:1], cache, dropless(), "decode")[0])
        return prefill, decode

    found, plain = both(asked), both(Quantisation.model_validate(every))
    for module in ("native", "tables"):
        monkeypatch.setattr(f"engines.kernels.{module}.library", lambda: None)
    expected = both(asked)
    least_cost = {"int8": 1e-3, "bf16": 3e-4}.get(rounding.get("arithmetic", "fp32"), 1e-5)
    for phase, own, torchs, unrounded in zip(("prefill", "decode"), found, expected, plain, strict=True):
        apart, cost = (own - torchs).norm() / torchs.norm(), (unrounded - torchs).norm() / torchs.norm()
        if phase == "decode" and "arithmetic" not in rounding:
            least_cost = 0.0  # one token's attention is fp32, behind the same keys and values of the first layer
            assert cost < 1e-5
            assert apart < 1e-5
        else:
            assert cost > least_cost
            assert apart < cost / 5


@pytest.mark.parametrize("to", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("family", "why_not"),
    [
        ("deepseek-v2", "latent attention"),
        ("gemma2", "a soft cap of scores"),
        ("olmoe", "a norm over all heads at once"),
        ("olmoe-clip", "clipped queries, keys and values"),
        ("llama4", "an L2 norm of queries and keys"),
        ("mixtral-sliding", None),
    ],
)
def test_arithmetic_of_attention_is_refused_where_the_kernels_do_not_attend(
    family: str, why_not: str | None, to: AttentionArithmetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is told what of the model they do not compute: a user of OLMoE, which has neither latent attention nor a
    soft cap, looked for it in vain."""
    for lacking in ("why_not_bf16", "why_no_byte_attention"):
        monkeypatch.setattr(tables, lacking, lambda: None)
    write_family(tmp_path, CASES[family])
    config, asked = inspect_checkpoint(str(tmp_path)).config, Quantisation(attention_arithmetic=to)
    if why_not is None:
        return check_quantisation(config, asked)
    told = (
        f"attention_arithmetic: torch computes this model's attention ({why_not}), and would only imitate it; remove it"
    )
    with pytest.raises(EngineError, match=re.escape(told)):
        check_quantisation(config, asked)
    return None


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (Quantisation(experts="bf16", arithmetic="bf16"), "arithmetic"),
        (Quantisation(attention_arithmetic="bf16"), "attention_arithmetic"),
        (Quantisation(attention_arithmetic="int8"), "attention_arithmetic"),
    ],
)
def test_arithmetic_is_refused_where_nothing_here_does_it(
    asked: Quantisation, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for why_not in ("why_not_bf16", "why_no_byte_attention"):
        monkeypatch.setattr(tables, why_not, lambda: "this processor lacks it")
    with pytest.raises(EngineError, match=f'^{key} "{asked.rounding[key]}": this processor lacks it; leave {key} out'):
        load_checkpoint("bundled:tiny-qwen3-moe", torch.float32, asked)


def test_without_kernels_the_reason_is_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "library", lambda: None)
    monkeypatch.setattr(tables, "loaded", lambda: Loaded(None, reason="no C++ compiler found"))
    told = tables.why_not_bf16.__wrapped__()
    assert told == "there are no kernels, and torch would only imitate it (no C++ compiler found)"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (None, "the kernels were built without AVX-512 BF16 and VNNI, which this processor or its compiler lacks"),
        (
            "-march=native -O2",
            "the kernels were built without AVX-512 BF16 and VNNI, which this processor or its compiler lacks",
        ),
        ("-march=x86-64-v3", "JOULEBENCH_KERNEL_FLAGS holds the kernels to less than AVX-512 BF16 and VNNI"),
        (
            "-march=native -mno-avx512bf16",
            "JOULEBENCH_KERNEL_FLAGS holds the kernels to less than AVX-512 BF16 and VNNI",
        ),
        (
            "-march=native -mno-avx512vnni",
            "JOULEBENCH_KERNEL_FLAGS holds the kernels to less than AVX-512 BF16 and VNNI",
        ),
        ("-O2", "JOULEBENCH_KERNEL_FLAGS holds the kernels to less than AVX-512 BF16 and VNNI"),
    ],
)
def test_kernels_without_bf16_blame_the_variable_only_where_it_holds_them(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, told: str
) -> None:
    """As on Arm, or with an old compiler: this processor names nothing that it lacks."""
    monkeypatch.setattr(tables, "library", lambda: SimpleNamespace(joulebench_multiplies_bf16=lambda: 0))
    monkeypatch.setattr(tables, "lacks", lambda needs: None)
    monkeypatch.delenv(FLAGS_VARIABLE, raising=False)
    if flags is not None:
        monkeypatch.setenv(FLAGS_VARIABLE, flags)
    assert tables.why_not_bf16.__wrapped__() == told


def test_attention_by_bytes_needs_vnni_and_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an Ice Lake, or in a virtual machine that hides the one."""
    asked = Quantisation(attention_arithmetic="int8")
    monkeypatch.setattr(compile_module, "_cpuinfo", lambda: ["flags\t\t: avx512f avx512_vnni"])
    assert compile_module.lacks_for(asked) is None
    needing_both = asked.model_copy(update={"arithmetic": "bf16"})
    assert compile_module.lacks_for(needing_both) == (("arithmetic",), "this processor lacks AVX-512 BF16")
    monkeypatch.setattr(compile_module, "_cpuinfo", lambda: ["flags\t\t: avx2 fma avx_vnni"])
    assert compile_module.lacks_for(asked) == (("attention_arithmetic",), "this processor lacks AVX-512 VNNI")
    monkeypatch.setattr(tables, "library", lambda: SimpleNamespace(joulebench_attends_by_bytes=lambda: 0))
    monkeypatch.setattr(tables, "lacks", lambda needs: None)
    monkeypatch.setenv(FLAGS_VARIABLE, "-march=x86-64-v4")
    told = "JOULEBENCH_KERNEL_FLAGS holds the kernels to less than AVX-512 VNNI"
    assert tables.why_no_byte_attention.__wrapped__() == told


@pytest.mark.parametrize(
    ("has", "told"),
    [
        ("avx512f avx512_bf16 avx512_vnni", None),
        ("avx512f avx512_bf16", "this processor lacks AVX-512 VNNI"),
        ("avx512f avx512_vnni", "this processor lacks AVX-512 BF16"),
        ("avx2 fma", "this processor lacks AVX-512 BF16"),
    ],
)
def test_what_a_processor_lacks_to_multiply_bf16_is_named(
    monkeypatch: pytest.MonkeyPatch, has: str, told: str | None
) -> None:
    """The kernels' own condition (bf16.h) asks for both."""
    monkeypatch.setattr(compile_module, "_cpuinfo", lambda: [f"flags\t\t: {has}"])
    assert compile_module.lacks(compile_module.BF16_NEEDS) == told


@needs_bf16
def test_matrices_of_bf16_arithmetic_take_no_more_memory_and_other_ones_stay_plain(tmp_path: Path) -> None:
    """Held as the model's own dtype says, with a head that is tied: that stays the embedding's memory."""
    write_family(tmp_path, FamilyCase("Qwen3Moe", WIDE_MOE.changes | {"tie_word_embeddings": True}))
    copy_tokenizer(tmp_path)
    plain = load_checkpoint(str(tmp_path), torch.bfloat16).weights
    asked = Quantisation(experts="bf16", head="bf16", arithmetic="bf16")
    rounding = load_checkpoint(str(tmp_path), torch.bfloat16, asked).weights
    assert held_weights(rounding) == held_weights(plain)
    assert not rounding.head_is_copy
    assert (rounds_inputs(plain), rounds_inputs(rounding)) == (None, "bf16")
    assert isinstance(rounding.embedding_LH, Tensor)


# --- which tensors ----------------------------------------------------------------------------------------------------

COMPONENTS = {
    "experts": r"\.experts\.",
    "dense": r"\.(mlp|feed_forward|shared_experts?)\.(gate|up|down|gate_up)_proj\.weight$",
    "attention": r"\.self_attn\.(q|k|v|o|qkv|q_a|q_b)_proj\.weight$|\.kv_a_proj_with_mqa\.weight$",
    "head": r"lm_head\.weight$",
}


def rounded(name: str, tensor: Tensor) -> Tensor:
    """Through int8, one scale for each output, by the format's definition. Stacks of experts lie as [E, in, out]."""
    inputs = 1 if tensor.dim() == 3 else -1
    scale = tensor.abs().amax(dim=inputs, keepdim=True) / 127
    return (tensor / scale).round() * scale


def write_rounded(source: Path, folder: Path, component: str) -> None:
    """The same checkpoint with the component's matrices rounded in the file. A tied head becomes one of its own."""
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if component == "head" and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    chosen = {n for n in tensors if re.search(COMPONENTS[component], n) and not n.endswith("_bias")}
    assert chosen
    save_file({n: rounded(n, t) if n in chosen else t for n, t in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "components"),
    [
        ("mixtral", ["experts", "attention", "head"]),
        ("qwen2-moe-some-dense", ["experts", "dense"]),
        ("gpt-oss", ["experts", "attention"]),
        ("deepseek-v3", ["experts", "dense", "attention"]),
        ("deepseek-v2-groups", ["attention"]),
        ("llama4", ["experts", "dense"]),
        ("phi3", ["dense", "attention"]),
        ("gemma2", ["dense", "head"]),
    ],
)
def test_component_is_its_tensors_and_no_others(tmp_path: Path, case: str, components: list[str]) -> None:
    """The oracle is a folder whose tensors, chosen by their published names, were rounded beforehand."""
    write_family(tmp_path / "plain", CASES[case])
    plain = logits_of(tmp_path / "plain")
    for component in components:
        write_rounded(tmp_path / "plain", tmp_path / component, component)
        expected = logits_of(tmp_path / component)
        found = logits_of(tmp_path / "plain", Quantisation(**{component: "int8"}))
        assert (found - expected).abs().max() < 1e-4
        assert (plain - expected).abs().max() > 1e-3, f"{component} makes no difference"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_held_by_every_component(form: Any, tmp_path: Path) -> None:
    folder = BUNDLED
    if form == "int4-g128":  # The bundled model is 192 wide.
        folder = tmp_path
        write_family(folder, WIDE_MOE)
    quantise = Quantisation(experts=form, attention=form, head=form)
    checkpoint = load_checkpoint(str(folder), torch.float32, quantise)
    tensors = load_file(folder / "model.safetensors")
    layer = checkpoint.weights.layers[1]
    assert isinstance(layer.mlp, SparseWeights)
    pairs = [
        (checkpoint.weights.head_LH, "model.embed_tokens.weight", form),
        (layer.attention.out_HQ, "model.layers.1.self_attn.o_proj.weight", form),
        (layer.mlp.experts.experts[3].down_HI, "model.layers.1.mlp.experts.3.down_proj.weight", form),
    ]
    for matrix, name, own in pairs:
        expected = store(tensors[name], own)
        assert type(matrix) is type(expected)
        assert matrix.nbytes == expected.nbytes
        assert torch.equal(matrix.to(torch.float32), expected.to(torch.float32))
    assert checkpoint.weights.embedding_LH.dtype == torch.float32


def test_bytes_per_expert_are_those_of_its_form() -> None:
    """What a technique that moves experts counts."""
    mlp = load_checkpoint(MODEL, torch.float32, Quantisation(experts="int8")).weights.layers[0].mlp
    assert isinstance(mlp, SparseWeights)
    assert mlp.experts.n_bytes_per_expert == 3 * 128 * 192 + (128 + 128 + 192) * 4


def test_tied_head_of_another_form_leaves_the_embedding_alone() -> None:
    plain = load_checkpoint(MODEL, torch.float32).weights
    weights = load_checkpoint(MODEL, torch.float32, Quantisation(head="int8")).weights
    assert isinstance(weights.head_LH, QuantisedMatrix)
    assert torch.equal(weights.embedding_LH, plain.embedding_LH)
    assert load_checkpoint(MODEL, torch.float32, Quantisation(head="fp32")).weights.head_LH.shape == (2048, 192)


# --- MXFP4 files ------------------------------------------------------------------------------------------------------


def test_mxfp4_experts_of_a_file_keep_their_bits(tmp_path: Path) -> None:
    write_family(tmp_path, WIDE_MXFP4)
    kept = load_checkpoint(str(tmp_path), torch.float32, Quantisation(experts="mxfp4")).weights
    wide = load_checkpoint(str(tmp_path), torch.float32).weights
    n_bytes = 0
    for kept_layer, wide_layer in zip(kept.layers, wide.layers, strict=True):
        assert isinstance(kept_layer.mlp, SparseWeights)
        assert isinstance(wide_layer.mlp, SparseWeights)
        for one, other in zip(kept_layer.mlp.experts.experts, wide_layer.mlp.experts.experts, strict=True):
            for name in ("gate_IH", "up_IH", "down_HI"):
                matrix = getattr(one, name)
                assert isinstance(matrix, QuantisedMatrix)
                assert torch.equal(matrix.to(torch.float32), getattr(other, name))
                n_bytes += matrix.nbytes
    packed = [t for n, t in load_file(tmp_path / "model.safetensors").items() if n.endswith(("_blocks", "_scales"))]
    assert n_bytes == sum(t.nbytes for t in packed)
    assert (logits_of(tmp_path, Quantisation(experts="mxfp4")) - logits_of(tmp_path)).abs().max() < 1e-4


def test_mxfp4_experts_of_a_file_may_take_another_form(tmp_path: Path) -> None:
    write_family(tmp_path, WIDE_MXFP4)
    exact, int8 = logits_of(tmp_path), logits_of(tmp_path, Quantisation(experts="int8"))
    assert 1e-4 < (int8 - exact).abs().max() < 0.1 * exact.abs().max()


def test_mxfp4_file_whose_width_the_kernels_do_not_take_is_told(tmp_path: Path) -> None:
    write_family(tmp_path, CASES["gpt-oss-mxfp4"])
    with pytest.raises(EngineError, match=r"mlp\.experts\.down_proj': mxfp4 needs a width .* multiple of 64, not 96"):
        load_checkpoint(str(tmp_path), torch.float32, Quantisation(experts="mxfp4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.fill_(255), "holds NaN or infinity"),
        (lambda t: t.float(), "holds torch.float32; MXFP4 is bytes"),
    ],
)
def test_mxfp4_scales_that_are_none_are_named(tmp_path: Path, change: Any, message: str) -> None:
    write_family(tmp_path, WIDE_MXFP4)
    name, path = "model.layers.1.mlp.experts.down_proj_scales", tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)
    with pytest.raises(EngineError, match=f"model.safetensors: tensor '{name}' {message}"):
        load_checkpoint(str(tmp_path), torch.float32, Quantisation(experts="mxfp4"))


# --- views of the file ------------------------------------------------------------------------------------------------


def mapped(folder: Path) -> list[range]:
    """Addresses at which the folder's weight files are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if str(folder) in line and line.endswith(".safetensors")]
    return [range(int(first, 16), int(end, 16)) for first, end in found]


def outside(weights: ModelWeights, folder: Path) -> int:
    """Bytes of weights that are no views of the files."""
    places = mapped(folder)
    return sum(t.nbytes for t in held(weights) if not any(t.data_ptr() in place for place in places))


def n_stacked_bytes(config: ModelConfig) -> int:
    assert config.moe is not None
    values = 3 * config.moe.n_experts * config.moe.expert_width * config.hidden
    return 4 * values * len(config.moe.sparse_layers)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("case", ["mixtral", "phi3", "deepseek-v2", "glm4-moe-air", "gpt-oss"])
def test_tensors_of_the_right_form_stay_in_the_file(tmp_path: Path, case: str) -> None:
    """Fused ones too. Only stacked experts, which lie the other way round in their files, have to be copied."""
    write_family(tmp_path, CASES[case])
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    copied = 0
    if case == "gpt-oss":
        assert checkpoint.config.moe is not None
        n_experts, n_biases = checkpoint.config.moe.n_experts, 2 * checkpoint.config.moe.expert_width
        copied = n_stacked_bytes(checkpoint.config) + 4 * checkpoint.config.n_layers * n_experts * n_biases
    assert outside(checkpoint.weights, tmp_path) == copied


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_each_file_is_mapped_once_and_only_while_it_is_used(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen2", max_shard_size="200KB")
    n_files = len(list(tmp_path.glob("model-*.safetensors")))
    assert n_files > 2
    inspect_checkpoint(str(tmp_path))
    assert mapped(tmp_path) == [], "looking at a checkpoint maps nothing"
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    assert len(mapped(tmp_path)) == n_files
    assert outside(checkpoint.weights, tmp_path) == 0
    del checkpoint
    load_checkpoint(str(tmp_path), torch.bfloat16, Quantisation(head="int8"))
    assert mapped(tmp_path) == []
