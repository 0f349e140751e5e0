"""MNN's app on a fake iPhone: started with a command, its console read, ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Timer

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from devices.base import TransientDeviceError, UnendedProgramError
from devices.clock import MonotonicClock
from devices.ios import app_console
from devices.ios.device import IosDevice
from engines.base import unheard
from engines.errors import EngineError
from engines.external.programs.engine import ProgramEngine
from engines.external.programs.iphone_target import IphoneTarget, MnnApp
from tests.eventually import eventually
from tests.fakes.ios_phone import UDID, FakeIphone, ServedIphone
from tests.fakes.ios_tunneld import FakeTunneld
from tests.fakes.machine import SpokenIds
from tests.test_phone_programs import REQUEST

APP = "com.example.mnn"
CLOCK = MonotonicClock()
LOADED, DONE = "1 MNN [MNN_BENCH] model_loaded", "4 MNN [MNN_BENCH_DONE]"


@pytest.fixture
def fake() -> FakeIphone:
    # 16 tokens in 0.2 s, 4 in 0.4 s; nobody asks its battery here.
    speeds = "prompt=16 decode=4 prefill_tok_s=80.00 decode_tok_s=10.00"
    run, average = (
        f"2 MNN [MNN_BENCH] run=1 backend=cpu {speeds}",
        f"3 MNN [MNN_BENCH] avg backend=cpu threads=4 {speeds}",
    )
    return FakeIphone(console=lambda arguments: [(0.1, LOADED), (0.7, run), (0.0, average), (0.0, DONE)])


@pytest.fixture
def engine(tunneld: FakeTunneld, no_usbmuxd: None) -> Iterator[ProgramEngine]:
    device = IosDevice(f"ios:{UDID}", 0.01, CLOCK, meter_names=(), tunneld=tunneld.address)
    device.phone.reach()
    target = IphoneTarget(device, APP)
    yield ProgramEngine(MnnApp(4), target, {}, device.name, SpokenIds(), 512, CLOCK.now_s, 3.0)  # type: ignore[arg-type]
    device.close()


def test_an_apps_figures_are_placed_before_its_last_word(engine: ProgramEngine, fake: FakeIphone) -> None:
    begun_s = CLOCK.now_s()
    done = engine.run(REQUEST, unheard)
    assert done.ttft_s == pytest.approx(0.2)
    assert done.e2e_s == pytest.approx(0.6)
    assert done.derived == ("first token", "prefill", "decode")
    assert begun_s + 0.8 < done.end_s < CLOCK.now_s()
    [launched] = [entry for entry in fake.log if entry[0] == "launch"]
    assert launched[1:3] == (APP, ("--bench-cmd", "bench cpu 16 4 1 4"))
    assert eventually(lambda: APP not in fake.running)
    assert any("to half of the link's trip there and back" in remark for remark in engine.take_remarks())


def test_an_app_that_says_an_error_fails_with_its_words(engine: ProgramEngine, fake: FakeIphone) -> None:
    fake.console = lambda arguments: [(0.0, "1 MNN [MNN_BENCH_ERROR] createLLM failed")]
    with pytest.raises(EngineError, match="MNN's app: createLLM failed"):
        engine.run(REQUEST, unheard)
    fake.console = lambda arguments: [(0.0, DONE)]
    with pytest.raises(EngineError, match="was done and told no run"):
        engine.run(REQUEST, unheard)


def test_a_cable_that_is_pulled_while_an_app_runs_is_told_as_a_link_that_broke(
    engine: ProgramEngine, fake: FakeIphone, served: ServedIphone
) -> None:
    """It was told as a fault of the library: "Queue is shut down"."""
    fake.console = lambda arguments: [(0.0, LOADED)]
    pulled = Timer(0.3, served.pull_cable)
    pulled.start()
    with pytest.raises(TransientDeviceError, match=rf"{UDID}: running {APP}: the link broke \(") as caught:
        engine.run(REQUEST, unheard)
    pulled.join()
    assert caught.value.is_lost


def test_an_app_whose_link_broke_is_ended_before_the_phone_is_measured_again(
    engine: ProgramEngine, fake: FakeIphone, served: ServedIphone
) -> None:
    """It went on computing in the idle time of the next attempt: net joules of 24 J were 15 J."""
    fake.console = lambda arguments: [(0.0, LOADED)]
    pulled = Timer(0.3, served.pull_cable)
    pulled.start()
    with pytest.raises(TransientDeviceError):
        engine.run(REQUEST, unheard)
    pulled.join()
    served.plug_in()
    assert APP in fake.running
    engine._target._device.wait_until_ready()  # type: ignore[attr-defined]
    assert eventually(lambda: APP not in fake.running)


def test_an_app_that_loses_its_link_to_another_question_says_what_that_one_was_told(
    engine: ProgramEngine, fake: FakeIphone
) -> None:
    """Of a phone that was locked meanwhile: that the link broke was all that was told."""
    fake.console = lambda arguments: [(0.0, LOADED)]
    phone = engine._target._device.phone  # type: ignore[attr-defined]

    def look_at_the_battery() -> None:
        fake.faults.add("locked")
        with pytest.raises(TransientDeviceError, match="the phone is locked"):
            phone.battery()

    looking = Timer(0.3, look_at_the_battery)
    looking.start()
    with pytest.raises(
        TransientDeviceError, match=rf"running {APP}: its link was given up: battery.*the phone is locked; unlock it"
    ):
        engine.run(REQUEST, unheard)
    looking.join()


def test_an_app_that_dies_or_hangs_is_worth_a_retry(
    engine: ProgramEngine, fake: FakeIphone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_console, "LOOK_EVERY_S", 0.2)
    fake.console = lambda arguments: [(0.0, LOADED)]  # and nothing more
    with pytest.raises(TransientDeviceError, match="has not said that it is done after 3 s"):
        engine.run(REQUEST, unheard)
    assert eventually(lambda: APP not in fake.running)

    def dies(arguments: tuple[str, ...]) -> list[tuple[float, str]]:
        fake.running.pop(APP, None)
        return [(0.0, LOADED)]

    fake.console = dies
    with pytest.raises(UnendedProgramError, match="is gone before it said that it was done"):
        engine.run(REQUEST, unheard)
