"""A kernel compiled for a GPU that is not there, as far as a test asks, and what its machine code says."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from stages import EndedError, end, other_stages, to_assembly
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager


@dataclass(frozen=True)
class Compiled:
    """A kernel, compiled at the first look at what is to be seen of it.

    Args:
        name, arguments: the kernel's, by name.
        source, gpu, options: what Triton compiles, for which GPU, and how.
        threads: of a program.
        config: the operator's configuration.
        constants: the arguments that are compile-time values.
        descriptors_on_heap: the arguments that are descriptors of memory on the heap.
    """

    name: str
    arguments: frozenset[str]
    source: ASTSource = field(repr=False)
    gpu: GPUTarget
    options: Any = field(repr=False)
    threads: int
    config: Any
    constants: dict[str, Any]
    descriptors_on_heap: frozenset[str] = frozenset()

    def ttgir_alone(self) -> str:
        """Return Triton's GPU dialect and compile no further: for a test that looks at nothing else."""
        with other_stages("assembly", lambda stages: stages.update(llir=end)):
            try:
                return self._compile().asm["ttgir"]
            except EndedError as ended:
                return str(ended.module)

    @functools.cached_property
    def _assembly(self) -> Any:
        with to_assembly():
            return self._compile()

    def _compile(self) -> Any:
        return triton.compile(self.source, target=self.gpu, options=dict(self.options.__dict__))

    @property
    def ttgir(self) -> str:
        """Triton's GPU dialect."""
        return self._assembly.asm["ttgir"]

    @property
    def code(self) -> str:
        """The assembly (PTX or AMD's)."""
        return self._assembly.asm["ptx" if self.gpu.backend == "cuda" else "amdgcn"]

    @property
    def shared_bytes(self) -> int:
        """Shared memory (LDS) of a program."""
        return self._assembly.metadata.shared

    @functools.cached_property
    def cubin(self) -> bytes:
        """NVIDIA's machine code, which Triton's cache keeps by the assembly."""
        backend = make_backend(self.gpu)
        key = f"{self.code}{self.options.hash()}{backend.hash()}"
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        made = cache.get_file("cubin") or cache.put(
            backend.make_cubin(self.code, {}, self.options, self.gpu.arch), "cubin"
        )
        return Path(made).read_bytes()

    @property
    def registers(self) -> int:
        """Registers of a thread, as the assembler allotted them."""
        return self._resources[0]

    @property
    def scratch_bytes(self) -> int:
        """Memory that a thread spills to."""
        return self._resources[1]

    @functools.cached_property
    def _resources(self) -> tuple[int, int]:
        return _nvidia_resources(self.cubin) if self.gpu.backend == "cuda" else _amd_resources(self.code)

    def count(self, pattern: str) -> int:
        """Return how often a regular expression matches in the assembly."""
        return len(re.findall(pattern, self.code))

    def main_loops(self) -> list[list[str]]:
        """Return the instructions of each innermost loop of sm_90's machine code that multiplies, by name.

        A wait for multiplications has how many may go on behind its name.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        names = [" ".join(filter(None, found.groups())) if (found := _SASS.match(line)) else "" for line in lines]
        labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith(".L_")}
        loops: list[range] = []
        for number, line in enumerate(lines):
            target = re.search(r"BRA(?:\.U)? `\((\.L_\w+)\)", line)
            loop = range(labels[target.group(1)] if target else number, number)
            # Where the program has ended it goes on with what waits for barriers: that comes back into loops.
            is_loop = "EXIT" not in names[loop.start : loop.stop]
            if is_loop and any("GMMA" in name for name in names[loop.start : loop.stop]):
                loops.append(loop)
        innermost = [
            one
            for one in loops
            if not any(other != one and other.start >= one.start and other.stop <= one.stop for other in loops)
        ]
        return [[name for name in names[loop.start : loop.stop] if name] for loop in innermost]

    def stores_by_file(self) -> dict[str, Counter[int]]:
        """Return the global stores' widths in bytes and their numbers, by the source file they come from."""
        found: dict[str, Counter[int]] = defaultdict(Counter)
        for file, line in self._lines_by_file():
            if store := _STORE.search(line):
                found[file][_width(*store.groups())] += 1
        return dict(found)

    def files_that_load(self, kind: str) -> set[str]:
        """Return the source files that loads of several words come from; of PTX's `kind`, such as "global.cg"."""
        load = re.compile(rf"\bld\.{kind}\.v\d\.")
        return {file for file, line in self._lines_by_file() if load.search(line)}

    def _lines_by_file(self) -> Iterator[tuple[str, str]]:
        """Give each line of the assembly, and the source file it comes from."""
        files = dict(re.findall(r'\.file\s+(\d+)\s+.*?([^/"]+)"\n', self.code))
        file = ""
        for line in self.code.splitlines():
            if location := re.match(r"\s*\.loc\s+(\d+)", line):
                file = files[location.group(1)]
            else:
                yield file, line


# PTX: st.global.v4.b32; AMD: global_store_dwordx4, buffer_store_short, ...
_STORE = re.compile(
    r"\bst\.(?:\w+\.)*?global(?:\.\w+)*?(?:\.v(\d))?\.[bfusx]+(\d+)\b|(?:global|buffer|flat)_store_(\w+)"
)
_SASS = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(?: gsb0, 0x(\d))?")
_AMD_WIDTHS = {"byte": 1, "short": 2, "short_d16_hi": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _width(vector: str | None, bits: str | None, amd: str | None) -> int:
    return _AMD_WIDTHS[amd] if amd else int(vector or 1) * int(bits or 0) // 8


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd_resources(code: str) -> tuple[int, int]:
    def value(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", code)
        assert found, f"{name} is not in the assembly"
        return int(found.group(1))

    # Scalar registers spill into lanes of vector registers, not into memory.
    return value("TotalNumVgprs"), value("ScratchSize") + 4 * value("vgpr_spill_count")
