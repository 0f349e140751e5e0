"""Sheets of source 002's phones: what they state, and that what is fitted comes out of the source's tables."""

from __future__ import annotations

import math

import pytest

from devices.base import DeviceError
from devices.models.core_clusters import DecodeModel, Selection, clusters_of, decode_model, demand
from devices.models.sheet import load_sheet, parse_sheet, sheet_path
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs import phone_fit
from harness.reproduce.mnn_aecs.places import ANDROID, PHONES, SHEETS
from harness.tuning.selections import n_selections
from tests.benchmarks import phone_fits

TABLE_2 = {phone: f"002-{461 + n}" for n, phone in enumerate(PHONES)}


def model_of(phone: str) -> DecodeModel:
    sheet = load_sheet(SHEETS[phone])
    assert sheet.decode is not None
    return decode_model(sheet.clusters, sheet.decode)


@pytest.mark.parametrize("phone", ANDROID)
def test_clusters_and_memory_are_table_2s(phone: str) -> None:
    sheet = load_sheet(SHEETS[phone])
    cores = " + ".join(
        f"{c.n_cores}*{c.core} {c.max_frequency_hz.value / 1e9:g}"
        for c in sheet.clusters.values()
        if c.max_frequency_hz is not None
    )
    clusters, memory, _ = ledger().claims[TABLE_2[phone]].value.split("; ")
    assert cores == clusters
    assert f"{sheet.memories['cpu'].value / 2**30:g}GB" == memory


@pytest.mark.parametrize("phone", ["iPhone 12", "iPhone 15"])
def test_an_iphone_has_cores_without_clocks(phone: str) -> None:
    clusters = list(load_sheet(SHEETS[phone]).clusters.values())
    printed = ledger().claims[TABLE_2[phone]].value
    assert printed.startswith(f"{clusters[0].n_cores}+{clusters[1].n_cores} ({clusters[0].core})")
    assert [c.max_frequency_hz for c in clusters] == [None, None]
    assert model_of(phone).selectable[0].n_cores == 6


@pytest.mark.parametrize(("phone", "n"), list(zip(ANDROID, (39, 44, 39, 71, 20), strict=True)))
def test_each_phone_has_the_sources_number_of_selections(phone: str, n: int) -> None:
    assert n_selections(clusters_of(load_sheet(SHEETS[phone]).clusters)) == n


def test_table_4s_states_are_as_printed() -> None:
    """Rows 002-037 to 002-054: clock of each cluster, speed, power."""
    book, states = ledger(), load_sheet("mate-40-pro").states
    for first, name in ((37, "llama-cpp"), (43, "mnn"), (49, "mnn-aecs")):
        state = states[name]
        assert state.tokens_per_s is not None
        assert state.power_w is not None
        ours = [f.value / 1e9 for f in state.frequency_hz.values()]
        ours += [state.tokens_per_s.value, state.power_w.value]
        assert ours == [book.figure(f"002-{first + n:03d}") for n in range(5)]


def test_table_5s_states_are_as_printed() -> None:
    """Rows 002-059 to 002-070: threads, CPU use, speed, relative power."""
    book, states = ledger(), load_sheet("iphone-12").states
    for first, name in ((59, "llama-cpp"), (63, "mnn"), (67, "mnn-aecs")):
        state = states[name]
        assert state.cpu_use is not None
        assert state.tokens_per_s is not None
        assert state.relative_power is not None
        ours = [state.threads, state.cpu_use.value * 100, state.tokens_per_s.value, state.relative_power.value]
        assert ours == pytest.approx([book.figure(f"002-{first + n:03d}") for n in range(4)])


@pytest.mark.parametrize("phone", PHONES)
def test_speeds_of_states_are_in_the_tables(phone: str) -> None:
    """Of phones outside Tables 4 and 5: Table 9 or 10."""
    if phone in ("Mate 40 Pro", "iPhone 12"):
        pytest.skip("its states are Table 4's or 5's, tested apart")
    states = load_sheet(SHEETS[phone]).states
    rows = phone_fit.rows_of_fit(phone)
    for name, row in (("mnn", rows[0]), ("mnn-aecs", rows[2])):
        speed = states[name].tokens_per_s
        assert speed is not None
        assert speed.value == ledger().figure(row)


@pytest.mark.parametrize("phone", PHONES)
def test_fitted_figures_are_those_of_the_fit(phone: str) -> None:
    fitted = phone_fit.fit(phone, phone_fit.fit_alone())
    ours, sheet = model_of(phone), load_sheet(SHEETS[phone]).decode
    assert sheet is not None
    assert ours.alone == phone_fit.fit_alone()
    assert ours.ceiling_tokens_per_s == pytest.approx(fitted.model.ceiling_tokens_per_s, abs=6e-5)
    assert ours.loss == pytest.approx(fitted.model.loss, abs=6e-5)
    assert ours.static_power == pytest.approx(fitted.model.static_power, abs=6e-5)
    assert ours.power_per_load == pytest.approx(fitted.model.power_per_load, abs=6e-6)
    assert sheet.rms_residual.value == pytest.approx(fitted.rms, abs=6e-5)
    for figure in (sheet.ceiling_tokens_per_s, sheet.loss, sheet.rms_residual):
        assert set(phone_fit.rows_of_fit(phone)) <= set(ledger().rows_of(figure.origin))


@pytest.mark.parametrize("phone", PHONES)
def test_the_model_gives_back_the_four_figures_that_it_was_fitted_on(phone: str) -> None:
    """Power is energy times speed; within 4 %, for two phones' power does not rise with load as the model's must."""
    model, book = model_of(phone), ledger()
    speeds = [book.figure(row) for row in phone_fit.rows_of_fit(phone)[::2]]
    energies = [book.figure(row) for row in phone_fit.rows_of_fit(phone)[1::2]]
    seen: list[Selection] = [phone_fit.mnn_selection(model), phone_fit.tuned_selection(phone, model)]
    for selection, speed, energy in zip(seen, speeds, energies, strict=True):
        assert model.tokens_per_s(selection) == pytest.approx(speed, rel=0.04)
        power = energy * speed * (1e-3 if phone in ANDROID else 1.0)
        assert model.power(selection) == pytest.approx(power, rel=0.04)


def test_the_page_says_what_the_fit_gives() -> None:
    assert phone_fits.PAGE.read_text(encoding="utf-8") == phone_fits.page()


def test_speed_and_power_by_hand() -> None:
    """{2 middle} of the Mate 40 Pro: demand 2 x 2.54 / 3.13, one core beyond the first."""
    model = model_of("Mate 40 Pro")
    speed = 21.5640 * (1 - 0.15 ** (2 * 2.54 / 3.13)) / (1 + 0.0134)
    assert model.tokens_per_s((0, 2, 0)) == pytest.approx(speed, rel=1e-6)
    s2 = (2.54 / 3.13) ** 2
    load = (1.0 * 0.7 * 3.13**2 + 0.8 * (2 + 0.7) * 2.54**2 + 0.4 * 4 * 0.7 * 2.05**2) * s2
    assert model.power((0, 2, 0)) == pytest.approx(3.4991 + 0.15211 * load, rel=1e-6)


def test_threads_take_the_biggest_cores_first() -> None:
    """Four threads of an iPhone: two big cores, and two that count 0.4 each."""
    model = model_of("iPhone 12")
    speed = model.ceiling_tokens_per_s * (1 - math.pow(0.15, 2.8)) / (1 + 3 * model.loss)
    assert model.tokens_per_s((4,)) == pytest.approx(speed)
    assert demand(model.clusters, (2, 2)) == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("count = 8", "count = 7", "has 8 cores, and units 7"),
        ("cores = { middle = 2 }", "cores = { middle = 4 }", "middle has 3 cores, not 4"),
        ("cores = { middle = 2 }", "cores = { huge = 2 }", "no cluster huge"),
        ('kind = "prime"', 'kind = "big"', "prime"),
        ("loss = {", "lost = {", "loss"),
        ("alone = { value = 0.85", "alone = { value = 1.0", "is 1; a share of the ceiling"),
        ("static_w = {", "relative_static = {", "needs static_w and w_per_load, or"),
    ],
)
def test_a_sheet_that_contradicts_itself_is_refused(old: str, new: str, words: str) -> None:
    text = sheet_path("mate-40-pro").read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(DeviceError, match=words):
        parse_sheet(text.replace(old, new), "mate-40-pro")
