"""Checkpoints on the hub: small files and tensor headers when one is opened, weight files when they are wanted.

What enters: a hub id and a revision. What leaves: the snapshot folder in the hub's own cache, with the small files in it, and tensor
headers. The folder's name is the commit that every later request is pinned to. It does not know what configs say or what tensors mean.
Nothing that it fetches is code.

Requests of an opening: one to resolve the revision and list the files, two for each of at most five small files, and at most two (a
redirect to storage, then a range of 100 kB) for each safetensors file that is not in the cache. Beyond `EAGER_FILES` of them the names
come from the index, and a file's header only when one of its tensors is asked for. Pickle files have no header: they are fetched whole.
"""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointFileError, DownloadError
from .files import INDEX, TensorInfo, merge, read_header, read_index, tensor_infos
from .hub_errors import explained, failures, reason, timeout, unreachable
from .load_config import LoadConfig
from .pickles import pickled_headers
from .weight_files import INDEXES, WeightFiles, weight_files

if TYPE_CHECKING:
    from ..pair import Checkpoint

SMALL_FILES = ("config.json", "generation_config.json", "hf_quant_config.json", *INDEXES.values())
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
EAGER_FILES = 12  # 2 requests each, so that a pair stays below 50
WORKERS = 8  # as many connections as huggingface_hub itself opens


class HubTensors(Mapping[str, TensorInfo]):
    """Tensor headers of a hub checkpoint by name, in the order of names.

    A header is read from the snapshot folder where its file lies there, else by range request, once. Names, `len` and `in` cost nothing;
    `values` and `items` read all headers side by side.
    """

    def __init__(self, repo: str, weights: WeightFiles, sizes: dict[str, int | None], cache_dir: str | None) -> None:
        """weights: the chosen files. sizes: bytes by name of all files that the repository holds, None where the hub does not say."""
        self.repo, self.weights, self.folder, self.commit = repo, weights, weights.folder, weights.folder.name
        self._sizes, self._cache_dir = sizes, cache_dir
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._files: dict[str, str] = {}  # tensor -> file
        names = [file.name for file in weights.files]
        if weights.pickled:
            self._fetch(names)
            for name, info in pickled_headers(weights).items():
                self._files[name] = info.file.name
                self._headers.setdefault(info.file.name, {})[name] = info
        elif weights.kind and (self.folder / INDEX).is_file():
            self._files = read_index(self.folder / INDEX)
            if len(names) <= EAGER_FILES:
                self._read(names)
        else:
            self._read(names)
            self._files = {name: info.file.name for name, info in merge(self._headers[file] for file in names).items()}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._header(self._files[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def values(self) -> ValuesView[TensorInfo]:
        self._read(self._files.values())
        return super().values()

    def items(self) -> ItemsView[str, TensorInfo]:
        self._read(self._files.values())
        return super().items()

    @property
    def read_whole(self) -> bool:
        """Whether every header is known, so that `values` and `items` ask for nothing."""
        return set(self._files.values()) <= self._headers.keys()

    def download(self, names: Iterable[str] | None, tokenizer: bool) -> None:
        """See `materialize`."""
        files = sorted({self._files[name] for name in (self._files if names is None else names)})
        self._fetch(files, TOKENIZER_FILES if tokenizer else ())
        for file in () if self.weights.pickled else files:
            local = read_header(self.folder / file)
            if self._headers.setdefault(file, local) != local:
                raise CheckpointFileError(f"{self.folder / file} has another header than the hub sent for it; delete it and try again")

    def _fetch(self, files: Iterable[str], patterns: Iterable[str] = ()) -> None:
        """Fetch those of `files` that the folder lacks, and what there is of `patterns`: none of it, when the hub does not answer."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        missing = [file for file in files if not (self.folder / file).exists()]
        wanted = [*map(glob.escape, missing), *patterns]
        if not wanted:
            return
        what = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        try:
            with explained(self.repo, self.commit, what or "the tokenizer"):
                snapshot_download(self.repo, revision=self.commit, allow_patterns=wanted, cache_dir=self._cache_dir)
        except DownloadError as error:
            if missing or not isinstance(error.__cause__, LocalEntryNotFoundError):
                raise
        lost = [file for file in missing if not (self.folder / file).exists()]
        if lost:
            raise DownloadError(f"{lost[0]} of {self.repo} at {self.commit} did not arrive in {self.folder}; try again")

    def _read(self, files: Iterable[str]) -> None:
        unread = sorted(set(files) - self._headers.keys())
        if unread:
            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(self._header, unread))

    def _header(self, file: str) -> dict[str, TensorInfo]:
        if file not in self._headers:
            path = self.folder / file
            infos = read_header(path) if path.exists() else self._remote_header(file)
            lying = [name for name, place in self._files.items() if place == file and name not in infos]
            if lying:
                raise CheckpointFileError(
                    f"{INDEX} of {self.repo} says that {file} holds {lying[0]!r}, but its header does not ({len(lying)} such)",
                    code="index-mismatch",
                )
            self._headers[file] = infos
        return self._headers[file]

    def _remote_header(self, file: str) -> dict[str, TensorInfo]:
        from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with explained(self.repo, self.commit, file):
                parsed = HfApi().parse_safetensors_file_metadata(self.repo, file, revision=self.commit)
                size = self._sizes[file]
                if size is None:
                    size = get_hf_file_metadata(hf_hub_url(self.repo, file, revision=self.commit)).size or 0
            tensors = parsed.tensors.items()
            header = {name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets} for name, t in tensors}
            data = max((t.data_offsets[1] for _, t in tensors), default=0)
            # Offsets count from the end of the header, and data fill the rest of the file.
            return tensor_infos(self.folder / file, header, size - data, size)
        except (SafetensorsParsingError, AttributeError, TypeError, ValueError, LookupError) as error:
            said = f"{file} of {self.repo} at {self.commit} has no readable safetensors header ({error})"
            raise CheckpointFileError(said, code="damaged-file") from error


def open_repository(repo: str, revision: str | None, load_config: LoadConfig | None = None) -> tuple[Path, HubTensors]:
    """Fetch the small files and tensor headers of a hub repository, and no weights unless they are pickled.

    Args:
        load_config: which files count as weights (load_format, ignore_patterns), and the cache (download_dir; None is huggingface_hub's).

    Returns:
        The snapshot folder, named by the commit, and the tensor headers. Where the hub cannot be reached, both from its cache, with a
        warning unless HF_HUB_OFFLINE asked for it.

    Raises:
        ConfigError: `repo` is no hub id.
        CheckpointFileError: no weights, a damaged header, or an index that names a file outside or a tensor that its file lacks.
        DownloadError: not found, gated, timed out, or neither reachable nor cached.
    """
    import huggingface_hub as hub

    config = load_config or LoadConfig()
    cache_dir = config.download_dir
    with explained(repo, revision, "the list of its files"):
        try:
            sizes, commit = _list_files(repo, revision)
        except failures() as error:
            if not unreachable(error):
                raise
            return _open_cached(repo, revision, config, error)
    with explained(repo, revision, "config.json"):
        # Asked for by revision, so that the cache learns which commit it means, for later use without the hub.
        folder = Path(hub.hf_hub_download(repo, "config.json", revision=revision, cache_dir=cache_dir)).parent
        if folder.name != commit:  # the branch moved between the two requests
            sizes, commit = _list_files(repo, folder.name)
    for name in SMALL_FILES[1:]:
        if name in sizes:
            with explained(repo, commit, name):
                hub.hf_hub_download(repo, name, revision=commit, cache_dir=cache_dir)
    names = [name for name in sizes if not any(fnmatch(name, pattern) for pattern in config.ignore_patterns)]
    return folder, HubTensors(repo, weight_files(folder, config.load_format, names), sizes, cache_dir)


def materialize(checkpoint: Checkpoint, names: Iterable[str] | None = None, *, tokenizer: bool = False) -> None:
    """See to it that the files behind `checkpoint.tensors` lie in `checkpoint.path`; nothing to do for a local folder.

    Only what the cache lacks is fetched, at the commit that the checkpoint was opened at, and only whole files appear.

    Args:
        names: tensors that will be read, so that other weight files may stay away; None is all of them.
        tokenizer: also the tokenizer's files, where the repository has any.

    Raises:
        DownloadError: a file that cannot be fetched.
        CheckpointFileError: a file that is not what its header said.
    """
    if isinstance(checkpoint.tensors, HubTensors):
        checkpoint.tensors.download(names, tokenizer)


def same_cache(folder: Path, load_config: LoadConfig) -> bool:
    """Whether snapshot `folder` lies in the cache that `load_config` names."""
    from huggingface_hub import constants

    return Path(load_config.download_dir or constants.HF_HUB_CACHE).expanduser().resolve() in folder.resolve().parents


def _list_files(repo: str, revision: str | None) -> tuple[dict[str, int | None], str]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout())
    if not re.fullmatch("[0-9a-f]{40}", info.sha or ""):
        raise DownloadError(f"the hub answered for {repo!r} with commit {info.sha!r}, which is none; check HF_ENDPOINT")
    return {file.rfilename: file.size for file in info.siblings or ()}, str(info.sha)


def _open_cached(repo: str, revision: str | None, config: LoadConfig, error: Exception) -> tuple[Path, HubTensors]:
    """`open_repository` from the cache alone. `error`: why the hub could not be asked."""
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        path = hub.hf_hub_download(repo, "config.json", revision=revision, cache_dir=config.download_dir, local_files_only=True)
    except LocalEntryNotFoundError:
        raise error from None
    folder = Path(path).parent
    if not isinstance(error, OfflineModeIsEnabled):
        warnings.warn(f"the hub cannot be reached ({reason(error)}); {repo} is opened from the cache, at {folder.name}", stacklevel=5)
    sizes: dict[str, int | None] = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    if INDEX in sizes:  # what it names may have to be asked for, which then says why it cannot be had
        sizes = dict.fromkeys(read_index(folder / INDEX).values()) | sizes
    try:
        weights = weight_files(folder, config.load_format, sizes)
    except CheckpointFileError:
        raise error from None
    return folder, HubTensors(repo, weights, sizes, config.download_dir)
