"""Figures in sentences of docs/engine.md and README.md: each follows from the rows of a measurement."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from results.environments import TORCH_ALONE
from tests.benchmarks.measurement import read_json
from tests.benchmarks.speed_summary import of_real_shapes
from tests.engine_rows import AVX2, AVX512, HELD, INTEL, ROOT, ZEN_4, chosen, forms, ratios, words_of

README_FORMS = {
    "of 32 bits": ("f32",),
    "with 16": ("bf16", "f16", "bf16 by bf16"),
    "with 8": ("int8", "int8 by int8"),
    "with 4": ("int4", "int4 by int8"),
}


def test_readme_quotes_the_lowest_ratio_to_llama_cpp_of_all_processors() -> None:
    def lowest(names: Iterable[str]) -> str:
        both = [
            [row for n in (512, 4096) for row in forms(names, f"prompt {n}", metric=metric, peer="llama.cpp")]
            for metric in ("prefill", "decode")
        ]
        return "/".join(f"{min(row.ratio or 0 for row in rows):.2f}" for rows in both)

    told = [lowest(names) for names in README_FORMS.values()]
    text = words_of("README.md")
    assert (
        f"Its prefill/decode is {told[0]} times llama.cpp's with weights of 32 bits,"
        f" {told[1]} with 16, {told[2]} with 8 and {told[3]} with 4. Each figure is the lowest of all rows"
    ) in text
    assert f"With int8 arithmetic 4 bits are at {lowest(('int4 by int8',))} " in text


def test_readme_says_what_a_machine_without_compiler_loses_as_a_run_does() -> None:
    assert f"Without a C++ compiler the engine is {TORCH_ALONE.partition(' (')[0]}" in words_of("README.md")


def test_the_first_screen_tells_least_and_most_of_all_rows_and_which_are_behind() -> None:
    rows = {
        metric: [row for n in (512, 4096) for row in chosen("engine-speed", metric, "llama.cpp", f"prompt {n}")]
        for metric in ("prefill", "decode")
    }
    # As the tables of the page round them.
    behind = {
        row.conditions.split(", prompt ")[0].rpartition(", ")[2] + row.conditions.rpartition(", ")[2]
        for row in (*rows["prefill"], *rows["decode"])
        if round(row.ratio or 0, 2) < 1
    }
    assert behind == {f"int4{ZEN_4}", f"int4{HELD}"}
    least, fewest = (f"{min(row.ratio or 0 for row in rows[metric]):.2f}" for metric in rows)
    most, fastest = (f"{max(row.ratio or 0 for row in rows[metric]):.1f}" for metric in rows)
    batches = [row.ratio or 0 for row in chosen("decode-batches", "decode", "llama.cpp")]
    screen = " ".join((ROOT / "docs/engine.md").read_text(encoding="utf-8").split("## Exact")[0].split())
    assert f"reads prompts at {least} to {most} times llama.cpp's speed, and decodes at {fewest} to {fastest}" in screen
    assert "[One form is behind](#where-is-it-behind), on two of five settings." in screen
    assert f"In a batch** it decodes at {min(batches):.2f} to {max(batches):.1f} times llama.cpp's rate" in screen
    assert {row.conditions.rpartition("(")[2].rstrip(")") for row in rows["decode"]} == {
        "Emerald Rapids", "Zen 3", "Zen 4", "Zen 5"
    }  # fmt: skip


def test_ratios_behind_a_long_prompt_are_those_of_the_race() -> None:
    told = [
        ratios(chosen("engine-speed", metric, "llama.cpp", "prompt 4096", where), 1)
        for where in (AVX512, HELD, AVX2, INTEL, ZEN_4)
        for metric in ("prefill", "decode")
    ]
    text = words_of("docs/engine.md")
    assert (
        f"prefill is {told[0]} times as fast, and decoding {told[1]} times. Held to AVX2 it is {told[2]} and {told[3]}"
        in text
    )
    assert f"On the Zen 3 it is {told[4]} and {told[5]}, and on the Emerald Rapids {told[6]} and {told[7]}." in text
    assert f"On the Zen 4 it is {told[8]} and {told[9]}." in text


def test_shapes_of_real_models_are_those_of_their_race() -> None:
    page, rows = (ROOT / "docs/engine.md").read_text(encoding="utf-8"), read_json("real-shapes")
    section = page[page.index("### Is it as fast with models of real size?") : page.index("### Which work can a")]
    assert of_real_shapes(rows, ZEN_4, 512) in section
    told = " ".join(section.split())
    beside_llama = [chosen("real-shapes", metric, "llama.cpp") for metric in ("prefill", "decode")]
    long = [chosen("real-shapes", metric, "llama.cpp", "Qwen3-0.6B", "prompt 4096") for metric in ("prefill", "decode")]
    assert f"a prompt of 4096 tokens of Qwen3-0.6B is read {ratios(long[0], 1)} times as fast" in told
    assert f"decoding behind it is {ratios(long[1], 1)} times as fast" in told
    least, most = ([end(row.ratio or 0 for row in of) for of in beside_llama] for end in (min, max))
    screen = words_of("docs/engine.md").partition("## Exact")[0]
    assert f"it is {least[0]:.2f} to {most[0]:.1f} and {least[1]:.2f} to {most[1]:.1f} times, and the same" in screen
    assert (
        f"(docs/engine.md#is-it-as-fast-with-models-of-real-size) are at {least[0]:.2f}/{least[1]:.2f} and more."
        in words_of("README.md")
    )
    behind = {row.conditions for row in rows if "llama" in (row.peer_name or "") and round(row.ratio or 0, 2) < 1}
    assert {words.split(", ")[1] for words in behind} == {"int4"}


def test_every_row_behind_llama_cpp_is_told_as_one() -> None:
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    tables = page[page.index("**Times llama.cpp's speed, prompt of 512") : page.index("**Share of what")]
    behind = [cell for cell in re.findall(r"\d\.\d\d", tables) if float(cell) < 1]
    told = page[page.index("### Where is it behind?") : page.index("### How far is it")]
    assert behind
    assert [figure for figure in behind if figure not in told] == []


@pytest.mark.parametrize("form", ["f32", "f16", "int8 by int8", "int4 by int8"])
@pytest.mark.parametrize("place", ["AVX-512 (Zen 5)", ZEN_4, "AVX2 (Zen 3)", INTEL])
def test_batches_are_the_lowest_of_the_models_that_were_measured(form: str, place: str) -> None:
    lowest = [
        min(row.ratio or 0 for row in chosen("decode-batches", f"decode, {n} sequences", "llama.cpp", form, place))
        for n in (8, 32)
    ]
    where = place.partition("(")[2].rstrip(")")
    assert f"| {form} ({where}) | {lowest[0]:.2f} | {lowest[1]:.2f} |" in words_of("docs/engine.md")


def test_other_figures_of_the_page_are_those_of_their_measurements() -> None:
    text = words_of("docs/engine.md")
    faster = ratios(chosen("decode-batches", "decode", "transformers"), 1)
    assert f"Beside transformers, in f32, it is {faster} times as fast." in text
    ours = [ratios(chosen("busy-neighbour", f"{phase}, ours", "alone"), 2) for phase in ("decode", "prefill")]
    assert f"decoding keeps {ours[0]} of its quiet rate, and a prompt {ours[1]}" in text
    intel = [row for row in chosen("busy-neighbour", "decode, ours", "alone") if "family 6" in row.machine]
    assert f"decoding keeps least ({ratios(intel, 2)})" in text
    theirs = [ratios(chosen("busy-neighbour", f"{phase}, llama.cpp", "alone"), 2) for phase in ("decode", "prefill")]
    assert f"llama.cpp with OpenMP keeps {theirs[0]} and {theirs[1]}" in text
    long = [
        ratios(chosen("long-prompts", "prefill", "1024", form, "prompt 16384", AVX512), 2)
        for form in ("f32", "bf16 by bf16")
    ]
    assert f"16384 tokens keep {long[0]} of the rate of 1024 in f32, {long[1]} in bf16 by bf16" in text
    with_int8, with_bf16, without = (
        ratios(chosen("long-prompts", "prefill", "1024", f"int8 by int8{attention}", "prompt 16384", ZEN_4), 2)
        for attention in (" with int8 attention", " with bf16 attention", "")
    )
    told = f'keeps {with_int8} on a Zen 4, with `"bf16"` {with_bf16}, and without either {without}'
    assert f'`quantise.attention_arithmetic = "int8"` int8 by int8 {told}' in text
    (experts,), (dense,) = (
        chosen("long-prompts", "prefill", "1024", form, "prompt 16384", AVX2) for form in ("int8 by int8", "f32")
    )
    assert experts.conditions.startswith("16 experts")
    assert dense.conditions.startswith("dense")
    assert f"16 experts keep {experts.ratio:.2f} in int8 by int8, and the dense model {dense.ratio:.2f} in f32" in text
    of_all = [
        chosen("long-prompts", "prefill", "1024", form, "prompt 16384", INTEL)
        for form in ("f32", "int8 by int8", "int8 by int8 with int8 attention")
    ]
    assert [len(of_form) for of_form in of_all] == [3, 3, 3]
    floats, by_int8, in_int8 = (ratios(of_form, 2) for of_form in of_all)
    assert (
        f"On the Emerald Rapids all three models keep {floats} in f32, {by_int8} in int8 by int8, and {in_int8} with"
        " attention in 8 bits." in text
    )


def test_the_page_quotes_what_a_cache_in_16_bits_gives() -> None:
    text = words_of("docs/engine.md")
    zen_3 = AVX2
    forms_of = ("f32", "f16", "int8 by int8")
    older, newer = (
        [ratios(chosen("kept-cache", "decode", "cache in fp32", form, place), 2) for form in forms_of]
        for place in (ZEN_4, zen_3)
    )
    assert (
        f"it decodes {older[0]} times as fast so in f32, {older[1]} in f16 and {older[2]} in int8 by int8;"
        f" on the Zen 3 {newer[0]}, {newer[1]} and {newer[2]}." in text
    )
    assert len(chosen("kept-cache", "decode", "cache in fp32", "f32", ZEN_4)) == 3
    beside_llama = [ratios(chosen("kept-cache", "decode", "llama.cpp", place), 1) for place in (ZEN_4, zen_3)]
    assert f"That is {beside_llama[0]} and {beside_llama[1]} times llama.cpp's rate there." in text
    rows = [chosen("kept-cache", "decode", "streaming read", place) for place in (ZEN_4, zen_3)]
    met = [sum(row.ours >= (row.target or 0) > 0 for row in of) for of in rows]
    intel = [ratios(chosen("kept-cache", "decode", "cache in fp32", form, INTEL), 2) for form in forms_of]
    own = chosen("kept-cache", "decode", "streaming read", INTEL)
    assert (
        f"On the Emerald Rapids it decodes {intel[0]} times as fast so in f32, {intel[1]} in f16 and {intel[2]} in int8"
        f" by int8, which is {ratios(chosen('kept-cache', 'decode', 'llama.cpp', INTEL), 1)} times llama.cpp's rate,"
        f" and {sum(row.ours >= (row.target or 0) > 0 for row in own)} of {len(own)} rows reach theirs." in text
    )
    assert list(map(len, (*rows, own))) == [9, 9, 9]
    assert f"{met[0]} of 9 rows of the Zen 4 and {met[1]} of 9 of the Zen 3 reach their aim behind 4096 tokens" in text


def test_the_page_quotes_loading_of_both_widths() -> None:
    """It told 0.4 s, which is of fp32 alone."""
    rows = read_json("loading")
    ready = [row for row in rows if row.metric == "weights ready"]
    assert ["float32" in row.conditions for row in ready] == [True, False]
    (first, second), (share, other) = (row.ours for row in ready), (100 * (row.ratio or 0.0) for row in ready)
    (private,) = {f"{row.ours:.2f}" for row in rows if row.metric == "peak private"}
    assert (
        f"a checkpoint of 4 GB is ready in {first:.1f} s (fp32) and {second:.1f} s (bf16), {share:.0f} % and"
        f" {other:.0f} % of transformers' time, and takes {private} GB of private memory" in words_of("docs/engine.md")
    )


@pytest.mark.parametrize(
    ("place", "in_bf16"),
    [("AVX-512 (Zen 5)", False), (ZEN_4, False), ("AVX2 (Zen 3)", False), (INTEL, False), (ZEN_4, True)],
)
def test_the_page_quotes_items_a_second_beside_lm_eval(place: str, in_bf16: bool) -> None:
    told = []
    for name in ("HellaSwag", "RULER", "BoolQ"):
        found = chosen("lm-eval-speed", name, "hf", place)
        rows = [row for row in found if (", bf16 by bf16," in row.conditions) is in_bf16]
        by_model = [
            [row.ratio or 0.0 for row in rows if row.conditions.startswith(model)]
            for model in ("bundled", "16 experts")
        ]
        told.append(f"{name} {' and '.join(f'{ratio:.1f}' if of else '—' for of in by_model for ratio in of or [0])}")
    where = place.partition("(")[2].rstrip(")")
    by_bf16 = "Both in bf16, " if in_bf16 else ""
    assert f"{by_bf16}on the {where} {', '.join(told)}".lower() in words_of("docs/engine.md").lower()


def test_a_second_thread_never_costs_more_than_it_brings() -> None:
    rows = chosen("lm-eval-speed", "", "ours with one thread")
    assert len(rows) == 29
    assert all((row.ratio or 0) >= 1 for row in rows)
    assert f"A second thread makes it {ratios(rows, 1)} times as fast" in words_of("docs/engine.md")


def test_what_the_last_layer_saves_is_what_was_measured() -> None:
    beside_all, beside_llama = (chosen("last-layer", "prefill", peer, ZEN_4) for peer in ("all tokens", "llama.cpp"))
    assert len(beside_all) >= 16
    says = (
        f"On the Zen 4 prompts are {ratios(beside_all, 2)} times as fast so, and {ratios(beside_llama, 2)} times as"
        " fast as llama.cpp's"
    )
    page = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", words_of("docs/engine.md"))
    assert says in page
    [int4] = chosen("last-layer", "prefill", "llama.cpp", "dense", "int4", "prompt 512", ZEN_4)
    assert f'With `last_layer = "asked"` it was {int4.ratio:.2f} times as fast in another run' in page


def test_readme_quotes_what_the_bundled_model_finds() -> None:
    found = {row.conditions: row.ours for row in read_json("tiny-training") if row.metric == "string_match_all"}
    one, four = found["ruler_niah_single_2, 1024"], found["ruler_niah_multikey_1, 1024"]
    assert one == 100
    told = f"finds one needle in 1024 tokens in every sample, and the right one of four in {four:.1f} %"
    assert told in words_of("README.md")
