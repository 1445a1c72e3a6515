"""What the files of a job may hold: types and ranges of every value that is used again, checked when it is read.

Files are damaged, and edited by hand; whoever shows a job can't ask at every place whether a number is one. Requests
check themselves (engine/request.py).
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from engine.errors import shown
from engine.events import Stage

# Seconds since 1970, up to the year 5138: calendars know no later ones.
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
# Below 0 where a clock was set back meanwhile.
Seconds = Annotated[float, Field(ge=-1e11, le=1e11, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Figure = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]


def _whole(text: str) -> str:
    # Half of a pair that stands for one character can be read from JSON, and is taken by no page and no file.
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_whole)]
Plain = Text | Figure | None


class StageRecord(TypedDict):
    """A stage in job.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    name: Stage
    total: NotRequired[Count | None]
    done: NotRequired[Count]
    seconds: NotRequired[Seconds | None]
    seconds_each: NotRequired[Seconds | None]
    eta: NotRequired[Seconds | None]
    cut: NotRequired[Seconds | None]


class JobRecord(TypedDict):
    """job.json of every kind of job."""

    parent: Text | None
    group: Text | None
    stages: list[StageRecord]
    warnings: list[Text]
    error: Text | None
    partial: bool
    created: Moment
    started: Moment | None
    ended: Moment | None
    first_frame_seconds: NotRequired[Seconds | None]
    side: NotRequired[Text]


class RandomRecord(TypedDict):
    """Random latents of a comparison."""

    seed: Count
    frames: Count
    height: Count
    width: Count


class CompareRecord(TypedDict):
    """The request of a comparison in job.json; its settings check themselves."""

    latents: Text | RandomRecord
    frames: Count | None
    source: Text


class SideRecord(TypedDict, total=False):
    """A side in compare.json."""

    path: Text
    precision: Text
    reason: Text
    seconds: Seconds | None
    frames_per_second: Figure | None
    peak_bytes: dict[Text, Count]
    added_bytes: int | None
    error: Text | None


class ResultRecord(TypedDict):
    """compare.json."""

    sides: dict[Text, SideRecord]


class StageFigures(TypedDict):
    """A stage in stats.json."""

    name: Text
    started: Seconds
    seconds: Seconds | None


class DeviceFigures(TypedDict):
    """A device of several in stats.json."""

    name: Text
    busy_seconds: Seconds
    waiting_share: Figure
    bytes_sent: Count
    spans: list[Annotated[tuple[Text, Seconds, Seconds], Field(strict=False)]]


class PathFigures(TypedDict):
    """What an operation ran by in stats.json."""

    operation: Text
    path: Text
    reason: Text


class DecodeFigures(TypedDict, total=False):
    """What the decoder ran by in stats.json."""

    path: Text
    precision: Text
    reason: Text


class CacheFigures(TypedDict):
    """What the step cache did in stats.json."""

    share: Figure
    passes: Count
    threshold: Figure
    psnr: float | None


def _aligned(memory: dict[str, list[Any]]) -> dict[str, list[Any]]:
    moments = memory.get("seconds", [])
    if None in moments or any(len(values) != len(moments) for values in memory.values()):
        raise ValueError("every device needs a value, or none, for each of the seconds")
    return memory


class Stats(TypedDict, total=False):
    """stats.json."""

    preset: Plain
    checkpoint: Plain
    device: Plain
    precision: Plain
    vae_sha256: Text | None
    latents_sha256: Text | None
    versions: dict[Text, Plain]
    frames: Count
    fps: Figure
    file_bytes: Count
    seconds: Seconds
    seconds_to_first_frame: Seconds | None
    seconds_per_step: Seconds | None
    decode_frames_per_second: Figure | None
    step_seconds: list[Seconds]
    stages: list[StageFigures]
    devices: list[DeviceFigures]
    peak_bytes: dict[Text, Count]
    memory: Annotated[dict[Text, list[Figure | None]], AfterValidator(_aligned)]
    decode: DecodeFigures
    paths: dict[Text, PathFigures]
    step_cache: CacheFigures


JOB, COMPARISON, RESULT, STATS = (TypeAdapter(kind) for kind in (JobRecord, CompareRecord, ResultRecord, Stats))


def checked(kind: TypeAdapter[Any], values: Any) -> Any:
    """The values as they are, if they are of a kind (JOB, COMPARISON, RESULT or STATS); keys that no kind knows are let
    through. Raises ValueError with the first that is not."""
    try:
        kind.validate_python(values, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"{where} = {shown(first['input'])}: {first['msg']}") from error
    return values
