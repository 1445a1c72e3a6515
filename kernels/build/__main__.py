"""python -m kernels.build: compile the decoder's convolutions for the GPUs that are here, or for any without one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.arguments import exit_code
from engine.errors import EngineError
from engine.memory import in_words
from kernels.build import arch, cache, preflight, store
from kernels.build.arch import Target
from kernels.vae_decode.recipe import RECIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all went well (with --check: where a build is possible), 1 where not, 2 for a wrong command."""
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            return _list()
        targets = arch.named(options.arch) if options.arch is not None else arch.present()
        if options.check:
            return _check(targets or list(arch.TARGETS))
        if not targets:
            print(f"No GPU here has kernels of its own; name some with --arch ({arch.NAMES}).", file=sys.stderr)
            return 2
        for target in targets:
            store.ensure(RECIPE, target, say=print)
            print(f"{target.name} ({target.gpus}): ready.")
    except EngineError as error:
        return exit_code(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument("--arch", help=f"architectures, with commas between: {arch.NAMES}; the GPUs here if left out")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only say whether a build is possible and what it would do")
    what.add_argument("--list", action="store_true", help="what the cache holds")
    return parser


def _check(targets: Sequence[Target]) -> int:
    folder = cache.root()
    try:
        tools = preflight.toolchain(targets, folder)
    except preflight.MissingError as error:
        print("A build is not possible here:", *error.lacks, sep="\n  ")
        return 1
    print(f"nvcc {tools.versions['nvcc']} ({tools.nvcc}), {tools.compiler_version}, CUTLASS {tools.cutlass_version}")
    print(f"{preflight.jobs()} compilers at a time; the cache is {folder}")
    for target in targets:
        there, differs = store.state(RECIPE, target, tools)
        why = f" (changed since the last one: {', '.join(differs)})" if differs else ""
        print(f"{target.name}: {'in the cache' if there else 'to be built' + why}")
    return 0


def _list() -> int:
    objects = sorted(cache.root().glob(f"*/*/{RECIPE.file}"))
    print("\n".join(map(_line, objects)) if objects else f"Nothing is built in {cache.root()}.")
    return 0


def _line(file) -> str:
    key = cache.read_key(file.parent / cache.KEY_FILE)
    made_with = ", ".join(f"{name} {key.get(name, 'unknown')}" for name in ("nvcc", "cutlass"))
    return f"{file.parent.parent.name}  {in_words(file.stat().st_size)}  {made_with}  {file}"


if __name__ == "__main__":
    sys.exit(main())
