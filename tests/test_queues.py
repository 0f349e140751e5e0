"""Queued launches, power while a unit waits, and shares of a peak: closed forms on a sheet of round numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.base import DeviceError
from devices.models.efficiency import Efficiency
from devices.models.operation import TRANSFER, Operation, operation_seconds
from devices.models.sheet import Sheet, parse_sheet
from devices.models.timeline import Timeline
from tests.test_links import LINKED_TOML
from tests.toy_sheet import figure


def queued(depth: int) -> Sheet:
    """The GPU takes 0.5 s to launch, and 1 s for 10 000 FLOP."""
    return parse_sheet(LINKED_TOML.replace("[units.gpu]", f"[units.gpu]\nqueue_depth = {figure(depth)}"), "linked")


def gpu_work(work_s: float, launches: int = 1, **how: object) -> Operation:
    return Operation("work", "gpu", "norm", launches, flops=10_000.0 * work_s, **how)  # type: ignore[arg-type]


def end_s(depth: int, *operations: Operation) -> float:
    timeline = Timeline(queued(depth))
    timeline.run(operations)
    return timeline.now_s()


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("work_s", [0.125, 0.5, 2.0])
def test_launches_alike_cost_one_launch_or_are_bound_by_launching(n: int, work_s: float) -> None:
    """One operation of n launches, and n operations in the line, are the same to a queue."""
    in_turn_s = n * (0.5 + work_s)
    hidden_s = 0.5 + n * work_s if work_s >= 0.5 else n * 0.5 + work_s
    for work in ([gpu_work(n * work_s, n)], [gpu_work(work_s)] * n):
        assert end_s(1, *work) == pytest.approx(in_turn_s)
        assert end_s(2, *work) == pytest.approx(hidden_s)
        assert end_s(64, *work) == pytest.approx(hidden_s)


def test_a_deeper_queue_bridges_a_long_launch_and_short_ones() -> None:
    """4 s, then four times 0.1 s. Depth 2: the third launch waits until the 4 s are done, at 4.5, so the last three are
    issued at 5.0, 5.5 and 6.0. Depth 8: all are issued by 2.5, and done at 4.5 + 0.4."""
    work = [gpu_work(4.0), *[gpu_work(0.1)] * 4]
    assert end_s(1, *work) == pytest.approx(4.5 + 4 * 0.6)
    assert end_s(2, *work) == pytest.approx(6.1)
    assert end_s(8, *work) == pytest.approx(4.9)


def test_nothing_is_launched_before_the_line_is_done_elsewhere() -> None:
    """1.5 s on the GPU, 2 s on the CPU, then the GPU's launch of 0.5 s is seen again."""
    cpu = Operation("scatter", "cpu", "scatter", flops=200.0)
    assert end_s(8, gpu_work(1.0), cpu, gpu_work(1.0)) == pytest.approx(1.5 + 2.0 + 1.5)


def test_the_host_reads_what_the_router_chose_before_it_launches() -> None:
    router = Operation("router", "gpu", "router", flops=10_000.0)
    assert end_s(8, gpu_work(1.0), router, gpu_work(1.0)) == pytest.approx(0.5 + 1.0 + 1.0 + 0.5 + 1.0)


def test_a_copy_that_is_named_holds_up_work_and_no_launch() -> None:
    """The copy of 100 bytes takes 5.25 s; the launch is over by then."""
    copy = Operation("copy", "pcie", TRANSFER, moved_bytes=100.0, aside=True)
    assert end_s(8, copy, gpu_work(1.0, after=(1,))) == pytest.approx(5.25 + 1.0)
    assert end_s(1, copy, gpu_work(1.0, after=(1,))) == pytest.approx(5.25 + 1.5)


def test_nothing_is_launched_while_the_machine_sleeps() -> None:
    timeline = Timeline(queued(8))
    timeline.run([gpu_work(1.0)])
    timeline.sleep_until_s(10.0)
    timeline.run([gpu_work(1.0)])
    assert timeline.now_s() == pytest.approx(11.5)


def test_launching_costs_a_queued_unit_no_watts_of_its_own() -> None:
    """Two launches of 1 s at 5 W, and 0.5 s in which nothing works, at 1 W."""
    timeline = Timeline(queued(2))
    timeline.run([gpu_work(2.0, 2)])
    assert timeline.energy_j("gpu") == pytest.approx(2 * 5.0 + 0.5 * 1.0)
    assert timeline.use(0.0).of("gpu") == pytest.approx((2.0, 0.0, 0.0, 0.5))


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(1, 5)), min_size=1, max_size=12), st.integers(1, 6))
def test_a_queue_is_what_a_host_and_a_unit_do_launch_by_launch(work: list[tuple[float, int]], depth: int) -> None:
    """Stepped by hand: a host that issues one launch at a time and has at most `depth` of them out."""
    issued: list[float] = []
    done: list[float] = []
    for work_s, launches in work:
        for _ in range(launches):
            begin = max(issued[-1] if issued else 0.0, done[-depth] if len(done) >= depth else 0.0)
            issued.append(begin + 0.5)
            done.append(max(issued[-1], done[-1] if done else 0.0) + work_s / launches)
    assert end_s(depth, *(gpu_work(work_s, launches) for work_s, launches in work)) == pytest.approx(done[-1])


def test_a_unit_that_waits_and_one_that_is_idle_draw_their_own_watts() -> None:
    """GPU: 1.5 s at 5 W, 3 s at 2 W while the CPU works, 4 s at 1 W while nothing does; before and after `settle`."""
    sheet = parse_sheet(LINKED_TOML.replace("[units.gpu]", f"[units.gpu]\nwaiting_w = {figure(2.0)}"), "linked")
    timeline = Timeline(sheet)
    for round_ in (1, 2):
        timeline.run([gpu_work(1.0), Operation("scatter", "cpu", "scatter", flops=300.0)])
        timeline.sleep_until_s(timeline.now_s() + 4.0)
        assert timeline.energy_j("gpu") == pytest.approx(round_ * (1.5 * 5.0 + 3.0 * 2.0 + 4.0 * 1.0))
        timeline.settle()


# --- shares of a peak ------------------------------------------------------------------------------------------------

POINTS = "".join(
    f'{{ at = {at}, share = {share}, kind = "fitted", origin = "test" }}, '
    for at, share in ((1.0, 0.1), (100.0, 0.5), (1000.0, 1.0))
)


def shared(which: str, by: str) -> Sheet:
    roofline = f'{which} = {{ by = "{by}", points = [{POINTS}] }}'
    return parse_sheet(LINKED_TOML.replace("s_per_launch", f"{roofline}, s_per_launch"), "linked")


@pytest.mark.parametrize(
    ("rows", "share"), [(0.5, 0.1), (1.0, 0.1), (10.0, 0.3), (100.0, 0.5), (1e5, 1.0)]
)  # 10 is half way between 1 and 100 on a scale of logarithms
def test_arithmetic_reaches_the_share_that_its_rows_have(rows: float, share: float) -> None:
    """100 bytes of weights a launch, two launches; arithmetic is the slower where the FLOP are many."""
    operation = Operation("e", "gpu", "expert_ffn", 2, flops=rows * 200.0, weight_bytes=200.0)
    expected = 1.0 + max(200.0 / 1000.0, rows * 200.0 / (10_000.0 * share))
    assert operation_seconds(shared("flops_share", "flops_per_weight_byte"), operation) == pytest.approx(expected)


def test_memory_reaches_the_share_of_the_bytes_of_one_launch() -> None:
    """40 bytes over 4 launches are 10 each: 0.3 of 1000 bytes/s."""
    operation = Operation("e", "gpu", "norm", 4, moved_bytes=30.0, weight_bytes=10.0)
    assert operation_seconds(shared("bytes_share", "bytes"), operation) == pytest.approx(2.0 + 40.0 / 300.0)


def test_work_without_weights_stands_beyond_every_point() -> None:
    operation = Operation("e", "gpu", "attention", flops=1000.0)
    assert operation_seconds(shared("flops_share", "flops_per_weight_byte"), operation) == pytest.approx(0.6)


@given(st.floats(1e-3, 1e6), st.floats(1.0, 10.0))
def test_a_share_never_falls_where_its_points_rise(at: float, factor: float) -> None:
    efficiency = shared("flops_share", "flops").units["gpu"].roofline
    assert efficiency is not None
    assert isinstance(efficiency.flops_share, Efficiency)
    lower, higher = (efficiency.flops_share.share(1, 0.0, 0.0, one) for one in (at, at * factor))
    assert 0.1 <= lower <= higher <= 1.0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("at = 1.0", "at must rise from each to the next"),
        ("share = 1.0", r"share: must be less than or equal to 1, found 1\.5"),
        ('kind = "fitted"', r"kind: must be 'stated', 'fitted' or 'assumed', found 'guessed'"),
        ("by", "by: must be 'flops_per_weight_byte', 'flops' or 'bytes'"),
    ],
)
def test_a_table_of_shares_that_says_nothing_sensible_is_refused(wrong: str, problem: str) -> None:
    right = {"at = 1.0": "at = 1000.0", "share = 1.0": "share = 1.5", 'kind = "fitted"': 'kind = "guessed"'}
    points, by = POINTS.replace(wrong, right.get(wrong, wrong), 1), "colour" if wrong == "by" else "flops"
    text = LINKED_TOML.replace("s_per_launch", f'flops_share = {{ by = "{by}", points = [{points}] }}, s_per_launch')
    with pytest.raises(DeviceError, match=problem):
        parse_sheet(text, "linked")


@pytest.mark.parametrize("depth", [0.0, 1.5, 2000.0])
def test_a_depth_is_a_whole_number_of_launches(depth: float) -> None:
    with pytest.raises(DeviceError, match="queue_depth: must be a whole number from 1 to 1024"):
        queued(depth)  # type: ignore[arg-type]


def test_a_sheet_without_a_depth_is_one_of_depth_one() -> None:
    timeline = Timeline(parse_sheet(LINKED_TOML, "linked"))
    timeline.run([gpu_work(1.0), gpu_work(0.1, 3)])
    assert timeline.now_s() == pytest.approx(math.fsum([1.5, 1.6]))


@pytest.mark.parametrize(
    ("huge", "n_digits"), [("1" + 400 * "0", 401), ("-1" + 400 * "0", 401), ("0x1" + 4000 * "0", 4817)]
)
@pytest.mark.parametrize(
    ("before", "number", "key"),
    [
        ("at = ", "1.0", "units.gpu.roofline.flops_share.points.0.at"),
        ("busy_w = { value = ", "5.0", "units.gpu.busy_w.value"),
        ("idle_w = { value = ", "1.0", "units.gpu.idle_w.value"),
    ],
)
def test_a_whole_number_beyond_all_floats_is_refused_and_not_printed(
    before: str, number: str, key: str, huge: str, n_digits: int
) -> None:
    """16^4000 has 4817 digits, for 4000 log10(16) is 4816.5: more than Python prints."""
    shares = f'flops_share = {{ by = "flops", points = [{POINTS}] }}, s_per_launch'
    text = LINKED_TOML.replace("s_per_launch", shares)
    assert before + number in text
    with pytest.raises(DeviceError) as refused:
        parse_sheet(text.replace(before + number, before + huge, 1), "linked")
    assert f"{key}: a whole number of {n_digits} digits, and no figure is so large; correct it" in str(refused.value)
    assert 50 * "0" not in str(refused.value)
