"""Our package `kernels` has the name of a public one; nothing may take it for that."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import kernels

ROOT = Path(__file__).resolve().parents[1]


def test_neither_library_takes_our_kernels_for_the_public_package():
    from diffusers.utils import is_kernels_available as diffusers_sees
    from transformers.utils import is_kernels_available as transformers_sees

    assert Path(kernels.__file__).is_relative_to(ROOT)
    assert not diffusers_sees() and not transformers_sees()


def test_our_version_is_below_the_range_that_transformers_accepts():
    try:
        version = metadata.version("pan2-demo")
    except metadata.PackageNotFoundError:
        version = next(
            line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
        )
        version = version.split('"')[1]
    assert tuple(int(part) for part in version.split(".")[:2]) < (0, 18)


def test_every_module_imports_without_a_gpu():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted((ROOT / "engine").rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nimport app, torch\n"
    code += "assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
