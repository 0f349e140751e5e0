"""What the engine needs of llama.cpp's C API, bound with ctypes to the library that the wheel xllamacpp carries.

Its parameter records are passed by value, and their fields move from version to version. So nothing is assumed: the
defaults that the library itself fills in are compared with what this layout reads, and a library whose defaults do not
read as they should is refused. The records here are a little longer than the library's: it writes and reads its own
part of them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from engines.errors import EngineError, OutOfMemoryError

MOST_CPUS = 512
"""Of a thread pool's mask, GGML_MAX_N_THREADS."""
CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
"""GGML's numbers of types."""
SPARE = 256
"""Bytes behind a record, for fields that a later version adds at its end."""
LOG_WARNING, LOG_ERROR = 3, 4
LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("spare", c_int8 * SPARE),
    ]


class ContextParams(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope", c_float * 6),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("spare", c_int8 * SPARE),
    ]


class Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))),
        ("logits", ctypes.POINTER(c_int8)),
    ]


class PoolParams(ctypes.Structure):
    _fields_: ClassVar = [("cpumask", c_bool * MOST_CPUS), ("n_threads", c_int), ("spare", c_int8 * SPARE)]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_n_params": (c_uint64, [c_void_p]),
    "llama_model_size": (c_uint64, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(c_float), [c_void_p, c_int32]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
    "llama_detach_threadpool": (None, [c_void_p]),
    "ggml_threadpool_params_default": (PoolParams, [c_int]),
    "ggml_threadpool_new": (c_void_p, [ctypes.POINTER(PoolParams)]),
    "ggml_threadpool_free": (None, [c_void_p]),
}
"""Result and arguments of each function, after include/llama.h and ggml/include/ggml-cpu.h."""


class Library:
    """The functions of one shared library, with what it logged last. Raises `EngineError` where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: deque[str] = deque(maxlen=20)
        try:
            library = ctypes.CDLL(str(path))
            self._functions = {name: getattr(library, name) for name in SIGNATURES}
        except (OSError, AttributeError) as error:
            raise EngineError(f"llama.cpp: {path} cannot be loaded ({error}); install another xllamacpp") from error
        for name, (result, arguments) in SIGNATURES.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments
        self._listener = LogCallback(self._hear)
        self("llama_log_set", self._listener, None)
        self._check_layout()
        self("llama_backend_init")

    def __call__(self, name: str, *arguments: object) -> Any:
        return self._functions[name](*arguments)

    def _hear(self, level: int, text: bytes | None, _: object) -> None:
        if level in (LOG_WARNING, LOG_ERROR) and text:
            self.warnings.append(text.decode(errors="replace").strip())

    def _check_layout(self) -> None:
        """That its own defaults read as they should."""
        model, context = self("llama_model_default_params"), self("llama_context_default_params")
        pool = self("ggml_threadpool_params_default", 3)
        read = (model.n_gpu_layers, model.split_mode, model.main_gpu, context.n_ctx, context.n_batch, context.n_ubatch,
                context.n_seq_max, context.rope_scaling_type, context.flash_attn_type, tuple(context.rope[2:6]),
                context.type_k, context.type_v, pool.n_threads, any(pool.cpumask))  # fmt: skip
        wanted = (-1, 1, 0, 512, 2048, 512, 1, -1, -1, (-1.0,) * 4, 1, 1, 3, False)
        threads = context.n_threads, context.n_threads_batch
        if read != wanted or threads[0] != threads[1] or not 1 <= threads[0] <= MOST_CPUS:
            raise EngineError(
                f"llama.cpp: the records of {self.path} are laid out otherwise than in the versions known here; install"
                " xllamacpp 2026.10.11549"
            )

    def failed(self, what: str) -> EngineError:
        """An error with what the library said last."""
        said = "; ".join(self.warnings)[-300:]
        message = f"llama.cpp: {what}{f' ({said})' if said else ''}"
        is_memory = any(word in said.lower() for word in ("failed to allocate", "out of memory", "bad_alloc"))
        return OutOfMemoryError(message) if is_memory else EngineError(message)

    @property
    def system(self) -> str:
        """What it says of the instructions that it was built for and found: "CPU : SSE3 = 1 | AVX2 = 1 | ..."."""
        return str(self("llama_print_system_info").decode(errors="replace"))


@cache
def library(path: Path) -> Library:
    """Loaded once a process: it cannot be unloaded. Raises `EngineError`."""
    return Library(path)


class TokenBatch:
    """Room for tokens of one sequence that go through the model together."""

    def __init__(self, library: Library, most: int) -> None:
        self._library, self._batch = library, library("llama_batch_init", most, 0, 1)
        for i in range(most):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0

    def filled(self, tokens: Sequence[int], first: int, asked: Callable[[int], bool]) -> Batch:
        """first: the position of the first token. asked: whether logits are wanted of a position."""
        for i, token in enumerate(tokens):
            self._batch.token[i] = token
            self._batch.pos[i] = first + i
            self._batch.logits[i] = asked(first + i)
        self._batch.n_tokens = len(tokens)
        return self._batch  # type: ignore[no-any-return]

    def free(self) -> None:
        self._library("llama_batch_free", self._batch)


def thread_pool(library: Library, n_threads: int, cores: frozenset[int] | None) -> c_void_p:
    """Threads that compute, on cores of their own where they are given; the caller is the first of them."""
    params = library("ggml_threadpool_params_default", n_threads)
    for core in cores or ():
        params.cpumask[core] = True
    pool = library("ggml_threadpool_new", ctypes.byref(params))
    if not pool:
        raise library.failed(f"no pool of {n_threads} threads")
    return c_void_p(pool)
