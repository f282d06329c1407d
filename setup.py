"""Builds the two native parts of StaleFlow; everything else about the package is in pyproject.toml.

- ``staleflow._ring``: shared-memory rings and the arena, C++17, always built.
- ``staleflow/_ops.so``: tensor ops over torch's stable ABI, built where torch is importable (use
  ``pip install --no-build-isolation``), and ``staleflow/_ops_cuda.so`` where nvcc is.

``STALEFLOW_BUILD_CUDA=auto|0|1`` decides about the last; auto asks whether nvcc is there, not whether a GPU is (login
nodes have none). ``STALEFLOW_CUDA_ARCHS`` (default "80;90") lists compute capabilities.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the headers of 2.10: loads in every later torch
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(str(path) for path in (CSRC / folder).glob(f"*{suffix}"))


def headers(folder: str) -> list[str]:
    return sorted(str(path) for suffix in (".h", ".cuh") for path in (CSRC / folder).glob(f"*{suffix}"))


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    inside = Path(home) / "bin" / "nvcc" if home else None
    return str(inside) if inside and inside.exists() else shutil.which("nvcc")


def wants_cuda() -> bool:
    choice = os.environ.get("STALEFLOW_BUILD_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"STALEFLOW_BUILD_CUDA={choice!r}: use auto, 0 or 1")
    found = nvcc()
    if choice == "1" and not found:
        raise SystemExit("STALEFLOW_BUILD_CUDA=1, but there is no nvcc in CUDA_HOME/bin or PATH")
    build = choice == "1" or (choice == "auto" and found is not None)
    print(f"staleflow: CUDA ops {'on' if build else 'off'} (STALEFLOW_BUILD_CUDA={choice}, nvcc: {found or 'none'})")
    return build


@dataclass(frozen=True)
class Torch:
    """Where torch's headers and libraries are, found without importing it."""

    root: Path

    @classmethod
    def find(cls) -> Torch | None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            print("staleflow: torch is not importable in this build: rings only, no tensor ops (--no-build-isolation)")
            return None
        return cls(Path(next(iter(spec.submodule_search_locations))))

    @property
    def compile_flags(self) -> list[str]:
        return ["-isystem", str(self.root / "include"), f"-I{CSRC / 'ops'}", STABLE_ABI]

    @property
    def link_flags(self) -> list[str]:
        return [f"-L{self.root / 'lib'}", "-ltorch_cpu", "-lc10"]


def ring_extension() -> Extension:
    import pybind11

    return Extension(
        "staleflow._ring",
        sources("ring", ".cpp"),
        include_dirs=[str(CSRC / "ring"), pybind11.get_include()],
        depends=headers("ring"),
        extra_compile_args=CXX_FLAGS,
        language="c++",
    )


class Build(build_ext):
    """The ring by setuptools; the ops by plain compiler calls, since they are no Python modules."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = "build/native"  # kept, whatever kind of build this is

    def build_extension(self, extension: Extension) -> None:
        """Takes what was built in place before, where it is up to date: an editable install would compile all again."""
        built = Path("src", self.get_ext_filename(extension.name))
        newest = max(Path(name).stat().st_mtime for name in ["setup.py", *extension.sources, *extension.depends])
        if self.force or not built.exists() or built.stat().st_mtime < newest:
            super().build_extension(extension)
        elif (target := Path(self.get_ext_fullpath(extension.name))).resolve() != built.resolve():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, target)

    def run(self) -> None:
        super().run()
        torch = Torch.find()
        cuda = wants_cuda()
        if torch is None:
            return
        package = Path(self.get_ext_fullpath("staleflow._ring")).parent
        self.link(self.compile(torch, "c++", sources("ops", ".cpp")), package / "_ops.so", torch.link_flags)
        if cuda:
            self.link(
                self.compile(torch, "nvcc", sources("ops", ".cu")), package / "_ops_cuda.so", self.cuda_libs(torch)
            )

    def compile(self, torch: Torch, language: str, files: list[str]) -> list[str]:
        command = nvcc_command(torch) if language == "nvcc" else cxx_command(torch)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda file: self.compile_one(command, Path(file)), files))

    def compile_one(self, command: list[str], file: Path) -> str:
        output = Path(self.build_temp) / f"{file.name}.o"
        output.parent.mkdir(parents=True, exist_ok=True)
        newest = max(Path(name).stat().st_mtime for name in [str(file), "setup.py", *headers("ops")])
        if self.force or not output.exists() or output.stat().st_mtime < newest:
            self.spawn([*command, "-c", str(file), "-o", str(output)])
        return str(output)

    def link(self, objects: list[str], target: Path, flags: list[str]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.spawn([os.environ.get("CXX", "g++"), "-shared", *objects, "-o", str(target), *flags])

    def cuda_libs(self, torch: Torch) -> list[str]:
        # libtorch_cuda gives the current stream and brings the CUDA runtime that torch itself uses. A CPU torch lacks
        # it; what is built then proves that the code compiles, and is never loaded.
        present = (torch.root / "lib" / "libtorch_cuda.so").exists()
        return [*torch.link_flags, *(["-ltorch_cuda"] if present else [])]


def cxx_command(torch: Torch) -> list[str]:
    return [os.environ.get("CXX", "g++"), *CXX_FLAGS, "-fPIC", *torch.compile_flags]


def nvcc_command(torch: Torch) -> list[str]:
    archs = os.environ.get("STALEFLOW_CUDA_ARCHS", "80;90").split(";")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [
        str(nvcc()),
        "-std=c++17",
        "-O3",
        *targets,
        "-DUSE_CUDA",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *torch.compile_flags,
    ]


setup(ext_modules=[ring_extension()], cmdclass={"build_ext": Build})
