"""What a build needs, looked for before it starts. Each lack is a sentence that ends in its fix."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import RequestError, ResourceError, shown
from engine.memory import free_memory, in_words
from kernels.build.arch import Target

GIB = 1024**3
DISK = GIB // 2  # objects and logs of one target, with room
MEMORY_A_JOB = 4 * GIB  # nvcc 13.0 with CUTLASS 4.2 held 3.0 GiB at most, on a convolution for sm_100a
CUTLASS = (4, 2)
HEADERS = ("include/cutlass/cutlass.h", "include/cute/tensor.hpp", "tools/util/include/cutlass/util/packed_stride.hpp")


@dataclass(frozen=True)
class Toolchain:
    """Absolute paths of what a build runs, and the versions that decide what comes out of it."""

    nvcc: Path
    nvcc_version: tuple[int, int]
    compiler: Path
    compiler_version: str
    ninja: Path
    cutlass: Path
    cutlass_version: str

    @property
    def versions(self) -> dict[str, str]:
        """What goes into the key of a built object."""
        nvcc = ".".join(map(str, self.nvcc_version))
        return {"nvcc": nvcc, "compiler": self.compiler_version, "cutlass": self.cutlass_version}


class MissingError(ResourceError):
    """This machine can't build; `lacks` are the reasons, each with its fix."""

    def __init__(self, lacks: Sequence[str]) -> None:
        super().__init__(" ".join(lacks))
        self.lacks = list(lacks)


def toolchain(targets: Sequence[Target], folder: Path) -> Toolchain:
    """What a build of these targets into `folder` will use; MissingError lists everything that it lacks."""
    lacks: list[str] = []
    nvcc, nvcc_version = _nvcc(targets, lacks)
    compiler, compiler_version = _compiler(lacks)
    ninja = _ninja(lacks)
    cutlass, cutlass_version = _cutlass(lacks)
    _driver(nvcc_version, lacks)
    _room(folder, lacks)
    try:
        jobs()
    except RequestError as error:
        lacks.append(str(error))
    if lacks:
        raise MissingError(lacks)
    return Toolchain(nvcc, nvcc_version, compiler, compiler_version, ninja, cutlass, cutlass_version)


def jobs() -> int:
    """Compilers to run side by side: MAX_JOBS where it is set, else as many as cores and free memory carry. Raises
    RequestError for a MAX_JOBS that is no such number."""
    asked = os.environ.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise RequestError(f"MAX_JOBS = {shown(asked)} must be a whole number from 1 on. Leave it out for a guess.")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _memory() // MEMORY_A_JOB))


def find_nvcc() -> Path | None:
    """nvcc under CUDA_HOME, and nowhere else, where that is set; otherwise on the PATH, under CUDA_PATH, or where
    NVIDIA's installer puts it."""
    homes = [os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [shutil.which("nvcc"), *(str(Path(home, "bin", "nvcc")) for home in homes if home)]
    if asked := os.environ.get("CUDA_HOME"):
        places = [str(Path(asked, "bin", "nvcc"))]
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def _nvcc(targets: Sequence[Target], lacks: list[str]) -> tuple[Path, tuple[int, int]]:
    nvcc, version = find_nvcc(), (0, 0)
    needed = max((target.cuda for target in targets), default=(12, 8))
    fix = f"Install the CUDA toolkit {_dotted(needed)} or later, or set CUDA_HOME to where it is."
    if nvcc is None and (asked := os.environ.get("CUDA_HOME")):
        lacks.append(f"There is no nvcc under CUDA_HOME = {asked}. {fix} It may be left out, too.")
        return Path(), version
    if nvcc is None:
        lacks.append(f"There is no nvcc on the PATH or in /usr/local/cuda. {fix}")
        return Path(), version
    said = _first_match(r"release (\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    if said is None:
        lacks.append(f"{nvcc} does not say its version, so it is not a working nvcc. {fix}")
        return nvcc, version
    version = (int(said[1]), int(said[2]))
    if version < needed:
        names = ", ".join(target.name for target in targets if target.cuda > version)
        lacks.append(f"{nvcc} is of CUDA {_dotted(version)}, which is too old for {names}. {fix}")
    return nvcc, version


def _compiler(lacks: list[str]) -> tuple[Path, str]:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        lacks.append(
            f"There is no C++ compiler {name} for nvcc. Install g++ (Debian: apt install g++), or set CXX to one."
        )
        return Path(), ""
    first_line = _output([found, "--version"]).partition("\n")[0]
    if not first_line:
        lacks.append(
            f"{found} does not run. Install g++ (Debian: apt install g++), or set CXX to a compiler that does."
        )
    return Path(found), first_line


def _ninja(lacks: list[str]) -> Path:
    beside_us = importlib.util.find_spec("ninja")
    folders = [str(Path(place, "data", "bin")) for place in beside_us.submodule_search_locations] if beside_us else []
    if beside_us:
        import ninja

        folders.append(ninja.BIN_DIR)
    found = next(filter(None, (shutil.which("ninja", path=path) for path in (*folders, None))), None)
    if found is None:
        lacks.append("There is no ninja. Install it: pip install ninja.")
    return Path(found or "")


def cutlass_folders() -> list[Path]:
    """Where CUTLASS may be: CUTLASS_PATH alone where it is set, else inside the nvidia-cutlass wheel."""
    if os.environ.get("CUTLASS_PATH"):
        return [Path(os.environ["CUTLASS_PATH"])]
    wheel = importlib.util.find_spec("cutlass_library")
    places = wheel.submodule_search_locations if wheel else []
    return [Path(place, "source") for place in places or []]


def _cutlass(lacks: list[str]) -> tuple[Path, str]:
    fix = 'Install the headers: pip install "nvidia-cutlass>=4.2,<5", or set CUTLASS_PATH to a copy of CUTLASS.'
    folders = cutlass_folders()
    if not folders:
        lacks.append(f"The CUTLASS headers are not installed. {fix}")
        return Path(), ""
    folder = folders[0]
    missing = [header for header in HEADERS if not (folder / header).is_file()]
    if missing:
        lacks.append(f"{folder} has no {missing[0]}. {fix}")
        return folder, ""
    text = (folder / "include/cutlass/version.h").read_text(encoding="utf-8")
    numbers = [_first_match(rf"define CUTLASS_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    version = tuple(int(number[1]) if number else 0 for number in numbers)
    if version[:2] < CUTLASS or version[0] != CUTLASS[0]:
        lacks.append(f"CUTLASS in {folder} is {_dotted(version)}, the kernels are written for 4.2 and later 4.x. {fix}")
    return folder, _dotted(version)


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver speaks; None where there is no driver."""
    number = ctypes.c_int()
    try:
        said = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if said == 0 else None


def _driver(nvcc_version: tuple[int, int], lacks: list[str]) -> None:
    driver = driver_version()
    if driver and nvcc_version[0] > driver[0]:
        lacks.append(
            f"nvcc is of CUDA {_dotted(nvcc_version)}, but this driver runs programs of CUDA {driver[0]} at most. "
            f"Update the NVIDIA driver, or point CUDA_HOME at a toolkit of CUDA {driver[0]}."
        )


def _room(folder: Path, lacks: list[str]) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK:
        fix = "Free some, or set KERNELS_CACHE to a folder on a larger disk."
        lacks.append(f"{folder} has {in_words(free)} free, a build wants {in_words(DISK)}. {fix}")
    if _memory() < MEMORY_A_JOB:
        fix = "Close other programs and try again."
        lacks.append(f"{in_words(_memory())} of memory are free, one compiler wants {in_words(MEMORY_A_JOB)}. {fix}")


def _memory() -> int:
    """Bytes that compilers may take, within the limit of a container."""
    return free_memory(torch.device("cpu")) or 0


def _output(command: list[str]) -> str:
    """What a program prints, or nothing where it can't be run or fails. Asked once, until the program changes."""
    try:
        return _said(tuple(command), os.stat(command[0]).st_mtime_ns)
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.lru_cache
def _said(command: tuple[str, ...], changed: int) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _first_match(pattern: str, text: str) -> re.Match[str] | None:
    return re.search(pattern, text)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
