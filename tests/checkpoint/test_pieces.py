"""Rectangles, and the index of a checkpoint."""

import pytest
import torch

from checkpoint.container import Placed, Written
from checkpoint.pieces import Entry, Piece, Rectangle, Stored, check_cover, from_json, listing, merge, to_json, whole


def entry(shape, *rectangles):
    return Entry(torch.float32, shape, [Stored(f"{n}", Rectangle(*r)) for n, r in enumerate(rectangles)])


def test_two_rectangles_meet_in_what_both_hold():
    one, other = Rectangle((0, 2), (4, 4)), Rectangle((3, 0), (4, 3))
    assert one.meet(other) == other.meet(one) == Rectangle((3, 2), (1, 1))
    assert one.meet(Rectangle((4, 2), (1, 4))) is None
    assert one.meet(Rectangle((1, 2), (0, 4))) is None
    assert Rectangle((), ()).meet(Rectangle((), ())) == Rectangle((), ())


def test_a_rectangle_is_found_in_what_holds_it():
    tensor = torch.arange(20).view(4, 5)
    inner, outer = Rectangle((2, 3), (1, 2)), Rectangle((1, 1), (3, 4))
    assert torch.equal(tensor[1:4, 1:5][inner.within(outer)], tensor[2:3, 3:5])


@pytest.mark.parametrize(
    "each",
    [
        entry((4, 6), ((0, 0), (4, 6))),
        entry((4, 6), ((0, 0), (4, 3)), ((0, 3), (4, 3))),
        entry((4, 6), ((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))),
        entry((3, 3), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))),
        entry((5,), ((3,), (2,)), ((0,), (3,))),
        entry((), ((), ())),
        entry((0, 5)),
    ],
)
def test_pieces_that_cover_a_tensor_once_are_accepted(each):
    check_cover("t", each)


@pytest.mark.parametrize(
    "each",
    [
        entry((4, 6)),
        entry((4, 6), ((0, 0), (4, 3))),
        entry((4, 6), ((0, 0), (4, 6)), ((0, 0), (4, 6))),
        entry((4, 6), ((0, 0), (4, 3)), ((0, 0), (4, 3))),
        entry((4, 6), ((0, 0), (4, 3)), ((0, 4), (4, 3))),
        entry((4, 6), ((0, 0), (4, 4)), ((0, 2), (4, 2))),
        entry((2, 2), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1))),
        entry((2, 2), ((0, 0), (2, 1)), ((0, 1), (1, 1)), ((0, 0), (1, 1))),
        entry((4,), ((0,), (3,))),
        entry((), ((), ()), ((), ())),
        entry(()),
        entry((4, 6), ((0,), (24,))),
    ],
)
def test_missing_doubled_and_misplaced_pieces_are_faults(each):
    with pytest.raises(ValueError, match="do not cover it exactly once"):
        check_cover("t", each)


def test_the_index_is_read_back_from_json():
    pieces = {"a": whole(torch.ones(2, 3)), "b": Piece(torch.ones(0, 3), (2, 3), (2, 0)), "c": whole(torch.tensor(1.0))}
    written = Written(40, "ab", 8, {"a": Placed(8, ("0f",)), "c": Placed(32, ("ff",))})
    contents = listing(pieces, "tensors.safetensors", written)
    contents.tensors["d"] = entry((4, 6), ((0, 0), (4, 6)))
    assert from_json(to_json(contents)) == contents
    assert contents.tensors["b"].pieces == []


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"a": 1}', '{"a": {"dtype": "float32", "shape": [1]}}',
        '{"a": {"dtype": "load", "shape": [1], "pieces": []}}',
        '{"a": {"dtype": "int8", "shape": ["1"], "pieces": []}}',
        '{"a": {"dtype": 8, "shape": [], "pieces": []}}',
    ],
)  # fmt: skip
def test_another_text_is_no_index(text):
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize("other", [torch.ones(3, 3), torch.ones(2, 3, dtype=torch.float64)])
def test_processes_that_differ_about_a_tensor_are_a_fault(other):
    with pytest.raises(ValueError, match="processes differ about a"):
        merge([listing({"a": whole(torch.ones(2, 3))}, "0", None), listing({"a": whole(other)}, "1", None)])


def test_a_tensor_that_nobody_writes_is_a_fault():
    with pytest.raises(ValueError, match=r"of a .* 0 pieces"):
        merge([listing({"a": Piece(torch.ones(2), (2,), (0,), writes=False)}, "0", None)])


@pytest.mark.parametrize(("shape", "start"), [((4,), (3,)), ((4,), (-1,)), ((4, 4), (0, 0)), ((4,), (0, 0))])
def test_a_piece_lies_in_its_tensor(shape, start):
    with pytest.raises(ValueError, match="no piece"):
        Piece(torch.ones(2), shape, start)


def test_a_piece_without_elements_may_lie_at_the_end():
    assert Piece(torch.ones(0, 3), (4, 3), (6, 0)).rectangle.elements == 0
