"""Addresses and certificates of a fleet: what is refused, and with which words."""

from __future__ import annotations

import platform
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from distributed.security import Security

from harness.fleet.road import DaskRoad, FleetError, published_state
from harness.fleet.security import Address, AddressError, Tls, read_address, read_tls
from tests.command import EXECUTABLE, environment, joulebench
from tests.eventually import PATIENCE_S, eventually
from tests.plans import raw_plan, write_plan

TLS = Tls(ca="ca.pem", certificate="own.pem", key="own.key")


@pytest.mark.parametrize(
    ("text", "tls", "told", "is_local"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1:8786", True),
        ("tcp://lab-7:9000", None, "tcp://lab-7:9000", False),
        ("localhost:0", None, "tcp://localhost:0", True),
        ("[::1]:9000", None, "tcp://[::1]:9000", True),
        ("0.0.0.0:9000", TLS, "tls://0.0.0.0:9000", False),
    ],
)
def test_addresses(text: str, tls: Tls | None, told: str, is_local: bool) -> None:
    address = read_address(text, tls)
    assert (str(address), address.is_local) == (told, is_local)


def test_who_listens_everywhere_is_joined_by_its_name() -> None:
    assert read_address("0.0.0.0:9000", TLS).for_workers == Address(platform.node(), 9000, True)
    assert read_address("[::]:9000", None).for_workers == Address(platform.node(), 9000)
    assert read_address("lab-7:9000", None).for_workers == Address("lab-7", 9000)


@pytest.mark.parametrize(
    ("text", "tls", "words"),
    [
        ("http://lab", None, "an address is HOST:PORT"),
        ("lab:many", None, "an address is HOST:PORT"),
        (":9000", None, "an address is HOST:PORT"),
        ("lab:99999", None, "an address is HOST:PORT"),
        ("tls://lab:9000", None, "needs the certificates"),
        ("tcp://lab:9000", TLS, "with certificates the address is tls://lab:9000"),
    ],
)
def test_bad_addresses(text: str, tls: Tls | None, words: str) -> None:
    with pytest.raises(AddressError, match=words):
        read_address(text, tls)


def test_certificates_come_together_and_are_read_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    assert read_tls(None, None, None) is None
    with pytest.raises(AddressError, match="--tls-cert and --tls-key: missing"):
        read_tls(file, None, None)
    with pytest.raises(AddressError, match=r"--tls-ca .*ca.pem: no such file"):
        read_tls(file, file, file)
    file.write_text("no certificate")
    with pytest.raises(AddressError, match="the certificates cannot be used"):
        read_tls(file, file, file)


def test_a_fleet_is_not_open_to_a_network_unless_somebody_asks_for_that(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    ended = joulebench("fleet", "start", str(plan), "--listen", "0.0.0.0:0", "--out", str(tmp_path / "run"))
    assert ended.code == 2
    [line] = ended.problems
    assert "other machines reach it, and nothing proves who they are" in line
    assert "whoever can connect can run code" in line
    assert not (tmp_path / "run").exists()


def test_a_worker_does_not_wait_for_one_that_answers_nothing() -> None:
    """As a coordinator that asks for certificates looks to a worker without."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        ended = joulebench("fleet", "join", f"127.0.0.1:{port}", "--device", "host", "--wait-s", "1")
    assert ended.code == 4
    assert f"no fleet at tcp://127.0.0.1:{port} for 1 s" in ended.stderr
    assert "without certificates (--tls-ca)?" in ended.stderr


def test_a_worker_needs_a_device(tmp_path: Path) -> None:
    assert "--device: missing" in joulebench("fleet", "join", "127.0.0.1:1").stderr
    twice = joulebench("fleet", "join", "127.0.0.1:1", "--device", "host", "--device", "host")
    assert (twice.code, "named twice" in twice.stderr) == (2, True)
    alone = joulebench("fleet", "join", "127.0.0.1:1", "--device", "host", "--wait-s", "0")
    assert (alone.code, "no fleet at tcp://127.0.0.1:1" in alone.stderr) == (4, True)
    status = joulebench("fleet", "status", str(tmp_path / "nope"))
    assert (status.code, "no such folder; give the folder of a fleet's run" in status.stderr) == (2, True)
    status = joulebench("fleet", "status", str(tmp_path))
    assert (status.code, "is no run of a fleet" in status.stderr) == (2, True)


@pytest.mark.waits
def test_only_who_has_a_certificate_of_the_fleet_is_answered(tmp_path: Path) -> None:
    def certificates(name: str) -> Tls:
        made = Security.temporary()
        files = {"ca": made.tls_ca_file, "certificate": made.tls_client_cert, "key": made.tls_client_key}
        for what, text in files.items():
            (tmp_path / f"{name}.{what}").write_text(text)
        found = read_tls(*(tmp_path / f"{name}.{what}" for what in files))
        assert found is not None
        return found

    own, strangers = certificates("own"), certificates("stranger")
    road = DaskRoad(Address("127.0.0.1", 0, is_tls=True), own)
    road.open()
    try:
        road.publish("told")
        assert published_state(road.address, own) == "told"
        for address, tls in ((road.address, strangers), (road.address._replace(is_tls=False), None)):
            with pytest.raises(FleetError, match="no fleet answers at"):
                published_state(address, tls)
        assert published_state(road.address, own) == "told"
    finally:
        road.close(is_over=True)


@pytest.mark.waits
def test_a_fleet_of_this_machine_listens_on_no_address_that_others_reach(tmp_path: Path) -> None:
    """Workers listened everywhere: whoever reached this machine could run code on them."""
    road = DaskRoad(Address("127.0.0.1", 0), None)
    road.open()
    command = [str(EXECUTABLE), "fleet", "join", str(road.address), "--device", "host"]
    joined = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment())
    try:
        assert eventually(lambda: road.devices() == {"host": 1})
        assert road.scheduler_pid is not None
        processes = [psutil.Process(road.scheduler_pid), *psutil.Process(joined.pid).children()]
        listening = [c.laddr for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert len(processes) == 2
        assert {own.ip for own in listening} == {"127.0.0.1"}
    finally:
        joined.send_signal(signal.SIGINT)
        joined.wait(PATIENCE_S)
        road.close(is_over=True)
