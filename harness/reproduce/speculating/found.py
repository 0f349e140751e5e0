"""What we find for each row of 003."""

from __future__ import annotations

from collections.abc import Iterator

from devices.models.sheet import load_sheet
from engines.pricing.shapes import NAMED_SHAPES, ModelShape
from harness.reproduce.findings import Finding
from harness.reproduce.ledger import Ledger, ledger
from harness.reproduce.printed import Span
from harness.reproduce.speculating import arithmetic, trends
from harness.reproduce.speculating.accuracy import accuracies, averages, recovered
from harness.reproduce.speculating.estimators import fitting, millions
from harness.reproduce.speculating.tpot import (
    GLM,
    GPT_OSS,
    LENGTHS,
    MODELS,
    QWEN3,
    QWEN3_235B,
    Compared,
    Run,
    beyond_context,
    evaluated,
    expert_bytes_a_token,
    gain_of_shares,
    speed_up,
)  # fmt: skip
from results.units import GIB

COPY_SHARE, COMPUTE_SHARE, GAIN = "003-007", arithmetic.COMPUTE_SHARE, "003-004"
TABLE_2: dict[str, int] = {QWEN3: 94, GLM: 100, GPT_OSS: 106, QWEN3_235B: 112}
"""The first row of each model."""
TABLE_3_COLUMNS = ("GPU memory, GB", "host memory, GB", "link")
TABLE_3: dict[str, int] = {"a6000": 118, "a100": 119, "gh200": 120}
ESTIMATORS: dict[str, int] = {"gpt-oss-20b": 127, "gpt-oss-120b": 128, "qwen3-30b-a3b": 129}
PRICED = "priced on peaks of memory, arithmetic and link, without launches"
CHECKPOINT = "the model's checkpoint, and answers of it"
TREND = (
    "prediction-accuracy, a page of joulebench's source, has what predicted experts do to the bundled model's answers"
)


def findings() -> list[Finding]:
    book = ledger()
    return [
        *gains(book), *shares(), *table_1(book), *table_2(), *table_3(), *predictors(), *estimators(book),
        *orders(),
    ]  # fmt: skip


# --- time per token --------------------------------------------------------------------------------------------------


def of_qwen3() -> list[Compared]:
    """By length."""
    own = evaluated()
    return [own[Run(QWEN3, "a6000", length)] for length in LENGTHS]


def gains(book: Ledger) -> Iterator[Finding]:
    n_layers = MODELS[QWEN3].n_layers
    low, high = (100 * gain_of_shares(share, n_layers) for share in arithmetic.stated_shares(book))
    bound = "compute of 8 to 13 % of the time on demand (Fig. 7), all of it but a layer's behind copies (Eq. 1)"
    idle = "copies of 84 to 88 % leave 12 to 16 %, and 14 % would fit if what idles overlaps too"
    for id_ in ("003-001", "003-002"):
        yield Finding(id_, high, "its own figures", f"{bound}: by its own words no more can be gained; {idle}")
    found = evaluated()
    yield Finding(
        "003-003",
        tuple(100 * one.gain for one in found.values()),
        "priced",
        f"every model of Table 3; {PRICED}; a sign that cannot fail, as what overlaps loses nothing here",
    )
    own = [100 * one.gain for one in of_qwen3()]
    yield Finding(
        GAIN, Span(min(own), max(own)), "priced", f"{PRICED}; {beyond_context()}",
        explanation=f"at 1024 tokens we have less compute to hide ({100 * of_qwen3()[0].compute_share:.1f} % where it"
        " has 8 %): the sheet's rates are peaks, which short kernels do not reach. The source saves more than it"
        " computes: of launches and waits, which it counts as idle, a part hides too, and the sheet has none",
    )  # fmt: skip
    yield Finding(GAIN, Span(low, high), "its own figures", bound)
    yield Finding("003-005", Span(low, high), "its own figures", f"{bound}; its §5.1.3 says 9 to 14 % too; {idle}")
    others = [100 * one.gain for run, one in found.items() if run.machine != "a6000"]
    yield Finding("003-006", Span(min(others), max(others)), "priced", _of_machines(found))
    yield Finding("003-009", speed_up(1.0, 1.0), "formula", "Eq. 1 at equal times; less at every other ratio")


def _of_machines(found: dict[Run, Compared]) -> str:
    told = []
    for machine in ("a100", "gh200"):
        own = [100 * one.gain for run, one in found.items() if run.machine == machine]
        told.append(f"{min(own):.1f} to {max(own):.1f} % on the {machine.upper()}")
    of_a6000 = [one.gain for run, one in found.items() if run.machine == "a6000"]
    of_gh200 = [one.gain for run, one in found.items() if run.machine == "gh200"]
    if min(of_gh200) > min(of_a6000):
        told.append(
            f"on the A6000 {100 * min(of_a6000):.1f} to {100 * max(of_a6000):.1f} %, so that at least the"
            " short prompts gain more on the faster GH200, where the source has faster machines gain less"
        )
    return f"{', '.join(told)}; {PRICED}: the source's launches, and the real rates of its links, are not stated"


def shares() -> Iterator[Finding]:
    own = of_qwen3()
    copy, compute = [100 * one.copy_share for one in own], [100 * one.compute_share for one in own]
    token = f"{expert_bytes_a_token(MODELS[QWEN3]) / 1e9:.2f} GB a token at 31.5 GB/s; {beyond_context()}"
    yield Finding(
        COPY_SHARE, Span(min(copy), max(copy)), "priced", token,
        "Launches take no time on the sheet, so nothing idles in ours: theirs leaves up to 8 % to it, and less to"
        " copies.",
    )  # fmt: skip
    yield Finding(
        COMPUTE_SHARE, Span(min(compute), max(compute)), "priced", f"{PRICED}; {beyond_context()}",
        "As 003-004: the sheet's rates are peaks. Launches would not count here: the source has them as idle.",
    )  # fmt: skip


# --- tables ----------------------------------------------------------------------------------------------------------


def table_1(book: Ledger) -> Iterator[Finding]:
    for row in accuracies(book):
        read = "" if row.is_as_read else f", read as {row.read}"
        note = (
            f"its ± is sqrt(p (1 - p) / {row.n}) = {row.standard_error:.4f}{read}; {row.n_right} of {row.n} right"
            if row.n_right is not None
            else f"its ± is sqrt(p (1 - p) / {row.n}) = {row.standard_error:.4f}{read}"
        )
        yield Finding(row.claim, None, note=f"{note}; {TREND}", missing=CHECKPOINT)
    for claim, mean in averages(book).items():
        yield Finding(claim, mean, "its own figures", "the mean of the six accuracies printed")
    points, percent = recovered(book)
    yield Finding("003-130", percent, "its own figures", f"{points:.0f} are points of accuracy")


def published(model: str) -> ModelShape:
    return NAMED_SHAPES[{GLM: "glm-4.7-flash"}.get(model, MODELS[model].name)]


def table_2() -> Iterator[Finding]:
    told = notes()
    for model, first in TABLE_2.items():
        shape, as_run = published(model), MODELS[model]
        experts_gib = as_run.routed_bytes / GIB
        cells = (
            (float(shape.n_layers), ""),
            (float(shape.n_experts), ""),
            (float(shape.hidden), ""),
            (float(shape.expert_width), ""),
            (experts_gib, "GiB of all layers and experts"),
            (as_run.others_bytes / GIB, "GiB; plain attention assumed" if model == GLM else "GiB"),
        )
        for number, (ours, note) in enumerate(cells, first):
            if number == 110:
                yield of_the_20b()
                yield Finding("003-110", ours, "shape", "GiB of the true 36 layers and 128 experts")
            else:
                why = without_head() if number == 117 else ""
                yield Finding(f"003-{number:03}", ours, "shape", told.get(number, note), why)


def notes() -> dict[int, str]:
    """By the row's number."""
    sparse_gib = published(GLM).routed_bytes / GIB
    return {
        104: f"GiB of 47 layers; the first of the checkpoint has no experts, which leaves {sparse_gib:.2f}",
        106: "Table 2 prints those of GPT-OSS-20B",
        107: "Table 2 prints those of GPT-OSS-20B",
        116: "GiB; 230 is about its size in 8 bits",
        117: f"GiB; {MODELS[QWEN3_235B].others_bytes / 1e9:.1f} GB",
    }


def without_head() -> str:
    """Of Qwen3-235B-A22B."""
    shape = MODELS[QWEN3_235B]
    left = shape.others_bytes - shape.hidden * shape.vocabulary * 2
    return (
        f"Without the head it is {left / GIB:.1f} GiB, which rounds to theirs; the source does not say what it counts."
    )


def of_the_20b() -> Finding:
    """Experts of the layers and widths that Table 2 prints for GPT-OSS-120B."""
    shape = NAMED_SHAPES["gpt-oss-20b"]
    return Finding(
        "003-110", shape.routed_bytes / GIB, "shape", "GiB of the 24 layers and 32 experts printed beside it"
    )


def machine_of(machine: str) -> tuple[str, str, float]:
    """Memory of the GPU and of the host in GiB, and GB/s of the link each way, of the sheet that stands for it."""
    sheet = load_sheet(machine)
    (link,) = sheet.links.values()
    gpu, host = (sheet.capacity_bytes(unit) for unit in ("gpu", "cpu"))
    gib = [f"{held / GIB:g}" if held is not None else "not stated" for held in (gpu, host)]
    return gib[0], gib[1], link.bytes_per_s.value / 1e9


def table_3() -> Iterator[Finding]:
    for machine, number in TABLE_3.items():
        gpu_gib, host_gib, link_gb_per_s = machine_of(machine)
        told = f"our sheet has {gpu_gib} and {host_gib} GiB and {link_gb_per_s:g} GB/s each way, the peak of that link"
        yield Finding(f"003-{number:03}", None, note=told, missing="a machine, which nothing here computes")
    yield Finding("003-121", tuple(map(float, LENGTHS)), "priced", "our cells have the same lengths")


# --- predictions -----------------------------------------------------------------------------------------------------


def predictors() -> Iterator[Finding]:
    router, estimator = (100 * trends.mean_recall(one) for one in (trends.Q, trends.ESTIMATOR))
    bundled = "the bundled model, prompts held out"
    missing = "the checkpoint, and an estimator trained on its routing"
    notes = {
        122: f"{router:.0f} % of {bundled}, from q",
        123: f"{estimator:.0f} % of {bundled}",
        124: f"{estimator:.0f} % of {bundled}",
        125: f"{estimator:.0f} % of {bundled}",
        126: f"{100 * trends.most_gained():.0f} points of {bundled}",
    }
    for number, note in notes.items():
        yield Finding(f"003-{number:03}", None, note=note, missing=missing)


def estimators(book: Ledger) -> Iterator[Finding]:
    for name, number in ESTIMATORS.items():
        claim, shape = f"003-{number:03}", NAMED_SHAPES[name]
        pairs = fitting(shape, book.calibration(claim))
        first, n = pairs[0], len(pairs)
        note = (
            f"of width {first.width} and expansion {first.expansion}, one of {n} pairs of that size: it says no widths"
        )
        yield Finding(claim, millions(shape, first), "shape", note)


def orders() -> Iterator[Finding]:
    bundled = "the bundled model on prompts held out, not its own"
    cosines = tuple(map(trends.mean_cosine, (trends.Q, trends.S)))
    yield Finding("003-131", cosines, "measured", f"of q and of s with the next router's input; {bundled}")
    by_rank = trends.mean_by_rank(trends.Q)
    yield Finding("003-132", by_rank, "measured", f"share right by rank, the heaviest first; {bundled}")
