"""Settings: defaults, bounds, and errors that say what to type instead (format §5.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.config import CreateSettings, MergeSettings, OuterSettings, RunSettings, parse_settings, read_toml, set_dotted
from ps_diloco.errors import ConfigError

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def _refused(values: dict[str, Any], model: type[Any] = RunSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_settings(model, values, source="run.toml")
    assert "source=run.toml" in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_those_of_the_design() -> None:
    run = parse_settings(RunSettings, {}, source="-")
    assert run == RunSettings()
    assert run.outer == OuterSettings(lr=0.7, momentum=0.5)
    assert (run.merge.rule, run.merge.weight_cap, run.merge.staleness_power) == ("mean", 4.0, 0.5)
    assert (run.merge.quorum, run.merge.merge_at_least, run.merge.round_window, run.merge.round_tokens) == (1, 0.5, 16, None)
    assert (run.push.codec, run.push.error_feedback_decay) == ("int4", 1.0)
    assert (run.pull.codec, run.pull.anchor_every, run.pull.state_every) == ("int8", 20, 10)
    assert (run.unit.sync_every, run.unit.join_warmup_steps, run.unit.state_every_cuts) == (30, None, 10)
    assert [(region.name, region.url, region.status) for region in run.regions] == [("home", None, "active")]
    assert CreateSettings().staleness_limit == 64


@pytest.mark.parametrize(
    ("values", "where", "nearest"),
    [
        ({"outer": {"momentun": 0.9}}, "outer.momentun", "momentum"),
        ({"merge": {"quorom": 2}}, "merge.quorom", "quorum"),
        ({"merge": {"staleness_pow": 2.0}}, "merge.staleness_pow", "staleness_power"),
        ({"target_token": 5}, "target_token", "target_tokens"),
        ({"outter": {}}, "outter", "outer"),
        ({"unit": {"sync_evry": 5}}, "unit.sync_evry", "sync_every"),
        ({"regions": [{"name": "a"}, {"nam": "b"}]}, "regions.1.nam", "name"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(values: dict[str, Any], where: str, nearest: str) -> None:
    assert f"unknown setting {where!r}, did you mean {nearest!r}?" in _refused(values)


def test_an_unknown_setting_unlike_any_other_is_refused_with_all_names() -> None:
    assert "unknown setting 'outer.xyz', known are lr, momentum" in _refused({"outer": {"xyz": 1}})


def test_the_nearest_name_is_looked_for_in_the_right_section() -> None:
    assert "did you mean" not in _refused({"outer": {"quorum": 1}})


@pytest.mark.parametrize(
    ("values", "where", "value"),
    [
        ({"outer": {"lr": "0.7"}}, "outer.lr", "'0.7'"),
        ({"outer": {"lr": True}}, "outer.lr", "True"),
        ({"outer": {"lr": 0.0}}, "outer.lr", "0.0"),
        ({"outer": {"lr": -1}}, "outer.lr", "-1"),
        ({"outer": {"lr": math.nan}}, "outer.lr", "nan"),
        ({"outer": {"lr": math.inf}}, "outer.lr", "inf"),
        ({"outer": {"momentum": 1.0}}, "outer.momentum", "1.0"),
        ({"outer": 3}, "outer", "3"),
        ({"merge": {"rule": "median"}}, "merge.rule", "'median'"),
        ({"merge": {"weight_cap": 0.5}}, "merge.weight_cap", "0.5"),
        ({"merge": {"weight_cap": math.inf}}, "merge.weight_cap", "inf"),
        ({"merge": {"quorum": 0}}, "merge.quorum", "0"),
        ({"merge": {"quorum": 1.0}}, "merge.quorum", "1.0"),
        ({"merge": {"quorum": True}}, "merge.quorum", "True"),
        ({"merge": {"merge_at_least": 1.5}}, "merge.merge_at_least", "1.5"),
        ({"merge": {"grace_s_max": -1.0}}, "merge.grace_s_max", "-1.0"),
        ({"merge": {"round_tokens": 0}}, "merge.round_tokens", "0"),
        ({"push": {"codec": "int5"}}, "push.codec", "'int5'"),
        ({"push": {"error_feedback_decay": 1.01}}, "push.error_feedback_decay", "1.01"),
        ({"pull": {"anchor_every": 1001}}, "pull.anchor_every", "1001"),
        ({"pull": {"state_every": True}}, "pull.state_every", "True"),
        ({"unit": {"sync_every": "30"}}, "unit.sync_every", "'30'"),
        ({"target_tokens": 1e9}, "target_tokens", "1000000000.0"),
        ({"regions": "home"}, "regions", "'home'"),
        ({"regions": [{"name": "US East"}]}, "regions.0.name", "'US East'"),
        ({"regions": [{"name": "a\n"}]}, "regions.0.name", "'a\\n'"),
        ({"regions": [{"status": "gone"}]}, "regions.0.status", "'gone'"),
    ],
)
def test_a_wrong_type_or_value_names_setting_and_value(values: dict[str, Any], where: str, value: str) -> None:
    assert f"setting {where!r} = {value}: " in _refused(values)


def test_all_wrong_settings_are_named_at_once() -> None:
    text = _refused({"outer": {"lr": 0, "momentun": 1}, "unit": {"sync_every": 0}})
    assert all(name in text for name in ("outer.lr", "outer.momentun", "unit.sync_every"))


def test_the_number_of_fragments_has_bounds() -> None:
    assert parse_settings(CreateSettings, {"num_fragments": 64}, source="-").num_fragments == 64
    for wrong in (0, 65, -1, 1.0, True):
        assert f"setting 'num_fragments' = {wrong!r}" in _refused({"num_fragments": wrong}, CreateSettings)


@pytest.mark.parametrize("regions", [[], [{"name": "a"}, {"name": "b"}, {"name": "a"}], [{}, {"name": "home"}]])
def test_regions_need_distinct_names(regions: list[dict[str, str]]) -> None:
    assert "regions need distinct names, at least one" in _refused({"regions": regions})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunSettings().outer.lr = 0.1  # type: ignore[misc]


@PROPERTY
@given(
    st.floats(0, 10, exclude_min=True),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 2**40),
    st.sampled_from(["none", "bf16", "int8", "int4"]),
    st.one_of(st.none(), st.integers(1, 2**53)),
)
def test_settings_come_back_from_json_and_from_plain_values(lr: float, momentum: float, every: int, codec: str, target: int | None) -> None:
    values = {
        "outer": {"lr": lr, "momentum": momentum},
        "push": {"codec": codec},
        "unit": {"sync_every": every},
        "target_tokens": target,
        "regions": [{"name": "home"}, {"name": "far", "url": "s3://bucket/run", "status": "retired"}],
    }
    run = parse_settings(RunSettings, values, source="-")
    assert (run.outer.lr, run.outer.momentum, run.unit.sync_every, run.push.codec, run.target_tokens) == (
        lr,
        momentum,
        every,
        codec,
        target,
    )
    assert RunSettings.model_validate_json(run.model_dump_json()) == run
    assert parse_settings(RunSettings, run.model_dump(mode="json"), source="-") == run


@PROPERTY
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))
)
def test_whatever_stands_in_a_setting_only_a_config_error_comes_out(value: Any) -> None:
    for section, field in (("outer", "lr"), ("merge", "quorum"), ("push", "codec"), ("unit", "join_warmup_steps")):
        for values in ({section: {field: value}}, {section: value}, {"regions": [value]}, {"regions": value}):
            try:
                parse_settings(RunSettings, values, source="-")
            except ConfigError as error:
                assert "setting" in str(error) or "regions" in str(error)


def test_a_dotted_assignment_sets_a_toml_value() -> None:
    values: dict[str, Any] = {"outer": {"momentum": 0.9}}
    for assignment in (
        "outer.lr=0.5",
        "push.codec=int8",
        'pull.codec="bf16"',
        "merge.quorum = 3",
        "target_tokens=1_000",
        "regions=[{name='a'},{name='b'}]",
    ):
        set_dotted(values, assignment)
    run = parse_settings(RunSettings, values, source="command line")
    assert (run.outer.lr, run.outer.momentum, run.push.codec, run.pull.codec) == (0.5, 0.9, "int8", "bf16")
    assert (run.merge.quorum, run.target_tokens, [region.name for region in run.regions]) == (3, 1000, ["a", "b"])


def test_the_last_of_two_assignments_counts() -> None:
    values: dict[str, Any] = {}
    set_dotted(values, "outer.lr=0.5")
    set_dotted(values, "outer.lr=0.6")
    assert values == {"outer": {"lr": 0.6}}


@pytest.mark.parametrize("assignment", ["outer.lr", "=1", ".lr=1", "outer.=1", "outer..lr=1", "", "  =1"])
def test_an_assignment_without_name_or_value_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.name=value"):
        set_dotted({}, assignment)


def test_an_assignment_below_a_plain_value_is_refused() -> None:
    values: dict[str, Any] = {"outer": {"lr": 0.5}, "regions": [{}]}
    for assignment in ("outer.lr.x=1", "regions.0.name=a"):
        with pytest.raises(ConfigError, match="not a section"):
            set_dotted(values, assignment)


def test_an_assignment_cannot_smuggle_in_a_second_one() -> None:
    values: dict[str, Any] = {}
    set_dotted(values, "outer.lr=0.5\nmomentum = 0.1")
    assert values == {"outer": {"lr": "0.5\nmomentum = 0.1"}}
    assert "outer.lr" in _refused(values)


@PROPERTY
@given(st.text(max_size=20))
def test_any_right_side_is_a_value_or_its_own_text(text: str) -> None:
    values: dict[str, Any] = {}
    set_dotted(values, f"a.b={text}")
    assert list(values) == ["a"]
    assert list(values["a"]) == ["b"]


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('target_tokens = 5\n[outer]\nlr = 1\n[[regions]]\nname = "a"\n', encoding="utf-8")
    run = parse_settings(RunSettings, read_toml(path), source=str(path))
    assert (run.target_tokens, run.outer.lr, run.regions[0].name) == (5, 1.0, "a")


@pytest.mark.parametrize("body", [b"[outer\nlr = 1", b"a = 1\na = 2", b"\xff\xfe", b"lr 0.7"])
def test_a_broken_toml_file_is_named_with_its_path(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(body)
    with pytest.raises(ConfigError, match="cannot read the configuration file") as caught:
        read_toml(path)
    assert caught.value.facts["path"] == path


def test_a_toml_error_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[outer]\nlr 0.7\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_toml(path)


def test_a_missing_file_and_a_folder_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot read the configuration file"):
            read_toml(path)


def test_toml_values_that_json_does_not_have_are_refused() -> None:
    values: dict[str, Any] = {}
    set_dotted(values, "target_tokens=2020-01-01")
    set_dotted(values, "merge.grace_s_max=inf")
    text = _refused(values)
    assert "target_tokens" in text
    assert "merge.grace_s_max" in text


def test_every_setting_with_a_number_has_a_description() -> None:
    for model in (OuterSettings, MergeSettings):
        assert [name for name, field in model.model_fields.items() if not field.description and name != "rule"] == []
