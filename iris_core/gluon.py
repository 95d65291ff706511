"""The symmetric heap for kernels in Gluon: their context object, beside the function that makes a rank's `Context`."""

from .context.opening import iris
from .device.context import IrisDeviceCtx

__all__ = ["IrisDeviceCtx", "iris"]
