"""What needs a real model: H4's similarity of layer inputs, and what HybridGen keeps of dense attention (H7, errors).

The text is prose, and decoding is teacher-forced: after each step the token that truly follows is fed, so all settings
see the same tokens. Every output is checked by the float64 oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.reproduction import Check, Claim, at_least, over
from tierloop.runtime.stages import Prefill
from tierloop.runtime.study import Study
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Decoded:
    """What a setting kept of dense attention, with the K and timing that it ended with."""

    mass_recall: float
    topk_recall: float
    output_error: float
    worst_ratio: float
    """Error against the oracle's bound: at most 1."""
    ended: tuple[int, str]


def text_model(study: Study) -> Any:
    """The model of the study, loaded once. Raises ModelError, or ConfigurationError where it is too short."""
    from tierloop.runtime.models import load_model

    model = study.once("model", lambda: load_model(study.model, study.cache))
    need = CONSTANTS.prompt_tokens + 64
    if model.shape.context_length < need:
        raise ConfigurationError(f"{model.name} takes {model.shape.context_length} tokens; {need} are needed")
    return model


@dataclass(frozen=True)
class Prompt:
    """A prefilled text, what goes on after it, and the inputs of every layer at its last positions.

    `fed` are tokens, each followed by the one of `expected`; `inputs` are float32 (positions, hidden), as tensors.
    """

    prefill: Prefill
    fed: tuple[int, ...]
    expected: tuple[int, ...]
    inputs: tuple[Any, ...]


def prompt_of(study: Study, number: int) -> Prompt:
    """Prose by number and seed, prefilled once."""
    return cast("Prompt", study.once(f"prompt {number}", lambda: _prompt(study, number)))


def _prompt(study: Study, number: int) -> Prompt:
    from tierloop.runtime.modules import Modules
    from tierloop.runtime.prefill import generate_dense
    from tierloop.runtime.tasks import SCORED_TOKENS, text_cases

    model = text_model(study)
    length = CONSTANTS.prompt_tokens + SCORED_TOKENS + 1
    case = text_cases(model, "perplexity", length, number + 1, study.seed)[number]
    layers, inputs = study.once("modules", lambda: Modules(model.module)).layers, []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        inputs.append(hidden[0, -CONSTANTS.cosine_queries :].float().clone())

    study.tell()
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        prefill = generate_dense(model, case.prompt, 1).prefill
    finally:
        for hook in hooks:
            hook.remove()
    (turn,) = case.turns
    steps = CONSTANTS.real_steps
    return Prompt(prefill, turn.fed[:steps], turn.expected[:steps], tuple(inputs[: len(layers)]))


def decoded(study: Study, prompt: int, kind: str, k: int | None = None, noise: float = 0.0) -> Decoded:
    """A prompt's text under one kind of scheduler, from `k` (K_min) rows and one layer ahead, with noise."""
    first = k or CONSTANTS.k_min
    name = f"decoded {prompt} {kind} {first} {noise}"
    return cast("Decoded", study.once(name, lambda: _decode(study, prompt, kind, first, noise)))


def _decode(study: Study, prompt: int, kind: str, k: int, noise: float) -> Decoded:
    from tierloop.runtime.compare import find_policy, kv_shape
    from tierloop.runtime.decoder import Decoder
    from tierloop.runtime.engine import Engine
    from tierloop.runtime.modules import Modules
    from tierloop.runtime.oracle import Recorder
    from tierloop.runtime.policy import Request, make

    held = prompt_of(study, prompt)
    model = text_model(study)
    study.tell()
    options = {
        "k": k, "k_min": CONSTANTS.k_min, "k_max": CONSTANTS.prompt_tokens, "gpu_share": CONSTANTS.gpu_share,
        "scheduler": kind, "timing": "prev", "step": CONSTANTS.scheduler_step, "every": 1, "smoothing": 1.0,
        "noise": noise, "seed": study.seed,
    }  # fmt: skip
    shape = kv_shape(model)
    modules = study.once("modules", lambda: Modules(model.module))
    with open_platform(CONSTANTS.real_platform, clock="virtual") as platform:
        engine = Engine(platform, shape)
        policy = make(find_policy("hybridgen"), engine, options)
        platform.site.observers.append(policy.observe)
        recorder = Recorder(shape, modules.scale, range(0, shape.num_layers, CONSTANTS.real_layers))
        decoder = Decoder(modules, engine, policy, recorder=recorder)
        count = len(held.prefill.tokens)
        request = Request("request0", [*held.prefill.tokens, held.fed[0]], count + len(held.fed) + 1)
        request.prompt_tokens = count
        engine.loop.run(decoder.adopt(request, held.prefill))

        async def decode() -> None:
            for target in held.expected:
                await decoder.score([request], [target])

        engine.loop.run(decode())
        history = policy.report()["request0"]
        engine.loop.run(policy.release(request))
        engine.close()
    found = recorder.verdict()
    return Decoded(
        found.mass_recall, found.topk_recall, found.output_error, found.worst_ratio,
        (history["k"][-1], history["timing"][-1]),
    )  # fmt: skip


# -- H4 -----------------------------------------------------------------------------------------------------------


def similarity(study: Study) -> Check:
    """H4: inputs of successive layers are alike, which permits to work one layer ahead."""
    found = [_alike(study, prompt) for prompt in range(CONSTANTS.prompts)]
    cosines = np.array([each[0] for each in found])
    first = CONSTANTS.first_predicted
    means = cosines[:, first:].mean(axis=1)
    of_layer = cosines.mean(axis=0)
    low = {f"{i}→{i + 1}": round(float(c), 3) for i, c in enumerate(of_layer) if c <= CONSTANTS.cosine_claimed}
    late = {pair: c for pair, c in low.items() if int(pair.split("→")[0]) >= first}
    claims = (
        Claim(
            f"Fig. 11: cosine similarity of the inputs of layers i and i + 1 is above {CONSTANTS.cosine_claimed:g} "
            f"after the first layers (mean over layers ≥ {first})",
            at_least(CONSTANTS.cosine_claimed), float(means.mean()), over(*means.tolist()),
            f"{CONSTANTS.prompts} prompts",
        ),
    )  # fmt: skip
    recall, mass, true_mass = (float(np.mean([each[i] for each in found])) for i in (1, 2, 3))
    details = {
        "cosine by layer": [round(float(c), 4) for c in of_layer],
        "exceptions": low,
        f"recall@{CONSTANTS.recall_k} of the predicted query": recall,
        f"attention mass of its {CONSTANTS.recall_k} rows": mass,
        f"attention mass of the true query's {CONSTANTS.recall_k} rows": true_mass,
    }
    reason = (
        f"measured on {study.model}; the paper's models (OPT-6.7B, Qwen2.5-7B, Llama-3.1-8B) are not here. Exceptions "
        f"from layer {first} on: {late or 'none'}; all: {low or 'none'}. Recall@{CONSTANTS.recall_k} of the predicted "
        f"query {recall:.2f}, attention mass {mass:.3f} against {true_mass:.3f} with the true one"
    )
    return Check("H4", "similarity of successive layer inputs", claims, "measured", study.seed, reason, details)


def _alike(study: Study, prompt: int) -> tuple[list[float], float, float, float]:
    """Cosines of layers i and i + 1; recall and attention mass of predicted rows, and attention mass of true ones.

    Means over the prompt's last positions; rows are those that the host would hold, layers those that are predicted.
    """
    import torch

    from tierloop.runtime.modules import Modules

    modules = study.once("modules", lambda: Modules(text_model(study).module))
    held = prompt_of(study, prompt)
    inputs, count = held.inputs, len(held.prefill.tokens)
    cosine = torch.nn.functional.cosine_similarity
    cosines = [float(cosine(a, b, dim=-1).mean()) for a, b in pairwise(inputs)]
    positions = torch.arange(count - len(inputs[0]), count)[None]
    found = []
    with torch.inference_mode():
        for layer in range(CONSTANTS.predict_from + 1, len(inputs)):
            rotary = modules.rotary(inputs[layer][None], positions)
            true, guess = (
                modules.project_queries(layer, hidden[None], rotary)[0].numpy()
                for hidden in (inputs[layer], inputs[layer - 1])
            )
            found.append(_kept(true, guess, held.prefill.keys[layer], modules.scale))
    recall, mass, true_mass = np.array(found).mean(axis=0).tolist()
    return cosines, recall, mass, true_mass


def _kept(true: Float32, guess: Float32, keys: Float32, scale: float) -> tuple[float, float, float]:
    """Of queries (q heads, n, d) and keys (kv heads, tokens, d): recall@K, mass of predicted rows, mass of true rows.

    Rows are chosen for each KV head by the largest logit over its group, among the host's. Mass is the share of softmax
    over these rows, a mean over q heads.
    """
    rows = int(keys.shape[1] * (1 - CONSTANTS.gpu_share))
    group, results = len(true) // len(keys), []
    for head, held in enumerate(keys[:, :rows]):
        mine = slice(head * group, (head + 1) * group)
        logits = scale * np.einsum("gnd,td->gnt", true[mine], held)
        guessed = np.einsum("gnd,td->gnt", guess[mine], held).max(axis=0)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        k = CONSTANTS.recall_k
        wanted, had = (np.argpartition(-of, k, axis=1)[:, :k] for of in (logits.max(axis=0), guessed))
        both = [len(np.intersect1d(a, b, assume_unique=True)) / k for a, b in zip(wanted, had, strict=True)]
        masses = [np.take_along_axis(weights, of[None], axis=2).sum(axis=2).mean() for of in (had, wanted)]
        results.append((float(np.mean(both)), *map(float, masses)))
    recall, mass, true_mass = np.array(results).mean(axis=0).tolist()
    return recall, mass, true_mass
