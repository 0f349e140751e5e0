"""Texts of Apple's powermetrics, of real machines. Values were read off the dumps; lines are of their files."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from devices.base import DeviceError
from devices.powermetrics import PowerLog, parse_powermetrics
from tests.data_folder import data_folder


def log(name: str) -> PowerLog:
    return parse_powermetrics((data_folder() / "traces" / "apple" / f"powermetrics_{name}.txt").read_text())


def test_m1_tells_package_dram_and_clusters() -> None:
    m1 = log("m1_macbookair10_1")
    assert m1.machine == "MacBookAir10,1"  # line 1
    assert len(m1.samples) == 10  # lines that begin with "*** Sampled system activity"
    first = m1.samples[0]
    assert first.duration_s == pytest.approx(0.10451)  # line 8
    assert first.ended_at_s == datetime(2023, 11, 10, 11, 37, 8, tzinfo=UTC).timestamp()  # 12:37:08 +0100
    assert first.power_w == pytest.approx(
        {  # mW of lines 13, 32, 53 to 57
            "e-cluster": 0.105,
            "p-cluster": 0.842,
            "ane": 0.0,
            "dram": 0.220,
            "cpu": 0.947,
            "gpu": 0.153,
            "package": 1.473,
        }
    )
    last = m1.samples[-1]
    assert last.duration_s == pytest.approx(0.10892)
    assert (last.power_w["cpu"], last.power_w["gpu"], last.power_w["package"]) == pytest.approx((0.239, 0.009, 0.321))


def test_clusters_of_every_m1_sample_make_the_cpu() -> None:
    for sample in log("m1_macbookair10_1").samples:
        clusters_w = sample.power_w["e-cluster"] + sample.power_w["p-cluster"]
        assert clusters_w == pytest.approx(sample.power_w["cpu"], abs=0.0011)  # whole mW


def test_m4_tells_the_sum_of_three_parts_and_neither_dram_nor_package() -> None:
    m4 = log("m4max_mac16_6")
    assert m4.machine == "Mac16,6"  # line 1
    [sample] = m4.samples
    assert sample.duration_s == pytest.approx(5.02196)  # line 8
    assert sample.power_w == pytest.approx(
        {"cpu": 0.954, "gpu": 0.028, "ane": 0.0, "combined": 0.983}
    )  # lines 185 to 188


def test_text_without_a_sample_is_an_error() -> None:
    with pytest.raises(DeviceError, match="was it called with root"):
        parse_powermetrics("powermetrics must be invoked as the superuser\n")
