"""What the command lines share: bad input is one line and exit code 2, before any work."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import EngineError, RequestError

BAD_INPUT, FAILED = 2, 1


def positive(text: str) -> int:
    """A whole number from 1 on, as a type of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """A number above 0, as a type of argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def exit_code(error: EngineError) -> int:
    """Of a program that ends with this error, after its one line on standard error."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return BAD_INPUT if isinstance(error, RequestError) else FAILED


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the program with one line where the work inside raises an EngineError."""
    try:
        yield
    except EngineError as error:
        raise SystemExit(exit_code(error)) from None


def require_folder(name: str, folder: Path) -> None:
    """Make a folder if need be. name: what chose it. Raises RequestError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"{name} {folder} can't be written ({reason}). Choose another folder.") from error


def tell(text: str) -> None:
    """Print a result. What was made stays made, whether or not its reader knows every letter and is still there."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")
        print(text, flush=True)
    except BrokenPipeError:
        # Python would try to write the rest once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
