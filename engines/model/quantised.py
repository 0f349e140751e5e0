"""Weight-only quantisation: how a matrix is stored narrower than fp32, and the matrix that it then stands for.

Arithmetic is fp32 where nothing else is asked for: a quantised product equals, up to the order of its sums, the product
with `to(torch.float32)`. With int8 or bf16 arithmetic it is that of `rounded` inputs.

Legend: N rows (outputs), K columns (inputs), G groups of a row, B blocks of 64 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from engines.errors import EngineError
from engines.model import mxfp4
from results.records import Record

Form = Literal["fp32", "bf16", "fp16", "int8", "int4-g32", "int4-g64", "int4-g128", "fp8", "mxfp4"]
"""How a matrix is stored. int4-gN: groups of N columns share a scale."""
FORMS: tuple[Form, ...] = get_args(Form)
Arithmetic = Literal["fp32", "int8", "bf16"]
"""What a product rounds its input to first: see `rounded`."""
AttentionArithmetic = Literal["fp32", "bf16", "int8"]
"""int8: of queries and keys; shares and values are rounded to whole numbers of 13 and 12 bits."""
CacheForm = Literal["fp32", "bf16", "fp16"]
ROUNDED_FORMS: dict[Arithmetic, tuple[Form, ...]] = {
    "int8": ("int8", "int4-g32", "int4-g64", "int4-g128"),
    "bf16": ("bf16",),
}
"""Whose products may be of this arithmetic."""
ROUNDED_COLUMNS, ROUNDED_LEVELS, LEAST_LARGEST = 32, 127, 1e-34
PLAIN_DTYPES: dict[Form, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Int4Group = Literal[32, 64, 128]
BLOCK = 64
"""Columns whose nibbles share eight words: see `pack_nibbles`."""
PIECE = 1 << 18
"""Values that are quantised at a time: a megabyte of fp32, which stays in the cache from one step to the next."""
FP8_MAX = 448.0


def plain_form(dtype: torch.dtype | str) -> Form:
    """Of a dtype, or of its name in torch, such as "bfloat16"."""
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return next(form for form, own in PLAIN_DTYPES.items() if own is wanted)


def bits_of_value(form: Form, columns: int) -> float:
    """That a stored value takes, its part of the scales counted. columns: of a row."""
    if form in PLAIN_DTYPES:
        return 8.0 * PLAIN_DTYPES[form].itemsize
    if form == "mxfp4":
        return 4 + 8 / 32
    if form in ("int8", "fp8"):
        return 8 + 32 / columns
    return 4 + 32 / int(form.removeprefix("int4-g"))


class Quantisation(Record):
    """The form of each component's matrices; None: the model's dtype.

    The embedding, routers, gates of shared experts, norms, biases and latent attention's expansion (`kv_b_proj`) are
    never quantised.
    """

    experts: Form | None = None
    """Routed experts."""
    dense: Form | None = None
    """Feed-forward blocks of dense layers, and shared experts."""
    attention: Form | None = None
    """Projections into and out of attention."""
    head: Form | None = None
    """A head that is tied to the embedding becomes a copy of its own."""
    arithmetic: Arithmetic = "fp32"
    """int8: inputs of products with matrices of 8 and 4 bits are `rounded`; bf16: of those with matrices of bf16.
    Others are computed in fp32."""
    attention_arithmetic: AttentionArithmetic | None = None
    """Of what attention of more than one token multiplies: queries, keys, values and shares; int8: of queries and
    keys, and the others are whole numbers of more bits. None: bf16 where its matrices are of bf16 and multiplied so,
    else fp32. Latent attention is always fp32."""

    cache: CacheForm = "fp32"
    """What keys and values are rounded to as they are kept."""

    @property
    def asked(self) -> dict[str, Form]:
        """Component to form, without those that are left alone."""
        return self.model_dump(exclude_none=True, exclude={"arithmetic", "attention_arithmetic", "cache"})

    @property
    def rounding(self) -> dict[str, Arithmetic | CacheForm]:
        """What is asked for beside forms of weights, by key: what is rounded before it is multiplied, or kept."""
        return self.model_dump(include={"arithmetic", "attention_arithmetic", "cache"}, exclude_defaults=True)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded before it is multiplied, or kept."""
        return bool(set(self.rounding.values()) - {"fp32"})

    @property
    def multiplying_bf16(self) -> tuple[str, ...]:
        """Keys by which bf16 is to be multiplied by itself, which few machines do."""
        asked = {"arithmetic": self.arithmetic, "attention_arithmetic": self.attention_arithmetic}
        return tuple(key for key, arithmetic in asked.items() if arithmetic == "bf16")

    @property
    def attending_by_bytes(self) -> tuple[str, ...]:
        """The key by which attention is to multiply bytes; empty where none asks for it."""
        return ("attention_arithmetic",) if self.attention_arithmetic == "int8" else ()

    @property
    def rounds_attention(self) -> bool:
        """Whether a plan asks for it by its key."""
        return self.attention_arithmetic not in (None, "fp32")

    @property
    def kept(self) -> torch.dtype:
        """Of keys and values."""
        return PLAIN_DTYPES[self.cache]

    def attention_of(self, form: Form) -> AttentionArithmetic:
        """Arithmetic of attention whose matrices have this form."""
        return self.attention_arithmetic or ("bf16" if self.arithmetic == form == "bf16" else "fp32")

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_so_anyway(cls, raw: object) -> object:
        """Attention in fp32 is what all but bf16 arithmetic has: a sweep may say so, and no other cell comes of it."""
        if isinstance(raw, Mapping) and raw.get("attention_arithmetic") == "fp32" and raw.get("arithmetic") != "bf16":
            return {key: value for key, value in raw.items() if key != "attention_arithmetic"}
        return raw

    @model_validator(mode="after")
    def _has_something_to_round_for(self) -> Quantisation:
        forms = ROUNDED_FORMS.get(self.arithmetic)
        if forms is not None and not set(self.asked.values()) & set(forms):
            named = ", ".join(f"{component} {form}" for component, form in self.asked.items())
            there = f"only {named}" if named else "none, for no component is named"
            raise ValueError(
                f'arithmetic "{self.arithmetic}" multiplies weights of {", ".join(forms)}, and there are {there};'
                " others are computed in fp32: store a component so, or leave arithmetic out"
            )
        return self


AS_THE_MODEL = Quantisation()


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [..., N, K], or a stack of them. Indexing and `to` work as on a tensor.

    | kind | values | scales |
    |---|---|---|
    | bf16 | bf16 [..., N, K] | fp32 [..., N, 0]: none; for bf16 arithmetic only, else it is a tensor |
    | int8 | int8 [..., N, K] | fp32 [..., N] |
    | fp8 | float8_e4m3fn [..., N, K] | fp32 [..., N] |
    | int4 | int32 [..., N, K/8] | fp32 [..., N, K/group] |
    | mxfp4 | int32 [..., N, K/8] | uint8 [..., N, K/32], biased exponents |
    """

    values: Tensor
    scales: Tensor
    kind: Literal["bf16", "int8", "int4", "fp8", "mxfp4"]
    group: int | None = None
    """Columns that share a scale; None: all of a row."""
    arithmetic: Arithmetic = "fp32"

    @property
    def shape(self) -> torch.Size:
        columns = self.values.shape[-1] * (8 if self.values.dtype is torch.int32 else 1)
        return torch.Size((*self.values.shape[:-1], columns))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice) -> QuantisedMatrix:
        return replace(self, values=self.values[index], scales=self.scales[index])

    def columns(self, first: int, end: int) -> QuantisedMatrix | None:
        """The same values in columns [first, end); None where they do not fill groups and blocks of nibbles."""
        packed = 8 if self.values.dtype is torch.int32 else 1
        together = max(BLOCK if packed == 8 else 1, self.group or 1)
        if first % together or end % together:
            return None
        values = self.values[..., first // packed : end // packed].contiguous()
        if self.group is None:
            return replace(self, values=values)
        scales = self.scales[..., first // self.group : end // self.group].contiguous()
        return replace(self, values=values, scales=scales)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the stored one stands for."""
        if self.kind == "bf16":
            return self.values.to(dtype)
        if self.group is None:
            return (self.values.float() * self.scales[..., None]).to(dtype)
        if self.kind == "mxfp4":
            return mxfp4.widen(unpack_nibbles(self.values), self.scales).to(dtype)
        grouped = unpack_int4(self.values).float().view(*self.scales.shape, self.group)
        return (grouped * self.scales[..., None]).flatten(-2).to(dtype)


Matrix = Tensor | QuantisedMatrix
"""A matrix as it is stored: `to` gives the one it stands for."""

Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""A tensor of this shape and type, to be written."""


def anywhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room where the allocator has some."""
    return torch.empty(tuple(shape), dtype=dtype)


def rounded(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """[..., K] as this arithmetic takes it."""
    if arithmetic == "bf16":
        return x.bfloat16().to(x.dtype)
    return rounded_to_int8(x) if arithmetic == "int8" else x


def rounded_to_int8(x: Tensor) -> Tensor:
    """Of 32 columns the largest magnitude becomes 127, and all are rounded to whole numbers, of two equally near ones
    to the even one. What is too small for a scale becomes 0."""
    missing = -x.shape[-1] % ROUNDED_COLUMNS
    blocks = F.pad(x, (0, missing)).reshape(*x.shape[:-1], -1, ROUNDED_COLUMNS)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    is_small = largest <= LEAST_LARGEST
    scale = torch.where(is_small, 0, largest / ROUNDED_LEVELS)
    # Not a number over a tensor, which torch rounds twice.
    inverse = torch.where(is_small, 0, torch.full_like(largest, ROUNDED_LEVELS) / largest)
    return ((blocks * inverse).round_() * scale).flatten(-2)[..., : x.shape[-1]]


def store(weight: Tensor, form: Form, arithmetic: Arithmetic = "fp32", room: Room = anywhere) -> Matrix:
    """[..., N, K] in this form. Nothing is copied where a plain form is the one that the weight has. arithmetic: of
    products with it, where the form is one of `ROUNDED_FORMS`; of others fp32. room: for what is made."""
    stored = _stored(weight, form, room)
    if form not in ROUNDED_FORMS.get(arithmetic, ()):
        return stored
    if isinstance(stored, Tensor):
        stored = QuantisedMatrix(stored.contiguous(), torch.empty(*stored.shape[:-1], 0), "bf16")
    return replace(stored, arithmetic=arithmetic)


def _stored(weight: Tensor, form: Form, room: Room) -> Matrix:
    if form in PLAIN_DTYPES:
        return _narrowed(weight, PLAIN_DTYPES[form], room)
    if form == "int8":
        return quantise_int8(weight, room)
    if form == "fp8":
        return quantise_fp8(weight, room)
    if form == "mxfp4":
        return quantise_mxfp4(weight, room)
    groups: dict[str, Int4Group] = {"int4-g32": 32, "int4-g64": 64, "int4-g128": 128}
    return quantise_int4(weight, groups[form], room)


def check_width(n_columns: int, form: str) -> None:
    """Raises `EngineError` where the columns do not fill the form's groups and blocks."""
    multiple = 128 if form == "int4-g128" else BLOCK if form.startswith(("int4", "mxfp4")) else 1
    if n_columns % multiple:
        raise EngineError(
            f"{form} needs a width that is a multiple of {multiple}, not {n_columns}; use int8 for this component"
        )


def _narrowed(weight: Tensor, dtype: torch.dtype, room: Room) -> Tensor:
    if weight.dtype is dtype:
        return weight
    narrow = room(weight.shape, dtype).copy_(weight)
    if dtype is torch.float16:
        low, high = weight.aminmax()
        largest = max(-float(low), float(high))
        if largest > torch.finfo(torch.float16).max:
            raise EngineError(f"a weight of {largest:g} does not fit into fp16 (largest 65504); use bf16")
    return narrow


def quantise_int8(weight: Tensor, room: Room = anywhere) -> QuantisedMatrix:
    """Symmetric: the largest magnitude of a row becomes 127."""

    def rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        scale_N = _row_scales(weight_NK, 127)
        return (weight_NK / scale_N[:, None]).round_().to(torch.int8), scale_N

    return QuantisedMatrix(*_by_rows(weight, rows, room), "int8")


def quantise_fp8(weight: Tensor, room: Room = anywhere) -> QuantisedMatrix:
    """e4m3 (no infinities), round to nearest even: the largest magnitude of a row becomes 448, the format's own."""

    def rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        scale_N = _row_scales(weight_NK, FP8_MAX)
        # The quotient of the largest may be rounded to a little above it, and beyond there is only NaN.
        scaled_NK = (weight_NK / scale_N[:, None]).clamp_(-FP8_MAX, FP8_MAX)
        return scaled_NK.to(torch.float8_e4m3fn).view(torch.uint8), scale_N

    values, scales = _by_rows(weight, rows, room)
    return QuantisedMatrix(values.view(torch.float8_e4m3fn), scales, "fp8")


def quantise_int4(weight: Tensor, group: Int4Group, room: Room = anywhere) -> QuantisedMatrix:
    """-8..7 times a scale whose sign puts the value of largest magnitude on -8, so that no level is lost."""
    check_width(weight.shape[-1], f"int4-g{group}")

    def rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        grouped = weight_NK.view(len(weight_NK), -1, group)
        low_NG, high_NG = grouped.aminmax(dim=-1)
        largest_NG = torch.where(high_NG > -low_NG, high_NG, low_NG)
        scale_NG = torch.where(largest_NG != 0, largest_NG / -8, torch.ones_like(largest_NG))
        levels = (grouped / scale_NG[..., None]).round_().clamp_(-8, 7)
        return pack_int4(levels.flatten(-2).to(torch.int8)), scale_NG

    return QuantisedMatrix(*_by_rows(weight, rows, room), "int4", group)


def quantise_mxfp4(weight: Tensor, room: Room = anywhere) -> QuantisedMatrix:
    """By the rules of the format: `mxfp4.encode`."""
    check_width(weight.shape[-1], "mxfp4")

    def rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        code_NK, scale_NG = mxfp4.encode(weight_NK)
        return pack_nibbles(code_NK), scale_NG

    return QuantisedMatrix(*_by_rows(weight, rows, room), "mxfp4", mxfp4.BLOCK)


def mxfp4_from_blocks(packed: mxfp4.PackedBlocks, room: Room = anywhere) -> QuantisedMatrix:
    """The matrices that a file holds in blocks of bytes: the same values, laid out for the kernels."""
    check_width(packed.shape[-1], "mxfp4")
    made = pack_nibbles(mxfp4.codes(packed.blocks)), packed.scales
    values, scales = (room(part.shape, part.dtype).copy_(part) for part in made)
    return QuantisedMatrix(values, scales, "mxfp4", mxfp4.BLOCK)


def _row_scales(weight_NK: Tensor, highest: float) -> Tensor:
    """What brings each row's largest magnitude to `highest`; 1 for a row of zeros."""
    low_N, high_N = weight_NK.aminmax(dim=-1)
    scale_N = torch.maximum(-low_N, high_N) / highest
    return torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))


def _by_rows(weight: Tensor, rows: Callable[[Tensor], tuple[Tensor, Tensor]], room: Room) -> tuple[Tensor, Tensor]:
    """Values and scales of [..., N, K], quantised a few rows at a time: the whole is never held as fp32."""
    flat = weight.flatten(0, -2)
    n_rows = max(1, PIECE // weight.shape[-1])
    wholes: list[Tensor] = []
    for begin in range(0, len(flat), n_rows):
        parts = rows(flat[begin : begin + n_rows].float().contiguous())
        wholes = wholes or [room((len(flat), *part.shape[1:]), part.dtype) for part in parts]
        for whole, part in zip(wholes, parts, strict=True):
            whole[begin : begin + len(part)] = part
    values, scales = wholes
    stack = weight.shape[:-1]
    return values.view(*stack, -1), scales.view(*stack, *scales.shape[1:])


# --- nibbles ---------------------------------------------------------------------------------------------------------
# A block of 64 columns is eight 32-bit words of little-endian bytes. Word i holds columns i, 8 + i, ... 56 + i: eight
# lanes of a vector register, masked at one nibble, are eight neighbouring columns. Its byte b holds columns 16 b + i
# (low half) and 16 b + 8 + i (high half).


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Four-bit values, uint8 [..., K], to int32 words [..., K/8]."""
    by_byte = nibbles.view(*nibbles.shape[:-1], -1, 4, 2, 8)
    bytes_B48 = by_byte[..., 0, :] | by_byte[..., 1, :] << 4
    return bytes_B48.mT.contiguous().view(torch.int32).flatten(-3)


def unpack_nibbles(words: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    bytes_B48 = words.contiguous().view(torch.uint8).view(*words.shape[:-1], -1, 8, 4).mT
    return torch.stack([bytes_B48 & 15, bytes_B48 >> 4], dim=-2).flatten(-4)


def pack_int4(levels: Tensor) -> Tensor:
    """Levels -8..7, int8 [..., K], to int32 words [..., K/8].

    Nibbles 0..6 of a word hold level + 8 and the top one two's complement: a kernel can convert a masked word, read as
    signed, without a shift.
    """
    nibbles = (levels + 8).to(torch.uint8)
    _top(nibbles).bitwise_xor_(8)
    return pack_nibbles(nibbles)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    nibbles = unpack_nibbles(words)
    _top(nibbles).bitwise_xor_(8)
    return nibbles.to(torch.int8) - 8


def _top(nibbles: Tensor) -> Tensor:
    """The columns that lie in the top nibbles of their words."""
    return nibbles.view(*nibbles.shape[:-1], -1, 8, 8)[..., 7, :]
