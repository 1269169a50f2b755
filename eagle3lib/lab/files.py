"""Files that are either whole or not there: temp file, fsync, rename; and their fingerprints."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError

# Files above this size are fingerprinted by size and by their first and last MiB: hashing hundreds
# of GB of hidden states would cost more than reading them once for training.
_WHOLE_HASH_BYTES = 256 * 2**20
_EDGE_BYTES = 2**20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h and fs.h


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary)`` beside ``path``, flush it to disk, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def write_json(path: Path, value: Any) -> None:
    """Write JSON with NaN refused: other languages can't read it."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one is a ``UserError`` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("a file is missing", expected="a JSON file", where=path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not readable as JSON: {error}", where=path) from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file that we wrote; a torn last line (killed while writing) is dropped.

    Split on "\\n" alone: ``str.splitlines`` also splits at U+2028 and U+0085, which answers
    contain.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # empty when the file ends with a newline, as a whole one does
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"line {number} is not JSON: {error}", where=path) from None
    if torn:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(torn))
    return rows


def replace_folder(path: Path, build: Callable[[Path], None]) -> Path:
    """Build a folder under a temporary name beside ``path``, then put it there in one step.

    An old folder is exchanged with the new one, so that a reader always finds one of the two, and
    deleted under the temporary name: a kill half-way leaves no half folder at ``path``. Where the
    system can't exchange (not Linux, some network file systems) ``path`` is missing for an instant.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    old = temporary.with_name(f"{temporary.name}.old")
    try:
        build(temporary)
        temporary.chmod(0o755)
        if path.exists() and not _exchanged(temporary, path):
            path.rename(old)
        if not path.exists():
            temporary.rename(path)
        if old.exists():
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two paths by renameat2(2); False where the system or the file system can't."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # no such call in this C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    if swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """First 16 hex digits of SHA-256: of the whole file, or of size and both ends if it is
    large."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_HASH_BYTES:
            while block := file.read(_EDGE_BYTES):
                digest.update(block)
        else:
            digest.update(str(size).encode())
            digest.update(file.read(_EDGE_BYTES))
            file.seek(size - _EDGE_BYTES)
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def hash_files(paths: Iterable[Path], base: Path) -> str:
    """One fingerprint of many files by relative name and content."""
    return hash_json({str(p.relative_to(base)): hash_file(p) for p in sorted(paths)})


def hash_path(path: Path) -> str:
    """Fingerprint of a file, or of a folder's files but hidden ones, ``datasets``' cache and its
    README.md: a model card that is written again (``eagle3 card``) is no other drafter."""
    if path.is_file():
        return hash_file(path)
    inside = (p for p in path.rglob("*") if p.is_file() and p.name != "README.md")
    return hash_files((p for p in inside if not p.name.startswith((".", "cache-"))), path)
