"""The library of CPU kernels: compiled once for its sources and machine, kept whole, refused otherwise."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paged.backends import native
from paged.backends.cpu import library
from paged.cli import main
from paged.common.errors import BackendUnavailableError, BuildFailedError, InvalidInputError

ROOT = Path(__file__).resolve().parents[2]
TINY = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
HANDLERS = """#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Add(ffi::Buffer<ffi::S32> in, ffi::ResultBuffer<ffi::S32> out) {
  out->typed_data()[0] = in.typed_data()[0] + ADDED;
  return ffi::Error::Success();
}
#define SAME(name) XLA_FFI_DEFINE_HANDLER_SYMBOL(name, Add, \\
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());
"""


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "handlers.cc").write_text(TINY)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """`$CXX`, a script that writes down what it compiles; `compiler(line)` puts a line of shell before that."""
    script, log = tmp_path / "cxx", tmp_path / "log"
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

    def write(line=""):
        script.write_text(f'#!/bin/sh\n{line}\ncase "$*" in *-o\\ *) echo "$*" >> {log};; esac\nexec {real} "$@"\n')
        script.chmod(0o755)

    write()
    monkeypatch.setenv("CXX", str(script))
    write.log = log
    write.runs = lambda: log.read_text().splitlines() if log.exists() else []
    return write


def no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)


class Build:
    """Builds into one directory and keeps what was said."""

    def __init__(self, directory, sources):
        self.directory, self.sources, self.said = directory, sources, []

    def __call__(self):
        self.said.clear()
        return library.build(self.directory, sources=self.sources, progress=self.said.append)


@pytest.fixture
def build(tmp_path, sources, compiler):
    return Build(tmp_path / "kept", sources)


def test_a_build_is_kept_with_its_digest_and_says_once_what_it_does(build, compiler):
    built = build()
    (line,) = build.said
    assert line.startswith("compiling the CPU kernels with ")
    assert line.endswith(f"into {built.parent} (about 10 s, once)")
    manifest = json.loads((built.parent / "manifest.json").read_text())
    assert manifest["sha256"] == native._sha256(built)
    assert manifest["compiler"] in line
    assert manifest["machine"] == native.machine()
    assert manifest["flags"] == [*library.FLAGS, *native.NATIVE_FLAGS]
    (built.parent / "lock").unlink()
    assert build() == built
    assert build.said == []
    assert sorted(path.name for path in built.parent.iterdir()) == ["library.so", "manifest.json"], "written again"
    (run,) = compiler.runs()
    assert "-O3" in run
    assert "-march=native" in run


def test_processes_that_start_together_compile_once(build, compiler, sources):
    compiler('case "$*" in *-o\\ *) sleep 2;; esac')
    code = "import sys; from pathlib import Path; from paged.backends.cpu import library\n"
    code += "print(library.build(Path(sys.argv[1]), sources=Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(build.directory), str(sources)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    assert {out.strip() for out, _ in said} == {str(build())}
    assert sum(err.count("compiling the CPU kernels") for _, err in said) == 1
    assert len(compiler.runs()) == 1


def test_other_sources_are_another_build_and_the_first_stays(build, compiler, sources):
    first = build()
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = build()
    (sources / "more.h").write_text("// included by nobody, and still part of what was compiled\n")
    third = build()
    (sources / "notes.md").write_text("no source")
    assert build() == third
    assert len({first.parent.parent, second.parent.parent, third.parent.parent}) == 3
    assert len(compiler.runs()) == 3
    (sources / "more.h").unlink()
    assert build() == second
    assert len(compiler.runs()) == 3


@pytest.mark.parametrize("field", ["headers", "flags", "machine"])
def test_other_headers_flags_or_instruction_sets_are_another_build(build, monkeypatch, tmp_path, field):
    first = build()
    if field == "headers":
        copy = tmp_path / "include"
        shutil.copytree(native.ffi_include() / "xla", copy / "xla")
        (copy / "xla" / "ffi" / "api" / "another.h").write_text("// of another jaxlib\n")
        monkeypatch.setattr(native, "ffi_include", lambda: copy)
    elif field == "flags":
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    else:
        monkeypatch.setattr(native, "machine", lambda: "Linux x86_64 sse2")
    assert build().parent.parent != first.parent.parent
    assert len(build.said) == 1


def test_a_build_of_another_machine_is_not_taken_where_none_can_be_made(build, monkeypatch):
    built = build()
    no_compiler(monkeypatch)
    assert build() == built
    monkeypatch.setattr(native, "machine", lambda: "Linux x86_64 sse2")
    with pytest.raises(BackendUnavailableError, match="not built for this machine"):
        build()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_machine_is_told_by_its_instruction_sets(monkeypatch):
    real = Path.read_text
    text = "processor : 0\n{} : fma avx2\nbugs : x\nprocessor : 1\n{} : avx2 fma\n"
    for name in ("flags\t\t", "Features\t"):
        monkeypatch.setattr(Path, "read_text", lambda self, *a, name=name: text.format(name, name))
        assert native.machine() == f"Linux {native.platform.machine()} avx2 fma"
    monkeypatch.setattr(Path, "read_text", real)
    assert len(native.machine().split()) > 5


def test_a_damaged_library_is_built_again_and_refused_without_a_compiler(build, monkeypatch):
    built = build()
    sound = built.read_bytes()
    for damage in (lambda: built.write_bytes(sound[:-1]), (built.parent / "manifest.json").unlink, built.unlink):
        damage()
        assert build() == built
        assert built.read_bytes() == sound
        assert len(build.said) == 1
    (built.parent / "manifest.json").write_text('["sha256"]')
    no_compiler(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler"):
        build()


def test_without_a_compiler_the_newest_kept_build_of_the_same_sources_serves(build, monkeypatch, sources):
    first = build()
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DOTHER")
    second = build()
    assert second != first
    assert second.parent.parent == first.parent.parent
    os.utime(first, (1, 1))
    no_compiler(monkeypatch)
    assert build() == second
    assert build.said[0].startswith("no C++ compiler 'c++ or g++ or clang++' on this machine.")
    assert build.said[0].endswith(f"Taking {second.parent}, which another compiler built.")
    second.write_bytes(b"damaged")
    assert build() == first
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    with pytest.raises(BackendUnavailableError, match=r"not built for this machine in .*kept, and cannot be: no C\+\+"):
        build()


def test_no_compiler_at_all_says_what_to_do(build, monkeypatch):
    no_compiler(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"apt-get install g\+\+\), or name one in \$CXX"):
        build()
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "missing-compiler")
    with pytest.raises(BackendUnavailableError, match="no C\\+\\+ compiler 'missing-compiler'") as raised:
        build()
    assert not isinstance(raised.value, BuildFailedError), "nothing failed, something is missing"
    assert not build.directory.exists()


def test_the_first_compiler_there_is_taken(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}" if name in ("g++", "clang++") else None)
    assert native.find_compiler() == ["/bin/g++"]
    monkeypatch.setenv("CXX", "clang++ --gcc-toolchain=/x")
    assert native.find_compiler() == ["/bin/clang++", "--gcc-toolchain=/x"]
    monkeypatch.setattr(native.shutil, "which", lambda name: name)
    assert native.find_compiler() == ["clang++ --gcc-toolchain=/x"], "a path with a space"
    monkeypatch.setenv("CXX", " ")
    assert native.find_compiler() == ["c++"]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(build, sources, monkeypatch, tmp_path):
    (sources / "handlers.cc").write_text('#error "not like this"\n' + "int x = y;\n" * 500)
    with pytest.raises(BuildFailedError, match=r"do not compile with .*cxx: (.|\n)*not like this") as raised:
        build()
    assert len(str(raised.value)) < 3000
    assert [path.name for path in build.directory.glob("*/*/*")] == ["lock"]
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    with pytest.raises(BackendUnavailableError, match="silent: status 3"):
        build()


def test_a_directory_that_cannot_be_written_is_told_with_the_variable(build, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    build.directory = tmp_path / "file"
    with pytest.raises(BackendUnavailableError, match=r"cannot be kept in .*: Not a directory. Set PAGED_CPU_DIR to a"):
        build()


def test_what_a_killed_compilation_left_is_removed(build):
    left = build().parent / f"{native.SCRATCH}killed"
    left.mkdir()
    (left / "x.o").write_text("")
    (left.parent / "library.so").write_bytes(b"damaged")
    build()
    assert not left.exists()


def test_a_compiler_that_does_not_end_is_ended(build, compiler, monkeypatch):
    compiler('case "$*" in *-o\\ *) sleep 60;; esac')
    monkeypatch.setattr(native, "BUILD_SECONDS", 0.5)
    with pytest.raises(BuildFailedError, match=r"was at it for 0\.5 s"):
        build()
    assert compiler.runs() == []


def test_sources_that_change_while_they_are_compiled_are_not_kept(build, compiler, sources):
    compiler(f'case "$*" in *-o\\ *) echo "#define ANSWER 43" > {sources}/answer.h;; esac')
    with pytest.raises(BackendUnavailableError, match="were changed while they were compiled"):
        build()
    assert not list(build.directory.glob("*/*/library.so"))


def test_a_compiler_that_does_not_know_march_gets_mcpu(build, compiler):
    compiler('case "$*" in *-march=native*) echo unknown >&2; exit 1;; esac')
    if native.platform.machine() in ("x86_64", "AMD64"):  # where -mcpu=native is another word for -mtune
        compiler('case "$*" in *-march=native*) echo unknown >&2; exit 1;; *-E*) exit 0;; esac')
    build()
    (run,) = compiler.runs()
    assert "-mcpu=native" in run


def run_targets(sources, directory):
    code = "import sys, threading; from pathlib import Path; import jax, numpy as np\n"
    code += "from paged.backends.cpu import library\nlibrary.SOURCES = Path(sys.argv[1])\n"
    code += "built, build = [], library.build\nlibrary.build = lambda: (built.append(1), build())[1]\n"
    code += "found = []\ncall = lambda name: found.append(library.ffi_target(name))\n"
    code += "threads = [threading.Thread(target=call, args=[name]) for name in library.TARGETS]\n"
    code += "[t.start() for t in threads], [t.join() for t in threads]\n"
    code += "for name in sorted(found):\n"
    code += "    f = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), np.int32))\n"
    code += "    print(name, jax.jit(f)(np.array([40], np.int32))[0])\n"
    code += "assert len(built) == 1, built\n"
    env = {**os.environ, "PAGED_CPU_DIR": str(directory)}
    return subprocess.run([sys.executable, "-c", code, str(sources)], capture_output=True, text=True, env=env)


def test_targets_are_registered_once_from_any_thread(build, compiler, sources):
    (sources / "answer.h").write_text("#define ADDED 2\n")
    text = '#include "answer.h"\n' + HANDLERS + "\n".join(f"SAME({name})" for name in library.TARGETS)
    (sources / "handlers.cc").write_text(text)
    run = run_targets(sources, build.directory)
    assert run.stdout.splitlines() == [f"{name} 42" for name in sorted(library.TARGETS)], run.stderr
    assert run.stderr.count("paged: compiling the CPU kernels with") == 1
    again = run_targets(sources, build.directory)
    assert (again.stdout, again.stderr) == (run.stdout, "")
    assert len(compiler.runs()) == 1


def test_the_loaded_library_says_what_it_is(build, sources, monkeypatch):
    (sources / "answer.h").write_text("#define ADDED 2\n")
    text = '#include "answer.h"\n' + HANDLERS + "\n".join(f"SAME({name})" for name in library.TARGETS)
    (sources / "handlers.cc").write_text(text)
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DOTHER")
    code = "import json, sys; from pathlib import Path; from paged.backends.cpu import library\n"
    code += "library.SOURCES = Path(sys.argv[1])\nfrom paged.backends.registry import get_backend\n"
    code += "backend = get_backend('cpu')\nassert backend.prepare() == backend.prepare()\n"
    code += "print(json.dumps(backend.prepare()))"
    env = {**os.environ, "PAGED_CPU_DIR": str(build.directory)}
    run = subprocess.run([sys.executable, "-c", code, str(sources)], capture_output=True, text=True, env=env)
    said = json.loads(run.stdout)
    assert said == native.describe(build())
    assert said["library"] == f"sha256:{native._sha256(build())}"
    assert said["arguments"] == ["-DOTHER"]
    assert said["machine"] == native.machine().split()
    assert said["sources"] == native._digest_files(native.source_files(sources))
    assert {"compiler", "flags", "headers", "units"} < set(said)


def test_a_library_without_its_targets_and_one_that_cannot_be_loaded_are_refused(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_CPU_DIR", str(build.directory))
    monkeypatch.setattr(library, "SOURCES", build.sources)
    monkeypatch.setattr(library, "_loaded", None)  # another test of this process may have loaded the real one
    with pytest.raises(BackendUnavailableError, match=r"library.so defines no handler paged_cpu_append\."):
        library.ffi_target("paged_cpu_logits")
    with pytest.raises(InvalidInputError, match="'paged_cpu_other' is not one of paged_cpu_append, "):
        library.ffi_target("paged_cpu_other")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(BackendUnavailableError, match=r"text.so cannot be loaded: .*text\.so"):
        native.load(tmp_path / "text.so", ["x"])
    monkeypatch.setattr(library, "SOURCES", tmp_path / "none")
    with pytest.raises(BackendUnavailableError, match=r"have no source .*none/handlers\.cc; install paged again"):
        library.build()


def test_where_builds_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGED_CPU_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.default_directory() == tmp_path / "paged" / "cpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.default_directory() == tmp_path / ".cache" / "paged" / "cpu"
    monkeypatch.setattr(Path, "home", lambda: Path("~none").expanduser())
    with pytest.raises(BackendUnavailableError, match=r"no home directory\. Set PAGED_CPU_DIR"):
        library.default_directory()
    monkeypatch.setenv("PAGED_CPU_DIR", "here")
    assert library.default_directory() == Path.cwd() / "here"


def test_the_command_builds_and_prints_where(build, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(library, "SOURCES", build.sources)
    assert main(["build", "cpu", "--output", str(build.directory)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{build.directory}\n"
    assert said.err.startswith("compiling the CPU kernels with ")
    build()
    assert build.said == []
    monkeypatch.setenv("PAGED_CPU_DIR", str(build.directory))
    assert main(["build", "cpu"]) == 0
    assert capsys.readouterr() == (f"{build.directory}\n", "")
    (tmp_path / "file").write_text("")
    assert main(["build", "cpu", "--output", str(tmp_path / "file")]) == 2
    assert "paged build: the CPU kernels are not built" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cpu", "--arch", "9.0a"], "--arch"),
        (["cpu", "--for-certify", "move"], "--for-certify"),
        (["cpu", "--list"], "--list"),
        (["gpu"], "invalid choice: 'gpu'"),
        ([], "PROVIDER"),
    ],
)
def test_options_of_another_provider_are_refused_by_name(options, words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["build", *options])
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_a_wheel_holds_every_source(tmp_path):
    for name in ("pyproject.toml", ".gitignore", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("paged", "conformance"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "paged" / "backends" / "cpu" / "csrc"
    folder.mkdir(exist_ok=True)
    for name in ("handlers.cc", "planted.h", "planted.cc"):
        (folder / name).touch()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    there = {name for name in zipfile.ZipFile(wheel).namelist() if "/cpu/csrc/" in name}
    assert there == {str(path.relative_to(tmp_path)) for path in folder.iterdir()}
    assert "paged/backends/cpu/csrc/planted.h" in there


def test_the_sources_have_no_warnings():
    flags = [*library.FLAGS, "-march=native", "-Werror", "-fsyntax-only", "-isystem", str(native.ffi_include())]
    command = [*native.find_compiler(), *flags, str(library.SOURCES / library.UNIT)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
