"""tierloop: long-context LLM attention over tiered memory, on real or emulated devices.

The short way in: `load_model`, `needle_prompt` or `text_prompt`, `compare`, and `open_platform` for work of your own.
Everything else is imported from where it lives (`tierloop.devices`, `tierloop.runtime`, …). Importing this package
imports nothing heavy; torch comes with the first model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.models import Model, load_model
    from tierloop.runtime.results import Comparison
    from tierloop.runtime.workloads import Workload, needle_prompt, text_prompt

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "load_model", "needle_prompt", "open_platform", "text_prompt"]

_HOME = {
    "load_model": "tierloop.runtime.models",
    "needle_prompt": "tierloop.runtime.workloads",
    "text_prompt": "tierloop.runtime.workloads",
    "open_platform": "tierloop.devices.registry",
}


def compare(
    model: Model,
    workload: Workload,
    platform: str | Path = "demo",
    policies: Sequence[str | PolicyRequest] = ("split-all",),
    *,
    num_tokens: int = 16,
    **options: Any,
) -> Comparison:
    """Decode one workload under several policies, each on a fresh platform, and check every answer.

    `platform` is a name or the path of a platform file. `options` go to `tierloop.runtime.compare.compare`. A policy
    that does not fit is reported as refused. Raises ConfigurationError, WorkloadError or a DeviceError.
    """
    from tierloop.devices.registry import open_platform
    from tierloop.runtime import compare as runtime

    requests = [runtime.PolicyRequest(policy) if isinstance(policy, str) else policy for policy in policies]
    return runtime.compare(
        model, workload, lambda _: open_platform(platform), requests, num_tokens=num_tokens, **options
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tierloop' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
