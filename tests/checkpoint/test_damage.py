"""A checkpoint of which any byte was changed, or that was cut, is never taken for a sound one."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import store
from checkpoint.agreement import Damaged
from checkpoint.folder import Folders, find
from checkpoint.manifest import verify
from checkpoint.pieces import whole
from checkpoint.run_state import RunState
from checkpoint.store import Retention
from tests.checkpoint.test_reshard import WHOLE, save

STATE = RunState(8, 70, 700, 7, data={}, config={"model": {"hidden": 4}}, vocab_size=9)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Two checkpoints: step 7, by four ranks, and step 8, by one, with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    save(folder, (2, 2))
    tensors = {name: whole(tensor) for name, (tensor, _) in WHOLE.items()}
    store.save(folder, tensors, STATE, keep=Retention(2), files={"tokenizer.model": b"spm" * 100})
    return folder


def refused(path):
    """Whether a run's start would see it: by the small files, or by what it reads of the tensors."""
    with pytest.raises(Damaged) as small:
        verify(path)
    found = find("auto", Folders(path.parent), [small.value])
    return found is not None and found.path.name == "step_00000007" and small.value.path == path


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_flipped_bit_or_cut_of_any_file_is_found_and_the_one_before_is_used(sound, data):
    with TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(sound, Path(scratch) / "c"))
        path = folder / "step_00000008"
        file = data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())), label="file")
        content = bytearray((path / file).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1), label="byte")
        if data.draw(st.booleans(), label="cut"):
            content = content[:at]
        else:
            content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        (path / file).write_bytes(content)
        assert refused(path)


@pytest.mark.parametrize("rank", range(4))
def test_a_flip_in_any_ranks_file_is_found_by_whoever_reads_it(sound, tmp_path, rank):
    path = Path(shutil.copytree(sound, tmp_path / "c")) / "step_00000007"
    file = path / f"tensors_{rank:05d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    with pytest.raises(Damaged, match=file.name):
        store.load(path, {name: whole(torch.empty_like(tensor)) for name, (tensor, _) in WHOLE.items()})


def test_what_lies_beside_the_files_of_a_checkpoint_is_no_damage(sound, tmp_path):
    path = Path(shutil.copytree(sound, tmp_path / "c")) / "step_00000008"
    (path / "notes.txt").write_text("mine")
    verify(path)
