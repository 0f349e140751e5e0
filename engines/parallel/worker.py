"""The process of a rank other than the first: `python -m engines.parallel.worker DESCRIPTOR`.

It does what the first rank says until that says stop or is gone. It leaves nothing behind: when its parent ends, in
whatever way, so does it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch

from engines.errors import EngineError
from engines.model.held_weights import held_weights
from engines.model.key_value_cache import KeyValueCache
from engines.parallel.links import Links
from engines.parallel.messages import REPORT, START, STEP, STOP, Channel, LostError
from engines.parallel.settings import RankPart, RankSettings
from engines.parallel.transformer import RankTransformer
from engines.techniques.context import ChunkPhase
from engines.techniques.over_ranks import OverRanks

PEER_LOST = 3
"""Exit status of a rank that ends because another is gone."""
WATCH_S = 0.5
GONE_LOOKS, GONE_LOOK_S = 20, 0.01
PHASES: tuple[ChunkPhase, ...] = ("prefill", "decode")


def main(descriptor: int) -> int:
    # Ctrl-C goes to the whole group of processes; the first rank takes it, and ends the others when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, folders = os.getppid(), list[str]()
    threading.Thread(target=_end_with, args=(parent, folders), daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        settled = channel.receive_json()
        folders.append(os.path.dirname(settled["settings"]["store_file"]))
    except LostError:
        return PEER_LOST
    status = attend(channel, settled)
    if status == PEER_LOST and _is_gone(parent):
        _remove(folders)
    return status


def attend(channel: Channel, settled: dict[str, Any]) -> int:
    """Computes a rank's part of one engine until the first rank says stop or is gone. settled: what it said first.
    Returns an exit status."""
    try:
        settings, rank = RankSettings.model_validate(settled["settings"]), int(settled["rank"])
        torch.set_num_threads(settings.threads)
        try:
            from engines.model.checkpoints import inspect_checkpoint

            technique = settings.technique_of(inspect_checkpoint(settings.source).config)
            part = RankPart(settings, technique, rank)
        except EngineError as error:
            channel.send_json({"error": str(error)})
            return 1
        held = held_weights(part.checkpoint.weights)
        channel.send_json({"read_bytes": part.read_bytes, "held_bytes": held.n_bytes})
        with torch.inference_mode():
            links = Links(settings.store_file, rank, settings.n_ranks, settings.backend)
            try:
                _serve(channel, RankTransformer(part.checkpoint, links, part.backend), technique)
            finally:
                links.leave()
    except LostError:
        return PEER_LOST
    except RuntimeError as error:  # gloo and nccl raise nothing narrower
        sys.stderr.write(f"{error}\n")
        return PEER_LOST
    finally:
        channel.close()
    return 0


def _serve(channel: Channel, model: RankTransformer, technique: OverRanks) -> None:
    caches: dict[int, KeyValueCache] = {}
    while True:
        what, *numbers = channel.receive_numbers()
        if what == STOP:
            return
        if what == START:
            number, n_positions, n_kept, turned_for = numbers
            caches.setdefault(number, model.new_cache()).start(n_positions, n_kept, turned_for)
        elif what == STEP:
            phase, n_chunks, *rest = numbers
            of_chunks, tokens = rest[: 2 * n_chunks], rest[2 * n_chunks :]
            chunks = torch.split(torch.tensor(tokens), of_chunks[1::2])
            model.forward_batch(chunks, [caches[n] for n in of_chunks[::2]], technique, PHASES[phase])
        elif what == REPORT:
            channel.send_json({"sent_bytes": model.links.sent_bytes, "routed_crc": model.routed_crc})
            model.links.sent_bytes = dict.fromkeys(model.links.sent_bytes, 0)


def _end_with(parent: int, folders: list[str]) -> None:
    """The whole process, whatever it waits for. folders: of the ranks, which nobody else removes then."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    _remove(folders)
    os._exit(PEER_LOST)


def _is_gone(parent: int) -> bool:
    """A process that ends closes its sockets a moment before its children are another's."""
    for _ in range(GONE_LOOKS):
        if os.getppid() != parent:
            return True
        time.sleep(GONE_LOOK_S)
    return False


def _remove(folders: list[str]) -> None:
    """All ranks may try at once."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
