"""Files from elsewhere take no more memory than they have bytes."""

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx.parallel.untrusted import check_archive, check_pickle

MIB = 1 << 20


def peak(call: Callable[[], Any]) -> int:
    """Bytes that a call takes at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def archive(**members: Any) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        for name, (content, method) in members.items():
            made.writestr(name, content, method)
    return data.getvalue()


def far_place(index: int) -> bytes:
    """A pickle of None that it puts in a place of the table."""
    return b"\x80\x02Nr" + struct.pack("<I", index) + b"."


def test_a_pickle_of_bytes_cannot_ask_for_gigabytes() -> None:
    """Python's own reader would make the table."""
    small = far_place(1 << 20)
    assert pickle.loads(small) is None and peak(lambda: pickle.loads(small)) > 8 * MIB

    def refused() -> None:
        with pytest.raises(ValueError, match="place 1048576 of a pickle with fewer objects"):
            check_pickle(small)

    assert peak(refused) < MIB
    with pytest.raises(ValueError, match="place 4294967295"):
        check_pickle(far_place((1 << 32) - 1))
    with pytest.raises(ValueError):  # cut off: a byte array that would be allocated first
        check_pickle(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_python_writes_is_taken(protocol: int) -> None:
    check_pickle(pickle.dumps([{"a": (1, 2.5, None), "b": ["x"] * 400}, {1, 2}], protocol))


def test_a_compressed_member_is_refused_unread() -> None:
    data = archive(x=(bytes(64 * MIB), zipfile.ZIP_DEFLATED))
    assert len(data) < MIB

    def refused() -> None:
        with pytest.raises(ValueError, match="'x' is compressed"):
            check_archive(data)

    assert peak(refused) < MIB


def test_members_that_share_bytes_are_refused() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        made.writestr("a", bytes(4096))
        made.filelist *= 3  # the directory names it three times
    with pytest.raises(ValueError, match="members share bytes"):
        check_archive(data.getvalue())


def test_what_torch_writes_is_taken() -> None:
    data = io.BytesIO()
    torch.save([{"a": torch.arange(100), "b": "text"}, torch.zeros(3, 4).t()], data)
    with check_archive(data) as opened:
        assert any(name.endswith("/data.pkl") for name in opened.namelist())
        check_pickle(opened.read(next(n for n in opened.namelist() if n.endswith("data.pkl"))))
