"""The guide's worked examples, thresholds and decisions as tables, theirs and ours.

It prints few figures. Where it states a rule, "theirs" is what the rule says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engines.pricing.published_shapes import (
    DEEPSEEK_MOE_16B,
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_4_SCOUT,
    MIXTRAL_8X7B,
    PHI_3_5_MOE,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)
from harness.reproduce.neuron import examples, loading, machine, ranks
from harness.reproduce.neuron.loading import BATCHES, MODELS, Chooses
from harness.reproduce.neuron.plans import counted, drawn_alike, drawn_as, in_turn, planned, routed
from harness.reproduce.redrawn import Entry, SourceTable

ALPHAS = (1.0, 0.8)
"""Ends of the range in which the guide's switch to all experts lies."""
TOKENS = (1024, 4096, 8192, 16384)
AIMS = (machine.flop_per_byte()[0], 450.0)
"""FLOP a byte to reach: Trn2's in bf16, and the middle of the guide's 400 to 500."""
ADVICE = {"TP": 32, "EP": 64}
"""TP for at most, EP for at least so many experts."""
LEAST_COLUMNS = 128
SHAPES = (
    MIXTRAL_8X7B, PHI_3_5_MOE, LLAMA_4_SCOUT, GPT_OSS_20B, DEEPSEEK_MOE_16B, QWEN3_30B_A3B, GPT_OSS_120B,
    QWEN3_235B_A22B, DEEPSEEK_V3,
)  # fmt: skip


def tables() -> Iterable[SourceTable]:
    return (
        _padding(),
        _selective(),
        _loads_by_batch(),
        _switch(),
        _block_sizes(),
        _blocks_and_dropping(),
        _tensor_or_expert(),
        _held(),
        _sent(),
        _balance(),
    )


def _padding() -> SourceTable:
    balanced, hot = examples.balanced(), examples.one_hot()
    computed = examples.rows(examples.balanced(skip_padding_blocks=False))
    best, worst = "balanced", "one hot expert"

    def entries() -> Iterator[Entry]:
        for row, plan, claims in (
            (best, balanced, ("004-006", "004-008", "004-009", "004-011", "004-012")),
            (worst, hot, ("", "004-013", "004-014", "004-015", "004-016")),
        ):
            n_rows = examples.rows(plan)
            figures = (
                plan.routed_pairs,
                len(plan.calls),
                n_rows,
                examples.beyond(computed, n_rows),
                examples.beyond(n_rows, plan.routed_pairs),
            )
            columns = ("pairs", "blocks", "slots", "provisioned beyond them, %", "slots beyond pairs, %")
            for column, ours, claim in zip(columns, figures, claims, strict=True):
                note = "the loads as printed, 1750 tokens of 1000 for one expert" if row == worst else ""
                yield Entry(row, column, ours, claim=claim, note=note)

    return SourceTable(
        "Padding analysis",
        "1000 tokens, top 2 of 8 experts, blocks of 256",
        "",
        "routing",
        tuple(entries()),
        f"By plans of the preset blockwise; {examples.provisioned()} blocks are provisioned, {computed} slots.",
    )


def _selective() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for first, name, batch in ((30, "DeepSeek", 16), (32, "GPT-OSS", 8), (34, "Llama 4", 8)):
            model = MODELS[name]
            most, mean = loading.most_loads(model, batch), loading.mean_loads(model, batch)
            row = f"{name}, batch {batch}"
            yield Entry(row, "experts at most", most, claim=f"004-{first:03}")
            yield Entry(row, "loads saved at least, %", _saved(model, most), claim=f"004-{first + 1:03}")
            yield Entry(row, "experts, drawn choices", mean)
            yield Entry(row, "loads saved, drawn choices, %", _saved(model, mean))

    return SourceTable(
        "Example scenarios",
        "weight loads of selective loading in a decode step",
        "",
        "model",
        tuple(entries()),
        f"By plans of the preset selective. Drawn choices: all experts alike, mean of {loading.N_DRAWS} draws. The"
        " guide gives the most that a batch can need, so its savings are the least.",
    )


def _saved(model: Chooses, loads: float) -> float:
    return 100 * (1 - loads / model.n_experts)


def _loads_by_batch() -> SourceTable:
    """Theirs: B x K unique experts, at most all."""
    entries = [
        Entry(
            str(batch),
            name,
            100 * loading.mean_loads(model, batch) / model.n_experts,
            theirs=100 * min(batch * model.top_k, model.n_experts) / model.n_experts,
        )
        for name, model in MODELS.items()
        for batch in BATCHES
    ]
    return SourceTable(
        "Selective loading",
        "experts that a decode step loads, % of all",
        "% of all experts",
        "batch",
        tuple(entries),
        "Theirs is the rule, batch x K at most; ours the mean of drawn choices, all experts alike.",
        picture="lines",
    )


def _switch() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for alpha in ALPHAS:
            for name, model in MODELS.items():
                for batch in BATCHES:
                    rule = batch * model.top_k >= alpha * model.n_experts
                    ours = loading.takes_all(model, batch, alpha)
                    yield Entry(str(batch), f"{name}, alpha {alpha:g}", _choice(ours), theirs=_choice(rule))

    return SourceTable(
        "Switch to all experts",
        "what a decode step computes, by batch and alpha",
        "",
        "batch",
        tuple(entries()),
        "Theirs is the rule, batch x K of at least alpha x E; ours is what a plan of the preset selective computes.",
    )


def _choice(is_all: bool) -> str:
    return "all" if is_all else "selective"


def _block_sizes() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for name, model in MODELS.items():
            for aim in AIMS:
                for n_tokens in TOKENS:
                    routing = in_turn(n_tokens, model.n_experts, model.top_k)
                    plan = planned("blockwise", routing, block_size="intensity", flop_per_byte=aim)
                    yield Entry(str(n_tokens), f"{name}, {aim:.0f} FLOP a byte", float(plan.calls.rows_S.max()))

    return SourceTable(
        "Block size",
        "the smallest power of two, from 64 on, that is bound by compute",
        "rows of a block",
        "tokens of a step",
        tuple(entries()),
        "The guide has the rule, AIF of at least the machine's FLOP a byte, and no table. 230 is Trn2 in bf16; 450 lies"
        " in the guide's 400 to 500.",
    )


def _blocks_and_dropping() -> SourceTable:
    """Of one step of 1024 tokens, top 2 of 16: balanced, drawn alike, drawn as the bundled model chooses, one hot."""
    n_tokens, n_experts, top_k = 1024, 16, 2
    counts = counted().tokens_per_expert[1]
    routings = {
        "balanced": in_turn(n_tokens, n_experts, top_k),
        "drawn, all alike": drawn_alike(n_tokens, n_experts, top_k),
        "drawn as the bundled model's layer 1 chooses": drawn_as(counts, n_tokens, top_k),
        "every token's first is one expert": routed([[0, 1 + t % (n_experts - 1)] for t in range(n_tokens)], n_experts),
    }

    def entries() -> Iterator[Entry]:
        for name, routing in routings.items():
            for size in (64, 256):
                plan = planned("blockwise", routing, block_size=size)
                yield Entry(name, f"blocks of {size}: rows a pair", examples.rows(plan) / plan.routed_pairs)
            plan = planned("dropping", routing)
            yield Entry(name, "dropping, 1.25: rows a pair", examples.rows(plan) / plan.routed_pairs)
            yield Entry(name, "dropping, 1.25: pairs lost, %", 100 * plan.dropped_pairs / plan.routed_pairs)

    return SourceTable(
        "Blockwise or dropping",
        f"what is computed and what is lost; {n_tokens} tokens, top {top_k} of {n_experts}",
        "",
        "routing",
        tuple(entries()),
        "The guide says that dropping has a certain cost and may cost accuracy, and gives no figures. By plans of the"
        " presets blockwise and dropping.",
    )


def _tensor_or_expert() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for shape in SHAPES:
            few, many = shape.n_experts <= ADVICE["TP"], shape.n_experts >= ADVICE["EP"]
            advice = "TP" if few else "EP" if many else "both"
            yield Entry(shape.name, "experts", float(shape.n_experts))
            yield Entry(shape.name, "its advice", None, theirs=advice)
            widest = ranks.widest_tensor_parallel(shape, LEAST_COLUMNS)
            yield Entry(shape.name, f"widest TP with {LEAST_COLUMNS} columns", float(widest))

    return SourceTable(
        "TP or EP",
        "tensor or expert parallelism",
        "",
        "model",
        tuple(entries()),
        "Theirs is its rule: TP for 32 experts or fewer, EP for 64 or more, and 128 columns of an expert or more for a"
        " rank. Widths are powers of two.",
    )


def _held() -> SourceTable:
    grids = {"TP 8": (8, 1), "EP 16": (1, 16), "TP 4 x EP 16": (4, 16)}
    entries = [
        Entry(shape.name, name, ranks.rank_gb(shape, *grid))
        for shape in SHAPES
        for name, grid in grids.items()
        if grid[1] <= shape.n_experts
    ]
    return SourceTable(
        "Configuration examples",
        "experts that a rank holds, of the guide's three configurations",
        "GB",
        "model",
        tuple(entries),
        "Of published shapes, two bytes a value. Empty: fewer experts than groups.",
    )


def _sent() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for shape in (PHI_3_5_MOE, QWEN3_30B_A3B, GPT_OSS_120B):
            for n in (2, 4, 8):
                sent, row = ranks.sent_bytes(shape, n), f"{shape.name}, {n} ranks"
                yield Entry(row, "TP, all-gather", sent.tensor_parallel / 1e3)
                yield Entry(row, "EP, all-gather", sent.all_gather / 1e3)
                yield Entry(row, "EP, all-to-all", sent.all_to_all / 1e3)

    return SourceTable(
        "All-to-all-v",
        "what ranks send each other for the experts of a layer, in prefill",
        "kB a token",
        "model and ranks",
        tuple(entries()),
        "The guide gathers all tokens at all ranks today, calls that waste and plans all-to-all-v; it gives no figures."
        f" By plans over {ranks.N_TOKENS} tokens that are dealt to the ranks; activations travel in four bytes.",
        picture="bars",
    )


def _balance() -> SourceTable:
    def entries() -> Iterator[Entry]:
        for n in ranks.DEGREES:
            worst = ranks.worst_group(n)
            yield Entry(str(n), "experts in runs", worst.in_runs)
            yield Entry(str(n), "EPLB, one spare slot a rank", worst.eplb)

    return SourceTable(
        "EPLB",
        "work of the busiest expert-parallel group over the mean",
        "times the mean",
        "groups",
        tuple(entries()),
        "The guide says 3 to 4 times in the worst case, of no named model or degree. Ours: the bundled model's counted"
        " routing, the worst of its layers, top 2 of 16 experts.",
        picture="lines",
    )
