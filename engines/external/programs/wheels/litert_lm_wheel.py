"""Run by a Python that has the wheel litert-lm: its own benchmark, once to warm up and once for its figures.

Prints one line `JOULEBENCH {...}`: what it says of prefill and decoding, and the wall clock when it was done.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

SPARE_TOKENS = 16


def tell(told: dict[str, Any]) -> None:
    sys.stdout.write(f"JOULEBENCH {json.dumps(told)}\n")


def main() -> None:
    asked = json.loads(sys.argv[1])
    litert_lm = importlib.import_module("litert_lm")
    n_prompt, n_new = asked["n_prompt"], asked["n_new"]
    backend = litert_lm.Backend.CPU(thread_count=asked["threads"])
    if "question" in asked:
        engine = litert_lm.Engine(asked["model"], backend=backend, cache_dir=":nocache")
        greedily = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=0.0)
        session = engine.create_session(apply_prompt_template=False, sampler_config=greedily, max_output_tokens=n_new)
        session.run_prefill([asked["question"]["text"]])
        tell({"answer": "".join(session.run_decode().texts[:1])})
        return
    benchmark = litert_lm.Benchmark(
        asked["model"],
        backend=backend,
        prefill_tokens=n_prompt,
        decode_tokens=n_new,
        max_num_tokens=n_prompt + n_new + SPARE_TOKENS,
        cache_dir=":nocache",
    )
    benchmark.run()
    found = benchmark.run()
    end_s = time.time()
    tell(
        {
            "version": importlib.metadata.version("litert-lm"),
            "n_prompt": found.last_prefill_token_count,
            "n_new": found.last_decode_token_count,
            "prefill_tokens_per_s": found.last_prefill_tokens_per_second,
            "decode_tokens_per_s": found.last_decode_tokens_per_second,
            "end_s": end_s,
        }
    )


if __name__ == "__main__":
    main()
