"""Prints the `decode` table of each of source 002's phones as its sheet must have it, and what the fit misses.

Run it after a change of rows, of the search or of the model: `python -m tests.benchmarks.phone_fits`. A test compares
the sheets with the fit.
"""

from __future__ import annotations

from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.phone_fit import ALONE, Fitted, fit, fit_alone, found_by_search, rows_of_fit
from harness.reproduce.mnn_aecs.places import ANCHOR_MODEL, ANDROID, PHONES, SHEETS, TUNED, Cell, cells
from harness.tuning.selections import whole_cluster

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


def print_all() -> None:
    book, alone = ledger(), fit_alone()
    for phone in PHONES:
        print(f"# devices/models/sheets/{SHEETS[phone]}.toml\n{decode_table(phone, fit(phone, alone), alone)}\n")
    print("power of all cores (llama.cpp, Table 9: speed times energy), not fitted:")
    for phone in ANDROID:
        places = [Cell(phone, "llama.cpp", ANCHOR_MODEL, quantity) for quantity in ("speed", "energy")]  # type: ignore[arg-type]
        speed, energy = (book.figure(cells()[place]) for place in places)
        model = fit(phone, alone).model
        found, theirs = model.power(whole_cluster(model.clusters)), speed * energy / 1e3
        print(f"  {phone}: {found:.2f} W, theirs {theirs:.2f} W ({100 * (found / theirs - 1):+.0f} %)")
    print("phones whose cores of Table 7 are found, by the share that one core reaches alone:")
    for share in ALONE:
        same = [p for p in PHONES if found_by_search(p, share) == book.claims[TUNED[p]].value]
        print(f"  {share:.2f}: {len(same)} ({', '.join(same)})")


if __name__ == "__main__":
    print_all()
