"""The corpus and the streams: disjoint, complete, repeatable, and clear about what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_diloco.errors import ConfigError
from workers.data import BLOCK_BYTES, SEPARATOR, Corpus, Document, Stream, load_corpus, split, window_count
from workers.settings import DataSettings


def corpus_of(train: bytes, held_out: bytes = bytes(range(200))) -> Corpus:
    return Corpus(
        source="test",
        train_N=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        held_out_N=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
    )


COUNTING = corpus_of(bytes(range(251)))


def stream_of(unit: str = "a", *, run_seed: int = 0, batch_size: int = 4) -> Stream:
    """25 windows of 10 bytes: window w starts with the byte 10 w."""
    return Stream(COUNTING, run_seed=run_seed, unit=unit, context=10, batch_size=batch_size)


def windows_of(stream: Stream, batches: int) -> list[int]:
    return [int(first) // 10 for _ in range(batches) for first in stream.next_batch()[0][:, 0]]


def test_targets_are_one_byte_ahead() -> None:
    tokens_BT, targets_BT = stream_of().next_batch()
    assert tokens_BT.shape == targets_BT.shape == (4, 10)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert torch.equal(targets_BT, tokens_BT + 1)


def test_each_epoch_gives_every_window_once_in_an_order_of_its_own() -> None:
    stream = stream_of(batch_size=5)
    first, second = windows_of(stream, 5), windows_of(stream, 5)
    assert sorted(first) == sorted(second) == list(range(25))
    assert first != second
    assert stream.cursor == {"epoch": 1, "position": 25}


def test_a_batch_goes_on_in_the_next_epoch() -> None:
    windows = windows_of(stream_of(batch_size=4), 25)
    assert sorted(windows) == sorted(list(range(25)) * 4)
    assert sorted(windows[25:50]) == list(range(25))


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    assert sorted(windows_of(stream_of(batch_size=60), 1)[:50]) == sorted(list(range(25)) * 2)


@pytest.mark.parametrize("other", [{"unit": "b"}, {"run_seed": 1}])
def test_units_and_runs_have_permutations_of_their_own(other: dict[str, Any]) -> None:
    ours, theirs = windows_of(stream_of(batch_size=5), 5), windows_of(stream_of(**other, batch_size=5), 5)
    assert ours != theirs
    assert sorted(ours) == sorted(theirs) == list(range(25))
    assert ours == windows_of(stream_of(batch_size=5), 5)


@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 40])
def test_a_cursor_resumes_with_the_same_batches(done: int) -> None:
    stream = stream_of()
    windows_of(stream, done)
    cursor = json.loads(json.dumps(stream.cursor))
    expected = windows_of(stream, 20)
    resumed = stream_of()
    resumed.resume(cursor)
    assert windows_of(resumed, 20) == expected


def test_a_cursor_beyond_a_smaller_text_starts_the_next_epoch() -> None:
    stream = stream_of(batch_size=5)
    stream.resume({"epoch": 2, "position": 1000})
    windows_of(stream, 1)
    assert stream.cursor == {"epoch": 3, "position": 5}


@pytest.mark.parametrize(
    "cursor",
    [
        {},
        {"epoch": 1},
        {"epoch": -1, "position": 0},
        {"epoch": 0, "position": "3"},
        {"epoch": True, "position": 0},
        {"epoch": 0, "position": 2**53},
        None,
        [0, 0],
    ],
)
def test_what_is_no_cursor_is_refused(cursor: Any) -> None:
    with pytest.raises(ConfigError, match="a data cursor holds two whole numbers"):
        stream_of().resume(cursor)


@pytest.mark.parametrize(("batches", "sizes"), [(1, [4]), (3, [4, 4, 4]), (100, [4, 4, 4, 4, 3])])
def test_held_out_batches_are_fixed_distinct_and_bounded(batches: int, sizes: list[int]) -> None:
    def starts() -> Iterator[int]:
        for tokens_BT, targets_BT in COUNTING.held_out_batches(batches, batch_size=4, context=10):
            assert torch.equal(targets_BT, tokens_BT + 1)
            found.append(len(tokens_BT))
            yield from (int(first) for first in tokens_BT[:, 0])

    found: list[int] = []
    once = list(starts())
    assert found == sizes
    assert len(set(once)) == len(once)
    assert once == list(starts())


def test_held_out_batches_reach_over_the_whole_part() -> None:
    starts = [int(tokens_BT[0, 0]) for tokens_BT, _ in COUNTING.held_out_batches(19, batch_size=1, context=10)]
    assert starts == list(range(0, 190, 10))
    few = [int(tokens_BT[0, 0]) for tokens_BT, _ in COUNTING.held_out_batches(3, batch_size=1, context=10)]
    assert few == [0, 60, 120]


def test_whole_files_are_held_out_where_there_are_many() -> None:
    documents = [Document(name=f"dir/{index}.txt", body=f"<{index}>".encode()) for index in range(1000)]
    train, held_out = split(documents, 0.05)
    train_parts, held_out_parts = (set(bytes(part).split(bytes([SEPARATOR]))) for part in (train, held_out))
    assert not train_parts & held_out_parts
    assert train_parts | held_out_parts == {document.body for document in documents}
    assert 25 <= len(held_out_parts) <= 80
    fewer = set(bytes(split(documents[:500], 0.05)[1]).split(bytes([SEPARATOR])))
    assert fewer == {body for body in held_out_parts if int(body[1:-1]) < 500}


def test_blocks_are_held_out_of_a_single_file() -> None:
    blocks = [index.to_bytes(4) * (BLOCK_BYTES // 4) for index in range(1, 401)]
    train, held_out = split([Document(name="book.txt", body=b"".join(blocks))], 0.05)
    assert len(train) + len(held_out) == 400 * BLOCK_BYTES
    assert len(held_out) % BLOCK_BYTES == 0
    assert 8 <= len(held_out) // BLOCK_BYTES <= 36
    found = [bytes(part[start : start + BLOCK_BYTES]) for part in (train, held_out) for start in range(0, len(part), BLOCK_BYTES)]
    assert sorted(found) == sorted(blocks)


def test_one_large_file_among_many_is_split_in_blocks() -> None:
    documents = [Document(name=f"{index}", body=b"x" * 100) for index in range(100)] + [Document(name="large", body=b"y" * 1_000_000)]
    train, held_out = split(documents, 0.05)
    assert train.count(b"y") + held_out.count(b"y") == 1_000_000
    assert 10_000 < held_out.count(b"y") < 120_000


def test_something_is_always_held_out() -> None:
    for name in "abcdefgh":
        train, held_out = split([Document(name=name, body=b"z" * (3 * BLOCK_BYTES))], 0.001)
        assert (len(train), len(held_out)) == (2 * BLOCK_BYTES, BLOCK_BYTES)


def test_the_standard_library() -> None:
    corpus = load_corpus(DataSettings(), context=128)
    assert 5e6 < len(corpus.train_N) < 40e6
    assert 0.02 < len(corpus.held_out_N) / len(corpus.train_N) < 0.1
    assert corpus.train_N.dtype == torch.uint8
    again = load_corpus(DataSettings(), context=128)
    assert torch.equal(corpus.train_N, again.train_N)
    assert torch.equal(corpus.held_out_N, again.held_out_N)
    held_out_files = set(corpus.held_out_N.numpy().tobytes().split(b"\0"))
    assert not {text for text in held_out_files & set(corpus.train_N.numpy().tobytes().split(b"\0")) if len(text) > 200}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """60 small files in two directories, one of them with another suffix."""
    for index in range(60):
        path = tmp_path / "texts" / ("a" if index % 2 else "b") / f"{index:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {index:02d} " * 20)
    (tmp_path / "texts" / "a" / "picture.png").write_bytes(b"\xff" * 1000)
    return tmp_path / "texts"


def test_directory_glob_and_url_give_the_same_corpus(texts: Path) -> None:
    corpora = [
        load_corpus(DataSettings(source=source, held_out=0.2), context=16)
        for source in (str(texts), f"{texts}/*/*.txt", f"{texts}/**/*.txt", texts.as_uri(), f"{texts.as_uri()}/*/*.txt")
    ]
    assert len(corpora[0].train_N) + len(corpora[0].held_out_N) == 60 * 160 + 58
    for corpus in corpora[1:]:
        assert torch.equal(corpus.train_N, corpora[0].train_N)
        assert torch.equal(corpus.held_out_N, corpora[0].held_out_N)


def test_one_file_by_path_and_by_url(texts: Path) -> None:
    path = texts / "book"
    path.write_bytes(bytes(range(32, 122)) * 400)
    by_path, by_url = (load_corpus(DataSettings(source=source), context=16) for source in (str(path), path.as_uri()))
    assert len(by_path.train_N) + len(by_path.held_out_N) == 36_000
    assert torch.equal(by_path.held_out_N, by_url.held_out_N)


def test_an_empty_file_adds_nothing(texts: Path) -> None:
    before = load_corpus(DataSettings(source=str(texts)), context=16)
    (texts / "a" / "empty.txt").write_bytes(b"")
    after = load_corpus(DataSettings(source=str(texts)), context=16)
    assert torch.equal(before.train_N, after.train_N)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing", "the source of the training text has no files"),
        ("missing/*.txt", "the source of the training text has no files"),
        ("memory://missing.txt", "cannot read the training text"),
        ("memory://missing/*.txt", "the source of the training text has no files"),
        ("nosuchprotocol://bucket/text", "cannot read the training text"),
    ],
)
def test_a_source_without_text_is_named(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus(DataSettings(source=source), context=16)
    assert f"source={source!r}" in str(caught.value)


def test_empty_small_large_and_unreadable_sources_are_named(texts: Path) -> None:
    empty, small = texts / "empty", texts / "small"
    empty.write_bytes(b"")
    small.write_bytes(b"too small")
    for settings, message in [
        (DataSettings(source=str(empty)), "holds only empty files"),
        (DataSettings(source=str(small)), r"too small: .* part=training bytes=0 context=16"),
        (DataSettings(source=str(texts), bytes_max=1000), "larger than data.bytes_max"),
        (DataSettings(source=texts.as_uri(), bytes_max=1000), "larger than data.bytes_max"),
        (DataSettings(source=str(texts), suffixes=(".c",)), r"has no files: .* suffixes=\.c"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            load_corpus(settings, context=16)
        assert repr(settings.source) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"file=.*b/00\.txt cause=Permission denied|file=.*a/01\.txt cause=Permission denied"):
        load_corpus(DataSettings(source=str(texts)), context=16)


def test_window_count_needs_a_target_for_each_byte() -> None:
    assert [window_count(torch.zeros(size), 10) for size in (0, 1, 10, 11, 20, 21)] == [0, 0, 0, 1, 1, 2]
