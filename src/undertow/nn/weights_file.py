"""Files of weights in the safetensors format, read in parts and written one tensor after the other.

    | 8 bytes: n, little-endian | n bytes of JSON: {name: {dtype, shape, data_offsets}, ...} | the tensors' bytes |

Nothing in such a file is executed. A file is mapped, so who takes a part of a tensor reads that part; ranks of a node
share what the system keeps of it. A large model is several files in a folder, and `model.safetensors.index.json` says
in which one each tensor is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ..errors import InvalidArgument

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS, _MOST_NUMBERS = 64, 1 << 60  # of a tensor
_ALIGNMENT = 8  # of the tensors' bytes in a file
_HEADER = "__metadata__"  # what a header says that is no tensor
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """Where a tensor is in its file: bytes [begin, end) behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightsFile:
    """One file, mapped as long as a tensor of it lives."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        header = int.from_bytes(self._map[:8], "little")
        self._first = 8 + header
        if size < 8 or header > min(_MOST_HEADER_BYTES, size - 8):
            raise _damaged(path, f"one of {size} bytes with a header of {header if size >= 8 else 'none'}")
        try:
            said = json.loads(self._map[8 : self._first].decode("utf-8"), object_pairs_hook=_once)
            self.entries = {name: _entry(one) for name, one in said.items() if name != _HEADER}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"one whose header is wrong: {error}") from error
        end = 0
        for name, one in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if one.begin != end or one.end - one.begin != one.nbytes:
                raise _damaged(path, f"one whose tensor {name!r} has bytes [{one.begin}, {one.end})")
            end = one.end
        if end != size - self._first:
            raise _damaged(path, f"one of {size - self._first} bytes of tensors, of which {end} are told of")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over the file's bytes. Read, and never written."""
        one = self.entries[name]
        if not one.nbytes:
            return torch.empty(one.shape, dtype=one.dtype, device="cpu")
        begin = self._first + one.begin
        if begin % one.dtype.itemsize:  # a header of odd length, which no usual writer makes
            flat = torch.frombuffer(bytearray(self._map[begin : begin + one.nbytes]), dtype=torch.uint8)
            return flat.view(one.dtype).view(one.shape)
        with warnings.catch_warnings():  # of memory that nobody may write to: nobody does
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(self._map, dtype=one.dtype, count=math.prod(one.shape), offset=begin)
        return flat.view(one.shape)


def _damaged(path: Path, was: str) -> InvalidArgument:
    return InvalidArgument(argument=f"file {path}", was=was, must=f"a whole {SUFFIX} file")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it says something twice")
    return found


def _entry(said: dict[str, Any]) -> Entry:
    shape, (begin, end) = tuple(said["shape"]), said["data_offsets"]
    whole = len(shape) <= _MOST_DIMENSIONS and all(type(one) is int and one >= 0 for one in (*shape, begin, end))
    if not whole or max(math.prod(max(1, one) for one in shape), end) >= _MOST_NUMBERS:
        raise ValueError(f"shape {list(shape[:_MOST_DIMENSIONS])} and offsets [{begin}, {end}]")
    return Entry(_DTYPES[said["dtype"]], shape, begin, end)


class Weights:
    """The tensors of a checkpoint, by name: of one file, or of all files of a folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        place = Path(path)
        files = [place] if place.is_file() else _files(place)
        if not files:
            must = f"a {SUFFIX} file or a folder with some"
            raise InvalidArgument(argument="path", was=repr(str(place)), must=must)
        self._holders: dict[str, WeightsFile] = {}
        for file in map(WeightsFile, files):
            for name in file.entries:
                if name in self._holders:
                    raise InvalidArgument(argument="path", was=f"one with {name!r} in two files", must="of one model")
                self._holders[name] = file

    @property
    def digest(self) -> str:
        """Of names, types and shapes: whether ranks see the same checkpoint."""
        told = sorted(
            (name, str(one.entries[name].dtype), one.entries[name].shape) for name, one in self._holders.items()
        )
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._holders

    @property
    def names(self) -> set[str]:
        return set(self._holders)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._holders[name].entries[name].shape

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._holders[name].tensor(name)


def _files(folder: Path) -> list[Path]:
    """Those that the index names, or all of them."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob(f"*{SUFFIX}"))
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        must = "an index with a weight_map of files beside it"
        raise InvalidArgument(argument=f"file {index}", was=f"one that cannot be used: {error}", must=must) from error
    return [folder / name for name in names]


class Listed(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def refuse_unwritable(listed: Iterable[Listed]) -> None:
    for one in listed:
        if one.name == _HEADER:
            raise InvalidArgument(argument="the name of a tensor", was=repr(_HEADER), must="another")
        if one.dtype not in _NAMES:
            must = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise InvalidArgument(argument=one.name, was=f"of {one.dtype}", must=f"one of {must}")


def refuse_folder(folder: Path) -> None:
    """One that has weights already: half of them overwritten would be a model that nobody trained."""
    if folder.exists() and (not folder.is_dir() or any(folder.glob(f"*{SUFFIX}")) or (folder / INDEX).exists()):
        raise InvalidArgument(argument="path", was=f"{str(folder)!r}, which has weights", must="a folder without any")


def write(folder: Path, listed: Sequence[Listed], tensor: Callable[[Listed], torch.Tensor], file_bytes: int) -> None:
    """All of them in files of about `file_bytes`, asked for one by one and in order. A file has its name when it is
    whole, and the index comes last."""
    files: list[list[Listed]] = [[]]
    held = 0
    for one in listed:
        if files[-1] and held + one.nbytes > file_bytes:
            files.append([])
            held = 0
        files[-1].append(one)
        held += one.nbytes
    places: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, some in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}{SUFFIX}" if len(files) > 1 else f"model{SUFFIX}"
        with _all_or_nothing(folder / name) as file:
            _write_tensors(file, some, tensor)
        places |= {one.name: name for one in some}
    if len(files) > 1:
        content = {"metadata": {"total_size": sum(one.nbytes for one in listed)}, "weight_map": places}
        with _all_or_nothing(folder / INDEX) as file:
            file.write(json.dumps(content, indent=2, sort_keys=True).encode())


@contextlib.contextmanager
def _all_or_nothing(path: Path) -> Iterator[IO[bytes]]:
    """A file that has its name when all of it is written."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the name might outlive a power cut that the bytes did not
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _write_tensors(file: IO[bytes], listed: Sequence[Listed], tensor: Callable[[Listed], torch.Tensor]) -> None:
    header: dict[str, object] = {_HEADER: {"format": "pt"}}
    end = 0
    for one in listed:
        offsets = [end, end := end + one.nbytes]
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for one in listed:
        made = tensor(one)
        assert (made.dtype, tuple(made.shape)) == (one.dtype, one.shape), one.name
        file.write(made.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
