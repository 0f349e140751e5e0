"""What tests share: one small real run through the command line, a fake phone, the way to a file's own fake iPhone."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings

import tests.data_folder  # noqa: F401  first of all: it takes JOULEBENCH_DATA out of the environment
from results.collection import no_collection
from tests.command import STARTED, Finished, joulebench
from tests.plans import two_device_plan, write_plan

if TYPE_CHECKING:
    from devices.android.shell import Phone
    from results.store import Store
    from tests.fakes.adb_server import FakeAdbServer
    from tests.fakes.held_clock import HeldClock
    from tests.fakes.ios_phone import FakeIphone, ServedIphone
    from tests.fakes.ios_tunneld import FakeTunneld
    from tests.fakes.phone import FakePhone


# How long an example takes says how busy the machine is; what a test promises of time it asserts itself.
settings.register_profile("any load", deadline=None)
settings.load_profile("any load")

# Containers often turn off that Python keeps what it compiled: then each of hundreds of processes compiles all of ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell may say how wide its terminal is: tables that are printed in this process would fold.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has them and all that they start ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are compiled before workers start: once, and no command of a test tells that it compiles."""
    if not hasattr(config, "workerinput"):
        from engines.kernels.library import library

        library()
        started = tempfile.TemporaryDirectory(prefix="joulebench-tests-")
        config.add_cleanup(started.cleanup)
        os.environ[STARTED] = started.name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True where -m asks for a marker first that the file never names: to import every test file takes 14 s."""
    asked = re.match(r"(?!not\b)(\w+)( and |$)", config.option.markexpr)
    if asked is None or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return None if f"mark.{asked[1]}" in collection_path.read_text() else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end, and Python's collector never looks through it. It did so thirty
    times while that was made, a quarter of the time that this took, and three quarters of a second long each time in
    the tests."""
    with no_collection(stay=False):
        found = yield
    gc.collect()
    gc.freeze()
    return found


class FinishedRun(NamedTuple):
    plan: Path
    directory: Path
    process: Finished


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between runs, and the lock of this machine: not the user's, nor that of another test worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two arms on the host and two on a modelled device, with a scored and an unscored workload."""
    folder = tmp_path_factory.mktemp("finished")
    plan = write_plan(folder / "plan.toml", two_device_plan())
    process = joulebench("run", str(plan), "--out", str(folder / "run"))
    assert process.code == 0, process.stderr
    return FinishedRun(plan, folder / "run", process)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """As many threads of arithmetic after a test as before: two of an engine that is gone slow all that follow."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a run is stored, or will be."""
    return tmp_path / "run"


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    """An empty run in `directory`."""
    from results.store import Store
    from tests.store_checks import CELLS, INFO

    with Store.create(directory, INFO, CELLS) as opened:
        yield opened


@pytest.fixture(scope="session")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a few items of every task."""
    from tests.fakes.items import write_data_folder

    return write_data_folder(tmp_path_factory.mktemp("items"))


@pytest.fixture
def no_usbmuxd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither this machine's iPhones nor its pairing records."""
    monkeypatch.setenv("USBMUXD_SOCKET_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("HOME", str(tmp_path))
    # As the library looked it up when it was imported.
    monkeypatch.setattr("pymobiledevice3.common._HOMEFOLDER", tmp_path / "pymobiledevice3", raising=False)


@pytest.fixture
def served(fake: FakeIphone) -> Iterator[ServedIphone]:
    """The iPhone of the test file, behind sockets."""
    from tests.fakes.ios_phone import ServedIphone

    with ServedIphone(fake) as running:
        yield running


@pytest.fixture
def tunneld(served: ServedIphone) -> Iterator[FakeTunneld]:
    """A tunneld that knows that iPhone and no other."""
    from tests.fakes.ios_tunneld import FakeTunneld

    with FakeTunneld([served]) as running:
        yield running


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldClock]:
    """Of the test, of what is measured in it, and of the fake phones that are made behind it."""
    from tests.fakes.held_clock import held

    with held(tmp_path, monkeypatch) as clock:
        yield clock


@pytest.fixture
def fake(tmp_path: Path) -> FakePhone:
    """An Android phone that knows little; a test file that needs another one has its own."""
    from tests.fakes.phone import FakePhone

    return FakePhone(tmp_path / "phone")


@pytest.fixture
def server(fake: FakePhone) -> Iterator[FakeAdbServer]:
    """An adb server with that phone."""
    from tests.fakes.adb_server import FakeAdbServer

    with FakeAdbServer(fake) as running:
        yield running


@pytest.fixture
def phone(server: FakeAdbServer) -> Phone:
    """What our side sees of it."""
    from devices.android.server import ServerAddress
    from devices.android.shell import Phone

    return Phone("adb:", ServerAddress("127.0.0.1", server.port))


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """For tests that ask what ranks compute, and not how they start."""
    from tests.forked_ranks import ranks_forked

    with ranks_forked():
        yield


@pytest.fixture
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a phone's battery."""
    monkeypatch.setattr("devices.android.battery.CALIBRATION_S", 0.5)
