"""What any layout has written, any other reads, bit for bit and without reading more than it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoint import container, store, tensors
from checkpoint.pieces import Piece, Rectangle, to_json, whole
from checkpoint.run_state import RunState, read_state
from checkpoint.store import Retention
from errors import CheckpointRefused
from tests.checkpoint.ranks import empty, grid, held, on_ranks

KEEP = Retention(2)
STATE = RunState(7, 70, 700, 7, data={}, config={}, vocab_size=9)
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 2), (2, 5)]  # tp, shard
WHOLE = {
    "model.qkv": (torch.randn(12, 5), 0),  # name: whole tensor, axis of its tp cut
    "model.out": (torch.randn(7, 8), 1),
    "model.norm": (torch.randn(7), None),
    "model.experts": (torch.randn(4, 3, 5), 0),
    "model.gain": (torch.tensor(2.5), None),
    "optim.exp_avg.out": (torch.randn(7, 8).bfloat16(), 1),
    "optim.exp_avg_sq.out": (torch.randn(7, 8).double(), 1),
}


def pieces_of(layout, rank):
    """What a rank of a layout holds."""
    tp, shard = layout
    return {
        name: held(tensor, grid(tuple(tensor.shape), tp, shard, axis), rank) for name, (tensor, axis) in WHOLE.items()
    }


def save(folder, layout, pieces=pieces_of):
    world = layout[0] * layout[1]
    saved = on_ranks(
        world,
        lambda everyone: store.save(folder, pieces(layout, everyone.rank), STATE, keep=KEEP, everyone=everyone),
    )
    assert len(set(saved)) == 1, saved
    return saved[0]


def load(path, layout, pieces=pieces_of):
    """What each rank of a layout has after loading."""

    def one(everyone):
        blank = {name: empty(piece) for name, piece in pieces(layout, everyone.rank).items()}
        store.load(path, blank, everyone)
        return blank

    return on_ranks(layout[0] * layout[1], one)


def assert_same(read, expected):
    assert read.keys() == expected.keys()
    for name, piece in expected.items():
        assert torch.equal(read[name].local, piece.local), name
        assert read[name].local.dtype == piece.local.dtype


@pytest.mark.parametrize("written", LAYOUTS)
def test_every_layout_reads_what_every_layout_wrote(tmp_path, written):
    path = save(tmp_path, written)
    for layout in LAYOUTS:
        for rank, read in enumerate(load(path, layout)):
            assert_same(read, pieces_of(layout, rank))


@pytest.mark.parametrize("written", LAYOUTS)
def test_whole_tensors_are_read_from_any_layout(tmp_path, written):
    path = save(tmp_path, written)
    read = store.read_tensors(path)
    assert all(torch.equal(read[name], tensor) for name, (tensor, _) in WHOLE.items())
    weights = store.model_tensors(path, torch.bfloat16)
    assert weights.keys() == {"qkv", "out", "norm", "experts", "gain"}
    assert torch.equal(weights["qkv"], WHOLE["model.qkv"][0].bfloat16())


def stage(layout, rank):
    """A stage a rank: the tensors dealt out whole."""
    names = [name for number, name in enumerate(WHOLE) if number % (layout[0] * layout[1]) == rank]
    return {name: whole(WHOLE[name][0]) for name in names}


def test_stages_that_hold_different_tensors_write_and_read_one_checkpoint(tmp_path):
    path = save(tmp_path, (3, 1), stage)
    assert store.read_tensors(path).keys() == WHOLE.keys()
    for layout in ((1, 1), (2, 1), (5, 1)):
        for rank, read in enumerate(load(path, layout, stage)):
            assert_same(read, stage(layout, rank))


def test_only_ranks_that_write_something_have_a_file_and_copies_are_written_once(tmp_path):
    tensor = torch.arange(6.0).view(3, 2)
    rows = [Rectangle((0, 0), (2, 2)), Rectangle((2, 0), (1, 2)), Rectangle((4, 0), (0, 2)), Rectangle((2, 0), (1, 2))]

    def pieces(_, rank):
        return {"a": held(tensor, rows, rank)} if rank != 2 else {"a": Piece(torch.empty(0, 2), (3, 2), (4, 0))}

    path = save(tmp_path, (4, 1), pieces)
    files = {file.name for file in path.glob("*.safetensors")}
    assert files == {"tensors_00000.safetensors", "tensors_00001.safetensors"}
    assert torch.equal(store.read_tensors(path)["a"], tensor)
    assert [read["a"].local.tolist() for read in load(path, (4, 1), pieces)] == [
        [[0, 1], [2, 3]], [[4, 5]], [], [[4, 5]],
    ]  # fmt: skip


def test_views_of_one_buffer_are_written_and_filled(tmp_path):
    buffer, target = torch.arange(12.0), torch.zeros(12)

    def views(flat):
        matrix = Piece(flat[4:12].view(2, 4).t(), (4, 2), (0, 0))
        return {"a": Piece(flat[:4], (4,), (0,)), "b": matrix}

    path = store.save(tmp_path, views(buffer), STATE, keep=KEEP)
    store.load(path, views(target))
    assert torch.equal(target, buffer)


def test_a_parameter_is_filled_in_place(tmp_path):
    path = store.save(tmp_path, {"a": whole(torch.ones(3))}, STATE, keep=KEEP)
    parameter = torch.nn.Parameter(torch.zeros(3))
    store.load(path, {"a": whole(parameter)})
    assert parameter.tolist() == [1, 1, 1] and parameter.grad_fn is None


def test_a_rank_opens_each_file_once_and_reads_no_block_that_it_does_not_need(tmp_path, monkeypatch):
    """Blocks of a row each: what three ranks read of two ranks' rows is what they hold."""
    for room in (container, tensors):
        monkeypatch.setattr(room, "BLOCK", 16)
    table = {"a": (torch.randn(64, 4), 0), "b": (torch.randn(9, 4), 0)}

    def rows(layout, rank):
        return {name: held(t, grid(tuple(t.shape), 1, layout[1], None), rank) for name, (t, _) in table.items()}

    path = save(tmp_path, (1, 2), rows)
    opened: Counter[str] = Counter()
    read: list[int] = []
    real = container.opened
    monkeypatch.setattr(container, "opened", lambda file, size: opened.update([file.name]) or real(file, size))
    monkeypatch.setattr(container, "read_into", counted(container.read_into, read))
    for rank in range(3):
        own = {name: empty(piece) for name, piece in rows((1, 3), rank).items()}
        opened.clear()
        read.clear()
        contents = tensors.read_contents(path)
        tensors.fill(path, contents, own)
        assert max(opened.values()) == 1
        headers = sum(contents.files[file].header_size for file in opened)
        assert sum(read) == sum(piece.local.numel() * 4 for piece in own.values()) + headers


def counted(real, sizes):
    """read_into that notes how much."""

    def read(handle, offset, memory):
        sizes.append(len(memory))
        real(handle, offset, memory)

    return read


@st.composite
def tilings(draw, shape):
    """A tensor's shape cut again and again at a random place of a random piece; cuts may leave empty pieces."""
    out = [Rectangle((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        chosen = out.pop(draw(st.integers(0, len(out) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, chosen.shape[axis]))
        head, tail = list(chosen.shape), list(chosen.shape)
        head[axis], tail[axis] = at, chosen.shape[axis] - at
        begin = list(chosen.start)
        begin[axis] += at
        out += [Rectangle(chosen.start, tuple(head)), Rectangle(tuple(begin), tuple(tail))]
    return out


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
cases = st.tuples(shapes, shapes).flatmap(
    lambda both: st.tuples(*(st.tuples(st.just(s), tilings(s), tilings(s)) for s in both))
)


@settings(max_examples=60, deadline=None)
@given(cases, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(0, 1 << 30))
def test_any_cut_of_any_tensor_is_read_from_any_other_cut(case, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    sources = {f"t{n}": torch.randn(shape, generator=generator).to(dtype) for n, (shape, *_) in enumerate(case)}

    def pieces(which, rank):
        cuts = {f"t{n}": each[which] for n, each in enumerate(case)}
        return {name: held(sources[name], cut, rank) for name, cut in cuts.items() if rank < len(cut)}

    worlds = [max(len(each[which]) for each in case) for which in (1, 2)]
    with TemporaryDirectory() as folder:
        path = save(Path(folder), (worlds[0], 1), lambda _, rank: pieces(1, rank))
        for rank, read in enumerate(load(path, (worlds[1], 1), lambda _, rank: pieces(2, rank))):
            assert_same(read, pieces(2, rank))


def test_other_names_shapes_or_dtypes_are_refused(tmp_path):
    path = store.save(tmp_path, {"a": whole(torch.ones(2, 3)), "b": whole(torch.ones(2))}, STATE, keep=KEEP)
    a, b = whole(torch.zeros(2, 3)), whole(torch.zeros(2))
    for pieces, words in (
        ({"a": a}, r"unexpected \['b'\]"),
        ({"a": a, "b": b, "c": b}, r"missing \['c'\]"),
        ({"a": whole(torch.zeros(3, 2)), "b": b}, r"a is \(2, 3\) .* in the checkpoint, \(3, 2\)"),
        ({"a": whole(torch.zeros(2, 3).bfloat16()), "b": b}, r"a is .*float32 in the checkpoint, .*bfloat16 here"),
    ):
        with pytest.raises(CheckpointRefused, match=words):
            store.load(path, pieces)
    assert a.local.sum() == b.local.sum() == 0  # nothing was filled


def test_what_one_rank_cannot_read_no_rank_goes_on_with(tmp_path):
    path = save(tmp_path, (1, 2))
    file = path / "tensors_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    outcomes = load(path, (1, 2))
    assert all(isinstance(each, CheckpointRefused) for each in outcomes)
    assert {str(each) for each in outcomes} == {str(outcomes[0])}
    assert f"is damaged: {file.name}" in str(outcomes[0])


def cut_off(path):
    file = path / "tensors_00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def missing(path):
    (path / "tensors_00001.safetensors").unlink()


def of_another_cut(path):
    (path / "tensors_00002.safetensors").replace(path / "tensors_00000.safetensors")


def of_another_dtype(path):
    file = path / "tensors_00001.safetensors"
    with safe_open(file, framework="pt") as saved:
        others = {name: saved.get_tensor(name).half() for name in saved.keys()}  # noqa: SIM118
    save_file(others, file)


def without_a_tensor(path):
    save_file({"model.other": torch.ones(1)}, path / "tensors_00001.safetensors")


def index_without_a_piece(path):
    index = tensors.read_contents(path)
    index.tensors["model.qkv"].pieces.pop()
    (path / "pieces.json").write_text(to_json(index))


def index_cut_off(path):
    file = path / "pieces.json"
    file.write_text(file.read_text()[:-100])


def no_index(path):
    (path / "pieces.json").unlink()


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (cut_off, "tensors_00002.safetensors"), (missing, "tensors_00001.safetensors"),
        (of_another_cut, "tensors_0000[02].safetensors"), (of_another_dtype, "tensors_00001.safetensors"),
        (without_a_tensor, "tensors_00001.safetensors"), (index_without_a_piece, "pieces.json"),
        (index_cut_off, "pieces.json"), (no_index, "pieces.json"),
    ],
)  # fmt: skip
def test_damage_is_refused_with_the_file_and_what_to_do(tmp_path, damage, file):
    path = save(tmp_path, (2, 2))
    damage(path)
    for read in (
        store.read_tensors,
        lambda path: store.load(path, {n: whole(t.clone()) for n, (t, _) in WHOLE.items()}),
    ):
        with pytest.raises(CheckpointRefused, match=f"is damaged: {file}.*remove the folder"):
            read(path)


def test_the_layout_that_wrote_is_told(tmp_path):
    path = store.save(tmp_path, stage((1, 1), 0), replace(STATE, layout="pp 2, tp 2"), keep=KEEP)
    assert read_state(path).layout == "pp 2, tp 2"
