"""The table of ranks, and its groups, for worlds that no test machine has."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.config import ParallelConfig
from parallel.layout import AXES, Layout, layout_of
from parallel.mesh import ONE_PROCESS, make_mesh

SIZES = st.sampled_from([1, 2, 3, 4])


@given(pp=SIZES, replicate=SIZES, shard=SIZES, cp=SIZES, tp=SIZES, ep=SIZES)
def test_every_rank_has_one_place_and_every_place_one_rank(pp, replicate, shard, cp, tp, ep):
    layout = Layout(pp, replicate, shard, cp, tp, ep)
    places = [tuple(layout.coordinates(rank)[axis] for axis in AXES) for rank in range(layout.world)]
    assert len(set(places)) == layout.world and places == sorted(places)
    assert {layout.dp_rank(rank) for rank in range(layout.world)} == set(range(layout.dp))
    if (layout.replicate * layout.shard * layout.cp * layout.tp) % ep == 0:
        experts = [tuple(layout.expert_coordinates(rank).values()) for rank in range(layout.world)]
        assert len(set(experts)) == layout.world
        assert all(layout.coordinates(r)["pp"] == layout.expert_coordinates(r)["pp"] for r in range(layout.world))


def test_tp_ranks_are_neighbours_and_pp_ranks_are_far_apart():
    layout = layout_of(ParallelConfig(tp=4, pp=2, replicate=2), 64)
    assert layout.sizes == (2, 2, 4, 1, 4)
    assert [layout.coordinates(rank)["tp"] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.coordinates(32) == {"pp": 1, "replicate": 0, "shard": 0, "cp": 0, "tp": 0}
    assert layout.words == "pp 2, replicate 2, shard 4, tp 4"
    assert layout.table()[0] == "  rank  0: pp 0 replicate 0 shard 0 tp 0" and layout.table()[8] == "  ..."


def test_zero_0_replicates_everything():
    assert layout_of(ParallelConfig(zero=0, tp=2), 8).sizes == (1, 4, 1, 1, 2)
    assert layout_of(ParallelConfig(zero=1, tp=2), 8).sizes == (1, 1, 4, 1, 2)


@pytest.mark.parametrize("rank", [0, 21, 63])
def test_the_groups_of_64_ranks_hold_those_that_differ_along_one_axis(rank):
    layout = layout_of(ParallelConfig(tp=4, pp=2, replicate=2), 64)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    try:
        mesh = make_mesh(layout, rank, torch.device("cpu"), 60)
        for axis, size in zip(AXES, layout.sizes, strict=True):
            found = mesh.axis(axis)
            assert (found.size, found.rank) == (size, layout.coordinates(rank)[axis])
            if size == 1:
                assert found.group is None
                continue
            assert found.group is not None
            members = dist.get_process_group_ranks(found.group)
            apart = [
                r for r in range(64)
                if all(layout.coordinates(r)[a] == layout.coordinates(rank)[a] for a in AXES if a != axis)
            ]  # fmt: skip
            assert members == apart and members[found.rank] == rank
        assert mesh.data is not None and mesh.data.mesh_dim_names == ("replicate", "shard")
    finally:
        dist.destroy_process_group()


def test_a_process_alone_has_no_groups():
    assert ONE_PROCESS.data is None and all(ONE_PROCESS.axis(axis).group is None for axis in AXES)
