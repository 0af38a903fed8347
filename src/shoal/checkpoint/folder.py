"""The checkpoints' folder, which is rank 0's: publish a finished save, keep the right ones, clear what is left over.

Names: ``step-N`` a checkpoint, ``step-N.partial`` a save not finished, ``step-N.replaced`` one that made way
for another of its step, ``*.trash`` on its way out: a folder loses its name first, so that none is seen half
deleted.
"""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.files import FileSystem
from shoal.checkpoint.layout import REPLACED_NAME
from shoal.checkpoint.reader import candidates, problem_of


def discard(path: Path, files: FileSystem) -> None:
    """Remove a folder that nobody needs; it loses its name first."""
    trash = path.with_name(path.name + ".trash")
    files.remove_tree(trash)
    try:
        files.rename(path, trash)
    except FileNotFoundError:
        return
    files.remove_tree(trash)


def tidy(folder: Path, files: FileSystem, partials: bool = True) -> None:
    """Clear what an interrupted save left; a checkpoint whose replacement never came gets its name back."""
    for name in files.listdir(folder):
        path = folder / name
        match = REPLACED_NAME.fullmatch(name)
        if name.endswith(".trash") or (partials and name.endswith(".partial")):
            files.remove_tree(path)
        elif match:
            step = int(match[1])
            target = folder / f"step-{step}"
            if problem_of(path, step, verify=True) is None and problem_of(target, step, verify=True) is not None:
                discard(target, files)
                files.rename(path, target)
                files.fsync_dir(folder)
            else:
                discard(path, files)


def publish(partial: Path, target: Path, files: FileSystem) -> None:
    """Make a complete, synced save visible under its name. Durable when this returns."""
    replaced = target.with_name(target.name + ".replaced")
    if target.exists():
        discard(replaced, files)
        files.rename(target, replaced)
    files.rename(partial, target)
    files.fsync_dir(target.parent)
    discard(replaced, files)


def rotate(folder: Path, committed: int, keep: int, verified: set[int], files: FileSystem) -> None:
    """Remove old checkpoints beyond the newest ``keep`` good ones; the one just committed always stays.

    Those that are damaged or not finite never take the place of a good one. ``verified`` remembers which were
    found good, so that each is read through once.
    """
    good: list[tuple[int, Path]] = []
    unfit: list[tuple[int, Path]] = []
    for step, path in candidates(folder):
        if REPLACED_NAME.fullmatch(path.name):
            continue
        if problem_of(path, step, verify=step not in verified) is None:
            verified.add(step)
            good.append((step, path))
        else:
            verified.discard(step)
            unfit.append((step, path))
    good.sort(key=lambda entry: (entry[0] != committed, -entry[0]))  # what was just written counts as the newest
    kept = good[:keep]
    doomed = good[keep:]
    if kept:
        doomed += [entry for entry in unfit if entry[0] < committed]
    for step, path in doomed:
        if step != committed:
            verified.discard(step)
            discard(path, files)
