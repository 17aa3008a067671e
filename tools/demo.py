"""`tierloop demo`: the main job on three platforms, checked, with a report, a trace and the numbers as JSON.

- `demo`, virtual clock, every device emulated: all policies. All-GPU does not fit there and has to be refused; it runs
  on a copy whose GPU memory is raised, and is shown as such.
- `demo-wall`: the same machine dilated by what this host can keep, on the wall clock, paced.
- `demo-host`: the emulated host memory replaced by the real cpu device, not dilated.

The prompt is prefilled once, and what plain transformers says to it is what the exact policies have to say. The last
two decode fewer tokens, since they take real time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierloop.devices.platform import Platform
from tierloop.runtime.results import Comparison
from tierloop.runtime.trace import TraceRecorder
from tierloop.tools import options
from tierloop.tools.comparing import Asked, show, verdict
from tierloop.tools.console import progress, results, say
from tierloop.tools.output import prepare_folder, to_json, write_files
from tierloop.tools.report import report

if TYPE_CHECKING:
    from tierloop.runtime.compare import PolicyRequest

POLICIES = ("stream-offload", "cpu-attention", "split-all", "topk-blocks")
SYSTEMS = {
    "hybridgen": {},
    "kvdrive": {"dram_share": 0.2},
    "nelssa": {"threshold_tokens": 1024, "budget": 0.1},
}
RAISED = "demo-large-gpu"
RAISED_MEMORY = {"devices.gpu.capacity": 1 << 30}


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html, trace.json and demo.json.")] = Path("out"),
    model: options.ModelSource = "smollm2-135m",
    prompt_tokens: options.PromptTokens = 4096,
    seed: options.Seed = 0,
    tokens: options.NewTokens = 16,
    wall_tokens: Annotated[int, typer.Option("--wall-tokens", min=1, help="Tokens on the wall-clock platforms.")] = 4,
    cache: options.Cache = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode a long prompt of a real model with its KV cache spread over six kinds of memory, under every policy.

    Exit codes: 0 good, 1 a check failed, 2 the input was wrong, 3 a wall-clock run was invalid.
    """
    from tierloop.runtime.compare import PolicyRequest

    everywhere = [PolicyRequest(name) for name in POLICIES]
    systems = [PolicyRequest(name, dict(given)) for name, given in SYSTEMS.items()]
    gpu_alone = [PolicyRequest("all-gpu"), PolicyRequest("all-gpu", platform=RAISED, label="all-gpu, raised memory")]
    asked = Asked(model=model, platform="demo", prompt_tokens=prompt_tokens, seed=seed, tokens=tokens, cache=cache)
    stages = [
        (asked, [*gpu_alone, *everywhere, *systems]),
        (replace(asked, platform="demo-wall", tokens=min(wall_tokens, tokens)), everywhere),
        (replace(asked, platform="demo-host", tokens=min(wall_tokens, tokens)), everywhere),
    ]
    prepare_folder(out)
    trace = TraceRecorder()
    with results(as_json) as shown:
        comparisons = decode(stages, trace)
        failed = failures(comparisons)
        main, *others = comparisons
        contents = {
            **main.to_json(),
            "failures": failed,
            "others": [comparison.to_json() for comparison in others],
        }
        subtitle = (
            f"{main.model} decodes a prompt of {main.prompt_tokens:,} tokens, its KV cache spread over the memories of "
            "a GPU, a host, a remote NUMA node, a CXL card, an NVMe drive and a near-memory processor."
        )
        write_files(
            {
                out / "demo.json": to_json(contents),
                out / "trace.json": trace.to_json(),
                out / "report.html": report("tierloop demo", subtitle, comparisons, failed),
            }
        )
        shown.json(contents)
        for comparison in comparisons:
            show(shown, comparison)
    say(f"wrote {out / 'report.html'}, {out / 'trace.json'} (open it in ui.perfetto.dev) and {out / 'demo.json'}")
    verdict(failed, comparisons)


def decode(stages: Sequence[tuple[Asked, Sequence[PolicyRequest]]], trace: TraceRecorder) -> list[Comparison]:
    """Run every stage on one model, prompt and prefill."""
    from tierloop.runtime.compare import compare
    from tierloop.runtime.prefill import generate_dense

    for asked, _ in stages:
        asked.check()
        asked.open().close()
    first = stages[0][0]
    say(f"loading {first.model}")
    model, workload = first.load()
    comparisons = []
    with progress() as shown:
        dense = generate_dense(
            model, workload.token_ids, first.tokens, lambda done: shown("plain transformers", done, first.tokens)
        )
        for asked, policies in stages:
            opened: list[Platform] = []

            def fresh(policy: PolicyRequest, asked: Asked = asked, opened: list[Platform] = opened) -> Platform:
                platform = asked.open(RAISED_MEMORY if policy.platform == RAISED else None)
                if policy.platform is not None:
                    platform.name = policy.platform
                else:
                    opened.append(platform)
                return platform

            def advance(stage: str, done: int, total: int, name: str = asked.platform) -> None:
                shown(f"{name}: {stage}", done, total)

            comparison = compare(
                model,
                workload,
                fresh,
                policies,
                num_tokens=asked.tokens,
                kv_dtype=asked.kv_dtype,
                dense=dense,
                progress=advance,
                trace=trace,
            )
            comparisons.append(asked.described(comparison, opened[-1], policies))
    return comparisons


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """Every check that failed: those of each comparison, answers that are missing, and a refusal that did not come.

    Where the shorter runs are concerned the fact must be answered if plain transformers answered it in as many tokens.
    """
    failed = []
    for number, comparison in enumerate(comparisons):
        where = comparison.platform
        failed += [f"{where}: {failure}" for failure in comparison.failures]
        answerable = comparison.answer.lower() in comparison.dense_text.lower()
        if number == 0 and not answerable:
            failed.append(f"{where}: plain transformers does not give the answer {comparison.answer!r}")
        for result in comparison.policies:
            if result.refused is None and answerable and not result.answered:
                failed.append(f"{where}: {result.policy}: the answer {comparison.answer!r} is not in its text")
            failed += _unexpected(where, result.policy, result.refused)
    return failed


def _unexpected(where: str, policy: str, refused: str | None) -> list[str]:
    """All-GPU has to be refused on the small GPU, and nothing else anywhere."""
    if policy == "all-gpu" and refused is None:
        return [f"{where}: all-gpu ran although its cache does not fit the GPU"]
    if policy != "all-gpu" and refused is not None:
        return [f"{where}: {policy} was refused: {refused}"]
    return []
