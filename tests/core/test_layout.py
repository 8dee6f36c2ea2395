"""Layouts: every element in exactly one place, ties by storage, and hostile layouts refused (format §5.2)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from ps_diloco.errors import LayoutError
from ps_diloco.layout import (
    FRAGMENTS_MAX,
    ROLE_ARRAY,
    FragmentSize,
    Layout,
    LayoutEntry,
    build_layout,
    check_same_layout,
    plain_name,
    role_of,
    stored_tensors,
)

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)

DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.tuples(st.sampled_from(["parameter", "frozen", "float_buffer", "int_buffer", "scratch"]), SHAPES, DTYPES)
PLANS = st.recursive(
    st.lists(TENSORS, max_size=4).map(lambda tensors: (tensors, [])),
    lambda inner: st.tuples(st.lists(TENSORS, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=6,
)


class Node(nn.Module):
    """A module with the tensors and children of a plan."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        tensors, children = plan
        for i, (role, shape, dtype) in enumerate(tensors):
            if role in ("parameter", "frozen"):
                self.register_parameter(f"t{i}", nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=role == "parameter"))
            elif role == "int_buffer":
                self.register_buffer(f"t{i}", torch.zeros(shape, dtype=torch.int64 if dtype == torch.float32 else torch.bool))
            else:
                self.register_buffer(f"t{i}", torch.zeros(shape, dtype=dtype), persistent=role != "scratch")
        for i, child in enumerate(children):
            self.add_module(f"c{i}", Node(child))


class Wrapper(nn.Module):
    """What DDP, torch.compile and activation checkpointing do to names."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


def _trainable(model: nn.Module) -> list[int]:
    return [p.numel() for p in model.parameters() if p.requires_grad and p.numel()]


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    model = Node(draw(PLANS))
    model.register_parameter("always", nn.Parameter(torch.zeros(draw(st.integers(1, 30)))))
    return model


@PROPERTY
@given(models(), st.data())
def test_every_element_of_a_model_stands_in_exactly_one_place(model: nn.Module, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(len(_trainable(model)), 8)))
    layout = build_layout(model, count)
    taken: set[tuple[int, str, int]] = set()
    for entry in layout.entries:
        array = ROLE_ARRAY[entry.role]
        assert entry.offset + entry.size <= getattr(layout.fragments[entry.fragment], array)
        for element in range(entry.offset, entry.offset + entry.size):
            assert (entry.fragment, array, element) not in taken
            taken.add((entry.fragment, array, element))
    assert len(taken) == sum(sum(dict(fragment).values()) for fragment in layout.fragments)
    expected = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in model.state_dict()}
    assert {entry.name: (entry.shape, entry.dtype, entry.role) for entry in layout.entries} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), role_of(tensor)) for name, tensor in expected.items()
    }
    assert layout.elements == sum(_trainable(model))
    assert all(fragment.elements > 0 for fragment in layout.fragments)


@PROPERTY
@given(models(), st.integers(1, 8))
def test_a_layout_comes_back_from_json_with_the_same_hash(model: nn.Module, count: int) -> None:
    assume(count <= len(_trainable(model)))
    layout = build_layout(model, count)
    back = Layout.model_validate_json(layout.model_dump_json())
    assert back == layout
    assert back.hash == layout.hash == build_layout(model, count).hash
    check_same_layout(layout, back)


@PROPERTY
@given(models(), st.permutations(["module", "_orig_mod", "_checkpoint_wrapped_module"]), st.integers(1, 3))
def test_wrappers_change_nothing_whatever_their_order(model: nn.Module, names: list[str], depth: int) -> None:
    layout = build_layout(model)
    wrapped = model
    for name in names[:depth]:
        wrapped = Wrapper(wrapped, name)
    assert build_layout(wrapped) == layout
    inside = Wrapper(model, "body")
    assert build_layout(Wrapper(Wrapper(model, names[0]), "body")) == build_layout(inside)


def test_plain_names_have_no_wrapper_prefix_at_any_depth() -> None:
    assert plain_name("module._orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"
    assert plain_name("module") == "module"
    assert plain_name("submodule.weight") == "submodule.weight"


@PROPERTY
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 8))
def test_fragments_are_balanced_to_within_the_largest_tensor(sizes: list[int], count: int) -> None:
    assume(count <= len(sizes))
    layout = build_layout(nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes]), count)
    loads = [fragment.elements for fragment in layout.fragments]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("count", range(1, 9))
def test_equal_blocks_are_spread_evenly(count: int) -> None:
    layout = build_layout(nn.Sequential(*[nn.Linear(16, 16) for _ in range(16)]), count)
    loads = [fragment.elements for fragment in layout.fragments]
    assert max(loads) <= math.ceil(16 / count) * (16 * 16 + 16)
    assert min(loads) >= 16 // count * 16 * 16


def test_within_a_fragment_tensors_keep_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 50), nn.Linear(50, 1))
    layout = build_layout(model)
    assert [entry.name for entry in layout.of(0)] == [name for name, _ in model.named_parameters()]
    assert layout.of(0)[1].offset == 6
    assert layout.entry_at(0, 5) == "0.weight"
    assert layout.entry_at(0, 6) == "0.bias"
    assert layout.entry_at(0, layout.elements) == "?"


def test_the_hash_of_a_layout_is_stable() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = build_layout(model)
    text = json.dumps(layout.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    assert text.startswith(
        '{"entries":[{"aliases":[],"dtype":"float32","embedding":false,"fragment":0,"name":"0.weight","offset":0,"role":"parameter"'
    )
    assert layout.hash == "54eaf57ecddf19e5b33cdee0f664860573a38058a9ef7b90f8b926d587ebbd29"


def test_values_do_not_matter() -> None:
    one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    assert not torch.equal(one.weight, other.weight)
    assert build_layout(one).hash == build_layout(other).hash


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_parameters_are_one_entry_with_an_alias() -> None:
    entries = {entry.name: entry for entry in build_layout(Tied()).entries}
    assert entries["embed.weight"].aliases == ("head.weight",)
    assert entries["embed.weight"].embedding
    assert "head.weight" not in entries
    assert build_layout(Tied()).elements == 28 + 20


def test_ties_are_found_by_storage_not_by_identity_of_the_parameter() -> None:
    model = Tied(tied=False)
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert model.head.weight is not model.embed.weight
    assert build_layout(model) == build_layout(Tied())


def test_parameters_that_are_equal_but_not_shared_are_two_entries() -> None:
    model = Tied(tied=False)
    model.head.weight.data.copy_(model.embed.weight.data)
    assert {entry.name for entry in build_layout(model).entries} >= {"embed.weight", "head.weight"}


@pytest.mark.parametrize("same_parameter", [True, False])
def test_a_tie_seen_from_the_head_first_is_an_embedding_too(same_parameter: bool) -> None:
    model = nn.Module()
    model.head = nn.Linear(4, 7, bias=False)
    model.embed = nn.Embedding(7, 4)
    model.embed.weight = model.head.weight if same_parameter else nn.Parameter(model.head.weight.data)
    (entry,) = build_layout(model).entries
    assert (entry.name, entry.aliases, entry.embedding) == ("head.weight", ("embed.weight",), True)


def test_one_module_under_two_names_is_stored_once() -> None:
    shared = nn.Linear(3, 3)
    layout = build_layout(nn.ModuleDict({"a": shared, "b": shared}))
    assert [(entry.name, entry.aliases) for entry in layout.entries] == [("a.weight", ("b.weight",)), ("a.bias", ("b.bias",))]


def test_a_module_that_is_held_wrapped_and_plain_has_no_alias_of_its_own_name() -> None:
    inner = nn.Linear(2, 2)
    model = Wrapper(inner, "module")
    model.add_module("_orig_mod", inner)
    assert build_layout(model) == build_layout(inner)


def test_tying_makes_another_layout() -> None:
    with pytest.raises(LayoutError, match=r"only_in_model=\['head.weight'\]"):
        check_same_layout(build_layout(Tied()), build_layout(Tied(tied=False)))


def test_buffers_are_in_the_layout_if_they_are_persistent() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.zeros(100), persistent=False)
    model.register_buffer("absent", None)
    layout = build_layout(model)
    assert {entry.name: (entry.role, entry.dtype) for entry in layout.entries if entry.role != "parameter"} == {
        "1.running_mean": ("float_buffer", "float32"),
        "1.running_var": ("float_buffer", "float32"),
        "1.num_batches_tracked": ("int_buffer", "int64"),
    }
    assert layout.fragments == (FragmentSize(elements=15, floats=6, ints=1, frozen=0),)


def test_buffers_below_an_activation_checkpoint_are_not_lost() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = nn.Sequential(nn.Linear(2, 3), checkpoint_wrapper(nn.BatchNorm1d(3)))
    assert build_layout(wrapped) == build_layout(plain)


def test_frozen_parameters_are_neither_exchanged_nor_lost() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(requires_grad=False)
    layout = build_layout(model)
    assert layout.elements == 8
    assert layout.fragments[0].frozen == 9
    assert [entry.name for entry in layout.of(0, "frozen")] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("shapes", [[(), (0,), (1,), (3,), (7, 13), (2, 50)]])
def test_odd_shapes_have_their_place(shapes: list[tuple[int, ...]]) -> None:
    layout = build_layout(nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes]))
    assert [entry.size for entry in layout.entries] == [math.prod(shape) for shape in shapes]
    assert layout.elements == 1 + 0 + 1 + 3 + 91 + 100


class Views(nn.Module):
    """Parameters that are views of one storage."""

    def __init__(self, *views: torch.Tensor) -> None:
        super().__init__()
        for i, view in enumerate(views):
            self.register_parameter(f"w{i}", nn.Parameter(view))


@pytest.mark.parametrize(
    "cut",
    [
        lambda flat: (flat[:6], flat[5:]),
        lambda flat: (flat, flat[:4]),
        lambda flat: (flat[2:4], flat),
        lambda flat: (flat[:6].view(2, 3), flat[:6].view(3, 2)),
        lambda flat: (flat[:9].view(3, 3), flat[:9].view(3, 3).T),
        lambda flat: (flat, flat.view(torch.float16)),
        lambda flat: (flat[:4], flat[6:], flat[3:7]),
        lambda flat: (flat[:1].expand(5),),
    ],
)
def test_storage_that_is_shared_in_part_is_refused(cut: Any) -> None:
    with pytest.raises(LayoutError, match="share"):
        build_layout(Views(*cut(torch.zeros(12))))


def test_views_of_one_storage_that_do_not_meet_are_separate_tensors() -> None:
    flat = torch.zeros(12)
    layout = build_layout(Views(flat[8:], flat[:6].view(2, 3), flat[6:8]))
    assert [(entry.name, entry.size, entry.aliases) for entry in layout.entries] == [("w0", 4, ()), ("w1", 6, ()), ("w2", 2, ())]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()],
    ids=["complex", "meta", "sparse"],
)
def test_tensors_that_cannot_be_exchanged_are_refused_by_name(tensor: torch.Tensor) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    with pytest.raises(LayoutError, match="name=odd"):
        build_layout(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.uint64, torch.complex64], ids=str)
@pytest.mark.parametrize("role", ["parameter", "frozen", "buffer"])
def test_dtypes_that_would_be_rounded_are_refused_with_a_remedy(role: str, dtype: torch.dtype) -> None:
    if role == "parameter" and dtype == torch.uint64:
        return  # torch itself refuses that
    model = nn.Linear(2, 2)
    tensor = torch.zeros(2, dtype=dtype)
    if role == "buffer":
        model.register_buffer("odd", tensor)
    else:
        model.register_parameter("odd", nn.Parameter(tensor, requires_grad=role == "parameter"))
    with pytest.raises(LayoutError, match=f"name=odd dtype={dtype}") as caught:
        build_layout(model)
    assert dtype.is_complex or ("persistent=False" in caught.value.remedy) == (role != "parameter")
    if role == "buffer":
        model.register_buffer("odd", tensor, persistent=False)
        assert build_layout(model) == build_layout(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64], ids=str
)
def test_integers_of_any_width_up_to_64_bits_have_their_place(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(3, dtype=dtype))
    (entry,) = build_layout(model).of(0, "int_buffer")
    assert (entry.name, entry.dtype, entry.size) == ("count", str(dtype).removeprefix("torch."), 3)


def test_names_that_are_equal_without_wrapper_prefixes_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model.module = nn.Linear(2, 2, bias=False)
    with pytest.raises(LayoutError, match="name=weight"):
        build_layout(model)


def test_a_model_without_anything_to_train_is_refused() -> None:
    for model in (
        nn.Module(),
        nn.BatchNorm1d(3, affine=False),
        nn.Linear(2, 2).requires_grad_(requires_grad=False),
        nn.ParameterList([torch.zeros(0)]),
    ):
        with pytest.raises(LayoutError, match="no trainable parameter"):
            build_layout(model)


@pytest.mark.parametrize("count", [0, -1, 3, FRAGMENTS_MAX + 1])
def test_more_fragments_than_trainable_tensors_are_refused(count: int) -> None:
    with pytest.raises(LayoutError, match=f"num_fragments={count}"):
        build_layout(nn.Linear(2, 2), count)


def test_an_empty_tensor_does_not_make_a_fragment() -> None:
    with pytest.raises(LayoutError, match="trainable_tensors=2"):
        build_layout(nn.ParameterList([torch.zeros(3), torch.zeros(0), torch.zeros(1)]), 3)


def test_stored_tensors_are_the_tensors_of_the_model_themselves() -> None:
    model = Tied()
    found = stored_tensors(model)
    assert found["embed.weight"][0] is model.embed.weight
    assert list(found) == ["embed.weight", "body.weight", "body.bias"]


def _entry(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "a",
        "shape": (4,),
        "dtype": "float32",
        "role": "parameter",
        "fragment": 0,
        "offset": 0,
        "aliases": (),
        "embedding": False,
    }
    return {**entry, **changes}


def _layout(entries: list[dict[str, Any]], **sizes: int) -> Layout:
    size = FragmentSize(**{"elements": 6, "floats": 0, "ints": 0, "frozen": 0, **sizes})
    return Layout(fragments=(size,), entries=tuple(LayoutEntry(**entry) for entry in entries))


SECOND = _entry(name="b", shape=(2,), offset=4)


def test_the_layout_that_the_hostile_ones_are_made_from_is_valid() -> None:
    assert _layout([_entry(), SECOND]).elements == 6


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        ([_entry(), {**SECOND, "offset": 5}], {"elements": 7}),
        ([_entry(), {**SECOND, "offset": 3}], {"elements": 5}),
        ([_entry(offset=1), {**SECOND, "offset": 5}], {"elements": 7}),
        ([SECOND, _entry()], {}),
        ([_entry(), SECOND], {"elements": 5}),
        ([_entry(), SECOND], {"elements": 7}),
        ([_entry(), SECOND], {"frozen": 1}),
        ([_entry(), {**SECOND, "name": "a"}], {}),
        ([_entry(aliases=("b",)), SECOND], {}),
        ([_entry(aliases=("a",)), SECOND], {}),
        ([_entry(aliases=("c", "c")), SECOND], {}),
        ([_entry(), {**SECOND, "fragment": 1, "offset": 0}], {"elements": 4}),
        ([_entry(), SECOND, _entry(name="c", shape=(0,), fragment=5)], {}),
        ([_entry(), {**SECOND, "fragment": -1}], {}),
        ([_entry(), {**SECOND, "fragment": FRAGMENTS_MAX}], {}),
        ([_entry(offset=-4), {**SECOND, "offset": 0}], {"elements": 2}),
        ([_entry(shape=(-4,)), SECOND], {}),
        ([_entry(shape=(2**36 + 1,))], {"elements": 2**36 + 1}),
        ([_entry(shape=(4.0,)), SECOND], {}),
        ([_entry(shape=(True, 4)), SECOND], {}),
        ([_entry(role="float_buffer"), SECOND], {}),
        ([_entry(role="weights"), SECOND], {}),
        ([_entry(dtype="float64"), SECOND], {}),
        ([_entry(dtype="load"), SECOND], {}),
        ([_entry(dtype="int64"), SECOND], {}),
        ([_entry(), SECOND, _entry(name="c", role="int_buffer")], {"ints": 4}),
        ([_entry(name=""), SECOND], {}),
        ([_entry(shape=(4,) + (1,) * 64), SECOND], {}),
        ([_entry(surprise=1), SECOND], {}),
        ([_entry(role="frozen")], {"elements": 0, "frozen": 4}),
        ([], {"elements": 0}),
    ],
)
def test_hostile_layouts_are_refused(entries: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        _layout(entries, **sizes)


def test_a_layout_has_at_most_64_fragments() -> None:
    size = FragmentSize(elements=1, floats=0, ints=0, frozen=0)
    for count in (FRAGMENTS_MAX, FRAGMENTS_MAX + 1):
        entries = [_entry(name=str(i), shape=(1,), fragment=min(i, 63), offset=0 if i < 64 else 1) for i in range(count)]
        parts = {"fragments": (size,) * count, "entries": tuple(LayoutEntry(**entry) for entry in entries)}
        if count <= FRAGMENTS_MAX:
            assert Layout(**parts).elements == count
        else:
            with pytest.raises(ValidationError):
                Layout(**parts)


@pytest.mark.parametrize(
    ("run", "model", "said"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), r"only_in_run=\['bias'\] only_in_model=\[\]"),
        (nn.Linear(2, 3, bias=False), nn.Linear(2, 3), r"only_in_run=\[\] only_in_model=\['bias'\]"),
        (nn.Linear(2, 3), nn.Linear(3, 2), r"name=weight field=shape run=\(3, 2\) model=\(2, 3\)"),
        (nn.Linear(2, 3), nn.Linear(2, 3).bfloat16(), r"name=weight field=dtype run=float32 model=bfloat16"),
        (nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(requires_grad=False), "no trainable"),
        (nn.Embedding(2, 3), nn.Linear(3, 2, bias=False), r"name=weight field=embedding run=True model=False"),
    ],
)
def test_the_first_difference_between_run_and_model_is_named(run: nn.Module, model: nn.Module, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        check_same_layout(build_layout(run), build_layout(model))


def test_a_frozen_layer_is_named_as_a_difference() -> None:
    run, model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(requires_grad=False)
    with pytest.raises(LayoutError, match="name=1.weight field=role run=parameter model=frozen"):
        check_same_layout(build_layout(run), build_layout(model))


def test_another_number_of_fragments_is_named_as_a_difference() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(LayoutError, match="field=fragment"):
        check_same_layout(build_layout(model, 1), build_layout(model, 2))


def test_another_order_is_told_apart() -> None:
    one = _layout([_entry(), _entry(name="f", role="frozen"), SECOND], frozen=4)
    other = _layout([_entry(), SECOND, _entry(name="f", role="frozen")], frozen=4)
    with pytest.raises(LayoutError, match="another order"):
        check_same_layout(one, other)
