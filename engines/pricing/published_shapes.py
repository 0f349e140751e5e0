"""Shapes of published models by name: facts of their config.json files. No weights are needed to price them.

`max_length` is what config.json calls max_position_embeddings: the positions that the engine holds requests to. Of
text: what a model sees or hears with is left out.
"""

from __future__ import annotations

from dataclasses import replace

from engines.model.spans import Span
from engines.pricing.model_shape import LatentShape, ModelShape

PHI_3_5_MOE = ModelShape(
    name="phi-3.5-moe",
    n_layers=32,
    hidden=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    dense_width=0,
    n_experts=16,
    top_k=2,
    expert_width=6400,
    vocabulary=32064,
    max_length=131_072,
)
"""microsoft/Phi-3.5-MoE-instruct: 41.9 B parameters, one expert 150 MiB in FP16 (§5.1)."""

PHI_TINY_MOE = replace(
    PHI_3_5_MOE, name="phi-tiny-moe", n_heads=16, n_kv_heads=4, expert_width=448, max_length=4096,
    spans=(Span("sliding", 2047),),
)  # fmt: skip
"""microsoft/Phi-tiny-MoE-instruct: 3.8 B parameters."""

QWEN3_30B_A3B = ModelShape(
    name="qwen3-30b-a3b",
    n_layers=48,
    hidden=2048,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    dense_width=0,
    n_experts=128,
    top_k=8,
    expert_width=768,
    vocabulary=151936,
    max_length=40_960,
)
"""Qwen/Qwen3-30B-A3B: 30.5 B parameters."""

QWEN3_235B_A22B = replace(
    QWEN3_30B_A3B, name="qwen3-235b-a22b", n_layers=94, hidden=4096, n_heads=64, expert_width=1536
)
"""Qwen/Qwen3-235B-A22B: 235 B parameters."""

MIXTRAL_8X7B = ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 0, 8, 2, 14336, 32000, max_length=32_768)
"""mistralai/Mixtral-8x7B-v0.1: 46.7 B parameters."""

DEEPSEEK_MOE_16B = ModelShape(
    "deepseek-moe-16b", 28, 2048, 16, 16, 128, 10944, 64, 6, 1408, 102400, shared_width=2816, n_dense_layers=1,
    max_length=4096,
)  # fmt: skip
"""deepseek-ai/deepseek-moe-16b-base: 16.4 B parameters, 66 x 27 experts with the shared ones (001, Table II)."""

GPT_OSS_20B = ModelShape(
    "gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 32, 4, 2880, 201088, max_length=131_072,
    spans=(Span("sliding", 128), None),
)  # fmt: skip
"""openai/gpt-oss-20b: 20.9 B parameters; two bytes a value here, as source 003 ran it, four bits in its checkpoint."""

GPT_OSS_120B = replace(GPT_OSS_20B, name="gpt-oss-120b", n_layers=36, n_experts=128)
"""openai/gpt-oss-120b: 116.8 B parameters."""

OLMOE_1B_7B = ModelShape("olmoe-1b-7b", 16, 2048, 16, 16, 128, 0, 64, 8, 1024, 50304, max_length=4096)
"""allenai/OLMoE-1B-7B-0924: 6.9 B parameters."""

QWEN15_MOE_A27B = ModelShape(
    "qwen1.5-moe-a2.7b", 24, 2048, 16, 16, 128, 0, 60, 4, 1408, 151936, shared_width=5632, max_length=8192
)
"""Qwen/Qwen1.5-MoE-A2.7B: 14.3 B parameters."""

GLM_47_FLASH = ModelShape(
    "glm-4.7-flash", 47, 2048, 20, 20, 256, 10240, 64, 4, 1536, 154880, shared_width=1536, n_dense_layers=1,
    latent=LatentShape(768, 512, 192, 64, 256), max_length=202_752,
)  # fmt: skip
"""zai-org/GLM-4.7-Flash: 30 B parameters (003, Table 2)."""

GLM_45_AIR = ModelShape(
    "glm-4.5-air", 46, 4096, 96, 8, 128, 10944, 128, 8, 1408, 151552, shared_width=1408, n_dense_layers=1,
    max_length=131_072,
)  # fmt: skip
"""zai-org/GLM-4.5-Air: 106.9 B parameters."""

DEEPSEEK_V2_LITE = ModelShape(
    "deepseek-v2-lite", 27, 2048, 16, 16, 192, 10944, 64, 6, 1408, 102400, shared_width=2816, n_dense_layers=1,
    latent=LatentShape(None, 512, 128, 64, 128), max_length=163_840,
)  # fmt: skip
"""deepseek-ai/DeepSeek-V2-Lite: 15.7 B parameters."""

DEEPSEEK_V2 = ModelShape(
    "deepseek-v2", 60, 5120, 128, 128, 192, 12288, 160, 6, 1536, 102400, shared_width=3072, n_dense_layers=1,
    latent=LatentShape(1536, 512, 128, 64, 128), max_length=163_840,
)  # fmt: skip
"""deepseek-ai/DeepSeek-V2: 236 B parameters."""

DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", 61, 7168, 128, 128, 192, 18432, 256, 8, 2048, 129280, shared_width=2048, n_dense_layers=3,
    latent=LatentShape(1536, 512, 128, 64, 128), max_length=163_840,
)  # fmt: skip
"""deepseek-ai/DeepSeek-V3: 671 B parameters without the layer that predicts a second token."""

LLAMA_4_SCOUT = ModelShape(
    "llama-4-scout", 48, 5120, 40, 8, 128, 0, 16, 1, 8192, 202048, shared_width=8192, max_length=262_144,
    spans=(*3 * (Span("chunked", 8192),), None),
)  # fmt: skip
"""meta-llama/Llama-4-Scout-17B-16E: 107.8 B parameters of text."""

DBRX = ModelShape("dbrx", 40, 6144, 48, 8, 128, 0, 16, 4, 10752, 100352, max_length=32_768)
"""databricks/dbrx-base: 131.6 B parameters."""

# --- dense -----------------------------------------------------------------------------------------------------------

QWEN25_05B = ModelShape(
    "qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 0, 0, 0, 151936, ties_embedding=True, max_length=32_768
)
"""Qwen/Qwen2.5-0.5B: 0.49 B parameters."""

QWEN25_15B = ModelShape(
    "qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 0, 0, 0, 151936, ties_embedding=True, max_length=131_072
)
"""Qwen/Qwen2.5-1.5B: 1.54 B parameters."""

QWEN25_3B = ModelShape(
    "qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 0, 0, 0, 151936, ties_embedding=True, max_length=32_768
)
"""Qwen/Qwen2.5-3B: 3.09 B parameters."""

LLAMA_32_1B = ModelShape(
    "llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 0, 0, 0, 128256, ties_embedding=True, max_length=131_072
)
"""meta-llama/Llama-3.2-1B: 1.24 B parameters."""

LLAMA_32_3B = ModelShape(
    "llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 0, 0, 0, 128256, ties_embedding=True, max_length=131_072
)
"""meta-llama/Llama-3.2-3B: 3.21 B parameters."""

GEMMA_2_2B = ModelShape(
    "gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 0, 0, 0, 256000, ties_embedding=True, max_length=8192,
    spans=(Span("sliding", 4096), None),
)  # fmt: skip
"""google/gemma-2-2b: 2.61 B parameters."""

_NAMED = (
    PHI_3_5_MOE, PHI_TINY_MOE, QWEN3_30B_A3B, QWEN3_235B_A22B, MIXTRAL_8X7B, DEEPSEEK_MOE_16B, GPT_OSS_20B,
    GPT_OSS_120B, OLMOE_1B_7B, QWEN15_MOE_A27B, GLM_47_FLASH, GLM_45_AIR, DEEPSEEK_V2_LITE, DEEPSEEK_V2, DEEPSEEK_V3,
    LLAMA_4_SCOUT, DBRX, QWEN25_05B, QWEN25_15B, QWEN25_3B, LLAMA_32_1B, LLAMA_32_3B, GEMMA_2_2B,
)  # fmt: skip
NAMED_SHAPES = {shape.name: shape for shape in _NAMED}
