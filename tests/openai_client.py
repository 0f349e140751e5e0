"""A server as our engine, with the bundled model's tokenizer, and a request to it."""

from __future__ import annotations

import time
from typing import Any

from engines.external.openai import OpenAIEngine, ServerOptions
from results.records import Request
from tests.protocol_server import checkpoint

PROMPT = "The miller came home. The key is"


def client(url: str, **options: Any) -> OpenAIEngine:
    asked = ServerOptions(url, **{"flavour": "joulebench", "model": "m", **options})
    return OpenAIEngine(asked, checkpoint().tokenizer, checkpoint().config.max_length, time.perf_counter)


def request(n: int = 8, prompt: str = PROMPT, **changes: Any) -> Request:
    prompt_ids = checkpoint().tokenizer.encode(prompt)
    fields = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": prompt_ids, "max_new_tokens": n}
    return Request.model_validate(fields | changes)
