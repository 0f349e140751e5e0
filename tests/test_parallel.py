"""Several processes compute what one does, each with its part of the checkpoint, and send what the plans say."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engines.base import unheard
from engines.dispatch import Routing
from engines.errors import EngineError
from engines.kernels.exchange import RankLostError, SharedSums, file_bytes
from engines.kernels.library import library
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.decode import Computed
from engines.model.quantised import Quantisation
from engines.model.transformer import RoutingListener, Transformer
from engines.model.weights import SparseWeights
from engines.parallel.engine import ParallelEngine
from engines.parallel.processes import Workers
from engines.parallel.running import RanksAsked, Running
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters, dropless, preset_parameters
from results.records import Request
from tests.command import environment
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer

pytestmark = pytest.mark.numbers

BUNDLED = "bundled:tiny-qwen3-moe"
CHUNKS = [37, 2, 50] + [1] * 11
"""Prefill in steps of which one has fewer tokens than some ranks, then decoding."""
TOLERANCE = 1e-5
LINKS = "gloo and shared memory" if library() is not None else "gloo"


def technique(name: str, **parameters: object) -> Any:
    kind = CustomParameters if name == "custom" else preset_parameters(name)
    return kind.model_validate(parameters)


def logits(model: Transformer, technique: Any, on_routing: RoutingListener | None = None) -> torch.Tensor:
    tokens = torch.randint(0, 2048, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    cache, hidden = model.new_cache(), list[torch.Tensor]()
    with torch.inference_mode():
        cache.start(len(tokens))
        for chunk in tokens.split(CHUNKS):
            phase: ChunkPhase = "decode" if len(chunk) == 1 else "prefill"
            found, plans = model.forward(chunk, cache, technique, phase, None, on_routing)
            hidden.append(found)
            if plans.is_fused and on_routing is not None:
                for layer, computed in enumerate(plans.computed):
                    if isinstance(computed, Computed):
                        on_routing(layer, computed.routing, phase)
        return model.logits(torch.cat(hidden))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class Case(NamedTuple):
    family: str
    n_ranks: int
    technique: Any


BLOCKS = {"place": {"kind": "expert_parallel"}, "layout": {"kind": "blocks", "block_size": 16}}
FAMILIES = [
    Case("qwen2-moe-some-dense", 2, technique("expert-parallel")),
    Case("gpt-oss-mxfp4", 2, technique("tensor-parallel")),
    Case("deepseek-v3-halves", 3, technique("expert-parallel", router_gather="logits")),
    Case("phi-moe", 4, technique("tp-ep", exchange="all_gather")),
    Case("llama4-top2", 2, technique("tensor-parallel", sequence_parallel=False)),
    Case("gpt-oss", 2, technique("tensor-parallel")),
    Case("mixtral-sliding", 2, technique("custom", **BLOCKS)),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=f"{c.family}-{c.n_ranks}", marks=[pytest.mark.slow] if i > 3 else [])
        for i, c in enumerate(FAMILIES)
    ],
)  # fmt: skip
def test_several_processes_equal_one(case: Case, tmp_path: Path) -> None:
    write_family(tmp_path, CASES[case.family])
    expected = logits(Transformer(load_checkpoint(str(tmp_path), torch.float32)), dropless())
    running = Running(RanksAsked(inspect_checkpoint(str(tmp_path)), case.technique, case.n_ranks, threads=1))
    try:
        assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
    finally:
        running.close()


def test_one_rank_is_one_process() -> None:
    expected = logits(Transformer(load_checkpoint(BUNDLED, torch.float32)), dropless())
    running = Running(RanksAsked(inspect_checkpoint(BUNDLED), technique("tp-ep", tensor_ranks=1), 1, threads=1))
    assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
    assert not running.workers.processes
    running.close()


# --- answers of an engine --------------------------------------------------------------------------------------------


def asked(kind: str, n_prompt: int, seed: int, **more: Any) -> Request:
    prompt = torch.randint(10, 2000, (n_prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(request_id=f"{kind} {seed}", sample_id=str(seed), kind=kind, prompt_ids=prompt, **more)  # type: ignore[arg-type]


GENERATE = [asked("generate", n, n, max_new_tokens=8, ignore_end_tokens=True) for n in (70, 33, 3)]
LOGLIKELIHOOD = asked("loglikelihood", 45, 1, continuation_ids=(5, 6, 7))
CHUNK = 32
N_LAYERS, N_EXPERTS, TOP_K, HIDDEN = 4, 16, 2, 192


@pytest.fixture(scope="module")
def one() -> ReferenceEngine:
    return ReferenceEngine(load_checkpoint(BUNDLED, torch.float32), DroplessParameters(), CHUNK, threads=1)


@pytest.fixture(scope="module")
def two() -> Iterator[ParallelEngine]:
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), technique("expert-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    yield engine
    engine.close()


def assert_same_answers(one: ReferenceEngine, several: ParallelEngine) -> None:
    for request in GENERATE:
        assert several.run(request, unheard).token_ids == one.run(request, unheard).token_ids
    found, expected = several.run(LOGLIKELIHOOD, unheard), one.run(LOGLIKELIHOOD, unheard)
    assert found.loglikelihood == pytest.approx(expected.loglikelihood, rel=TOLERANCE)
    together = zip(several.run_batch(GENERATE, unheard), one.run_batch(GENERATE, unheard), strict=True)
    assert all(a.token_ids == b.token_ids for a, b in together)


def test_shown_probabilities_are_those_of_one_process_and_count_as_no_request(
    one: ReferenceEngine, two: ParallelEngine
) -> None:
    """As `fidelity` asks for them, between requests that are counted and before the counters are read."""
    shown: dict[int, list[torch.Tensor]] = {}
    two.take_counters()
    two.run(GENERATE[0], unheard)
    alone = two.take_counters()
    two.run(GENERATE[0], unheard)
    for key, engine in enumerate((one, two)):
        shown[key] = []
        engine.show_log_probabilities(LOGLIKELIHOOD, lambda part, key=key: shown[key].append(part.clone()))  # type: ignore[misc]
    assert (alone.bytes_exchanged or 0) > 0
    assert two.take_counters() == alone
    torch.testing.assert_close(torch.cat(shown[1]), torch.cat(shown[0]), rtol=1e-4, atol=1e-4)
    assert two.take_heat() is not None  # of the two requests, which no other test is to find


def test_answers_are_those_of_one_process_alone_and_in_a_batch(one: ReferenceEngine, two: ParallelEngine) -> None:
    assert_same_answers(one, two)
    heat, expected = two.take_heat(), one.take_heat()
    assert heat is not None
    assert heat == expected, "rank 0 is told the routing of all tokens"
    road = two.take_road()
    assert (road.n_processes, road.links, road.n_threads) == (2, LINKS, 1)
    assert road.decoding == "both", "one token in one call of the kernels; a batch plan by plan"
    ours, theirs = two.take_counters(), one.take_counters()
    assert (ours.routed_pairs, ours.computed_rows, ours.dropped_pairs) == (
        theirs.routed_pairs, theirs.computed_rows, 0,
    )  # fmt: skip
    assert two.held_weights().n_parameters == one.held_weights().n_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        technique("tensor-parallel"),
        technique("tp-ep", tensor_ranks=1),
        technique("eplb", calibration_prompts=1),
        technique("custom", **BLOCKS, decode={"kind": "selective"}),
        technique("custom", place={"kind": "expert_parallel"}, layout={"kind": "all_experts"}),
    ],
    ids=["tp", "tp-ep", "eplb", "ep-blockwise", "ep-all-experts"],
)
@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_narrow_experts_over_ranks_give_what_one_process_gives(chosen: Any, form: Any) -> None:
    quantise = Quantisation(experts=form)
    checkpoint = load_checkpoint(BUNDLED, torch.float32, quantise)
    one = ReferenceEngine(checkpoint, DroplessParameters(), CHUNK, threads=1)
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), chosen, 2, quantise=quantise, prefill_chunk=CHUNK, threads=1)
    )
    try:
        if several.needs_calibration:
            several.calibrate([list(range(10, 74))])
        assert_same_answers(one, several)
        several.take_counters()  # raises where bytes are not what the plans say
    finally:
        several.close()


def test_slices_are_counted_where_a_layer_is_left_to_wait_for_others(tmp_path: Path) -> None:
    """A family whose layers the kernels do not know whole: each layer's sum is waited for, and its plan counted."""
    write_family(tmp_path, CASES["qwen2-moe"])
    copy_tokenizer(tmp_path)
    one = ReferenceEngine(load_checkpoint(str(tmp_path), torch.float32), DroplessParameters(), CHUNK, threads=1)
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(str(tmp_path)), technique("tensor-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    try:
        assert_same_answers(one, several)
        assert several.take_counters().routed_pairs == one.take_counters().routed_pairs
        assert several.take_road().decoding not in (None, "fused")
    finally:
        several.close()


@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, {"nodes": 2, "groups": 4}, {"exchange": "all_gather"}], ids=str)
def test_experts_dealt_by_load_give_what_one_process_gives(where: dict[str, Any], one: ReferenceEngine) -> None:
    """Flat and hierarchical, rows to whom they belong or to all; bytes are what the plans say, or an error."""
    chosen = technique("eplb", calibration_prompts=1, spare_slots=2, **where)
    several = ParallelEngine(RanksAsked(inspect_checkpoint(BUNDLED), chosen, 4, prefill_chunk=CHUNK, threads=1))
    try:
        several.calibrate([list(range(10, 74))])
        assert_same_answers(one, several)
        assert several.take_counters().bytes_exchanged
    finally:
        several.close()


def test_each_process_reads_its_own_experts_and_no_others(two: ParallelEngine) -> None:
    sizes: dict[str, int] = {}
    load_checkpoint(BUNDLED, torch.float32, on_read=lambda name, n_bytes: sizes.update({name: n_bytes}))
    own = [range(8), range(8, 16)]
    for rank, read in enumerate(two.read_bytes()):
        expected = {
            name: n for name, n in sizes.items() if ".experts." not in name or int(name.split(".")[5]) in own[rank]
        }
        assert read == expected
        assert sum(read.values()) < 0.6 * sum(sizes.values())


def test_slices_of_experts_are_read_by_columns() -> None:
    """A rank of four reads a quarter of every matrix: rows of gate and up, columns of down."""
    sizes: dict[str, int] = {}
    part: dict[str, int] = {}
    load_checkpoint(BUNDLED, torch.float32, on_read=lambda name, n_bytes: sizes.update({name: n_bytes}))
    built = technique("tensor-parallel").build(context(4))
    checkpoint = load_checkpoint(
        BUNDLED, torch.float32, held=lambda layer: built.held(layer, 3),
        on_read=lambda name, n_bytes: part.update({name: n_bytes}),
    )  # fmt: skip
    assert {name for name in sizes if ".experts." in name} == {name for name in part if ".experts." in name}
    assert all(4 * part[name] == n for name, n in sizes.items() if ".experts." in name)
    mlps = [c.weights.layers[1].mlp for c in (load_checkpoint(BUNDLED, torch.float32), checkpoint)]
    whole, own = (mlp.experts.experts[5] for mlp in mlps if isinstance(mlp, SparseWeights))
    assert isinstance(whole.down_HI, torch.Tensor)
    assert isinstance(own.down_HI, torch.Tensor)
    width = whole.gate_IH.shape[0]
    columns = slice(3 * width // 4, width)
    assert torch.equal(own.gate_IH.to(torch.float32), whole.gate_IH[columns].to(torch.float32))
    assert torch.equal(own.down_HI, whole.down_HI[:, columns])


def context(n_ranks: int) -> BuildContext:
    return BuildContext(CHUNK, own_sizes(inspect_checkpoint(BUNDLED).config), ranks=n_ranks)


# --- bytes -----------------------------------------------------------------------------------------------------------


def socket_bytes() -> int:
    """What this process has sent over TCP, by the kernel's own count (tcpi_bytes_sent, Linux 4.19)."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except OSError:
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(descriptor))) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("<Q", info, 200)[0] if len(info) >= 208 else 0
    return total


def owner(token: int, n_tokens: int, n_ranks: int) -> int:
    """Rank r has the tokens floor(r T / N) .. floor((r + 1) T / N) - 1."""
    return next(r for r in range(n_ranks) if token < n_tokens * (r + 1) // n_ranks)


def closed_form(routed: list[tuple[int, Routing]], n_ranks: int, exchange: str, gather: str) -> int:
    """Bytes of the experts, counted token by token: what 004 says of each exchange."""
    total = 0
    for _, routing in routed:
        n_tokens, row = len(routing.expert_ids_TK), 4 * HIDDEN
        if n_tokens < n_ranks or n_tokens == 1:
            total += n_ranks * (n_ranks - 1) * n_tokens * row  # each rank's partial result to all others
            continue
        told = 8 * TOP_K if gather == "selection" else 4 * N_EXPERTS
        for token, ids in enumerate(routing.expert_ids_TK.tolist()):
            at = {expert * n_ranks // N_EXPERTS for expert in ids}
            away = n_ranks - 1 if exchange == "all_gather" else len(at - {owner(token, n_tokens, n_ranks)})
            total += told * (n_ranks - 1) + 2 * row * away
    return total


@pytest.mark.parametrize(
    ("n_ranks", "exchange", "gather"),
    [
        (2, "all_to_all", "selection"),
        pytest.param(4, "all_to_all", "logits", marks=pytest.mark.slow),
        pytest.param(4, "all_gather", "selection", marks=pytest.mark.slow),
    ],
)
def test_bytes_sent_are_those_of_the_closed_form_and_of_the_sockets(n_ranks: int, exchange: str, gather: str) -> None:
    chosen = technique("expert-parallel", exchange=exchange, router_gather=gather)
    running = Running(RanksAsked(inspect_checkpoint(BUNDLED), chosen, n_ranks, threads=1))
    routed: list[tuple[int, Routing]] = []
    try:
        before, own_before = socket_bytes(), sum(running.links.sent_bytes.values())
        logits(running.model, running.technique, lambda layer, routing, _: routed.append((layer, routing)))
        of_kernel = socket_bytes() - before
        own = sum(running.links.sent_bytes.values()) - own_before - running.links.shared_bytes
        sent = running.links.sent_bytes["experts"] + sum(r.sent_bytes["experts"] for r in running.workers.reports())
    finally:
        running.close()
    assert sent == closed_form(routed, n_ranks, exchange, gather)
    if before == 0:
        pytest.skip("the kernel does not count what sockets send")
    n_messages = len(CHUNKS) * N_LAYERS * 5 * n_ranks
    assert own <= of_kernel <= own + 200 * n_messages, "and gloo's headers"


def test_the_delayed_gather_of_claim_004_004_in_bytes_that_are_sent() -> None:
    """128 experts, top 8: 16 times fewer values by E / K. An expert's number travels beside its weight: 8 times fewer
    bytes, E / 2K."""
    sizes = ModelSizes(
        n_experts=128, top_k=8, hidden=64, expert_width=32, expert_bytes=1, n_layers=1, n_sparse_layers=1
    )
    scores_TE = torch.rand(64, 128, generator=torch.Generator().manual_seed(0))
    routing = Routing(scores_TE.topk(8).indices, torch.full((64, 8), 0.125), 128)
    sent = {}
    for gather in ("logits", "selection"):
        built = technique("expert-parallel", router_gather=gather).build(BuildContext(64, sizes, ranks=4))
        gathered = built.plan(LayerInput(0, "prefill", routing)).exchanges[0]
        sent[gather] = sum(map(sum, gathered.bytes_NN))
    assert sent == {"logits": 4 * 128 * 64 * 3, "selection": (4 + 4) * 8 * 64 * 3}
    assert sent["logits"] == 16 / 2 * sent["selection"]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 15.0) -> bool:
    until_s = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def what_is_left() -> tuple[list[str], int]:
    """Folders and shared files of ranks, and sockets that this process listens at or is connected by."""
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if ".sums" in line]
    folders = [str(path) for path in Path(tempfile.gettempdir()).glob("joulebench-ranks-*")]
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [*mapped, *folders], sum(link.startswith("socket:") for link in links)


def killing(pids: Callable[[], list[int]], when: str) -> Callable[..., None]:
    """A listener that kills the second process at an edge of a request."""

    def on_phase(event: str, at_s: float) -> None:
        if event == when:
            os.kill(pids()[1], signal.SIGKILL)

    return on_phase


@pytest.mark.parametrize("when", ["before", "request start", "prefill end"])
def test_a_rank_that_dies_is_named_and_the_next_request_has_new_ones(
    when: str, one: ReferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it waits, in prefill, and in decoding: in time, by name, and nothing is left of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = what_is_left()
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), technique("expert-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    try:
        engine.reset()
        lost = engine.process_ids()[1]
        if when == "before":
            os.kill(lost, signal.SIGKILL)
        begun_s = time.monotonic()
        request = asked("generate", 200, 4, max_new_tokens=400, ignore_end_tokens=True)
        with pytest.raises(EngineError, match=rf"rank 1 of 2 \(process {lost}\) ended by signal 9 \(SIGKILL\)"):
            engine.run(request, killing(engine.process_ids, when))
        assert time.monotonic() - begun_s < 20
        assert_same_answers(one, engine)
        ranks = engine.process_ids()[1:]
        assert ranks != [lost]
    finally:
        engine.close()
    assert gone([lost, *ranks])
    if when == "before":
        del engine
        assert what_is_left() == before


@pytest.mark.parametrize("before_it_is_told", [False, True])
def test_a_rank_that_dies_while_it_loads_is_named(before_it_is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Workers._start_process

    def killed(self: Workers, rank: int) -> None:
        started(self, rank)
        os.kill(self.processes[-1].pid, signal.SIGKILL)
        if before_it_is_told:
            self.processes[-1].wait()

    monkeypatch.setattr(Workers, "_start_process", killed)
    engine = ParallelEngine(RanksAsked(inspect_checkpoint(BUNDLED), technique("tensor-parallel"), 3, threads=1))
    try:
        with pytest.raises(EngineError, match=r"rank 1 of 3 \(process \d+\) ended by signal 9 \(SIGKILL\)"):
            engine.reset()
    finally:
        engine.close()


# --- sums in shared memory -------------------------------------------------------------------------------------------


def joined(folder: Path, n_ranks: int, limit_s: float = 20.0) -> list[SharedSums]:
    if library() is None:
        pytest.skip("no kernels here")
    path = folder / "sums"
    path.write_bytes(bytes(file_bytes(n_ranks, 1000)))
    return [SharedSums(path, rank, n_ranks, 1000, limit_s) for rank in range(n_ranks)]


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_sums_in_shared_memory_are_those_of_the_ranks_in_their_order_bit_for_bit(n_ranks: int, tmp_path: Path) -> None:
    """Many turns of unlike sizes, by threads that come early and late: no box is written before all have read it."""
    sums = joined(tmp_path, n_ranks)
    sizes = [1000, 1, 17, 999] * 50
    parts = [[torch.randn(n) for n in sizes] for _ in range(n_ranks)]
    found: list[list[torch.Tensor]] = [[] for _ in range(n_ranks)]

    def add(rank: int) -> None:
        for turn, part in enumerate(parts[rank]):
            if (turn + rank) % 37 == 0:
                time.sleep(0.002)
            total = part.clone()
            sums[rank].add_up(total)
            found[rank].append(total)

    threads = [threading.Thread(target=add, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for turn in range(len(sizes)):
        expected = parts[0][turn].clone()
        for rank in range(1, n_ranks):
            expected += parts[rank][turn]
        assert all(torch.equal(found[rank][turn], expected) for rank in range(n_ranks))


def test_who_waits_for_a_rank_that_is_gone_is_told(tmp_path: Path) -> None:
    first, second = joined(tmp_path, 2)
    threading.Timer(0.1, second.leave).start()
    with pytest.raises(RankLostError, match="a rank of a sum is gone"):
        first.add_up(torch.ones(4))
    late, _ = joined(tmp_path, 2, limit_s=0.1)
    with pytest.raises(RankLostError):
        late.add_up(torch.ones(4))


ORPHANS = """
import signal, time
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.techniques.presets import preset_parameters
if __name__ == "__main__":
    # Who runs the tests may ignore it, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    technique = preset_parameters("tensor-parallel")()
    engine = ParallelEngine(RanksAsked(inspect_checkpoint("bundled:tiny-qwen3-moe"), technique, 3, threads=1))
    engine.reset()
    print(*engine.process_ids()[1:], flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as parent:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(map(is_alive, ranks))
        parent.send_signal(how)
        parent.wait(20)
    assert gone(ranks)
