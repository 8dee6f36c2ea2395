"""The only code that touches a model's tensors: copy fragments out, add corrections in (format §6.1).

::

    binding = ModelBinding(model, layout)
    value = binding.snapshot(3)               # host copy, at a step border
    binding.add(3, correction)                # theta <- theta + c
    binding.replace(3, value)                 # theta <- value
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ps_diloco.errors import LayoutError
from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import ROLE_ARRAY, Layout, LayoutEntry, Role, plain_name, stored_tensors

_ARRAYS = {"elements": "params", "floats": "floats", "ints": "ints", "frozen": "frozen"}
_ROLES: tuple[Role, ...] = ("parameter", "float_buffer", "int_buffer", "frozen")


class ModelBinding:
    """A model seen through a layout. Every method runs on the training thread, between two inner steps; no I/O."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Raises :class:`LayoutError` unless every trainable parameter is float32."""
        self.layout = layout
        tensors = stored_tensors(model)
        self._owners = {
            plain_name(f"{path}.{name}" if path else name): (module, name)
            for path, module in model.named_modules(remove_duplicate=False)
            for name in (*module._parameters, *module._buffers)
        }
        self._entries: list[dict[Role, tuple[LayoutEntry, ...]]] = [
            {role: layout.of(fragment, role) for role in _ROLES} for fragment in range(len(layout.fragments))
        ]
        for entry in layout.entries:
            if entry.role == "parameter" and tensors[entry.name][0].dtype != torch.float32:
                raise LayoutError(
                    "trainable parameters are float32: in a shorter type most outer updates round to nothing",
                    name=entry.name,
                    dtype=entry.dtype,
                    remedy="keep float32 parameters and compute in a shorter type with torch.autocast",
                )

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Trainable parameter -> name of its entry."""
        return {getattr(*self._owners[entry.name]): entry.name for entry in self.layout.entries if entry.role == "parameter"}

    def _tensors(self, fragment: int, role: Role) -> Iterator[tuple[LayoutEntry, torch.Tensor]]:
        """The tensors as the model has them now: a program may give a parameter new storage at any time."""
        for entry in self._entries[fragment][role]:
            tensor = getattr(*self._owners[entry.name])
            if tuple(tensor.shape) != entry.shape or str(tensor.dtype).removeprefix("torch.") != entry.dtype:
                raise LayoutError(
                    "a tensor of the model has changed since it joined",
                    name=entry.name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    joined_with=(entry.shape, entry.dtype),
                )
            yield entry, tensor.detach()

    def snapshot(self, fragment: int) -> FragmentValue:
        """Copy a fragment to new host arrays."""
        value = FragmentValue.zeros(self.layout.fragments[fragment])
        for role in _ROLES:
            array = getattr(value, _ARRAYS[ROLE_ARRAY[role]])
            for entry, tensor in self._tensors(fragment, role):
                array[entry.offset : entry.offset + entry.size].view(entry.shape).copy_(tensor)
        return value

    def add(self, fragment: int, correction_F: torch.Tensor) -> None:
        """Add a flat host correction to the parameters, in place."""
        for entry, tensor in self._tensors(fragment, "parameter"):
            tensor.add_(correction_F[entry.offset : entry.offset + entry.size].view(entry.shape).to(tensor.device, non_blocking=True))

    def adopt_buffers(self, fragment: int, floats_B: torch.Tensor, ints_I: torch.Tensor) -> None:
        """Float buffers become the global ones, integer buffers the larger of both."""
        for entry, tensor in self._tensors(fragment, "float_buffer"):
            tensor.copy_(floats_B[entry.offset : entry.offset + entry.size].view(entry.shape))
        for entry, tensor in self._tensors(fragment, "int_buffer"):
            theirs = ints_I[entry.offset : entry.offset + entry.size].view(entry.shape).to(tensor.device, tensor.dtype)
            tensor.copy_(torch.maximum(tensor, theirs))

    def replace(self, fragment: int, value: FragmentValue) -> None:
        """Set every tensor of a fragment, frozen parameters included, to the given value."""
        for role in _ROLES:
            array = getattr(value, _ARRAYS[ROLE_ARRAY[role]])
            for entry, tensor in self._tensors(fragment, role):
                tensor.copy_(array[entry.offset : entry.offset + entry.size].view(entry.shape))
