"""Files that are read and written whole, or from their end."""

from hypothesis import given
from hypothesis import strategies as st

from files import lines_backwards


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc"])).map(b"".join), st.integers(1, 70))
def test_lines_come_from_the_end_whatever_the_block(tmp_path_factory, content, block):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(content)
    assert [*lines_backwards(path, block)] == content.split(b"\n")[::-1]
