"""A fragment of a unit (format §6.1): cut, rebase, replace, take-back, discard, and the account of I10, on cases worked out by hand."""

from __future__ import annotations

import pytest
import torch

from ps_diloco.errors import NonFinite
from ps_diloco.records import OUTCOME_CHAR, TAKE_BACK
from ps_diloco.unit.state import FragmentState, Pending
from tests.unit.fragments import Lone, base_of, entry_of, payload_of, value_of

DISCARDED = sorted(set(OUTCOME_CHAR) - {"merged"} - TAKE_BACK)
BALANCE = 1e-4


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-6, atol=1e-6)


# the constant gradient of design §4.1


def _paced(answer_late: int, *, codec: str = "none") -> tuple[Lone, torch.Tensor]:
    """20 syncs of -10 each; what is cut in one sync is merged and answered ``answer_late`` syncs later. Returns what is in flight, too."""
    unit = Lone(elements=1, codec=codec)
    flying: list[Pending] = []
    for _ in range(20):
        unit.work(-10.0)
        flying.append(unit.publish())
        if len(flying) > answer_late:
            unit.merge(flying.pop(0))
            unit.sync()
        assert abs(unit.state.balance()) < BALANCE
    return unit, sum((payload_of(pending) for pending in flying), torch.zeros(1))


@pytest.mark.parametrize("answer_late", [0, 1])
@pytest.mark.parametrize("codec", ["none", "int4", "int8"])
def test_the_total_of_a_constant_gradient_is_exact_minus_what_is_in_flight(answer_late: int, codec: str) -> None:
    unit, flying = _paced(answer_late, codec=codec)
    moved = unit.world - unit.start
    residual = unit.state.residual
    assert _close(moved - flying - residual, torch.tensor([-200.0]))
    assert (
        abs(float(unit.theta - unit.start) + 200.0) < {"none": 1e-4, "int8": 0.2, "int4": 3.0}[codec]
    )  # but for one step of the quantiser
    if codec == "none":
        assert _close(moved, torch.tensor([-200.0 + 10.0 * answer_late]))


@pytest.mark.parametrize("answer_late", [1, 2])
def test_differences_from_the_base_send_work_in_flight_again(answer_late: int) -> None:
    """The naive rule, as a control: send base minus local, and on an answer add what the global value moved since the base."""
    world, theta, held = 0.0, 0.0, 0.0
    flying: list[float] = []
    for _ in range(20):
        theta -= 10.0
        flying.append(held - theta)
        if len(flying) > answer_late:
            world -= flying.pop(0)
            theta, held = theta + world - held, world
    assert world < -1000.0  # and the work was -200


def test_two_syncs_late_a_cut_is_skipped_and_its_span_grows() -> None:
    """At most two cuts are undecided, so the third waits; nothing of it is lost."""
    unit = Lone(elements=1)
    flying: list[Pending] = []
    for sync in range(20):
        unit.work(-10.0)
        if len(flying) < 2:
            flying.append(unit.publish())
        if sync % 3 == 2:
            unit.merge(flying.pop(0))
            unit.sync()
    fresh = unit.state.reference - unit.theta
    in_flight = sum((pending.displacement for pending in unit.state.undecided if pending.displacement is not None), torch.zeros(1))
    assert _close(unit.world - unit.start - in_flight - fresh, torch.tensor([-200.0]))


# cut


def test_a_cut_is_reference_minus_local_and_moves_the_reference() -> None:
    unit = Lone()
    step = torch.tensor([-1.0, 2.0, 0.0, 0.5])
    unit.work(step)
    pending = unit.cut(tokens=30, steps=3)
    assert _close(payload_of(pending), -step)
    assert torch.equal(unit.state.reference, unit.theta)
    assert (pending.tokens, pending.steps, pending.resent, pending.seq) == (30, 3, False, None)
    assert pending.sum_squares == pytest.approx((float((step.double() ** 2).sum()),))
    unit.work(step)
    assert _close(payload_of(unit.cut()), -step)  # only what was done since


def test_a_cut_keeps_its_bytes_when_the_model_moves_on() -> None:
    unit = Lone(codec="int4")
    unit.work(1.0)
    pending = unit.cut()
    before = payload_of(pending)
    unit.work(5.0)
    unit.cut()
    assert torch.equal(payload_of(pending), before)


def test_a_cut_of_values_that_are_not_finite_is_refused_and_changes_nothing() -> None:
    unit = Lone(codec="int4")
    unit.work(1.0)
    unit.publish()
    before = (unit.state.reference.clone(), unit.state.residual.clone(), unit.state.account.produced, len(unit.state.undecided))
    unit.theta[2] = torch.nan
    with pytest.raises(NonFinite):
        unit.cut()
    state = unit.state
    assert torch.equal(state.reference, before[0]) and torch.equal(state.residual, before[1])
    assert (state.account.produced, len(state.undecided)) == before[2:]


def test_the_base_of_a_record_is_the_version_held_at_the_first_step_after_the_previous_cut() -> None:
    unit = Lone()
    unit.work(1.0)
    first = unit.publish()
    unit.others(0.25)  # version 1, adopted in the middle of the second span
    unit.work(1.0)
    unit.sync()
    unit.work(1.0)
    second = unit.publish()
    unit.work(1.0)
    third = unit.cut()
    assert [pending.base.fragment_version for pending in (first, second, third)] == [0, 0, 1]


# error feedback


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_with_error_feedback_the_sum_of_what_was_sent_follows_the_sum_produced(codec: str) -> None:
    """One large value keeps the scale coarse; the small ones would be quantised to zero for ever without error feedback."""
    unit = Lone(elements=4, codec=codec)
    step = -torch.tensor([10.0, 0.01, -0.3, 0.0])
    sent = torch.zeros(4, dtype=torch.float64)
    for _ in range(300):
        unit.work(step)
        pending = unit.publish()
        sent += payload_of(pending).double()
        unit.merge(pending)
        unit.sync()
        assert abs(unit.state.balance()) < 1e-2
    produced = -300 * step.double()
    bound = {"none": 2e-3, "bf16": 0.1, "int8": 0.2, "int4": 2.0}[codec]  # a step of the quantiser, not 300 of them
    assert (sent - produced).abs().max() < bound


def test_without_error_feedback_small_values_never_arrive_and_the_account_says_so() -> None:
    unit = Lone(elements=2, codec="int4", decay=0.0)
    sent = torch.zeros(2)
    for _ in range(50):
        unit.work(torch.tensor([-7.0, -0.25]))
        pending = unit.publish()
        sent += payload_of(pending)
        unit.merge(pending)
        unit.sync()
    assert sent.tolist() == pytest.approx([350.0, 0.0], abs=1e-3)
    assert unit.state.account.decayed == pytest.approx(49 * 0.25, rel=1e-3)
    assert abs(unit.state.balance()) < 1e-3


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "step",
    [[1e-12] * 4, [1e6, 1e-6, -1e-6, 1e-6], [1e-30] * 4, [1e-30, -3e-31, 0.0, 1e-33]],
    ids=["tiny", "one large", "at the smallest scale", "below it"],
)
def test_tiny_values_are_kept_until_they_are_large_enough_to_be_sent(step: list[float], codec: str) -> None:
    """Sent and kept is what was produced, element by element; and without the large value all of it arrives."""
    unit = Lone(elements=4, codec=codec)
    unit.state.reference.zero_()
    unit.theta.zero_()
    moved, sent = torch.tensor(step), torch.zeros(4, dtype=torch.float64)

    def round_of(work: torch.Tensor) -> None:
        unit.work(-work)
        pending = unit.publish()
        sent.add_(payload_of(pending).double())
        unit.merge(pending)
        unit.world.copy_(unit.theta)  # so that local values never differ from what was produced
        unit.sync()

    for _ in range(40):
        round_of(moved)
    produced = 40 * moved.double()
    torch.testing.assert_close(sent + unit.state.residual.double(), produced, rtol=2e-5, atol=0.0)
    for _ in range(200):
        round_of(torch.zeros(4))
    below = {"none": 0.0, "bf16": 0.0, "int8": 127 * 2.0**-100, "int4": 7 * 2.0**-100}[codec]  # the smallest scale, format §5.9
    torch.testing.assert_close(sent, produced, rtol=2e-5, atol=below)


# take-back


@pytest.mark.parametrize("reason", sorted(TAKE_BACK))
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_what_is_taken_back_is_sent_again_whole_and_once(codec: str, decay: float, reason: str) -> None:
    unit = Lone(codec=codec, decay=decay)
    unit.work(torch.tensor([-3.0, 0.7, 0.1, 2.0]))
    lost = unit.publish(tokens=30, steps=3)
    error = unit.state.residual.clone()
    unit.refuse(lost, reason)
    unit.sync()
    assert unit.state.unmerged_tokens == 30 and unit.state.account.taken_back == 1
    fresh = torch.tensor([0.5, 0.5, 0.0, -1.0])
    unit.work(fresh)
    again = unit.publish(tokens=20, steps=2)
    assert again.resent and (again.tokens, again.steps) == (50, 5)
    wanted = decay * error + payload_of(lost) - fresh
    assert _close(payload_of(again) + unit.state.residual, wanted)
    unit.merge(again)
    unit.sync()
    last = unit.publish()
    assert not last.resent and unit.state.account.taken_back == 1
    assert abs(unit.state.balance()) < BALANCE
    if codec == "none":
        assert _close(unit.world, unit.theta) and _close(payload_of(last), torch.zeros(4))
    assert unit.state.account.lost_tokens == 0


def test_local_work_stays_in_the_model_while_it_is_taken_back() -> None:
    unit = Lone()
    unit.work(-1.0)
    lost = unit.publish()
    unit.refuse(lost, "missing")
    unit.others(0.5)
    unit.sync()
    assert _close(unit.theta, unit.world - 1.0)
    unit.others(0.5)
    unit.sync()  # still taken back, not sent again
    assert _close(unit.theta, unit.world - 1.0)
    again = unit.publish()
    unit.others(0.5)
    unit.sync()
    assert _close(unit.theta, unit.world - 1.0)
    unit.merge(again)
    unit.sync()
    assert _close(unit.theta, unit.world)


def test_work_sent_again_keeps_its_oldest_base() -> None:
    unit = Lone()
    unit.work(-1.0)
    lost = unit.publish()
    unit.work(-1.0)
    unit.others(0.5)
    unit.sync()
    second = unit.publish()
    unit.others(0.5)
    unit.refuse(lost, "corrupt")
    unit.sync()
    unit.work(-1.0)
    third = unit.publish()
    unit.work(-1.0)
    unit.merge(second)
    unit.sync()
    fourth = unit.publish()
    assert [p.base.fragment_version for p in (lost, second, third, fourth)] == [0, 0, 0, 2]


def test_two_that_are_taken_back_are_sent_again_together() -> None:
    unit = Lone()
    unit.work(-1.0)
    first = unit.publish(tokens=1)
    unit.work(-2.0)
    second = unit.publish(tokens=2)
    unit.refuse(first, "missing")
    unit.refuse(second, "corrupt")
    unit.sync()
    unit.work(-4.0)
    third = unit.publish(tokens=4)
    assert _close(payload_of(third), torch.full((4,), 7.0)) and third.tokens == 7
    unit.merge(third)
    unit.sync()
    assert _close(unit.theta, unit.world) and abs(unit.state.balance()) < BALANCE


# discard


@pytest.mark.parametrize("reason", DISCARDED)
def test_a_refusal_for_good_leads_to_replacement_and_counts_the_tokens(reason: str) -> None:
    unit = Lone(codec="int4")
    unit.work(torch.tensor([-3.0, 0.7, 0.1, 2.0]))
    poison = unit.publish(tokens=30)
    unit.others(0.25)
    unit.work(-1.0)  # since the cut
    unit.refuse(poison, reason)
    correction = unit.settle()
    assert correction is not None and correction.replaces
    unit.adopt(correction, lost_tokens=5)
    assert torch.equal(unit.theta, unit.world) and torch.equal(unit.state.reference, unit.world)
    assert unit.state.account.lost_tokens == 35 and not unit.state.residual.any()
    assert unit.state.base == unit.state.held == base_of(1)
    assert abs(unit.state.balance()) < BALANCE
    unit.work(-0.5)
    after = unit.publish()
    assert _close(payload_of(after) + unit.state.residual, torch.full((4,), 0.5))  # nothing of the poison


def test_a_discard_takes_work_that_was_taken_back_along() -> None:
    unit = Lone()
    unit.work(-1.0)
    lost = unit.publish(tokens=3)
    unit.work(-2.0)
    poison = unit.publish(tokens=4)
    unit.refuse(lost, "missing")
    unit.refuse(poison, "norm")
    unit.sync()
    assert torch.equal(unit.theta, unit.world)
    assert unit.state.account.lost_tokens == 7 and unit.state.unmerged_tokens == 0
    assert not unit.publish().resent and abs(unit.state.balance()) < BALANCE


def test_a_contribution_on_its_way_survives_a_replacement_and_is_not_applied_twice() -> None:
    unit = Lone()
    unit.work(-1.0)
    poison = unit.publish()
    unit.work(-2.0)
    good = unit.publish()
    unit.refuse(poison, "stale")
    unit.sync()
    assert torch.equal(unit.theta, unit.world)  # the good one is out of the local parameters too, until it comes back merged
    unit.merge(good)
    unit.sync()
    assert _close(unit.theta, unit.world) and _close(unit.theta, unit.start - 2.0)


def test_a_cut_between_a_replacement_and_its_adoption_is_published_and_not_applied_twice() -> None:
    unit = Lone()
    unit.work(-1.0)
    poison = unit.publish()
    unit.refuse(poison, "norm")
    correction = unit.settle()
    unit.work(-2.0)
    between = unit.publish()
    unit.work(-4.0)
    unit.adopt(correction)
    assert torch.equal(unit.theta, unit.world) and abs(unit.state.balance()) < BALANCE
    unit.merge(between)
    unit.sync()
    assert _close(unit.theta, unit.start - 2.0) and _close(unit.theta, unit.world)
    assert abs(unit.state.balance()) < BALANCE


def test_a_cut_between_a_rebase_and_its_adoption_changes_nothing_of_it() -> None:
    unit = Lone()
    unit.work(-1.0)
    first = unit.publish()
    unit.merge(first)
    unit.others(10.0)
    correction = unit.settle()
    unit.work(-2.0)
    between = unit.publish()
    unit.work(-4.0)
    unit.adopt(correction)
    assert _close(unit.theta, unit.world - 6.0)
    assert _close(payload_of(between), torch.full((4,), 2.0))
    assert _close(payload_of(unit.publish()), torch.full((4,), 4.0))  # the correction is in no contribution


# the rest


def test_nothing_new_is_no_correction() -> None:
    unit = Lone()
    assert unit.settle() is None
    unit.work(-1.0)
    unit.publish()
    assert unit.settle() is None


def test_a_restored_residual_counts_as_produced_and_is_sent() -> None:
    state = FragmentState.begin(0, (entry_of(2),), value_of(torch.zeros(2)), base_of(0), codec="none", decay=1.0)
    state.restore_residual(torch.tensor([1.0, -3.0]))
    assert state.account.produced == -2.0 and state.balance() == 0.0
    pending = state.cut(value_of(torch.tensor([0.0, 1.0])), tokens=1, steps=1, inner_steps=1, loss=None)
    assert payload_of(pending).tolist() == [1.0, -4.0]


def test_a_taken_back_payload_decodes_from_the_bytes_that_were_sent() -> None:
    unit = Lone(elements=300, codec="int4")
    unit.work(torch.linspace(-1.0, 3.0, 300))
    lost = unit.publish()
    sent = payload_of(lost)
    unit.refuse(lost, "missing")
    unit.sync()
    assert unit.state.returned is not None and torch.equal(unit.state.returned, sent)
