"""Opening and creating a run (format §5.1, §7.1).

::

    run = create_run(store, env, model, create=CreateSettings(), settings=RunSettings())
    run = open_run(store, env)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ps_diloco import __version__, keys
from ps_diloco.binding import ModelBinding
from ps_diloco.checkpoint import Place, write_anchor
from ps_diloco.config import CreateSettings, RunSettings, parse_settings
from ps_diloco.env import Env
from ps_diloco.errors import FormatError, IntegrityError, LayoutError, NotFound, RunExists, RunNotFound
from ps_diloco.layout import Layout, build_layout, check_same_layout, stored_tensors
from ps_diloco.log import Log
from ps_diloco.records import (
    RUN_BYTES_MAX,
    Config,
    Fingerprint,
    FragmentEntry,
    Manifest,
    Record,
    Run,
    Stored,
    Timeline,
    decode,
    encode,
    sha256_of,
)
from ps_diloco.store import open_store
from ps_diloco.store.base import Store
from ps_diloco.store.claim import claim_object, probe_store

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that exists: its store, environment and immutable identity. Cheap to copy, thread-safe."""

    store: Store
    env: Env
    record: Run

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def layout(self) -> Layout:
        return self.record.layout

    @property
    def log(self) -> Log:
        return Log(store=self.store, env=self.env, run_id=self.run_id)

    def config(self, n: int) -> RunSettings:
        """Settings number ``n``. Does I/O."""
        key = keys.config(n)
        return decode(Config, self.store.get(key, max_bytes=1 << 20), key=key, run_id=self.run_id).settings

    def config_if_any(self, n: int) -> RunSettings | None:
        """Settings number ``n``, or None if there are none yet. Does I/O."""
        try:
            return self.config(n)
        except NotFound:
            return None


def open_run(store: Store, env: Env) -> OpenRun:
    """Read ``run.json``. Raises :class:`RunNotFound`, or :class:`FormatError` if it is damaged."""
    try:
        body = store.get(keys.RUN, max_bytes=RUN_BYTES_MAX)
    except NotFound:
        raise RunNotFound("there is no run at this URL", url=store.url, remedy=f"create one with: ps-diloco init {store.url}") from None
    record = decode(Run, body, key=keys.RUN, max_bytes=RUN_BYTES_MAX)
    if record.layout.hash != record.layout_hash:
        raise IntegrityError("layout and layout_hash of a run differ", key=keys.RUN)
    return OpenRun(store=store, env=env, record=record)


def fingerprint() -> Fingerprint:
    """What replay needs to be equal for equal bits (format §5.7)."""
    return Fingerprint(software=f"ps-diloco {__version__}", torch=torch.__version__, isa=torch.backends.cpu.get_cpu_capability())


def create_run(
    store: Store,
    env: Env,
    model: nn.Module,
    *,
    create: CreateSettings,
    settings: RunSettings,
    program: dict[str, Any] | None = None,
) -> OpenRun:
    """Create a run whose version 0 is ``model`` (format §7.1); finish one whose creation was interrupted.

    Raises :class:`RunExists` if a finished run stands there, or an unfinished one of another layout; :class:`UnsupportedStore` before anything is
    written to a store that ignores create-if-absent.
    """
    layout = build_layout(model, create.num_fragments)
    _check_values(model)
    probe_store(store, env)
    home = settings.regions[0].name
    wanted = Run(
        run_id=env.entropy.run_id(),
        software=f"ps-diloco {__version__}",
        created_at=env.clock.wall_text(),
        name=create.name,
        attempt=env.entropy.attempt_id(),
        seed=create.seed,
        home=home,
        staleness_limit=create.staleness_limit,
        layout=layout,
        layout_hash=layout.hash,
        program=program or {},
    )
    standing = _claim_or_read(store, env, keys.RUN, wanted, RUN_BYTES_MAX)
    run = OpenRun(store=store, env=env, record=standing)
    if standing != wanted:
        _refuse_if_finished(run, layout)
    config = _claim_or_read(
        store,
        env,
        keys.config(0),
        Config(
            run_id=run.run_id, n=0, attempt=env.entropy.attempt_id(), reason="created", created_at=env.clock.wall_text(), settings=settings
        ),
    )
    _claim_or_read(
        store,
        env,
        keys.timeline(0),
        Timeline(
            run_id=run.run_id,
            timeline=0,
            attempt=env.entropy.attempt_id(),
            parent=None,
            first_version=0,
            config=config.n,
            reason="created",
            created_at=env.clock.wall_text(),
        ),
    )
    manifest = _version_zero(run, model)
    claim = claim_object(store, env, keys.manifest(0, 0), encode(manifest))
    if not claim.won:
        raise RunExists("another process created this run at the same time", url=store.url, remedy="use the run as it is")
    run.log.write_hint(Stored(manifest, sha256_of(claim.body)))
    return run


def create(
    run_url: str, model: nn.Module, settings: Mapping[str, Any] | None = None, *, store: Store | None = None, **fixed: Any
) -> OpenRun:
    """Create a run at ``run_url`` whose version 0 is ``model``, from a training program of your own.

    ``settings`` as in a TOML file, e.g. ``{"target_tokens": 10**9, "unit": {"sync_every": 100}}``; ``fixed`` is what can never change: ``name``, ``seed``,
    ``num_fragments``, ``staleness_limit``. Does I/O. Raises :class:`ConfigError`, :class:`RunExists`, :class:`UnsupportedStore`.
    """
    return create_run(
        store or open_store(run_url),
        Env.system(),
        model,
        create=parse_settings(CreateSettings, fixed, source="arguments"),
        settings=parse_settings(RunSettings, settings or {}, source="settings"),
    )


def _version_zero(run: OpenRun, model: nn.Module) -> Manifest:
    binding = ModelBinding(model, run.layout)
    entries = []
    for fragment in range(len(run.layout.fragments)):
        value = binding.snapshot(fragment)
        anchor = write_anchor(run, Place(timeline=0, fragment=fragment, fragment_version=0), value)
        entries.append(
            FragmentEntry(
                fragment_version=0,
                sha256=value.sha256(),
                anchor=anchor,
                deltas=(),
                state=None,
                tokens=0.0,
                rounds={},
                weights=(),
                masses=(),
            )
        )
    return Manifest(
        run_id=run.run_id,
        timeline=0,
        version=0,
        attempt=run.env.entropy.attempt_id(),
        created_at=run.env.clock.wall_text(),
        parent=None,
        config=0,
        final=False,
        fingerprint=fingerprint(),
        tokens=0.0,
        fragments=tuple(entries),
        steps=(),
        refused=(),
        units={},
    )


def _check_values(model: nn.Module) -> None:
    """Refuse a model that could not be version 0, before anything is written."""
    for name, (tensor, _, _) in stored_tensors(model).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise LayoutError(
                "the model has values that are not finite", name=name, remedy="create the run from a model that is initialised"
            )


def _refuse_if_finished(run: OpenRun, layout: Layout) -> None:
    if run.log.read(0, 0) is not None:
        raise RunExists("a run exists at this URL", url=run.store.url, name=run.record.name, remedy="join it, or choose another URL")
    try:
        check_same_layout(run.layout, layout)
    except LayoutError as error:
        raise RunExists(
            "an unfinished run of another model stands at this URL", url=run.store.url, difference=error, remedy="choose another URL"
        ) from None


def _claim_or_read(store: Store, env: Env, key: str, record: R, max_bytes: int = 1 << 20) -> R:
    """Claim ``record``; when somebody else's stands there, return that."""
    claim = claim_object(store, env, key, encode(record), max_bytes=max_bytes)
    if claim.won:
        return record
    try:
        return decode(type(record), claim.body, key=key, max_bytes=max_bytes)
    except FormatError as error:
        raise RunExists(
            "something that is not a run stands at this URL", url=store.url, key=key, cause=error, remedy="choose another URL"
        ) from None
