"""Where a checkpoint is: a folder, or a repository of the Hugging Face Hub that is fetched once and then kept.

Only configurations, tokenizer files and safetensors are ever fetched; nothing of a repository is run.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from engine.errors import CheckpointError, EngineError, ResourceError
from engine.memory import in_words
from engine.weights import PICKLED, Progress, some

PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
PATTERNS = (
    *(f"{part}/*.{ending}" for part in ("transformer", "vae", "text_encoder") for ending in ("json", "safetensors")),
    *(f"tokenizer/*.{ending}" for ending in ("json", "jinja", "txt")),
    "scheduler/*.json",
)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CHECKSUMS = "SHA256SUMS"
SMALL = 2**30
BLOCK = 2**22
LOCAL = "Give a folder instead: --checkpoint PATH, or ENGINE_CHECKPOINT=PATH."


def resolve(checkpoint: str, progress: Progress | None = None) -> Path:
    """The folder of a checkpoint: `checkpoint` itself, or what the Hub repository of that name ("owner/name") holds.

    Downloads what is not in the local cache, reports it as "download" and then compares it with its hashes. Raises
    CheckpointError if it can't be had or is incomplete, ResourceError if the disk is too small.
    """
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return _check_folder(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder with {', '.join(PARTS)} in it.")
    if not REPOSITORY.fullmatch(checkpoint):
        raise CheckpointError(
            f"There is no folder {checkpoint}, and it is not the name of a Hub repository (owner/name) either. {LOCAL}"
        )
    return _check_parts(_fetch(checkpoint, progress))


def local(checkpoint: str) -> Path | None:
    """The folder of a checkpoint that is on this machine as a whole, None if it would have to be downloaded."""
    import huggingface_hub

    if Path(checkpoint).expanduser().is_dir() or not REPOSITORY.fullmatch(checkpoint):
        return resolve(checkpoint)
    try:
        return _check_parts(
            Path(huggingface_hub.snapshot_download(checkpoint, allow_patterns=list(PATTERNS), local_files_only=True))
        )
    except (huggingface_hub.errors.LocalEntryNotFoundError, CheckpointError):
        return None


def _check_folder(folder: Path) -> Path:
    _check_parts(folder)
    listed = [path for path in _listed(folder) if os.path.isfile(path)]
    if sum(path.stat().st_size for path in listed) <= SMALL:
        verify(folder)
    return folder


def _check_parts(folder: Path) -> Path:
    absent = [part for part in PARTS if not (folder / part).is_dir()]
    if not absent:
        return folder
    hint = ""
    if (folder / "config.json").is_file():
        hint = f" This looks like one of its parts; try {folder.parent}."
    if (folder / "snapshots").is_dir():
        hint = " This is the Hub's cache; the checkpoint is the folder below snapshots/."
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        hint = " It holds training or pickled files; convert them to diffusers' folder layout in safetensors first."
    raise CheckpointError(
        f"{folder} lacks {', '.join(absent)}. A checkpoint is a folder with {', '.join(PARTS)} in it, as diffusers "
        f"stores them.{hint}"
    )


def _fetch(name: str, progress: Progress | None) -> Path:
    import huggingface_hub

    try:
        pending = _pending(name)
        total = sum(file.file_size or 0 for file in pending)
        _require_disk(name, total, Path(huggingface_hub.constants.HF_HUB_CACHE))
        folder = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(PATTERNS), tqdm_class=_bar("download", total, progress)
            )
        )
    except EngineError:
        raise
    except Exception as error:  # also what its HTTP client raises, which is another one in other versions
        raise _explain(name, error) from error
    _discard_damaged(name, folder, {folder / file.filename for file in pending}, progress)
    return folder


def _discard_damaged(name: str, folder: Path, new: set[Path], progress: Progress | None) -> None:
    """Delete what did not arrive as it was sent: kept, it would count as downloaded from now on."""
    damaged = _differing({path: digest for path, digest in _cached(folder).items() if path in new}, progress)
    for path in damaged:
        path.resolve().unlink()
        path.unlink()
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} files of {name} arrived damaged and were deleted: {some(map(str, damaged))}. "
            "Start again to download them."
        )


def _pending(name: str) -> list[Any]:
    """Files that a download would fetch (`.filename`, `.file_size`). Empty where the Hub can't be asked: then the cache
    alone decides, and `snapshot_download` says why it could not be asked."""
    import huggingface_hub
    from huggingface_hub.errors import DryRunError

    try:
        files = huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS), dry_run=True, tqdm_class=_bar())
    except DryRunError:
        return []
    return [file for file in files if file.will_download]


def _require_disk(name: str, needed: int, cache: Path) -> None:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"Downloading {name} needs {in_words(needed)} and the disk of {cache} has {in_words(free)} free. Free some "
            f"space, or set HF_HOME to a folder on a larger disk. {LOCAL}"
        )


def _bar(part: str = "", total: int = 0, progress: Progress | None = None) -> type:
    """A progress bar class for huggingface_hub that draws nothing and reports the bytes that have arrived.

    The library keeps several bars of bytes (received, written); the one that is furthest counts.
    """
    from tqdm import tqdm

    best = 0

    class Reporter(tqdm):
        monitor_interval = 0  # no thread to watch a bar that nobody sees

        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO(), "mininterval": 0.2})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal best
            drawn = super().update(n)
            if progress and total and self.counts_bytes and self.n > best:
                best = min(int(self.n), total)
                progress(part, best, total)
            return drawn

    return Reporter


def _explain(name: str, error: Exception) -> EngineError:
    """A download's failure in words, with what to do about it."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"https://huggingface.co/{name}"
    if isinstance(error, OSError) and error.errno == 28:
        return ResourceError(f"The disk is full and {name} is not complete. Free some space and start again.")
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        return _explain(name, error.__cause__)
    if isinstance(error, errors.DisabledRepoError):
        return CheckpointError(f"The Hub has disabled access to {name}. {LOCAL}")
    if isinstance(error, errors.GatedRepoError) or (
        status in (401, 403) and not isinstance(error, errors.RepositoryNotFoundError)
    ):
        return CheckpointError(
            f"The Hub does not let you read {name} ({_brief(error)}). Accept its licence at {page}, make a token with "
            f"read access and set HF_TOKEN to it (or run `hf auth login`). {LOCAL}"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return CheckpointError(
            f"There is no folder and no Hub repository {name} that can be read. Check the name; if it is private, set "
            f"HF_TOKEN to a token that may read it. {LOCAL}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return CheckpointError(_offline(name, error))
    if status == 429:
        return CheckpointError(f"The Hub asks for a pause before {name} ({_brief(error)}). Wait, or set HF_TOKEN.")
    return CheckpointError(
        f"{name} could not be downloaded ({_brief(error)}). Try again; what has arrived is kept. {LOCAL}"
    )


def _offline(name: str, error: Exception) -> str:
    import huggingface_hub

    what = "is incomplete in the local cache" if hasattr(error, "snapshot_path") else "is not in the local cache"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"{name} {what} and HF_HUB_OFFLINE forbids to fetch it. Unset HF_HUB_OFFLINE. {LOCAL}"
    cause = error.__cause__ or error
    return f"{name} {what} and the Hub can't be reached ({_brief(cause)}). Check the connection and try again. {LOCAL}"


def _brief(error: BaseException) -> str:
    """The first line of a library's message, without the advice below it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def verify(folder: Path | str, progress: Progress | None = None) -> int:
    """Compare all files of a checkpoint that have a known hash with it. Returns how many they are.

    Hashes come from a SHA256SUMS file in the folder and from the names that the Hub's cache gives to files. Reported as
    "verify". Raises CheckpointError that names the files that are missing or damaged.
    """
    known = _listed(Path(folder)) | _cached(Path(folder))
    # Path.is_file raises for a name that is too long for the disk.
    absent = [str(path) for path in known if not os.path.isfile(path)]
    if absent:
        raise CheckpointError(f"{len(absent)} files of {folder} are missing: {some(absent)}. Download them again.")
    if damaged := _differing(known, progress):
        names = some(str(path.resolve()) for path in damaged)
        raise CheckpointError(
            f"{len(damaged)} files of {folder} are damaged, they do not have the hashes that they should: {names}. "
            "Delete them and download them again."
        )
    return len(known)


def _differing(known: dict[Path, str], progress: Progress | None) -> list[Path]:
    """Files whose content does not have the hash that it should."""
    done, total, wrong = 0, sum(path.stat().st_size for path in known), []
    for path, expected in known.items():
        digest = _new_digest(path, expected)
        for block in _blocks(path):
            digest.update(block)
            done += len(block)
            if progress:
                progress("verify", done, total)
        if digest.hexdigest() != expected:
            wrong.append(path)
    return wrong


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read ({error}). Check its permissions, or download it again."
        ) from error


def _new_digest(path: Path, expected: str) -> Any:
    """SHA-256, or for the 40 digits of a small file of the Hub what git calls it."""
    if len(expected) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)


def _listed(folder: Path) -> dict[Path, str]:
    """What SHA256SUMS promises, in the format of sha256sum; nothing where there is no such file."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return {}
    try:
        text = listing.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{listing} can't be read as text ({error}). Download it again.") from error
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    if not all(len(line) == 2 and re.fullmatch("[0-9a-f]{64}", line[0]) for line in lines):
        raise CheckpointError(f"{listing} must hold lines of a SHA-256 and a file name, as sha256sum writes them.")
    digests = {name.strip().removeprefix("*"): digest for digest, name in lines}
    # By the name alone: in the Hub's cache the files themselves are links that lead out of the folder.
    if outside := [name for name in digests if PurePath(name).is_absolute() or ".." in PurePath(name).parts]:
        raise CheckpointError(
            f"{listing} names files outside of its folder: {some(outside)}. Remove these lines; only the checkpoint's "
            "own files are read."
        )
    return {folder / name: digest for name, digest in digests.items()}


def _cached(folder: Path) -> dict[Path, str]:
    """In the Hub's cache a file is a link to a blob that is named by its hash."""
    links = (path for part in PARTS for path in sorted((folder / part).glob("*")) if path.is_symlink())
    names = {path: os.path.basename(os.readlink(path)) for path in links}
    return {path: name for path, name in names.items() if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name)}


def write_checksums(folder: Path | str) -> Path:
    """Write SHA256SUMS for the parts of a checkpoint, so that `resolve` finds out about damage. Returns its path."""
    folder = Path(folder)
    files = sorted(path for part in PARTS for path in (folder / part).rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    listing = folder / CHECKSUMS
    listing.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()), encoding="utf-8")
    return listing
