"""Requests and bytes of a run, counted at the store and compared with the cost model of format §11; and that a merge costs the same at any version.

    python -m benchmarks.requests                                     # versions up to 10,000: about a minute
    python -m benchmarks.requests --params 100000 --versions 30,60    # in seconds

The functions after :class:`Requests` are the model; ``tests/protocol/test_cost.py`` holds the code to it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import ps_diloco
from aggregator.outer_step import Aggregator, Outcome
from benchmarks.material import Encoded, Slab, announce, base_of, encoded, new_run, pseudo_gradient, publish, unit_names
from benchmarks.measure import Cell, Report, counts, parser
from ps_diloco import keys
from ps_diloco.codecs import CODECS
from ps_diloco.config import PullSettings, RunSettings
from ps_diloco.env import Env, SeededEntropy, SystemClock
from ps_diloco.layout import FragmentSize
from ps_diloco.run import OpenRun, open_run
from ps_diloco.shard import CHUNK
from ps_diloco.store import CountingStore, MemoryStore, ObjectInfo, Store, Traffic
from ps_diloco.store.base import Buffer
from ps_diloco.unit.heart import Heart
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity
from ps_diloco.unit.puller import Puller, read_news


@dataclass(frozen=True, slots=True)
class Requests:
    """Calls of a store. A listing is one, however many pages it has; on S3 an object above 64 MiB is written with more (parts, and two)."""

    get: int = 0
    put: int = 0
    list: int = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.get + other.get, self.put + other.put, self.list + other.list)

    def __sub__(self, other: Requests) -> Requests:
        return Requests(self.get - other.get, self.put - other.put, self.list - other.list)

    def __mul__(self, times: int) -> Requests:
        return Requests(self.get * times, self.put * times, self.list * times)


# the model of format §11


def idle_pass(listed_units: int) -> Requests:
    """The next manifest, and the next record of each listed unit."""
    return Requests(get=1 + listed_units)


def discovery(units: int, new: int = 0) -> Requests:
    """The names of units, the next incarnation of each, the next settings. ``new``: incarnations that are found."""
    return Requests(list=1, get=units + new + 1)


def anchor_objects(size: FragmentSize) -> int:
    """A group, and for each array that is not empty its description and its chunks."""
    arrays = (size.elements, size.floats, size.ints, size.frozen)
    return 1 + sum(1 + -(-elements // CHUNK) for elements in arrays if elements)


def step_of_fragment(size: FragmentSize, to: int, contributions: int, pull: PullSettings) -> Requests:
    """What a fragment's step to fragment version ``to`` adds: a record and a shard of each contribution, the delta, at times state and anchor."""
    state = to % pull.state_every == 0
    anchor = anchor_objects(size) if to % pull.anchor_every == 0 else 0
    return Requests(get=2 * contributions, put=1 + state + anchor)


def cold_read(size: FragmentSize, deltas: int, *, state: bool) -> Requests:
    """The first step of a fragment in a process, and joining: the anchor, the deltas after it; an aggregator also reads the outer state."""
    return Requests(get=anchor_objects(size) + deltas + state)


def commit(*, hint: bool) -> Requests:
    """Is there a newer timeline; the manifest; ``head.json``, which is written at most once a second."""
    return Requests(get=1, put=1 + hint)


def publishing() -> Requests:
    """Shard and record."""
    return Requests(put=2)


def following(deltas: int) -> Requests:
    """``head.json``, the manifest, and the deltas since the version that is held."""
    return Requests(get=2 + deltas)


def idle_unit(polls: int, heartbeats: int) -> Requests:
    """``head.json`` at each poll, the next manifest number at every tenth, the first included."""
    return Requests(get=polls + -(-polls // 10), put=heartbeats)


# counting


class Ledger(CountingStore):
    """Also remembers each call."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    def get(self, key: str, **options: Any) -> bytes:
        self.calls.append(("get", key))
        return super().get(key, **options)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        self.calls.append(("put", key))
        return super().put(key, data, overwrite=overwrite)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        return super().list(prefix, start_after=start_after)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        self.calls.append(("list", prefix))
        return super().list_prefixes(prefix)


class StandingClock(SystemClock):
    """Moves only when told: nothing that is done "now and then" happens by itself."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def requests_of(traffic: Traffic) -> Requests:
    verbs = traffic.verbs
    return Requests(
        get=verbs["get"].calls,
        put=verbs["put"].calls,
        list=verbs["list"].calls + verbs["list_prefixes"].calls + verbs["list_versions"].calls,
    )


@dataclass(frozen=True, kw_only=True)
class Counted:
    what: str
    found: Requests
    model: Requests
    bytes_in: int
    bytes_out: int


class Scene:
    """A run in memory with listed units and a looping aggregator whose store is counted. The clock stands still."""

    def __init__(self, *, units: int, fragments: int = 1, params: int = 256, **settings: Any) -> None:
        self.clock = StandingClock()
        self.memory = MemoryStore()
        env = Env(clock=self.clock, entropy=SeededEntropy(0))
        settings.setdefault("merge", {"merge_at_least": 0.0})  # a window closes with its first contribution
        self.settings = RunSettings.model_validate(settings)
        self.run = new_run(self.memory, Slab(params), fragments=fragments, env=env, **settings)
        self.units = unit_names(units)
        announce(self.run, self.units)
        self.ledger = Ledger(self.memory)
        self.aggregator = Aggregator(OpenRun(store=self.ledger, env=env, record=self.run.record))
        self.aggregator.take_pass()
        self._cuts: dict[int, Encoded] = {}
        self._seqs = dict.fromkeys(self.units, 0)
        self._loaded: set[int] = set()

    def publish(self, unit: str, fragment: int) -> None:
        """One contribution on the newest version; its values are the same each time."""
        if fragment not in self._cuts:
            elements = self.run.layout.fragments[fragment].elements
            self._cuts[fragment] = encoded(self.run, fragment, torch.linspace(-1e-3, 1e-3, elements))
        head = self.aggregator._memory.head
        assert head is not None
        publish(self.run, unit, self._seqs[unit], self._cuts[fragment], base_of(head.record, fragment))
        self._seqs[unit] += 1

    def counted(self, what: str, model: Requests, call: Callable[[], object]) -> Counted:
        before = self.ledger.snapshot()
        call()
        after = self.ledger.snapshot()
        return Counted(
            what=what,
            found=requests_of(after) - requests_of(before),
            model=model,
            bytes_in=after.bytes_in - before.bytes_in,
            bytes_out=after.bytes_out - before.bytes_out,
        )

    def idle(self) -> Counted:
        return self.counted(f"idle pass, {len(self.units)} units", idle_pass(len(self.units)), self.aggregator.take_pass)

    def discover(self) -> Counted:
        """A pass in which it is time to look for new units, and none is there."""
        self.clock.now_s += 3600.0
        model = idle_pass(len(self.units)) + discovery(len(self.units))
        return self.counted(f"idle pass with discovery, {len(self.units)} units", model, self.aggregator.take_pass)

    def merge(self, fragments: int, each: int, *, hint: bool = False) -> Counted:
        """A pass that steps ``fragments`` fragments with ``each`` contributions."""
        head = self.aggregator.take_pass().head.record
        for fragment in range(fragments):
            for unit in self.units[:each]:
                self.publish(unit, fragment)
        model = idle_pass(len(self.units)) + commit(hint=hint)
        for fragment in range(fragments):
            size, to = self.run.layout.fragments[fragment], head.fragments[fragment].fragment_version + 1
            model += step_of_fragment(size, to, each, self.settings.pull)
            if fragment not in self._loaded:  # at fragment version 0: no deltas, no outer state
                model += cold_read(size, 0, state=False)
                self._loaded.add(fragment)
        self.aggregator._memory.hinted_at_s = self.clock.now_s - (1.0 if hint else 0.0)  # whether head.json is due; discovery is not

        def take_pass() -> Outcome:
            outcome = self.aggregator.take_pass()
            assert outcome.kind == "committed" and len(outcome.head.record.steps) == fragments
            return outcome

        return self.counted(
            f"pass that merges {each} into each of {fragments} fragments{', with head.json' if hint else ''}", model, take_pass
        )


@contextmanager
def reader(scene: Scene) -> Iterator[tuple[Ledger, Puller]]:
    """A unit's puller at the newest version, on a counted store; its thread is not started."""
    ledger = Ledger(scene.memory)
    run, stop = open_run(ledger, scene.run.env), threading.Event()
    first = read_news(run, run.log.find_head(), None)
    link = Link(run.env, stop, url=run.store.url)
    yield ledger, Puller(run, first, link, stop, poll_s=1.0, on_news=lambda news: None, on_error=lambda error: None)


def count_reader(
    scene: Scene, what: str, model: Requests, call: Callable[[Puller, OpenRun], object], *, before: Callable[[], object]
) -> Counted:
    with reader(scene) as (ledger, puller):
        before()
        start = ledger.snapshot()
        call(puller, OpenRun(store=ledger, env=scene.run.env, record=scene.run.record))
        after = ledger.snapshot()
    found = requests_of(after) - requests_of(start)
    bytes_in, bytes_out = after.bytes_in - start.bytes_in, after.bytes_out - start.bytes_out
    return Counted(what=what, found=found, model=model, bytes_in=bytes_in, bytes_out=bytes_out)


def count_following(scene: Scene, versions: int, fragments: int) -> Counted:
    """A poll that finds ``versions`` new versions at once, in each of which ``fragments`` fragments stepped."""

    def advance() -> None:
        for turn in range(versions):
            scene.merge(fragments, 1, hint=turn == versions - 1)

    what = f"following {versions} version{'s' if versions > 1 else ''} with {fragments} fragment steps each"
    return count_reader(scene, what, following(versions * fragments), lambda puller, run: puller.poll(), before=advance)


def count_idle_unit(scene: Scene, polls: int, heartbeats: int) -> Counted:
    """What a unit does in a time in which nothing happens."""

    def idle(puller: Puller, run: OpenRun) -> None:
        heart = Heart(run, Identity(timeline=0, unit=scene.units[0], incarnation=0), interval_s=5.0, report=dict)
        for _ in range(polls):
            assert not puller.poll()
        for _ in range(heartbeats):
            heart.beat()

    what = f"idle unit, {polls} polls and {heartbeats} heartbeats"
    return count_reader(scene, what, idle_unit(polls, heartbeats), idle, before=lambda: scene.run.log.write_hint(scene.run.log.find_head()))


def count_publishing(cuts: int, params: int) -> Counted:
    """A real unit that cuts ``cuts`` times: the calls for its records and shards."""
    memory, model = MemoryStore(), Slab(params)
    run = new_run(memory, model, unit={"sync_every": 1, "state_every_cuts": 0, "join_warmup_steps": 0})
    aggregator, ledger = Aggregator(run), Ledger(memory)
    until_s = time.monotonic() + 60.0
    with ps_diloco.join("memory://none", model, unit="a", store=ledger, poll_s=0.01, heartbeat_s=1000.0) as unit:
        while unit._parts.outbox.published < cuts and time.monotonic() < until_s:
            aggregator.take_pass(force="once")
            if unit._parts.outbox.accepted < cuts:
                unit.step(tokens=1)
            time.sleep(0.001)
        own = [(verb, key) for verb, key in ledger.calls if key.startswith(keys.UNITS + "a/t")]
        sizes = [info.size for info in memory.list(keys.UNITS + "a/t")]
        published = unit._parts.outbox.published
        unit._parts.errors.append(RuntimeError("it is over"))  # so that leaving publishes nothing more
        unit._told = True
    found = Requests(get=sum(verb == "get" for verb, _ in own), put=sum(verb == "put" for verb, _ in own))
    return Counted(what=f"publishing {cuts} cuts", found=found, model=publishing() * published, bytes_in=0, bytes_out=sum(sizes))


# the same cost at any version


@dataclass(frozen=True, kw_only=True)
class Window:
    """A period of ``anchor_every`` passes, each of which merged one contribution, that ends at ``version``."""

    version: int
    requests: Requests
    bytes_in: int
    bytes_out: int
    pass_s: float
    """CPU seconds, median."""


def march(versions: Sequence[int], *, params: int = 64) -> list[Window]:
    """Really merge up to the largest of ``versions``; the window before each of them."""
    scene = Scene(units=1, params=params)
    period = scene.settings.pull.anchor_every
    starts = {version - period: version for version in versions}
    found: list[Window] = []
    begun = scene.ledger.snapshot()
    seconds: list[float] = []
    for version in range(1, max(versions) + 1):
        if version - 1 in starts:
            begun, seconds = scene.ledger.snapshot(), []
        scene.publish(scene.units[0], 0)
        begun_s = time.thread_time()
        outcome = scene.aggregator.take_pass()
        seconds.append(time.thread_time() - begun_s)
        assert outcome.head.record.fragments[0].fragment_version == version, outcome
        if version in versions:
            ended = scene.ledger.snapshot()
            found.append(
                Window(
                    version=version,
                    requests=requests_of(ended) - requests_of(begun),
                    bytes_in=ended.bytes_in - begun.bytes_in,
                    bytes_out=ended.bytes_out - begun.bytes_out,
                    pass_s=statistics.median(seconds),
                )
            )
    return found


def count_all(params: int) -> list[Counted]:
    """Every case of the model once."""
    scene = Scene(units=4, fragments=2, params=params)
    found = [scene.idle(), scene.discover(), scene.merge(1, 1), scene.merge(1, 4), scene.merge(2, 4), scene.merge(1, 2, hint=True)]
    found += [count_following(scene, 1, 1), count_following(scene, 1, 2), count_following(scene, 3, 2), count_idle_unit(scene, 60, 12)]
    found += [scene.merge(1, 1) for _ in range(40)]
    return [*found, count_publishing(5, params)]


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--params", type=int, default=4_000_000, help="of the run whose bytes are counted")
    made.add_argument("--versions", type=counts, default=[40, 100, 1000, 10_000], help="at which the cost of a merge is compared")
    made.add_argument("--size", default="0.8M", help="GPT that gives the pseudo-gradients")
    made.add_argument("--train-steps", type=int, default=40, help="its inner steps")
    options = made.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report = Report.begin("requests", options, argv)
    rows: list[tuple[Cell, ...]] = []
    different = 0
    for counted in count_all(256):
        different += counted.found != counted.model
        row = (
            counted.what,
            *(f"{m}{'' if m == f else f' (found {f})'}" for m, f in zip(_parts(counted.model), _parts(counted.found), strict=True)),
        )
        if row not in rows:
            rows.append(row)
    report.figure("kinds of work whose requests differ from the model", different, "")
    report.table("Requests: the model, and what was counted where it differs", ("what", "GET", "PUT", "LIST"), rows)
    report_bytes(report, options.params, options.size, options.train_steps)
    windows = march(options.versions)
    first, last = windows[0], windows[-1]
    report.figure(
        f"requests of a merge at version {last.version}",
        sum(_parts(last.requests)) / 20,
        "",
        floor=sum(_parts(first.requests)) / 20,
        floor_is=f"those at version {first.version}",
        target=1.0,
    )
    report.figure(
        f"CPU seconds of a merge at version {last.version}",
        last.pass_s,
        "s",
        floor=first.pass_s,
        floor_is=f"those at version {first.version}",
        target=1.0,
    )
    report.table(
        "One merge of one contribution, by version: mean over an anchor's period (time: median)",
        ("version", "GET", "PUT", "LIST", "bytes read", "bytes written", "ms"),
        [(w.version, *(part / 20 for part in _parts(w.requests)), w.bytes_in / 20, w.bytes_out / 20, 1e3 * w.pass_s) for w in windows],
    )
    report.note("a manifest grows until a fragment has taken 64 steps (masses, weights, receipts) and is bounded from then on")
    torch.set_num_threads(threads)
    report.end()


def _parts(requests: Requests) -> tuple[int, int, int]:
    return (requests.get, requests.put, requests.list)


def report_bytes(report: Report, params: int, size: str, steps: int) -> None:
    """Bytes of each kind of object of one fragment, with real values, against the raw size of its codec."""
    run = new_run(MemoryStore(), Slab(params), pull={"anchor_every": 1})
    head = announce(run, ["a"])
    cut = encoded(run, 0, pseudo_gradient(params, size=size, steps=steps))
    publish(run, "a", 0, cut, base_of(head, 0))
    aggregator = Aggregator(run)
    aggregator.take_pass(force="once")
    sizes: dict[str, int] = {}
    for info in run.store.list(""):
        kind = "record" if keys.parse_record(info.key) else "shard" if info.key.startswith(keys.UNITS) else info.key.split("/")[0]
        if kind != "anchors" or f"/{1:020d}-" in info.key:
            sizes[kind] = sizes.get(kind, 0) + info.size if kind == "anchors" else info.size
    raw = {
        "shard": CODECS["int4"].raw_bytes(params),
        "deltas": CODECS["int8"].raw_bytes(params),
        "state": 8 * params,
        "anchors": 4 * params,
    }
    columns = ("object", "bytes", "raw bytes of its codec", "bits per parameter")
    rows = [(kind, size, raw.get(kind), 8 * size / params) for kind, size in sizes.items() if kind in (*raw, "record", "manifests")]
    report.table(f"Bytes of one step of a fragment of {params / 1e6:g} M parameters", columns, rows)


if __name__ == "__main__":
    main()
