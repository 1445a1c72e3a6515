"""How this server is run: every setting that it reads from the environment, in one place.

The table of the README is made from here (`python -m engine.web.hosting`), and a test compares both with the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.admission import QueueLimits
from engine.errors import RequestError, shown

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
OUTPUTS = Path("outputs")
GUARDRAIL = ("auto", "on", "off")


def _flag(text: str) -> bool:
    if text.lower() not in (*YES, *NO):
        raise ValueError("must be 1 or 0")
    return text.lower() in YES


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not low <= int(text[:20]) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _login(text: str) -> tuple[str, str]:
    """User and password, from the text itself or from the file that it names."""
    if ":" not in text:
        try:
            text = Path(text).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(
                f'must be "user:password" or a file that holds it (the file can\'t be read: {error})'
            ) from None
    user, _, password = text.partition(":")
    if not user or not password or "\n" in text:
        raise ValueError('must be "user:password", neither of them empty')
    return user, password


def _setting(name: str, default: Any, parse: Callable[[str], Any], words: str, public: Any = None) -> Any:
    """A field that is read from the variable `name`. words: for people; public: the default where strangers come."""
    return field(default=default, metadata={"name": name, "parse": parse, "words": words, "public": public})


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """Settings of the server. `Hosting.read` takes them from the environment; an empty value means the default."""

    preset: str | None = _setting(
        "ENGINE_PRESET", None, str, "`tiny`, `pan2` or a `.toml` file of your own; not said: `tiny`"
    )
    checkpoint: str | None = _setting(
        "ENGINE_CHECKPOINT", None, str, "a folder or a repository on the Hub; alone it means `pan2`"
    )
    outputs: Path = _setting("ENGINE_OUTPUTS", OUTPUTS, Path, "the folder in which jobs are written")
    host: str = _setting("GRADIO_SERVER_NAME", "127.0.0.1", str, "address to listen on")
    port: int = _setting("GRADIO_SERVER_PORT", 7860, _whole(1, 65535), "port to listen on")
    public: bool = _setting(
        "ENGINE_PUBLIC",
        False,
        _flag,
        "1 where strangers come: tighter limits, the guardrail, no History tab and no list of videos made here",
    )
    login: tuple[str, str] | None = _setting(
        "ENGINE_AUTH",
        None,
        _login,
        "`user:password`, or a file that holds it; only the health checks don't ask for it",
    )
    guardrail: str = _setting(
        "ENGINE_GUARDRAIL", "auto", _choice(*GUARDRAIL),
        "`on`, `off` or `auto`: on where strangers come and `pan2_guardrail` is installed",
    )  # fmt: skip
    max_queue: int = _setting("ENGINE_MAX_QUEUE", 100, _whole(1, 10_000), "jobs that may wait; one more is refused", 20)
    jobs_per_address: int = _setting(
        "ENGINE_JOBS_PER_ADDRESS", 0, _whole(0, 10_000), "jobs of one address that wait or run at once; 0: no limit", 5
    )
    jobs_per_hour: int = _setting(
        "ENGINE_JOBS_PER_HOUR", 0, _whole(0, 1_000_000), "jobs of one address in an hour; 0: no limit", 30
    )
    trusted_proxies: int = _setting(
        "ENGINE_TRUSTED_PROXIES", 0, _whole(0, 10),
        "proxies in front that append to `X-Forwarded-For`; 0: the header is not believed",
    )  # fmt: skip
    uploads_gib: int = _setting(
        "ENGINE_UPLOADS_GIB", 16, _whole(1, 10_000), "GiB that uploads may take in all, each is kept for a day", 4
    )
    metrics: bool = _setting("ENGINE_METRICS", False, _flag, "1: figures for Prometheus at `/metrics`")
    mcp: bool = _setting("ENGINE_MCP", False, _flag, "1: tools for language models at `/gradio_api/mcp/` (extra `mcp`)")

    def queue_limits(self) -> QueueLimits:
        """What `Jobs` is told."""
        return QueueLimits(self.max_queue, self.jobs_per_address, self.jobs_per_hour)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Hosting:
        """The settings of an environment, os.environ if None. given: what a command line says; None means not said.

        Raises RequestError with variable, value and rule.
        """
        environment = os.environ if environment is None else environment
        found = {entry.name: _read(entry.metadata, environment) for entry in fields(cls)}
        found |= {name: value for name, value in given.items() if value is not None}
        found = {name: value for name, value in found.items() if value is not None}
        if found.get("public"):
            defaults = {entry.name: entry.metadata["public"] for entry in fields(cls)}
            found = {name: value for name, value in defaults.items() if value is not None} | found
        return cls(**found)


def _read(entry: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    text = environment.get(entry["name"], "").strip()
    if not text:
        return None
    try:
        return entry["parse"](text)
    except ValueError as error:
        # A password that was mistyped must not reach a log.
        value = "" if entry["name"] == "ENGINE_AUTH" else f" = {shown(text)}"
        raise RequestError(f"The environment variable {entry['name']}{value} {error}.") from error


# Read elsewhere: by libraries, or by parts that run without a server.
OTHERS = {
    "ENGINE_DEVICES": "`auto` (the first GPU, else the CPU), `cpu`, GPU numbers such as `0` or `0,1`, or `cpu:4` for "
    "four processes on the CPU; `--devices` on command lines",
    "HF_TOKEN": "the Hub's token, for checkpoints whose licence must be accepted",
    "HF_HOME": "the Hub's cache, `~/.cache/huggingface` by default",
    "GRADIO_TEMP_DIR": "where uploads are kept for a day, the system's temporary folder by default",
    "ENGINE_CACHE": "folder for what was measured or fitted and is worth keeping, `pan2-demo` in the user's cache",
    "KERNELS_CACHE": "folder of the built kernels, in the user's cache by default",
    "XDG_CACHE_HOME": "the user's cache, `~/.cache` by default",
    "ENGINE_KEEP_JOBS": "how many jobs stay in the outputs folder before the oldest goes, 200 by default; 0: no limit",
    "ENGINE_KEEP_DAYS": "how long they stay, 30 days by default; 0: no limit. Time for which the server was off counts "
    "as a day at most",
    "ENGINE_KEEP_GIB": "how much they take in all, 20 GiB by default; 0: no limit",
    "CUDA_HOME": "the CUDA toolkit that builds kernels; not said: that of the `PATH`, `CUDA_PATH` or `/usr/local/cuda`",
    "CUDA_PATH": "see `CUDA_HOME`",
    "CUTLASS_PATH": "CUTLASS headers, those of the extra `kernels` by default",
    "CXX": "the C++ compiler that nvcc calls, `g++` by default",
    "SPACES_ZERO_GPU": "set by Hugging Face where a Space has ZeroGPU: the reduced mode of Hosting",
    "MAX_JOBS": "compilers at once while kernels are built; as memory allows by default",
    "TRITON_INTERPRET": "1: Triton's kernels run in Python on a CPU, for their tests",
}


def table() -> str:
    """The environment variables as a Markdown table."""
    rows = ["| environment variable | default | what it says |", "| --- | --- | --- |"]
    for entry in fields(Hosting):
        rows.append(f"| `{entry.metadata['name']}` | {_default(entry)} | {entry.metadata['words']} |")
    return "\n".join(rows + [f"| `{name}` | | {words} |" for name, words in OTHERS.items()])


def _default(entry: Any) -> str:
    usual, public = entry.default, entry.metadata["public"]
    text = "" if usual is None else str(int(usual) if isinstance(usual, bool) else usual)
    return text if public is None else f"{text}; public {public}"


if __name__ == "__main__":
    print(table())
