"""Sources to one shared object: every unit compiled by ninja, as many side by side as memory carries."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ResourceError
from kernels.build import preflight
from kernels.build.arch import Target
from kernels.build.preflight import Toolchain

FLAGS = (
    "-O3",
    "-std=c++17",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--cudart=static",
    "-Xcompiler=-fPIC",
    "-Xptxas=-v",
)
TAIL = 30  # lines of the log that an error quotes


@dataclass(frozen=True)
class Unit:
    """One run of the compiler: a source file of the recipe's folder with macros, under a name of its own."""

    name: str
    source: str
    macros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """name: of the object (lib<name>.so); folder: of the sources, every file of which is in the key; units: what to
    compile for a target."""

    name: str
    folder: Path
    units: Callable[[Target], list[Unit]]

    @property
    def file(self) -> str:
        """The object's file name."""
        return f"lib{self.name}.so"


class BuildError(ResourceError):
    """The compiler failed. `log` holds everything it said."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def compile_recipe(recipe: Recipe, target: Target, tools: Toolchain, folder: Path, say: Callable[[str], None]) -> Path:
    """Build in an empty folder and return the object's path; the log stays beside it. BuildError if a unit fails."""
    units, workers, began = recipe.units(target), preflight.jobs(), time.monotonic()
    say(f"Compiling {len(units)} files for {target.name}, {workers} at a time. This is done once and takes minutes.")
    (folder / "build.ninja").write_text(_ninja_file(recipe, target, tools, units), encoding="utf-8")
    log = folder / "build.log"
    with open(log, "w", encoding="utf-8") as out:
        command = [str(tools.ninja), "-C", str(folder), "-j", str(workers), "-v"]
        code = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        ).returncode
    if code != 0:
        raise BuildError(_failure(recipe, target, log), log)
    say(f"Compiled for {target.name} in {time.monotonic() - began:.0f} seconds.")
    for leftover in (*folder.glob("*.o"), *folder.glob(".ninja*")):
        leftover.unlink()
    return folder / recipe.file


def keep_log(error: BuildError, place: Path) -> BuildError:
    """The same error with its log moved out of a folder that is about to go."""
    shutil.copyfile(error.log, place)
    return BuildError(str(error).replace(str(error.log), str(place)), place)


def command_flags(recipe: Recipe, target: Target) -> list[str]:
    """Every flag that decides what the object holds, without the paths of this machine: a part of its key."""
    units = [" ".join((unit.source, *unit.macros)) for unit in recipe.units(target)]
    return [*target.flags, *FLAGS, *units]


def _ninja_file(recipe: Recipe, target: Target, tools: Toolchain, units: list[Unit]) -> str:
    includes = [f"-isystem {_quoted(tools.cutlass / part)}" for part in ("include", "tools/util/include")]
    compiler = f"{_quoted(tools.nvcc)} -ccbin {_quoted(tools.compiler)}"
    flags = " ".join((*target.flags, *FLAGS, *includes))
    lines = [
        f"rule compile\n  command = {compiler} {flags} $macros -c $in -o $out",
        f"rule link\n  command = {compiler} -shared --cudart=static {' '.join(target.flags)} $in -o $out",
    ]
    for unit in units:
        macros = " ".join(_quoted(f"-D{macro}") for macro in unit.macros)
        lines.append(f"build {unit.name}.o: compile {_path(recipe.folder / unit.source)}\n  macros = {macros}")
    lines.append(f"build {recipe.file}: link {' '.join(f'{unit.name}.o' for unit in units)}")
    return "\n".join(lines) + "\n"


def _quoted(text: object) -> str:
    """For the shell inside a ninja file, where a dollar is written twice."""
    return "'" + str(text).replace("'", "'\\''").replace("$", "$$") + "'"


def _path(path: Path) -> str:
    """For a build line of a ninja file."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _failure(recipe: Recipe, target: Target, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    why = f"Compiling {recipe.name} for {target.name} failed. The whole log: {log}."
    if any(sign in line for line in lines for sign in ("Killed", "exit code 137", "out of memory", "signal 9")):
        why += " The system ended a compiler, as it does when memory runs out: set MAX_JOBS=1 and try again."
    return "\n".join((why, *lines[-TAIL:]))
