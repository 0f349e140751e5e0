"""Run by a Python that has the wheel executorch: answers a text with so many tokens, greedily.

Prints one line `JOULEBENCH {...}`: the counts of tokens that it tells, and its stamps in seconds of the wall clock.
"""

import importlib
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

STAMPS = ("inference_start_ms", "first_token_ms", "inference_end_ms")


def tell(told: dict[str, Any]) -> None:
    sys.stdout.write(f"JOULEBENCH {json.dumps(told)}\n")


def main() -> None:
    asked = json.loads(sys.argv[1])
    pool = importlib.import_module("executorch.extension.pybindings.portable_lib")
    pool._unsafe_reset_threadpool(asked["threads"])
    runners = importlib.import_module("executorch.extension.llm.runner")
    runner = runners.TextLLMRunner(asked["model"], asked["tokenizer"])
    config = runners.GenerationConfig()
    config.max_new_tokens, config.temperature, config.echo = asked["n_new"], 0.0, False
    if "question" in asked:
        runner.generate(asked["question"]["text"], config, None, None)
        tell({"answer": "printed"})
        return
    prompt = pathlib.Path("prompt.txt").read_text()
    stats: list[dict[str, Any]] = []
    for _ in range(2 if asked["warm_up"] else 1):
        runner.reset()
        runner.generate(prompt, config, None, lambda own: stats.append(json.loads(own.to_json_string())))
    tell(
        {
            "version": importlib.metadata.version("executorch"),
            "threads": pool._threadpool_get_thread_count(),
            "n_prompt": stats[-1]["prompt_tokens"],
            "n_new": stats[-1]["generated_tokens"],
            "stamps_s": [stats[-1][stamp] * 1e-3 for stamp in STAMPS],
        }
    )


if __name__ == "__main__":
    main()
