"""Fit the score trace that ships to what is published: python -m tierloop.tools.fit_score_trace -o FILE.json.

The sources are the curves that the first author of KVDrive published of window sizes (KVDrive-Draw): which share of the
critical set lies in the union of the critical sets of the last w steps, of layers 2, 12, 22 and 31 at windows 1, 5, 10
and 20, and the bytes that are moved per step because they do not, at windows 1, 5, 10, 20 and 40. No other is used.

What they leave open, and what is taken for it: the bytes have no total, so only their course counts, and the other 28
layers miss at window 1 what the four miss on average; the critical set is 6.25 % of the candidates, the share of the
paper's Fig. 3; the other layers, and the heads of all layers, differ so that their misses at window 1 lie as far apart
as those of the four.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, mean

import numpy as np

from tierloop.runtime.score_trace import LayerScores, ScoreTraceModel, ranked_steps
from tierloop.runtime.window_simulation import missed_by_union
from tierloop.tools.output import prepare_file, write_files

RECOVERED = {
    2: (87.35, 94.87, 94.87, 94.87),
    12: (55.37, 100.0, 100.0, 100.0),
    22: (80.47, 94.81, 98.82, 100.0),
    31: (74.12, 100.0, 100.0, 100.0),
}
"""Per cent of the critical set that a window of 1, 5, 10 and 20 steps holds, by layer."""
MOVED_MB = {1: 402, 5: 164, 10: 92, 20: 37, 40: 23}
"""MB per step by window, all layers."""
NUM_LAYERS = 32
SHARE = 1 / 16
SPREAD = 0.4
"""Of layers, and of heads in a layer: see `lines`."""
_CANDIDATES, _HEADS, _MEASURED = 2048, 8, 16


def misses(numbers: LayerScores, windows: Sequence[int], seed: int = 0, heads: int = _HEADS) -> list[float]:
    """The share of the critical set that lies in none of those of the last w steps, for each w."""
    k, longest = round(SHARE * _CANDIDATES), max(windows)
    steps = ranked_steps(ScoreTraceModel((numbers,)), 1, heads, _CANDIDATES, k, longest + _MEASURED, seed)
    missed = missed_by_union(list(steps), k, windows, longest).sum(axis=(1, 2))
    return [float(m) for m in missed / (heads * k * _MEASURED)]


def others_miss() -> dict[int, float]:
    """What the other 28 layers have to miss, so that all together move what is published."""
    known = {w: mean(1 - RECOVERED[layer][i] / 100 for layer in RECOVERED) for i, w in enumerate((1, 5, 10, 20))}
    known[40] = known[20]
    share = len(RECOVERED) / NUM_LAYERS
    return {w: (known[1] * mb / MOVED_MB[1] - share * known[w]) / (1 - share) for w, mb in MOVED_MB.items()}


def fit(wanted: Mapping[int, float], start: LayerScores, rounds: int = 240) -> LayerScores:
    """Numbers that come closest to missing `wanted` by window, by a seeded search; `spread` stays."""
    random = np.random.default_rng(0)
    windows = list(wanted)

    def error(numbers: LayerScores) -> float:
        had = misses(numbers, windows)
        return sum((a - b) ** 2 for a, b in zip(had, wanted.values(), strict=True))

    best, least = start, error(start)
    for number in range(rounds):
        reach = 0.6 * 0.02 ** (number / rounds)
        tried = _moved(best, np.exp(reach * random.standard_normal(6)).tolist())
        now = error(tried)
        if now < least:
            best, least = tried, now
    return best


def _moved(numbers: LayerScores, by: Sequence[float]) -> LayerScores:
    return replace(
        numbers,
        popular=min(numbers.popular * by[0], 1.0),
        lift=min(numbers.lift * by[1], 100.0),
        static=min(numbers.static * by[2], 100.0),
        slow=min(numbers.slow * by[3], 100.0),
        memory_steps=min(max(numbers.memory_steps * by[4], 1.0), 1e4),
        white=min(numbers.white * by[5], 100.0),
    )


def fitted(report: Callable[[str], None]) -> ScoreTraceModel:
    """The model that ships."""
    start = LayerScores(0.12, 3.0, 0.5, 1.0, 8.0, 1.0, spread=SPREAD)
    layers: dict[int, LayerScores] = {}
    for layer, per_cent in RECOVERED.items():
        wanted = {w: 1 - p / 100 for w, p in zip((1, 5, 10, 20), per_cent, strict=True)}
        layers[layer] = _rounded(fit(wanted, start))
        report(_line(f"layer {layer}", layers[layer], wanted))
    # Layers and heads differ independently: one spread of both, while the mean of all is fitted.
    rest = fit(others_miss(), LayerScores(0.0, 0.0, 2.5, 0.8, 2.0, 0.1, spread=SPREAD * 2**0.5))
    report(_line("other layers", rest, others_miss()))
    others = [number for number in range(NUM_LAYERS) if number not in layers]
    for i, number in enumerate(others):
        factor = 2 ** (SPREAD * NormalDist().inv_cdf((i * 0.6180339887 + 0.5) % 1))
        layers[number] = _rounded(replace(rest, slow=rest.slow * factor, white=rest.white * factor, spread=SPREAD))
    model = ScoreTraceModel(
        tuple(layers[number] for number in range(NUM_LAYERS)),
        (
            "rates of recovery and bytes moved by window that the first author of KVDrive published (KVDrive-Draw)",
            "assumed: a critical set of 6.25 %, how layers and heads differ, and that bytes moved have the course but "
            "not the total that is published",
        ),
    )
    for line in lines(model):
        report(line)
    return model


def lines(model: ScoreTraceModel) -> list[str]:
    """How the model's misses compare with what is published."""
    each = [misses(layer, list(MOVED_MB), seed) for seed, layer in enumerate(model.layers)]
    total = [mean(column) for column in zip(*each, strict=True)]
    shown = [f"layers apart at window 1: {max(e[0] for e in each) / min(e[0] for e in each):.2f}"]
    for (window, mb), miss in zip(MOVED_MB.items(), total, strict=True):
        shown.append(f"window {window}: missed {miss:.1%}; of window 1 {miss / total[0]:.3f}, published {mb / 402:.3f}")
    return shown


def _rounded(numbers: LayerScores) -> LayerScores:
    return LayerScores(**{name: float(f"{value:.4g}") for name, value in vars(numbers).items()})


def _line(what: str, numbers: LayerScores, wanted: Mapping[int, float]) -> str:
    had = misses(numbers, list(wanted))
    pairs = ", ".join(f"{w}: {a:.1%} ({b:.1%})" for (w, b), a in zip(wanted.items(), had, strict=True))
    return f"{what}: missed at window {pairs}; {numbers}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print how close it comes and write the file; 0, or 2 where the input was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    try:
        prepare_file(asked.output)
        write_files({asked.output: fitted(print).to_json()})
    except ValueError as error:
        print(f"fit_score_trace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
