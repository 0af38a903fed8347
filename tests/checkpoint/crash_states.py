"""What a disk may hold after a crash: recorded file operations, cut anywhere, unsynced parts lost, torn or flipped."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.checkpoint.files import FileSystem

Tree = dict[str, bytes | None]  # path -> content, None for a folder


class Recorder(FileSystem):
    """The real file system, and the log of what was done."""

    def __init__(self, log: list[tuple]) -> None:
        self.log = log
        self._paths: dict[int, Path] = {}

    def mkdir(self, path: Path) -> None:
        if not path.exists():
            self.log.append(("mkdir", path))
        super().mkdir(path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self.log.append(("create", path))
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        super().write(descriptor, data)
        self.log.append(("write", self._paths[descriptor], bytes(data)))

    def fsync(self, descriptor: int) -> None:
        self.log.append(("fsync", self._paths[descriptor]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source, target))

    def unlink(self, path: Path) -> None:
        if path.exists():
            self.log.append(("unlink", path))
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        if path.exists():
            self.log.append(("unlink", path))
        super().rmdir(path)

    def fsync_dir(self, path: Path) -> None:
        self.log.append(("fsync_dir", path))


class Node:
    """A file (its writes, how many of them are synced) or a folder (its entries as they are seen now)."""

    def __init__(self, folder: bool) -> None:
        self.entries: dict[str, Node] | None = {} if folder else None
        self.writes: list[bytes] = []
        self.synced = 0


class Disk:
    """The operations so far. Changes of one folder reach the disk in order; folders and files in any order."""

    def __init__(self, root: Path) -> None:
        self.root_path = root
        self.root = Node(folder=True)
        self.changes: list[tuple[Node, tuple]] = []  # of folders, in order
        self.durable: set[int] = set()  # indices into changes

    def _at(self, path: Path) -> Node:
        node = self.root
        for part in path.relative_to(self.root_path).parts:
            assert node.entries is not None
            node = node.entries[part]
        return node

    def _change(self, folder: Node, *what) -> None:
        _apply(folder.entries, what)
        self.changes.append((folder, what))

    def do(self, op: tuple) -> None:
        kind, path = op[:2]
        if kind in ("mkdir", "create"):
            self._change(self._at(path.parent), "link", path.name, Node(kind == "mkdir"))
        elif kind == "write":
            self._at(path).writes.append(op[2])
        elif kind == "fsync":
            node = self._at(path)
            node.synced = len(node.writes)
        elif kind == "rename":
            self._change(self._at(path.parent), "move", path.name, op[2].name)
        elif kind == "unlink":
            self._change(self._at(path.parent), "unlink", path.name)
        elif kind == "fsync_dir":
            folder = self._at(path)
            self.durable |= {index for index, (where, _) in enumerate(self.changes) if where is folder}

    def states(self, limit: int, rng: random.Random) -> Iterator[Tree]:
        """Trees that a crash at this moment may leave; all of them, or ``limit`` drawn ones where there are more."""
        volatile: dict[int, list[int]] = {}
        for index, (folder, _) in enumerate(self.changes):
            if index not in self.durable:
                volatile.setdefault(id(folder), []).append(index)
        cuts = [range(len(indices) + 1) for indices in volatile.values()]
        nodes = {id(n): n for _, what in self.changes if what[0] == "link" for n in [what[2]]}
        loose = [node for node in nodes.values() if node.entries is None and node.synced < len(node.writes)]
        fates = [itertools.product("kdtf", repeat=len(node.writes) - node.synced) for node in loose]
        choices = [list(cut) for cut in cuts] + [list(fate) for fate in fates]
        total = 1
        for choice in choices:
            total *= len(choice)
        picks = itertools.product(*choices)
        if total > limit:
            picks = (tuple(rng.choice(choice) for choice in choices) for _ in range(limit))
        for pick in picks:
            kept = set(self.durable)
            for cut, indices in zip(pick[: len(cuts)], volatile.values(), strict=True):
                kept |= set(indices[:cut])
            contents = {id(node): fate for node, fate in zip(loose, pick[len(cuts) :], strict=True)}
            yield self._tree(kept, contents, rng)

    def _tree(self, kept: set[int], fates: dict[int, tuple[str, ...]], rng: random.Random) -> Tree:
        entries: dict[int, dict[str, Node]] = {}
        for index, (folder, what) in enumerate(self.changes):
            if index in kept:
                _apply(entries.setdefault(id(folder), {}), what)
        tree: Tree = {}

        def walk(node: Node, prefix: str) -> None:
            for name, inner in entries.get(id(node), {}).items():
                path = prefix + name
                if inner.entries is None:
                    tree[path] = _content(inner, fates.get(id(inner), ()), rng)
                else:
                    tree[path] = None
                    walk(inner, path + "/")

        walk(self.root, "")
        return tree


def _apply(entries, what: tuple) -> None:
    if what[0] == "link":
        entries[what[1]] = what[2]
    elif what[0] == "move":
        entries[what[2]] = entries.pop(what[1])
    else:
        entries.pop(what[1])


def _content(node: Node, fates: tuple[str, ...], rng: random.Random) -> bytes:
    """Unsynced writes are kept, dropped (zeros where a later one was kept), torn in half, or have a bit flipped."""
    content = b"".join(node.writes[: node.synced])
    size = len(content)
    for data, fate in zip(node.writes[node.synced :], fates, strict=True):
        start, size = size, size + len(data)
        if fate == "d":
            continue
        if fate == "t":
            data = data[: len(data) // 2]
        if fate == "f":
            at = rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        content = content.ljust(start, b"\0") + data
    return content


class Stage:
    """Lays trees out on the real disk, changing only what differs from the one before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: Tree = {}
        root.mkdir()

    def show(self, tree: Tree) -> None:
        for path in sorted(set(self.now) - set(tree), reverse=True):
            full = os.path.join(self.root, path)
            os.rmdir(full) if self.now[path] is None else os.unlink(full)
        for path in sorted(tree):
            content = tree[path]
            if path in self.now and self.now[path] == content and (content is None) == (self.now[path] is None):
                continue
            full = os.path.join(self.root, path)
            if content is None:
                os.mkdir(full)
            else:
                with open(full, "wb") as file:
                    file.write(content)
        self.now = dict(tree)

    def forget(self) -> None:
        """Somebody else changed the folder: start from nothing."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        self.now = {}
