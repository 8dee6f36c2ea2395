"""The only code that touches a model's tensors: copy fragments out, add corrections in (format §6.1).

::

    binding = ModelBinding(model, layout)
    value = binding.snapshot(3)               # host copy, at a step border
    binding.add(3, correction)                # theta <- theta + c
    binding.replace(3, value)                 # theta <- value

Parameters of a short type (bfloat16, float16) have a float32 **shadow** S, and S is what format §6.1 calls theta: in the short type most corrections
would round to nothing. Whenever the binding is called, S first takes in what the inner optimizer, or anybody else, did to the parameter since the last
call, and afterwards the parameter is S rounded. What it was then is therefore known without a second copy: it is S, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ps_diloco.errors import LayoutError
from ps_diloco.fragment import FragmentValue
from ps_diloco.host import HostBuffers
from ps_diloco.layout import ROLE_ARRAY, Layout, LayoutEntry, Role, plain_name

_ARRAYS = {"elements": "params", "floats": "floats", "ints": "ints", "frozen": "frozen"}
_ROLES: tuple[Role, ...] = ("parameter", "float_buffer", "int_buffer", "frozen")


@dataclass(slots=True)
class _Bound:
    """An entry of the layout, and where the model keeps its tensor: a program may give a parameter new storage at any time."""

    entry: LayoutEntry
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    strides: tuple[int, ...]
    """Of its place in the array of its role, from ``offset`` on: row-major."""
    holder: dict[str, torch.Tensor | None]
    """``_parameters`` or ``_buffers`` of its module."""
    name: str
    shadow: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """As the model has it now, apart from autograd."""
        return self.checked().detach()

    def checked(self) -> torch.Tensor:
        """As the model has it now. Raises :class:`LayoutError` if it is not what it was when the unit joined."""
        tensor = self.holder.get(self.name)
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise LayoutError(
                "a tensor of the model has changed since it joined",
                name=self.entry.name,
                now=None if tensor is None else (tuple(tensor.shape), tensor.dtype),
                joined_with=(self.entry.shape, self.dtype),
                remedy="change values in place, and shapes and dtypes only before joining",
            )
        if tensor.requires_grad and self.entry.role == "frozen":
            raise LayoutError(
                "a parameter that is frozen in this run is being trained: it would never be exchanged",
                name=self.entry.name,
                remedy="freeze it again, or create a run in which it is trainable",
            )
        return tensor


class ModelBinding:
    """A model seen through a layout. Every method but :meth:`recycle` runs on the training thread, between two inner steps; no I/O."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """``layout`` is the model's own (:func:`~ps_diloco.layout.check_same_layout`)."""
        self.layout = layout
        holders: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for name in holder:
                    holders[plain_name(f"{path}.{name}" if path else name)] = (holder, name)
        self._bound: list[dict[Role, list[_Bound]]] = [{role: [] for role in _ROLES} for _ in layout.fragments]
        for entry in layout.entries:
            holder, name = holders[entry.name]
            strides = torch.empty(entry.shape, device="meta").stride()
            bound = _Bound(entry, torch.Size(entry.shape), getattr(torch, entry.dtype), entry.offset, strides, holder, name)
            if entry.role == "parameter" and bound.dtype != torch.float32:
                bound.shadow = bound.tensor().to(torch.float32, copy=True)
            self._bound[entry.fragment][entry.role].append(bound)
        on_gpu = any(bound.tensor().is_cuda for roles in self._bound for bound in roles["parameter"])
        self._host = HostBuffers(max(size.elements for size in layout.fragments), pinned=on_gpu)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Trainable parameter -> name of its entry."""
        trained = (bound for roles in self._bound for bound in roles["parameter"])
        return {tensor: bound.entry.name for bound in trained if (tensor := bound.holder[bound.name]) is not None}

    def snapshot(self, fragment: int, *, frozen: bool = True) -> FragmentValue:
        """Copy a fragment to host arrays that are the caller's; without ``frozen``, only what is exchanged, and that array is empty.

        Parameters of a short type are given as their shadows. Whoever is done with the value may :meth:`recycle` it.
        """
        size = self.layout.fragments[fragment]
        value = FragmentValue(
            params=self._host.take(size.elements),
            floats=torch.empty(size.floats, dtype=torch.float32),
            ints=torch.empty(size.ints, dtype=torch.int64),
            frozen=torch.empty(size.frozen if frozen else 0, dtype=torch.float32),
        )
        pending: set[torch.device] = set()
        together = self._together(fragment)
        if together is not None:
            with torch.no_grad():
                torch._foreach_copy_(_shaped(value.params, together), together, non_blocking=together[0].is_cuda)
            if together[0].is_cuda:
                pending.add(together[0].device)
        for role in _ROLES if frozen else _ROLES[:-1]:
            if role == "parameter" and together is not None:
                continue
            for bound, part in self._parts(fragment, role, value):
                tensor = bound.tensor()
                source = tensor if bound.shadow is None else _take_in(bound, tensor)
                part.copy_(source, non_blocking=source.is_cuda)
                if source.is_cuda:
                    pending.add(source.device)
                if bound.shadow is not None:
                    tensor.copy_(source)
        if not frozen:
            for bound in self._bound[fragment]["frozen"]:
                bound.tensor()  # raises if it is being trained
        for device in pending:
            torch.cuda.current_stream(device).synchronize()
        return value

    def recycle(self, value: FragmentValue) -> None:
        """Give back the memory of a snapshot's parameters, which nobody may read any more. Safe from any thread."""
        self._host.give(value.params)

    def add(self, fragment: int, correction_F: torch.Tensor) -> None:
        """Add a flat host correction to the parameters, in place."""
        together = self._together(fragment)
        if together is not None:
            near_F = correction_F.to(together[0].device, non_blocking=True)
            with torch.no_grad():
                torch._foreach_add_(together, _shaped(near_F, together))
            return
        for bound, part in self._parts(fragment, "parameter", correction_F):
            tensor = bound.tensor()
            if tensor.is_cuda:
                part = part.to(tensor.device, non_blocking=True)
            if bound.shadow is None:
                tensor.add_(part)
            else:
                tensor.copy_(_take_in(bound, tensor).add_(part))

    def adopt_buffers(self, fragment: int, floats_B: torch.Tensor, ints_I: torch.Tensor) -> None:
        """Float buffers become the global ones, integer buffers the larger of both."""
        for bound, part in self._parts(fragment, "float_buffer", floats_B):
            bound.tensor().copy_(part)
        for bound, part in self._parts(fragment, "int_buffer", ints_I):
            tensor = bound.tensor()
            tensor.copy_(torch.maximum(tensor.to(torch.int64), part.to(tensor.device)))

    def replace(self, fragment: int, value: FragmentValue) -> None:
        """Set every tensor of a fragment, frozen parameters included, to the given value."""
        for role in _ROLES:
            for bound, part in self._parts(fragment, role, value):
                tensor = bound.tensor()
                if bound.shadow is not None:
                    part = bound.shadow = bound.shadow.to(tensor.device).copy_(part)
                tensor.copy_(part)

    def _together(self, fragment: int) -> list[torch.Tensor] | None:
        """The parameters, in the order of their offsets, if one call can handle them all: float32 on one device. (A call for each costs up to ten
        microseconds, which for a model of many small tensors is most of it.)"""
        entries = self._bound[fragment]["parameter"]
        if any(bound.shadow is not None for bound in entries):
            return None
        tensors = [bound.checked() for bound in entries]
        return tensors if tensors and all(tensor.device == tensors[0].device for tensor in tensors) else None

    def _parts(self, fragment: int, role: Role, values: FragmentValue | torch.Tensor) -> Iterator[tuple[_Bound, torch.Tensor]]:
        """The entries of a role, each with its elements of a flat array, in its shape. (One call each: to slice and then to view takes four times as long.)"""
        array = values if isinstance(values, torch.Tensor) else getattr(values, _ARRAYS[ROLE_ARRAY[role]])
        assert array.is_contiguous() and array.numel() == getattr(self.layout.fragments[fragment], ROLE_ARRAY[role])
        start = array.storage_offset()
        for bound in self._bound[fragment][role]:
            yield bound, array.as_strided(bound.shape, bound.strides, start + bound.offset)


def _shaped(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat array, one after the other, with the shapes of ``like``; one call, as it is made for gradients of data-parallel training."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


def _take_in(bound: _Bound, tensor: torch.Tensor) -> torch.Tensor:
    """S <- theta + (S - round(S)), in float32, and return S. The caller then sets theta to round(S).

    That is S + (theta - what theta was at the last call), rounded once: S - round(S), what theta lacks, is exact. Where it is no number, because theta was
    none or S is beyond the short type, S becomes theta: so a cut reports a model that is not finite, and one that was mended is as good as new.
    """
    assert bound.shadow is not None
    shadow = bound.shadow = bound.shadow.to(tensor.device)
    return shadow.sub_(shadow.to(bound.dtype)).nan_to_num_(0.0, 0.0, 0.0).add_(tensor)
