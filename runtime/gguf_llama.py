"""A GGUF file of the Llama architecture, written as a folder in the transformers format.

Who calls this: `runtime.models`. What must hold: the folder means exactly what the file means, in float32; whatever
cannot be carried over (another architecture, scaled rotary positions, experts, an unknown tensor, a tokenizer whose
rule for cutting text is not known) is a `GgufError`, never a guess.

Own code where transformers reads GGUF too: its reader does not know that `smollm` cuts every digit apart, needs
accelerate, and takes 30 s for SmolLM2-135M, against 4 s here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tierloop.runtime.gguf_file import GgufError, GgufFile, read_tensor

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

T = TypeVar("T", int, float, str, bool, list[Any])

CONTROL, USER_DEFINED = 3, 4  # the token types that are found whole in a text
cuts_digits = {"smollm": True, "gpt-2": False}  # tokenizer.ggml.pre -> is every digit cut apart?
MAX_LAYERS = 1024

name_in_layer = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_llama(gguf: GgufFile, folder: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights (`model.safetensors`) into `folder`."""
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    config = _config(gguf)
    weights = _weights(gguf, config)
    # one metadata key only: safetensors writes several in no fixed order, and the file's hash is the fingerprint
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _tokenizer(gguf, config).save_pretrained(folder)


def _stated(gguf: GgufFile, key: str, kind: type[T], default: T | None = None) -> T:
    value = gguf.metadata.get(key, default)
    if value is None:
        raise GgufError(f"does not state {key}")
    if type(value) is not kind:  # not isinstance: a bool is no number here
        raise GgufError(f"states {key} = {str(value)[:40]!r}, {kind.__name__} is needed")
    return value


def _positive(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = _stated(gguf, key, int, default)
    if not 1 <= value < 2**31:
        raise GgufError(f"states {key} = {value}, a positive 32-bit number is needed")
    return value


def _config(gguf: GgufFile) -> "LlamaConfig":
    from transformers import LlamaConfig

    architecture = _stated(gguf, "general.architecture", str)
    if architecture != "llama":
        raise GgufError(f"has the architecture {architecture!r}; only 'llama' can be converted")
    for key in ("llama.expert_count", "split.count"):
        if _stated(gguf, key, int, 0) > 0:
            raise GgufError(f"states {key}; experts and files in several parts cannot be converted")
    if _stated(gguf, "llama.rope.scaling.type", str, "none") != "none":
        raise GgufError("has scaled rotary positions, which cannot be converted")

    num_layers = _positive(gguf, "llama.block_count")
    hidden = _positive(gguf, "llama.embedding_length")
    num_q_heads = _positive(gguf, "llama.attention.head_count")
    num_kv_heads = _positive(gguf, "llama.attention.head_count_kv", num_q_heads)
    head_dim = _positive(gguf, "llama.attention.key_length", max(1, hidden // num_q_heads))
    if num_layers > MAX_LAYERS:
        raise GgufError(f"states {num_layers} layers, at most {MAX_LAYERS} are allowed")
    if num_q_heads % num_kv_heads or head_dim % 2:
        raise GgufError(f"states {num_q_heads} query heads, {num_kv_heads} KV heads and a head dim of {head_dim}")
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if _positive(gguf, key, head_dim) != head_dim:
            raise GgufError(f"states {key} = {gguf.metadata[key]}, the head dim {head_dim} is needed")
    if "token_embd.weight" not in gguf.tensors:
        raise GgufError("has no tensor 'token_embd.weight'")
    vocab = gguf.tensors["token_embd.weight"].shape[0]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_positive(gguf, "llama.feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_positive(gguf, "llama.context_length"),
        # stored as float32: 1e-5 comes back as 9.999999747378752e-06
        rms_norm_eps=float(str(np.float32(_stated(gguf, "llama.attention.layer_norm_rms_epsilon", float)))),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _stated(gguf, "llama.rope.freq_base", float, 10000.0),
        },
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=_token_id(gguf, "bos", vocab),
        eos_token_id=_token_id(gguf, "eos", vocab),
        pad_token_id=_token_id(gguf, "padding", vocab),
    )


def _token_id(gguf: GgufFile, name: str, vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return None
    token_id = _stated(gguf, key, int)
    if not 0 <= token_id < vocab:
        raise GgufError(f"states {key} = {token_id}, the vocabulary has {vocab} tokens")
    return token_id


def _weights(gguf: GgufFile, config: "LlamaConfig") -> dict[str, np.ndarray]:
    """Every tensor under the name that transformers gives it; each is there once, in the shape of `config`."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    num_q_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert num_kv_heads is not None
    assert head_dim is not None
    shape_in_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (num_q_heads * head_dim, hidden),
        "attn_k": (num_kv_heads * head_dim, hidden),
        "attn_v": (num_kv_heads * head_dim, hidden),
        "attn_output": (hidden, num_q_heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config.vocab_size, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        wanted["output.weight"] = ("lm_head.weight", (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        for name, shape in shape_in_layer.items():
            wanted[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{name_in_layer[name]}.weight", shape)
    if odd := sorted(wanted.keys() ^ gguf.tensors.keys()):
        raise GgufError(f"misses or adds tensors to what its metadata state: {odd[:4]}")

    weights = {}
    for name, (target, shape) in wanted.items():
        if gguf.tensors[name].shape != shape:
            raise GgufError(f"has the tensor {name!r} of shape {gguf.tensors[name].shape}, {shape} is needed")
        values = read_tensor(gguf, name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # GGUF keeps the two halves of a rotary pair side by side, transformers keeps them head_dim / 2 apart
            values = values.reshape(-1, head_dim // 2, 2, hidden).swapaxes(1, 2).reshape(shape)
        weights[target] = np.ascontiguousarray(values, dtype=np.float32)
    return weights


def _tokenizer(gguf: GgufFile, config: "LlamaConfig") -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = _stated(gguf, "tokenizer.ggml.model", str)
    cut = _stated(gguf, "tokenizer.ggml.pre", str)
    if kind != "gpt2" or cut not in cuts_digits:
        raise GgufError(
            f"has a tokenizer of kind {kind!r}, cut {cut!r}; 'gpt2' cut {' or '.join(cuts_digits)} can be converted"
        )
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if _stated(gguf, f"tokenizer.ggml.{key}", bool, False):
            raise GgufError(f"states tokenizer.ggml.{key}, which cannot be converted")
    tokens = _stated(gguf, "tokenizer.ggml.tokens", list)
    types = _stated(gguf, "tokenizer.ggml.token_type", list)
    merges = [str(merge).partition(" ")[::2] for merge in _stated(gguf, "tokenizer.ggml.merges", list)]
    if not len(set(tokens)) == len(tokens) == len(types) <= config.vocab_size:
        raise GgufError(
            f"has {len(tokens)} tokens, {len(set(tokens))} of them different, {len(types)} token types and "
            f"{config.vocab_size} embeddings"
        )
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises Exception itself
        raise GgufError(f"has a vocabulary and merges that do not fit: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cuts_digits[cut] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    whole = [
        AddedToken(token, normalized=False, special=token_type == CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token_id := _token_id(gguf, key, len(tokens))) is not None:
            special[f"{name}_token"] = tokens[token_id]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        chat_template=gguf.metadata.get("tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **special,
    )
