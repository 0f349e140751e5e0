"""Prints the `decode` table of each of source 002's phones as its sheet must have it, and writes what the fit misses.

Run it after a change of rows, of the search or of the model: `python -m tests.benchmarks.phone_fits`. Tests compare the
sheets and the page, docs/measurements/phone-calibration.md, with the fit.
"""

from __future__ import annotations

from pathlib import Path

from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.phone_fit import ALONE, Fitted, fit, fit_alone, found_by_search, rows_of_fit
from harness.reproduce.mnn_aecs.places import ANCHOR_MODEL, ANDROID, PHONES, SHEETS, TUNED, Cell, Quantity, cells
from harness.tuning.selections import whole_cluster

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "phone-calibration.md"
SPEED_ENERGY: tuple[Quantity, Quantity] = ("speed", "energy")
ALONE_ORIGIN = (
    "002-075 to 002-081 (Table 7): of a grid, the share with which the search finds most of them; one for all phones"
)

RMS = "root mean square over the four rows. Four constants meet four rows, so that 0 says nothing of other cores"


def figure(value: str, origin: str) -> str:
    return f'{{ value = {value}, kind = "fitted", origin = "{origin}" }}'


def decode_table(phone: str, fitted: Fitted, alone: float) -> str:
    model = fitted.model
    origin = f"{', '.join(rows_of_fit(phone))}: speed and energy of MNN and MNN-AECS"
    static, per_load = ("static_w", "w_per_load") if model.binds_threads else ("relative_static", "relative_per_load")
    return "\n".join(
        (
            "[decode]",
            'model = "Qwen2.5-1.5B, 4 bits"',
            f"binds_threads = {str(model.binds_threads).lower()}",
            f"ceiling_tokens_per_s = {figure(f'{model.ceiling_tokens_per_s:.4f}', origin)}",
            f"alone = {figure(f'{alone:g}', ALONE_ORIGIN)}",
            f"loss = {figure(f'{model.loss:.4f}', origin)}",
            f"{static} = {figure(f'{model.static_power:.4f}', origin)}",
            f"{per_load} = {figure(f'{model.power_per_load:.5f}', origin)}",
            f"rms_residual = {figure(f'{fitted.rms:.4f}', f'{origin}; {RMS}')}",
        )
    )


def fit_rows() -> list[str]:
    alone = fit_alone()
    lines = []
    for phone in PHONES:
        fitted = fit(phone, alone)
        model, unit = fitted.model, "W" if phone in ANDROID else "gauge"
        lines.append(
            f"| {phone} | {model.ceiling_tokens_per_s:.1f} | {model.loss:.3f} | {model.static_power:.2f} |"
            f" {model.power_per_load:.3f} | {unit} | {100 * fitted.rms:.1f} |"
        )
    return lines


def unfitted_rows() -> list[str]:
    """Power of all cores: speed times energy of llama.cpp in Table 9."""
    book, alone = ledger(), fit_alone()
    lines = []
    for phone in ANDROID:
        speed, energy = (book.figure(cells()[Cell(phone, "llama.cpp", ANCHOR_MODEL, q)]) for q in SPEED_ENERGY)
        model = fit(phone, alone).model
        found, theirs = model.power(whole_cluster(model.clusters)), speed * energy / 1e3
        lines.append(f"| {phone} | {theirs:.2f} | {found:.2f} | {100 * (found / theirs - 1):+.0f} |")
    return lines


def share_rows() -> list[str]:
    book = ledger()
    lines = []
    for share in ALONE:
        same = [phone for phone in PHONES if found_by_search(phone, share) == book.claims[TUNED[phone]].value]
        lines.append(f"| {share:.2f} | {len(same)} | {', '.join(same)} |")
    return lines


INTRODUCTION = """\
# The sheets of source 002's phones: how they were fitted, and what they miss

Made by `python -m tests.benchmarks.phone_fits`. The source is MNN-AECS (002-mnn-aecs); we have none of its phones, and
nothing here was measured by us. A sheet states cores by cluster and clock (Table 2) and how the phone decoded on two or
three choices of cores (Tables 4, 5, 9, 10). It states no bandwidth, FLOP/s or idle power, for the source has none. So
nothing but decoding on a selection of cores can be priced.

Speed and power of any other selection are modelled (`devices/models/core_clusters.py`). Four constants of each phone
are fitted on four rows: speed and energy of MNN and of MNN-AECS with Qwen2.5-1.5B. Four constants meet four rows, so a
small residual says nothing of other selections. Where a residual is left, a constant had to stay at 0. The V30 Pro
loses nothing with further cores. The Meizu 21 draws more on fewer cores. The Xiaomi 15 Pro has no power left that does
not rise with load.

| phone | ceiling, token/s | loss a core | power without load | power a unit of load | unit | residual, % |
|---|---|---|---|---|---|---|
"""
UNFITTED = """
## Not fitted

Power of all cores, W, as llama.cpp uses them. It is another engine, and its cores may wait more or less than MNN's.

| phone | theirs | ours | error, % |
|---|---|---|---|
"""
SHARES = """
## The share of the ceiling that one core reaches alone

One constant for all phones, chosen from a grid so that the search finds most of Table 7's cores. What the search finds
of Table 7 is therefore consistent with it, and predicts nothing.

| share | of seven | phones |
|---|---|---|
"""


def page() -> str:
    parts = ((INTRODUCTION, fit_rows()), (UNFITTED, unfitted_rows()), (SHARES, share_rows()))
    return "".join(text + "\n".join(rows) + "\n" for text, rows in parts)


def print_tables() -> None:
    alone = fit_alone()
    for phone in PHONES:
        print(f"# devices/models/sheets/{SHEETS[phone]}.toml\n{decode_table(phone, fit(phone, alone), alone)}\n")


if __name__ == "__main__":
    print_tables()
    PAGE.write_text(page(), encoding="utf-8")
