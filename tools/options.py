"""Options that several commands share, and how what stands after them is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tierloop.devices.errors import ConfigurationError, nearest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
ModelSource = Annotated[
    str, typer.Option("--model", help="smollm2-135m, a transformers folder with safetensors, or a .gguf file.")
]
PlatformName = Annotated[
    str, typer.Option("--platform", help="A platform's name (see `tierloop list`) or the path of a .toml file.")
]
ClockKind = Annotated[
    str | None, typer.Option("--clock", help="virtual or wall; default: what the platform says.", metavar="CLOCK")
]
Dilation = Annotated[
    int | None, typer.Option("--dilation", min=1, help="σ: times of emulated devices are σ times as long. Wall clock.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a key of the platform file: devices.gpu.capacity=1e9. Repeatable.", metavar="KEY=VALUE"
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", help="UTF-8 text to complete. Default: a needle in real English.")
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the needle prompt, in tokens.")]
Depth = Annotated[
    float, typer.Option("--depth", min=0.0, max=1.0, help="Where the needle lies: 0 at the start, 1 at the end.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Chooses the needle and where the haystack starts.")]
NewTokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens to decode.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="float32, float16, bfloat16, int8 or fp8_e4m3.")]
SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test/--no-self-test", help="First write and read one block through each real tier, where nothing lies."
    ),
]
Cache = Annotated[Path | None, typer.Option("--cache", help="Folder for converted models.")]
Oracle = Annotated[
    bool, typer.Option("--oracle/--no-oracle", help="Check every attention output against a float64 oracle.")
]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", help="An option of a policy: topk-blocks.budget=0.1. Repeatable.", metavar="POLICY.KEY=VALUE"
    ),
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev to this file.")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write a self-contained HTML report to this file.")]


def clock_kind(text: str | None) -> Literal["virtual", "wall"] | None:
    """What `--clock` says. Raises ConfigurationError."""
    if text not in ("virtual", "wall", None):
        raise ConfigurationError(f"--clock {text!r}: {nearest(str(text), ['virtual', 'wall'])}")
    return None if text is None else "virtual" if text == "virtual" else "wall"


PATHS = ("keep", "backing", "path")
"""Keys of platform files that name a file: one that `--set` gives is relative to the working directory."""


def assignments(texts: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=VALUE texts as a mapping; values are TOML, and a text that is no TOML value is taken as a string.

    Raises ConfigurationError.
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigurationError(f"{option} {text!r}: KEY=VALUE is needed")
        if key in found:
            raise ConfigurationError(f"{option} {text!r}: {key} is given twice")
        found[key] = _value(value.strip())
        if option == "--set" and key.rpartition(".")[2] in PATHS and isinstance(found[key], str):
            found[key] = str(Path(found[key]).absolute())
    return found


def policy_options(texts: list[str] | None, policies: list[str]) -> dict[str, dict[str, Any]]:
    """POLICY.KEY=VALUE texts as the options of each policy. Raises ConfigurationError for a policy that is not run."""
    found: dict[str, dict[str, Any]] = {name: {} for name in policies}
    for key, value in assignments(texts, "--option").items():
        policy, dot, option = key.partition(".")
        if not dot or not option:
            raise ConfigurationError(f"--option {key}: POLICY.KEY=VALUE is needed")
        if policy not in found:
            raise ConfigurationError(f"--option {key}: policy {policy!r} is not among {', '.join(policies)}")
        found[policy][option] = value
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
