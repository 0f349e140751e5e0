"""Bytes that processes send: by the closed form of each exchange, and as the sockets count them."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import torch

from engines.dispatch import Routing
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.running import RanksAsked, Running
from engines.techniques.context import BuildContext, LayerInput, ModelSizes
from tests.ranks import (
    BUNDLED,
    CHUNKS,
    HIDDEN,
    N_EXPERTS,
    N_LAYERS,
    TOP_K,
    logits,
    technique,
)

pytestmark = pytest.mark.numbers


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
            total += sent_by(copy)
    return total


def sent_by(one: socket.socket) -> int:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("<Q", info, 200)[0]) if len(info) >= 208 else 0


def kernel_counts() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        ours.sendall(b"one")
        return sent_by(ours) == 3


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


@pytest.mark.usefixtures("forked_ranks")
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
    if not kernel_counts():
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
