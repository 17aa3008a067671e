"""Fit a locality model to a real model: python -m tierloop.tools.fit_locality -o FILE.json [RECORD.npz …].

With records (`tierloop run --record-selection`) it is fitted to those. Without, prompts are decoded densely on the demo
platform, and what is recorded is which rows of the prompt an ideal selector would pick: for each layer and KV head the
rows whose largest logit over the q heads of the group is largest, `SHARE` of them. The prompts are the needles of
`tierloop run` with the given seeds and lengths. SmolLM2-135M, as it ships:

    python -m tierloop.tools.fit_locality -o runtime/localities/smollm2-135m.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decisions import Question
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.locality import fit_locality
from tierloop.runtime.oracle import Recorder
from tierloop.runtime.policies.cpu_attention import CpuAttention
from tierloop.runtime.policy import Request
from tierloop.runtime.selection import Origin, RecordedSelection, SelectionRecord
from tierloop.runtime.stages import Prefill
from tierloop.tools.output import prepare_file, write_files

Float32 = NDArray[np.float32]

SHARE = 0.05
"""Of the prompt's rows that an ideal selector picks: the budgets that the papers report lie around it."""
PROMPTS = ((1024, 1), (2048, 2), (2048, 3))
"""Tokens and seed of each prompt; what is tested with others is predicted and not fitted."""
STEPS = 24


class IdealRows(Recorder):
    """Records which rows of the prompt have the largest logits, as answers to questions of one list per KV head."""

    def __init__(self, shape: KVShape, scale: float, origin: Origin, k: int) -> None:
        super().__init__(shape, scale)
        self.selection = RecordedSelection(origin)
        self._k = k
        self._shape = shape
        self._prompt: tuple[Float32, ...] = ()

    def admitted(self, name: str, prefill: Prefill, scales: Float32 | None = None) -> None:
        """The prompt's keys, (kv heads, tokens, head_dim) per layer."""
        self._prompt = prefill.keys

    def rows(self, name: str, layer: int, keys: Float32, values: Float32) -> None:
        """New rows are not candidates."""

    def attended(self, name: str, layer: int, positions: NDArray[np.int64], queries: Float32, *_: Any) -> None:
        """Queries (1, q heads, head_dim) of a step: pick, and keep."""
        keys = self._prompt[layer]
        grouped = queries[-1].reshape(self._shape.num_kv_heads, self._shape.group, -1)
        logits = np.einsum("hgd,htd->hgt", grouped, keys).max(axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")[:, : self._k].astype(np.int64)
        lists = np.full(len(keys), keys.shape[1], dtype=np.int64)
        step = int(positions[-1])
        question = Question("ideal rows", layer, (name,), step, lists, np.zeros_like(lists), 1, self._k)
        self.selection.answer(question, order)


def record_ideal_rows(model: Any, prompt: Sequence[int], steps: int, seed: int = 0) -> SelectionRecord:
    """Decode a prompt densely and record what an ideal selector would pick of its rows in every step."""
    from tierloop.runtime.compare import kv_shape
    from tierloop.runtime.model_shapes import ShapeStages
    from tierloop.runtime.modules import Modules
    from tierloop.runtime.prefill import generate_dense

    shape, modules = kv_shape(model), Modules(model.module)
    k = max(round(SHARE * len(prompt)), 1)
    origin = Origin(
        model.name,
        model.fingerprint,
        shape,
        f"ideal rows, k = {k}",
        {},
        (len(prompt),),
        steps,
        seed,
        ShapeStages.of(modules),
    )
    dense = generate_dense(model, prompt, 1)
    with open_platform("demo", clock="virtual") as platform:
        engine = Engine(platform, shape)
        recorder = IdealRows(shape, modules.scale, origin, k)
        decoder = Decoder(modules, engine, CpuAttention(engine), recorder=recorder)
        request = Request("request", [*prompt, dense.prefill.first_token], len(prompt) + steps + 1, len(prompt))
        engine.loop.run(decoder.adopt(request, dense.prefill))

        async def decode() -> None:
            for _ in range(steps):
                await decoder.step([request])

        engine.loop.run(decode())
        engine.close()
    return recorder.selection.record


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print the parameters and write the file; 0, or 2 where the input was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args(arguments)
    try:
        prepare_file(asked.output)
        if asked.records:
            records = [SelectionRecord.load(path) for path in asked.records]
        else:
            records = [_needle(asked.model, tokens, seed, asked.steps) for tokens, seed in PROMPTS]
        model = fit_locality(records)
        write_files({asked.output: model.to_json()})
    except ValueError as error:
        print(f"fit_locality: {error}", file=sys.stderr)
        return 2
    print("\n".join(model.lines()))
    return 0


def _needle(name: str, tokens: int, seed: int, steps: int) -> SelectionRecord:
    from tierloop.runtime.models import load_model
    from tierloop.runtime.workloads import needle_prompt

    if steps < 2:
        raise ConfigurationError(f"--steps {steps}: locality needs at least 2")
    model = load_model(name)
    prompt = needle_prompt(model, tokens, seed=seed, new_tokens=steps + 1).token_ids
    record = record_ideal_rows(model, prompt, steps, seed)
    return replace(record, origin=replace(record.origin, policy=f"{record.origin.policy} (needle)"))


if __name__ == "__main__":
    sys.exit(main())
