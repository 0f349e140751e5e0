"""What we find for the claims of the Neuron guide (004)."""

from __future__ import annotations

from collections.abc import Iterator

from engines.techniques.layout.blocks import DEFAULT_BLOCK
from harness.reproduce.findings import Finding
from harness.reproduce.neuron import examples, loading, machine, ranks
from harness.reproduce.neuron.examples import B, E, K, T
from harness.reproduce.printed import Number


def findings() -> Iterator[Finding]:
    yield from _router()
    yield from _padding()
    yield from _blocks()
    yield from _parallel()
    yield from _decoding()


def _router() -> Iterator[Finding]:
    layer_mb, all_mb = examples.router_mb(1), examples.router_mb(36)
    yield Finding("004-001", layer_mb, "shape", note="its own product, 2880 x 128 x 2 bytes")
    yield Finding("004-002", all_mb, "shape", note="36 times the same")
    share = 100 * all_mb * 1e6 / machine.hbm_bytes()
    yield Finding("004-003", share, "shape", note="of the 96 GiB of one chip; a core that holds a copy has less")
    yield Finding("004-004", examples.gathered_ratio(), "router")


def _padding() -> Iterator[Finding]:
    balanced, hot = examples.balanced(), examples.one_hot()
    n_rows, n_hot = examples.rows(balanced), examples.rows(hot)
    computed = examples.rows(examples.balanced(skip_padding_blocks=False))
    hot_computed = examples.rows(examples.one_hot(skip_padding_blocks=False))
    yield Finding("004-006", balanced.routed_pairs, "plan")
    yield Finding("004-007", examples.provisioned(), "plan", note="as many in the tighter count of its reference code")
    yield Finding("004-008", len(balanced.calls), "plan")
    yield Finding("004-009", n_rows, "plan")
    yield Finding("004-010", computed, "plan")
    yield Finding("004-011", examples.beyond(computed, n_rows), "plan")
    yield Finding("004-012", examples.beyond(n_rows, balanced.routed_pairs), "plan")
    possible = examples.one_hot_that_can_be()
    yield Finding(
        "004-013",
        len(possible.calls),
        "plan",
        note=f"each of {T} tokens chooses an expert once at most, so the hot one has {T}; the loads as printed, 1750"
        f" and about 36, would need {len(hot.calls)}",
    )
    as_printed = "of the loads as printed, which no routing gives"
    yield Finding("004-014", n_hot, "plan", note=as_printed)
    yield Finding("004-015", examples.beyond(hot_computed, n_hot), "plan", note=as_printed)
    yield Finding("004-016", examples.beyond(n_hot, hot.routed_pairs), "plan", note=as_printed)


def _blocks() -> Iterator[Finding]:
    yield Finding("004-005", examples.six_tokens(), "plan")
    yield Finding(
        "004-017",
        machine.flop_per_byte(),
        "sheet",
        note="in bf16 and in fp8, of the peaks that AWS states: 667 and 1299 TFLOP/s over 2.9 TB/s; fp8 alone lies in"
        " the range",
    )
    by_formula = B * examples.provisioned() / E
    yield Finding(
        "004-018",
        examples.flop_per_weight_byte(),
        "plan",
        note=f"of the example of padding, {T} tokens, top {K} of {E}; the formula gives {by_formula:g}",
        theirs=Number(f"{by_formula:g}"),
    )
    yield Finding("004-019", examples.rows_not_fetched_percent(), "plan")
    yield Finding("004-020", examples.weight_loads(skips=True), "plan")
    yield Finding("004-021", examples.blocks_not_computed_percent(), "plan")
    yield Finding("004-039", examples.capacity_factor(), "plan", note="rows of an expert over its mean load")
    yield Finding("004-041", DEFAULT_BLOCK, "plan", note="the default of our blocks too")


def _parallel() -> Iterator[Finding]:
    worst = tuple(ranks.worst_group(n).in_runs for n in ranks.DEGREES)
    degrees = ", ".join(map(str, ranks.DEGREES))
    yield Finding(
        "004-027",
        worst,
        "trace",
        note=f"the bundled model's counted routing over {degrees} groups; halving groups can only raise it, so the"
        " order is sure and the size is this model's",
    )


def _decoding() -> Iterator[Finding]:
    shapes = "of its own shapes, each matrix moved once"
    yield Finding(
        "004-028",
        examples.flop_per_byte(examples.PREFILL_ROWS),
        "formula",
        note=shapes,
        explanation='far above "~400", and still within its "+"',
    )
    yield Finding("004-029", examples.flop_per_byte(examples.DECODE_BATCH), "formula", note=shapes)
    for first, name, batch in ((30, "DeepSeek", 16), (32, "GPT-OSS", 8), (34, "Llama 4", 8)):
        model = loading.MODELS[name]
        most, mean = loading.most_loads(model, batch), loading.mean_loads(model, batch)
        saved = [100 * (1 - loads / model.n_experts) for loads in (most, mean)]
        told = f"where no two tokens share an expert; drawn choices need {mean:.1f} on average"
        yield Finding(f"004-{first:03}", most, "plan", note=told)
        yield Finding(f"004-{first + 1:03}", saved[0], "plan", note=f"at least; drawn choices save {saved[1]:.0f} %")
    needed = loading.mean_loads(loading.MODELS["DeepSeek"], 32)
    yield Finding(
        "004-036",
        loading.loads_at_the_switch(),
        "plan",
        note=f"loaded as the rule switches to all experts; drawn choices need {needed:.0f} of them",
    )
    yield Finding("004-037", loading.switch_alpha(), "plan", note="the default of our selective loading")
