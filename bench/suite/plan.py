"""The plan of ``iris-bench measure``: an entry per CSV, in the order in which they are measured.

What others go by comes first: `ideal_us` needs the links. Then a little of everything, so that a run that ends early
has it; the sets of many problems come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMCHECK = "memcheck"
_STARTS_OVER = ("litmus", "stress")  # commands without --resume


@dataclass(frozen=True)
class Entry:
    """A CSV and what makes it.

    Args:
        name: of the file, without its end; ``--only`` takes it, or one of its words.
        commands: arguments of ``iris-bench``, one command after the other into the one file.
        of_2_s, of_4_s: seconds that all of them take on 2 and on 4 H200s: predicted, compiling included.
        multiple_of: the number of ranks is a multiple of this.
    """

    name: str
    commands: tuple[str, ...]
    of_2_s: int
    of_4_s: int
    multiple_of: int = 1

    @property
    def resumes(self) -> bool:
        """Whether it goes on where it was ended; else it starts over."""
        return not any(command.split()[0] in _STARTS_OVER for command in self.commands)

    def seconds(self, world_size: int) -> float:
        """Return how long it should take on so many ranks."""
        return self.of_2_s if world_size < 4 else self.of_4_s


_FEW = "--rounds 10 --burst 5"
_FP8 = f"run --dtype fp8 {_FEW} --shapes"
_MODEL = "decoder --rounds 5 --burst 3 --model"

GPU_PLAN = (
    Entry("links", ("links --mib 0.00390625,0.0625,1,16,64,256,1024",), 45, 120),
    Entry("llama-bf16", (f"run --shapes llama {_FEW}",), 155, 155),
    Entry("paper-bf16", (f"run --family gemm_all_scatter --shapes paper {_FEW}",), 40, 35),
    Entry("square-bf16", (f"run --shapes square {_FEW}",), 95, 90),
    Entry(
        "decoder",
        (
            f"{_MODEL} llama-3-8b --layers 4 --phase prefill,decode,train --mode compiled_replayed",
            f"{_MODEL} llama-3-8b --layers 4 --phase prefill,train --mode compiled",
        ),
        325,
        400,
    ),
    Entry(
        "decoder-70b",
        (
            f"{_MODEL} llama-3-70b --layers 2 --phase prefill,decode --prefill 1x8192 --decode 8x2048 "
            "--mode compiled,compiled_replayed,replayed",
        ),
        95,
        95,
    ),
    Entry(
        "fp8-row",
        (f"{_FP8} square,llama,64x8192x8192,64x28672x8192,512x8192x8192,512x8192x28672,512x28672x8192 --scales row",),
        245,
        245,
    ),
    Entry("fp8-block", (f"{_FP8} 4096x4096x4096,8192x8192x8192,8192x28672x8192 --scales block",), 65, 65),
    Entry(
        "fp8-fast",
        (f"{_FP8} 4096x4096x4096,8192x8192x8192,8192x28672x8192,8192x8192x28672 --scales row --fast-accum",),
        90,
        90,
    ),
    Entry(
        "decoder-fp8",
        (
            f"{_MODEL} llama-3-8b --layers 2 --dtype fp8 --phase prefill,decode --prefill 1x8192 --decode 8x2048 "
            "--mode compiled_replayed",
        ),
        90,
        90,
    ),
    Entry("ccl", ("ccl --kind all_reduce,all_gather,reduce_scatter,all_to_all --rounds 10",), 40, 50),
    Entry(
        "ccl-variants",
        ("ccl --kind all_reduce,reduce_scatter --kib 16384,65536,262144 --variant all --rounds 6",),
        30,
        30,
    ),
    Entry(
        "norm",
        (
            "norm --rounds 8 --shapes 1x8192x8192,8x4096x14336,64x8192x8192,64x8192x28672,512x4096x4096,"
            "512x8192x28672,4096x4096x14336",
        ),
        65,
        65,
    ),
    Entry("host", ("host",), 50, 60, 2),
    Entry(
        "epilogue-bf16",
        (
            f"run --shapes 4096x4096x4096,64x8192x8192 {_FEW}",
            f"run --shapes 4096x4096x4096,64x8192x8192 {_FEW} --epilogue bias,gelu_tanh",
        ),
        110,
        110,
    ),
    Entry(
        "two-hosts-bf16",
        (f"run --hosts 2 --variant auto,library_layout --shapes llama,8192x8192x8192 {_FEW}",),
        60,
        60,
        2,
    ),
    Entry("litmus", ("litmus",), 30, 30, 2),
    Entry("stress", ("stress --seconds 60",), 190, 190),
    Entry("layers-bf16", (f"run --shapes layers {_FEW}",), 190, 190),
    Entry("layers-by-m-bf16", (f"run --shapes layers_by_m {_FEW}",), 245, 245),
    Entry("auto-held-out-bf16", (f"run --shapes held_out --every 4 {_FEW}",), 290, 290),
    Entry("small-m-bf16", (f"run --shapes small_m {_FEW}",), 350, 350),
    Entry("mid-m-bf16", (f"run --shapes mid_m {_FEW}",), 290, 290),
    Entry("ragged-bf16", (f"run --shapes ragged {_FEW}",), 165, 165),
    Entry(MEMCHECK, ("memcheck",), 700, 1100),  # under the sanitizer all is slow, and each variant starts ranks
)

# Enough to see that the command works where there is no GPU: its times are not performance.
CPU_PLAN = (
    Entry("links", ("links",), 15, 15),
    Entry("smoke-fp32", ("run --family gemm_all_scatter --shapes 33x37x41,1x64x32 --dtype fp32",), 30, 30),
    Entry("ccl", ("ccl --kib 1 --kind broadcast",), 15, 15),
    Entry("stress", ("stress --calls 20 --family gemm_all_scatter --dtype fp32",), 30, 30),
)


def select(plan: Sequence[Entry], only: str, world_size: int) -> list[Entry]:
    """Return the entries of a plan that can be measured on so many ranks, or of these those that are named.

    Args:
        plan: all entries.
        only: "all", or names and words of names by commas: "fp8" stands for fp8-row, decoder-fp8, …, "two-hosts" for
            two-hosts-bf16.
        world_size: the number of ranks.

    Raises:
        ValueError: a name stands for no entry, or for none of so many ranks.
    """
    possible = [entry for entry in plan if world_size % entry.multiple_of == 0]
    if only == "all":
        return possible
    wanted = [part.strip() for part in only.split(",")]
    for name in wanted:
        if not any(_is_named(entry, name) for entry in possible):
            names = ", ".join(entry.name for entry in possible)
            raise ValueError(
                f"--only {name} names no measurement on {world_size} ranks; there are {names}, and their words"
            )
    return [entry for entry in possible if any(_is_named(entry, name) for name in wanted)]


def _is_named(entry: Entry, name: str) -> bool:
    return f"-{name}-" in f"-{entry.name}-"
