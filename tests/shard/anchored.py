"""A small run whose fragment 0 has all four arrays, and ways to replace objects of its anchors; for the tests of checkpoints."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ps_diloco.checkpoint import Place, buffer_sections, write_delta
from ps_diloco.config import CreateSettings, RunSettings
from ps_diloco.env import Env
from ps_diloco.fragment import FragmentValue
from ps_diloco.records import Anchor, Delta, FragmentEntry, Ref
from ps_diloco.run import OpenRun, create_run
from ps_diloco.shard import encode_section
from ps_diloco.store.base import Store


class Model(nn.Module):
    """14 trainable, 6 frozen elements, 4 of float buffers, 2 of integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.body = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.scale = nn.Parameter(torch.tensor([2.0, -1.0]))
        self.register_buffer("flag", torch.tensor(True))


def make_run(store: Store, env: Env, model: nn.Module | None = None, *, num_fragments: int = 1) -> OpenRun:
    return create_run(store, env, model or Model(), create=CreateSettings(num_fragments=num_fragments), settings=RunSettings())


def some_value(run: OpenRun, fragment: int = 0, seed: int = 0) -> FragmentValue:
    generator = torch.Generator().manual_seed(seed)
    value = FragmentValue.zeros(run.layout.fragments[fragment])
    for array in (value.params, value.floats, value.frozen):
        array.normal_(generator=generator)
    value.ints.random_(0, 2**40, generator=generator)
    return value


def same(left: FragmentValue, right: FragmentValue) -> bool:
    return left.sha256() == right.sha256()


def replaced(store: Store, anchor: Anchor, name: str, data: bytes | None) -> Anchor:
    """``anchor`` with another object under ``name`` (below the anchor's prefix), honestly named by size and hash; without it for None."""
    refs, found = [], False
    for ref in anchor.objects:
        if ref.key.split("/", 4)[4] == name:
            found = True
            if data is None:
                continue
            store.put(ref.key, data, overwrite=True)
            ref = Ref(key=ref.key, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        refs.append(ref)
    assert found
    return Anchor(fragment_version=anchor.fragment_version, objects=tuple(refs))


def body(store: Store, anchor: Anchor, name: str) -> bytes:
    return next(store.get(ref.key) for ref in anchor.objects if ref.key.split("/", 4)[4] == name)


class Chain:
    """The versions of fragment 0, grown one update at a time. ``values[n]`` is version n; codec ``none``, so arithmetic is plain float32."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        head = run.log.read(0, 0)
        assert head is not None
        self.start = head.record.fragments[0]
        self.values: list[FragmentValue] = []
        self.deltas: list[Delta] = []

    def grow(self, codec: str = "none") -> None:
        old, version = self.values[-1], len(self.values)
        update = torch.empty_like(old.params)
        params = encode_section("params", codec, some_value(self.run, seed=version).params, decoded=update)
        new = FragmentValue(params=old.params - update, floats=old.floats + 1.0, ints=old.ints + 1, frozen=old.frozen)
        where = Place(timeline=0, fragment=0, fragment_version=version)
        ref = write_delta(self.run, where, params=params, floats_B=new.floats, ints_I=new.ints)
        assert len(buffer_sections(new.floats, new.ints)) == 2
        self.values.append(new)
        self.deltas.append(Delta(fragment_version=version, sha256=new.sha256(), object=ref))

    def entry(self, version: int, anchor: Anchor, first_delta: int) -> FragmentEntry:
        """The entry of ``version`` that names ``anchor`` and the deltas from ``first_delta`` on."""
        deltas = tuple(d for d in self.deltas if first_delta <= d.fragment_version <= version)
        digest = self.values[version].sha256()
        return self.start.model_copy(update={"fragment_version": version, "sha256": digest, "anchor": anchor, "deltas": deltas})
