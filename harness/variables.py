"""Environment variables that decide a run's figures, or where it finds what it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

SETTINGS = ("JOULEBENCH_KERNEL_FLAGS", "NVIDIA_TF32_OVERRIDE", "PYTHONMALLOC", "PYTHONOPTIMIZE",
            "PYTHONDEVMODE", "VECLIB_MAXIMUM_THREADS", "GLIBC_TUNABLES", "_RJEM_MALLOC_CONF")  # fmt: skip
SETTING_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "ATEN_",
                    "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "MALLOC_", "MIMALLOC_", "TCMALLOC_",
                    "LD_")  # fmt: skip
"""Environment variables that choose threads, their places, the instructions that libraries use, or how memory is given
out."""
PLACES = (
    "JOULEBENCH_DATA", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_HOST", "ANDROID_ADB_SERVER_PORT",
    "ADB_SERVER_SOCKET", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME", "CXX", "PATH",
)  # fmt: skip
"""Where data, phones, models, compiled kernels, the compiler and programs are."""

CARRIED = (*PLACES, *SETTINGS, *(f"{prefix}*" for prefix in SETTING_PREFIXES))
"""What a run that is to be made later needs as it is now; a star stands for any end."""


def is_setting(name: str) -> bool:
    """Of a run's inputs: two runs with another value are unlike."""
    return name in SETTINGS or name.startswith(SETTING_PREFIXES)


def is_carried(name: str, carried: Iterable[str] = CARRIED) -> bool:
    """carried: names, as `CARRIED` has them."""
    return any(fnmatchcase(name, one) for one in carried)
