"""A compiled kernel whose launches are prepared: what Triton's launcher is to be handed, worked out once.

| Triton | its launcher | takes the kernel's arguments |
|---|---|---|
| 3.6 | a module compiled for the kernel's signature | one by one, behind the rest |
| 3.7 to 3.9 | a function of the driver's | as one tuple, behind what says of which types they are |

With 3.7 to 3.9 this was called with a driver that is not there, and not run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton

from ..backends.base import Step

KNOWN = ("3.6", "3.7", "3.8", "3.9")
_NO_SCRATCH = (None, None)
_NO_HOOKS = (None, None, None)  # launch metadata, and a hook before and one behind: `Calls.are_prepared`
_FORMAT = "iiiKKppOOOOOO"  # of what the launcher of 3.6 takes before the kernel's arguments


def compiled_kernel(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return Triton's compiled kernel for such a launch; nothing is launched.

    Args:
        kernel: the jit function.
        num_programs: of the grid.
        arguments: the kernel's, by name.
        options: of the launch, such as ``num_warps``.
    """
    compiled = kernel.run(grid=(num_programs,), warmup=True, **arguments, **options)
    return compiled.result() if hasattr(compiled, "result") else compiled  # a promise, while others compile it


class LoadedKernel:
    """A compiled kernel whose launches can be prepared.

    Args:
        compiled: Triton's compiled kernel; it is loaded here.

    Raises:
        RuntimeError: this is no Triton that the preparation was written for.
    """

    def __init__(self, compiled: Any) -> None:
        launcher = compiled.run  # made, and the kernel loaded, when it is first asked for
        needs_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        version = ".".join(triton.__version__.split(".")[:2])
        found = _compiled_launcher(compiled) if version == KNOWN[0] else _drivers_launcher(compiled)
        if version not in KNOWN or found is None or needs_scratch:
            raise RuntimeError(
                f"launches cannot be prepared with Triton {triton.__version__}: its launcher takes other arguments "
                f"than those of Triton {', '.join(KNOWN)}, or the kernel asks for scratch memory; "
                "install triton>=3.6,<3.9"
            )
        self._enter, self._behind_stream, self._expander = found
        self._signature, self._metadata = _descriptors(compiled)

    def launching(self, num_programs: int, stream: int | Callable[[], int], arguments: list[Any]) -> Step:
        """Prepare a launch.

        Args:
            num_programs: of the grid.
            stream: the driver's handle of the stream, or what gives it when the step is called.
            arguments: the kernel's, in the order of its signature.
        """
        expanded = self._expander(self._signature, self._metadata)(arguments)
        return self.launching_expanded(num_programs, stream, _numbers(expanded))

    def launching_expanded(
        self, num_programs: int, stream: int | Callable[[], int], arguments: tuple[Any, ...]
    ) -> Step:
        """Prepare a launch; as `launching`, with addresses for tensors, and descriptors expanded (`expanding`)."""
        enter, rest = self._enter, self._behind_stream(arguments)
        if callable(stream):
            return lambda: enter(num_programs, 1, 1, stream(), *rest)
        return functools.partial(enter, num_programs, 1, 1, stream, *rest)

    def expanding(self, index: int) -> Expand:
        """Return what makes of the address, shape and strides of a tensor descriptor what the launcher takes for it.

        On GPUs with TMA that is the encoded descriptor, its shape and its strides; elsewhere the first is its base.

        Args:
            index: of the descriptor among the kernel's arguments.
        """
        types = [*self._signature.values()]
        metadata = None
        if self._metadata:
            metadata = self._metadata[sum(_is_descriptor(one) for one in types[:index])]
            if encode := _encoding(metadata):
                return encode
        expand = self._expander({0: types[index]}, [metadata] if metadata else None)
        return lambda address, shape, strides: tuple(_numbers(expand([_Described(address, shape, strides)])))


Expand = Callable[[int, tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]


class _Described:
    """A tensor descriptor of what lies at an address; elements past the end are zeros."""

    padding = "zero"
    round_f32_to_tf32 = False  # asked for from Triton 3.9 on

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.base, self.shape, self.strides = _Address(address), shape, strides


class _Address:
    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


# What enters the kernel; what it takes behind the grid and the stream, of the kernel's expanded arguments; and what
# makes, of the types of arguments and what is known of descriptors among them, what expands such arguments.
_Found = tuple[
    Callable[..., object],
    Callable[[tuple[Any, ...]], tuple[Any, ...]],
    Callable[[Any, Any], Callable[[list[Any]], tuple[Any, ...]]],
]


def _compiled_launcher(compiled: Any) -> _Found | None:
    """Return what launches a kernel in Triton 3.6."""
    from triton.backends.nvidia import driver

    launcher = compiled.run
    enter = getattr(launcher, "launch", None)
    if inspect.isfunction(enter):  # which expands descriptors, and then enters
        enter = inspect.getclosurevars(enter).nonlocals.get("launcher")
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _FORMAT or not callable(enter):
        return None
    how = (*_kernel(compiled), *_NO_SCRATCH, compiled.packed_metadata, *_NO_HOOKS)

    def expander(signature: Any, metadata: Any) -> Callable[[list[Any]], tuple[Any, ...]]:
        expand = driver.wrap_handle_tensordesc(lambda *expanded: expanded[len(_FORMAT) :], signature, metadata)
        return lambda arguments: expand(*_FORMAT, *arguments)

    return enter, lambda arguments: (*how, *arguments), expander


def _drivers_launcher(compiled: Any) -> _Found | None:
    """Return what launches a kernel from Triton 3.7 on."""
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime

    launcher, enter = compiled.run, getattr(runtime.active.utils, "launch", None)
    if not hasattr(launcher, "arg_annotations") or not hasattr(launcher, "kernel_signature") or not callable(enter):
        return None
    how = (*_kernel(compiled), compiled.packed_metadata, *_NO_HOOKS, *_NO_SCRATCH)
    types = (launcher.arg_annotations, launcher.kernel_signature)

    def expander(signature: Any, metadata: Any) -> Callable[[list[Any]], tuple[Any, ...]]:
        expand = driver.wrap_handle_tensordesc(lambda *expanded: expanded[-1], signature, metadata)
        return lambda arguments: tuple(expand(arguments))

    return enter, lambda arguments: (*how, *types, arguments), expander


def _encoding(metadata: dict[str, Any]) -> Expand | None:
    """Return what encodes descriptors as Triton does in `make_tensordesc_arg`, in a third of its time."""
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime

    utils = runtime.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", getattr(utils, "fill_tma_descriptor", None))  # the latter: 3.6
    if encode is None or metadata["fp4_padded"] or metadata.get("is_im2col"):
        return None
    swizzle, size, block = metadata["swizzle"], metadata["elem_size"], metadata["block_size"]
    dtype, padding = driver.TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]], 0

    def encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
        return (encode(address, swizzle, size, dtype, block, shape, strides, padding), *shape, *strides)

    return encoded


def _is_descriptor(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _descriptors(compiled: Any) -> tuple[Any, Any]:
    return compiled.src.signature, getattr(compiled.metadata, "tensordesc_meta", None)


def _kernel(compiled: Any) -> tuple[Any, ...]:
    return compiled.function, compiled.run.launch_cooperative_grid, compiled.run.launch_pdl


def _numbers(argument: Any) -> Any:
    """Return an argument with addresses in place of tensors, so that it keeps no memory and needs no look-up."""
    if argument is None or type(argument) is int:  # most are
        return argument
    if isinstance(argument, (tuple, list)):
        return tuple([_numbers(one) for one in argument])
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument
