"""Libraries that a wheel carries: which one a processor loads, and which are never loaded (exact)."""

from __future__ import annotations

import platform
import runpy
import shutil
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from narrowgauge.errors import BackendError
from narrowgauge.nn import dropout
from narrowgauge.ops import fingerprint
from narrowgauge.ops.attention16 import cpp as attention
from narrowgauge.ops.cpp import build, int4, prebuilt, threads
from narrowgauge.ops.cross_entropy import cpp as cross_entropy
from narrowgauge.ops.mm import int8_cpp
from narrowgauge.ops.norm_act import cpp as norms
from narrowgauge.ops.quantize import cpp as casts
from narrowgauge.ops.quantize import eden_cpp
from narrowgauge.ops.rotary import cpp as rotary
from narrowgauge.optim.cpp import binding, norm
from tests.raising import raises
from tests.selection import needs_compiler

ROOT = Path(__file__).parent.parent.parent
V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave sse4_2"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
LIBRARIES = [
    each.LIBRARY for each in (dropout, fingerprint, int4, int8_cpp, casts, eden_cpp, norms, norm)
]
LIBRARIES += [attention.LIBRARY, rotary.LIBRARY, cross_entropy.LIBRARY]
USED = [
    ("narrowgauge.optim.cpp", binding.SOURCES),
    ("narrowgauge.ops.cpp", threads.SOURCES),
    *((each.package, each.sources) for each in LIBRARIES),
]
TEMPLATE = 'extern "C" int seven() {{ return {}; }}\n'


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", V4, ("x86-64-v4", "x86-64-v3", "x86-64")),
        ("x86_64", V3, ("x86-64-v3", "x86-64")),
        ("x86_64", "sse4_2 popcnt", ("x86-64",)),
        # A virtual machine may hide some instructions: a level needs all below it.
        ("x86_64", V4.replace("avx2 ", ""), ("x86-64",)),
        ("x86_64", V4.replace("avx512vl", ""), ("x86-64-v3", "x86-64")),
        ("riscv64", "", ()),
    ],
)
def test_a_processor_has_the_levels_whose_instructions_it_lists(machine, flags, expected):
    cpuinfo = f"processor\t: 0\nflags\t\t: fpu {flags}\nbogomips\t: 4890\n"
    assert prebuilt.levels(machine, cpuinfo) == expected


def test_an_arm_processor_lists_features_and_a_mac_nothing():
    assert prebuilt.levels("aarch64", "Features\t: fp asimd\n") == ("armv8-a",)
    assert prebuilt.levels("x86_64", "") == ()


def test_what_is_compiled_for_a_wheel_is_what_the_package_asks_for():
    """The same files enter both keys, so that a wheel's library is found."""
    compiled = {}
    for package, sources in USED:
        folder = Path(str(resources.files(package)))
        compiled[folder / sources[0]] = {name: (folder / name).read_text() for name in sources}
    assert set(compiled) == set((ROOT / "narrowgauge").rglob("*.cpp"))
    for source, texts in compiled.items():
        assert prebuilt.sources_of(source) == texts


def test_a_key_depends_on_every_text_its_name_and_the_level():
    texts = {"a.cpp": "1", "b.h": "2"}
    keys = {
        prebuilt.library_key(each, level)
        for each in (texts, {"a.cpp": "1", "c.h": "2"}, {"a.cpp": "12", "b.h": ""})
        for level in ("x86-64", "x86-64-v3")
    }
    assert len(keys) == 6
    backwards = dict(reversed(texts.items()))
    assert prebuilt.library_key(backwards, "x86-64") == prebuilt.library_key(texts, "x86-64")


def test_the_newest_symbol_of_glibc_is_found(tmp_path):
    library = tmp_path / "kernel.so"
    library.write_bytes(b"\x00GLIBC_2.2.5\x00GLIBC_2.14\x00GLIBCXX_3.4\x00")
    assert prebuilt.glibc_needed([library]) == (2, 17)
    library.write_bytes(b"\x00GLIBC_2.29\x00GLIBC_2.4\x00")
    assert prebuilt.glibc_needed([library]) == (2, 29)


# --- Loading ---


@dataclass
class Package:
    """A package of one source, as a wheel with libraries installs it."""

    folder: Path

    def load(self, sources: tuple[str, ...] = ("tiny.cpp",)) -> int:
        return build.library("narrowgauge.optim", sources, "a test", "do without").seven()

    @property
    def libraries(self) -> list[Path]:
        return sorted((self.folder / prebuilt.FOLDER).glob("*.so"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Its libraries return 7, and no compiler is here to build others."""
    machine = platform.machine()
    least = list(prebuilt.LEVELS[machine])[-1]  # compilers know it, and each such processor has it
    monkeypatch.setattr(prebuilt, "LEVELS", {machine: {least: ()}})
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TEMPLATE.format(7), encoding="utf-8")
    compiler = shutil.which(build.compiler_name())
    prebuilt.compile_all(folder, compiler, machine)
    monkeypatch.setattr(build.resources, "files", lambda package: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return Package(folder)


needs_levels = pytest.mark.skipif(
    not prebuilt.levels(), reason="no wheel carries libraries for this kind of machine"
)


@needs_compiler
@needs_levels
def test_a_carried_library_needs_no_compiler_and_no_cache(package):
    assert package.load() == 7
    assert not (package.folder.parent / "cache").exists()


def test_the_level_of_carried_kernels_is_told(tmp_path, monkeypatch):
    (tmp_path / "cast.cpp").write_text("", encoding="utf-8")
    monkeypatch.setattr(prebuilt, "__file__", str(tmp_path / "prebuilt.py"))
    monkeypatch.setattr(prebuilt, "levels", lambda: ("x86-64-v3", "x86-64"))
    assert prebuilt.carried_level() is None
    (tmp_path / prebuilt.FOLDER).mkdir()
    for level in ("x86-64", "x86-64-v3", "x86-64-v4"):
        key = prebuilt.library_key({"cast.cpp": ""}, level)
        (tmp_path / prebuilt.FOLDER / f"cast-{level}-{key}-0.so").touch()
    assert prebuilt.carried_level() == "x86-64-v3"


@needs_compiler
@needs_levels
@pytest.mark.parametrize("left", [0, 9000, -1], ids=["empty", "cut", "one byte lost"])
def test_a_damaged_library_is_not_loaded(package, left):
    [library] = package.libraries
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:left])
    with raises(BackendError, "compiler.missing", "no-such-compiler"):
        package.load()


@needs_compiler
@needs_levels
def test_a_library_of_other_sources_is_not_loaded(package, monkeypatch):
    """An edited source in an installed package is compiled, as everywhere."""
    (package.folder / "tiny.cpp").write_text(TEMPLATE.format(8), encoding="utf-8")
    with raises(BackendError, "compiler.missing", "no-such-compiler"):
        package.load()
    monkeypatch.delenv("CXX")
    assert package.load() == 8


@needs_compiler
@needs_levels
def test_a_library_that_cannot_be_loaded_from_the_package_is_built_elsewhere(package, monkeypatch):
    opened, load = [], build.ctypes.CDLL

    def refuse(path: str):
        opened.append(path)
        if prebuilt.FOLDER in path:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    monkeypatch.delenv("CXX")
    assert package.load() == 7 and len(opened) == 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in prebuilt.LEVELS, reason="no wheel for this processor")
def test_a_wheel_with_libraries_is_for_one_platform_and_holds_one_for_each_level(tmp_path):
    """Of a package with a single source; `make wheel` compiles the real ones for minutes."""
    cpp = tmp_path / "narrowgauge" / "ops" / "cpp"
    cpp.mkdir(parents=True)
    (cpp / "tiny.cpp").write_text(TEMPLATE.format(7), encoding="utf-8")
    for folder in (cpp, cpp.parent, cpp.parent.parent):
        (folder / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    script = runpy.run_path(str(ROOT / "scripts" / "wheel.py"))
    script["make"].__globals__["ROOT"] = tmp_path
    script["make"].__globals__["prebuilt"] = lambda: prebuilt
    machine = platform.machine()
    made = script["make"](tmp_path / "dist", machine, build.compiler_name())
    assert made.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    with zipfile.ZipFile(made) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".so")]
        facts = next(wheel.read(name) for name in wheel.namelist() if name.endswith("/WHEEL"))
    assert len(names) == len(prebuilt.LEVELS[machine])
    assert all(name.startswith("narrowgauge/ops/cpp/prebuilt/tiny-") for name in names)
    assert b"Root-Is-Purelib: false" in facts
    assert not (cpp / prebuilt.FOLDER).exists()  # the checkout is as it was
