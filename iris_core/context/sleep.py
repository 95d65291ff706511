"""Sleep: a context without memory behind its heap, whose addresses stay; see `Context.sleep` and `Context.wake`."""

from __future__ import annotations

from .context import Context


def sleep(ctx: Context) -> None:
    """Give the heap's memory back, on all ranks; collective.

    Raises:
        RuntimeError: memory of another allocator is on the heap; names it.
    """
    ctx.barrier()
    with ctx.control_plane.collective_section("look for memory of other allocators on the heap"):
        _check_own(ctx)
    ctx.recovery.is_asleep = True
    with ctx.control_plane.collective_section("give the heap's memory back"):
        ctx.heap.release_memory()


def wake(ctx: Context) -> None:
    """Give the heap memory, all zeroes, and start the ranks' calls anew; collective. Awake, it does nothing."""
    if ctx.recovery.is_closed or not ctx.recovery.is_asleep:
        return ctx.recovery.check_open()
    if ctx.control_plane.failure is not None:
        ctx.control_plane.rejoin()
    try:
        ctx.heap.map_memory()
        ctx.recovery.start_anew("wake")
    except BaseException:
        ctx.heap.release_memory()
        raise
    ctx.recovery.is_asleep = False


def _check_own(ctx: Context) -> None:
    """Raise RuntimeError where the heap has memory of another allocator, which is not its own to give back."""
    if ctx.provider is not None:
        raise RuntimeError(
            f"the heap is made of memory of a provider, {ctx.provider}, which a context that sleeps cannot give back; "
            "close() the context, or make it without provider="
        )
    if shared := ctx.heap.shared():
        raise RuntimeError(
            f"the heap shares memory of another allocator, of {', '.join(shared)}, which a context that sleeps cannot "
            "give back; free() what as_symmetric has returned before, and share it again after wake()"
        )
