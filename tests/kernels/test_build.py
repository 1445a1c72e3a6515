"""Building on first use, with a compiler that is a script: what is missing, what is in the key, who builds."""

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from engine.errors import RequestError, ResourceError
from kernels.build import __main__ as command
from kernels.build import arch, cache, preflight, store
from kernels.build.compile import BuildError, Recipe, Unit, command_flags
from kernels.vae_decode.recipe import RECIPE, TILES

ROOT = Path(__file__).resolve().parents[2]
HOPPER, BLACKWELL, ULTRA = arch.TARGETS

# Says its version, writes down each compilation and links an empty library with the real compiler.
NVCC = """\
#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release {version}, V{version}.1"; exit 0;;
esac
echo "$*" >> {folder}/calls
{extra}
out=; shared=
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2; shift;; -shared) shared=1;; esac
  shift
done
if [ -n "$shared" ]; then echo 'int answer(void) {{ return 42; }}' | /usr/bin/gcc -shared -fPIC -x c - -o "$out"
else echo object > "$out"; fi
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A machine with a fake CUDA toolkit and CUTLASS and a cache of its own; returns its folder."""
    write_nvcc(tmp_path)
    for header in preflight.HEADERS:
        file = tmp_path / "cutlass" / header
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    write_cutlass_version(tmp_path, 4, 2, 1)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MAX_JOBS", "2")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(preflight, "driver_version", lambda: None)
    return tmp_path


def write_nvcc(folder, version="13.0", extra=""):
    file = folder / "bin" / "nvcc"
    file.parent.mkdir(exist_ok=True)
    file.write_text(NVCC.format(folder=folder, version=version, extra=extra))
    file.chmod(0o755)


def write_cutlass_version(folder, *version):
    lines = [f"#define CUTLASS_{part} {n}" for part, n in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)]
    (folder / "cutlass/include/cutlass/version.h").write_text("\n".join(lines))


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cu").write_text("int one;")
    (folder / "shared.h").write_text("// shared")
    return Recipe("toy", folder, lambda target: [Unit("a", "one.cu", ("N=1",)), Unit("b", "one.cu", ("N=2",))])


def calls(tools):
    file = tools / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def lacks(targets=(HOPPER,), folder="/tmp"):
    with pytest.raises(preflight.MissingError) as caught:
        preflight.toolchain(list(targets), Path(folder))
    return caught.value.lacks


# ---- architectures ---------------------------------------------------------------------------------------------------


def test_only_the_gpu_that_a_target_is_for_gets_it():
    assert [arch.of_capability(target.capability) for target in arch.TARGETS] == list(arch.TARGETS)
    assert [arch.of_capability(other) for other in ((8, 0), (8, 9), (12, 0), (10, 1))] == [None] * 4


def test_every_visible_gpu_counts_and_each_target_once(monkeypatch):
    import torch

    visible = [(10, 0), (9, 0), (8, 9), (9, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: visible[i])
    assert arch.present() == [HOPPER, BLACKWELL]


def test_names_are_read_and_unknown_ones_refused():
    assert arch.named(" sm_100a,sm_90a,sm_100a ") == [HOPPER, BLACKWELL]
    for wrong in ("sm_90", "sm_90a,sm_120", ","):
        with pytest.raises(RequestError, match="there are sm_90a, sm_100a, sm_103a"):
            arch.named(wrong)


def test_code_is_for_one_architecture_without_ptx():
    assert HOPPER.flags == ["-gencode", "arch=compute_90a,code=sm_90a"]


# ---- preflight -------------------------------------------------------------------------------------------------------


def test_a_whole_machine_lacks_nothing(tools):
    found = preflight.toolchain([HOPPER], tools)
    assert found.nvcc == tools / "bin/nvcc" and found.ninja.is_absolute()
    assert found.versions["nvcc"] == "13.0" and found.versions["cutlass"] == "4.2.1"


def test_an_empty_machine_hears_of_everything_at_once_with_fixes(tools, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tools / "nothing"))
    monkeypatch.setattr(preflight, "find_nvcc", lambda: None)
    monkeypatch.setenv("CUTLASS_PATH", str(tools / "nothing"))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    found = lacks()
    expected = (("no nvcc", "CUDA_HOME"), ("no C++ compiler", "apt install g++"), ("no ninja", "pip install ninja"))
    for sentence, (what, fix) in zip(found, (*expected, ("has no include/cutlass", "nvidia-cutlass")), strict=True):
        assert what in sentence and fix in sentence


def test_cutlass_that_is_not_installed_is_named(tools, monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(preflight, "cutlass_folders", list)
    assert ["not installed" in sentence and "pip install" in sentence for sentence in lacks()] == [True]


@pytest.mark.parametrize(
    ("version", "fits"), [((4, 1, 0), False), ((4, 2, 0), True), ((4, 9, 1), True), ((5, 0, 0), False)]
)
def test_cutlass_must_be_of_a_version_that_the_kernels_know(tools, version, fits):
    write_cutlass_version(tools, *version)
    if fits:
        assert preflight.toolchain([HOPPER], tools).cutlass_version == ".".join(map(str, version))
    else:
        assert "4.2 and later 4.x" in lacks()[0]


def test_nvcc_under_cuda_home_is_found(tools, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tools))
    assert preflight.find_nvcc() == tools / "bin/nvcc"


def test_an_nvcc_too_old_for_one_target_says_for_which(tools):
    write_nvcc(tools, "12.8")
    assert preflight.toolchain([HOPPER, BLACKWELL], tools).nvcc_version == (12, 8)
    (sentence,) = lacks(arch.TARGETS)
    assert "too old for sm_103a" in sentence and "12.9" in sentence


def test_an_nvcc_that_does_not_run_is_not_one(tools):
    (tools / "bin/nvcc").write_text("#!/bin/sh\nexit 3\n")
    assert "does not say its version" in lacks()[0]


def test_a_driver_older_than_the_toolkit_is_found_before_the_build(tools, monkeypatch):
    monkeypatch.setattr(preflight, "driver_version", lambda: (12, 8))
    assert "Update the NVIDIA driver" in lacks()[0]
    monkeypatch.setattr(preflight, "driver_version", lambda: (13, 0))
    preflight.toolchain([HOPPER], tools)


def test_too_little_disk_and_memory_are_said_in_numbers(tools, monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda device: 2**30)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 3 * 2**20})())
    disk, memory = lacks()
    assert "3.0 MiB free" in disk and "1.0 GiB of memory" in memory


@pytest.mark.parametrize(("asked", "free", "most"), [("", 1, 1), ("", 9, 2), ("7", 1, 7)])
def test_jobs_follow_memory_unless_they_are_given(monkeypatch, asked, free, most):
    monkeypatch.setenv("MAX_JOBS", asked)
    monkeypatch.setattr(preflight, "free_memory", lambda device: free * 2**30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert preflight.jobs() == most


@pytest.mark.parametrize("asked", ["-3", "0", "many", "2.5"])
def test_a_number_of_jobs_that_is_none_is_refused(tools, monkeypatch, asked):
    monkeypatch.setenv("MAX_JOBS", asked)
    (sentence,) = lacks()
    assert f"MAX_JOBS = '{asked}'" in sentence


def test_a_cuda_home_without_nvcc_is_refused_though_another_is_on_the_path(tools, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nonsense")
    (sentence,) = lacks()
    assert "CUDA_HOME = /nonsense" in sentence


def test_an_empty_list_of_architectures_is_not_all_of_them(capsys):
    assert command.main(["--arch", "", "--check"]) == 2 and "no architecture is named" in capsys.readouterr().err


# ---- key -------------------------------------------------------------------------------------------------------------


def key(recipe, target=HOPPER, **versions):
    tools = {"nvcc": "13.0", "compiler": "g++ 12", "cutlass": "4.2.0"} | versions
    return cache.digest({**store.source_parts(recipe, target), **tools})


def test_the_key_follows_everything_that_decides_the_object(recipe):
    before = key(recipe)
    assert key(recipe) == before
    others = [
        key(recipe, BLACKWELL),
        key(recipe, nvcc="13.1"),
        key(recipe, compiler="g++ 13"),
        key(recipe, cutlass="4.3.0"),
    ]
    other_macro = Recipe("toy", recipe.folder, lambda target: [Unit("a", "one.cu", ("N=3",))])
    others.append(key(other_macro))
    (recipe.folder / "shared.h").write_text("// changed")
    others.append(key(recipe))
    assert len({before, *others}) == 7


def test_the_key_does_not_follow_places(recipe, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in recipe.folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert key(Recipe("toy", moved, recipe.units)) == key(recipe)


def test_the_real_recipe_compiles_each_tile_in_each_type():
    for target in arch.TARGETS:
        names = [unit.name for unit in RECIPE.units(target)]
        assert len(set(names)) == len(names) == 2 * len(TILES[target.family]) + 2
        assert all((RECIPE.folder / unit.source).is_file() for unit in RECIPE.units(target))
    assert len({tuple(command_flags(RECIPE, target)) for target in arch.TARGETS}) == 3


# ---- cache -----------------------------------------------------------------------------------------------------------


def test_the_cache_is_its_users_alone(tools):
    folder = cache.root()
    assert folder == tools / "cache" and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tools, mode):
    (tools / "cache").mkdir()
    (tools / "cache").chmod(mode)
    with pytest.raises(ResourceError, match=r"written to by others.*KERNELS_CACHE"):
        cache.root()


def test_a_folder_of_another_user_is_refused(tools, monkeypatch):
    cache.root()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ResourceError, match="belongs to user"):
        cache.root()


def test_a_link_is_refused(tools):
    (tools / "real").mkdir(mode=0o700)
    (tools / "cache").symlink_to(tools / "real")
    with pytest.raises(ResourceError, match="is a link"):
        cache.root()


def test_the_first_place_that_can_be_written_to_is_taken(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file, so no folder can be made below it")
    for variable, value in (("KERNELS_CACHE", ""), ("XDG_CACHE_HOME", str(tmp_path / "file")), ("HOME", str(tmp_path))):
        monkeypatch.setenv(variable, value)
    assert cache.root() == tmp_path / ".cache/pan2-demo/kernels"
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache.root().parent == tmp_path


# ---- life of an object -----------------------------------------------------------------------------------------------


def test_an_object_is_built_once_and_then_found(tools, recipe):
    said = []
    assert store.ensure(recipe, HOPPER, said.append).answer() == 42
    assert calls(tools) == 3 and "Compiling 2 files for sm_90a, 2 at a time" in said[0]
    store.ensure(recipe, HOPPER, said.append)
    assert calls(tools) == 3
    (folder,) = (path.parent for path in (tools / "cache/sm_90a").glob("*/libtoy.so"))
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "build.ninja", "key.json", "libtoy.so"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_changed_header_builds_again_and_the_difference_is_named(tools, recipe):
    store.ensure(recipe, HOPPER, print)
    (recipe.folder / "shared.h").write_text("// changed")
    write_nvcc(tools, "13.1")
    found = preflight.toolchain([HOPPER], tools)
    assert store.state(recipe, HOPPER, found) == (False, ["nvcc", "sources"])
    store.ensure(recipe, HOPPER, print)
    assert calls(tools) == 6 and store.state(recipe, HOPPER, found) == (True, [])


def test_an_object_that_does_not_load_is_built_again(tools, recipe):
    # Another process builds it: what this one has loaded once it would find again by name.
    assert builder(recipe).wait(timeout=120) == 0
    (file,) = (tools / "cache/sm_90a").glob("*/libtoy.so")
    file.write_bytes(b"\x7fELF and no more")
    said = []
    assert store.ensure(recipe, HOPPER, said.append).answer() == 42
    assert "will be built again" in said[0] and calls(tools) == 6


def test_a_machine_that_can_no_longer_build_still_loads(tools, recipe, monkeypatch):
    store.ensure(recipe, HOPPER, print)
    monkeypatch.setattr(preflight, "find_nvcc", lambda: None)
    assert store.ensure(recipe, HOPPER, print).answer() == 42
    (recipe.folder / "one.cu").write_text("int other;")
    with pytest.raises(preflight.MissingError, match="no nvcc"):
        store.ensure(recipe, HOPPER, print)
    assert calls(tools) == 3


def test_a_failure_keeps_the_whole_log_and_leaves_no_object(tools, recipe):
    write_nvcc(tools, extra="for i in $(seq 100); do echo line $i of the complaint; done; exit 1")
    with pytest.raises(BuildError) as caught:
        store.ensure(recipe, HOPPER, print)
    text = caught.value.log.read_text()
    assert str(caught.value.log) in str(caught.value) and "line 1 of" in text and "line 100 of" in text
    assert "line 100 of" in str(caught.value) and "line 1 of the" not in str(caught.value)
    assert [path.suffix for path in sorted((tools / "cache/sm_90a").iterdir())] == [".log", ".lock"]


def test_a_failed_build_is_not_tried_twice_by_one_process(tools, recipe):
    write_nvcc(tools, extra="exit 1")
    with pytest.raises(BuildError, match="whole log"):
        store.ensure(recipe, HOPPER, print)
    before = calls(tools)
    with pytest.raises(BuildError, match="whole log"):
        store.ensure(recipe, HOPPER, print)
    assert calls(tools) == before > 0
    # Another process, or other sources, may succeed.
    (recipe.folder / "one.cu").write_text("int other;")
    write_nvcc(tools)
    assert store.ensure(recipe, HOPPER, print).answer() == 42


def test_what_a_machine_can_have_is_known_without_building(tools, recipe, monkeypatch):
    assert store.obtainable(recipe, HOPPER) is None and calls(tools) == 0
    with monkeypatch.context() as without:
        without.setattr(preflight, "find_nvcc", lambda: None)
        assert "no nvcc" in store.obtainable(recipe, HOPPER)
    store.ensure(recipe, HOPPER, print)
    monkeypatch.setattr(preflight, "find_nvcc", lambda: None)
    assert store.obtainable(recipe, HOPPER) is None
    (tools / "cache").chmod(0o777)
    assert "written to by others" in store.obtainable(recipe, HOPPER)


def test_a_compiler_that_memory_ended_is_recognised(tools, recipe):
    write_nvcc(tools, extra="echo Killed; exit 137")
    with pytest.raises(BuildError, match="MAX_JOBS=1"):
        store.ensure(recipe, HOPPER, print)


BUILDER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from kernels.build import arch, preflight, store
    from kernels.build.compile import Recipe, Unit
    preflight.driver_version = lambda: None
    units = [Unit("a", "one.cu", ("N=1",)), Unit("b", "one.cu", ("N=2",))]
    recipe = Recipe("toy", Path(sys.argv[1]), lambda target: units)
    print("answer", store.ensure(recipe, arch.TARGETS[0], lambda words: print(words, flush=True)).answer())
""")


def builder(recipe):
    program = [sys.executable, "-c", BUILDER, str(recipe.folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_one_process_builds_and_the_others_wait(tools, recipe):
    gate = tools / "gate"
    write_nvcc(tools, extra=f"while [ ! -e {gate} ]; do sleep 0.1; done")
    first = builder(recipe)
    wait_for(lambda: calls(tools) == 2)
    others = [builder(recipe), builder(recipe)]
    for other in others:
        assert f"Process {first.pid} is building" in other.stdout.readline()
    gate.touch()
    for process in (first, *others):
        assert "answer 42" in process.communicate(timeout=120)[0] and process.returncode == 0
    assert calls(tools) == 3


def test_a_builder_that_is_killed_leaves_no_lock(tools, recipe):
    gate = tools / "gate"
    write_nvcc(tools, extra=f"while [ ! -e {gate} ]; do sleep 0.1; done")
    first = builder(recipe)
    wait_for(lambda: calls(tools) == 2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    gate.touch()
    assert store.ensure(recipe, HOPPER, print).answer() == 42


# ---- command ---------------------------------------------------------------------------------------------------------


def test_check_answers_by_exit_code(tools, monkeypatch, capsys):
    assert command.main(["--check", "--arch", "sm_90a"]) == 0
    assert "sm_90a: to be built" in capsys.readouterr().out
    monkeypatch.setattr(preflight, "find_nvcc", lambda: None)
    assert command.main(["--check"]) == 1
    assert "no nvcc" in capsys.readouterr().out


def test_the_command_builds_lists_and_refuses(tools, recipe, monkeypatch, capsys):
    monkeypatch.setattr(command, "RECIPE", recipe)
    monkeypatch.setattr(arch, "present", list)
    assert command.main([]) == 2 and "--arch" in capsys.readouterr().err
    assert command.main(["--list"]) == 0 and "Nothing is built" in capsys.readouterr().out
    assert command.main(["--arch", "sm_90a,sm_100a"]) == 0 and calls(tools) == 6
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["sm_100a", "sm_90a"]
    assert command.main(["--check", "--arch", "sm_90a"]) == 0 and "in the cache" in capsys.readouterr().out
    assert command.main(["--arch", "sm_80"]) == 2


def test_nothing_is_built_or_imported_from_torch_cuda_by_an_import():
    code = "import kernels.build.store, kernels.vae_decode.recipe, torch; assert not torch.cuda.is_initialized()"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_key_file_is_plain_json(tools, recipe):
    store.ensure(recipe, HOPPER, print)
    (file,) = (tools / "cache/sm_90a").glob("*/key.json")
    assert set(json.loads(file.read_text())) == {"target", "sources", "flags", "nvcc", "compiler", "cutlass"}
    assert isinstance(ctypes.CDLL(str(file.with_name("libtoy.so"))), ctypes.CDLL)


@pytest.mark.parametrize(
    "damaged", [b"", b'{"target": "sm_', b"[]", b"\xff\xfe"], ids=["empty", "cut", "list", "binary"]
)
def test_an_object_with_a_damaged_key_is_as_good_as_not_there(tools, recipe, monkeypatch, caplog, capsys, damaged):
    store.ensure(recipe, HOPPER, print)
    (file,) = (tools / "cache/sm_90a").glob("*/key.json")
    file.write_bytes(damaged)
    found = preflight.toolchain([HOPPER], tools)
    assert store.state(recipe, HOPPER, found) == (False, [])
    assert f"{file} can't be read" in caplog.text and "taken for not there" in caplog.text
    with monkeypatch.context() as without:
        without.setattr(command, "RECIPE", recipe)
        assert command.main(["--list"]) == 0 and "sm_90a" in capsys.readouterr().out
        without.setattr(preflight, "find_nvcc", lambda: None)
        assert "no nvcc" in store.obtainable(recipe, HOPPER)
        with pytest.raises(preflight.MissingError):
            store.ensure(recipe, HOPPER, print)
    assert store.ensure(recipe, HOPPER, print).answer() == 42 and calls(tools) == 6
    assert store.state(recipe, HOPPER, found) == (True, [])
