"""Vega, Vega-Lite and Vega-Embed as one script, which every page with charts holds.

vl-convert puts it together in one to two seconds, so it is kept in the user's cache, behind its own SHA-256. A reader's
browser runs it: only a file that nobody else can have written is taken.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from functools import cache
from pathlib import Path

from results.own_cache import CacheError, cache_folder, clear, own_bytes, prepared, put

logger = logging.getLogger(__name__)

KIND = "charts"
"""Of the folders in the user's cache."""
SNIPPET = "window.vegaEmbed = vegaEmbed;"
MAX_BYTES = 16 * 1024 * 1024
"""Some eighteen times what it has."""
N_HEX = 64
KEPT_SCRIPTS = 4
"""Of other versions of vl-convert, as environments beside each other have them; the oldest go."""


@cache
def chart_library() -> str:
    # Inside a script element only these two sequences end or change the parsing.
    return _library().replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _library() -> str:
    """A cache that cannot be used costs seconds, never a page."""
    try:
        folder = prepared(cache_folder(KIND))
    except CacheError as error:
        logger.info("the script of charts is not kept: %s", error)
        return _put_together()
    made_by = f"{importlib.metadata.version('vl-convert-python')}\n{SNIPPET}"
    path = folder / f"{hashlib.sha256(made_by.encode()).hexdigest()[:16]}.js"
    script = _kept(path)
    if script is None:
        script = _put_together()
        _keep(path, script)
    return script


def _put_together() -> str:
    import vl_convert

    script: str = vl_convert.javascript_bundle(SNIPPET)
    return script


def _kept(path: Path) -> str | None:
    """None where there is none that can be trusted."""
    try:
        contents = own_bytes(path, MAX_BYTES)
    except CacheError:
        return None
    script = contents[N_HEX:]
    return script.decode() if hashlib.sha256(script).hexdigest().encode() == contents[:N_HEX] else None


def _keep(path: Path, script: str) -> None:
    contents = script.encode()
    try:
        put(path, hashlib.sha256(contents).hexdigest().encode() + contents)
        others = sorted((one for one in path.parent.iterdir() if one != path), key=lambda one: one.lstat().st_mtime_ns)
        for one in others[: 1 - KEPT_SCRIPTS]:
            clear(one)
    except OSError as error:
        logger.info("the script of charts is not kept: %s", error)
