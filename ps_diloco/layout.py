"""Which parameter lives where in which fragment (format §5.2).

A layout is made once from a model, stored in ``run.json``, and compared with the model of whoever joins::

    layout = build_layout(model, num_fragments=4)
    check_same_layout(run.layout, build_layout(other_model, num_fragments=4))
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from torch import nn
from torch.nn.parameter import is_lazy

from ps_diloco.errors import LayoutError

FRAGMENTS_MAX = 64
ELEMENTS_MAX = 2**36
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What float32 holds exactly, and training uses."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool)
"""What int64 holds exactly."""
ONE_RANK = "keep each unit's parameters whole, on one rank; more GPUs can be more units"
Role = Literal["parameter", "float_buffer", "int_buffer", "frozen"]
Size = Annotated[int, Field(ge=0, le=ELEMENTS_MAX)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class LayoutEntry(_Part):
    """One stored tensor: its place is ``[offset, offset + size)`` of its role's array in ``fragment``."""

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    shape: Annotated[tuple[Size, ...], FailFast(), Field(max_length=64)]
    dtype: Annotated[str, Field(max_length=20)]
    role: Role
    fragment: Annotated[int, Field(ge=0, lt=FRAGMENTS_MAX)]
    offset: Size
    aliases: tuple[str, ...]
    embedding: bool

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


class FragmentSize(_Part):
    """Lengths of the four arrays of a fragment."""

    elements: Size
    floats: Size
    ints: Size
    frozen: Size


ROLE_ARRAY: dict[str, str] = {"parameter": "elements", "float_buffer": "floats", "int_buffer": "ints", "frozen": "frozen"}

_FLOATS = frozenset(str(dtype).removeprefix("torch.") for dtype in FLOATS)
_INTEGERS = frozenset(str(dtype).removeprefix("torch.") for dtype in INTEGERS)
DTYPES: dict[Role, frozenset[str]] = {"parameter": _FLOATS, "float_buffer": _FLOATS, "int_buffer": _INTEGERS, "frozen": _FLOATS}


class Layout(_Part):
    """Every stored tensor of a model, each element in exactly one place."""

    fragments: Annotated[tuple[FragmentSize, ...], FailFast(), Field(min_length=1, max_length=FRAGMENTS_MAX)]
    entries: Annotated[tuple[LayoutEntry, ...], FailFast(), Field(min_length=1, max_length=1_000_000)]

    @model_validator(mode="after")
    def _covers_once(self) -> Layout:
        ends: dict[tuple[int, str], int] = {}
        names: set[str] = set()
        for entry in self.entries:
            place = (entry.fragment, ROLE_ARRAY[entry.role])
            if entry.dtype not in DTYPES[entry.role]:
                raise ValueError(f"entry {entry.name!r} has a dtype that its role does not have")
            if entry.offset != ends.get(place, 0):
                raise ValueError(f"entry {entry.name!r} leaves a gap or overlaps")
            ends[place] = entry.offset + entry.size
            for name in (entry.name, *entry.aliases):
                if name in names:
                    raise ValueError(f"name {name!r} stands twice")
                names.add(name)
        for index, size in enumerate(self.fragments):
            for array in ROLE_ARRAY.values():
                if ends.pop((index, array), 0) != getattr(size, array):
                    raise ValueError(f"entries do not fill {array} of fragment {index}")
        if ends:
            raise ValueError("entry of a fragment that does not exist")
        if not self.elements:
            raise ValueError("there is no element to exchange")
        return self

    @property
    def hash(self) -> str:
        """SHA-256 of the layout's canonical JSON (format §5.1)."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def elements(self) -> int:
        """N: elements that are exchanged, over all fragments."""
        return sum(fragment.elements for fragment in self.fragments)

    def of(self, fragment: int, role: Role = "parameter") -> tuple[LayoutEntry, ...]:
        """Entries of one role in one fragment, in offset order."""
        return tuple(entry for entry in self.entries if entry.fragment == fragment and entry.role == role)

    def entry_at(self, fragment: int, offset: int) -> str:
        """Name of the parameter that holds element ``offset`` of a fragment, for messages."""
        for entry in self.of(fragment):
            if entry.offset <= offset < entry.offset + entry.size:
                return entry.name
        return "?"


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes that DDP, torch.compile and their kind put before it."""
    parts = name.split(".")
    return ".".join(part for part in parts if part + "." not in WRAPPERS) or name


def stored_tensors(model: nn.Module) -> dict[str, tuple[torch.Tensor, tuple[str, ...], bool]]:
    """name -> (tensor, aliases, is an embedding) for parameters and persistent buffers, ties found by shared storage.

    Raises :class:`LayoutError` for tensors that cannot be exchanged (partly overlapping storage, sharded, complex, float64, meta, equal plain names).
    """
    _refuse_flat_shards(model)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[str, tuple[torch.Tensor, list[str], bool]] = {}
    by_storage: dict[tuple[object, ...], str] = {}
    extents: dict[int, list[tuple[int, int, str]]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *_persistent_buffers(model)]
    for raw_name, tensor in named:
        name = plain_name(raw_name)
        _refuse_what_cannot_be_exchanged(name, tensor)
        pointer = tensor.untyped_storage().data_ptr()
        place = (pointer, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in by_storage:
            first, aliases, embedding = found[by_storage[place]]
            if name not in (by_storage[place], *aliases):
                aliases.append(name)
            found[by_storage[place]] = (first, aliases, embedding or id(tensor) in embeddings)
            continue
        if name in found:
            raise LayoutError("two tensors have the same name once wrapper prefixes are removed", name=name)
        found[name] = (tensor, [], id(tensor) in embeddings)
        if tensor.numel():
            by_storage[place] = name
            reach = 1 + sum((int(length) - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
            if reach < tensor.numel():
                raise LayoutError("elements of a tensor share their storage", name=name)
            start = tensor.storage_offset() * tensor.itemsize
            extents.setdefault(pointer, []).append((int(start), int(start) + reach * tensor.itemsize, name))
    for shared in extents.values():  # views that do not meet are fine: cuDNN keeps the weights of an LSTM in one storage
        for (_, end, other), (start, _, name) in itertools.pairwise(sorted(shared)):
            if start < end:
                raise LayoutError("two tensors share only a part of their storage", name=name, other=other)
    if not any(role_of(tensor) == "parameter" and tensor.numel() for tensor, _, _ in found.values()):
        raise LayoutError("the model has no trainable parameter")
    return {name: (tensor, tuple(aliases), embedding) for name, (tensor, aliases, embedding) in found.items()}


def _refuse_what_cannot_be_exchanged(name: str, tensor: torch.Tensor) -> None:
    """Only ordinary tensors of dtypes that the bucket's float32 and int64 hold exactly: nothing is rounded without a word."""
    if is_lazy(tensor):
        raise LayoutError("a parameter has no shape yet", name=name, remedy="run one batch through the model first")
    if hasattr(tensor, "placements"):
        raise LayoutError(
            "a parameter is sharded over ranks (DTensor), and units of several ranks are not supported yet",
            name=name,
            placements=tensor.placements,
            remedy=ONE_RANK,
        )
    if tensor.is_meta or tensor.is_complex() or tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise LayoutError(
            "a tensor of this kind cannot be exchanged", name=name, dtype=tensor.dtype, device=tensor.device, type=type(tensor).__name__
        )
    if tensor.dtype not in (*FLOATS, *INTEGERS):
        trains = role_of(tensor) == "parameter"
        raise LayoutError(
            "a tensor has a dtype that is not exchanged: the bucket holds float32 and int64",
            name=name,
            dtype=tensor.dtype,
            known=" ".join(str(dtype).removeprefix("torch.") for dtype in (*FLOATS, *INTEGERS)),
            remedy="convert it to one of these"
            + ("" if trains else ", or make it a buffer with persistent=False: then it is outside the run, and every unit has its own"),
        )


def _refuse_flat_shards(model: nn.Module) -> None:
    """The older FSDP has ordinary tensors, each a part of several parameters or of one."""
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise LayoutError(
                "a module is sharded over ranks (FSDP), and units of several ranks are not supported yet",
                module=path or "the model",
                remedy=ONE_RANK,
            )


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Asked of the modules, not of ``state_dict``: wrappers rename its keys."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def role_of(tensor: torch.Tensor) -> Role:
    if isinstance(tensor, nn.Parameter):
        if not tensor.is_floating_point():
            return "int_buffer"
        return "parameter" if tensor.requires_grad else "frozen"
    return "float_buffer" if tensor.is_floating_point() else "int_buffer"


def build_layout(model: nn.Module, num_fragments: int = 1) -> Layout:
    """Lay a model out in ``num_fragments`` fragments of nearly equal size.

    Balanced tensor fragmentation (Decoupled DiLoCo): tensors by decreasing size, each into the lightest fragment so far; within a fragment they keep the
    model's order. Raises :class:`LayoutError` if there are more fragments than trainable tensors.
    """
    tensors = stored_tensors(model)
    trainable = [name for name, (tensor, _, _) in tensors.items() if role_of(tensor) == "parameter" and tensor.numel()]
    if not 1 <= num_fragments <= min(len(trainable), FRAGMENTS_MAX):
        raise LayoutError(
            "num_fragments is at least 1 and at most the number of trainable tensors and 64",
            num_fragments=num_fragments,
            trainable_tensors=len(trainable),
        )
    fragment_of: dict[str, int] = {}
    loads = [0] * num_fragments
    counts = [0] * num_fragments
    by_role = {
        role: [n for n, (t, _, _) in tensors.items() if role_of(t) == role]
        for role in ("parameter", "float_buffer", "int_buffer", "frozen")
    }
    for names in by_role.values():
        for name in sorted(names, key=lambda name: -tensors[name][0].numel()):
            lightest = min(range(num_fragments), key=lambda index: (loads[index], counts[index], index))
            fragment_of[name] = lightest
            loads[lightest] += tensors[name][0].numel()
            counts[lightest] += 1
    sizes = [dict.fromkeys(ROLE_ARRAY.values(), 0) for _ in range(num_fragments)]
    entries = []
    for name, (tensor, aliases, embedding) in tensors.items():
        role, fragment = role_of(tensor), fragment_of[name]
        array = ROLE_ARRAY[role]
        entries.append(
            LayoutEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                role=role,
                fragment=fragment,
                offset=sizes[fragment][array],
                aliases=aliases,
                embedding=embedding,
            )
        )
        sizes[fragment][array] += tensor.numel()
    return Layout(fragments=tuple(FragmentSize(**size) for size in sizes), entries=tuple(entries))


def check_same_layout(run: Layout, model: Layout) -> None:
    """Raise :class:`LayoutError` that names the first difference on both sides unless the layouts are equal."""
    if run.hash == model.hash:
        return
    remedy = "build the model with the settings of the run"
    ours = {entry.name: entry for entry in model.entries}
    theirs = {entry.name: entry for entry in run.entries}
    missing, extra = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    if missing or extra:
        raise LayoutError(
            "the model does not have the parameters of the run",
            only_in_run=missing[:5],
            only_in_model=extra[:5],
            remedy=remedy,
        )
    for name, entry in theirs.items():
        if entry != ours[name]:
            for field in LayoutEntry.model_fields:
                if getattr(entry, field) != getattr(ours[name], field):
                    raise LayoutError(
                        "a tensor differs between model and run",
                        name=name,
                        field=field,
                        run=getattr(entry, field),
                        model=getattr(ours[name], field),
                        remedy=remedy,
                    )
    raise LayoutError("the model's tensors come in another order than the run's", remedy=remedy)
