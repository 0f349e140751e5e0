"""Loads that a self-test measures: known to be there, though not in watts. Each is a context: it runs inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple
from typing import Protocol as TypingProtocol

from devices.base import Unit

if TYPE_CHECKING:
    import torch

CPU_SIZE, GPU_SIZE = 768, 4096
"""Side of the square matrices: a product takes milliseconds, so that the load ends soon after it is asked to."""
STOP_TIMEOUT_S = 20.0
SPIN = ("sh", "-c", "while :; do :; done")


class RunningLoad(NamedTuple):
    """What runs, in words, and which units it keeps busy."""

    words: str
    units: tuple[Unit, ...]


class Program(TypingProtocol):
    def kill(self) -> None: ...


class RunsPrograms(TypingProtocol):
    """A device on which programs can be started."""

    def start_program(self, arguments: Sequence[str]) -> Program: ...


@contextmanager
def matrix_products(units: Sequence[Unit]) -> Iterator[RunningLoad]:
    """Matrix products in this process, on every one of the units that torch reaches."""
    import torch

    found = {unit: d for unit in units if (d := _torch_device(unit)) is not None}
    devices = list(found.values())
    words = [f"{torch.get_num_threads()} CPU threads" if d.type == "cpu" else str(d) for d in devices]
    stop = Event()
    with ExitStack() as running:
        pool = running.enter_context(ThreadPoolExecutor(max_workers=max(1, len(devices)), thread_name_prefix="load"))
        started = [Event() for _ in devices]
        loops = [pool.submit(_multiply, device, begun, stop) for device, begun in zip(devices, started, strict=True)]
        # Whatever happens, the threads end before the pool waits for them.
        running.callback(stop.set)
        for begun, loop in zip(started, loops, strict=True):
            while not begun.wait(0.05):
                if loop.done():
                    break
        yield RunningLoad(f"matrix products on {' and '.join(words)}" if words else "nothing", tuple(found))
        stop.set()
        for loop in loops:
            loop.result(timeout=STOP_TIMEOUT_S)


@contextmanager
def no_load() -> Iterator[RunningLoad]:
    """Of a device on which nothing of ours can run."""
    yield RunningLoad("nothing", ())


@contextmanager
def busy_loops(device: RunsPrograms, n_cores: int) -> Iterator[RunningLoad]:
    """A busy loop for each core of a phone. Raises `DeviceError`."""
    with ExitStack() as running:
        for _ in range(n_cores):
            running.callback(device.start_program(SPIN).kill)
        yield RunningLoad(f"{n_cores} busy loops", ("cpu",))


def _torch_device(unit: Unit) -> torch.device | None:
    import torch

    if unit == "cpu":
        return torch.device("cpu")
    if unit == "gpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if unit == "gpu" and torch.backends.mps.is_available():
        return torch.device("mps")
    return None


def _multiply(device: torch.device, begun: Event, stop: Event) -> None:
    import torch

    size, dtype = (CPU_SIZE, torch.float32) if device.type == "cpu" else (GPU_SIZE, torch.float16)
    # Random: a product of zeros draws less. Scaled, so that the products neither grow nor vanish.
    factor = (torch.randn(size, size) / size**0.5).to(device, dtype)
    product = torch.empty_like(factor)
    wait = _synchroniser(device)
    while not stop.is_set():
        torch.mm(factor, factor, out=product)
        wait()
        begun.set()


def _synchroniser(device: torch.device) -> Callable[[], Any]:
    import torch

    if device.type == "cuda":
        return torch.cuda.synchronize
    return torch.mps.synchronize if device.type == "mps" else lambda: None
