"""A device that is not there: tensors that say they are on it, with values kept on the CPU.

Inside :class:`Device`, tensors on the ``meta`` device have values, and everything can be computed
with them that can be on a GPU. What could not be, an operation on tensors of two devices, raises.
What makes the host wait for the device is counted, with the line of the package that asked for it.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

import laplace_invariance

aten = torch.ops.aten
DEVICE = torch.device("meta")
PACKAGE = str(Path(laplace_invariance.__file__).parent)

# Operations whose result the host needs: a number, or a size.
WAITING = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "allclose",
    "equal",
    "linalg_eigvals",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
# Operations that take indices from the host, which are then copied.
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}
COPYING = {"copy_", "_to_copy"}


class OnDevice(Tensor):
    """A tensor on the device, whose values are those of a tensor on the CPU."""

    @staticmethod
    def __new__(cls, values, requires_grad=False):
        return Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, values, requires_grad=False):
        self.values_on_cpu = values

    def tolist(self):
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, Device.current)


class Device(TorchDispatchMode):
    """Let computations run on the device inside the context.

    Attributes:
        waits: Number of times that the host waited, by place in the package and operation.
        operations: Number of times that operations were run, on the device and on the CPU.
    """

    current = None

    def __init__(self):
        super().__init__()
        self.waits = Counter()
        self.operations = Counter()
        self._lists = _Lists()

    def __enter__(self):
        Device.current = self
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._lists.__exit__(*error)
        Device.current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, self)

    def put(self, thing):
        """Return a tensor, or a module with all that it has, on the device."""
        if isinstance(thing, Tensor):
            return OnDevice(thing.detach().clone(), thing.requires_grad)
        for module in thing.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    values = OnDevice(parameter.detach().clone())
                    module._parameters[name] = nn.Parameter(values, parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.put(buffer)
        return thing


class _Lists(TorchFunctionMode):
    """Make tensors of lists on the CPU, and copy them; torch makes none on ``meta``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if name == "new_tensor" and isinstance(args[0], OnDevice):
            like, values = args
            return torch.tensor(values, dtype=kwargs.get("dtype", like.dtype)).to(like.device)
        return func(*args, **kwargs)


def on_cpu(thing):
    """Return tensors in any structure as tensors on the CPU."""
    return _mapped(lambda tensor: getattr(tensor, "values_on_cpu", tensor), thing)


def _mapped(function, thing):
    """Apply a function to all tensors; several times faster than what torch has for that."""
    if isinstance(thing, Tensor):
        return function(thing)
    if isinstance(thing, list | tuple):
        return type(thing)([_mapped(function, entry) for entry in thing])
    if isinstance(thing, dict):
        return {key: _mapped(function, entry) for key, entry in thing.items()}
    return thing


def _run(func, args, kwargs, device):
    """Run an operation on the values, and put its results where they belong."""
    tensors = []
    _mapped(tensors.append, (args, kwargs))
    there = [t for t in tensors if isinstance(t, OnDevice)]
    here = [t for t in tensors if not isinstance(t, OnDevice)]
    name = func.overloadpacket.__name__
    _check_devices(func, name, there, here)
    if device is not None:
        device.operations[name] += 1
    if device is not None and _waits(name, args, kwargs, there, here):
        device.waits[f"{_place()}: {name}"] += 1
    belongs, arguments = bool(there), dict(kwargs)
    if arguments.get("device") is not None:
        belongs = torch.device(arguments["device"]) == DEVICE
        arguments["device"] = torch.device("cpu")
    args_here, arguments = on_cpu((args, arguments))
    found = func(*args_here, **arguments)
    if not belongs:
        return found
    found = _mapped(OnDevice, found)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check_devices(func, name, there, here):
    """Raise if tensors are on several devices, but for what a GPU allows as well."""
    if not there or name in COPYING or name in INDEXING:
        return
    for tensor in here:
        if tensor.ndim or torch.Tag.pointwise not in func.tags:
            raise RuntimeError(f"{func} on tensors of the CPU and of the device, at {_place()}")


def _waits(name, args, kwargs, there, here):
    """Return whether the host waits for the device, or copies something of its own to it."""
    if name == "_to_copy":
        device = kwargs.get("device")
        moves = device is not None and torch.device(device) != args[0].device
        return moves and not (here and kwargs.get("non_blocking"))
    if name == "copy_":
        blocking = len(args) < 3 or not args[2]
        return bool(there and here) and (blocking or isinstance(args[1], OnDevice))
    if not there:
        return False
    if name in INDEXING:
        indices = [index for index in args[1] if index is not None]
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        return masked or any(not isinstance(index, OnDevice) for index in indices)
    by_tensor = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name in WAITING or by_tensor


def _place():
    """Return the innermost line of the package that is being run."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the package"
