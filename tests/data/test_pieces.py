"""Documents in pieces: joined in any order without a change, damaged ones are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.preparing import pieces
from data.preparing.pieces import ROW, PieceWriter, gathered, is_whole, read_rows, read_tokens, starts_of


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.sampled_from([1, 2, 3, 40, 900]), min_size=1, max_size=30), data=st.data())
def test_documents_are_gathered_unchanged_in_any_order(lengths: list[int], data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(lengths)))))[: data.draw(st.integers(1, len(lengths)))]
    tokens = np.arange(sum(lengths), dtype="<u2")
    starts = starts_of(np.array(lengths))
    wanted = [tokens[starts[at] : starts[at] + lengths[at]].tolist() for at in order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_BLOCK_TOKENS", 100)
        found = []
        for block, sizes in gathered(tokens, starts[order], np.array(lengths)[order]):
            assert block.size <= max(100, sizes[0])
            found += [part.tolist() for part in np.split(block, np.cumsum(sizes)[:-1])]
    assert found == wanted


def written(folder: Path, ranks: list[int], deduplicate: bool = False) -> PieceWriter:
    """A writer with one document of three tokens a rank."""
    rows = np.zeros(len(ranks), ROW)
    rows["rank"], rows["tokens"], rows["bytes"] = ranks, 3, 7
    writer = PieceWriter(folder, "lot", np.dtype("<u2"), deduplicate)
    writer.add(rows, np.repeat(np.array(ranks), 3).astype("<u2"))
    return writer


def test_a_piece_is_sorted_by_rank_with_its_tokens(tmp_path: Path) -> None:
    (piece,) = written(tmp_path, [5, 1, 9, 3]).finish()
    assert read_rows(tmp_path, piece, 0, 4)["rank"].tolist() == [1, 3, 5, 9]
    tokens = np.empty(6, "<u2")
    with (tmp_path / piece.file).open("rb") as file:
        read_tokens(file, piece, 3, tokens)
    assert tokens.tolist() == [3, 3, 3, 5, 5, 5]
    assert (piece.documents, piece.tokens, piece.size) == (4, 12, 4 * ROW.itemsize + 24)


def test_the_first_of_equal_ranks_stays(tmp_path: Path) -> None:
    writer = written(tmp_path, [5, 1, 5, 5], deduplicate=True)
    (piece,) = writer.finish()
    assert (piece.documents, writer.duplicates) == (2, 2)


def test_only_a_piece_as_it_was_written_is_whole(tmp_path: Path) -> None:
    (piece,) = written(tmp_path, [2, 1]).finish()
    path = tmp_path / piece.file
    content = path.read_bytes()
    assert is_whole(tmp_path, piece)
    for damaged in (content[:-1], content + b"x", bytes([content[0] ^ 1]) + content[1:], b""):
        path.write_bytes(damaged)
        assert not is_whole(tmp_path, piece)
    path.unlink()
    assert not is_whole(tmp_path, piece)
