"""The symmetric heap for kernels in Gluon: their context object, beside the function that makes a rank's `Context`."""

from .device.context import IrisDeviceCtx
from .opening import iris

__all__ = ["IrisDeviceCtx", "iris"]
