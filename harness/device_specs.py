"""The devices of a plan: a union that the form of `name` tells apart, each member with its own settings.

A key of another kind of device is refused where it stands, with the reason (`misplaced`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from harness.plan_values import MAX_NAME
from results.records import MODEL_PREFIX, Record

if TYPE_CHECKING:
    from devices.models.sheet import SheetRef

ANDROID_PREFIX, IOS_PREFIX = "adb:", "ios:"
IOS_METERS: tuple[Literal["battery", "energy gauge"], ...] = ("battery", "energy gauge")
"""The whole phone in watts, or one app in units of Apple's own."""
ANDROID_METERS: tuple[Literal["battery", "rails"], ...] = ("battery", "rails")
"""The whole phone by its battery (`auto`), or parts of it by the power rails that some phones meter."""
OWN_METER = "a modelled device has its own meter; remove the line"
NO_EFFECT = "has no effect on a phone; remove the line"
OF_AN_IPHONE = "only for the energy gauge of an iPhone; remove the line"
OF_A_MODEL = "only for modelled devices; remove the line"


class NamedDevice(Record):
    """What every device of a plan has. tag: of the union. misplaced: keys of other kinds, and why not here."""

    tag: ClassVar[str]
    misplaced: ClassVar[Mapping[str, str]]
    is_modelled: ClassVar[bool] = False
    is_phone: ClassVar[bool] = False

    name: str = Field(max_length=MAX_NAME)


class HostSpec(NamedDevice):
    """This machine: `host`. Also whatever has no name of another kind, which is then told."""

    tag: ClassVar[str] = "host"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"priced_as": OF_A_MODEL, "sheet": OF_A_MODEL, "app": OF_AN_IPHONE}
    )
    priced_as: ClassVar[None] = None

    name: str = Field(max_length=MAX_NAME, json_schema_extra={"const": "host"})
    meters: tuple[str, ...] = Field(("auto",), min_length=1, max_length=16)
    cross_check: tuple[str, ...] = Field((), max_length=16)
    """Meters that read what one of `meters` reads, another way: read beside it, and compared with it."""
    computes: Literal["cpu", "cuda", "mps"] = "cpu"
    """Where the engine computes: in fp32 on the CPU, in bf16 elsewhere. `auto` takes a meter that sees it."""
    watts_sheet: str = "generic"
    """Sheet of the modelled meter: a bundled name or a TOML file."""
    recording: str | None = None
    """What the replay meter plays: a power CSV, or the Parquet file of `joulebench record`."""


class ModelledSpec(NamedDevice):
    """A hardware sheet: `model:NAME`, of joulebench, or of the user's file."""

    tag: ClassVar[str] = "model"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("meters", "cross_check", "watts_sheet", "recording", "app"), OWN_METER)
        | {"computes": "is for the host, whose CPU computes for a modelled device; remove the line"}
    )
    is_modelled: ClassVar[bool] = True
    computes: ClassVar[Literal["cpu"]] = "cpu"

    name: str = Field("", max_length=MAX_NAME, json_schema_extra={"pattern": f"^{MODEL_PREFIX}"})
    """After the file where it is left out."""
    sheet: str | None = Field(None, min_length=1, exclude=True)
    """A sheet of your own: a TOML file, its path from the plan's folder. What it holds is a run's input, and where it
    lies is not."""
    priced_as: str | None = None
    """Price the routing with the shapes of this model instead of the plan's own."""

    @property
    def sheet_ref(self) -> SheetRef:
        return self.name.removeprefix(MODEL_PREFIX) if self.sheet is None else Path(self.sheet)

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_file(cls, raw: object) -> object:
        return named_after_its_sheet(raw) if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _is_named_after_its_file(self) -> ModelledSpec:
        if self.sheet is not None and self.name != MODEL_PREFIX + Path(self.sheet).stem:
            own = MODEL_PREFIX + Path(self.sheet).stem
            raise ValueError(f"name: a device of a sheet of your own has the name of its file, {own}; remove the line")
        return self


class AndroidSpec(NamedDevice):
    """A phone over adb: `adb:SERIAL`, `adb:HOST:PORT`."""

    tag: ClassVar[str] = "adb"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("cross_check", "computes", "watts_sheet", "recording", "priced_as", "sheet"), NO_EFFECT)
        | {"app": OF_AN_IPHONE}
    )
    is_phone: ClassVar[bool] = True
    computes: ClassVar[Literal["cpu"]] = "cpu"
    priced_as: ClassVar[None] = None

    name: str = Field(max_length=MAX_NAME, json_schema_extra={"pattern": f"^{ANDROID_PREFIX}"})
    meters: tuple[str, ...] = Field(("auto",), min_length=1, max_length=16)


class IPhoneSpec(NamedDevice):
    """A phone of Apple's: `ios:UDID`."""

    tag: ClassVar[str] = "ios"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("cross_check", "computes", "watts_sheet", "recording", "priced_as", "sheet"), NO_EFFECT)
    )
    is_phone: ClassVar[bool] = True
    computes: ClassVar[Literal["cpu"]] = "cpu"
    priced_as: ClassVar[None] = None

    name: str = Field(max_length=MAX_NAME, json_schema_extra={"pattern": f"^{IOS_PREFIX}"})
    meters: tuple[str, ...] = Field(("auto",), min_length=1, max_length=16)
    app: str | None = None
    """Bundle identifier of the app that the energy gauge follows."""


def with_sheet_path(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A device of a plan, the path of its own sheet from here on: the plan has it from its folder."""
    sheet = raw.get("sheet") if isinstance(raw, dict) else None
    return {**raw, "sheet": str(folder / sheet)} if isinstance(sheet, str) and sheet else raw


def named_after_its_sheet(raw: dict[str, Any]) -> dict[str, Any]:
    """A device of a plan, with the name that a sheet of its own gives it."""
    sheet = raw.get("sheet")
    return {**raw, "name": MODEL_PREFIX + Path(sheet).stem} if "name" not in raw and isinstance(sheet, str) else raw


def _tag_of(raw: object) -> str:
    name = raw.get("name") if isinstance(raw, Mapping) else getattr(raw, "name", None)
    if isinstance(name, str):
        for prefix, kind in ((MODEL_PREFIX, "model"), (ANDROID_PREFIX, "adb"), (IOS_PREFIX, "ios")):
            if name.startswith(prefix):
                return kind
    if name is None and isinstance(raw, Mapping) and "sheet" in raw:
        return "model"
    return "host"


DeviceSpec = Annotated[
    Annotated[HostSpec, Tag("host")]
    | Annotated[ModelledSpec, Tag("model")]
    | Annotated[AndroidSpec, Tag("adb")]
    | Annotated[IPhoneSpec, Tag("ios")],
    Discriminator(_tag_of),
]
"""Where it runs and what measures it."""
DEVICE_KINDS = (HostSpec, ModelledSpec, AndroidSpec, IPhoneSpec)
