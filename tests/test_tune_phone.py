"""`joulebench tune` on a fake phone, over adb: its cores, its battery, what happens to it on the way, and its profile.

The phone runs as the sheet's model says, so that the right choice is a minimum over all selections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import pytest
from click.testing import Result
from typer.testing import CliRunner

from devices import gates
from devices.android import battery as battery_module
from devices.models.core_clusters import decode_model
from devices.models.sheet import load_sheet
from harness.commands import app
from harness.external_parts import found_build
from harness.plan import build_plan
from harness.terminal import EXIT_BAD_PLAN, EXIT_NONE_USABLE
from harness.tuning.profile import TunedProfile, read_profile
from harness.tuning.selections import all_selections
from results.core_lists import core_words
from results.records import Phase
from results.store import Store
from tests.eventually import eventually, running
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.held_clock import held
from tests.fakes.phone import DISCHARGING, PROPERTIES, THERMAL
from tests.fakes.sheet_phone import HUNG, IDLE_W, LLAMA_BENCH, SheetPhone
from tests.plans import FAST, Raw, problems, raw_plan, write_plan

# Readings are 10 ms apart: six workers on two cores kept the reader from one for 85 and 158 ms, in probes that followed
# one another, and a session gives up after three in a row that it cannot use.
pytestmark = [pytest.mark.alone, pytest.mark.slow]

SLOWDOWN = 0.08
CHARGING = DISCHARGING.replace("USB powered: false", "USB powered: true").replace("status: 3", "status: 2")
HOT = DISCHARGING.replace("temperature: 312", "temperature: 412")
THROTTLED = THERMAL.replace("Thermal Status: 0", "Thermal Status: 2")
RESTARTED = "00000000-5c6e-4b0d-9a52-1d9f6c0c7a11\n"
LENGTHS = {"name": "fixed_lengths", "prompt_tokens": 200, "new_tokens": 31, "limit": 1}


def small_phone(root: Path) -> SheetPhone:
    """The big and two of the middle cores of source 002's Mate 40 Pro: five selections."""
    sheet = load_sheet("mate-40-pro")
    assert sheet.decode is not None
    clusters = dict(list(sheet.clusters.items())[:2])
    clusters["middle"] = clusters["middle"].model_copy(update={"n_cores": 2})
    return SheetPhone(root, decode_model(clusters, sheet.decode), faster=5.0, noise=0.01)


def cheapest(phone: SheetPhone, phase: Phase) -> str:
    """Its cores: of all selections that are fast enough the one with the least joules of a token."""
    known = {one: phone.readings(one)[phase] for one in all_selections(phone.model.clusters)}
    floor = (1 - SLOWDOWN) * max(reading.speed_tokens_per_s for reading in known.values())
    fast = {one: r for one, r in known.items() if r.speed_tokens_per_s >= floor}
    best = min(fast, key=lambda one: fast[one].power_w / fast[one].speed_tokens_per_s)  # type: ignore[operator]
    return core_words([core for own, n in zip(phone.cores, best, strict=True) for core in own[:n]])


Mishap = tuple[int, Callable[[], object], "float | str", Callable[[], object]]


class Mishaps:
    """Each begins while the program of so many a probe runs. It is over so many seconds later, or once a trial was
    stored with its mark: however slow this machine is, the probe that it hit was judged by then."""

    def __init__(self, fake: SheetPhone, session: Path, *mishaps: Mishap) -> None:
        self._fake = fake
        self._session = session
        self._left = list(mishaps)
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Mishaps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while self._left and not self._ended.wait(0.02):
            nth, begin, until, end = self._left[0]
            if sum(run.startswith("prefill") for run in self._fake.runs()) >= nth:
                begin()
                if isinstance(until, str):
                    self._wait_for(until)
                else:
                    self._ended.wait(until)
                end()
                del self._left[0]

    def _wait_for(self, mark: str) -> None:
        while not self._ended.wait(0.05):
            with Store.view(self._session) as store:
                if any(mark in trial.marks for trial in store.trials()):
                    return


class Tuned(NamedTuple):
    fake: SheetPhone
    folder: Path
    broken_off: Result
    resumed: Result
    left_running: list[int]

    @property
    def profile(self) -> TunedProfile:
        return read_profile(self.folder / "session" / "tuned.json")


def tune(folder: Path, *more: str) -> Result:
    (folder / "llama-bench").write_text(LLAMA_BENCH)
    (folder / "model.gguf").write_bytes(b"GGUF")
    return CliRunner().invoke(
        app,
        [
            "tune", "--device", "adb:FAKE0001", "--engine", "llama-bench", "--prompt", "200", "--decode", "30",
            "--requests", "1", "--pairs", "0", "--name", "fake", "--out", str(folder / "session"),
            "--set", f"engine.program={folder}/llama-bench", "--set", f"engine.model_file={folder}/model.gguf",
            "--set", 'engine.cores="0-2"', "--set", "engine.timeout_s=1.5", "--set", "protocol.warmup=0",
            "--set", "protocol.sample_interval_s=0.01", "--set", "protocol.max_foreign_cpu_share=1",
            "--set", "protocol.gate_wait_s=4", *more,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """A session that a charger broke off, and that went on through every other mishap."""
    folder = tmp_path_factory.mktemp("phone")
    with pytest.MonkeyPatch.context() as patch, held(folder, patch):
        yield from session_of(folder, patch)


def session_of(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    fake = small_phone(folder / "phone")
    before = set(running(f"sleep\x00{HUNG}"))

    def battery(text: str) -> Callable[[], None]:
        return lambda: fake.answer("dumpsys battery", text)

    def heat(text: str) -> Callable[[], None]:
        return lambda: fake.answer("dumpsys thermalservice", text)

    def restart() -> None:
        fake.file("/proc/sys/kernel/random/boot_id", RESTARTED)

    with FakeBattery(fake, IDLE_W, update_s=0.015):
        patch.setattr(battery_module, "CALIBRATION_S", 0.4)
        patch.setattr(gates, "Gates", partial(gates.Gates, look_every_s=0.1))
        patch.setenv("JOULEBENCH_STATE", str(folder / "state"))
        with FakeAdbServer(fake) as server:
            patch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
            with Mishaps(fake, folder / "session", (2, battery(CHARGING), 20.0, battery(DISCHARGING))):
                broken_off = tune(folder)
            n = len(fake.runs()) // 2
            mishaps: tuple[Mishap, ...] = (
                (n + 1, server.stop, 1.0, server.start),
                (n + 3, (fake.root / "hang").touch, 0.0, lambda: None),
                (n + 5, fake.pull_cable, 1.0, fake.plug_in),
                (n + 6, restart, 0.0, lambda: None),
                (n + 9, heat(THROTTLED), "throttled", heat(THERMAL)),
                (n + 11, battery(HOT), 1.5, battery(DISCHARGING)),
                (n + 13, battery(CHARGING), 1.5, battery(DISCHARGING)),
            )
            with Mishaps(fake, folder / "session", *mishaps):
                resumed = tune(folder, "--resume")
            eventually(lambda: set(running(f"sleep\x00{HUNG}")) <= before)
            left = set(running(f"sleep\x00{HUNG}")) - before
            assert resumed.exit_code == 0, resumed.output
            yield Tuned(fake, folder, broken_off, resumed, sorted(left))


def test_a_charger_that_stays_breaks_the_session_off_with_the_remedy(tuned: Tuned) -> None:
    assert tuned.broken_off.exit_code == EXIT_NONE_USABLE
    assert "the battery is charging (USB), and its gauge does not see the load; unplug it" in tuned.broken_off.output
    assert "go on with --resume; every finished probe is kept" in tuned.broken_off.output


def test_whatever_happens_to_the_phone_the_right_cores_are_found_for_each_phase(tuned: Tuned) -> None:
    assert tuned.resumed.exit_code == 0, tuned.resumed.output
    found = {one.phase: one for one in tuned.profile.evidence}
    assert [one.is_separated for one in found.values()] == [True, True]
    right = {phase: cheapest(tuned.fake, phase) for phase in found}
    assert right == {"prefill": "0-2", "decode": "0-1"}
    assert tuned.profile.settings == {"cores": right}
    # What the battery told, against the model's: the program tells its time, to 1 %.
    for phase, one in found.items():
        assert one.energy_method == "battery gauge"
        for selection in all_selections(tuned.fake.model.clusters):
            own = core_words([c for at, n in zip(tuned.fake.cores, selection, strict=True) for c in at[:n]])
            [seen] = [each for each in one.candidates if each.name == f"cores {own}"]
            model = tuned.fake.readings(selection)[phase]
            assert seen.energy_per_token is not None
            assert model.power_w is not None
            assert seen.energy_per_token[0] == pytest.approx(model.power_w / model.speed_tokens_per_s, rel=0.06)


def test_each_mishap_was_seen_and_nothing_is_left_running(tuned: Tuned) -> None:
    with Store.view(tuned.folder / "session") as store:
        trials = store.trials()
    marks = [mark for trial in trials for mark in trial.marks]
    assert sorted(set(marks)) == ["charging", "restarted", "throttled"]
    # The server that was killed, the program that hung, and the cable that was pulled.
    assert sum(trial.attempts > 1 for trial in trials) >= 3
    assert tuned.left_running == []
    assert not (tuned.fake.root / "hang").exists()
    assert {mask for _, mask in map(str.split, tuned.fake.runs())} == {"1", "3", "4", "5", "7"}


def plan_of(tuned: Tuned, **changes: object) -> Raw:
    arm = {"name": "here", "runs": "llama-bench", "program": f"{tuned.folder}/llama-bench", "cores": "tuned"}
    arm["model_file"] = f"{tuned.folder}/model.gguf"
    return raw_plan(**({"engine": [arm], "workload": [LENGTHS], "device": [{"name": "adb:FAKE0001"}]} | changes))


def test_a_plan_takes_the_cores_on_this_phone_and_on_no_other(tuned: Tuned, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.toml", plan_of(tuned, protocol=FAST))
    n_before = len(tuned.fake.runs())
    done = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert tuned.fake.runs()[n_before:] == ["prefill 7", "decode 3"]
    [told] = problems(plan_of(tuned, device=[{"name": "adb:FAKE0002"}]))
    assert "device adb:FAKE0001 -> adb:FAKE0002" in told
    # Another phone at the same address: it is seen when it is opened.
    other = PROPERTIES | {"ro.product.model": "Phone Two"}
    tuned.fake.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in other.items()))
    done = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "other")])
    checked = CliRunner().invoke(app, ["tune", "--check", "fake", "--out", str(tmp_path / "check")])
    tuned.fake.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in PROPERTIES.items()))
    for refused in (done, checked):
        assert refused.exit_code == EXIT_BAD_PLAN, refused.output
        assert "cpu model Example Phone One, SM8650" in refused.output
    assert not (tmp_path / "other").exists()


def test_an_update_of_the_phone_and_another_build_of_the_program_or_the_model_expire_the_profile(
    tuned: Tuned, tmp_path: Path
) -> None:
    path = write_plan(tmp_path / "plan.toml", plan_of(tuned, protocol=FAST))
    n_before = len(tuned.fake.runs())
    # A monthly update: the same Android and kernel, another build.
    updated = PROPERTIES | {"ro.build.version.incremental": "12999999"}
    tuned.fake.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in updated.items()))
    done = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "run")])
    tuned.fake.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in PROPERTIES.items()))
    assert done.exit_code == EXIT_BAD_PLAN, done.output
    assert "os Android 15 (SDK 35), build AP4A.250105.002 12701944" in done.output
    assert "build AP4A.250105.002 12999999" in done.output
    assert "`joulebench tune --check fake` measures again" in done.output
    for name in ("llama-bench", "model.gguf"):
        file = tuned.folder / name
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        found_build.cache_clear()
        told = problems(plan_of(tuned))
        file.write_bytes(before)
        assert any(
            "the tuned profile fake does not hold here (program, its version and files, SHA-256 " in line
            for line in told
        ), told
    found_build.cache_clear()
    build_plan(plan_of(tuned))  # holds again
    assert len(tuned.fake.runs()) == n_before
