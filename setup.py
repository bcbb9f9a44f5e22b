"""Builds the compiled kernels. All static metadata is in pyproject.toml.

The kernels are plain shared objects behind a C ABI that are loaded with ctypes: the build needs a C++17
compiler (g++ or clang++, or the one named by CXX) and nothing of torch or Python. Without one, or with
BAGUA_NO_NATIVE=1, the package installs all the same and uses its torch paths.
"""

from __future__ import annotations

import gzip
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

# No fused multiply-add: all instruction sets must give the same bits.
CXXFLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-Wno-psabi",
]
LDFLAGS = ["-shared"] if sys.platform == "darwin" else ["-shared", "-Wl,--as-needed"]
# A cross-compiler is named by CXX, and what it builds for by _PYTHON_HOST_PLATFORM, as for other packages.
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", "").rpartition("-")[2] or platform.machine()
X86_64 = MACHINE.lower() in ("x86_64", "amd64") and sys.maxsize > 2**32
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-DBAGUA_ISA=avx2"]
AVX512 = [
    "-mavx512f",
    "-mfma",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
    "-DBAGUA_ISA=avx512",
]
BASELINE = ["-DBAGUA_ISA=baseline"]
ISAS = [BASELINE, AVX2, AVX512] if X86_64 else [BASELINE]


@dataclass(frozen=True)
class Library:
    """A shared object: each unit is a source file and the flags of its own."""

    name: str  # the .so lies in the package, e.g. bagua.codecs._native
    units: list[tuple[str, list[str]]]
    depends: list[str]
    without: str  # what its users lose if it cannot be built
    cxxflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()


def sources(folder: str, ending: str) -> list[str]:
    """The files of a folder with this ending, by name."""
    return sorted(str(path) for path in Path(folder).glob(f"*{ending}"))


CSRC = "bagua/codecs/csrc"
MESH = "bagua/comm/csrc"
NET = "bagua/net/csrc"
KERNELS = (
    "denoise",
    "eden",
    "int4",
    "late_moments",
    "mean",
    "minmax_uint8",
    "round_moments",
    "running_scale",
    "sign",
    "top_k",
)
LIBRARIES = [
    Library(
        name="bagua.codecs._native",
        units=[(f"{CSRC}/dispatch.cpp", []), *((f"{CSRC}/{stem}.cpp", isa) for stem in KERNELS for isa in ISAS)],
        depends=[f"{CSRC}/{header}.h" for header in ("abi", "blocks", "root", "running_scale", "trellis", "vec")],
        without="codecs will use slower torch paths",
    ),
    *(
        Library(
            name=f"bagua.lab._{stem}",
            units=[(f"bagua/lab/csrc/{stem}.cpp", [])],
            depends=[],
            without="bagua lab will not run",
        )
        for stem in (("relay", "pacing") if sys.platform == "linux" else ())
    ),
]
if sys.platform == "linux":
    LIBRARIES += [
        Library(
            name="bagua.comm._mesh",
            units=[(source, []) for source in sources(MESH, ".cpp")],
            depends=[*sources(MESH, ".h"), f"{CSRC}/abi.h"],
            without='there will be no transport "native"',
            ldflags=("-pthread",),
        ),
        Library(
            name="bagua.net.libnccl-net-bagua",
            units=[(source, []) for source in sources(NET, ".cpp")],
            depends=[*sources(NET, ".h"), f"{NET}/exports.map"],
            without="there will be no Bagua-Net",
            ldflags=("-pthread", f"-Wl,--version-script={NET}/exports.map"),
        ),
        Library(
            name="bagua.net._driver",
            units=[(source, []) for source in (*sources(f"{NET}/driver", ".cpp"), f"{NET}/flow_count.cpp")],
            depends=[*sources(f"{NET}/driver", ".h"), f"{NET}/nccl_abi.h", f"{NET}/flow_count.h"],
            without="bagua bench net will not run",
            cxxflags=("-fexceptions",),
            ldflags=("-pthread", "-ldl"),
        ),
    ]


class BuildLibraries(build_ext):
    """Compiles and links each library; a failure is a warning, never a failed installation."""

    def get_ext_filename(self, fullname: str) -> str:
        """No interpreter or platform in the name: the library knows nothing of Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Runs the compiler on all units at once, then links."""
        library = next(lib for lib in LIBRARIES if lib.name == ext.name)
        target = Path(self.get_ext_fullpath(ext.name))
        if self._is_current(library, target):
            return
        try:
            self._build(library, target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            warning = (
                f"WARNING: {library.name} was not built: {library.without}. Install g++ (or "
                f"set CXX to a C++17 compiler) and reinstall to get it. Reason: {reason}"
            )
            print(warning, file=sys.stderr, flush=True)
            raise CompileError(f"{library.name}: see the warning above") from error

    def _is_current(self, library: Library, target: Path) -> bool:
        if self.force or not target.exists():
            return False
        inputs = ["setup.py", *library.depends, *(source for source, _ in library.units)]
        return all(Path(path).stat().st_mtime <= target.stat().st_mtime for path in inputs)

    def _build(self, library: Library, target: Path) -> None:
        compiler = find_compiler()
        folder = Path(self.build_temp, library.name)
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)

        def compile_unit(index: int) -> str:
            source, flags = library.units[index]
            output = str(folder / f"{index}-{Path(source).stem}.o")
            command([*compiler, *CXXFLAGS, *library.cxxflags, *flags, "-c", source, "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, range(len(library.units))))
        fresh = folder / target.name
        command([*compiler, *LDFLAGS, *objects, *library.ldflags, "-o", str(fresh)])
        put_in_place(fresh, target)

    def copy_extensions_to_source(self) -> None:
        """For --inplace and editable installations; what they copy is gone for a moment."""
        for ext in self.extensions:
            path = Path(self.get_ext_filename(ext.name))
            if Path(self.build_lib, path).exists():
                put_in_place(Path(self.build_lib, path), path)


def put_in_place(fresh: Path, target: Path) -> None:
    """Copies a library in one step: a process may have the old one mapped, another may be about to load it."""
    os.replace(shutil.copy2(fresh, target.with_suffix(f".so.{os.getpid()}")), target)


def find_compiler() -> list[str]:
    """The C++ compiler as a command: CXX, else the first of the usual names on the path."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no C++ compiler found: neither g++ nor clang++ nor c++")


def command(argv: list[str]) -> None:
    """Runs a command; its output is in the exception if it fails."""
    subprocess.run(argv, check=True, capture_output=True, text=True)


class ReproducibleSdist(sdist):
    """The same files give the same bytes if SOURCE_DATE_EPOCH is set: no times or owners, and modes of two kinds."""

    def make_archive(
        self,
        base_name: str | os.PathLike[str],
        format: str,
        root_dir: Any = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        """Packs the folder `base_dir` and returns the archive's name."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar" or base_dir is None or root_dir is not None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        name = f"{base_name}.tar.gz"
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in sorted(path for path in Path(base_dir).rglob("*") if path.is_file()):
                member = tar.gettarinfo(str(path))
                member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
                member.mode = 0o755 if member.mode & 0o100 else 0o644
                # Files with several names would become links.
                member.type, member.linkname = tarfile.REGTYPE, ""
                member.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(member, content)
        return name


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: one wheel for all Python versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag, free of interpreter and ABI."""
        python, abi, plat = super().get_tag()
        return (python, abi, plat) if self.root_is_pure else ("py3", "none", plat)


wanted = [] if os.environ.get("BAGUA_NO_NATIVE") == "1" else LIBRARIES
setup(
    ext_modules=[
        Extension(lib.name, [source for source, _ in lib.units], depends=lib.depends, optional=True) for lib in wanted
    ],
    exclude_package_data={
        "": ["csrc/*", "csrc/driver/*"],
        **{f"bagua.{part}.csrc": ["*"] for part in ("codecs", "comm", "lab", "net")},
        "bagua.net.csrc.driver": ["*"],
    },
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel, "sdist": ReproducibleSdist},
)
