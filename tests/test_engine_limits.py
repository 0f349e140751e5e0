"""What docs/engine.md says of how far the engine is from what a machine can do: each figure follows from rows."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.benchmarks.measurement import Measurement, read_json
from tests.benchmarks.speed_summary import aims_met, beside_a_library, own_reads
from tests.engine_rows import AVX2, AVX512, HELD, INTEL, ROOT, ZEN_4, chosen, forms, ratios, words_of

ARITHMETIC = {
    "fp32": ("f32", "bf16", "f16", "int8", "int4"),
    "bf16": ("bf16 by bf16",),
    "int8": ("int8 by int8", "int4 by int8"),
}
BY_BITS = (
    ("f32",),
    ("bf16", "f16", "bf16 by bf16"),
    ("int8", "int8 by int8", "int8 by int8 with bf16 attention", "int8 by int8 with int8 attention"),
)


def test_rate_of_memory_differs_between_rows_as_the_page_says() -> None:
    by_place: dict[str, list[float]] = {}
    for row in chosen("engine-speed", "decode", "streaming read"):
        if rate := re.search(r"([\d.]+) GB/s", row.note or ""):
            by_place.setdefault(row.conditions.rpartition(", ")[2], []).append(float(rate[1]))
    widest = max(max(rates) / min(rates) for rates in by_place.values())
    says = f"Memory read up to {widest:.1f} times as fast in one row as in another of the same processor"
    assert says in words_of("docs/engine.md")


@pytest.mark.parametrize(("where", "slow"), [(ZEN_4, 40), (AVX512, 60)])
def test_decoding_by_an_even_memory_is_that_of_the_rows_whose_memory_read_so(where: str, slow: float) -> None:
    told = []
    rates = set()
    for names in BY_BITS:
        rows = [
            (row, rate)
            for row in forms(names, "prompt 512", where, metric="decode", peer="streaming read")
            if (rate := float(re.findall(r"([\d.]+) GB/s", row.note or "")[0])) < slow
        ]
        told.append(ratios([row for row, _ in rows], 2))
        rates |= {rate for _, rate in rows}
    says = (
        f"whose sum read {min(rates):.0f} to {max(rates):.0f} GB/s, decoding reached {told[0]} of that in f32,"
        f" {told[1]} in 16 bits and {told[2]} in 8 bits"
    )
    assert says in words_of("docs/engine.md")


@pytest.mark.parametrize(
    ("arithmetic", "where", "told"),
    [
        ("fp32", AVX512, "fp32, AVX-512 (Zen 5)"),
        ("bf16", AVX512, "bf16, AVX-512 (Zen 5)"),
        ("int8", AVX512, "int8, AVX-512 (Zen 5)"),
        ("fp32", ZEN_4, "fp32, AVX-512 (Zen 4)"),
        ("bf16", ZEN_4, "bf16, AVX-512 (Zen 4)"),
        ("int8", ZEN_4, "int8, AVX-512 (Zen 4)"),
        ("fp32", HELD, "fp32, AVX2 held (Zen 5)"),
        ("int8", HELD, "int8, AVX2 held (Zen 5)"),
        ("fp32", AVX2, "fp32, AVX2 (Zen 3)"),
        ("int8", AVX2, "int8, AVX2 (Zen 3)"),
        ("fp32", INTEL, "fp32, AVX-512 (Emerald Rapids)"),
        ("int8", INTEL, "int8, AVX-512 (Emerald Rapids)"),
    ],
)
def test_large_products_and_their_shares_are_those_of_the_race(arithmetic: str, where: str, told: str) -> None:
    rows = forms(ARITHMETIC[arithmetic], "prompt 512", where)
    rates = sorted(int(re.findall(r"(\d+) GFLOP/s", row.note or "")[0]) for row in rows)
    dense, sparse = (
        ratios([row for row in rows if ("dense" in row.conditions) is is_dense], 2) for is_dense in (True, False)
    )
    assert f"| {told} | {rates[0]} to {rates[-1]} GFLOP/s | {dense} | {sparse} |" in words_of("docs/engine.md")


@pytest.mark.parametrize("where", [ZEN_4, "AVX2 held (Zen 4)", "AVX2 (Zen 3)", INTEL])
def test_prompts_beside_those_with_a_librarys_products_are_those_of_their_parts(where: str) -> None:
    table = beside_a_library(read_json("prefill-parts"), where)
    assert table.count("\n") >= 4  # two lines of a head, three forms
    assert table in (ROOT / "docs/engine.md").read_text(encoding="utf-8")


def test_aims_and_how_many_rows_reach_them_are_those_of_the_race() -> None:
    assert aims_met(read_json("engine-speed")) in (ROOT / "docs/engine.md").read_text(encoding="utf-8")


def reachable() -> str:
    """What prompts would reach were their products as fast as the large ones."""
    told = []
    for processor in ("Zen 5", "Zen 4"):
        of = [
            ratios((row for name in names for row in chosen("prefill-parts", "the same", "large", name, place)), 2)
            for names in (("f32", "int4"), ("bf16 by bf16",), ("int8 by int8",))
            for place in [f"AVX-512 ({processor})"]
        ]
        told.append(f"{of[0]} in fp32, {of[1]} in bf16 and {of[2]} in int8 on the {processor}")
    return ", and ".join(told)


def decode_shares(where: str) -> list[str]:
    """Of all rows of 512 tokens, by bits of a weight."""
    return [ratios(forms(names, "prompt 512", where, metric="decode", peer="streaming read"), 2) for names in BY_BITS]


def reaching_all() -> str:
    """On the Zen 3: no row of a form with an aim misses it."""
    rows = [
        row for names in BY_BITS for row in forms(names, "prompt 512", AVX2, metric="decode", peer="streaming read")
    ]
    assert all(row.ours >= (row.target or 0) > 0 for row in rows)
    rates = [float(re.findall(r"([\d.]+) GB/s", row.note or "")[0]) for row in rows]
    of = decode_shares(AVX2)
    return (
        f"where the sum read {min(rates):.0f} to {max(rates):.0f} GB/s, all rows reach their aims:"
        f" {of[0]} in f32, {of[1]} in 16 bits and {of[2]} in 8 bits"
    )


def nearly_all() -> str:
    """On the Emerald Rapids: how many rows of a form with an aim reach it, and what all of them do."""
    rows = [
        row for names in BY_BITS for row in forms(names, "prompt 512", INTEL, metric="decode", peer="streaming read")
    ]
    met = sum(row.ours >= (row.target or 0) > 0 for row in rows)
    of = decode_shares(INTEL)
    told = f"{of[0]} in f32, {of[1]} in 16 bits and {of[2]} in 8 bits"
    return f"{met} of {len(rows)} rows of the Emerald Rapids reach theirs: {told}"


def reaching_behind_a_long_prompt() -> str:
    rows = forms(("f32",), "prompt 4096", metric="decode", peer="streaming read")
    met = [row for row in rows if row.ours >= (row.target or 0) > 0]
    rates = {float(re.findall(r"([0-9.]+) GB/s", row.note or "")[0]): row in met for row in rows}
    slowest = min(rates)
    assert [rate for rate, is_met in rates.items() if is_met] == [slowest]
    return (
        "In f32 one row reaches its aim behind 4096 tokens with fp32 keys, the one whose sum read slowest"
        f" ({slowest:.0f} GB/s)."
    )


def dense_behind(processor: str) -> tuple[str, str]:
    """Behind 4096 tokens the dense model in f32, bf16 and int8: of the streaming rate, and that rate in GB/s."""
    model = "dense, width 2048"
    rows = [
        row
        for form in ("f32", "bf16", "int8")
        for row in chosen("engine-speed", "decode", "streaming", f"{model}, {form}, prompt 4096, AVX-512 ({processor})")
    ]
    shares = [f"{row.ratio or 0:.2f}" for row in rows]
    rates = [f"{float(re.findall(r'([0-9.]+) GB/s', row.note or '')[0]):.0f}" for row in rows]
    told = "{}, {} and {}"
    return told.format(*shares), told.format(*rates)


@pytest.mark.parametrize(
    "says",
    [
        lambda: f"whole prompts of one thread would reach {reachable()} ([",
        lambda: "Of all its rows it reached {}, {} and {}. Whether".format(*decode_shares(ZEN_4)),
        lambda: "Of all its rows it reached {}, {} and {}. There".format(*decode_shares(AVX512)),
        reaching_all,
        nearly_all,
        reaching_behind_a_long_prompt,
        lambda: f"decodes there at {dense_behind('Zen 5')[0]} of that limit (f32, bf16, int8) on the Zen 5",
        lambda: "On the Zen 4 it decodes at {} of the limit: the sum beside them read {} GB/s".format(
            *dense_behind("Zen 4")
        ),
    ],
)
def test_limits_are_those_of_the_rows(says: Callable[[], str]) -> None:
    assert says() in words_of("docs/engine.md")


def test_share_of_products_in_a_prompt_by_int8_is_that_of_its_parts() -> None:
    rows = chosen("prefill-parts", "", "whole prompt", "int8 by int8", "one thread", AVX512)
    products = ("queries, keys and values projected", "output projected", "gate and up", "down")
    by_model: dict[str, float] = {}
    for row in rows:
        if row.metric in products:
            by_model[row.conditions] = by_model.get(row.conditions, 0.0) + (row.ratio or 0)
    assert len(by_model) == 3
    low, high = min(by_model.values()), max(by_model.values())
    assert f"In int8 the products take {low:.2f} to {high:.2f} of a prompt's time on the Zen 5" in words_of(
        "docs/engine.md"
    )


def test_the_page_quotes_what_prompts_by_int8_would_reach_with_avx2() -> None:
    rows = [
        row
        for form in ("int8 by int8", "int4 by int8")
        for row in chosen("prefill-parts", "the same", "large", form, AVX2)
    ]
    assert len(rows) == 6
    assert all("our kernels, int4-g32" in (row.note or row.conditions) for row in rows)
    rates = [row.peer or 0 for row in rows]
    assert (
        f"ours of nibbles ({min(rates):.0f} to {max(rates):.0f} GFLOP/s a core), and bytes are held against it. Were"
        f" all products as fast as that one, prompts of one thread would reach {ratios(rows, 2)} of it there"
        in words_of("docs/engine.md")
    )


def test_what_a_token_reads_counts_keys_and_values_of_32_bits() -> None:
    """Of the dense model in f32: 8 layers of 1024 x (2 x 1024 + 2 x 512) + 3 x 1024 x 2048 weights and a head of 2048 x
    1024. Behind 4096 tokens and half of 64: 2 x 8 layers x 512 keys and values of each."""
    weights = 8 * (1024 * 3072 + 3 * 1024 * 2048) + 2048 * 1024
    kept = 2 * 8 * 512 * (4096 + 32)
    row = Measurement(
        metric="decode",
        ours=74,
        unit="token/s",
        conditions="dense, width 2048, f32, prompt 4096, AVX2 (Zen 3)",
        peer=100,
        peer_name="streaming read",
        target=85,
        machine="one",
        date="2026-11-29",
        command="by hand",
    )
    assert own_reads(row) == pytest.approx((weights * 4 + kept * 4) / (weights * 4 + kept * 2))
    strict, counted = (line for line in aims_met([row]).splitlines() if "bits counted, prompt of 4096" in line)
    assert strict.endswith("keys of 16 bits counted, prompt of 4096 | 0 of 1 |")  # 0.74
    assert counted.endswith("keys of 32 bits counted, prompt of 4096 | 1 of 1 |")  # 0.74 x 1.18
