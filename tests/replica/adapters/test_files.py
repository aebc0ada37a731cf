"""File locks exclude each other although the locked file is removed and made anew."""

import threading
import time
from pathlib import Path

import pytest

from replica.adapters.files import lock_file, read_lock, remove_unread, write_whole


def test_lock_excludes_all_others_while_its_file_comes_and_goes(tmp_path: Path) -> None:
    inside: list[int] = []
    crowds: list[int] = []

    def work(name: int) -> None:
        for _ in range(40):
            with lock_file(tmp_path / "lock"):
                inside.append(name)
                time.sleep(0)
                crowds.append(len(inside))
                inside.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowds == [1] * 240
    assert list(tmp_path.iterdir()) == []


def test_file_is_removed_once_nobody_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"content")
    with read_lock(path), read_lock(path):
        assert not remove_unread(path)
    assert remove_unread(path)
    assert remove_unread(path)
    with pytest.raises(FileNotFoundError), read_lock(path):
        pass
    assert list(tmp_path.iterdir()) == []
