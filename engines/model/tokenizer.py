"""Text to token ids and back, and the prompt of a conversation, from a Hugging Face model folder.

The `tokenizers` package does the work (the one that wrote tokenizer.json); transformers is not needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engines.errors import EngineError
from engines.model.model_config import read_json
from engines.model.special_tokens import (
    ADDED_TOKENS,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    SpecialTokens,
    read_special_tokens,
)

if TYPE_CHECKING:
    from engines.model.text_length import LeastTokens

TOKENIZER_FILE, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
MORE_TEMPLATES, LEGACY_TEMPLATE = "additional_chat_templates", "chat_template.json"
"""A folder of templates by name, and the file of older models that also see."""
OWN_FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *(CHAT_TEMPLATE, "default.jinja", LEGACY_TEMPLATE),
)
BUILT_ANEW = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "tiktoken.model", "spiece.model")
"""Of tokenizers that transformers makes a tokenizer.json of."""
FALLBACK_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
"""For models that bring none: a line for each turn, then the cue. Plain text that no model was trained on."""
LONG_TEXT = 1 << 15
"""Characters. Such a text is encoded as a batch of one: only so the binding lets other threads run meanwhile, and those
of a server answer other clients."""
TEMPLATE_DATE = datetime(2025, 1, 1)
"""What a template is told that asks for the date (GPT-OSS's does): today's would be another request tomorrow."""


class Tokenizer:
    """A tokenizer.json with the model's end tokens and chat template.

    `name` is the model's name and the first digits of a SHA-256, of the file and of tokens added to it: equal names
    mean equal token ids.
    """

    def __init__(self, folder: Path, model_name: str, eos_token_ids: tuple[int, ...], embedding_rows: int) -> None:
        """Reads the folder. eos_token_ids: the model's; its own ends an answer too. Raises `EngineError`."""
        import tokenizers

        path = folder / TOKENIZER_FILE
        if not path.is_file():
            others = [name for name in OTHER_FORMS if (folder / name).is_file()]
            only = f", only {' and '.join(others)}" if others else ""
            raise EngineError(
                f"{folder}: no tokenizer.json{only}; write the model's fast tokenizer beside its weights (transformers:"
                " AutoTokenizer.from_pretrained, then save_pretrained)"
            )
        content = _read_bytes(path)
        with _rust_errors(f"{path}: not a tokenizer", "fetch the file again"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # What is stored for training batches would cut or fill prompts here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = folder / TOKENIZER_CONFIG
        config = read_json(config_path) if config_path.is_file() else {}
        special = read_special_tokens(folder, config)
        self._special_tokens = special.by_key
        added = self._add_named_tokens(special, embedding_rows)
        splits = config.get("split_special_tokens") is True
        self._tokenizer.encode_special_tokens = splits
        decisive = content + "".join(added).encode() + (b"split_special_tokens" if splits else b"")
        self.name = f"{model_name}@{hashlib.sha256(decisive).hexdigest()[:8]}"
        _check_prefix_space(config_path, config, content)
        with _rust_errors(f"{path}: tokenizer that encodes nothing", "fetch the file again"):
            self._begin: str = self._tokenizer.decode(self._tokenizer.encode("").ids[:1], skip_special_tokens=False)
            self._size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self._size <= embedding_rows:
            raise EngineError(
                f"{path}: tokenizer does not match the model: ids up to {self._size - 1}, "
                f"embedding rows {embedding_rows}; use the tokenizer that came with the weights"
            )
        with _rust_errors(f"{folder}: a special token that is no text", "fetch the files again"):
            own, begin = self._own_ids("eos_token"), self._own_ids("bos_token")
        # lm-eval stops at its own too where the model's list is without it, and puts that one, which is the first here,
        # before a text without context.
        self.eos_token_ids = tuple(dict.fromkeys((*own, *eos_token_ids)))
        self.bos_token_id: int | None = next(iter(begin), None)
        outside = [i for i in self.eos_token_ids if not 0 <= i < embedding_rows]
        if outside:
            raise EngineError(
                f"{folder}: tokenizer does not match the model: end tokens {outside}, embedding rows {embedding_rows}"
            )
        self._chat_template = _read_chat_template(folder, config)
        asks_of_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_left = type(self._tokenizer.model).__name__ == "BPE" and not config.get(asks_of_bpe)
        self.asks_to_clean = config.get("clean_up_tokenization_spaces") is True and not is_left
        """Whether transformers takes blanks before marks (" ." and "n't") out of a text that it makes of tokens. Ours
        stay: what was told of a text would change with the next token."""

    @property
    def vocabulary_size(self) -> int:
        """Highest token id + 1; the embedding may have more rows."""
        return self._size

    @property
    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Each token that is found in a text before the rest is cut into pieces: its text, and whether it is special
        (shows as nothing)."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token_id: (token.content, token.special) for token_id, token in found.items()}

    @cached_property
    def _bound(self) -> LeastTokens:
        from engines.model.text_length import LeastTokens

        return LeastTokens(self._tokenizer)

    @cached_property
    def open_ids(self) -> frozenset[int]:
        """Tokens of one byte (Llama 2) that is part of a character, and special ones, which show as nothing between
        them. One byte that is no text turns all of its run into replacement characters, also those that were whole
        before it. A byte that is a character by itself, as the end of a line, is none of them: it is waited for."""
        found = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(128, 256))
        one_byte = [token_id for token_id in found if token_id is not None]
        special = [token_id for token_id, (_, is_special) in self.added_tokens.items() if is_special]
        return frozenset((*one_byte, *special)) if one_byte else frozenset()

    def least_tokens(self, text: str) -> int:
        """So many tokens has the text or more, found fast where it is long; 0: nothing is known, or it is short."""
        return 0 if len(text) < LONG_TEXT else self._bound.of(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone: no begin or end token is added; special tokens written in it are recognised,
        unless the tokenizer's config says `split_special_tokens`."""
        return self._encoded(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`, with what the tokenizer puts before a text by default (Llama: a begin token), as lm-eval does.

        A text that has the begin token already, such as a chat template's, gets no second one.
        """
        if self._begin and text.startswith(self._begin):
            return self.encode(text)
        return self._encoded(text, add_special_tokens=True)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        with _rust_errors(f"tokenizer {self.name}: a text of {len(text)} characters", "is it whole Unicode?"):
            if len(text) < LONG_TEXT:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                [found] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
                ids = found.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def spell(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with special tokens written out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought one of its own; else `chat` makes plain text, as any other."""
        return self._chat_template is not FALLBACK_CHAT_TEMPLATE

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a conversation ([{"role", "content"}]) up to and including the cue for the assistant."""
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        from engines.model.chat_tags import GenerationTag

        # The template comes with the weights: it runs in a sandbox, with the settings that such templates expect.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
        try:
            template = environment.from_string(self._chat_template)
            said = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
            return template.render({**self._special_tokens, **said})
        # A template is a program that somebody else wrote: what it divides, indexes and recurses into is its own.
        except Exception as error:
            told = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise EngineError(f"chat template of {self.name}: {told}") from error

    def _add_named_tokens(self, special: SpecialTokens, embedding_rows: int) -> list[str]:
        """Adds what other files name and tokenizer.json does not have among its added tokens: transformers does, and
        else a text that holds one would be asked in pieces. Those that the model has no row for are left out. Returns
        their texts. Raises `EngineError`."""
        import tokenizers

        known = {text for text, _ in self.added_tokens.values()}
        added = []
        for token in special.in_order():
            with _rust_errors(f"{token.path}: an added token that cannot be taken", "fetch the file again"):
                own = self._tokenizer.token_to_id(token.text)
                number = own if own is not None else token.number if token.number is not None else self._next_id()
                if token.text in known or number >= embedding_rows:
                    continue
                self._tokenizer.add_tokens([tokenizers.AddedToken(token.text, **token.flags)])
                found = self._tokenizer.token_to_id(token.text)
                if token.number not in (None, found):
                    raise EngineError(
                        f"{token.text!r:.80} is number {token.number} there, and number {found} behind tokenizer.json's"
                    )
            known.add(token.text)
            added.append(token.text)
        return added

    def _next_id(self) -> int:
        """Of a token that is added now."""
        return max(self._tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in self.added_tokens), 0)

    def _own_ids(self, key: str) -> tuple[int, ...]:
        """The token that the tokenizer's files name so, or none."""
        text = self._special_tokens.get(key)
        token_id = self._tokenizer.token_to_id(text) if text else None
        return () if token_id is None else (token_id,)


def _check_prefix_space(path: Path, config: dict[str, Any], content: bytes) -> None:
    """Classes whose pre-tokenizer transformers builds anew take from the config whether a text gets a blank before it.
    content: tokenizer.json's."""
    said = config.get("add_prefix_space")
    if not isinstance(said, bool) or str(config.get("tokenizer_class")).removesuffix("Fast") not in BUILT_ANEW:
        return
    before = json.loads(content).get("pre_tokenizer") or {}
    parts = [part for part in (before, *before.get("pretokenizers", ())) if part.get("type") == "ByteLevel"]
    if any(part.get("add_prefix_space") is not said for part in parts):
        raise EngineError(
            f"{path}: add_prefix_space {said} contradicts {TOKENIZER_FILE}, which would give other tokens; make it the"
            " same in both, as the model was trained"
        )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error}); check the file") from error


@contextmanager
def _rust_errors(what: str, remedy: str) -> Iterator[None]:
    """The binding raises whatever it likes, and of a panic something that is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise EngineError(f"{what} ({error}); {remedy}") from error


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str:
    """As transformers chooses: of chat_template.jinja and the folder of more templates, else of the config's, and of
    several the "default" one. Last comes the file of older models, then ours."""
    paths = {"default": folder / CHAT_TEMPLATE} if (folder / CHAT_TEMPLATE).is_file() else {}
    paths |= {path.stem: path for path in folder.glob(f"{MORE_TEMPLATES}/*.jinja")}
    template: Any = {name: _read_text(path) for name, path in paths.items()} or config.get("chat_template")
    where = folder / TOKENIZER_CONFIG
    if not template and (folder / LEGACY_TEMPLATE).is_file():
        where = folder / LEGACY_TEMPLATE
        template = read_json(where).get("chat_template")
    if isinstance(template, list):
        template = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        # Not refused before somebody asks for a chat.
        names = f"the model has templates {', '.join(sorted(template))} and none is the default; write the one to use"
        refusal = "{{ raise_exception(" + json.dumps(f"{names} to {CHAT_TEMPLATE}") + ") }}"
        template = template.get("default", refusal) if template else None
    if template is not None and not isinstance(template, str):
        raise EngineError(f"{where}: chat_template must be a text, found {template!r:.80}")
    return template or FALLBACK_CHAT_TEMPLATE


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(f"{path}: not UTF-8 ({error}); fetch the file again") from error


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """With the options that templates give to transformers' filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    """What templates call on conversations that they do not accept."""
    import jinja2

    raise jinja2.TemplateError(message)
