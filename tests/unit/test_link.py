"""Warnings about a bucket that is away: once, in words, and a word when it is back."""

from __future__ import annotations

import logging
import threading

import pytest

from ps_diloco.env import Env, SystemEntropy
from ps_diloco.errors import Denied, Unavailable
from ps_diloco.unit.link import HANGS_S, QUIET_S, REMIND_S, Link


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_text(self) -> str:
        return ""

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return event.is_set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> Link:
    return Link(Env(clock=clock, entropy=SystemEntropy()), threading.Event(), url="s3://bucket/run")


def test_a_call_that_hangs_is_warned_of_once(link: Link, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    link.begin("pull a version")
    clock.now_s = HANGS_S - 1
    link.look()
    assert not caplog.records
    clock.now_s = HANGS_S
    link.look()
    link.look()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot pull a version: s3://bucket/run has not answered for 15 s" in caplog.text
    assert link.away_s == HANGS_S
    link.answered("pull a version")
    assert "answers again" in caplog.text and link.away_s == 0.0


def test_a_short_absence_is_not_worth_a_word(link: Link, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    answers = [Unavailable("away"), Unavailable("away"), 7]

    def call() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert link.until_done("publish", call) == 7
    assert clock.now_s < QUIET_S and not caplog.records


def test_a_long_absence_is_reminded_of_now_and_then(link: Link, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        if clock.now_s < 3 * REMIND_S:
            raise Unavailable("away")

    link.until_done("publish", call)
    warnings = [record for record in caplog.records if "cannot publish" in record.message]
    assert 3 <= len(warnings) <= 4


def test_being_denied_is_told_at_once(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    link.failed("publish", Denied("no"))
    assert "cannot publish" in caplog.text


def test_two_directions_do_not_mix(link: Link, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    link.failed("publish", Denied("no"))
    for _ in range(5):
        link.begin("pull")
        link.answered("pull")
    assert caplog.text.count("cannot publish") == 1 and "answers again" not in caplog.text
