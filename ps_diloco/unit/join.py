"""Joining a run (format §7.2): from a URL, a model and an optimizer to a :class:`Unit` whose background threads run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_diloco import __version__, keys
from ps_diloco.binding import ModelBinding
from ps_diloco.config import RunSettings
from ps_diloco.env import Env
from ps_diloco.errors import ConfigError, UnitActive
from ps_diloco.ids import ContributionId, check_unit_name
from ps_diloco.inbox import newest_incarnation
from ps_diloco.layout import build_layout, check_same_layout
from ps_diloco.records import RECORD_BYTES_MAX, Incarnation, Manifest, Stored, encode
from ps_diloco.records import Restored as RestoredRecord
from ps_diloco.run import OpenRun, open_run
from ps_diloco.store import open_store
from ps_diloco.store.base import Store
from ps_diloco.store.claim import claim_object
from ps_diloco.store.counting import CountingStore
from ps_diloco.unit.engine import Engine, Residuals
from ps_diloco.unit.heart import Heart, read_heartbeat
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.parts import Parts
from ps_diloco.unit.puller import News, Puller, read_news
from ps_diloco.unit.saved import Restored, find_unit_state, restore_optimizer
from ps_diloco.unit.saver import Saver
from ps_diloco.unit.unit import Unit, json_of

log = logging.getLogger("ps_diloco.unit")

WATCH_S_MAX = 60.0


def join(
    run_url: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    unit: str,
    extra: Callable[[], Any] | None = None,
    take_over: bool = False,
    region: str | None = None,
    store: Store | None = None,
    env: Env | None = None,
    poll_s: float = 1.0,
    heartbeat_s: float = 5.0,
) -> Unit:
    """Join the run at ``run_url`` as ``unit``: load its newest version into ``model``, start publishing and pulling in the background.

    ``model`` is the model of the run; ``optimizer`` the inner one, whose state is saved and, after a restart, restored.
    ``extra`` returns what else a restart needs, as JSON (a data cursor); it comes back as ``unit.restored``. ``take_over`` joins without looking whether
    another process lives under this name. ``store`` and ``env`` are for tests and for stores with settings of their own. Does I/O, on the calling thread.

    Raises :class:`RunNotFound`, :class:`LayoutError` (naming what differs), :class:`UnitActive`, :class:`StoreError`.
    """
    check_unit_name(unit)
    env = env or Env.system()
    counting = CountingStore(store or open_store(run_url))
    run = open_run(counting, env)
    check_same_layout(run.layout, build_layout(model, len(run.layout.fragments)))
    binding = ModelBinding(model, run.layout)
    _warn_of_replicas(model)
    if optimizer is not None and not any(parameter in binding.names for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError("the optimizer has none of the model's parameters", optimizer=type(optimizer).__name__)
    if extra is not None:
        if not callable(extra):
            raise ConfigError("extra is a function that returns JSON", extra=repr(extra)[:80], remedy="write extra=lambda: {...}")
        json_of(extra())
    head = run.log.find_head()
    settings = run.config(head.record.config)
    region = _region(run, settings, region)
    timeline = head.record.timeline

    newest = newest_incarnation(run, unit)
    if newest is not None and not take_over:
        _refuse_if_alive(run, unit, newest.incarnation)
    restored = find_unit_state(run, unit, timeline) if newest is not None else None
    identity = _claim_incarnation(run, unit, region, timeline, 0 if newest is None else newest.incarnation + 1, restored)

    joined: list[Unit] = []
    heart = Heart(run, identity, interval_s=heartbeat_s, report=lambda: joined[0].report() if joined else {})
    heart.start()  # from the claim on, so that nobody takes this process for dead while it loads the model
    try:
        first = read_news(run, head, None)
        for fragment, value in enumerate(first.values):
            binding.replace(fragment, value)
        warm = restored is not None and (optimizer is None or restore_optimizer(optimizer, binding.names, restored.inner))
    except BaseException:
        heart.end("could not join")
        raise
    log.info("unit %s joined as incarnation %d at version %d", unit, identity.incarnation, head.record.version)

    stop = env.threads.event()
    errors: list[BaseException] = []
    link = Link(env, stop, url=run.store.url)
    outbox = Outbox(run, identity, link, stop, on_error=errors.append)
    engine = Engine(run.layout, settings, identity, first, outbox, threads=env.threads, on_error=errors.append, recycle=binding.recycle)
    saver = Saver(replace(run, store=counting.inner), identity, outbox, link, stop, on_error=errors.append)

    def on_news(news: News) -> None:
        """Runs on the puller's thread: the first manifest that lists this incarnation opens the outbox."""
        engine.post(news)
        entry = news.head.record.units.get(unit)
        if not outbox.listed.is_set() and entry is not None and entry.incarnation == identity.incarnation:
            if restored is not None and keeps_residual(run, head, news.head, unit, restored):
                engine.post(Residuals(values=dict(restored.residuals)))
            elif restored is not None:
                log.info("work after the saved state was merged before this restart, so the saved residual is not used again")
            outbox.listed.set()

    puller = Puller(run, first, link, stop, poll_s=poll_s, on_news=on_news, on_error=errors.append)
    parts = Parts(
        run=run,
        store=counting,
        owns_store=store is None,
        identity=identity,
        engine=engine,
        outbox=outbox,
        puller=puller,
        saver=saver,
        heart=heart,
        link=link,
        stop=stop,
        errors=errors,
    )
    joined.append(Unit(parts, binding, optimizer, settings, first, restored, extra, cold=not warm))
    for part in (outbox, engine, saver, puller):
        part.start()
    return joined[0]


def _warn_of_replicas(model: nn.Module) -> None:
    """DistributedDataParallel averages gradients, and a correction is none: the replicas of the other ranks would drift away without a word."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
            log.warning(
                "this model is one of %d replicas, and corrections reach this one only: join on rank 0 alone, and after every unit.step "
                "broadcast the model's state_dict and unit.done from there",
                module.process_group.size(),
            )
            return


def _region(run: OpenRun, settings: RunSettings, wanted: str | None) -> str:
    names = [region.name for region in settings.regions if region.status == "active"]
    region = wanted or run.record.home
    if region not in names:
        raise ConfigError("the run has no such active region", region=region, regions=names, remedy="name one of the run's regions")
    return region


def _refuse_if_alive(run: OpenRun, unit: str, incarnation: int) -> None:
    """Raise :class:`UnitActive` if the heartbeat of the newest incarnation moves while it is watched for two of its intervals."""
    first = read_heartbeat(run, unit)
    if first is None or first.ended is not None or first.incarnation != incarnation:
        return
    clock = run.env.clock
    watch_s = min(2 * first.interval_s, WATCH_S_MAX)
    until_s = clock.monotonic() + watch_s
    log.info("unit %s: watching for %.0f s whether its last process lives", unit, watch_s)
    while clock.monotonic() < until_s:
        clock.sleep(min(0.5, watch_s / 8))
        now = read_heartbeat(run, unit)
        if now is not None and now.ended is not None:
            return
        if now is not None and now.nonce != first.nonce:
            raise UnitActive(
                "another process runs under this unit's name",
                unit=unit,
                incarnation=now.incarnation,
                remedy="choose another name, or stop that process, or join with take_over (--take-over)",
            )


def _claim_incarnation(run: OpenRun, unit: str, region: str, timeline: int, number: int, restored: Restored | None) -> Identity:
    record = Incarnation(
        run_id=run.run_id,
        unit=unit,
        incarnation=number,
        attempt=run.env.entropy.attempt_id(),
        region=region,
        software=f"ps-diloco {__version__}",
        created_at=run.env.clock.wall_text(),
        restored=RestoredRecord(incarnation=restored.incarnation, covers=restored.covers) if restored else None,
    )
    claim = claim_object(run.store, run.env, keys.incarnation(unit, number), encode(record), max_bytes=RECORD_BYTES_MAX)
    if not claim.won:
        raise UnitActive(
            "another process has just joined under this unit's name", unit=unit, incarnation=number, remedy="choose another name"
        )
    return Identity(timeline=timeline, unit=unit, incarnation=number)


def keeps_residual(run: OpenRun, before: Stored[Manifest], after: Stored[Manifest], unit: str, restored: Restored) -> bool:
    """Whether nothing beyond what the saved state covers was merged before this incarnation was listed (format §7.2 step 7). Does I/O.

    ``before``: a head that does not list it; ``after``: one that does. If it cannot be told, the answer is no: a residual used twice is worse than one lost.
    """
    ours = after.record.units[unit].incarnation
    while before.record.version < after.record.version:
        following = run.log.read(before.record.timeline, before.record.version + 1)
        if following is None:
            return False
        old = before.record.units.get(unit)
        if following.record.units[unit].incarnation == ours if unit in following.record.units else False:
            if old is None or old.incarnation < restored.incarnation:
                return True  # the incarnation that saved the state was never listed, so nothing of it was merged
            merged = [ContributionId.parse(m.contribution) for step in following.record.steps for m in step.merged]
            late = [c for c in merged if c.unit == unit and (c.incarnation != restored.incarnation or c.seq > restored.covers.seq)]
            if old.incarnation > restored.incarnation:
                return False  # the receipts of the incarnation that saved the state are gone
            beyond = range(restored.covers.seq + 1, old.first + len(old.outcomes))
            return not late and old.first <= restored.covers.seq + 1 and all(old.outcome(seq) != "merged" for seq in beyond)
        before = following
    return False
